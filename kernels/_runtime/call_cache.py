"""A cache of launch plans: a launcher call with a known signature is repeated without its Python.

The actions of a launcher are checks, views, the choice of a tile, allocations and launches. They
follow from its key: dtype, shape, strides, device and alignment of its tensors, and its other
arguments. The second call with a key is traced (`_runtime/call_trace.py`), and its trace becomes a
plan (`_runtime/plan_compiler.py`), which is all that further calls run. A captured CUDA graph does
the same for a GPU; here each call has new addresses. vLLM's and tritonbench's developers report the
gain.

A launcher does not know that it is cached, and is complete without the cache:

    softmax_fwd = cached_launch(softmax_fwd)

TILEWRIGHT_LAUNCH_CACHE=0, read when this module is imported, turns the cache off, and `uncached()`
turns it off for a while. The guard of `_runtime/launch_guard.py` stands around each call, cached or
not.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator

import torch

from . import internals
from .call_trace import suspensions, traced
from .internals import forward_mode
from .launch_guard import Launcher, on_device_of
from .plan_compiler import ALIGNMENT, PlanCompiler, UnplannedError

MODE = "TILEWRIGHT_LAUNCH_CACHE"
# Shapes are part of a key; a program that sees ever new ones starts anew.
MOST_PLANS = 4096
# A first call may set up what later ones find. A key is given up after so many calls with a trace
# that makes no plan.
MOST_TRACES = 3
# From here on a positive float is as any other to a launcher.
NORMAL = 2.0**-126

# Triton keeps here who watches launches; each is empty as a rule.
_changed, _entered, _left = internals.changed, internals.entered, internals.left

if os.environ.get(MODE) == "0":
    suspensions.append(MODE)

# Names that begin with "_" belong to the look-up; "__" begins the address or number of an argument.
LOOK_UP = """
def factory(_launcher, _function, _plans, _compiling):
    def cached({names}):
        if _compiling():
            return _function({names})
        try:
            {steps}
            _key = ({key},)
        except AttributeError:
            _launcher.accepted(({names},))
            raise
        _plan = _plans.get(_key)
        if _plan is None or suspensions or _changed or _entered or _left:
            return _record(_launcher, _key, {names})
        if forward_mode._current_level >= 0:
            return _record(_launcher, _key, {names})
        return _plan({names}, {addresses})
    return cached
"""


class CachedLauncher(Launcher):
    """A launcher with its plans by key. seen: how many calls with a key had no plan, by key."""

    def __init__(self, function: Callable):
        super().__init__(function)
        self.handed: tuple[str, ...] = ()
        self.plans: dict[tuple, Callable] = {}
        self.seen: dict[tuple, int] = {}


def cached_launch(function: Callable) -> Callable:
    """A launcher whose known calls are made by plan; see the module.

    function: annotated as `Launcher` has it. An `int | torch.Tensor` goes to a parameter of its
    name that the kernel's `do_not_specialize` names. A `float` goes to a parameter of its name, and
    nothing but its `kind_of` decides what is launched. All other arguments can be hashed. Checks
    and choices follow from the key alone. It returns tensors that it allocated or was given, or
    None in the place of one: a single one or a tuple. A launcher that computes anything by PyTorch
    is called as it stands. The result raises TypeError and ValueError as `Launcher.accepted` does.
    """
    launcher = CachedLauncher(function)
    key, steps, handed = [], [], []
    for name, kind in launcher.kinds.items():
        # A view to be read with the other sign can be had of a tensor that is no run of memory: a
        # part of complex numbers, or a single number.
        layout = f"{name}.is_contiguous() or ({name}.stride(), {name}.is_neg())"
        # A tensor without an address has a key of its own, for which there is no plan.
        place = f"{name}.get_device(), __{name} % {ALIGNMENT} if __{name} else -1"
        known = f"{name}.dtype, {name}.shape or {name}.is_neg(), {layout}, {place}"
        if kind is torch.Tensor:
            steps.append(f"__{name} = {name}.data_ptr()")
            key.append(known)
            handed.append(name)
        elif kind == torch.Tensor | None:
            steps.append(f"__{name} = 0 if {name} is None else {name}.data_ptr()")
            key.append(f"{name} if {name} is None else ({known})")
            handed.append(name)
        elif kind == int | torch.Tensor:
            steps.append(f"__{name}_kind, __{name} = unspecialized_key({name})")
            key.append(f"__{name}_kind")
            handed.append(name)
        elif kind is float:
            key.append(f"{name} >= NORMAL or kind_of({name})")
        else:
            key.append(name)
    launcher.handed = tuple(handed)
    text = LOOK_UP.format(
        names=", ".join(launcher.kinds),
        steps="\n            ".join(steps),
        key=", ".join(key),
        addresses=", ".join(f"__{name}" for name in handed),
    )
    space: dict[str, Callable] = {}
    exec(text, globals(), space)
    compiling = torch.compiler.is_dynamo_compiling
    cached = space["factory"](launcher, function, launcher.plans, compiling)
    cached.__defaults__ = function.__defaults__
    cached.launcher = launcher
    return functools.update_wrapper(cached, function)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Within the body each call, of any thread, runs its launcher, and none is traced.

    For those who watch or replace what a launcher does: a recorder of launches, a tuner.
    """
    token = object()
    suspensions.append(token)
    try:
        yield
    finally:
        suspensions.remove(token)


def unspecialized_key(value: int | torch.Tensor) -> tuple[object, int]:
    """Return the key of a value that no kernel is specialized for, and the value to pass on."""
    if isinstance(value, torch.Tensor):
        address = value.data_ptr()
        return (value.dtype, value.get_device(), address % ALIGNMENT if address else -1), address
    # A bool is a number of one bit to Triton, whose kernel would serve all integers.
    return width(value) if type(value) is int else (type(value), width(value)), value


def width(value: int) -> int:
    """Which of int32, int64 and uint64 Triton takes for a number."""
    bits = (value if value >= 0 else ~value).bit_length()
    return (bits > 31) + (bits > 63)


def kind_of(value: float) -> object:
    """All that a launcher may decide by of a float: its sign, whether it is zero, below the normal
    numbers of float32, or NaN. Calls whose floats are of one kind share a plan."""
    if value != value:
        return "nan"
    if value == 0:
        # Zeros of either sign are equal, and are not the same.
        return repr(value)
    if value < 0:
        return "negative"
    return "positive" if value >= NORMAL else "small"


def _record(launcher: CachedLauncher, key: tuple, *arguments):
    """Call a launcher; its second call with a key is traced, and leaves a plan if it can."""
    given = launcher.accepted(arguments)
    with on_device_of(given):
        seen = launcher.seen.get(key, 0)
        if seen > MOST_TRACES or _suspended() or not _traceable(launcher, arguments, given):
            return launcher.function(*given.values())
        if seen == 0:
            result, trace = launcher.function(*given.values()), None
        else:
            result, trace = traced(launcher.function, tuple(given.values()))
        if seen == 0 or trace is not None:
            _put(launcher.seen, key, seen + 1)
        if trace is not None:
            with contextlib.suppress(UnplannedError):
                compiler = PlanCompiler(launcher, launcher.handed, given, trace)
                _put(launcher.plans, key, compiler.plan(result))
        return result


def _put(known: dict, key: tuple, value: object) -> None:
    if key not in known and len(known) >= MOST_PLANS:
        known.clear()
    known[key] = value


def _suspended() -> bool:
    """Whether no call may be made by plan or traced now: somebody asked for it, another call is
    traced, launches are watched, or tangents may be."""
    return bool(suspensions or internals.watched() or forward_mode._current_level >= 0)


def _traceable(launcher: Launcher, arguments: tuple, given: dict[str, object]) -> bool:
    """Whether kernels are compiled ones, the addresses of these tensors tell them apart, and the
    key says all else of them."""
    tensors = [
        (value, taken)
        for value, taken in zip(arguments, given.values(), strict=True)
        if isinstance(value, torch.Tensor)
    ]
    addresses = {taken.data_ptr() for _, taken in tensors}
    return (
        len(addresses) == len(tensors)
        and bool(addresses)
        and 0 not in addresses
        and len({taken.get_device() for _, taken in tensors}) == 1
        and all(value is taken for value, taken in tensors)
        # A number by itself may be the next time one that is to be read with the other sign.
        and not any(taken.dim() and taken.numel() == 1 for _, taken in tensors)
        and (tensors[0][1].is_cuda or not launcher.is_interpreted())
    )

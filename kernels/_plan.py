"""Calls that are known, made again without the Python that decides them.

What a launcher does (checks, views, the choice of a tile, allocations, launches) follows from
dtype, shape, strides, device and alignment of its tensors and from its other arguments. For each
such key `planned` writes down what the launcher did, and does that alone when the key comes again.
It is what a captured CUDA graph does for a GPU, with new addresses in each call. A plan is a
function that is written for the call, as Triton writes the binding of a kernel's arguments.

Nothing is planned that is not fully written down: each address must be that of an argument, or of a
tensor that came from `empty` or `shared` here, no argument may lie where another does, each launch
must be one that `kernels._launch` knows, and PyTorch itself may have written to nothing.

Here arguments are refused that no kernel can take: what is no tensor, a tensor without an address,
one with a tangent of forward-mode differentiation. None of them has a plan, so each is looked at.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from triton.runtime.jit import JITFunction

from kernels import _internals as internals
from kernels._checks import no_tangent, placed, shown
from kernels._internals import forward_mode

# Shapes are part of a key; a program that sees ever new ones starts anew.
MOST_PLANS = 4096
ALIGNMENT = 16

# From here on a positive float is as any other to a launcher.
NORMAL = 2.0**-126

_run = JITFunction.run
# All threads' tapes, to ask at once whether there is any, and the one of this thread.
_tapes: list["Tape"] = []
# Where Triton notes who watches launches; each is empty as a rule.
_changed, _entered, _left = internals.changed, internals.entered, internals.left
_own = threading.local()

# What begins with "_" is its own, with "__" what an argument is handed over as.
LOOK_UP = """
def factory(_launcher, _function, _plans, _traced):
    def planned({names}):
        if _traced():
            return _function({names})
        try:
            {steps}
            _key = ({key},)
        except AttributeError:
            _refuse(_launcher, {names})
            raise
        _plan = _plans.get(_key)
        if _plan is None or _tapes or _changed or _entered or _left:
            return _noted(_launcher, _key, {names})
        if forward_mode._current_level >= 0 or JITFunction.run is not _run:
            return _noted(_launcher, _key, {names})
        return _plan({names}, {addresses})
    return planned
"""
PLAN = """
def factory(_function, _stream, _current_device, {constants}):
    def plan({names}, {addresses}):
        if {stale}:
            return _function({names})
        _new = {new} if torch.empty_strided is _empty_strided else _strided
        _on = _stream({device})
        {steps}
        return {result}
    return plan
"""


def _strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


# What the compiler of PyTorch allocates with, in half of the time; not where another function has
# been put in the place of PyTorch's.
_empty_strided = torch.empty_strided
_quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _strided)


class Tape:
    """What one call of a launcher does; other threads have tapes of their own.

    fresh: the tensors that it allocated, each with its version. shared: those that it asked for,
    with what to ask. launches: grid, arguments in the kernel's order, what starts it, None if that
    is not known yet. choices: whose configuration it took, and by which rule.
    """

    def __init__(self):
        self.fresh: list[tuple[torch.Tensor, int]] = []
        self.shared: list[tuple[torch.Tensor, Callable]] = []
        self.launches: list[tuple[tuple, dict, tuple | None]] = []
        self.choices: list[tuple[object, Callable]] = []


def tape() -> Tape | None:
    """The tape that what this thread does now belongs on."""
    if torch.compiler.is_dynamo_compiling() or not _tapes:
        return None
    return getattr(_own, "tape", None)


def empty(
    x: torch.Tensor, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A contiguous tensor on the device of x, of its shape and dtype where none is given."""
    if shape is not None:
        out = torch.empty(shape, dtype=x.dtype if dtype is None else dtype, device=x.device)
    elif x.is_contiguous() and dtype is None:
        # What x has already need not be asked for, which takes a sixth of a short launch.
        out = torch.empty_like(x)
    else:
        out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if (noting := tape()) is not None:
        noting.fresh.append((out, _version(out)))
    return out


@dataclass(frozen=True)
class _Launcher:
    """A launcher, its arguments by name with their annotations, the names of those whose addresses
    its plans, by key, are handed."""

    function: Callable
    kinds: Mapping[str, object]
    handed: tuple[str, ...]
    plans: dict[tuple, Callable]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.kinds)

    @property
    def words(self) -> dict[str, str]:
        """What its look-up and its plans are both written with."""
        return {
            "names": ", ".join(self.names),
            "addresses": ", ".join(f"__{name}" for name in self.handed),
        }


def loosely(value: int | torch.Tensor) -> tuple[object, int]:
    """What a kernel depends on of a value that it is not specialized for; what it is handed."""
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


def planned(function: Callable) -> Callable:
    """A launcher whose known calls are made by plan; see the module.

    function: its tensors are annotated as `torch.Tensor`, or `torch.Tensor | None`; one that is
    `int | torch.Tensor`, such as a seed, goes to a parameter of its name that the kernel's
    `do_not_specialize` names; a `float` goes to a parameter of its name, and nothing but its
    `kind_of` decides what is launched; all other arguments can be hashed. It returns tensors that
    `empty` made or that it was given, or None in the place of one: a single one or a tuple.
    TypeError names an argument in the place of a tensor that is none; ValueError a tensor without
    an address, or with a tangent of forward-mode differentiation.
    """
    key, steps, handed = [], [], []
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        # Whether a view is to be read with the other sign is asked where one can be: a part of
        # complex numbers is no run of memory, unless it is a single number.
        layout = f"{name}.is_contiguous() or ({name}.stride(), {name}.is_neg())"
        # No address is a key of its own, for which there is no plan.
        place = f"{name}.get_device(), __{name} % {ALIGNMENT} if __{name} else -1"
        known = f"{name}.dtype, {name}.shape or {name}.is_neg(), {layout}, {place}"
        if parameter.annotation is torch.Tensor:
            steps.append(f"__{name} = {name}.data_ptr()")
            key.append(known)
            handed.append(name)
        elif parameter.annotation == torch.Tensor | None:
            steps.append(f"__{name} = 0 if {name} is None else {name}.data_ptr()")
            key.append(f"{name} if {name} is None else ({known})")
            handed.append(name)
        elif parameter.annotation == int | torch.Tensor:
            steps.append(f"__{name}_kind, __{name} = loosely({name})")
            key.append(f"__{name}_kind")
            handed.append(name)
        elif parameter.annotation is float:
            key.append(f"{name} >= NORMAL or kind_of({name})")
        else:
            key.append(name)
    kinds = {name: parameter.annotation for name, parameter in parameters.items()}
    launcher = _Launcher(function, kinds, tuple(handed), {})
    text = LOOK_UP.format(steps="\n            ".join(steps), key=", ".join(key), **launcher.words)
    traced = torch.compiler.is_dynamo_compiling
    made = _factory(text)(launcher, function, launcher.plans, traced)
    made.__defaults__ = function.__defaults__
    return functools.update_wrapper(made, function)


@functools.cache
def _factory(text: str) -> Callable:
    space: dict[str, Callable] = {}
    exec(text, globals(), space)
    return space["factory"]


def _noted(launcher: _Launcher, key: tuple, *arguments):
    """Calls a launcher and keeps a plan of what it did, where there can be one."""
    given = dict(zip(launcher.names, arguments, strict=True))
    for name, kind in launcher.kinds.items():
        if kind is float:
            given[name] = float(given[name])
        elif isinstance(given[name], torch.Tensor) and given[name].is_neg():
            given[name] = given[name].resolve_neg()
    _refuse(launcher, *given.values())
    if tape() is not None or _unplannable():
        return launcher.function(*given.values())
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    written, versions = Tape(), [*map(_version, tensors.values())]
    _tapes.append(written)
    _own.tape = written
    try:
        # Where PyTorch counts what it writes.
        with torch.inference_mode(False):
            result = launcher.function(*given.values())
    finally:
        _own.tape = None
        _tapes.remove(written)
    if versions == [*map(_version, tensors.values())]:
        with contextlib.suppress(_UnplannedError):
            plan = _Writer(launcher, written, arguments, given).plan(result)
            if len(launcher.plans) >= MOST_PLANS:
                launcher.plans.clear()
            launcher.plans[key] = plan
    return result


def _unplannable() -> bool:
    """Whether no call has a plan now: launches are watched, or tangents may be."""
    return JITFunction.run is not _run or internals.watched() or forward_mode._current_level >= 0


def _refuse(launcher: _Launcher, *arguments) -> None:
    """TypeError or ValueError for an argument that no kernel can take."""
    for name, value in zip(launcher.names, arguments, strict=True):
        kind = launcher.kinds[name]
        if isinstance(value, torch.Tensor):
            # Where a tensor of shapes only is wrong, the launcher or the launch says what is right.
            if not value.is_meta:
                placed(name, value, value.device.type)
            no_tangent(**{name: value})
        elif kind is torch.Tensor or (kind == torch.Tensor | None and value is not None):
            raise TypeError(f"{name}: {shown(value)}, expected a tensor")
        elif kind == int | torch.Tensor and not isinstance(value, int):
            raise TypeError(f"{name}: {shown(value)}, expected an integer or a tensor of one")


def _version(tensor: torch.Tensor) -> int:
    """How often PyTorch wrote to it; to a tensor of inference it does not write here."""
    return 0 if tensor.is_inference() else tensor._version


class _UnplannedError(Exception):
    """A call that cannot be made by plan."""


class _Writer:
    """Writes the plan of a call from its tape; raises _UnplannedError where that is not all."""

    def __init__(
        self,
        launcher: _Launcher,
        written: Tape,
        arguments: tuple,
        given: Mapping[str, object],
    ):
        self._launcher, self._tape, self._constants = launcher, written, []
        self._given = {k: value for k, value in given.items() if isinstance(value, torch.Tensor)}
        # What a plan is handed in the place of a number.
        self._numbers = {
            name: f"__{name}" if name in launcher.handed else name
            for name, kind in launcher.kinds.items()
            if kind is float or (name in launcher.handed and isinstance(given[name], int))
        }
        self._values = {name: given[name] for name in self._numbers}
        self._places = {tensor.data_ptr(): f"__{name}" for name, tensor in self._given.items()}
        apart = len(self._places) == len(self._given) and 0 not in self._places
        known = written.launches and all(start is not None for *_, start in written.launches)
        # A number by itself may be the next time one that is to be read with the other sign.
        alone = any(tensor.dim() and tensor.numel() == 1 for tensor in self._given.values())
        same = all(
            given[name] is value
            for name, value in zip(launcher.names, arguments, strict=True)
            if name in self._given
        )
        if not (apart and known and same) or alone:
            raise _UnplannedError

    def plan(self, result: object) -> Callable:
        launcher = self._launcher
        steps = [self._allocation(*each) for each in enumerate(self._tape.fresh)]
        for index, (tensor, ask) in enumerate(self._tape.shared):
            steps.append(f"_s{index} = {self._constant(ask)}()")
            self._places[tensor.data_ptr()] = f"_s{index}.data_ptr()"
        steps += [self._launch(*each) for each in self._tape.launches]
        stale = [
            f"{self._constant(whose)}.choose is not {self._constant(rule)}"
            for whose, rule in self._tape.choices
        ]
        if torch.cuda.device_count() > 1:
            stale.append(f"_current_device() != {self._constant(torch.cuda.current_device())}")
        devices = {start[0] for *_, start in self._tape.launches}
        if len(devices) > 1:
            raise _UnplannedError
        result = self._result(result)
        text = PLAN.format(
            constants=", ".join(f"_c{index}" for index in range(len(self._constants))),
            stale=" or ".join(stale) or "False",
            new="_quick" if self._quick_enough() else "_strided",
            device=devices.pop(),
            steps="\n        ".join(steps),
            result=result,
            **launcher.words,
        )
        gpu = internals.raw_stream(), internals.current_device()
        return _factory(text)(launcher.function, *gpu, *self._constants)

    def _quick_enough(self) -> bool:
        kinds = {tensor.device.type for tensor, _ in self._tape.fresh}
        return all(internals.allocates(_quick, kind) for kind in kinds)

    def _constant(self, value: object) -> str:
        self._constants.append(value)
        return f"_c{len(self._constants) - 1}"

    def _allocation(self, index: int, made: tuple[torch.Tensor, int]) -> str:
        tensor, version = made
        aligned = tensor.data_ptr() and tensor.data_ptr() % ALIGNMENT == 0
        if not (aligned and tensor.is_contiguous() and _version(tensor) == version):
            raise _UnplannedError
        self._places[tensor.data_ptr()] = f"_t{index}.data_ptr()"
        what = tuple(tensor.shape), tensor.stride(), tensor.dtype
        return f"_t{index} = _new({', '.join(map(self._constant, what))})"

    def _launch(self, grid: tuple[int, ...], values: Mapping[str, object], start: tuple) -> str:
        _, launch, function, metadata, cooperative, dependent = start
        x, y, z, function, cooperative, dependent, metadata = map(
            self._constant, (*(*grid, 1, 1)[:3], function, cooperative, dependent, metadata)
        )
        handed = ", ".join(self._value(*each) for each in values.items())
        return (
            f"{self._constant(launch)}({x}, {y}, {z}, _on, {function}, "
            f"{cooperative}, {dependent}, None, None, {metadata}, None, None, None, {handed})"
        )

    def _value(self, name: str, value: object) -> str:
        if value is None:
            return "None"
        if name in self._numbers and value is self._values[name]:
            return self._numbers[name]
        if not isinstance(value, torch.Tensor):
            # What is made of a float that is handed over would stay as it is.
            if isinstance(value, float) and float in self._launcher.kinds.values():
                raise _UnplannedError
            return self._constant(value)
        place = self._places.get(value.data_ptr())
        if place is not None:
            return place
        # A view that begins within a tensor lies as far in, wherever that is.
        storage = value.untyped_storage().data_ptr()
        known = *self._given.values(), *(tensor for tensor, _ in self._tape.fresh)
        bases = [each for each in known if each.untyped_storage().data_ptr() == storage]
        if len(bases) != 1:
            raise _UnplannedError
        begin = bases[0].data_ptr()
        return f"{self._places[begin]} + {self._constant(value.data_ptr() - begin)}"

    def _result(self, result: object) -> str:
        if isinstance(result, tuple):
            return f"({''.join(self._result(each) + ', ' for each in result)})"
        if result is None:
            return "None"
        names = [f"_t{index}" for index in range(len(self._tape.fresh))]
        made = zip(names, (tensor for tensor, _ in self._tape.fresh), strict=True)
        for name, tensor in (*made, *self._given.items()):
            if tensor is result:
                return name
        raise _UnplannedError

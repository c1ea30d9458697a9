"""Calls that are known, made again without the Python that decides them.

What a launcher does (checks, views, the choice of a tile, allocations, launches) follows from
dtype, shape, strides, device and alignment of its tensors and from its other arguments. For each
such key `planned` writes down what the launcher did, and does that alone when the key comes again.
It is what a captured CUDA graph does for a GPU, with new addresses in each call. A plan is a
function that is written for the call, as Triton writes the binding of a kernel's arguments.

Nothing is planned that is not fully written down: each address must be that of an argument, or of a
tensor that came from `empty` or `shared` here, no argument may lie where another does, each launch
must be one that `kernels._launch` knows, and PyTorch itself may have written to nothing.
"""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from triton.runtime.jit import JITFunction

# Shapes are part of a key; a program that sees ever new ones starts anew.
MOST_PLANS = 4096
ALIGNMENT = 16

_run = JITFunction.run
_tapes: list["Tape"] = []

# What begins with "_" is its own, with "__" what an argument is handed over as.
LOOK_UP = """
def factory(_launcher, _function, _plans, _traced):
    def planned({names}):
        if _traced():
            return _function({names})
        {steps}
        _key = ({key},)
        _plan = _plans.get(_key)
        if _plan is None or _tapes or JITFunction.run is not _run:
            return _noted(_launcher, _key, {names})
        return _plan({names}, {addresses})
    return planned
"""
PLAN = """
def factory(_function, _stream, _current_device, {constants}):
    def plan({names}, {addresses}):
        if {stale}:
            return _function({names})
        _new = _quick if torch.empty_strided is _empty_strided else _strided
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
    """What one call of a launcher does, in one thread.

    fresh: the tensors that it allocated, each with its version. shared: those that it asked for,
    with what to ask. launches: grid, arguments in the kernel's order, what starts it, None if that
    is not known yet. choices: whose configuration it took, and by which rule.
    """

    def __init__(self):
        self.thread = threading.get_ident()
        self.fresh: list[tuple[torch.Tensor, int]] = []
        self.shared: list[tuple[torch.Tensor, Callable]] = []
        self.launches: list[tuple[tuple, dict, tuple | None]] = []
        self.choices: list[tuple[object, Callable]] = []


def tape() -> Tape | None:
    """The tape that what this thread does now belongs on."""
    if torch.compiler.is_dynamo_compiling() or not _tapes:
        return None
    mine = threading.get_ident()
    return next((each for each in _tapes if each.thread == mine), None)


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
    """A launcher, the names of its arguments and of those whose addresses its plans, by key, are
    handed."""

    function: Callable
    names: tuple[str, ...]
    handed: tuple[str, ...]
    plans: dict[tuple, Callable]

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
        return (value.dtype, value.get_device(), address % ALIGNMENT), address
    return width(value), value


def width(value: int) -> int:
    """Which of int32, int64 and uint64 Triton takes for a number."""
    bits = (value if value >= 0 else ~value).bit_length()
    return (bits > 31) + (bits > 63)


def planned(function: Callable) -> Callable:
    """A launcher whose known calls are made by plan; see the module.

    function: its tensors are annotated as `torch.Tensor`, or `torch.Tensor | None`; one that is
    `int | torch.Tensor`, such as a seed, goes to a parameter of its name that the kernel's
    `do_not_specialize` names; all other arguments can be hashed. It returns tensors that `empty`
    made or that it was given, or None in the place of one: a single one or a tuple.
    """
    key, steps, handed = [], [], []
    parameters = inspect.signature(function).parameters
    for name, parameter in parameters.items():
        layout = f"{name}.is_contiguous() or {name}.stride()"
        known = f"{name}.dtype, {name}.shape, {layout}, {name}.get_device(), __{name} % {ALIGNMENT}"
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
            # Zeros of either sign are equal, and are not the same.
            key.append(f"{name} or repr({name})")
        else:
            key.append(name)
    launcher = _Launcher(function, tuple(parameters), tuple(handed), {})
    text = LOOK_UP.format(steps="\n        ".join(steps), key=", ".join(key), **launcher.words)
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
    given = {name: given[name] for name in launcher.handed if given[name] is not None}
    loose = {name: value for name, value in given.items() if isinstance(value, int)}
    given = {name: value for name, value in given.items() if name not in loose}
    if JITFunction.run is not _run or tape() is not None:
        return launcher.function(*arguments)
    written, versions = Tape(), [*map(_version, given.values())]
    _tapes.append(written)
    try:
        # Where PyTorch counts what it writes.
        with torch.inference_mode(False):
            result = launcher.function(*arguments)
    finally:
        _tapes.remove(written)
    if versions == [*map(_version, given.values())]:
        with contextlib.suppress(_UnplannedError):
            plan = _Writer(written, given, loose).plan(launcher, result)
            if len(launcher.plans) >= MOST_PLANS:
                launcher.plans.clear()
            launcher.plans[key] = plan
    return result


def _version(tensor: torch.Tensor) -> int:
    """How often PyTorch wrote to it; to a tensor of inference it does not write here."""
    return 0 if tensor.is_inference() else tensor._version


class _UnplannedError(Exception):
    """A call that cannot be made by plan."""


class _Writer:
    """Writes the plan of a call from its tape; raises _UnplannedError where that is not all."""

    def __init__(self, written: Tape, given: Mapping[str, torch.Tensor], loose: Mapping[str, int]):
        self._tape, self._given, self._loose, self._constants = written, given, loose, []
        self._places = {tensor.data_ptr(): f"__{name}" for name, tensor in given.items()}
        apart = len(self._places) == len(given) and 0 not in self._places
        known = written.launches and all(start is not None for *_, start in written.launches)
        if not (apart and known):
            raise _UnplannedError

    def plan(self, launcher: _Launcher, result: object) -> Callable:
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
            device=devices.pop(),
            steps="\n        ".join(steps),
            result=result,
            **launcher.words,
        )
        gpu = torch._C._cuda_getCurrentRawStream, torch._C._cuda_getDevice
        return _factory(text)(launcher.function, *gpu, *self._constants)

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
        if name in self._loose and value is self._loose[name]:
            return f"__{name}"
        if not isinstance(value, torch.Tensor):
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

"""Writes the plan of a call from its trace: a Python function that allocates and launches alone.

A plan contains only what is fully known. Each address must lie in an argument, or in a tensor that
the call allocated or asked for. Each launch must be one that starts without Triton's look-up.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Mapping

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from . import internals
from .call_trace import CallTrace, Launch
from .launch_guard import Launcher

ALIGNMENT = 16
# Constants of a launch: what is the same in each call with the same key.
CONSTANTS = (int, float, str, torch.dtype, tl.constexpr, tl.dtype, JITFunction)

# Names that begin with "_" belong to the plan; "__" begins the address or number of an argument.
PLAN = """
def factory(_elsewhere, _stream, _current_device, {constants}):
    def plan({names}, {addresses}):
        {device_check}
        _on = _stream({device})
        {steps}
        return {result}
    return plan
"""
DEVICE_CHECK = "if _current_device() != {device}: return _elsewhere({names})"


def _strided(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


# The compiler of PyTorch allocates with this function, in half of the time.
_quick = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", _strided)
# Plans look it up in each call; see `public_allocations`.
_allocate = _quick


@contextlib.contextmanager
def public_allocations() -> Iterator[None]:
    """Within the body plans allocate by `torch.empty_strided`, whatever stands in its place."""
    global _allocate
    before, _allocate = _allocate, _strided
    try:
        yield
    finally:
        _allocate = before


class UnplannedError(Exception):
    """A call that cannot be made by plan."""


class Descriptors(dict):
    """The arguments that a compiled kernel gets for a tensor descriptor, by address.

    A descriptor says nothing but address, shape and strides, so it is made once for each address.
    """

    MOST = 256

    def __init__(self, descriptor: object, make: Callable[[object], list]):
        super().__init__()
        self._rest = {name: getattr(descriptor, name) for name in ("shape", "strides", "padding")}
        self._make = make

    def __missing__(self, address: int) -> list:
        if len(self) >= self.MOST:
            self.clear()
        base = types.SimpleNamespace(data_ptr=lambda: address)
        self[address] = made = self._make(types.SimpleNamespace(base=base, **self._rest))
        return made


class PlanCompiler:
    """Compiles the plan of a call; raises UnplannedError if the trace is not all that it takes.

    handed: the names of the arguments whose address, or number, a plan is handed beside them.
    given: the arguments of the call that was traced, by name.
    """

    def __init__(
        self,
        launcher: Launcher,
        handed: tuple[str, ...],
        given: Mapping[str, object],
        trace: CallTrace,
    ):
        self._launcher, self._handed, self._trace = launcher, handed, trace
        self._constants: list[object] = []
        self._given = {k: value for k, value in given.items() if isinstance(value, torch.Tensor)}
        # The name by which a plan is handed a number that changes from call to call.
        self._numbers = {
            name: f"__{name}" if name in handed else name
            for name, kind in launcher.kinds.items()
            if kind is float or (name in handed and isinstance(given[name], int))
        }
        self._values = {name: given[name] for name in self._numbers}
        self._places = {tensor.data_ptr(): f"__{name}" for name, tensor in self._given.items()}
        if not (trace.whole and trace.launches) or any(x.start is None for x in trace.launches):
            raise UnplannedError

    def plan(self, result: object) -> Callable:
        """The function that makes the call again: its parameters are the launcher's, then the
        addresses and numbers of `handed`."""
        steps = [self._allocation(*each) for each in enumerate(self._trace.allocations)]
        for index, (tensor, ask) in enumerate(self._trace.asked):
            steps.append(f"_s{index} = {self._constant(ask)}()")
            self._places[tensor.data_ptr()] = f"_s{index}.data_ptr()"
        steps += [self._launch(each) for each in self._trace.launches]
        words = {
            "names": ", ".join(self._launcher.kinds),
            "addresses": ", ".join(f"__{name}" for name in self._handed),
            "device": next(iter(self._given.values())).get_device(),
        }
        several = torch.cuda.device_count() > 1
        result = self._result(result)
        text = PLAN.format(
            constants=", ".join(f"_c{index}" for index in range(len(self._constants))),
            device_check=DEVICE_CHECK.format(**words) if several else "",
            steps="\n        ".join(steps),
            result=result,
            **words,
        )
        gpu = internals.raw_stream(), internals.current_device()
        return factory(text)(self._launcher.call, *gpu, *self._constants)

    def _constant(self, value: object) -> str:
        self._constants.append(value)
        return f"_c{len(self._constants) - 1}"

    def _allocation(self, index: int, tensor: torch.Tensor) -> str:
        device = next(iter(self._given.values())).device
        plain = tensor.layout == torch.strided and tensor.device == device
        if not (plain and tensor.data_ptr() and tensor.data_ptr() % ALIGNMENT == 0):
            raise UnplannedError
        self._places[tensor.data_ptr()] = f"_t{index}.data_ptr()"
        what = tuple(tensor.shape), tensor.stride(), tensor.dtype
        how = "_allocate" if internals.allocates(_quick, device.type) else "_strided"
        return f"_t{index} = {how}({', '.join(map(self._constant, what))})"

    def _launch(self, launch: Launch) -> str:
        start = launch.start
        x, y, z, function, cooperative, dependent, metadata = map(
            self._constant,
            (*launch.grid, start.function, start.cooperative, start.dependent, start.metadata),
        )
        begin, makers = start.launch, {}
        if any(_is_descriptor(value) for value in launch.values.values()):
            begin, makers = internals.described_launch(begin) or (begin, {})
        handed = ", ".join(
            f"*{self._constant(Descriptors(value, makers[place]))}[{self._address(value.base)}]"
            if place in makers
            else self._value(name, value)
            for place, (name, value) in enumerate(launch.values.items())
        )
        return (
            f"{self._constant(begin)}({x}, {y}, {z}, _on, {function}, "
            f"{cooperative}, {dependent}, None, None, {metadata}, None, None, None, {handed})"
        )

    def _value(self, name: str, value: object) -> str:
        if value is None:
            return "None"
        if name in self._numbers:
            if value is not self._values[name]:
                raise UnplannedError
            return self._numbers[name]
        if isinstance(value, torch.Tensor):
            return self._address(value)
        # A number made of a float that is handed over would stay as it is.
        stays = isinstance(value, float) and float in self._launcher.kinds.values()
        if stays or not isinstance(value, CONSTANTS):
            raise UnplannedError
        return self._constant(value)

    def _address(self, tensor: torch.Tensor) -> str:
        place = self._places.get(tensor.data_ptr())
        if place is not None:
            return place
        # A view that begins within a tensor begins as far in, wherever that tensor lies.
        storage = tensor.untyped_storage().data_ptr()
        known = *self._given.values(), *self._trace.allocations
        bases = [each for each in known if each.untyped_storage().data_ptr() == storage]
        if len(bases) != 1:
            raise UnplannedError
        begin = bases[0].data_ptr()
        return f"{self._places[begin]} + {self._constant(tensor.data_ptr() - begin)}"

    def _result(self, result: object) -> str:
        if isinstance(result, tuple):
            return f"({''.join(self._result(each) + ', ' for each in result)})"
        if result is None:
            return "None"
        for name, tensor in self._given.items():
            if tensor is result:
                return name
        for index, tensor in enumerate(self._trace.allocations):
            if isinstance(result, torch.Tensor) and _same_view(tensor, result):
                return f"_t{index}"
        raise UnplannedError


def _is_descriptor(value: object) -> bool:
    """Whether a value is a tensor descriptor of Triton or of Gluon."""
    return type(value).__name__ == "TensorDescriptor" and isinstance(value.base, torch.Tensor)


def _same_view(made: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a result is a tensor that was made: what PyTorch hands out may be a view of it."""
    return (
        made.data_ptr() == result.data_ptr()
        and made.shape == result.shape
        and made.stride() == result.stride()
        and made.dtype == result.dtype
        and not result.requires_grad
    )


@functools.cache
def factory(text: str) -> Callable:
    """The function `factory` that a source text defines, with the names of this module."""
    space: dict[str, Callable] = {}
    exec(text, globals(), space)
    return space["factory"]

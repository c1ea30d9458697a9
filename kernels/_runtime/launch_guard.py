"""The guard around each launcher: bad arguments are refused, kernels start on the tensors' device.

A launcher is a function that allocates results and starts kernels by `kernel[grid](...)`. Triton
starts a kernel on the current device, whatever device its tensors lie on, and reads whatever
address it is handed. So the guard enters the device of the tensors. It refuses an argument that
is not a tensor, and a tensor without an address or with a tangent of forward-mode differentiation.
It also refuses a tensor elsewhere than on a GPU (in the interpreter: on a CPU).
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from triton.runtime.interpreter import InterpretedFunction

from . import internals
from .checks import check_in_memory, check_no_tangent, shown

# Why tensors may have no memory now; see `shapes_only`.
_shapes_only: list[str] = []


class Launcher:
    """A launcher with the annotations of its arguments, by name.

    `torch.Tensor` and `torch.Tensor | None` annotate a tensor, and `list[torch.Tensor]` several.
    `int | torch.Tensor` annotates a number or a tensor that holds one, such as a seed, and `float`
    a number that Triton takes as a float.
    """

    def __init__(self, function: Callable):
        self.function = function
        parameters = inspect.signature(function).parameters
        self.kinds = {name: parameter.annotation for name, parameter in parameters.items()}
        self.defaults = function.__defaults__

    def accepted(self, arguments: Iterable) -> dict[str, object]:
        """The arguments by name, as the launcher takes them: floats, and tensors in memory.

        A view to be read with the other sign becomes a copy. Raises TypeError or ValueError, which
        name the argument, if no kernel can take it.
        """
        given = dict(zip(self.kinds, arguments, strict=True))
        for name, value in given.items():
            kind = self.kinds[name]
            if isinstance(value, torch.Tensor):
                self._refuse_unreadable(name, value)
                if value.is_neg():
                    given[name] = value.resolve_neg()
            elif kind == list[torch.Tensor]:
                for place, each in enumerate(value):
                    self._refuse_unreadable(name if len(value) == 1 else f"{name}[{place}]", each)
            elif kind is torch.Tensor or (kind == torch.Tensor | None and value is not None):
                raise TypeError(f"{name}: {shown(value)}, expected a tensor")
            elif kind == int | torch.Tensor and not isinstance(value, int):
                raise TypeError(f"{name}: {shown(value)}, expected an integer or a tensor of one")
            elif kind is float:
                given[name] = float(value)
        return given

    def _refuse_unreadable(self, name: str, value: torch.Tensor) -> None:
        if not (value.is_meta and _shapes_only):
            check_in_memory(
                name, value, "cpu" if not value.is_cuda and self.is_interpreted() else "cuda"
            )
        check_no_tangent(**{name: value})

    def is_interpreted(self) -> bool:
        """Whether Triton interprets the kernels of the launcher's file, on a CPU."""
        return any(isinstance(x, InterpretedFunction) for x in self.function.__globals__.values())

    def call(self, *arguments):
        """Call the launcher as it stands, on the device of its tensors."""
        given = self.accepted(arguments)
        with on_device_of(given):
            return self.function(*given.values())


def guarded(function: Callable) -> Callable:
    """A launcher, called with positional arguments, within its guard."""
    launcher = Launcher(function)

    @functools.wraps(function)
    def guarded_call(*arguments):
        if torch.compiler.is_dynamo_compiling():
            return function(*arguments)
        return launcher.call(*arguments)

    return guarded_call


def on_device_of(given: Mapping[str, object]) -> contextlib.AbstractContextManager:
    """Within the body kernels start on the GPU of the first tensor that lies on one."""
    for several in given.values():
        value = several[0] if isinstance(several, list) and several else several
        if isinstance(value, torch.Tensor) and value.is_cuda:
            device = value.get_device()
            if device != internals.current_device()():
                return torch.cuda.device(device)
            break
    return contextlib.nullcontext()


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Within the body launchers take meta tensors: whoever enters it sees to it that no kernel
    starts."""
    _shapes_only.append("shapes only")
    try:
        yield
    finally:
        _shapes_only.pop()

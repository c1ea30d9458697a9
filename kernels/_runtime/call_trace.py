"""The trace of one call of a launcher: what it allocates and which kernels it starts with what.

A dispatch mode of PyTorch, which sees what this thread alone does, notes allocations and lets views
pass; any other operation spoils the trace. Kernels are seen because `JITFunction.run` is replaced
while the trace lasts. One thread is traced at a time; the kernels of others pass straight through.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from . import internals

# Why no call is made by plan or traced now: traces in progress, and those who asked for it.
suspensions: list[object] = []

_lock = threading.Lock()
_own = threading.local()


@dataclass(frozen=True)
class Start:
    """Starts a compiled kernel again, without Triton's look-up."""

    launch: Callable
    function: object
    metadata: object
    cooperative: bool
    dependent: bool


@dataclass(frozen=True)
class Launch:
    """grid: the number of programs along three axes. values: the arguments in the kernel's order.
    start: None if the kernel can be started by Triton only."""

    grid: tuple[int, int, int]
    values: Mapping[str, object]
    start: Start | None


class CallTrace(TorchDispatchMode):
    """Records the allocations and launches of one call of a launcher.

    allocations: the tensors that it allocated. asked: the tensors that a function of `asked_again`
    gave it, each with what to ask. launches: in their order. whole: whether that is all. The
    trace keeps its tensors alive, so that no address is used twice. A spoiled trace keeps nothing.
    """

    def __init__(self):
        super().__init__()
        self.allocations: list[torch.Tensor] = []
        self.asked: list[tuple[torch.Tensor, Callable]] = []
        self.launches: list[Launch] = []
        self.whole = True
        self._paused = False

    # PyTorch asks these. By the first, PyTorch would import its compiler, which takes seconds, to
    # keep it out of the mode; by the second, other threads could not compile meanwhile.
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.whole and not self._paused:
            if _allocates(func):
                self.allocations.append(result)
            elif not _is_view(func, (*args, *(kwargs or {}).values()), result):
                self.spoil()
        return result

    def spoil(self) -> None:
        """Something happens that no plan can repeat."""
        self.whole = False
        for noted in (self.allocations, self.asked, self.launches):
            noted.clear()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within the body nothing is recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def replacing(self, run: Callable) -> Callable:
        """A function for the place of `JITFunction.run`, which notes the launches of this trace."""

        def traced_run(kernel, *args, grid, warmup, **kwargs):
            if current_trace() is not self:
                return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            bound = _bound(kernel, args, kwargs)
            if callable(grid):
                grid = grid(bound)
            with self.paused():
                compiled = run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            if warmup or kernel.pre_run_hooks:
                self.spoil()
            if self.whole:
                self.launches.append(Launch((*grid, 1, 1)[:3], bound, start_of(compiled)))
            return compiled

        return traced_run


def current_trace() -> CallTrace | None:
    """The trace that belongs to what this thread does now."""
    return getattr(_own, "trace", None) if suspensions else None


def traced(function: Callable, arguments: tuple) -> tuple[object, CallTrace | None]:
    """Call a function; return its result and its trace, None while another thread is traced."""
    if not _lock.acquire(blocking=False):
        return function(*arguments), None
    try:
        trace, run = CallTrace(), JITFunction.run
        replacement = trace.replacing(run)
        suspensions.append(trace)
        _own.trace = trace
        JITFunction.run = replacement
        try:
            with trace:
                return function(*arguments), trace
        finally:
            # A later replacement stays in place. It may still call this one, noting nothing.
            if JITFunction.run is replacement:
                JITFunction.run = run
            _own.trace = None
            suspensions.remove(trace)
    finally:
        _lock.release()


def asked_again(function: Callable) -> Callable:
    """Mark a function that gives a launcher a tensor that belongs to several calls.

    An example is a counter that the launches of a stream share. A plan calls the function anew in
    each call, with the same arguments.
    """

    @functools.wraps(function)
    def ask(*arguments):
        trace = current_trace()
        if trace is None:
            return function(*arguments)
        with trace.paused():
            tensor = function(*arguments)
        if trace.whole:
            trace.asked.append((tensor, functools.partial(function, *arguments)))
        return tensor

    return ask


def counted_as_allocation(function: Callable) -> Callable:
    """A function in the place of one of PyTorch's that allocate, such as `torch.empty`: whatever
    it does, a trace notes an allocation."""

    @functools.wraps(function)
    def allocate(*arguments, **options):
        trace = None if torch.compiler.is_dynamo_compiling() else current_trace()
        if trace is None:
            return function(*arguments, **options)
        with trace.paused():
            tensor = function(*arguments, **options)
        if trace.whole:
            trace.allocations.append(tensor)
        return tensor

    return allocate


def _allocates(func) -> bool:
    """Whether an operation of PyTorch allocates memory and leaves it unwritten."""
    name = func._schema.name.removeprefix("aten::").removeprefix("new_")
    return name.startswith("empty") and not func._schema.is_mutable


def _is_view(func, given: tuple, result: object) -> bool:
    """Whether an operation gave nothing but tensors in the memory of those that it was given, and
    wrote to none."""
    results = result if isinstance(result, (tuple, list)) else (result,)
    if func._schema.is_mutable or not all(isinstance(each, torch.Tensor) for each in results):
        return False
    known = {_storage(each) for each in given if isinstance(each, torch.Tensor)}
    return all(_storage(each) in known for each in results)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bound(kernel: JITFunction, args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
    """The arguments of a launch in the kernel's order, its defaults among them."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    return {param.name: given.get(param.name, param.default) for param in kernel.params}


def start_of(compiled: object) -> Start | None:
    """Return the `Start` of a compiled kernel.

    Return None if each start needs memory of its own, or if the backend has another launcher.
    """
    starter = getattr(compiled, "run", None)
    if type(starter).__name__ != "CudaLauncher" or starter.global_scratch_size:
        return None
    if starter.profile_scratch_size or not internals.launches_in_order(type(starter)):
        return None
    return Start(
        starter.launch,
        compiled.function,
        compiled.packed_metadata,
        starter.launch_cooperative_grid,
        starter.launch_pdl,
    )

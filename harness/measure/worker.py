"""Times one implementation of one op on the GPU, in a process of its own.

A cell is prepared once: inputs in several copies, the outputs that the calls must give, and a
CUDA graph for each copy. Then it is timed in blocks, and checked at the end. The outputs of the
timed calls must be those from before the timing, and memory must not have grown from call to call.

`device_us` is the time of one call's kernels, replayed as a graph. A backward pass is captured on
its own, after its forward pass has run, so autograd takes no part in it. One graph holds both
passes of "both"; the gradients are one if the op is a loss. `call_us` is the time that a caller
waits, with the work of the host and of autograd.

If an implementation computes in place, its inputs are restored before each call that is timed on
the GPU, outside of the clock. `call_us` is the time of calls without that: each call reads what the
call before has left.
"""

import contextlib
import functools
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from harness import status
from harness.calls import context, drawn, inputs, wide
from harness.calls.snapshot import InputSnapshot
from harness.calls.tolerance import same_bits
from harness.machine import affinity
from harness.machine.timer import Timer
from harness.measure import messages
from harness.project import registry
from harness.project.implementations import is_ours
from ops._spec import Case

COPIES = 3
# Share of the GPU's memory that the inputs of one worker may take; all rivals hold theirs at once.
INPUT_SHARE = 1 / 64
# Share that one call may take before its memory is given back after each block; no graph then,
# which would keep it. Such a call is so long that the events beside it cost nothing.
CALL_SHARE = 1 / 16
# Blocks that must all have left more memory in use than the one before: a cache that fills is none.
LEAKY_BLOCKS = 4
# Elements compared at a time.
CHUNK = 2**26
# Differences allowed between runs that are not bitwise equal, relative to the largest entry.
CLOSE_IN_EPS, CLOSE_AT_LEAST = 4, 1e-5

Tensors = tuple[torch.Tensor, ...]


class MeasureWorker:
    """See the module; raises as its parts do, and `harness.status` reads the exceptions."""

    requests = messages.REQUESTS

    def __init__(self, op: str, impl: str, seed: int):
        # Dozens prepare a cell side by side. With a thread for each core, the small tensors that
        # the CPU draws took them seconds: OpenMP's threads spin while they wait for each other.
        torch.set_num_threads(1)
        self._op, _ = registry.op(op)
        self._function = registry.function(op, impl)
        self._ours = is_ours(impl)
        self._in_place = registry.in_place(op, impl)
        self._wide = registry.wide(op, impl)
        self._seed = seed
        self.version = registry.version(impl)
        self._timer = Timer()
        self._forget()

    def prepare(self, case: str, dtype: str, pass_: str) -> messages.Prepared:
        """Compile, warm up and capture a cell."""
        declared = drawn.named(self._op, case)
        self._exact = self._ours and self._op.repeats(pass_)
        # A library's random numbers are another draw in each forward pass; for one of these its
        # gradients are always the same.
        by_properties = pass_ != "backward" and self._op.judged(self._ours) == "properties"
        self._property_check = (
            functools.partial(self._violation, declared) if by_properties else None
        )
        with torch.cuda.stream(self._timer.stream):
            copies, busy, first = COPIES, 0.0, 0.0
            while len(self._calls) < copies:
                before = torch.cuda.memory_allocated()
                seed = self._seed + len(self._calls)
                call, given, forward_s = self._call(declared, dtype, pass_, seed)
                kept = InputSnapshot(given if self._in_place else ())
                with self._declining():
                    first_s = forward_s + _clocked(call)[1]
                kept.drop_unchanged()
                kept.restore()
                torch.cuda.reset_peak_memory_stats()
                outputs, again_s = _clocked(call)
                peak = torch.cuda.max_memory_allocated() - before - kept.nbytes
                read = [tensor for tensor in given if not kept.covers(tensor)]
                leaves = sum(tensor.requires_grad and tensor.is_leaf for tensor in given)
                # The gradients come last.
                own = [_own(tensor, read) for tensor in outputs[-leaves:]]
                if pass_ != "forward" and not any(own):
                    raise status.Unsupported("a view of what it was given: nothing is computed")
                first, busy = first + first_s, busy + again_s
                self._calls.append(call)
                self._given.append(given)
                self._before.append(kept)
                self._expected.append(_kept_apart(outputs))
                del outputs
                size = max(1, _size(given) + kept.nbytes)
                copies = min(COPIES, max(1, int(_memory(INPUT_SHARE) / size)))
            self._large = peak > _memory(CALL_SHARE)
            remark = self._by_events("the call is large") if self._large else self._capture()
            torch.cuda.synchronize()
            self._trim()
        return messages.Prepared(
            busy_s=busy,
            first_s=first,
            remark=remark,
            peak_mem_bytes=peak,
            held_bytes=torch.cuda.memory_reserved(),
            l2_bytes=self._timer.l2_bytes,
        )

    def block(self, calls: int, turn: int = 0) -> messages.BlockTimes:
        """Time `calls` calls.

        turn: the number of the block, which chooses the cores of the host. If no graph is possible,
        host work may be in the GPU time as well.
        """
        began = time.perf_counter()
        restore = [kept.restore for kept in self._before]
        with affinity.held(turn):
            device_us, reading = self._timer.cold(self._timed, calls, restore)
            call_us = self._timer.eager(self._calls, calls)
        busy = time.perf_counter() - began
        self._trim()
        self._weigh()
        return messages.BlockTimes(busy, device_us, call_us, **reading)

    def energy(self, window_ms: float) -> messages.Energy:
        """Measure the energy of a timed call on a warm L2, inputs in rotation; see `Timer.energy`.

        A function that computes in place has none: there is no pause in which to restore inputs.
        """
        if any(kept.nbytes for kept in self._before):
            return messages.Energy(0.0, None, None)
        began = time.perf_counter()
        energy_uj, half_width = self._timer.energy(self._timed, window_ms)
        busy = time.perf_counter() - began
        self._trim()
        return messages.Energy(busy, energy_uj, half_width)

    def check(self) -> messages.Checked:
        """Raise Inaccurate unless the timed calls, and one more, gave the expected outputs.

        An implementation that computes in place repeats each timed call here, because later calls
        have written over its outputs.
        """
        with torch.cuda.stream(self._timer.stream):
            for index, kept in enumerate(self._before):
                if kept.nbytes:
                    kept.restore()
                    self._timed[index]()
                self._compare("a timed call", self._outputs[index], index)
            self._before[-1].restore()
            self._compare("the last call", self._calls[-1](), len(self._calls) - 1)
        return messages.Checked(self._leaked())

    def _leaked(self) -> int:
        """The bytes by which the memory in use grew from block to block, 0 if it did not."""
        grew = len(self._weights) >= LEAKY_BLOCKS and all(
            a < b for a, b in itertools.pairwise(self._weights)
        )
        return self._weights[-1] - self._weights[0] if grew else 0

    def release(self) -> messages.Released:
        """Give back the cell's memory, and what torch.compile learned from its shapes."""
        self._forget()
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        # The objects that are left stay for good, so the next collection need not visit them.
        gc.freeze()
        torch.cuda.empty_cache()
        return messages.Released(torch.cuda.memory_reserved())

    def _weigh(self) -> None:
        """Notes the memory in use; garbage that waits for a collection is no leak."""
        weight = torch.cuda.memory_allocated()
        if self._weights and weight > self._weights[-1]:
            gc.collect()
            weight = torch.cuda.memory_allocated()
        self._weights.append(weight)

    def _forget(self) -> None:
        self._large, self._property_check = False, None
        self._weights: list[int] = []
        self._calls: list[Callable[[], Tensors]] = []
        self._timed: list[Callable[[], object]] = []
        self._given: list[Tensors] = []
        self._before: list[InputSnapshot] = []
        self._expected: list[Tensors] = []
        self._outputs: list[Tensors] = []

    def _call(self, case: Case, dtype: str, pass_: str, seed: int):
        """The call that is timed, without arguments, and the tensors that it reads.

        The third result is the seconds of the forward pass that a call with gradients needs first:
        a library compiles in it.
        """
        tensors = wide.given(inputs.make(self._op, case, dtype, seed, "cuda"), self._wide)
        arguments = self._op.arguments(case)
        given = tuple(tensor for tensor in tensors.values() if tensor is not None)

        def forward() -> Tensors:
            result = self._function(**tensors, **arguments)
            return result if isinstance(result, tuple) else (result,)

        if pass_ == "forward":
            return forward, given, 0.0
        wanted = [
            tensors[name].requires_grad_()
            for name, spec in self._op.inputs.items()
            if spec.grad and tensors[name] is not None and tensors[name].is_floating_point()
        ]
        with self._declining():
            results, forward_s = _clocked(forward)
        outputs = [result for result in results if result.requires_grad]
        if self._op.unit_gradient:
            gradients = tuple(torch.ones_like(output) for output in outputs)
        else:
            gradients = inputs.gradients(outputs, seed)
        if pass_ == "both":

            def both() -> Tensors:
                results = forward()
                roots = [result for result in results if result.requires_grad]
                found = torch.autograd.grad(roots, wanted, gradients)
                return *(result.detach() for result in results), *found

            return both, (*given, *gradients), forward_s

        def backward() -> Tensors:
            return torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)

        return backward, (*given, *outputs, *gradients), forward_s

    def _capture(self) -> str:
        try:
            for call in self._calls:
                # Each graph has its own pool. In a common pool the workspace of one copy could lie
                # in the outputs of another, and the copies are replayed in turn.
                replay, outputs = self._timer.capture(call)
                self._timed.append(replay)
                self._outputs.append(outputs)
        except Exception as error:
            torch.cuda.synchronize()
            return self._by_events(status.reason(error))
        for given, outputs in zip(self._given, self._outputs, strict=True):
            _poison(outputs, given)
        return ""

    def _by_events(self, why: str) -> str:
        self._outputs = list(self._expected)
        self._timed = [self._kept(index) for index in range(len(self._calls))]
        return f"events: {why}"

    def _trim(self) -> None:
        """Leaves to the rivals what a large call took; the first, untimed call takes it again."""
        if self._large:
            torch.cuda.empty_cache()

    def _kept(self, index: int) -> Callable[[], None]:
        """A call that keeps its outputs, so that the ones that were timed can be checked."""

        def timed() -> None:
            self._outputs[index] = self._calls[index]()

        return timed

    @contextlib.contextmanager
    def _declining(self) -> Iterator[None]:
        """A library that raises declines the case; ours, or a fault of the GPU, is a crash."""
        try:
            yield
        except Exception as error:
            if self._ours or status.out_of_memory(error) or not context.alive():
                raise
            raise status.Unsupported(status.reason(error)) from error

    def _violation(self, case: Case, outputs: Tensors, given: Tensors) -> str:
        """Which property of a random op the outputs of a forward pass, or of both, lack."""
        specs = self._op.inputs.items()
        present = {name: spec for name, spec in specs if spec.is_in(case)}
        names = dict(zip((*present, "dy"), given, strict=False))
        wanted = [f"d{name}" for name, spec in present.items() if spec.grad]
        results = dict(zip(("out", *wanted), outputs, strict=False))
        return self._op.properties(names, results, **self._op.arguments(case))

    def _compare(self, which: str, outputs: Tensors, index: int) -> None:
        """outputs: of the call of this index."""
        if self._property_check:
            if violation := self._property_check(outputs, self._given[index]):
                raise status.Inaccurate(f"{which}: {violation}")
            return
        expected = self._expected[index]
        for number, (got, wanted) in enumerate(zip(outputs, expected, strict=True)):
            # A view that was made without gradients and written since cannot be read else.
            if not _agree(got.detach(), wanted.detach(), self._exact):
                how = "bitwise equal to" if self._exact else "close to"
                raise status.Inaccurate(
                    f"output {number} of {which} is not {how} that from before the timing"
                )


def _clocked(call: Callable[[], Tensors]) -> tuple[Tensors, float]:
    """Return the results of a call, and the seconds until the GPU has done it, and it alone."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    outputs = call()
    torch.cuda.synchronize()
    return outputs, time.perf_counter() - began


def _memory(share: float) -> float:
    device = torch.cuda.current_device()
    return torch.cuda.get_device_properties(device).total_memory * share


def _size(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _poison(outputs: Tensors, given: Tensors) -> None:
    """Fills outputs with NaN: what no replay writes is found by the check.

    An output that lies in the memory of an input is left alone, and so is one whose entries share
    memory, as the gradient of a sum does.
    """
    for output in outputs:
        apart = output.is_floating_point() and output.numel() == _span(output)
        if apart and _own(output, given):
            # A view that was made without gradients of a tensor with one may not be written else.
            output.detach().fill_(float("nan"))


def _own(output: torch.Tensor, given: Tensors) -> bool:
    """Whether an output lies in memory of its own."""
    start = output.untyped_storage().data_ptr()
    return all(start != tensor.untyped_storage().data_ptr() for tensor in given)


def _span(tensor: torch.Tensor) -> int:
    """How many elements of memory lie under a tensor if no two of its entries share one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else 0


def _kept_apart(outputs: Tensors) -> Tensors:
    """Copies of outputs; of large ones in the memory of the host, as rivals hold theirs too."""
    if _size(outputs) <= _memory(INPUT_SHARE):
        return tuple(output.clone() for output in outputs)
    return tuple(output.detach().to("cpu", copy=True) for output in outputs)


def _agree(got: torch.Tensor, wanted: torch.Tensor, exact: bool) -> bool:
    """Whether results agree, bit by bit or nearly. wanted may lie in the memory of the host."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    compare = same_bits
    if not exact:
        compare = functools.partial(_close, tolerance=_tolerance(wanted))
    # In parts: a large one may not fit beside those of the rivals.
    parts = zip(got.reshape(-1).split(CHUNK), wanted.reshape(-1).split(CHUNK), strict=True)
    return all(compare(part, other.to(part.device)) for part, other in parts)


def _tolerance(wanted: torch.Tensor) -> float:
    if not wanted.is_floating_point() or not wanted.numel():
        return 0.0
    largest = wanted.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return max(CLOSE_IN_EPS * torch.finfo(wanted.dtype).eps, CLOSE_AT_LEAST) * largest


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.isclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True).all().item()

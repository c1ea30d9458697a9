"""Times an implementation of an op of a whole network, in a process that is parked between blocks.

The rivals take turns on one GPU, and their networks do not fit in its memory side by side. So this
worker holds memory during its own block only. Between blocks its inputs have no storage; they are
drawn anew from the seed, which gives the same numbers, before the clock runs. A sample of the
entries of each output is kept and compared.

A GPU that rests while a worker takes its memory is faster for about a second afterwards. Then its
clock falls, and a call may take a tenth longer than the first ones did (docs/lab/network.md,
2026-11-30). So a block begins with calls for longer than that. `call_us` is the wall time of one of
many calls in a row that follow them, until the GPU has done the last.

GPU times are by events, after those calls. A function may have graphs of its own
(`network.calls`). It drops them when it is parked, and the first calls of a block make them anew.
The host may work longer on a call than the GPU does, as in a network of short kernels. So it
submits the call while the GPU is still flushing, for longer than the call kept the host busy
before. Its work then lies between the events only if the call waits for the GPU.
"""

import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence

import torch

from harness.calls import drawn, inputs
from harness.calls.snapshot import InputSnapshot
from harness.machine import affinity
from harness.measure import messages
from harness.measure.worker import MeasureWorker, Tensors, _clocked
from harness.results.columns import SUSTAINED
from ops._spec import Case

# Entries of each output that are kept to compare.
SAMPLE = 2**20
REMARK = "events: a network gives its memory back after each block"
# How long calls follow each other before the clock runs, and while it does; and the most of each.
SETTLE_S, ROW_S, MOST = 2.0, 1.0, 100
# The calls whose host time counts. A single one may be fast by chance, and the next one slow.
LAST = 3
# A window of the energy of calls that take as long.
ENERGY_MS = 2000.0


class ParkedWorker(MeasureWorker):
    """As `MeasureWorker`, without memory between its blocks."""

    def prepare(self, case: str, dtype: str, pass_: str) -> messages.Prepared:
        """Draw the inputs, and make the first calls.

        A function that makes graphs makes its first one here, so a library that no graph can hold
        declines. Then the function drops what it keeps. The memory is that of the call after that.
        """
        declared = drawn.named(self._op, case)
        self._cell, self._exact = (declared, dtype), self._ours and self._op.repeats(pass_)
        with torch.cuda.stream(self._timer.stream):
            before = torch.cuda.memory_allocated()
            self._tensors = inputs.make(self._op, declared, dtype, self._seed, "cuda")
            given = [tensor for tensor in self._tensors.values() if tensor is not None]
            kept = InputSnapshot(given if self._in_place else ())
            call = self._network_call(declared)
            first_s = 0.0
            with self._declining():
                for _ in range(self._ahead):
                    first_s += _clocked(call)[1]
                    kept.restore()
            self._drop()
            torch.cuda.reset_peak_memory_stats()
            outputs, again_s = _clocked(call)
            peak = torch.cuda.max_memory_allocated() - before - kept.nbytes
            self._expected = [sampled(outputs)]
            del outputs, kept
            self._calls = [call]
            self._timed, self._outputs = [self._kept(0)], [()]
            self._park()
        return messages.Prepared(
            busy_s=again_s,
            first_s=first_s,
            remark="; ".join([REMARK, SUSTAINED, *getattr(self._function, "remarks", [])]),
            peak_mem_bytes=peak,
            held_bytes=torch.cuda.memory_reserved(),
            l2_bytes=self._timer.l2_bytes,
        )

    def block(self, calls: int, turn: int = 0) -> messages.BlockTimes:
        """Time `calls` calls by events, and for ROW_S at least as many by the clock.

        Others come before them. The first ones ask for memory again and make graphs: one, or as
        many as the function says. Those of `_settle` follow.
        """
        with torch.cuda.stream(self._timer.stream):
            kept = self._unpark()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(self._ahead):
                self._calls[0]()
                kept.restore()
        with affinity.held(turn):
            call_s, host_s = self._settle()
            count = max(calls, min(MOST, math.ceil(ROW_S / call_s)))
            call_us = self._timer.in_a_row(self._calls, count) / count * 1e6
            device_us, reading = self._timer.cold(self._timed, calls, [kept.restore], host_s)
            self._outputs = [sampled(self._outputs[0])]
        busy = time.perf_counter() - began
        del kept
        self._park()
        self._weigh()
        return messages.BlockTimes(busy, device_us, call_us, **reading)

    def _settle(self) -> tuple[float, float]:
        """Call until the GPU has the clock that its power cap leaves it.

        Returns the seconds of the last call, and the most that one of the last few kept the host
        busy.
        """
        torch.cuda.synchronize()
        began, busy = time.perf_counter(), deque(maxlen=LAST)
        with torch.cuda.stream(self._timer.stream):
            for _ in range(MOST):
                submitted = time.perf_counter()
                self._calls[0]()
                busy.append(time.perf_counter() - submitted)
                torch.cuda.synchronize()
                call_s = time.perf_counter() - submitted
                if time.perf_counter() - began >= SETTLE_S:
                    break
        return call_s, max(busy)

    def energy(self, window_ms: float) -> messages.Energy:
        """Measure the energy of a call; one that computes in place goes on from its own results."""
        with torch.cuda.stream(self._timer.stream):
            self._unpark()
            for _ in range(self._ahead):
                self._calls[0]()
        self._settle()
        began = time.perf_counter()
        window_ms = max(window_ms, ENERGY_MS)
        energy_uj, half_width = self._timer.energy(self._calls, window_ms)
        busy = time.perf_counter() - began
        self._park()
        return messages.Energy(busy, energy_uj, half_width)

    def check(self) -> messages.Checked:
        """Raise Inaccurate unless the last timed call, and one more, gave the expected samples."""
        if self._outputs[0]:
            self._compare("a timed call", self._outputs[0], 0)
        try:
            with torch.cuda.stream(self._timer.stream):
                self._unpark()
                self._compare("the last call", sampled(self._calls[0]()), 0)
        except Exception as error:
            # The frames of a call that found no memory still hold what it had.
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            self._park()
        return messages.Checked(self._leaked())

    def _forget(self) -> None:
        super()._forget()
        self._tensors: dict[str, torch.Tensor | None] = {}
        if forget := getattr(self._function, "forget", None):
            forget()

    def _network_call(self, case: Case) -> Callable[[], Tensors]:
        tensors, arguments = self._tensors, self._op.arguments(case)

        def call() -> Tensors:
            result = self._function(**tensors, **arguments)
            return result if isinstance(result, tuple) else (result,)

        return call

    def _storages(self) -> dict[str, torch.UntypedStorage]:
        return {name: t.untyped_storage() for name, t in self._tensors.items() if t is not None}

    def _park(self) -> None:
        """Give all memory back; tensors and parameters stay, without storage."""
        torch.cuda.synchronize()
        for storage in self._storages().values():
            storage.resize_(0)
        self._drop()
        torch.cuda.empty_cache()

    @property
    def _ahead(self) -> int:
        """The calls of the function after which one is as all others."""
        return getattr(self._function, "ahead", 1)

    def _drop(self) -> None:
        """Let the function drop what it keeps for its next call."""
        if drop := getattr(self._function, "drop_memory", None):
            drop()

    def _unpark(self) -> InputSnapshot:
        """Give the inputs storage and their numbers; return what puts these back."""
        case, dtype = self._cell
        given = []
        for name, tensor in self._tensors.items():
            if tensor is None:
                continue
            fresh = inputs.make(self._op, case, dtype, self._seed, "cuda", only=name)[name]
            tensor.untyped_storage().resize_(fresh.untyped_storage().nbytes())
            with torch.no_grad():
                tensor.copy_(fresh)
            given.append(tensor)
        return InputSnapshot(given if self._in_place else ())


def sampled(outputs: Sequence[torch.Tensor]) -> Tensors:
    """Return a copy of some entries of each output, evenly spaced, the same at each call."""
    flat = (output.detach().reshape(-1) for output in outputs)
    return tuple(each[:: max(1, each.numel() // SAMPLE)].clone() for each in flat)

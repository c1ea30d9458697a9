"""The clock of the GPU: one call on a cold L2, and the eager call as its caller waits for it."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from harness.nvml import Probe

# The buffer that is overwritten between calls, in sizes of the L2.
FLUSH_IN_L2 = 4
# Flushes in a row before the first call: meanwhile the host submits calls, and stays ahead.
HEAD_START = 8
# The energy counter moves ten times a second or so; a shorter window reads its steps.
ENERGY_WINDOW_S = 0.1

Call = Callable[[], object]


class Timer:
    """Times calls on a stream of its own; everything that is timed must run on `stream`."""

    def __init__(self):
        device = torch.cuda.current_device()
        self.stream = torch.cuda.Stream()
        self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        words = FLUSH_IN_L2 * self.l2_bytes // torch.int32.itemsize
        self._flush = torch.empty(words, dtype=torch.int32, device=device)
        self._probe = Probe()
        # A collection in the midst of a loop would be taken for the time of a call; and one
        # between cells need not look at what was loaded once and for all.
        gc.disable()
        gc.freeze()

    def capture(self, call: Call) -> tuple[Call, object]:
        """`call` as a CUDA graph: its replay, and the result that each replay overwrites.

        The call must have run on `stream` before: compilation and lazy set-up cannot be captured.
        Raises whatever made the capture fail.
        """
        graph, cause = torch.cuda.CUDAGraph(), None
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                try:
                    result = call()
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:
            # Ending an invalid capture fails as well, and would hide what made it invalid.
            raise cause or error from None
        return graph.replay, result

    def cold(self, calls: Sequence[Call], count: int) -> tuple[float, dict[str, object]]:
        """The median GPU time in µs of `count` calls in rotation, each after a flush of the L2.

        The flush overwrites a buffer of four times the L2 outside the pair of events; it takes
        longer than the host needs to submit the next call, so no host time lies between them. As
        in steady use, the L2 is full of written lines when the call starts. The second result is
        a reading of clocks, temperature and power from within the loop.
        """
        begin = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        end = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        with torch.cuda.stream(self.stream):
            calls[0]()
            for _ in range(HEAD_START):
                self._flush.zero_()
            for index in range(count):
                self._flush.zero_()
                begin[index].record()
                calls[index % len(calls)]()
                end[index].record()
            reading = self._probe.sample()
            self.stream.synchronize()
        times = [a.elapsed_time(b) for a, b in zip(begin, end, strict=True)]
        return statistics.median(times) * 1e3, reading

    def eager(self, calls: Sequence[Call], count: int) -> tuple[float, float | None]:
        """The wall time in µs of one of `count` calls in a row that end in one synchronization.

        The second result is the energy of one call in µJ, on a warm L2; None where the loop is
        too short for the counter.
        """
        with torch.cuda.stream(self.stream):
            self.stream.synchronize()
            energy_before = self._probe.energy_mj()
            began = time.perf_counter()
            for index in range(count):
                calls[index % len(calls)]()
            self.stream.synchronize()
            seconds = time.perf_counter() - began
            energy_after = self._probe.energy_mj()
        energy = None
        if seconds >= ENERGY_WINDOW_S and energy_before is not None and energy_after is not None:
            energy = (energy_after - energy_before) * 1e3 / count
        return seconds / count * 1e6, energy

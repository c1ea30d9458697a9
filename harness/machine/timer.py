"""The clock of the GPU: a call on a cold L2, the eager call as its caller waits for it, energy."""

import contextlib
import gc
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from harness.machine import energy, nvml

# The buffer that is overwritten between calls, in sizes of the L2.
FLUSH_IN_L2 = 4
# Flushes in a row before the first call: meanwhile the host submits calls, and stays ahead.
HEAD_START = 8
# How much longer than the host's work flushes take: submitting them is work as well.
SLACK = 1.25
# Between two readings of clocks while the GPU works; each reading takes some microseconds.
SAMPLE_S = 2e-4
# Calls go to the GPU in chunks of this length when energy is measured, so many of them ahead.
CHUNK_S, CHUNKS_AHEAD = 5e-3, 3
# Untimed calls before the timed ones, as a share of these: on a core where a process has not been,
# the first calls find nothing in its caches.
SETTLING = 0.1
# Eager calls are timed for so long, unless all of them take less. The wait for the GPU at the end
# is some 0.2 % of it. Slow libraries would else spend most of a cell with short calls here.
EAGER_S = 5e-3

Call = Callable[[], object]


class Timer:
    """Times calls on a stream of its own; everything that is timed must run on `stream`."""

    def __init__(self):
        device = torch.cuda.current_device()
        self.stream = torch.cuda.Stream()
        self._broken: list[torch.cuda.CUDAGraph] = []
        self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        words = FLUSH_IN_L2 * self.l2_bytes // torch.int32.itemsize
        self._flush = torch.empty(words, dtype=torch.int32, device=device)
        self._flush_s = self._flush_time()
        self._sampler = nvml.NvmlSampler()
        # A collection in the midst of a loop would count as the time of a call. A collection
        # between cells need not visit the objects that were loaded for good.
        gc.disable()
        gc.freeze()

    def capture(self, call: Call) -> tuple[Call, object]:
        """`call` as a CUDA graph: its replay, and the result that each replay overwrites.

        The call must have run on `stream` before: compilation and lazy set-up cannot be captured.
        Raises whatever made the capture fail.
        """
        graph, cause = torch.cuda.CUDAGraph(), None
        pool = torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                try:
                    result = call()
                except Exception as error:
                    cause = error
                    raise
        except Exception as error:
            self._abandon(graph, pool)
            # Ending an invalid capture fails as well, and would hide what made it invalid.
            raise cause or error from None
        return graph.replay, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
        """Ends for the allocator a capture that CUDA has ended as invalid.

        PyTorch does so only where CUDA ends it well. Otherwise the allocator takes the capture to
        go on, and gives no memory back for as long as the process lives.
        """
        device = torch.cuda.current_device()
        with contextlib.suppress(RuntimeError):  # the capture did end well
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)
            # The allocator of pinned memory goes on asking it whose stream it captures.
            self._broken.append(graph)

    def cold(
        self,
        calls: Sequence[Call],
        count: int,
        before: Sequence[Call] = (),
        host_s: float | None = None,
    ) -> tuple[float, dict[str, object]]:
        """The median GPU time in µs of `count` calls in rotation, each after a flush of the L2.

        The flush overwrites a buffer of four times the L2 outside the pair of events. It is
        repeated until it lasts longer than the host needs to submit the call. So no host time lies
        between the events, unless the call itself waits for the GPU. As in steady use, the L2 is
        full of written lines when the call starts. The second result is the `nvml.digest` of
        readings from within the loop.

        - before: for each call, work to do before its flush.
        - host_s: the seconds in which the host submits that work and the call; None to find them
          by calls.
        """
        before = before or [_nothing] * len(calls)
        begin = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        end = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        with torch.cuda.stream(self.stream):
            if host_s is None:
                host_s = self._submission_s(before[0], calls[0])
            flushes = 1 + int(SLACK * host_s / self._flush_s)
            self._overwrite(HEAD_START)
            for index in range(count):
                before[index % len(calls)]()
                self._overwrite(flushes)
                begin[index].record()
                calls[index % len(calls)]()
                end[index].record()
            reading = watch(self._sampler, end[-1])
            self.stream.synchronize()
        times = [a.elapsed_time(b) for a, b in zip(begin, end, strict=True)]
        return statistics.median(times) * 1e3, reading

    def eager(self, calls: Sequence[Call], count: int) -> float:
        """The wall time in µs of one of several calls in a row that end in one synchronization.

        They are `count` calls, or as many as `EAGER_S` holds if those would take longer. A tenth of
        `count` runs before them, is not timed in the result, and says how long a call takes.
        """
        settling = int(SETTLING * count)
        settling_s = self.in_a_row(calls, settling)
        if settling:
            held = int(EAGER_S * settling / settling_s)
            count = min(count, max(settling, held))
        return self.in_a_row(calls, count) / count * 1e6

    def in_a_row(self, calls: Sequence[Call], count: int) -> float:
        """The wall time in seconds of so many calls in rotation, until the GPU has done them."""
        with torch.cuda.stream(self.stream):
            began = time.perf_counter()
            for index in range(count):
                calls[index % len(calls)]()
            self.stream.synchronize()
            return time.perf_counter() - began

    def energy(
        self, calls: Sequence[Call], window_ms: float
    ) -> tuple[float, float] | tuple[None, None]:
        """The energy of a call in µJ and the half-width of its 95 % interval, by `energy.per_call`.

        It is the board's, idle power included, while calls follow each other without pause on a
        warm L2, for at least the window. None where the counter is missing or does not move.
        """
        read = self._sampler.energy_mj
        if read() is None:
            return None, None
        found: list[energy.Edge] = []
        done = threading.Event()

        def follow() -> None:
            try:
                found.extend(energy.edges(read, time.perf_counter, window_ms / 1e3))
            finally:
                done.set()

        chunk = max(1, int(CHUNK_S / (self.eager(calls, len(calls)) / 1e6)))
        # A reading blocks for milliseconds: beside the loop, not in it, or the GPU would run dry.
        follower = threading.Thread(target=follow)
        with torch.cuda.stream(self.stream):
            marks, began = [_mark()], time.perf_counter()
            marks[0].synchronize()
            rotation = itertools.cycle(calls)
            follower.start()
            while not done.is_set():
                for call in itertools.islice(rotation, chunk):
                    call()
                marks.append(_mark())
                marks[max(0, len(marks) - 1 - CHUNKS_AHEAD)].synchronize()
            self.stream.synchronize()
        follower.join()
        ended = [began + marks[0].elapsed_time(mark) / 1e3 for mark in marks]
        counts = chunk * np.arange(len(marks))
        return energy.per_call(found, lambda at: float(np.interp(at, ended, counts)))

    def _flush_time(self) -> float:
        """Seconds of one flush."""
        with torch.cuda.stream(self.stream):
            self._overwrite(1)
            begin = _mark()
            self._overwrite(HEAD_START)
            end = _mark()
            end.synchronize()
        return begin.elapsed_time(end) / 1e3 / HEAD_START

    def _submission_s(self, *calls: Call) -> float:
        """Seconds that the host needs to submit calls; the first after a pause may be slow."""
        times = []
        while not times or (len(times) < 2 and times[0] > self._flush_s):
            began = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - began)
        return min(times)

    def _overwrite(self, times: int) -> None:
        for _ in range(times):
            self._flush.zero_()


def watch(sampler: nvml.NvmlSampler, last: torch.cuda.Event) -> dict[str, object]:
    """Return what a sampler reads until an event of the current stream; see `nvml.digest`."""
    samples = [sampler.sample()]
    while not last.query():
        time.sleep(SAMPLE_S)
        samples.append(sampler.sample())
    return nvml.digest(samples)


def _nothing() -> None:
    pass


def _mark() -> torch.cuda.Event:
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark

"""Counters by which the last program of a launch knows that it is the last.

Each program takes a number by an atomic addition. The program with the last number finds the
results of all others in memory. It combines them in a fixed order and sets the counter to zero
again. So one launch does the work of two, and no launch has to clear anything first. The scheme is
that of NVIDIA's threadFenceReduction sample.
"""

from collections.abc import Iterator

import torch

from .._runtime.call_trace import asked_again

SLOTS = 1024
# Counters of a launch whose groups of programs each have their own.
MOST_COUNTERS = 1024

_free: dict[tuple[int, int], Iterator[torch.Tensor]] = {}
_of_stream: dict[tuple[int, int, int], torch.Tensor] = {}


def arrival_counter(device: torch.device) -> torch.Tensor:
    """Return a counter, int32 and zero, for one launch on the current stream, which leaves it zero.

    The launches of a stream follow each other and share a counter. A launch that is captured in a
    CUDA graph has its own for good, because a graph may be replayed beside any stream. Replays of a
    graph follow each other, unless the program instantiates it twice by hand.

    A stream is known by its handle. PyTorch never destroys its streams. If an external stream is
    destroyed while its work runs, it must not be made anew before that work has ended. Otherwise
    two launches share a counter.
    """
    return _counters(device, 1)


def arrival_counters(device: torch.device) -> torch.Tensor:
    """Return MOST_COUNTERS counters for one launch, as `arrival_counter` returns one."""
    return _counters(device, MOST_COUNTERS)


def _counters(device: torch.device, count: int) -> torch.Tensor:
    if device.type != "cuda" or torch.compiler.is_dynamo_compiling():
        return torch.zeros(count, dtype=torch.int32, device=device)
    return _slot(device, device.index, count)


@asked_again
def _slot(device: torch.device, index: int, count: int = 1) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing():
        slot = next(_free.get((index, count), iter(())), None)
        # If none is free, the graph makes its own and clears it at each replay.
        return torch.zeros(count, dtype=torch.int32, device=device) if slot is None else slot
    key = index, torch._C._cuda_getCurrentRawStream(index), count
    slot = _of_stream.get(key)
    if slot is None:
        slot = _of_stream[key] = _allocate(device, count)
    return slot


def _allocate(device: torch.device, count: int = 1) -> torch.Tensor:
    slot = next(_free.get((device.index, count), iter(())), None)
    if slot is None:
        # The zeros come from the host, whatever the default device is. The copy waits until they
        # are there, so any stream may use them.
        slots = torch.zeros(SLOTS * count, dtype=torch.int32, device="cpu").to(device)
        slot, *others = slots.split(count)
        _free[device.index, count] = iter(others)
    return slot

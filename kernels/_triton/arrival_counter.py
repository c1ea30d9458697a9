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

_free: dict[int, Iterator[torch.Tensor]] = {}
_of_stream: dict[tuple[int, int], torch.Tensor] = {}


def arrival_counter(device: torch.device) -> torch.Tensor:
    """Return a counter, int32 and zero, for one launch on the current stream, which leaves it zero.

    The launches of a stream follow each other and share a counter. A launch that is captured in a
    CUDA graph has its own for good, because a graph may be replayed beside any stream. Replays of a
    graph follow each other, unless the program instantiates it twice by hand.

    A stream is known by its handle. PyTorch never destroys its streams. If an external stream is
    destroyed while its work runs, it must not be made anew before that work has ended. Otherwise
    two launches share a counter.
    """
    if device.type != "cuda" or torch.compiler.is_dynamo_compiling():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _slot(device, device.index)


@asked_again
def _slot(device: torch.device, index: int) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing():
        slot = next(_free.get(index, iter(())), None)
        # If none is free, the graph makes its own and clears it at each replay.
        return torch.zeros(1, dtype=torch.int32, device=device) if slot is None else slot
    key = index, torch._C._cuda_getCurrentRawStream(index)
    slot = _of_stream.get(key)
    if slot is None:
        slot = _of_stream[key] = _allocate(device)
    return slot


def _allocate(device: torch.device) -> torch.Tensor:
    slot = next(_free.get(device.index, iter(())), None)
    if slot is None:
        # The zeros come from the host, whatever the default device is. The copy waits until they
        # are there, so any stream may use them.
        slots = torch.zeros(SLOTS, dtype=torch.int32, device="cpu").to(device)
        slot, *others = slots.split(1)
        _free[device.index] = iter(others)
    return slot

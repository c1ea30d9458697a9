"""Counters by which the last program of a launch knows that it is the last.

Each program takes a number by an atomic addition; who draws the last number finds the results of
all others in memory, combines them in a fixed order and sets the counter to zero again. So one
launch does what takes two, and none has to clear anything first. The scheme is that of NVIDIA's
threadFenceReduction sample.
"""

from collections.abc import Iterator

import torch

from .._runtime.call_trace import asked_again

SLOTS = 1024

_free: dict[int, Iterator[torch.Tensor]] = {}
_of_stream: dict[tuple[int, int], torch.Tensor] = {}


def arrival_counter(device: torch.device) -> torch.Tensor:
    """A counter, int32, that is zero, for one launch on the current stream; the launch must leave
    it zero.

    The launches of a stream follow each other and share a counter. One that is captured in a CUDA
    graph has its own for good, since a graph may be replayed beside any stream; replays of a graph
    follow each other, unless the program instantiates it twice by hand. A stream is known by its
    handle. PyTorch never destroys its streams; an external one that is destroyed while its work
    runs must not be made anew before that work has ended, or two launches share a counter.
    """
    if device.type != "cuda" or torch.compiler.is_dynamo_compiling():
        return torch.zeros(1, dtype=torch.int32, device=device)
    return _slot(device, device.index)


@asked_again
def _slot(device: torch.device, index: int) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing():
        slot = next(_free.get(index, iter(())), None)
        # Without a spare one the graph clears its own at each replay.
        return torch.zeros(1, dtype=torch.int32, device=device) if slot is None else slot
    key = index, torch._C._cuda_getCurrentRawStream(index)
    slot = _of_stream.get(key)
    if slot is None:
        slot = _of_stream[key] = _allocate(device)
    return slot


def _allocate(device: torch.device) -> torch.Tensor:
    slot = next(_free.get(device.index, iter(())), None)
    if slot is None:
        # From the host, whatever the default device is: the copy waits until the zeros are there,
        # for whichever stream.
        slots = torch.zeros(SLOTS, dtype=torch.int32, device="cpu").to(device)
        slot, *others = slots.split(1)
        _free[device.index] = iter(others)
    return slot

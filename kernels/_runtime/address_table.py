"""Tables on the device by which one launch serves a list of tensors.

A table is written once. Other addresses get a table of their own, so a launch that has not run yet,
or a captured graph, still reads what it was given. The copy comes from pinned memory, and the host
does not wait for it.

A CUDA graph repeats a copy at each replay, so the pinned end of a captured copy is kept for good.
The table lies in the memory of the graph, and may end with the launches that read it. Its place is
written again after them, in each replay too. A table that was made before the capture is kept for
good. A capture may not pin memory, so the calls before set some aside.
"""

import itertools
from collections.abc import Sequence

import torch

from . import internals

# A program that has ever new lengths starts anew.
MOST_KNOWN = 256
# Captures for which pinned memory is set aside.
SPARE = 4

# By lengths, chunk and device the stream that a table was copied on, and the table.
_chunks: dict[tuple, tuple[int, torch.Tensor]] = {}
_spare: dict[int, list[torch.Tensor]] = {}
# By identity, so that a table which several graphs read is there once.
_captured: dict[int, torch.Tensor] = {}


def address_table(
    addresses: Sequence[int], lengths: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return a table of addresses, row by row, and in its last row the lengths.

    Args:
        addresses: those of each tensor, of one kind of tensors after the other.
        lengths: the elements of each tensor of a kind.
        device: where the table lies.

    Returns:
        int64 `[kinds + 1, tensors]`.
    """
    return on_device((*addresses, *lengths), torch.int64, device).view(-1, len(lengths))


def chunk_table(lengths: Sequence[int], chunk: int, device: torch.device) -> torch.Tensor:
    """Return the tensor of each chunk, and the number of the chunk within its tensor.

    Args:
        lengths: the elements of each tensor.
        chunk: the elements of a chunk; the last one of a tensor may have fewer.
        device: where the table lies.

    Returns:
        int32 `[2, chunks]`.
    """
    stream = stream_of(device)
    key = tuple(lengths), chunk, device
    made_on, table = _chunks.get(key, (None, None))
    if capturing(device) and table is not None:
        keep(table)
    elif table is None or stream != made_on:
        counts = [-(-length // chunk) for length in lengths]
        owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
        numbers = itertools.chain.from_iterable(map(range, counts))
        table = on_device((*owners, *numbers), torch.int32, device).view(2, len(owners))
        if not capturing(device):
            if len(_chunks) >= MOST_KNOWN:
                _chunks.clear()
            _chunks[key] = stream, table
    return table


def on_device(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a new table of these numbers, for launches on the current stream.

    RuntimeError while a CUDA graph is captured, if no call before had as many numbers.
    """
    if not _on_gpu(device):
        return torch.tensor(values, dtype=dtype, device=device)
    size = len(values) * dtype.itemsize
    if capturing(device):
        spare = _spare.get(size)
        if not spare:
            raise RuntimeError(
                f"{len(values)} addresses: first seen while a CUDA graph is captured; expected a"
                " call with as many tensors before the capture"
            )
        pinned = spare.pop()
        keep(pinned)
    else:
        set_aside([len(values)], dtype, device)
        # PyTorch hands a block out again once its copy is done.
        pinned = _pinned(size)
    pinned = pinned.view(dtype)
    pinned.copy_(torch.tensor(values, dtype=dtype))
    table = torch.empty(len(values), dtype=dtype, device=device)
    table.copy_(pinned, non_blocking=True)
    return table


def set_aside(counts: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Make ready what `on_device` needs in captures to come, with tables of these lengths."""
    if not _on_gpu(device):
        return
    for count in set(counts):
        size = count * dtype.itemsize
        spare, wanted = _spare.setdefault(size, []), SPARE * counts.count(count)
        if len(spare) < wanted:
            spare += [_pinned(size) for _ in range(wanted - len(spare))]


def keep(*tensors: torch.Tensor) -> None:
    """Keep tensors for good, since a captured graph reads them."""
    _captured.update((id(tensor), tensor) for tensor in tensors)


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of a device is captured in a CUDA graph."""
    if not _on_gpu(device):
        return False
    if device.index in (None, internals.current_device()()):
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int:
    """Return the handle of the current stream of a tensor's device; a table is valid on one."""
    return internals.raw_stream()(device.index) if _on_gpu(device) else 0


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)

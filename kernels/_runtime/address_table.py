"""Tables on the device by which one launch serves a list of tensors.

A table of addresses changes with the memory of the tensors, so it is copied to the device anew if
it is not known. The copy comes from pinned memory, and the host does not wait for it. A CUDA graph
repeats the copy at each replay, so both ends of the copy are kept for good. A capture may not pin
memory, so the calls before set some aside.
"""

import itertools
from collections.abc import Sequence

import torch

from .layout import ACCESS_BYTES

# A program that has ever new addresses or lengths starts anew.
MOST_KNOWN = 256
# Blocks of pinned memory of one size that are set aside for captures.
SPARE = 4

_known: dict[tuple, torch.Tensor] = {}
_chunks: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
_spare: dict[int, list[torch.Tensor]] = {}
_captured: list[tuple[torch.Tensor, torch.Tensor]] = []


def address_table(
    rows: Sequence[Sequence[torch.Tensor]], lengths: Sequence[int]
) -> tuple[torch.Tensor, bool]:
    """Return a table of the addresses in rows, and whether all are multiples of 16 bytes.

    Args:
        rows: lists of tensors, all of one length and on one device.
        lengths: the numbers that the last row of the table holds.

    Returns:
        int64 `[rows + 1, tensors]` on the device, and the flag.
    """
    device = rows[0][0].device
    # A tensor of a build has no memory, but it may begin past an aligned address.
    addresses = [
        x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()
        for row in rows
        for x in row
    ]
    aligned = not any(address % ACCESS_BYTES for address in addresses)
    values = (*addresses, *lengths)
    return _on_device(values, torch.int64, device).view(len(rows) + 1, -1), aligned


def chunk_table(
    lengths: Sequence[int], chunk: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tensor of each chunk, and the first chunk of each tensor.

    Args:
        lengths: the elements of each tensor.
        chunk: the elements of a chunk; the last one of a tensor may have fewer.
        device: where the tables lie.

    Returns:
        int32 `[chunks]` and int32 `[tensors]`.
    """
    key = tuple(lengths), chunk, device
    if key not in _chunks or _capturing(device):
        counts = [-(-length // chunk) for length in lengths]
        owners = [owner for owner, count in enumerate(counts) for _ in range(count)]
        begins = [
            end - count for end, count in zip(itertools.accumulate(counts), counts, strict=True)
        ]
        made = tuple(_on_device(tuple(each), torch.int32, device) for each in (owners, begins))
        if _capturing(device):
            return made
        if len(_chunks) >= MOST_KNOWN:
            _chunks.clear()
        _chunks[key] = made
    return _chunks[key]


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _on_device(values: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return these numbers on the device, for launches on the current stream."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    key = values, dtype, device, torch.cuda.current_stream(device).cuda_stream
    if not capturing and key in _known:
        return _known[key]
    spare = _spare.setdefault(len(values) * dtype.itemsize, [])
    while not capturing and len(spare) < SPARE:
        spare.append(torch.empty(len(values) * dtype.itemsize, dtype=torch.uint8).pin_memory())
    if not spare:
        raise RuntimeError(
            f"{len(values)} addresses: first seen while a CUDA graph is captured; expected a call"
            " with as many tensors before the capture"
        )
    pinned = spare.pop().view(dtype)
    pinned.copy_(torch.tensor(values, dtype=dtype))
    table = torch.empty(len(values), dtype=dtype, device=device)
    table.copy_(pinned, non_blocking=True)
    if capturing:
        _captured.append((pinned, table))
        return table
    if len(_known) >= MOST_KNOWN:
        _known.clear()
    _known[key] = table
    return table

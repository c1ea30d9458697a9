"""Rows that are too long for the registers of one program: several hold a part each, and meet.

Each program stores what it knows of its part, counts itself, and waits until all of its row have.
A row is thus read once, as by the thread blocks of a cluster in QuACK (Dao-AILab, 2025), on any
GPU. That a program may wait for others is the idea of Merrill and Garland, "Single-pass parallel
prefix scan with decoupled look-back" (2016): programs start in the order of their ids, so those of
one row start together, and all but the last row in flight are complete and will make room. Of k
such kernels at a time k rows are incomplete; they have room while k times the parts of a row are no
more than the programs that the device holds at once.
"""

import torch
import triton
import triton.language as tl

from kernels._device import sm_count
from kernels._tuned import Config

# A device with as many multiprocessors as a row has parts holds all of them at a time.
MOST_PARTS = 32


def holds_parts(device: torch.device) -> bool:
    """Whether programs may wait for each other; not where they run one after the other."""
    return device.type != "cpu" and sm_count(device) >= MOST_PARTS


def divide(rows: int, n: int, parts: int, values: int, device: torch.device):
    """How `parts` programs, a power of two, share a row of n elements: the elements of each, the
    block that holds them, and where they meet: `values` float32 of each part, and a count of the
    programs that have come. One alone meets nobody: None, None."""
    # Triton's own cdiv and next_power_of_2 take longer than all else here.
    if parts == 1:
        return n, 1 << (n - 1).bit_length(), None, None
    # A part starts where 16 bytes do if its row does.
    length = -(-n // (16 * parts)) * 16
    known = torch.empty(rows * parts * values, dtype=torch.float32, device=device)
    count = torch.zeros(rows, dtype=torch.int32, device=device)
    return length, 1 << (length - 1).bit_length(), known, count


def programs(blocks: int, config: Config, device: torch.device) -> int:
    """How many programs walk so many blocks: one each, or with several STAGES, in which the blocks
    to come are loaded, as many as have room at 64 registers a thread; the parts of a row start
    together."""
    if config["STAGES"] == 1:
        return blocks
    parts, room = config["PARTS"], sm_count(device) * max(1, 32 // config["num_warps"])
    return min(blocks, room // parts * parts)


@triton.jit
def meet(count_ptr, PARTS: tl.constexpr):
    """Returns once PARTS programs have come here; what they stored before can then be read."""
    tl.debug_barrier()
    tl.atomic_add(count_ptr, 1, sem="release")
    while tl.atomic_add(count_ptr, 0, sem="acquire") < PARTS:
        pass


@triton.jit
def part_of_rows(
    block, M, N, LENGTH, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The rows [BLOCK_M, 1] and columns [1, BLOCK_N] of a block, and which of them there are.

    Consecutive blocks are the parts of a row. EVEN: the blocks cover M by N exactly.
    """
    rows = (block // PARTS * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    first = block % PARTS * LENGTH
    columns = first + tl.arange(0, BLOCK_N)[None, :]
    if EVEN:
        inside = tl.full((BLOCK_M, BLOCK_N), True, tl.int1)
    else:
        inside = (rows < M) & (columns < tl.minimum(first + LENGTH, N))
    return rows, columns, inside

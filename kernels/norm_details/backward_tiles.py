"""The tiles of the backward kernels of the norms, and the rules that choose them.

The measurements behind the rules are in docs/lab/layer_norm.md and docs/lab/rms_norm.md.
"""

import torch

from .._runtime.configs import Config, Configs
from .._runtime.device import shared_bytes, sm_count
from .._runtime.layout import ACCESS_BYTES
from .._triton.exchange import SHARERS
from .backward import (
    ROW_BYTES,
    UNALIGNED_COLUMNS,
    Backward,
    _norm_backward_row_kernel,
    _norm_sum_parts_kernel,
    is_whole,
)
from .backward_split import _norm_backward_split_kernel
from .backward_two_pass import _norm_backward_sums_kernel, _norm_backward_tile_kernel
from .columns import chunks_of, span_of

# The most accesses of a whole row that a thread has, by the size of an element.
ROW_ACCESSES = {2: 7, 4: 8}
# The most columns of a split of an unaligned row, and the warps of all programs of such rows.
UNALIGNED_SPLIT, UNALIGNED_WARPS = 5120, 8
# (longest row, rows of a tile, warps, stages, programs a multiprocessor): one chunk, a power of two
SHORT_TILES = (
    (256, 8, 4, 3, 2),
    (512, 8, 4, 3, 2),
    (1024, 4, 4, 3, 2),
    (2048, 2, 8, 3, 2),
    (4096, 1, 8, 3, 2),
)
# (warps of a program, programs a multiprocessor)
ROW_WARPS = ((4, 2), (8, 1), (16, 1))
# (warps, programs a multiprocessor, accesses of a thread) of splits: while one program waits for
# the sums of its row, others work. A layer norm keeps db too, so fewer columns fit.
SPLIT_FORMS, RMS_SPLIT_FORMS = ((4, 2, 7), (4, 3, 4)), ((8, 2, 4), (4, 4, 4))
# Two programs that share a row of an RMS norm have registers for one access more.
RMS_PAIR = (8, 2, 5)
# The form of splits if a row of shorter ones would have more splits than may wait.
LONGEST_FORM = (16, 1, 4)
# The most splits of an RMS norm that are faster if groups take rows in turn.
TURNS = 4
# The device for which the rule chooses, and the registers of one of its multiprocessors.
H200 = torch.device("meta")
REGISTERS = 65536


def _row_config(rows, block, stages, programs, warps):
    return {
        "BLOCK_M": rows, "BLOCK_N": block, "STAGES": stages, "PER_SM": programs,
        "num_warps": warps,
    }  # fmt: skip


def _split_config(block, stages, programs, splits, in_turn, warps):
    # A multiprocessor has registers for all programs that it is to hold.
    registers = min(248, REGISTERS // (32 * warps * programs) // 8 * 8)
    return {
        "BLOCK_N": block, "STAGES": stages, "PER_SM": programs, "NUM_SPLITS": splits,
        "IN_TURN": int(in_turn), "num_warps": warps, "maxnreg": registers,
    }  # fmt: skip


ROW_CANDIDATES = (
    *(
        _row_config(rows, block, 3, programs, warps)
        for rows, block, warps in (
            (8, 256, 4), (8, 512, 4), (4, 512, 4), (4, 1024, 4), (2, 1024, 8), (2, 2048, 8),
            (1, 2048, 8), (1, 4096, 8), (1, 4096, 16),
        )
        for programs in (1, 2)
    ),
    *(
        _row_config(1, accesses * warps, stages, programs, warps)
        for accesses in (128, 256)
        for warps in (4, 8, 16)
        for stages, programs in ((3, 1), (3, 2), (4, 1))
        if programs * warps in (8, 16)
    ),
)  # fmt: skip
SPLIT_CANDIDATES = tuple(
    _split_config(accesses * warps, 3, programs, splits, accesses == 128, warps)
    for splits in (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64)
    for accesses in (128, 256)
    for warps, programs in ((4, 2), (4, 3), (8, 2), (16, 1))
)
TILE_CANDIDATES = tuple(
    {"BLOCK_M": rows, "BLOCK_N": columns, "STAGES": stages, "num_warps": 4}
    for rows, columns in ((4, 512), (8, 256), (8, 512), (16, 256))
    for stages in (1, 3)
)
# The fastest of them for a layer norm, and for an RMS norm, whose sums take fewer registers.
TILE, RMS_TILE = (
    {"BLOCK_M": 8, "BLOCK_N": columns, "STAGES": stages, "num_warps": 4}
    for columns, stages in ((256, 3), (512, 1))
)
SUM_CANDIDATES = tuple(
    {"BLOCK_P": rows, "BLOCK_N": columns, "num_warps": 4}
    for rows, columns in ((32, 32), (64, 32), (128, 16), (256, 8))
)


def backward_configs(
    family: str,
    tile: Config = TILE,
    forms: tuple[tuple[int, int, int], ...] = SPLIT_FORMS,
    pair: tuple[int, int, int] | None = None,
) -> Backward:
    """Return the configurations of the five kernels, for the table of a family.

    Args:
        family: `layer_norm` or `rms_norm`.
        tile: the tile of the two kernels that read x and dy twice.
        forms: the forms of splits, in the order of `SPLIT_FORMS`.
        pair: the form of two splits that share a row, or None if it is among the others.
    """

    def choose_row(n, itemsize, aligned):
        for limit, rows, warps, stages, programs in SHORT_TILES:
            if n <= limit:
                return _row_config(rows, _power(n), stages, programs, warps)
        if not aligned:
            return _row_config(1, _fitting(n), 3, 1, UNALIGNED_WARPS)
        for warps, programs in ROW_WARPS:  # noqa: B007
            block = 32 * warps * ACCESS_BYTES // itemsize
            if n <= ROW_ACCESSES[itemsize] * block:
                break
        # The longest rows have no registers for the sums of several chunks.
        longest = n * itemsize == ROW_BYTES
        return _row_config(1, n if longest else block, 3, programs, warps)

    def choose_split(n, itemsize, aligned):
        if not aligned:
            shorter = min(-(-n // UNALIGNED_SPLIT), sm_count(H200) // SHARERS - 1)
            splits = max(-(-n // UNALIGNED_COLUMNS), shorter)
            block = _fitting(span_of(n, splits))
            return _split_config(block, 3, 1, splits, itemsize == 4, UNALIGNED_WARPS)
        found = []
        # Rows of four bytes take twice as long to move, so the wait for the sums weighs less.
        for warps, programs, accesses in forms if itemsize == 2 else ():
            block = 32 * warps * ACCESS_BYTES // itemsize
            splits = -(-n // (accesses * block))
            chunks, _ = chunks_of(n, splits, block)
            if SHARERS * splits <= programs * sm_count(H200):
                # The fewest slots without a column, then the fewest programs that wait.
                found.append((splits * chunks * block, splits, block, programs, warps))
        warps, programs, accesses = pair or (0, 0, 0)
        block = 32 * warps * ACCESS_BYTES // itemsize
        if itemsize == 2 and n <= 2 * accesses * block:
            found = [(0, 2, block, programs, warps)]
        if not found:
            warps, programs, accesses = LONGEST_FORM
            block = 32 * warps * ACCESS_BYTES // itemsize
            found = [(0, -(-n // (accesses * block)), block, programs, warps)]
        _, splits, block, programs, warps = min(found)
        in_turn = itemsize == 4 or (pair is not None and splits <= TURNS)
        return _split_config(block, 3, programs, splits, in_turn, warps)

    def choose_tile(n, itemsize):
        return tile

    return Backward(
        Configs(_norm_backward_row_kernel, ROW_CANDIDATES, choose_row, _suits_row, family),
        Configs(_norm_backward_split_kernel, SPLIT_CANDIDATES, choose_split, _suits_split, family),
        Configs(_norm_backward_sums_kernel, TILE_CANDIDATES, choose_tile, family=family),
        Configs(_norm_backward_tile_kernel, TILE_CANDIDATES, choose_tile, family=family),
        Configs(_norm_sum_parts_kernel, SUM_CANDIDATES, _choose_sum, family=family),
    )


def _power(n):
    # Two columns at least: a mask that is a constant keeps no product from fusing.
    return max(2, 1 << (n - 1).bit_length())


def _fitting(n):
    """An eighth of the next power of two: masks and single numbers leave few registers."""
    return n if n == _power(n) else max(2, _power(n) // 8)


def _suits_row(candidate, n, itemsize, aligned):
    """Return whether a tile suits rows that one program holds.

    It is a power of two or made of whole accesses, and a thread has 1 access of it or more, but
    at most `ROW_ACCESSES`. The shared memory has room for the loads of x, dy and ds in flight.
    """
    rows, block, stages, programs, warps = candidate.values()
    chunks = -(-n // block)
    held = rows * chunks * block * itemsize
    accesses = rows == 1 and n > 2048 and block * itemsize == 32 * warps * ACCESS_BYTES
    full = ACCESS_BYTES <= held // (32 * warps) <= ROW_ACCESSES[itemsize] * ACCESS_BYTES
    room = 3 * (stages - 1) * programs * held <= shared_bytes(H200)
    return is_whole(n, itemsize, aligned) and (block == _power(n) or accesses) and full and room


def _suits_split(candidate, n, itemsize, aligned):
    """Return whether a tile suits rows in splits.

    A chunk is one access of each thread, and a thread has 4 accesses or more. The programs of a
    multiprocessor fill at least half of its registers, and they all fit.
    """
    block, stages, programs, splits, _, warps, _ = candidate.values()
    chunks, full = chunks_of(n, splits, block)
    held = chunks * block * itemsize
    room = 3 * (stages - 1) * programs * held <= shared_bytes(H200)
    fits = (
        4 <= chunks <= ROW_ACCESSES[itemsize] and ROW_BYTES <= 2 * programs * held <= 2 * ROW_BYTES
    )
    accesses = block * itemsize == 32 * warps * ACCESS_BYTES
    return not is_whole(n, itemsize, aligned) and room and fits and accesses and full > 0


def _choose_sum(n, itemsize, num_partials):
    rows = min(num_partials, 128 if n <= 8192 else 64)
    return {"BLOCK_P": rows, "BLOCK_N": 2048 // rows, "num_warps": 4}

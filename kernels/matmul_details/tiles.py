"""Tiles of the kernels in Triton, by pointers and by descriptors: order, candidates, rules.

A rule takes the key that `launch.py` finds. The descriptor tile is the one that ends first by the
model of `cost.py`. The pointer tile follows from the size of the result. Its parts of K follow from
how many multiprocessors the tiles leave idle.
"""

from collections.abc import Iterable, Iterator

import triton
import triton.language as tl

from .._runtime.configs import Config
from .._triton.arrival_counter import MOST_COUNTERS
from . import cost

# Activations whose exp needs registers that the widest tile does not leave.
LONG = ("gelu", "gelu_tanh", "silu", "tanh")
# Programs of few rows that run beside each other on a multiprocessor.
FEW_ROWS, BESIDE = 16, 2
# Parts of K at most, and steps that a part has at least.
MOST_SPLITS, LEAST_STEPS = 16, 4


@triton.jit
def tile_coords(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """The row and the column of tile pid, in groups of GROUP_M rows of tiles."""
    group = pid // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    within = pid % (GROUP_M * tiles_n)
    return first_m + within % rows, within // rows


def _tile(m, n, k, group, warps, stages):
    return {
        "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP_M": group,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _split(tile, splits):
    return tile | {"SPLITS": splits}


# The rules choose from these; the tuner tries those named MORE_ as well.
DESCRIPTOR_CONFIGS = (
    _tile(128, 256, 64, 8, 8, 3),
    _tile(128, 128, 64, 8, 8, 4),
    _tile(128, 128, 64, 8, 8, 3),
    _tile(128, 128, 64, 8, 4, 4),
    _tile(64, 128, 128, 8, 4, 3),
    _tile(64, 64, 128, 8, 4, 4),
    _tile(64, 64, 32, 8, 4, 3),
)
MORE_DESCRIPTOR_CONFIGS = (
    _tile(128, 256, 64, 16, 8, 3),
    _tile(256, 128, 64, 8, 8, 3),
    _tile(64, 256, 64, 8, 4, 4),
    _tile(64, 128, 64, 8, 4, 5),
)
POINTER_TILES = (
    _tile(128, 64, 32, 8, 4, 4),
    _tile(128, 64, 64, 8, 8, 3),
    _tile(64, 64, 64, 8, 4, 2),
    _tile(128, 128, 32, 8, 8, 3),
    _tile(64, 64, 32, 8, 4, 2),
    _tile(32, 64, 64, 8, 4, 3),
)
# For few rows: nearly all traffic is b, so many programs have to copy it at once.
ROW_TILES = (_tile(16, 64, 128, 1, 4, 4), _tile(16, 32, 128, 1, 4, 3), _tile(16, 32, 64, 1, 4, 2))
POINTER_CONFIGS = tuple(
    _split(tile, splits) for tile in POINTER_TILES + ROW_TILES for splits in (1, 2, 4, 8, 16)
)
MORE_POINTER_CONFIGS = (
    *(_split(_tile(64, 64, 32, 8, 4, 4), splits) for splits in (1, 2)),
    _split(_tile(128, 64, 32, 8, 4, 3), 1),
    *(_split(_tile(16, 128, 64, 1, 4, 5), splits) for splits in (4, 8, 16)),
    *(_split(_tile(16, 32, 256, 1, 4, 4), splits) for splits in (1, 2, 4)),
)


def choose_descriptor(
    m, n, k, batches, sms, shared, itemsize, activation, gated, staged, whole_sectors, **_
):  # fmt: skip
    """Return the configuration of the descriptor kernel that ends first."""

    def us(config):
        # A gated tile has two products.
        tile, items = (config["BLOCK_M"], config["BLOCK_N"]), k * (1 + gated)
        return cost.tiles_us(
            cost.DESCRIPTOR, tile, m, n, items, batches, sms, itemsize, whole_sectors
        )

    return min(_described(itemsize, shared, staged, activation, gated), key=us)


def hopper_ends_first(
    m, n, k, batches, sms, shared, itemsize, activation, gated, staged, whole_sectors, **_
) -> bool:  # fmt: skip
    """Return whether the Hopper kernel ends before the descriptor kernel."""
    configs = _described(itemsize, shared, staged, activation, gated)
    tiles = {(config["BLOCK_M"], config["BLOCK_N"]) for config in configs}
    return cost.hopper_is_faster(tiles, m, n, k, batches, sms, itemsize, gated, whole_sectors)


def choose_pointer(m, n, k, batches, sms, shared, itemsize, gated, **_):
    """Return the configuration of the pointer kernel."""
    few = m <= FEW_ROWS and itemsize == 2
    if itemsize == 4:
        first = 0 if m * n >= 2048 * 2048 else 1 if m * n >= 1024 * 1024 else 5
    else:
        first = 3 if m * n >= 4096 * 4096 else 2
    ranked = ROW_TILES if few else (POINTER_TILES[first], *POINTER_TILES[2:])
    tile = next(_fitting(ranked, itemsize, shared, 0, gated))
    tiles = triton.cdiv(m, tile["BLOCK_M"]) * triton.cdiv(n, tile["BLOCK_N"]) * batches
    steps = triton.cdiv(k, tile["BLOCK_K"])
    room = sms * (BESIDE if few else 1)
    most = 1
    # K is split while programs are too few for the GPU and each keeps some steps for itself.
    while 2 * most * tiles <= room and 2 * most <= steps // LEAST_STEPS and most < MOST_SPLITS:
        most *= 2
    return tile | {"SPLITS": most if tiles <= MOST_COUNTERS else 1}


def _described(itemsize, shared, staged, activation, gated):
    """The configurations that the descriptor kernel may have."""
    return _fitting(DESCRIPTOR_CONFIGS[activation in LONG :], itemsize, shared, staged, gated)


def _fitting(
    configs: Iterable[Config], itemsize: int, shared: int, staged: int, gated: bool
) -> Iterator[Config]:
    """Those whose stages of a, b and up, and tiles of the epilogue, fit in `shared` bytes.

    staged: bytes in shared memory for each entry of a tile of the result, summed over the tensors
    that the epilogue reads or writes.
    """
    for config in configs:
        m, n, k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
        items = config["num_stages"] * (m * k + (1 + gated) * k * n)
        # Two accumulators take the registers of a tile twice as wide.
        if gated and m * n > 128 * 128:
            continue
        if items * itemsize + staged * m * n + 1024 <= shared:
            yield config

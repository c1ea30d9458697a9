"""The host's side that the launchers of a product share: kernel arguments, the key of the rules."""

import triton

from .._runtime.device import shared_bytes, sm_count
from .batches import Operand, Walk
from .cost import SECTOR_BYTES


def rule_key(walk: Walk, activation: str, accumulates: bool) -> dict[str, int | str | bool]:
    """Return the key of the rules: all on which the kernel and the tile of a launch depend.

    accumulates: whether the result is added to its buffer.
    """
    a, b, up, out = (walk.operands[name] for name in ("a", "b", "up", "out"))
    residual, device = walk.operands["residual"], a.matrix.device
    (m, k), n = a.matrix.shape, b.matrix.shape[1]
    return {
        "m": m, "n": n, "k": triton.cdiv(k, walk.count) if walk.parted else k,
        "batches": walk.count, "transposed": b.by_columns(),
        "shared": shared_bytes(device), "sms": sm_count(device),
        "activation": activation, "gated": up is not None, "itemsize": a.matrix.element_size(),
        "staged": out.matrix.element_size() * (1 + accumulates)
        + (0 if residual is None else residual.matrix.element_size()),
        "whole_sectors": whole_sectors(walk),
    }  # fmt: skip


def whole_sectors(walk: Walk) -> bool:
    """Return whether rows of a and b in memory lie multiples of a sector of the L2 cache apart."""
    stored = (walk.operands[name].stored.matrix for name in ("a", "b"))
    rows = (x.stride(0) * x.element_size() for x in stored)
    return all(each % SECTOR_BYTES == 0 for each in rows)


def common_arguments(walk: Walk, epilogue: dict) -> dict[str, object]:
    """Return the arguments that the kernels in Triton share.

    epilogue: arguments that finish a tile, whatever the operands.
    """
    a, b, residual = (walk.operands[name] for name in ("a", "b", "residual"))
    (m, k), n = a.matrix.shape, b.matrix.shape[1]
    return {
        **epilogue, "inner_batches": walk.sizes[1], "batches": walk.count, "M": m, "N": n, "K": k,
        "BATCHED": walk.count > 1, "residual_ptr": residual and residual.matrix,
        **strides_of("r", residual), **scale_arguments(walk),
    }  # fmt: skip


def scale_arguments(walk: Walk) -> dict[str, object]:
    """Return the factors of rows and columns, and their strides, as all kernels take them."""
    found = {}
    for name, letter, line in (("a_scale", "x", "m"), ("b_scale", "y", "n")):
        operand = walk.operands[name]
        found[f"{name}_ptr"] = operand and operand.matrix
        strides = strides_of(letter, operand)
        found |= {key: strides[key] for key in (f"stride_{letter}{each}" for each in "01" + line)}
    return found


def strides_of(letter: str, operand: Operand | None) -> dict[str, int]:
    """Return an operand's strides by parameter: two of batches, of rows, of columns."""
    values = (0, 0, 0, 0) if operand is None else (*operand.steps, *operand.matrix.stride())
    return {f"stride_{letter}{d}": value for d, value in zip("01mn", values, strict=True)}

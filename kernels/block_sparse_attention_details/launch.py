"""The host's side that the launchers of block-sparse attention share: tiles, kernel arguments."""

from collections.abc import Sequence

import torch

from .._runtime.configs import Config
from .._runtime.device import float32_dot
from ..attention_details.launch import padded


def fitting(ranked: Sequence[Config], block: int) -> list[Config]:
    """The configurations whose tiles fill a block without rest; all sizes are powers of two."""
    return [c for c in ranked if c["BLOCK_M"] <= block and c["BLOCK_N"] <= block]


def options_of(
    q: torch.Tensor,
    k: torch.Tensor,
    order: torch.Tensor,
    block_size: int,
    causal: bool,
    walked: int,
) -> dict[str, object]:
    """The arguments that follow from shapes and the mask, as all kernels take them.

    order: that of the rows or columns that programs own. walked: the length of the other side.
    """
    (h, sq, d), (heads, sk) = q.shape[1:], k.shape[1:3]
    batches, mask_heads, blocks = order.shape
    return {
        "H": h,
        "GROUP": h // max(1, heads),
        "SQ": sq,
        "SK": sk,
        "blocks": blocks,
        "stride_lb": mask_heads if batches > 1 else 0,
        "stride_lh": 1 if mask_heads > 1 else 0,
        "right": sk - sq,
        "CAUSAL": causal,
        "CUT": causal or walked % block_size != 0,
        # Only float32 has anything to split.
        "PRECISION": float32_dot() if q.dtype == torch.float32 else "ieee",
        "D": d,
        "BLOCK": block_size,
        "BLOCK_D": padded(d),
    }

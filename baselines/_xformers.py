"""Layout, mask and reason of a refusal, shared by the files of xFormers' operators."""

import re

from xformers.ops import LowerTriangularMask, memory_efficient_attention
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightMask,
)

from baselines._packed import lengths_of, made_once


def attention(q, k, v, mask, causal, window, op):
    """op: (forward, backward) operators of `xformers.ops.fmha`; None leaves the choice to it."""
    # The library wants [batch, position, head, dimension]: views, nothing is copied.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    rows, heads, keys = *q.shape[1:3], k.shape[1]
    if mask is not None and causal:
        raise ValueError("a mask beside causal is not offered")
    if mask is not None:
        mask = mask.expand(q.shape[0], heads, rows, keys)
    elif window is not None:
        mask = LocalAttentionFromBottomRightMask(window_left=window, window_right=0)
    elif causal:
        mask = LowerTriangularMask() if rows == keys else LowerTriangularFromBottomRightMask()
    return _attend(q, k, v, mask, op).transpose(1, 2)


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, window, softcap, op):
    if softcap is not None:
        raise ValueError("a softcap is not offered")

    def make():
        mask = BlockDiagonalMask.from_seqlens(*lengths_of(cu_seqlens_q, cu_seqlens_k))
        if window is not None:
            # There the last keys of a window count, its own among them.
            return mask.make_local_attention_from_bottomright(window + 1)
        return mask.make_causal_from_bottomright() if causal else mask

    mask = made_once(cu_seqlens_q, cu_seqlens_k, ("xformers", causal, window), make)
    return _attend(q[None], k[None], v[None], mask, op)[0]


def _attend(q, k, v, mask, op):
    """Attention of [batch, position, head, dimension], with the reason of a refusal."""
    heads, key_heads = q.shape[2], k.shape[2]
    if key_heads != heads:
        # It wants [batch, position, key head, head of its group, dimension].
        group = heads // key_heads
        q = q.unflatten(2, (key_heads, group))
        k, v = (x[:, :, :, None].expand(-1, -1, -1, group, -1) for x in (k, v))
    try:
        out = memory_efficient_attention(q, k, v, attn_bias=mask, op=op)
    except (NotImplementedError, ValueError) as error:  # the two that the library refuses with
        raise type(error)(_why(str(error))) from error
    return out.flatten(2, -2)


def decode_attention(q, k, v, lengths, op):
    if lengths is not None:
        raise ValueError("lengths on the device are not offered for a cache of this layout")
    return attention(q, k, v, None, q.shape[2] > 1, None, op)


def _why(message):
    """A refusal as one line: what the library says of each operator, without the inputs."""
    found = re.findall(r"`(\S+)` is not supported because:\n((?:    .*(?:\n|$))+)", message)
    said = (f"{name}: {', '.join(map(str.strip, text.splitlines()))}" for name, text in found)
    return "; ".join(said) or message

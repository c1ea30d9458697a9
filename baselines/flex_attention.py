"""PyTorch's flex_attention, compiled, with a block mask where the attention is causal."""

import functools

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from baselines._torch_compiler import compiled

LIBRARY = "torch"
# As PyTorch's compiler, which makes it.
AUTOTUNES = "all"

if not torch.cuda.is_available():
    # Compiled for a CPU it takes ten seconds a shape and has no backward pass.
    raise ImportError("flex_attention is compiled for a GPU here, and there is none")

_attend = compiled(flex_attention)


@functools.lru_cache(maxsize=8)
def _causal_mask(rows, keys, window, device):
    """Which blocks of scores are empty; made once a shape, as a training loop would."""

    def is_seen(batch, head, query, key):
        position = query + (keys - rows)
        past = position >= key
        return past if window is None else past & (position - window <= key)

    return create_block_mask(is_seen, None, None, rows, keys, device=device)


def attention(q, k, v, mask=None, causal=False, window=None):
    if mask is not None:
        raise ValueError("a mask is written as a function of the score there, not as a tensor")
    blocks = _causal_mask(q.shape[-2], k.shape[-2], window, q.device) if causal else None
    return _attend(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])

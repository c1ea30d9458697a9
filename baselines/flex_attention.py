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


def _is_past(batch, head, query, key):
    return query >= key


@functools.lru_cache(maxsize=8)
def _causal_mask(length, device):
    """Which blocks of scores are empty; made once a length, as a training loop would."""
    return create_block_mask(_is_past, None, None, length, length, device=device)


def attention(q, k, v, causal=False):
    mask = _causal_mask(q.shape[-2], q.device) if causal else None
    return _attend(q, k, v, block_mask=mask)

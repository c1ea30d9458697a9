"""PyTorch's flex_attention, compiled, with a block mask if rows are causal, sparse or packed."""

import functools

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from baselines._packed import made_once
from baselines._torch_compiler import compiled

LIBRARY = "torch"
# As PyTorch's compiler, which makes it.
AUTOTUNES = "all"
PREPARES = {"block_sparse_attention": {"block_mask": "_lists"}}

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


@functools.lru_cache(maxsize=8)
def _cap(softcap):
    """The function of a score that caps it; None if there is no softcap."""
    if softcap is None:
        return None
    return lambda score, *place: softcap * torch.tanh(score / softcap)


def attention(q, k, v, mask=None, causal=False, window=None, softcap=None):
    if mask is not None:
        raise ValueError("a mask is written as a function of the score there, not as a tensor")
    blocks = _causal_mask(q.shape[-2], k.shape[-2], window, q.device) if causal else None
    grouped = q.shape[1] != k.shape[1]
    return _attend(q, k, v, score_mod=_cap(softcap), block_mask=blocks, enable_gqa=grouped)


def _lists(q, k, v, block_mask, block_size, causal=False):
    """Its lists of a mask: blocks that the diagonal or an end cuts, and blocks without a cut."""
    (s, t), (i, j) = (q.shape[2], k.shape[2]), block_mask.shape[-2:]
    ends = block_size * torch.arange(1, max(i, j) + 1, device=q.device)
    whole = (ends[:i, None] <= s) & (ends[None, :j] <= t)
    some = torch.ones_like(whole)
    if causal:
        whole = whole & (ends[None, :j] - 1 <= ends[:i, None] - block_size + t - s)
        some = ends[None, :j] - block_size <= ends[:i, None] - 1 + t - s
    kept = block_mask[(None,) * (4 - block_mask.dim())]

    def is_seen(batch, head, query, key):
        return query + (t - s) >= key if causal else (query < s) & (key < t)

    counts, indices = [], []
    for part in (kept & some & ~whole, kept & whole):
        counts.append(part.sum(-1, dtype=torch.int32))
        order = torch.argsort(part.to(torch.uint8), dim=-1, descending=True, stable=True)
        indices.append(order.to(torch.int32).contiguous())
    return BlockMask.from_kv_blocks(
        *(counts[0], indices[0], counts[1], indices[1]),
        BLOCK_SIZE=block_size,
        mask_mod=is_seen,
        seq_lengths=(s, t),
    )


def block_sparse_attention(q, k, v, block_mask, block_size, causal=False):
    return _attend(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])


def _packed_mask(cu_seqlens_q, cu_seqlens_k, rows, keys, causal, window):
    """Which blocks of scores are empty; made once a batch, as a training step would."""
    device = cu_seqlens_q.device
    # The rows and keys of sequence i have the number i, and row r stands at key r + shift[r].
    numbers = torch.arange(len(cu_seqlens_q) - 1, device=device)
    of_row, of_key = (
        numbers.repeat_interleave(cu.diff(), output_size=size)
        for cu, size in ((cu_seqlens_q, rows), (cu_seqlens_k, keys))
    )
    shift = (cu_seqlens_k - cu_seqlens_q)[1:][of_row]

    def is_seen(batch, head, query, key):
        seen = of_row[query] == of_key[key]
        if causal:
            seen = seen & (key <= query + shift[query])
        if window is not None:
            seen = seen & (key >= query + shift[query] - window)
        return seen

    return create_block_mask(is_seen, None, None, rows, keys, device=device)


def attention_varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    causal=False,
    window=None,
    softcap=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
):
    def make():
        return _packed_mask(cu_seqlens_q, cu_seqlens_k, len(q), len(k), causal, window)

    blocks = made_once(cu_seqlens_q, cu_seqlens_k, ("flex", causal, window), make)
    given = (x.transpose(0, 1)[None] for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = _attend(*given, score_mod=_cap(softcap), block_mask=blocks, enable_gqa=grouped)
    return out[0].transpose(0, 1)

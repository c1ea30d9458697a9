"""Embedding: out[i] = weight[ids[i]], and a gradient of the weight that repeats bit for bit.

Memory decides. The forward pass copies rows. If there are more tokens than rows, it copies some
columns of all tokens first: then a row that many tokens have is still in the L2. Else it copies
whole rows one after the other. Rows that are no whole sectors of memory are copied so, too: two
parts of a sector that are written long after each other cost two writes of it.

The backward pass writes the whole gradient, most of it zeros, and reads each row of dy once. Each
row of the gradient has one program. So no row is written twice, and no two programs add to one
number. A program must find the tokens of a row, so the tokens are sorted by their id, and by their
place within an id (`embedding_details/sort.py`). Sums run in that order, in float32
(`embedding_details/sums.py`). PyTorch's backward pass sorts as well.
"""

import torch
import triton
import triton.language as tl

from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import (
    MOST_ITEMS,
    check_floating,
    check_integer,
    check_same_device,
    check_tensors,
)
from ._runtime.configs import Configs
from ._runtime.layout import as_rows_2d
from ._runtime.vector_access import access_items
from .embedding_details.sort import sorted_keys
from .embedding_details.sums import sum_tokens
from .embedding_details.tiles import WIDE, columns, suits

ACCUMULATES = {"embedding": "float32"}
# Bytes that memory writes at once.
SECTOR = 32


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, *, padding_idx: int | None = None
) -> torch.Tensor:
    """Return a row of the weight for each token.

    It is PyTorch's function without its options `max_norm`, `scale_grad_by_freq` and `sparse`. The
    gradient has the same bits in each run.

    Args:
        ids: any shape, int64 or int32, from 0 to V - 1. Values are checked on a CPU only; on a GPU
            the row of an id out of range is NaN, and its gradient goes nowhere.
        weight: `[V, C]`, float32, float16 or bfloat16.
        padding_idx: a row without a gradient, from -V to V - 1, or None.

    Returns:
        A new contiguous tensor `[..., C]` with the shape of ids, in the dtype of the weight. It is
        differentiable once, in the weight.

    Raises:
        TypeError: an argument has another kind or dtype.
        ValueError: the weight has other dimensions or another device than ids, padding_idx or an id
            is out of range, or there are too many tokens.

    Source:
        `torch.nn.functional.embedding`.

    Example:
        >>> weight = torch.randn(10, 4, device="cuda")
        >>> embedding(torch.tensor([[1, 2, 2]], device="cuda"), weight).shape
        torch.Size([1, 3, 4])
    """
    padding = -1
    if padding_idx is not None:
        check_integer("padding_idx", padding_idx)
        check_tensors(weight=weight)
        rows = weight.shape[0] if weight.dim() else 0
        padding = check_integer("padding_idx", padding_idx, -rows, rows - 1)
        padding += rows if padding < 0 else 0
    if needs_grad(weight):
        return _Embedding.apply(ids, weight, padding)
    return embedding_fwd(ids, weight)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, padding):
        out = embedding_fwd(ids, weight)
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding = weight.shape[0], padding
        return out

    @staticmethod
    @once
    def backward(ctx, dy):
        return None, embedding_bwd(ctx.saved_tensors[0], dy, ctx.rows, ctx.padding), None


def embedding_fwd(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return out `[..., C]`; arguments and errors as those of `embedding`."""
    check_tensors(ids=ids, weight=weight)
    _check(ids, weight)
    (v, c), m = weight.shape, ids.numel()
    out = torch.empty((*ids.shape, c), dtype=weight.dtype, device=weight.device)
    if out.numel() == 0:
        return out
    weight = as_rows_2d(weight)
    by_columns = m > v and c * out.element_size() % SECTOR == 0
    config = FORWARD.pick(
        out.device, c=min(c, WIDE), itemsize=out.element_size(), by_columns=by_columns
    )
    blocks, tiles = (m - 1) // config["BLOCK_M"] + 1, (c - 1) // config["BLOCK_C"] + 1
    _forward_kernel[(blocks * tiles,)](
        ids_ptr=ids.contiguous(), weight_ptr=weight, out_ptr=out,
        stride_weight=weight.stride(0), M=m, V=v, C=c, count=blocks if by_columns else tiles,
        BY_COLUMNS=by_columns, ITEMS=access_items(out.element_size(), c, weight.stride(0)),
        **config,
    )  # fmt: skip
    return out


def embedding_bwd(ids: torch.Tensor, dy: torch.Tensor, rows: int, padding: int) -> torch.Tensor:
    """Return the gradient of a weight of so many rows, contiguous.

    padding: the row whose gradient is zero; -1 if there is none.
    """
    dweight = torch.empty((rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device)
    if dweight.numel() == 0:
        return dweight
    keys = sorted_keys(ids.contiguous(), rows, padding)
    sum_tokens(keys, as_rows_2d(dy), dweight)
    return dweight


def _check(ids, weight):
    """Raise TypeError or ValueError unless ids and weight are tensors that `embedding` takes."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids: {ids.dtype}, expected int64 or int32")
    check_floating(weight=weight)
    if weight.dim() != 2:
        raise ValueError(f"weight: shape {tuple(weight.shape)}, expected [V, C]")
    check_same_device(ids=ids, weight=weight)
    if torch.compiler.is_compiling():
        return
    for name, size in (("ids", ids.numel()), ("weight", max(weight.shape))):
        if size > MOST_ITEMS:
            raise ValueError(f"{name}: a size of {size}, expected at most {MOST_ITEMS}")
    if ids.device.type == "cpu":
        outside = ids[(ids < 0) | (ids >= len(weight))]
        if outside.numel():
            raise ValueError(f"ids: {outside[0].item()}, expected 0 to {len(weight) - 1}")


@triton.jit
def _forward_kernel(
    ids_ptr, weight_ptr, out_ptr, stride_weight, M, V, C, count,
    BY_COLUMNS: tl.constexpr, ITEMS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """out[i] = weight[ids[i]], NaN for an id below 0 or from V on.

    Grid: cdiv(M, BLOCK_M) * cdiv(C, BLOCK_C). A program owns BLOCK_C columns of BLOCK_M tokens. It
    reads their ids and the rows of weight [V, C], and writes out [M, C]. BY_COLUMNS: whether
    programs that follow each other have the same columns, and not the same tokens. count: the
    number of such programs. C and the stride are multiples of ITEMS, those of an access.
    """
    stride_weight, C = stride_weight // ITEMS * ITEMS, C // ITEMS * ITEMS
    pid = tl.program_id(0)
    block = pid % count if BY_COLUMNS else pid // count
    tile = pid // count if BY_COLUMNS else pid % count
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = rows < M
    ids = tl.load(ids_ptr + rows, mask=inside, other=0).to(tl.int64)
    known = inside & (ids >= 0) & (ids < V)
    wide = (cols < C)[None, :]
    x = tl.load(
        weight_ptr + ids[:, None] * stride_weight + cols[None, :],
        mask=known[:, None] & wide, other=float("nan"),
    )  # fmt: skip
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :]
    tl.store(out_ptrs, x, mask=inside[:, None] & wide)


FORWARD_CONFIGS = tuple(
    {"BLOCK_M": rows, "BLOCK_C": columns, "num_warps": warps}
    for columns in (64, 128, 256, 512, 1024, 2048)
    for rows in (1, 2, 4, 8, 16, 32)
    for warps in (1, 2, 4)
    if 8 <= rows * columns // (32 * warps) <= 64
)


def _choose_forward(c, itemsize, by_columns):
    # Each of four warps has four accesses of 512 bytes on the way. By columns, a slice of all rows
    # is to stay in the L2; by rows, the accesses of a row are to lie side by side.
    width = columns(c, (256 if by_columns else 2048) // itemsize)
    return {"BLOCK_M": min(32, 8192 // (width * itemsize)), "BLOCK_C": width, "num_warps": 4}


FORWARD = Configs(_forward_kernel, FORWARD_CONFIGS, _choose_forward, suits)
embedding_fwd = cached_launch(embedding_fwd)
embedding_bwd = cached_launch(embedding_bwd)

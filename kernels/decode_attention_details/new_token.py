"""The new token of each sequence: checks of its tensors, its rotation, and its place in the caches.

The caches are written by the kernel that reads them. So no program may read a position that another
one writes: the keys before the new token come from the caches, and the new key from its own tensor.
"""

import torch
import triton
import triton.language as tl

from .._runtime.autograd import check_no_grad
from .._runtime.checks import (
    check_floating,
    check_same_device,
    check_same_dtype,
    check_tensors,
    check_that,
    shown,
)


def check_new_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None,
    new_k: torch.Tensor | None,
    new_v: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> None:
    """Raise TypeError or ValueError unless the token can be rotated, written and attended.

    q, k, v and lengths are checked already. Arguments as `decode_attention` takes them.
    """
    for pair in ({"new_k": new_k, "new_v": new_v}, {"cos": cos, "sin": sin}):
        absent = [name for name, x in pair.items() if x is None]
        check_tensors(**{name: x for name, x in pair.items() if x is not None})
        if len(absent) == 1:
            raise ValueError(f"{absent[0]}: None, expected a tensor, as the other of {[*pair]} is")
    if new_k is None:
        check_that(cos is None, f"cos: {shown(cos)}, expected None without new_k")
        return
    check_no_grad(new_k=new_k, new_v=new_v)
    (b, h, rows, d), heads = q.shape, k.shape[1]
    check_that(rows == 1, f"q: {rows} positions, expected 1 beside new_k")
    # A query that is not there gives nothing, so nothing would write its token.
    check_that(h > 0 or heads == 0, "q: 0 heads, expected one or more beside new_k")
    for name, x in (("new_k", new_k), ("new_v", new_v)):
        check_same_dtype(q=q, **{name: x})
        shape = tuple(x.shape)
        check_that(shape == (b, heads, 1, d), f"{name}: shape {shape}, expected {(b, heads, 1, d)}")
        check_same_device(q=q, **{name: x})
    for name, x in (("k", k), ("v", v)):
        _check_writable(name, x)
    check_that(v is not k, "v: the same tensor as k, expected another one to write")
    if cos is not None:
        _check_angles(q, k.shape[2], lengths, cos, sin)


def _check_writable(name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless each entry of a cache has a place of its own that can be written."""
    steps = x.stride()
    apart = f"{name}: strides {steps}, expected 1 last and no overlap to write in place"
    sides = list(zip(steps, x.shape, strict=True))
    check_that(steps[-1] == 1 and not any(step == 0 and n > 1 for step, n in sides), apart)
    # A traced graph has symbols here, and each comparison would bind it.
    if torch.compiler.is_compiling():
        return
    check_that(not x.is_neg(), f"{name}: a view with a lazy sign, expected plain memory to write")
    if not x.is_contiguous():
        reach = 0
        for step, n in sorted(sides):
            check_that(n <= 1 or step > reach, apart)
            reach += max(0, n - 1) * step


def _check_angles(
    q: torch.Tensor, s: int, lengths: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Raise TypeError or ValueError unless cos and sin are tables for the last of `s` positions.

    The lengths are compared with the tables only if they lie on a CPU, where no check waits.
    """
    check_no_grad(cos=cos, sin=sin)
    check_floating(cos=cos, sin=sin)
    d = q.shape[3]
    fits = cos.dim() == 2 and cos.shape[0] > 0 and 0 < 2 * cos.shape[1] <= d
    wanted = f"expected [L, R] with L > 0 and 0 < 2R <= {d}"
    check_that(fits, f"cos: shape {tuple(cos.shape)}, {wanted}")
    as_cos = f"sin: shape {tuple(sin.shape)}, expected {tuple(cos.shape)} as cos has"
    check_that(sin.shape == cos.shape, as_cos)
    check_same_device(q=q, cos=cos, sin=sin)
    most = s
    if lengths is not None:
        known = lengths.device.type == "cpu" and not torch.compiler.is_compiling()
        most = min(s, int(lengths.max())) if known and len(lengths) else 0
    rows = cos.shape[0]
    check_that(most <= rows, f"cos: {rows} rows, expected {most} or more, one for each position")


def note_writes(*caches: torch.Tensor) -> None:
    """Let autograd notice if it has saved what was overwritten in the caches."""
    for x in caches:
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(x)


@triton.jit
def angles_of(cos_ptr, sin_ptr, row, L, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Cosines and signed sines of a row of [L, R] for each entry of a head, [1, BLOCK_D] each.

    The first R entries have the opposite sine. A row that does not exist is NaN.
    """
    offs = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    first, mask = offs < R, offs < 2 * R
    exists = (row >= 0) & (row < L)
    places = tl.where(exists, row, 0).to(tl.int64) * R + tl.where(first, offs, offs - R)
    cos = tl.load(cos_ptr + places, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + places, mask=mask, other=0.0).to(tl.float32)
    cos, sin = tl.where(exists, cos, float("nan")), tl.where(exists, sin, float("nan"))
    return cos, tl.where(first, -sin, sin)


@triton.jit
def load_turned(
    ptrs, cos, sin, inside, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Heads, rotated and rounded to their dtype: [heads, BLOCK_D], zero outside.

    ptrs: [heads, 1], or a scalar for one, the first entry of each. cos, sin: those of `angles_of`.
    """
    offs = tl.arange(0, BLOCK_D)[None, :]  # [1, BLOCK_D]
    turned = offs < 2 * R
    x = tl.load(ptrs + offs, mask=inside & (offs < D), other=0.0)
    # The pair's other entry is loaded as well, so no entry has to change its thread.
    other_ptrs = ptrs + tl.where(offs < R, offs + R, offs - R)
    other = tl.load(other_ptrs, mask=inside & turned, other=0.0).to(tl.float32)
    # The compiler fuses the same product in the kernels of rotary embedding, so bits are the same.
    y = tl.fma(x.to(tl.float32), cos, other * sin)
    return tl.where(turned, y.to(x.dtype), x)

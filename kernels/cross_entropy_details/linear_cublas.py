"""Products of the fused cross entropy by cuBLAS, by way of PyTorch, accumulated in float32."""

import torch

# An inner dimension that cuBLAS may divide.
LONG = 4096


def write_product(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """Write out = a b + bias, rounded once to out's dtype.

    cuBLAS divides a long inner dimension among programs, and adds their parts in the dtype of the
    result. So a result of 16 bits comes by way of float32 if PyTorch can.

    out: [M, N]. a: [M, K]. b: [K, N]. bias: [N] or None. All have the same floating dtype.
    """
    if bias is not None:
        torch.addmm(bias, a, b, out=out)
    elif a.shape[1] > LONG and a.element_size() == 2 and _multiplies_wide(a):
        out.copy_(torch.mm(a, b, out_dtype=torch.float32))
    else:
        torch.mm(a, b, out=out)


def add_product(dw: torch.Tensor, a: torch.Tensor, b: torch.Tensor, further: bool) -> None:
    """Write dw = a b, or dw + a b if `further`, accumulated in float32 and stored in dw's dtype.

    dw: [M, N], of the dtype of a or float32. a: [M, K]. b: [K, N], of the dtype of a.
    """
    wide = {}
    if dw.dtype != a.dtype:
        if _multiplies_wide(a):
            wide = {"out_dtype": dw.dtype}
        else:
            a, b = a.to(dw.dtype), b.to(dw.dtype)
    if further:
        torch.addmm(dw, a, b, **wide, out=dw)
    else:
        torch.mm(a, b, **wide, out=dw)


# Findings of trials, by device and dtype.
_WIDE: dict[tuple[torch.device, torch.dtype], bool] = {}


def _multiplies_wide(a: torch.Tensor) -> bool:
    """Return whether PyTorch writes products of a in float32. If no trial may run now, it is no."""
    if not a.is_cuda:
        return False
    key = a.device, a.dtype
    # A captured graph may not wait for the result of a trial.
    if key not in _WIDE and not torch.cuda.is_current_stream_capturing():
        _WIDE[key] = _tried_wide(*key)
    return _WIDE.get(key, False)


def _tried_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether PyTorch writes and adds products of this dtype in float32 without a copy.

    Its version and its backend decide.
    """
    a = torch.full((16, 16), 256.0, dtype=dtype, device=device)
    out = torch.full((16, 16), torch.nan, dtype=torch.float32, device=device)
    try:
        torch.mm(a, a, out_dtype=out.dtype, out=out)
        torch.addmm(out, a, a, out_dtype=out.dtype, out=out)
    except (RuntimeError, TypeError):
        return False
    return bool((out == 2 * 16 * 256.0**2).all())

"""QuACK (Dao-AILab, 2025): CuTe DSL kernels, compiled at their first call; matmul tunes itself."""

import quack
import torch
from quack.gemm_interface import gemm, gemm_act, gemm_add
from quack.linear_cross_entropy import chunked_linear_cross_entropy, scaled_exp_lce_supported
from quack.rmsnorm import layernorm_bwd, layernorm_fwd
from quack.rotary import apply_rotary_emb

LIBRARY = "quack-kernels"
# Its kernels: quack/softmax.py, rmsnorm.py, cross_entropy.py and linear_cross_entropy.py of 0.6.5.
ACCUMULATES = {
    "softmax": "float32",
    "layer_norm": "float32",
    "rms_norm": "float32",
    "cross_entropy": "float32",
    "linear_cross_entropy": "float32",
}
# It times candidates in the first call with a shape (quack/autotuner.py).
AUTOTUNES = ("matmul", "linear_cross_entropy")
# layernorm_fwd takes float32 parameters only; the losses are float32 whatever the logits are.
WIDE = {
    "layer_norm": ("weight", "bias"),
    "cross_entropy": ("out",),
    "linear_cross_entropy": ("out",),
}
SETTINGS = {
    "linear_cross_entropy": "in bfloat16 its default chunk_size of 4096 is halved until no chunk"
    " has as many rows as a row has elements; the default call raises there (operand 'v': m == n"
    " makes row/col inference ambiguous)",
}
# The default of chunk_size, and the multiple to which its fused pipeline fills up the last chunk.
CHUNK = 4096
CHUNK_STEP = 128
# By what name the library has an activation.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu_erf",
    "gelu_tanh": "gelu_tanh_approx",
    "tanh": "tanh",
}


def softmax(x, scale=1.0, causal=False, mask=None):
    if scale != 1.0 or causal or mask is not None:
        raise ValueError("a softmax with a scale, a diagonal or a mask is not offered")
    return quack.softmax(x)


class _LayerNorm(torch.autograd.Function):
    """The library has both passes, and leaves it to its user to join them."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, rstd, mean = layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, weight, rstd, mean)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd, mean = ctx.saved_tensors
        return *layernorm_bwd(x, weight, dy, rstd, mean), None


def layer_norm(x, weight, bias, eps, residual=None):
    if residual is not None:
        raise ValueError("its layer norm takes no residual")
    if weight is None:
        raise ValueError("a layer norm without vectors is not offered")
    return _LayerNorm.apply(x, weight, bias, eps)


def rms_norm(x, weight, eps, residual=None, add_unit_offset=False):
    if add_unit_offset:
        raise ValueError("an offset of the weight is not offered")
    return quack.rmsnorm(x, weight, residual=residual, eps=eps, prenorm=residual is not None)


def matmul(
    a, b, bias=None, activation="none", residual=None, up=None, scale=1.0, save_preactivation=False
):
    if up is not None:
        raise ValueError("its gated form takes the columns of both factors interleaved")
    if activation == "none" and not save_preactivation:
        if residual is None:
            return gemm(a, b, bias=bias, alpha=scale)
        return gemm_add(a, b, residual, bias=bias, alpha=scale)
    if residual is not None:
        raise ValueError("its residual is added before the activation")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not offered")
    kind = ACTIVATIONS[activation]
    pre, out = gemm_act(
        a, b, bias=bias, activation=kind, alpha=scale, store_preact=save_preactivation
    )
    return (out, pre) if save_preactivation else out


def rotary(q, k, cos, sin, positions=None, interleaved=False):
    if positions is not None:
        raise ValueError("positions are not offered")
    out = tuple(apply_rotary_emb(x, cos, sin, interleaved) for x in (q, k) if x is not None)
    return out[0] if k is None else out


def cross_entropy(
    logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"
):
    if label_smoothing or z_loss:
        raise ValueError("label smoothing and z-loss are not offered")
    return quack.cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction)


def linear_cross_entropy(
    x,
    weight,
    targets,
    bias=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    reduction="mean",
):
    if bias is not None or label_smoothing or z_loss:
        raise ValueError("a bias, label smoothing and z-loss are not offered")
    chunk = CHUNK
    if scaled_exp_lce_supported(x, weight, CHUNK, reduction):
        chunk = _chunk_size(*x.shape)
    return chunked_linear_cross_entropy(
        x, weight, targets, chunk_size=chunk, ignore_index=ignore_index, reduction=reduction
    )


def _chunk_size(rows, columns):
    """The largest chunk_size with which the library tells a chunk's rows from its columns."""
    chunk = CHUNK
    while chunk > CHUNK_STEP and columns in _chunk_rows(rows, chunk):
        chunk //= 2
    return chunk


def _chunk_rows(rows, chunk):
    """The rows of the chunks: of the whole ones, and of the last, filled up."""
    last = (rows - 1) % chunk + 1
    filled = -(-last // CHUNK_STEP) * CHUNK_STEP
    return {filled, chunk} if rows > chunk else {filled}

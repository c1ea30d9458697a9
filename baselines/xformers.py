"""xFormers: attention by the operator that it chooses, its tiled matmul and its RMS norm."""

from xformers.ops.rmsnorm import rms_norm as rms_norm_of
from xformers.ops.rmsnorm import rms_norm_add
from xformers.ops.tiled_matmul import tiled_matmul

from baselines import _xformers
from baselines._torch_formulas import activate

LIBRARY = "xformers"
# Its kernels: xformers/ops/_triton/rmsnorm_kernels.py and tiled_matmul_kernels.py of 0.0.35.
ACCUMULATES = {"rms_norm": "float32", "matmul": "float32"}
# Triton's autotuner chooses among the tiles of the latter file.
AUTOTUNES = ("matmul",)
# With a residual it writes the sum over x.
IN_PLACE = ("rms_norm",)


def attention(q, k, v, mask=None, causal=False, window=None):
    return _xformers.attention(q, k, v, mask, causal, window, None)


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
    options = causal, window, softcap, None
    return _xformers.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)


def decode_attention(q, k, v, lengths=None):
    return _xformers.decode_attention(q, k, v, lengths, None)


def rms_norm(x, weight, eps, residual=None, add_unit_offset=False):
    if add_unit_offset:
        raise ValueError("an offset of the weight is not offered")
    if residual is None:
        return rms_norm_of(x, weight, eps)
    if residual.dtype != x.dtype:
        raise ValueError("a residual of another dtype is not offered")
    return rms_norm_add(x, residual, weight, eps), x


def matmul(a, b, bias=None, activation="none", residual=None, up=None, **others):
    if a.dim() > 2 or residual is not None or up is not None or others:
        raise ValueError("batches, a residual, a scale, a gate and pre-activations are not offered")
    # The library's matmul has no epilogue: bias and activation are PyTorch's, as its user has them.
    out = tiled_matmul([[a]], [[b]])[0][0]
    return activate(out if bias is None else out + bias, activation)

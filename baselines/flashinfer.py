"""FlashInfer (Ye et al., 2025): kernels for inference, which have no gradients.

Its norms are CuTe DSL kernels, compiled at their first call. Its attention is CUDA that nvcc
compiles at its first call, for one request at a time; batches have a layout of their own there. Its
gates want gate and up in one tensor, its rotary embedding a table of cosine and sine by position:
these have no call here.
"""

import torch
from flashinfer.norm import fused_add_rmsnorm, layernorm, rmsnorm
from flashinfer.prefill import single_prefill_with_kv_cache
from flashinfer.sparse import BlockSparseAttentionWrapper

LIBRARY = "flashinfer-python"
# Its kernels: flashinfer/norm/kernels/ of 0.7.2, the files of these names.
ACCUMULATES = {"layer_norm": "float32", "rms_norm": "float32"}
# With a residual it writes the norm over x, and the sum over the residual.
IN_PLACE = ("rms_norm",)
# layernorm takes float32 parameters only.
WIDE = {"layer_norm": ("weight", "bias")}
# Its plan is made once for a mask.
PREPARES = {"block_sparse_attention": {"block_mask": "_plan"}}
# Bytes of the workspace that its documentation recommends.
WORKSPACE = 128 * 2**20


def layer_norm(x, weight, bias, eps, residual=None):
    if residual is not None:
        raise ValueError("its layer norm takes no residual")
    if x.dtype != torch.bfloat16:
        raise ValueError("its layer norm is for bfloat16")
    if weight is None:
        raise ValueError("a norm without vectors is not offered")
    _for_inference(x, weight, bias)
    return layernorm(x, weight, bias, eps)


def rms_norm(x, weight, eps, residual=None, add_unit_offset=False):
    if weight is None or add_unit_offset:
        raise ValueError("a norm without a weight, or with an offset, has no call here")
    if residual is not None and residual.dtype != x.dtype:
        raise ValueError("a residual of another dtype is not offered")
    _for_inference(x, weight, residual)
    if residual is None:
        return rmsnorm(x, weight, eps)
    fused_add_rmsnorm(x, residual, weight, eps)
    return x, residual


def attention(q, k, v, mask=None, causal=False, window=None, softcap=None):
    if q.shape[0] != 1:
        raise ValueError("a batch in this layout is not offered")
    if mask is not None:
        raise ValueError("an additive mask is not offered")
    _for_inference(q, k, v)
    # It wants queries as [position, head, dimension], and takes the others as they are.
    out = single_prefill_with_kv_cache(
        q[0].transpose(0, 1),
        k[0],
        v[0],
        causal=causal,
        kv_layout="HND",
        window_left=-1 if window is None else window,
        logits_soft_cap=softcap,
    )
    return out.transpose(0, 1)[None]


def _plan(q, k, v, block_mask, block_size, causal=False):
    s, t = q.shape[2], k.shape[2]
    if q.shape[0] != 1 or block_mask.numel() != block_mask.shape[-2] * block_mask.shape[-1]:
        raise ValueError("a batch, or a mask for each head, is not offered in this layout")
    if causal:
        raise ValueError("blocks that the diagonal cuts are not offered")
    if s % block_size or t % block_size:
        raise ValueError("a last block that is shorter is not offered")
    kept = block_mask.view(block_mask.shape[-2:])
    offsets = kept.sum(-1, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    planned = BlockSparseAttentionWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=q.device)
    )
    planned.plan(
        torch.cat([offsets.new_zeros(1), offsets]),
        kept.nonzero()[:, 1].to(torch.int32),
        *(s, t, block_size, block_size, q.shape[1], k.shape[1], q.shape[3]),
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
        o_data_type=q.dtype,
    )
    return planned


def block_sparse_attention(q, k, v, block_mask, block_size, causal=False):
    _for_inference(q, k, v)
    # It wants [position, head, dimension]: views, nothing is copied.
    out = block_mask.run(*(x[0].transpose(0, 1) for x in (q, k, v)))
    return out.transpose(0, 1)[None]


def _for_inference(*tensors):
    wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if wanted and torch.is_grad_enabled():
        raise ValueError("gradients are not offered")

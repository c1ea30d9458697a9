"""flash-attn 2 (Dao, 2024): its CUDA attention, and the Triton kernels that the package carries."""

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

LIBRARY = "flash-attn"
# Its kernels: flash_attn/ops/triton/layer_norm.py and cross_entropy.py of 2.8.3. Its product,
# linear.py, imports triton.ops, which Triton 3 has not: no call of it can be made.
ACCUMULATES = {"layer_norm": "float32", "rms_norm": "float32", "cross_entropy": "float32"}
# Triton's autotuner chooses in layer_norm.py.
AUTOTUNES = ("layer_norm", "rms_norm")
# Its losses are float32 whatever the logits are.
WIDE = {"cross_entropy": ("out",)}


def attention(q, k, v, mask=None, causal=False, window=None, softcap=None):
    if mask is not None:
        raise ValueError("a mask is not offered")
    # The library wants [batch, position, head, dimension]: views, nothing is copied.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bounds = (-1 if window is None else window, 0 if causal else -1)
    out = flash_attn_func(q, k, v, causal=causal, window_size=bounds, softcap=softcap or 0.0)
    return out.transpose(1, 2)


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
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        causal=causal,
        window_size=(-1 if window is None else window, 0 if causal else -1),
        softcap=softcap or 0.0,
    )


def decode_attention(q, k, v, lengths=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    ends = None if lengths is None else lengths.int()
    return flash_attn_with_kvcache(q, k, v, cache_seqlens=ends, causal=True).transpose(1, 2)


def gelu(x, approximate="none"):
    if approximate != "tanh":
        raise ValueError("gelu by erf is not offered")
    # It lies apart because TorchScript, which compiles it, is wanted by nothing else here.
    from flash_attn.ops.activations import fast_gelu_impl

    return fast_gelu_impl(x)


# The modules of the Triton kernels are imported late. The norms ask for a GPU at import; without
# one, the attention must still be importable.
def layer_norm(x, weight, bias, eps, residual=None):
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    fused = residual is not None
    if weight is None:
        raise ValueError("a norm without a weight is not offered")
    return layer_norm_fn(x, weight, bias, residual=residual, eps=eps, prenorm=fused)


def rms_norm(x, weight, eps, residual=None, add_unit_offset=False):
    from flash_attn.ops.triton.layer_norm import rms_norm_fn

    fused = residual is not None
    if weight is None:
        raise ValueError("a norm without a weight is not offered")
    how = {"zero_centered_weight": True} if add_unit_offset else {}
    return rms_norm_fn(x, weight, None, residual=residual, eps=eps, prenorm=fused, **how)


def swiglu(gate, up):
    from flash_attn.ops.activations import swiglu

    return swiglu(gate, up)


def rotary(q, k, cos, sin, positions=None, interleaved=False):
    if positions is not None:
        raise ValueError("positions are not offered")
    from flash_attn.layers.rotary import apply_rotary_emb

    out = tuple(apply_rotary_emb(x, cos, sin, interleaved) for x in (q, k) if x is not None)
    return out[0] if k is None else out


def cross_entropy(
    logits, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0, reduction="mean"
):
    from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

    losses, _ = cross_entropy_loss(
        logits,
        targets,
        label_smoothing=label_smoothing,
        lse_square_scale=z_loss,
        ignore_index=ignore_index,
    )
    # Its user reduces them.
    if reduction == "none":
        return losses
    loss = losses.sum()
    return loss / (targets != ignore_index).sum() if reduction == "mean" else loss

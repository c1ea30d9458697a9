"""Liger-Kernel (Hsu et al., 2024): its functional interface, and its rotary form for Llama 4."""

import torch
import torch.nn.functional as F
from liger_kernel.transformers.functional import (
    liger_cross_entropy,
    liger_fused_add_rms_norm,
    liger_fused_linear_cross_entropy,
    liger_geglu,
    liger_layer_norm,
    liger_rms_norm,
    liger_rope,
    liger_softmax,
    liger_swiglu,
)
from liger_kernel.transformers.llama4_rope import liger_llama4_text_rotary_pos_emb

LIBRARY = "liger-kernel"
# Its kernels: liger_kernel/ops/ of 0.8.5, the files of these names.
ACCUMULATES = {
    "softmax": "float32",
    "layer_norm": "float32",
    "rms_norm": "float32",
    "cross_entropy": "float32",
    "linear_cross_entropy": "float32, dw of the chunks in its dtype",
}

# The loss writes its gradient over the logits, and the gates over the tensors that they saved,
# which belong to the user. The rotary embedding works in place in both passes. The gradient of an
# RMS norm overwrites that of its result, because `in_place` is true by default.
IN_PLACE = ("cross_entropy", "swiglu", "geglu", "rotary", "rms_norm")
# The fused loss is float32 whatever the factors are.
WIDE = {"linear_cross_entropy": ("out",)}


def softmax(x, scale=1.0, causal=False, mask=None):
    if scale != 1.0 or causal or mask is not None:
        raise ValueError("a softmax with a scale, a diagonal or a mask is not offered")
    return liger_softmax(x)


def layer_norm(x, weight, bias, eps, residual=None):
    if residual is not None:
        raise ValueError("its layer norm takes no residual")
    if weight is None:
        raise ValueError("a layer norm without vectors is not offered")
    return liger_layer_norm(x, weight, bias, eps)


def rms_norm(x, weight, eps, residual=None, add_unit_offset=False):
    how = {"offset": 1.0, "casting_mode": "gemma"} if add_unit_offset else {}
    if residual is None:
        return liger_rms_norm(x, weight, eps, **how)
    if residual.dtype != x.dtype:
        raise ValueError("a residual of another dtype is not offered")
    return liger_fused_add_rms_norm(x, residual, weight, eps, **how)


def swiglu(gate, up):
    return liger_swiglu(gate, up)


def geglu(gate, up, approximate="tanh"):
    if approximate != "tanh":
        raise ValueError("the erf form is not offered")
    return liger_geglu(gate, up)


def rotary(q, k, cos, sin, positions=None, interleaved=False):
    if k is None or positions is not None:
        raise ValueError("queries alone and positions are not offered")
    if interleaved:
        return _turned_neighbours(q, k, cos, sin)
    # It wants [batch, head, position, dimension], a view.
    views = q.transpose(1, 2), k.transpose(1, 2)
    turned = liger_rope(*views, cos, sin, rotary_dim=2 * cos.shape[-1])
    return tuple(x.transpose(1, 2) for x in turned)


def _turned_neighbours(q, k, cos, sin):
    """The form for Llama 4, where an angle is a complex number."""
    if 2 * cos.shape[-1] != q.shape[-1]:
        raise ValueError("neighbours in a part of each head are not offered")
    return liger_llama4_text_rotary_pos_emb(q, k, torch.complex(cos.float(), sin.float()))


def linear(x, weight, bias=None, activation="none", up=None):
    """The products are PyTorch's, as in the library's MLPs; the gate is its own."""
    if up is None or activation not in ("silu", "gelu_tanh"):
        raise ValueError("a linear layer without a gate by SiLU or GELU's tanh form is not offered")
    gate = liger_swiglu if activation == "silu" else liger_geglu
    return gate(F.linear(x, weight, bias), F.linear(x, up))


def cross_entropy(
    logits,
    targets,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    reduction="mean",
    softcap=None,
):
    return liger_cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=z_loss,
        reduction=reduction,
        softcap=softcap,
    )


def linear_cross_entropy(
    x,
    weight,
    targets,
    bias=None,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    reduction="mean",
    softcap=None,
):
    if reduction == "none":
        raise ValueError("the losses of rows have no gradients there")
    return liger_fused_linear_cross_entropy(
        x,
        weight,
        targets,
        bias,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        lse_square_scale=z_loss,
        reduction=reduction,
        softcap=softcap,
    )


def embedding(ids, weight, padding_idx=None):
    if padding_idx is not None:
        raise ValueError("its padding clears the rows of the result, which PyTorch's does not")
    # An experimental part, absent from older releases.
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    return LigerEmbeddingFunction.apply(weight, ids)

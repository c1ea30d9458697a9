"""The attention modules of Hugging Face: rotary embedding, and scaled dot-product attention.

Their forward pass stays theirs. Two names that it looks up are others for this module: the function
that turns queries and keys, and the table of attention functions, of which `sdpa` alone differs.
"""

import torch
from torch import nn

from kernels.attention import attention
from kernels.rotary import rotary
from network.accelerate.setting import (
    FAMILIES,
    FLOATING,
    GATED_FAMILIES,
    Left,
    Setting,
    Swap,
    forward_of,
    is_of,
    stays,
    unfit_alone,
    with_globals,
)

ROTARY, TABLE = "apply_rotary_pos_emb", "ALL_ATTENTION_FUNCTIONS"
TOKENS = 4


def rule(module: nn.Module, setting: Setting) -> list[Swap | Left]:
    if not is_of(module, FAMILIES, "Attention"):
        return []
    forward = type(module).forward
    found, left = {}, []
    heads, kv_heads, size = _heads(module)
    names = forward.__globals__ if hasattr(forward, "__globals__") else {}
    if is_of(module, GATED_FAMILIES, "Attention"):
        pairs = (1, TOKENS, heads, size), (1, TOKENS, kv_heads, size)
        angles = (TOKENS, size // 2, "constant")
        if why := setting.refusal(module, rotary, *pairs, angles, angles):
            left.append(Left(f"rotary: {why}"))
        elif ROTARY in names:
            found[ROTARY] = _turning(names[ROTARY])
    shapes = ((1, heads, TOKENS, size), *[(1, kv_heads, TOKENS, size)] * 2)
    implementation = module.config._attn_implementation
    if implementation != "sdpa":
        left.append(Left(f"attention: its implementation is {implementation}, and sdpa is known"))
    elif why := setting.refusal(module, attention, *shapes, **_settings(module, setting)):
        left.append(Left(f"attention: {why}"))
    elif TABLE in names:
        found[TABLE] = _Table(names[TABLE])
    if not found:
        return left
    changed = with_globals(forward, **found)
    if changed is None:
        return [*left, Left("its forward pass is of another version of transformers")]
    by = ", ".join("rotary" if name == ROTARY else "attention" for name in found)
    return [Swap(by, (forward_of(module, changed),)), *left]


def _heads(module):
    config = module.config
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads, module.head_dim


def _settings(module, setting):
    """The keyword arguments that the module will hand over, with its dropout while training."""
    dropout = _dropout(module) if setting.training else 0.0
    return {"causal": True, **({"dropout": dropout, "seed": 1} if dropout else {})}


def _dropout(module):
    inner = getattr(module, "attn_dropout", None)
    return module.attention_dropout if inner is None else inner.p


def _turning(theirs):
    """Return the function that turns queries and keys, for calls that the kernel serves."""

    def turn(q, k, cos, sin, unsqueeze_dim=1):
        if why := _rotary_unfit(q, k, cos, unsqueeze_dim):
            stays("rotary embedding", why)
            return theirs(q, k, cos, sin, unsqueeze_dim)
        half = cos.shape[-1] // 2  # both halves are alike
        angles = cos[0, :, :half], sin[0, :, :half]
        turned = rotary(q.transpose(1, 2), k.transpose(1, 2), *angles)
        return tuple(x.transpose(1, 2) for x in turned)

    return turn


def _rotary_unfit(q, k, cos, unsqueeze_dim):
    if unsqueeze_dim != 1 or q.dim() != 4 or cos.dim() != 3:
        return "its tensors have another layout"
    if cos.shape[0] != 1:
        return "each sequence has positions of its own"
    if k.dtype != q.dtype or cos.dtype not in FLOATING:
        return f"its queries are {q.dtype} and its angles {cos.dtype}"
    return unfit_alone(q)


class _Table:
    """The table of attention functions, in which `sdpa` leads to the kernel."""

    def __init__(self, theirs):
        self.theirs = theirs

    def get_interface(self, name, default):
        plain = self.theirs.get_interface(name, default)
        return _attending(plain) if name == "sdpa" else plain


def _attending(plain):
    def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **others):
        if why := _attention_unfit(module, query, key, value, attention_mask, others):
            # A token that is read with a cache is decoding, which the kernel is not for.
            if query.shape[2] > 1:
                stays(module, why)
            given = {"dropout": dropout, "scaling": scaling, **others}
            return plain(module, query, key, value, attention_mask, **given)
        settings = {}
        if scaling is not None and abs(scaling * query.shape[-1] ** 0.5 - 1) > 1e-6:
            settings["scale"] = scaling
        if dropout:
            seed = torch.randint(2**62, (), device=query.device)
            settings |= {"dropout": dropout, "seed": seed}
        out = attention(query, key, value, causal=True, **settings)
        return out.transpose(1, 2), None

    return attend


def _attention_unfit(module, q, k, v, mask, others):
    if mask is not None:
        return "it has a mask"
    if q.shape[2] != k.shape[2]:
        return "it has keys of former tokens"
    causal = others.get("is_causal")
    if not (module.is_causal if causal is None else causal):
        return "it is not causal"
    # Under autocast PyTorch's rotary embedding makes float32 of queries and keys alone.
    if not q.dtype == k.dtype == v.dtype:
        return f"its queries are {q.dtype} and its values {v.dtype}"
    odd = [name for name in ("softcap", "position_bias", "cache") if others.get(name) is not None]
    return f"it has {odd[0]}" if odd else unfit_alone(q)

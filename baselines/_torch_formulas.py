"""Each op as a user of PyTorch writes it; eager mode and the compiler bind the same functions."""

import math

import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw as adamw_step

from baselines._packed import lengths_of

LEAKY_SLOPE = 0.01


def scale(x, alpha):
    return x * alpha


def add(x, y):
    return x + y


def mul(x, y):
    return x * y


def maximum(x, y):
    return torch.maximum(x, y)


def minimum(x, y):
    return torch.minimum(x, y)


def dot(x, y):
    return torch.dot(x, y)


def relu(x):
    return F.relu(x)


def leaky_relu(x, negative_slope):
    return F.leaky_relu(x, negative_slope)


def gelu(x, approximate="none"):
    return F.gelu(x, approximate=approximate)


def tanh(x):
    return torch.tanh(x)


def cosh(x):
    return torch.cosh(x)


def softmax(x, scale=1.0, causal=False, mask=None):
    scores = x if scale == 1.0 else x * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        future = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
        future = future.triu(1 + x.shape[-1] - x.shape[-2])
        scores = scores.masked_fill(future, -math.inf)
    return torch.softmax(scores, dim=-1)


def layer_norm(x, weight, bias, eps, residual=None):
    total = x if residual is None else x + residual
    if total.dtype != x.dtype:
        weight, bias = (None if v is None else v.float() for v in (weight, bias))
    y = F.layer_norm(total, x.shape[-1:], weight, bias, eps).to(x.dtype)
    return y if residual is None else (y, total)


def rms_norm(x, weight, eps, residual=None, add_unit_offset=False):
    total = x if residual is None else x + residual
    given = total
    if weight is not None and (add_unit_offset or total.dtype != x.dtype):
        given, weight = total.float(), weight.float() + add_unit_offset
    y = F.rms_norm(given, x.shape[-1:], weight, eps).to(x.dtype)
    return y if residual is None else (y, total)


def matmul(
    a, b, bias=None, activation="none", residual=None, up=None, scale=1.0, save_preactivation=False
):
    """activation(scale a b + bias) (scale a up) + residual, bias and scale inside the matmul."""
    pre = _affine(a, b, bias, scale)
    out, arguments = activate(pre, activation), [pre]
    if up is not None:
        arguments.append(_affine(a, up, None, scale))
        out = out * arguments[-1]
    if residual is not None:
        out = out + residual
    return (out, *arguments) if save_preactivation else out


def _affine(a, b, bias, scale):
    if bias is not None and a.dim() == 2:
        return torch.addmm(bias, a, b, alpha=scale)
    out = a @ b if scale == 1 else scale * (a @ b)
    return out if bias is None else out + bias


def linear(x, weight, bias=None, activation="none", up=None):
    out = activate(F.linear(x, weight, bias), activation)
    return out if up is None else out * F.linear(x, up)


def attention(q, k, v, mask=None, causal=False, window=None, softcap=None):
    """Attention with its scores in memory."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if causal:
        last = k.shape[-2] - q.shape[-2]
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(last + 1)
        if window is not None:
            hidden = hidden | torch.ones_like(hidden).tril(last - window - 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


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
    attend=attention,
):
    """Attention of one sequence after the other by `attend`, with its scores in memory."""
    rows, keys = lengths_of(cu_seqlens_q, cu_seqlens_k)
    parts = [q[:0]]
    for q_one, k_one, v_one in zip(q.split(rows), k.split(keys), v.split(keys), strict=True):
        # Causal rows before the first key see none: theirs are zeros.
        blind = max(0, len(q_one) - len(k_one)) if causal else 0
        given = (x.transpose(0, 1)[None] for x in (q_one[blind:], k_one, v_one))
        out = attend(*given, causal=causal, window=window, softcap=softcap)
        parts += [torch.zeros_like(q_one[:blind]), out[0].transpose(0, 1)]
    return torch.cat(parts)


def decode_attention(q, k, v, lengths=None):
    """Attention of the last queries over a cache, query heads of one key head side by side."""
    (b, h, rows, d), heads, s = q.shape, k.shape[1], k.shape[2]
    group = h // heads
    scores = q.reshape(b, heads, group * rows, d) @ k.transpose(-1, -2) / math.sqrt(d)
    if lengths is None and rows == 1:
        return (torch.softmax(scores, dim=-1) @ v).view(q.shape)
    seen = seen_by(q, k, lengths)
    scores = scores.view(b, heads, group, rows, s).masked_fill(~seen[:, None], -math.inf)
    weights = torch.softmax(scores, dim=-1).masked_fill(~seen[:, None], 0.0)
    return (weights.view(b, heads, group * rows, s) @ v).view(q.shape)


def seen_by(q, k, lengths):
    """Which keys each of the last queries sees: [B, 1, Q, S]."""
    rows, s = q.shape[2], k.shape[2]
    ends = torch.full(q.shape[:1], s, device=q.device) if lengths is None else lengths
    last = ends[:, None] - rows + torch.arange(rows, device=q.device)
    return (torch.arange(s, device=q.device) <= last[..., None])[:, None]


def block_sparse_attention(q, k, v, seen):
    """Attention with its scores in memory, over the pairs that are seen: those of `seen_pairs`."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    return weights.masked_fill(~seen, 0.0) @ v


def seen_pairs(q, k, v, block_mask, block_size, causal=False):
    """Which pairs of a row and a key are kept and seen: [B or 1, H or 1, S, T]."""
    s, t = q.shape[2], k.shape[2]
    seen = block_mask.repeat_interleave(block_size, -2)[..., :s, :]
    seen = seen.repeat_interleave(block_size, -1)[..., :t]
    seen = seen.tril(t - s) if causal else seen.contiguous()
    return seen[(None,) * (4 - seen.dim())]


def adamw(
    params, grads, exp_avgs, exp_avg_sqs, step, masters=None, *,
    lr, beta1, beta2, eps, weight_decay, max_norm=None, fused=False,
):  # fmt: skip
    """Clipping and a step of PyTorch's optimizer, in place.

    It has a counter of steps for each tensor, which are made here of the one that is given. With
    masters it updates these, by gradients in float32, and copies them to the parameters.
    """
    given = params, exp_avgs, exp_avg_sqs, *([] if masters is None else [masters])
    params, grads, exp_avgs, exp_avg_sqs, *copies = (
        [x] if isinstance(x, torch.Tensor) else list(x)
        for x in (params, grads, exp_avgs, exp_avg_sqs, *([] if masters is None else [masters]))
    )
    if copies:
        grads = [g.float() for g in grads]
    norm = None
    if max_norm is not None:
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        torch._foreach_mul_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    steps = list(step.repeat(len(params)).unbind())
    adamw_step(
        copies[0] if copies else params, grads, exp_avgs, exp_avg_sqs, [], steps,
        foreach=not fused, fused=fused, capturable=step.is_cuda, amsgrad=False, maximize=False,
        beta1=beta1, beta2=beta2, lr=lr, weight_decay=weight_decay, eps=eps,
    )  # fmt: skip
    if copies:
        torch._foreach_copy_(params, copies[0])
    # PyTorch's norm has the dtype of the gradients.
    return given if norm is None else (*given, norm.float())


def swiglu(gate, up):
    return F.silu(gate) * up


def geglu(gate, up, approximate="tanh"):
    return F.gelu(gate, approximate=approximate) * up


def rotary(q, k, cos, sin, positions=None, interleaved=False):
    """Rotary embedding with one angle for each pair, as the common model code computes it."""
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = (_for_both(angle, interleaved)[..., None, :] for angle in (cos, sin))
    out = tuple(_rotated(x, cos, sin, interleaved) for x in (q, k) if x is not None)
    return out[0] if k is None else out


def _for_both(angle, interleaved):
    return angle.repeat_interleave(2, -1) if interleaved else torch.cat((angle, angle), -1)


def _rotated(x, cos, sin, interleaved):
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        quarter = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        first, second = turned.chunk(2, -1)
        quarter = torch.cat((-second, first), -1)
    out = turned * cos + quarter * sin
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


def cross_entropy(
    logits,
    targets,
    ignore_index=-100,
    label_smoothing=0.0,
    z_loss=0.0,
    reduction="mean",
    softcap=None,
    loss_dtype=None,
):
    if loss_dtype is not None:
        # PyTorch's loss has the dtype of its logits, so its user casts them.
        logits = logits.to(loss_dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits,
        targets,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    if not z_loss:
        return loss
    kept = targets != ignore_index
    penalty = torch.where(kept, z_loss * torch.logsumexp(logits, dim=-1) ** 2, 0.0)
    if reduction == "none":
        return loss + penalty
    return loss + penalty.sum() / (kept.sum() if reduction == "mean" else 1)


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
    loss_dtype=None,
):
    """The logits in memory, as a model has them."""
    logits = F.linear(x, weight, bias)
    options = ignore_index, label_smoothing, z_loss, reduction, softcap, loss_dtype
    return cross_entropy(logits, targets, *options)


def transpose(x):
    # Contiguous in memory of its own, also where x is itself the view of a transpose.
    return x.mT.clone(memory_format=torch.contiguous_format)


def randint(low, high, size, seed, offset=0, dtype=torch.int64):
    """PyTorch's generator, with its own seed: numbers of the same law, not the same numbers."""
    return torch.randint(low, high, size, dtype=dtype, device=seed.device)


def dropout(x, p, seed):
    """PyTorch's generator, with its own seed."""
    return F.dropout(x, p)


def embedding(ids, weight, padding_idx=None):
    if weight.is_cuda and weight.shape[1] == 0:
        # PyTorch's kernel reads outside of its memory, which ends the process (2.11, H100).
        raise ValueError("a table without columns is not read on a GPU")
    return F.embedding(ids, weight, padding_idx=padding_idx)


def bucketize(x, boundaries, right=False, out_int32=False):
    return torch.bucketize(x, boundaries, right=right, out_int32=out_int32)


def activate(out, activation):
    """The activation of a matmul epilogue by name; ValueError for a name nobody knows."""
    if activation == "none":
        return out
    if activation == "relu":
        return F.relu(out)
    if activation == "leaky_relu":
        return F.leaky_relu(out, LEAKY_SLOPE)
    if activation == "gelu":
        return F.gelu(out)
    if activation == "gelu_tanh":
        return F.gelu(out, approximate="tanh")
    if activation == "silu":
        return F.silu(out)
    if activation == "tanh":
        return torch.tanh(out)
    raise ValueError(f"activation {activation!r} is not offered")

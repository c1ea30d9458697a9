"""Attention in float64 with every weight in memory, and the entries that a seed keeps."""

import math

import torch

from ops._philox import philox_words

LEVELS = 2**16


def oracle(q, k, v, causal=False, scale=None, window=None, mask=None, kept=None, softcap=None):
    """The output and the logarithm of the sum of exponentials, differentiable.

    kept: None, or what dropout leaves of each weight: zero, or one over the share it keeps.
    """
    group = q.shape[1] // max(1, k.shape[1])
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = q.double() @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.double()
    scores = scores.masked_fill(~visible(*scores.shape[-2:], causal, window), -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.where(lse.isfinite(), 0)[..., None]).exp()
    return (weights if kept is None else weights * kept) @ v, lse


def visible(sq, sk, causal, window):
    """Which keys a row sees: [Sq, Sk]."""
    left, right = window if isinstance(window, tuple) else (-1 if window is None else window,) * 2
    keys, positions = torch.arange(sk), torch.arange(sq)[:, None] + sk - sq
    seen = torch.ones(sq, sk, dtype=torch.bool)
    if causal:
        seen &= keys <= positions
    if left >= 0:
        seen &= keys >= positions - left
    if right >= 0:
        seen &= keys <= positions + right
    return seen


def kept_by(seed, p, b, h, sq, sk):
    """Return the factor that dropout gives each weight: [B, H, Sq, Sk]; see `oracle`."""
    dropped = LEVELS if p == 1 else min(round(p * LEVELS), LEVELS - 1)
    calls = -(-sk // 8)
    words = philox_words(seed, 0, b * h * sq * calls * 4)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).reshape(b, h, sq, calls * 8)
    kept = (halves[..., :sk] >= dropped).double()
    return kept * (LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0)


def rounded(ours, exactly, dout):
    """Whether a result or a gradient of random entries is that of float64, up to rounding.

    The gradient of a score is a difference of two sums over `dout`, and is zero if its row sees one
    key. Then the rounding of these sums in float32 remains.
    """
    share = {torch.float16: 1e-3, torch.bfloat16: 8e-3}[ours.dtype]
    error = (ours.detach().double().cpu() - exactly.detach().cpu()).norm()
    return error <= share * exactly.norm().cpu() + 2**-18 * dout.detach().double().norm().cpu()

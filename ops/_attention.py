"""Attention by blocks of heads and rows, which the references of several ops share."""

import math
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

# Scores that are held at a time: all of a long sequence would not fit, and those of one head of a
# short sequence are little work for a call.
SCORES = 2**25


def scale(case):
    """The standard deviation of q, k and v: a tenth in a case of large values, which are a hundred
    times as large.

    Scores then have one of about 100, and their exponentials overflow float32. At that of 10,000,
    each row would see a single key. Gradients of q and k would cancel to nothing, and the rule of
    `harness.calls.tolerance` would ask a share of nothing.
    """
    return 0.1 if case.values == "large" else 1.0


def attend(q, k, v, mask=None, causal=False, window=None, softcap=None, pairs=None):
    """Return softmax(scale q kᵀ + mask) v of each head, [N, S, D]; see `ops.attention`.

    - q: [N, S, D].
    - k, v: [M, T, D], N being a multiple of M.
    - mask: [N, S, T], added to the scores.
    - pairs: a function of some heads, the first of some rows, their number and a number of keys. It
      returns which of the pairs are seen, [heads, rows, keys].

    A row that sees no key is zero.
    """
    (n, s, _), (heads, t, _) = q.shape, k.shape
    if q.is_meta or not q.numel() or not k.numel():
        # There are shapes only, or no pair. The result hangs on all tensors nevertheless.
        return q * 0 + 0 * (k.sum() + v.sum())
    rows = min(s, max(1, SCORES // t))
    count = max(1, SCORES // (rows * t))
    found = []
    for some in torch.arange(n, device=q.device).split(count):
        mine, keyed = q[some], some // (n // heads)
        their_k, their_v, parts = k[keyed], v[keyed], []
        for first in range(0, s, rows):
            part, key = mine[:, first : first + rows], t - s + first
            # Causal rows see no key beyond that of the last row.
            stop = max(1, key + part.shape[1]) if causal else t
            their_mask = None if mask is None else mask[some, first : first + rows, :stop]
            given = part, their_k[:, :stop], their_v[:, :stop], their_mask, key
            options = {"causal": causal, "window": window, "softcap": softcap}
            if pairs is not None:
                # All pairs would not fit either: they are found anew for each block.
                options["pairs"] = partial(pairs, some, first, part.shape[1], stop)
            options |= {"use_reentrant": False, "preserve_rng_state": False}
            parts.append(checkpoint(_rows, *given, **options))
        found.append(torch.cat(parts, 1))
    return torch.cat(found)


def _rows(q, k, v, mask, key, causal, window, softcap, pairs=None):
    """The result of some rows of some heads; the first row stands at `key`."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    if not causal and pairs is None:
        return torch.softmax(scores, dim=-1) @ v
    seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device)
    if causal:
        seen = seen.tril(key)
        if window is not None:
            seen = seen.triu(key - window)
    if pairs is not None:
        seen = seen & pairs()
    weights = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1)
    # All keys of some rows are hidden.
    return weights.masked_fill(~seen, 0.0) @ v

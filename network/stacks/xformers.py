"""xFormers: its memory-efficient attention. Its RMS norm has no gradient and is left out."""

from baselines import xformers as library
from network.stacks._gradients import wanted


def _attention(q, k, v, dropout=0.0, seed=None):
    if dropout:
        raise ValueError("attention: its file in baselines/ has no dropout; expected dropout=0")
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1 and wanted(q, k, v):
        # Its backward pass takes no heads in groups; to repeat them is a copy, and is timed.
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    return library.attention(q, k, v, causal=True)


PARTS = {"attention": _attention}

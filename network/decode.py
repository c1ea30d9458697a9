"""Greedy decoding: a prefill of the prompt, then one token after the other with a cache."""

import torch

from network.cache import Cache
from network.model import Transformer


@torch.no_grad()
def decode(
    model: Transformer, prompt: torch.Tensor, tokens: int, cache: Cache | None = None
) -> torch.Tensor:
    """Return the next tokens of each sequence, int64 [B, tokens], each the most likely one.

    prompt: int64 [B, S]. cache: an empty one to fill, else one is made. ValueError if prompt and
    tokens do not fit in the cache or the model.
    """
    if tokens < 1:
        raise ValueError(f"tokens: {tokens}, expected 1 or more")
    # The last token is returned and never read.
    positions = prompt.shape[1] + tokens - 1
    if cache is None:
        cache = Cache(model.config, len(prompt), positions, model.dtype, model.device)
    cache.require_room(len(prompt), positions)
    found = [model(prompt, cache=cache).argmax(-1, keepdim=True)]
    while len(found) < tokens:
        found.append(model(found[-1], cache=cache).argmax(-1, keepdim=True))
    return torch.cat(found, dim=1)

"""One decoded token as a CUDA graph: what a network computes for it, replayed for each token."""

import torch

from network.cache import Cache
from network.model import Transformer

# Calls before the capture, in which a library may compile or set itself up.
WARM = 3


class TokenGraph:
    """A captured call `model(token, cache=cache)`; a replay reads the position on the device.

    Args:
        model: on a GPU, without a gradient.
        cache: it holds a prompt, and has room for one token or more.
    """

    def __init__(self, model: Transformer, cache: Cache):
        self.model, self.cache = model, cache
        self.token = torch.zeros(cache.batch, 1, dtype=torch.int64, device=model.device)
        held, self.places = cache.used, self._places()
        self.graph = torch.cuda.CUDAGraph()
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(aside):
            for _ in range(WARM):
                model(self.token, cache=cache)
                self._back_to(held)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.logits = model(self.token, cache=cache)
        # A capture counts on the host and runs nothing on the device.
        self._back_to(held)

    def __call__(self, token: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] after a token, int64 [B, 1]; the next call overwrites them.

        ValueError if the cache is full.
        """
        self.cache.require_room(len(token), 1)
        self.token.copy_(token)
        self.graph.replay()
        self.cache.used += 1
        return self.logits

    def valid(self) -> bool:
        """Return whether weights and cache lie where they lay at the capture."""
        return self.places == self._places()

    def _places(self) -> tuple[int, ...]:
        held = *self.model.parameters(), *self.cache.keys, *self.cache.values
        return tuple(each.data_ptr() for each in held)

    def _back_to(self, used: int) -> None:
        self.cache.used = used
        self.cache.position.fill_(used)

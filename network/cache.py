"""Keys and values of the tokens that a network has read, for decoding."""

import torch

from network.config import Config


class Keys:
    """The keys of a cache that count in one call, in the forms that parts want.

    All layers share it, so a form is made once, for the first layer that asks.

    Args:
        lengths: int64 [B], the tokens of each sequence with those of the call.
        queries: Q, the tokens of the call; they are the last ones.
        positions: L, those of the cache.
    """

    def __init__(self, lengths: torch.Tensor, queries: int, positions: int):
        self.lengths, self.queries, self.positions = lengths, queries, positions
        self._mask, self._ends, self._held = None, None, None

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """[B, 1, Q, L], added to scores: 0 for the keys up to the query's own, else -inf."""
        if self._mask is None:
            device = self.lengths.device
            own = self.lengths.view(-1, 1, 1, 1) - self.queries
            own = own + torch.arange(self.queries, device=device)[:, None]
            hidden = torch.arange(self.positions, device=device) > own
            self._mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
            self._mask.masked_fill_(hidden, -float("inf"))
        return self._mask

    def ends(self) -> torch.Tensor:
        """The lengths as int32 [B]."""
        if self._ends is None:
            self._ends = self.lengths.int()
        return self._ends

    def held(self) -> torch.Tensor:
        """The tokens of each sequence before those of the call, int32 [B]."""
        if self._held is None:
            self._held = (self.lengths - self.queries).int()
        return self._held


class Cache:
    """Keys and values of each layer, [B, K, L, D], of which the first `used` hold tokens.

    Each layer has tensors of its own, as in Hugging Face's `StaticCache`. If one tensor had all
    layers, torch.compile would write it anew for each layer that is written.

    position: int64, [1], on the device: the number of tokens held. It is what a CUDA graph reads
    and advances; `used` is the same number on the host, for the checks.
    """

    def __init__(
        self,
        config: Config,
        batch: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if length > config.length:
            raise ValueError(
                f"cache: {length} positions, and the model has {config.length}; make it shorter"
            )
        shape = batch, config.kv_heads, length, config.head_dim

        def empty():
            # Positions ahead are masked. They must be finite all the same: zero times NaN is NaN.
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

        self.keys, self.values = empty(), empty()
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.batch, self.length, self.used = batch, length, 0

    def require_room(self, batch: int, tokens: int) -> None:
        """Raise ValueError if so many tokens of so many sequences do not fit."""
        if batch != self.batch:
            raise ValueError(f"ids: {batch} sequences, and the cache is for {self.batch}")
        if self.used + tokens > self.length:
            raise ValueError(
                f"cache: full, {self.used} of {self.length} positions hold tokens and {tokens} more"
                " are to come; make a longer cache"
            )

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> None:
        """Keep k and v, [B, K, S, D], of a layer at these positions, int64 [S]."""
        for held, new in ((self.keys[layer], k), (self.values[layer], v)):
            held.index_copy_(2, positions, new.to(held.dtype))

    def advance(self, tokens: int) -> None:
        """Count tokens that all layers have written."""
        self.position += tokens
        self.used += tokens

    def clear(self) -> None:
        """Forget all tokens."""
        self.position.zero_()
        self.used = 0

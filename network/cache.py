"""Keys and values of the tokens that a network has read, for decoding."""

import torch

from network.config import Config


class Cache:
    """Keys and values of all layers, each [B, K, L, D], of which the first `used` hold tokens.

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
        shape = config.layers, batch, config.kv_heads, length, config.head_dim
        # Positions ahead are masked. They must be finite all the same, as zero times NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
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
        self.keys[layer].index_copy_(2, positions, k.to(self.keys.dtype))
        self.values[layer].index_copy_(2, positions, v.to(self.values.dtype))

    def advance(self, tokens: int) -> None:
        """Count tokens that all layers have written."""
        self.position += tokens
        self.used += tokens

    def clear(self) -> None:
        """Forget all tokens."""
        self.position.zero_()
        self.used = 0

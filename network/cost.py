"""FLOPs and bytes that a network cannot avoid, and the share of a GPU's peak that it reaches.

Only products count. A product of [M, K] and [K, N] has 2 M N K FLOPs. Causal attention has two of
them in a head, over half of the S by S scores. The backward pass has twice the FLOPs of the forward
pass. The scores that a fused attention computes anew are not counted. This is the model's FLOPs of
Chowdhery et al., "PaLM" (2022), appendix B, with half of the scores.
"""

from network.config import Config


def layer_weights(config: Config) -> int:
    """Return the number of entries in the matrices of one layer."""
    projections = sum(config.qkv_sizes) + config.heads * config.head_dim
    return config.width * (projections + (3 if config.family.gated else 2) * config.mlp)


def product_weights(config: Config) -> int:
    """Return the entries of all matrices that a token is multiplied with, the head included."""
    return config.layers * layer_weights(config) + config.vocabulary * config.width


def forward_flops(config: Config, batch: int, length: int) -> int:
    """Return the FLOPs of logits for `batch` sequences of `length` tokens."""
    products = 2 * batch * length * product_weights(config)
    scores = length * (length + 1) // 2
    attention = 4 * config.layers * batch * config.heads * config.head_dim * scores
    return products + attention


def train_flops(config: Config, batch: int, length: int) -> int:
    """Return the FLOPs of a forward and a backward pass."""
    return 3 * forward_flops(config, batch, length)


def utilization(flops: int, seconds: float, peak: float) -> float:
    """Return the MFU: FLOPs over seconds times the peak rate, in FLOP/s, of the dtype."""
    return flops / (seconds * peak)


def decode_bytes(config: Config, batch: int, held: int, itemsize: int) -> int:
    """Return the bytes that one decoded token of each sequence reads.

    These are the matrices once, and keys and values of the `held` tokens of each sequence.
    """
    cached = 2 * config.layers * batch * held * config.kv_heads * config.head_dim
    return itemsize * (product_weights(config) + cached)

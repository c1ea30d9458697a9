"""The parts of a transformer as the model calls them: one callable a part.

A stack hands these in. The sizes in their shapes are:

    B sequences, S tokens, M = B S rows, C the width, H query heads, K key heads,
    D entries a head, V tokens of the vocabulary, L positions of a cache
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from network.config import Config


@dataclass(frozen=True)
class Parts:
    """A callable for each part. Tensors have one dtype but for ids, targets, positions and seeds.

    Calls:
        embedding(ids [...], weight [V, C]) -> [..., C]
        rms_norm(x [B, S, C], weight [C], eps, residual [B, S, C] or None) -> (y, total)
            total is x + residual, or x; y is its norm.
        layer_norm(x, weight, bias [C], eps, residual) -> (y, total)
            In the same way.
        rotary(q [B, S, H, D], k [B, S, K, D], cos [S, D/2], sin) -> q and k, turned
            Pairs are halves of a head.
        attention(q [B, H, S, D], k [B, K, S, D], v, dropout, seed) -> [B, H, S, D]
            Causal, scaled by 1 / sqrt(D), any strides. dropout is 0 if seed is None.
        decode_attention(q [B, H, S, D], k [B, K, L, D], v, count) -> [B, H, S, D]
            count is a `network.cache.Keys`: the keys of each sequence that count, those of the
            queries among them. The queries are the last ones, and each sees the keys up to its own.
        swiglu(gate [B, S, N], up [B, S, N]) -> [B, S, N]
        gelu(x [B, S, N]) -> [B, S, N]
            In tanh form.
        linear(x [..., K], weight [N, K], bias [N] or None) -> [..., N]
            The weight has any strides.
        dropout(x, p, seed) -> x with entries dropped, the others divided by 1 - p
            seed is an int64 tensor without dimensions. A part may draw from PyTorch's generator.
        loss(x [M, C], weight [V, C], targets [M]) -> the mean cross entropy of x weightᵀ
            A scalar. Rows whose target is -100 do not count.
        linear_gelu(x, weight, bias) -> gelu(linear(x, weight, bias))
            None if a stack has no such part.
        swiglu_mlp(h [B, S, C], gate [N, C], up [N, C], down [C, N]) -> [B, S, C]
            linear(swiglu(linear(h, gate), linear(h, up)), down), or None.
        linears(h [B, S, C], weights [N_i, C] each, biases [N_i] or None each) -> [B, S, N_i] each
            A linear of each pair, without a gradient; or None.
        decode_token(q [B, H, 1, D], k [B, K, 1, D], v, keys [B, K, L, D], values, count,
            cos [P, D/2] or None, sin) -> [B, H, 1, D]
            Turns q and k by the angles of their position, writes k and v there in keys and values,
            then decode_attention; or None. Nothing is turned without angles.
    """

    embedding: Callable
    rms_norm: Callable
    layer_norm: Callable
    rotary: Callable
    attention: Callable
    decode_attention: Callable
    swiglu: Callable
    gelu: Callable
    linear: Callable
    dropout: Callable
    loss: Callable
    linear_gelu: Callable | None = None
    swiglu_mlp: Callable | None = None
    linears: Callable | None = None
    decode_token: Callable | None = None

    def with_parts(self, **others: Callable | None) -> "Parts":
        """Return the same parts with some replaced; ValueError for a name that no part has."""
        if unknown := sorted(set(others) - set(NAMES)):
            raise ValueError(f"parts {unknown}: not known, expected some of {list(NAMES)}")
        return dataclasses.replace(self, **others)


NAMES = tuple(field.name for field in dataclasses.fields(Parts))
# Parts that join others, by name: a network that has one calls none of those in its place.
JOINED = {
    "linear_gelu": ("linear", "gelu"),
    "swiglu_mlp": ("linear", "swiglu"),
    "linears": ("linear",),
    "decode_token": ("rotary", "decode_attention"),
}


def used(config: Config, training: bool = True) -> tuple[str, ...]:
    """Return the names of the parts that a network of this configuration calls.

    training: with a loss and dropout, else to decode with a cache.
    """
    family = config.family
    unused = {"layer_norm" if family.norm == "rms_norm" else "rms_norm"}
    unused |= {"gelu", "linear_gelu"} if family.gated else {"swiglu", "swiglu_mlp"}
    if not family.rotary:
        unused.add("rotary")
    if not (training and config.dropout):
        unused.add("dropout")
    unused |= {"decode_attention", "decode_token", "linears"} if training else {"loss"}
    return tuple(name for name in NAMES if name not in unused)

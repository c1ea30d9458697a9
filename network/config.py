"""Sizes of a transformer, and the presets that the study trains and decodes.

A family says how the parts are put together: which norm, which positions, which MLP, and the names
that Hugging Face's checkpoints have for the weights. A configuration is a family with sizes. The
model code reads both and has no branch on a family's name.

Sources: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), for GPT-2;
Grattafiori et al., "The Llama 3 Herd of Models" (2024), for Llama 3 and its sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True)
class Names:
    """The places of the weights of each role in Hugging Face's checkpoints.

    Fields:
        tokens, positions: the embeddings; there are no positions if they are rotary.
        norm, head: after the last layer.
        layer: the folder of the layers, by number. The other fields lie in the folder of a layer.
        qkv: a name for each projection, or one for all three.
        up: the names of gate and up, or one.
    """

    tokens: str
    layer: str
    norm1: str
    qkv: tuple[str, ...]
    out: str
    norm2: str
    up: tuple[str, ...]
    down: str
    norm: str
    head: str = "lm_head"
    positions: str | None = None


@dataclass(frozen=True)
class Family:
    """A kind of network: how its parts are put together.

    Fields:
        norm: "rms_norm", or "layer_norm", which has a bias.
        rotary: positions turn queries and keys, else they are learned.
        gated: the MLP is SwiGLU, else a GELU in tanh form.
        bias: linear layers have one.
        transposed: a linear weight is stored as [in, out], as GPT-2 has it.
    """

    norm: str
    rotary: bool
    gated: bool
    bias: bool
    transposed: bool
    names: Names


LLAMA = Family(
    norm="rms_norm",
    rotary=True,
    gated=True,
    bias=False,
    transposed=False,
    names=Names(
        tokens="model.embed_tokens",
        layer="model.layers",
        norm1="input_layernorm",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        out="self_attn.o_proj",
        norm2="post_attention_layernorm",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        norm="model.norm",
    ),
)
GPT2 = Family(
    norm="layer_norm",
    rotary=False,
    gated=False,
    bias=True,
    transposed=True,
    names=Names(
        tokens="transformer.wte",
        positions="transformer.wpe",
        layer="transformer.h",
        norm1="ln_1",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        norm2="ln_2",
        up=("mlp.c_fc",),
        down="mlp.c_proj",
        norm="transformer.ln_f",
    ),
)


@dataclass(frozen=True)
class Stretch:
    """Llama 3.1's change of the rotary frequencies for texts longer than those of pre-training.

    Wavelengths above `length / low` positions become `factor` times longer, those below
    `length / high` stay, and those between are interpolated.
    """

    factor: float
    low: float
    high: float
    length: int


@dataclass(frozen=True)
class Config:
    """A family with its sizes.

    Fields:
        width: of the residual stream.
        heads, kv_heads: heads of the queries, and of keys and values, each head_dim wide.
        mlp: the inner width.
        vocabulary, length: how many tokens there are, and the most positions of a sequence.
        theta, stretch: the base of the rotary angles, and how they change for long texts.
        dropout: the probability at each site while training.
        tied: the head's weight is that of the token embedding.
    """

    family: Family
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    length: int
    eps: float = 1e-5
    theta: float = 10000.0
    stretch: Stretch | None = None
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self):
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads: {self.heads}, expected a multiple of kv_heads {self.kv_heads}"
            )
        if self.family.rotary and self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim}, expected an even number for rotary pairs")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout: {self.dropout}, expected a number from 0 to below 1")

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The widths of queries, keys and values."""
        return tuple(self.head_dim * n for n in (self.heads, self.kv_heads, self.kv_heads))


PRESETS: Mapping[str, Config] = MappingProxyType(
    {
        "tiny": Config(
            LLAMA,
            layers=2,
            width=64,
            heads=4,
            kv_heads=2,
            head_dim=16,
            mlp=96,
            vocabulary=256,
            length=64,
        ),
        "tiny-gpt2": Config(
            GPT2,
            layers=2,
            width=64,
            heads=4,
            kv_heads=4,
            head_dim=16,
            mlp=256,
            vocabulary=256,
            length=64,
            dropout=0.1,
        ),
        "gpt2-124m": Config(
            GPT2,
            layers=12,
            width=768,
            heads=12,
            kv_heads=12,
            head_dim=64,
            mlp=3072,
            vocabulary=50257,
            length=1024,
            dropout=0.1,
        ),
        # The sizes of Llama 3.2 1B.
        "llama-1b": Config(
            LLAMA,
            layers=16,
            width=2048,
            heads=32,
            kv_heads=8,
            head_dim=64,
            mlp=8192,
            vocabulary=128256,
            length=131072,
            theta=500000.0,
            stretch=Stretch(factor=32.0, low=1.0, high=4.0, length=8192),
        ),
        # One layer of Llama 3 8B. A vocabulary of bytes keeps the head small beside it.
        "llama-8b-layer": Config(
            LLAMA,
            layers=1,
            width=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            mlp=14336,
            vocabulary=256,
            length=8192,
            theta=500000.0,
        ),
    }
)


def preset(name: str) -> Config:
    """Return the preset of a name; ValueError for another."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r}: not known, expected one of {sorted(PRESETS)}")
    return PRESETS[name]


def undropped(name: str) -> Config:
    """Return a preset without dropout, which no two libraries draw alike; errors of `preset`."""
    return replace(preset(name), dropout=0.0)

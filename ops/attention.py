"""Scaled dot-product attention, forward: out = softmax(scale q kᵀ + mask) v for each head.

The scale is 1 / sqrt(D). The mask hides later keys where causal, and there is none otherwise.

Bytes: q, k and v are read and out is written, 4 B H S D items; the S by S scores need not leave the
chip. FLOPs: 4 B H S² D, half of that where causal. Cases: the sizes of the FlashAttention papers
(Dao et al., 2022) and of Whisper's encoder.
"""

import math

import torch

from ops._drawn import log_uniform
from ops._spec import Cost, Op, Tensor, case


def attention_reference(q, k, v, causal):
    s, d = q.shape[-2:]
    mask = torch.ones(s, s, dtype=torch.bool, device=q.device).tril() if causal else None
    heads = []
    # One head at a time: all scores of a long sequence at once would not fit.
    for qh, kh, vh in zip(*(x.reshape(-1, s, d) for x in (q, k, v)), strict=True):
        scores = qh @ kh.T / math.sqrt(d)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        heads.append(torch.softmax(scores, dim=-1) @ vh)
    return torch.stack(heads).view(q.shape) if heads else torch.empty_like(q)


def _cost(a_case, direction, itemsize):
    b, h, s, d = (a_case[letter] for letter in "BHSD")
    flops = 4 * b * h * s * s * d
    return Cost(
        3 * b * h * s * d * itemsize,
        b * h * s * d * itemsize,
        flops // 2 if "causal" in a_case.flags else flops,
    )


def _sweep():
    """16,384 tokens and a hidden size of 2048, as the FlashAttention papers do; and speech."""
    for flags in ((), ("causal",)):
        for d in (64, 128):
            for s in (512, 1024, 2048, 4096, 8192, 16384):
                dtypes = ("bfloat16", "float16") if s == 4096 else ("bfloat16",)
                yield case(*flags, dtypes=dtypes, B=16384 // s, H=2048 // d, S=s, D=d)
    # The encoder of Whisper large: 1500 frames.
    yield case(B=8, H=20, S=1500, D=64, dtypes=("bfloat16",))


def _drawn(generator):
    """Any length of a sequence, heads of 64 or 128, and batches of up to 16,384 tokens in all."""
    flags = generator.choice(((), ("causal",)))
    d, h = generator.choice((64, 128)), generator.choice((8, 12, 16, 20, 32, 40))
    s = log_uniform(generator, 128, 16384)
    return case(*flags, B=max(1, log_uniform(generator, 1024, 16384) // s), H=h, S=s, D=d)


ROWS = Tensor("B H S D")
ATTENTION = Op(
    "attention",
    attention_reference,
    {"q": ROWS, "k": ROWS, "v": ROWS},
    _cost,
    edge=(
        case(B=1, H=1, S=1, D=64),
        case(B=1, H=2, S=127, D=64),
        case("causal", B=2, H=1, S=129, D=64),
        case("causal", B=1, H=2, S=256, D=128),
        case(B=1, H=1, S=200, D=128),
        case(B=0, H=2, S=64, D=64),
        case("causal", B=1, H=2, S=70, D=64, layout="padded"),
        case("causal", B=1, H=2, S=70, D=64, layout="offset"),
        case(B=1, H=2, S=40, D=64, layout="offset4", dtypes=("float16",)),
        case(B=1, H=2, S=40, D=64, layout="offset8", dtypes=("float16",)),
        case("causal", B=1, H=2, S=40, D=64, layout="transposed"),
        case("causal", B=2, H=1, S=40, D=64, layout="expanded"),
        case("causal", B=1, H=1, S=140, D=64, values="large", dtypes=("float32", "bfloat16")),
        case(B=1, H=1, S=140, D=64, values="equal"),
        case(B=1, H=1, S=140, D=64, values="spike", dtypes=("float32", "bfloat16")),
        case("causal", B=1, H=1, S=40, D=64, values="denormal"),
    ),
    sweep=tuple(_sweep()),
    drawn=_drawn,
    params={"causal": False},
    flags={"causal": {"causal": True}},
)

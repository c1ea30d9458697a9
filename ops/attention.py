"""Scaled dot-product attention: out = softmax(scale q kᵀ + mask) v for each head.

The scale is 1 / sqrt(D). Query head h reads key head h // (H / K), K being H if a case has none.
Row i stands at key p = i + T - S, T being S if a case has none. Causal rows see no key beyond p,
and with a window W none before p - W. A softcap c makes the scores c tanh(scores / c). Then the
mask is added to the scores of all heads.

Bytes: forward, q, k, v and the mask are read and out is written; the scores need not leave the
chip. Backward, out, its gradient and the logarithm of each row's sum are read too, and three
gradients are written. FLOPs: 4 D forward and 10 D backward for each pair of a row and a key that it
sees, as Dao counts them ("FlashAttention-2", 2023). Causal rows see half of a square. Cases: the
sizes of the FlashAttention papers (Dao et al., 2022), of Whisper's encoder and of named models.
"""

from ops._attention import attend, scale
from ops._drawn import log_uniform
from ops._spec import PASSES, Cost, Op, Tensor, in_turn, make_case


def attention_reference(q, k, v, mask=None, causal=False, window=None, softcap=None):
    heads = (x.flatten(0, 1) for x in (q, k, v))
    if mask is not None:
        # No entry is copied where heads share a mask.
        mask = mask.expand(*q.shape[:3], k.shape[2]).flatten(0, 1)
    return attend(*heads, mask, causal, window, softcap).view(q.shape)


def _cost(case, pass_, itemsize):
    b, h, s, d = (case[letter] for letter in "BHSD")
    heads, t = case.sizes.get("K", h), case.sizes.get("T", s)
    rows, keys = b * h * s * d * itemsize, b * heads * t * d * itemsize
    mask = s * t * itemsize if "mask" in case.flags else 0
    products = 2 * b * h * d * _pairs(case, s, t)
    if pass_ == "forward":
        return Cost(rows + 2 * keys + mask, rows, products)
    return Cost(3 * rows + 2 * keys + mask + _kept(case), rows + 2 * keys, products * 5 // 2)


def _kept(case):
    """The logarithm of the sum of each row, in float32."""
    return 4 * case["B"] * case["H"] * case["S"]


def _pairs(case, s, t):
    """Twice the number of pairs of a row and a key that it sees; triangles are half squares."""
    if "causal" not in case.flags:
        return 2 * s * t
    window = case.sizes.get("W", t)
    hidden = max(0, t - window) ** 2 - max(0, t - s - window) ** 2
    return 2 * s * t - s * s - hidden


def _sweep():
    """16,384 tokens and a hidden size of 2048, as the FlashAttention papers do; and models."""
    for flags in ((), ("causal",)):
        for d in (64, 128):
            for s in (512, 1024, 2048, 4096, 8192, 16384):
                dtypes = ("bfloat16", "float16") if s == 4096 else ("bfloat16",)
                yield make_case(*flags, dtypes=dtypes, B=16384 // s, H=2048 // d, S=s, D=d)
    # The encoder of Whisper large: 1500 frames.
    yield make_case(B=8, H=20, S=1500, D=64, dtypes=("bfloat16",))
    llama, bf16 = {"H": 32, "K": 8}, ("bfloat16",)
    # Llama 3 8B in training, and reading the end of a prompt; the window of Mistral 7B.
    yield make_case("causal", B=4, **llama, S=4096, D=128, dtypes=bf16)
    yield make_case("causal", B=1, **llama, S=16384, D=128, dtypes=bf16)
    yield make_case("causal", B=1, **llama, S=1024, T=16384, D=128, dtypes=bf16)
    yield make_case("causal", B=1, **llama, W=4095, S=16384, D=128, dtypes=bf16)
    # Heads that are no power of two, and wide ones: Phi-3 mini, Gemma 2 9B.
    yield make_case("causal", B=4, H=32, S=4096, D=96, dtypes=bf16)
    yield make_case("causal", B=2, H=16, K=8, S=8192, D=256, dtypes=bf16)
    # Gemma 2 caps its scores; a cap of another size takes the same time.
    yield make_case("causal", "softcap", B=2, H=16, K=8, S=8192, D=256, dtypes=bf16)
    # The bias of a relative position, as in T5.
    yield make_case("mask", B=8, H=16, S=2048, D=64, dtypes=bf16)


def _drawn(generator):
    """Any length of a sequence, heads of 64 or 128, and batches of up to 8192 tokens in all."""
    flags = generator.choice(((), ("causal",)))
    d, h = generator.choice((64, 128)), generator.choice((8, 12, 16, 20, 32))
    s = log_uniform(generator, 128, 8192)
    return make_case(*flags, B=max(1, log_uniform(generator, 1024, 8192) // s), H=h, S=s, D=d)


KEYS = Tensor("B K|H T|S D", scale=scale)
ATTENTION = Op(
    "attention",
    attention_reference,
    {
        "q": Tensor("B H S D", scale=scale),
        "k": KEYS,
        "v": KEYS,
        "mask": Tensor("S T|S", grad=False, when="mask"),
    },
    in_turn(_cost, _kept),
    edge=(
        make_case(B=1, H=1, S=1, D=64),
        make_case(B=1, H=2, S=127, D=64),
        make_case("causal", B=2, H=1, S=129, D=64),
        make_case("causal", B=1, H=2, S=256, D=128),
        make_case(B=1, H=1, S=200, D=128),
        make_case(B=0, H=2, S=64, D=64),
        make_case("causal", B=1, H=2, S=70, D=64, layout="padded"),
        make_case("causal", B=1, H=2, S=70, D=64, layout="offset"),
        make_case(B=1, H=2, S=40, D=64, layout="offset4", dtypes=("float16",)),
        make_case(B=1, H=2, S=40, D=64, layout="offset8", dtypes=("float16",)),
        make_case("causal", B=1, H=2, S=40, D=64, layout="transposed"),
        make_case("causal", B=2, H=1, S=40, D=64, layout="expanded"),
        make_case("causal", B=2, H=4, K=2, S=100, D=64),
        make_case(B=1, H=6, K=1, S=70, T=150, D=64),
        make_case(B=1, H=2, S=150, T=70, D=64),
        make_case("causal", B=1, H=4, K=2, S=70, T=200, D=128),
        make_case("causal", B=1, H=4, K=2, S=1, T=130, D=64),
        make_case("causal", B=1, H=2, W=40, S=200, D=64),
        make_case("causal", B=1, H=4, K=2, W=64, S=90, T=200, D=64),
        make_case("mask", B=2, H=2, S=70, D=64),
        make_case("causal", "mask", B=1, H=4, K=2, S=40, T=100, D=64),
        make_case("softcap", B=1, H=2, S=150, D=64),
        make_case("causal", "mask", "softcap", B=1, H=4, K=2, S=40, T=100, D=64),
        make_case("softcap", B=1, H=1, S=140, D=64, values="large", dtypes=("float32", "bfloat16")),
        make_case(B=1, H=2, S=70, D=16),
        make_case("causal", B=1, H=2, S=70, D=40),
        make_case("causal", B=1, H=2, K=1, S=70, D=96),
        make_case(B=1, H=1, S=70, D=256),
        make_case("causal", B=1, H=1, S=140, D=64, values="large", dtypes=("float32", "bfloat16")),
        make_case(B=1, H=1, S=140, D=64, values="equal"),
        make_case(B=1, H=1, S=140, D=64, values="spike", dtypes=("float32", "bfloat16")),
        make_case("causal", B=1, H=1, S=40, D=64, values="denormal"),
    ),
    sweep=tuple(_sweep()),
    passes=PASSES,
    # Hopper's backward pass adds dq in memory, in any order.
    deterministic=("forward",),
    drawn=_drawn,
    params={"causal": False, "window": lambda case: case.sizes.get("W")},
    flags={"causal": {"causal": True}, "mask": {}, "softcap": {"softcap": 2.0}},
)

"""Gated activations of transformer blocks: swiglu and geglu.

    forward   y = a(gate) up
    backward  dgate = dy up a'(gate), dup = dy a(gate)
    swiglu    a(x) = x s(x), with the logistic function s
    geglu     a(x) = x s(2 sqrt(2/pi) (x + 0.044715 x³)), the tanh form
              a(x) = x P(x), with the normal distribution's P, the erf form

Shazeer, "GLU variants improve transformer" (2020), has both. Hendrycks and Gimpel, "Gaussian error
linear units" (2016), have the forms of GELU.

Bytes: forward reads two items and writes one, backward reads three and writes two. FLOPs: about 10
and 20 an element. Cases: the MLPs of Llama, DeepSeek-V3 and Gemma.
"""

from torch.nn import functional as F

from ops._drawn import drawn_rows
from ops._row_cases import ROW_EDGE
from ops._spec import PASSES, Cost, Op, Tensor, in_turn, make_case


def swiglu_reference(gate, up):
    return F.silu(gate) * up


def geglu_reference(gate, up, approximate="tanh"):
    return F.gelu(gate, approximate=approximate) * up


def _cost(case, pass_, itemsize):
    elements = case["M"] * case["N"]
    reads, writes, flops = (2, 1, 10) if pass_ == "forward" else (3, 2, 20)
    return Cost(reads * elements * itemsize, writes * elements * itemsize, flops * elements)


INPUTS = {"gate": Tensor("M N"), "up": Tensor("M N", tame=True)}
EDGE = (*ROW_EDGE, make_case(M=3, N=2500, layout="padded"))
# The MLP of Llama 2 7B and of Llama 3 8B and 70B, and a small case.
SWEEP = (
    make_case(M=4096, N=1024, dtypes=("bfloat16",)),
    make_case(M=8192, N=11008, dtypes=("bfloat16",)),
    make_case(M=8192, N=14336),
    make_case(M=8192, N=28672, dtypes=("bfloat16",)),
)

DRAWN = drawn_rows(2**15)

SWIGLU = Op(
    "swiglu",
    swiglu_reference,
    INPUTS,
    in_turn(_cost),
    EDGE,
    sweep=(*SWEEP, make_case(M=8192, N=18432, dtypes=("bfloat16",))),  # DeepSeek-V3, dense layers
    passes=PASSES,
    drawn=DRAWN,
)
GEGLU = Op(
    "geglu",
    geglu_reference,
    INPUTS,
    in_turn(_cost),
    edge=(
        *EDGE,
        make_case("erf", M=17, N=129),
        make_case("erf", M=5, N=300, values="large"),
        make_case("erf", M=6, N=100, values="infinities"),
    ),
    sweep=(
        *SWEEP,
        make_case(M=8192, N=10240, dtypes=("bfloat16",)),  # Gemma 3 4B
        make_case("erf", M=8192, N=14336, dtypes=("bfloat16",)),
    ),
    passes=PASSES,
    drawn=DRAWN,
    params={"approximate": "tanh"},
    flags={"erf": {"approximate": "none"}},
)

"""Cases and cost that layer norm and RMS norm share."""

from ops._drawn import drawn_rows
from ops._row_cases import ROW_EDGE
from ops._spec import Cost, case

NORM_EDGE = (
    # A row of one element far above eps has no plain case. Its dx is the rounding of a difference
    # that is zero, in PyTorch as here, and fails for one seed of several.
    case(M=1, N=1, values="denormal"),
    *ROW_EDGE[1:],
    case(M=300, N=64),
    # Several blocks, then beyond what programs keep in registers, backward and then forward.
    case(M=3, N=9000, dtypes=("float16",)),
    case(M=2, N=8300, dtypes=("float32",)),
    case(M=2, N=16500, dtypes=("float16", "bfloat16")),
    case(M=1, N=66000, dtypes=("bfloat16",)),
    # Uneven rows in chunks of which the last have masks; on a GPU two programs hold some of them.
    case(M=2, N=10240, dtypes=("bfloat16", "float32")),
    case(M=2, N=18432, dtypes=("float16",)),
    case("residual", M=2, N=14336, dtypes=("bfloat16",)),
    case("residual", M=7, N=129),
    case("residual", M=0, N=64),
    case("residual", M=5, N=200, layout="padded"),
    case("residual", M=4, N=100, layout="expanded"),
    case("residual", M=2, N=16500, dtypes=("float16",)),
    case("residual", M=1, N=66000, dtypes=("bfloat16",)),
    # On a GPU two or three programs hold such a row backward, and of 65536 columns eight or nine;
    # eight hold that one forward.
    case(M=3, N=32768, dtypes=("bfloat16",)),
    case(M=3, N=16384, dtypes=("float32",)),
    case(M=2, N=65536, dtypes=("float32",)),
    case("residual", M=2, N=16384, dtypes=("float32",)),
    case("residual", M=2, N=65536, dtypes=("float32",)),
)
NORM_SWEEP = (
    *(case(M=4096, N=n, dtypes=("bfloat16",)) for n in (1024, 4096)),
    case(M=4096, N=5120, dtypes=("bfloat16",)),  # Llama 2 13B
    case(M=4096, N=6656, dtypes=("bfloat16",)),  # LLaMA 33B
    case(M=4096, N=7168, dtypes=("bfloat16",)),  # DeepSeek-V3
    case(M=4096, N=12288, dtypes=("float16",)),  # GPT-3 175B
    case(M=4096, N=14336, dtypes=("bfloat16",)),  # BLOOM 176B
    case(M=4096, N=18432, dtypes=("bfloat16",)),  # Nemotron-4 340B
    case(M=4096, N=16384, dtypes=("float32",)),
    case(M=32768, N=4096, dtypes=("bfloat16",)),
    case(M=16384, N=16384, dtypes=("bfloat16",)),
    case(M=4096, N=65536, dtypes=("bfloat16",)),
    case(M=1024, N=262144, dtypes=("bfloat16",)),
    case("residual", M=4096, N=1024, dtypes=("bfloat16",)),
    case("residual", M=32768, N=4096, dtypes=("bfloat16",)),
)
NORM_DRAWN = drawn_rows(2**17)
# No keyword argument comes with a residual: its presence says it.
NORM_FLAGS = {"residual": {}}


def norm_cost(a_case, direction, itemsize, vectors, flops):
    """vectors: how many of N elements each pass reads and the other writes. flops: an element."""
    elements, n = a_case["M"] * a_case["N"], a_case["N"]
    fused = "residual" in a_case.flags
    if direction == "forward":
        read, written = (1 + fused) * elements + vectors * n, (1 + fused) * elements
    else:
        # The gradients of x and of the residual are one tensor.
        read, written = (2 + fused) * elements + n, elements + vectors * n
    return Cost(read * itemsize, written * itemsize, (flops + fused) * elements)

"""Cases and cost that layer norm and RMS norm share."""

from ops._drawn import drawn_rows
from ops._row_cases import ROW_EDGE
from ops._spec import Cost, make_case

NORM_EDGE = (
    # A row of one element far above eps has no plain case. Its dx is the rounding of a difference
    # that is zero, in PyTorch as here, and fails for one seed of several.
    make_case(M=1, N=1, values="denormal"),
    *ROW_EDGE[1:],
    make_case(M=300, N=64),
    # Several blocks, then beyond what programs keep in registers, backward and then forward.
    make_case(M=3, N=9000, dtypes=("float16",)),
    make_case(M=2, N=8300, dtypes=("float32",)),
    make_case(M=2, N=16500, dtypes=("float16", "bfloat16")),
    make_case(M=1, N=66000, dtypes=("bfloat16",)),
    # Uneven rows in chunks of which the last have masks; on a GPU two programs hold some of them.
    make_case(M=2, N=10240, dtypes=("bfloat16", "float32")),
    make_case(M=2, N=18432, dtypes=("float16",)),
    make_case("residual", M=2, N=14336, dtypes=("bfloat16",)),
    make_case("residual", M=7, N=129),
    make_case("residual", M=0, N=64),
    make_case("residual", M=5, N=200, layout="padded"),
    make_case("residual", M=4, N=100, layout="expanded"),
    make_case("residual", M=2, N=16500, dtypes=("float16",)),
    make_case("residual", M=1, N=66000, dtypes=("bfloat16",)),
    # On a GPU two or three programs hold such a row backward, and of 65536 columns eight or nine;
    # eight hold that one forward.
    make_case(M=3, N=32768, dtypes=("bfloat16",)),
    make_case(M=3, N=16384, dtypes=("float32",)),
    make_case(M=2, N=65536, dtypes=("float32",)),
    make_case("residual", M=2, N=16384, dtypes=("float32",)),
    make_case("residual", M=2, N=65536, dtypes=("float32",)),
    make_case("bare", M=5, N=200),
    make_case("bare", M=2, N=9000, dtypes=("float16",)),
    make_case("residual", "bare", M=7, N=129),
    make_case("residual", "wide", M=7, N=129),
    make_case("residual", "wide", M=5, N=1024, layout="padded"),
    # The sum of four bytes is longer than x: one program holds it, two do, it is read twice.
    make_case("residual", "wide", M=3, N=4096, dtypes=("bfloat16",)),
    make_case("residual", "wide", M=2, N=9000, dtypes=("float16",)),
    make_case("residual", "wide", M=1, N=66000, dtypes=("bfloat16",)),
)
NORM_SWEEP = (
    *(make_case(M=4096, N=n, dtypes=("bfloat16",)) for n in (1024, 4096)),
    make_case(M=4096, N=5120, dtypes=("bfloat16",)),  # Llama 2 13B
    make_case(M=4096, N=6656, dtypes=("bfloat16",)),  # LLaMA 33B
    make_case(M=4096, N=7168, dtypes=("bfloat16",)),  # DeepSeek-V3
    make_case(M=4096, N=12288, dtypes=("float16",)),  # GPT-3 175B
    make_case(M=4096, N=14336, dtypes=("bfloat16",)),  # BLOOM 176B
    make_case(M=4096, N=18432, dtypes=("bfloat16",)),  # Nemotron-4 340B
    make_case(M=4096, N=16384, dtypes=("float32",)),
    make_case(M=32768, N=4096, dtypes=("bfloat16",)),
    make_case(M=16384, N=16384, dtypes=("bfloat16",)),
    make_case(M=4096, N=65536, dtypes=("bfloat16",)),
    make_case(M=1024, N=262144, dtypes=("bfloat16",)),
    make_case("residual", M=4096, N=1024, dtypes=("bfloat16",)),
    make_case("residual", M=32768, N=4096, dtypes=("bfloat16",)),
)
NORM_DRAWN = drawn_rows(2**17)
# No keyword argument comes with these. A residual is there or not, and so are the vectors, which
# "bare" leaves out. "wide": the residual is float32, beside x of any dtype.
NORM_FLAGS = {"residual": {}, "bare": {}, "wide": {}}


def norm_cost(case, pass_, itemsize, vectors, flops):
    """vectors: how many of N elements each pass reads and the other writes. flops: an element."""
    elements, n = case["M"] * case["N"] * itemsize, case["N"] * itemsize
    fused, bare = "residual" in case.flags, "bare" in case.flags
    wide = fused and "wide" in case.flags and itemsize < 4
    # The residual, the sum and their gradients.
    stream = case["M"] * case["N"] * 4 if wide else elements
    vectors = 0 if bare else vectors * n
    if pass_ == "forward":
        read, written = elements + fused * stream + vectors, elements + fused * stream
    else:
        read = (stream if fused else elements) + elements + fused * stream + n * (not bare)
        # The gradients of x and of the residual are one tensor if their dtypes are one.
        written = elements + wide * stream + vectors
    return Cost(read, written, (flops + fused) * case["M"] * case["N"])

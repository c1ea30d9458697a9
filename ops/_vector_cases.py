"""Cases that the element-wise families share: flat vectors of N elements."""

from ops._spec import make_case

EDGE = (
    make_case(N=1),
    make_case(N=127),
    make_case(N=4096),
    make_case(N=10001),
    make_case(N=0),
    make_case(N=5000, layout="offset"),
    make_case(N=1000, layout="strided"),
    make_case(N=1000, layout="expanded"),
    make_case(N=1000, layout="offset4", dtypes=("float16",)),
    make_case(N=1000, layout="offset8", dtypes=("float16",)),
    make_case(N=5000, values="large"),
    make_case(N=5000, values="inf"),
    make_case(N=1000, values="infinities"),
    make_case(N=1000, values="denormal"),
    make_case(N=1000, values="equal"),
)
# From a vector that fits in the L2 cache to an activation of a large model. The drawn shapes of
# each run cover the lengths between, 2**24 among them. Rules were tuned at 2**24, and ours stood
# there no worse than at the other powers of two.
SWEEP = (
    make_case(N=2**20, dtypes=("bfloat16",)),
    make_case(N=4096 * 1024, dtypes=("bfloat16",)),
    make_case(N=8192 * 14336, dtypes=("float16", "bfloat16")),  # Llama 3 8B, MLP activation
    make_case(N=2**28, dtypes=("bfloat16", "float32")),
)


def bits_bytes(n: int) -> int:
    """The bytes of one bit an element: all that some backward passes need of n elements."""
    return -(-n // 8)

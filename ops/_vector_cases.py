"""Cases that the element-wise families share: flat vectors of N elements."""

from ops._spec import case

EDGE = (
    case(N=1),
    case(N=127),
    case(N=4096),
    case(N=10001),
    case(N=0),
    case(N=5000, layout="offset"),
    case(N=1000, layout="strided"),
    case(N=1000, layout="expanded"),
    case(N=1000, layout="offset4", dtypes=("float16",)),
    case(N=1000, layout="offset8", dtypes=("float16",)),
    case(N=5000, values="large"),
    case(N=5000, values="inf"),
    case(N=1000, values="infinities"),
    case(N=1000, values="denormal"),
    case(N=1000, values="equal"),
)
# From a vector that fits in the L2 cache to an activation of a large model. The drawn shapes of
# each run cover the lengths between, 2**24 among them. Rules were tuned at 2**24, and ours stood
# there no worse than at the other powers of two.
SWEEP = (
    case(N=2**20, dtypes=("bfloat16",)),
    case(N=4096 * 1024, dtypes=("bfloat16",)),
    case(N=8192 * 14336, dtypes=("float16", "bfloat16")),  # Llama 3 8B, MLP activation
    case(N=2**28, dtypes=("bfloat16", "float32")),
)


def bits_bytes(n: int) -> int:
    """The bytes of one bit an element: all that some backward passes need of n elements."""
    return -(-n // 8)

"""Cases that the families over rows share: M rows of length N."""

from ops._spec import case

ROW_EDGE = (
    case(M=1, N=1),
    case(M=3, N=127),
    case(M=17, N=129),
    case(M=2, N=1024),
    case(M=0, N=64),
    case(M=9, N=200, layout="padded"),
    case(M=9, N=200, layout="offset"),
    case(M=5, N=300, values="large"),
    case(M=5, N=300, values="equal"),
    case(M=5, N=300, values="spike"),
    case(M=6, N=100, values="infinities"),
    case(M=6, N=100, values="denormal"),
    case(M=4, N=136, layout="offset4", dtypes=("float16",)),
    case(M=4, N=136, layout="offset8", dtypes=("float16",)),
    case(M=9, N=40, layout="transposed"),
    case(M=4, N=100, layout="expanded"),
)
# The classic curve: 4096 rows. Then the row lengths of attention scores and vocabularies.
ROW_SWEEP = (
    *(case(M=4096, N=2**k, dtypes=("bfloat16",)) for k in (8, 9, 11, 13)),
    *(case(M=4096, N=2**k, dtypes=("bfloat16", "float32")) for k in (10, 12, 14)),
    case(M=4096, N=12288, dtypes=("float16",)),
    case(M=4096, N=50257, dtypes=("bfloat16",)),  # the vocabulary of GPT-2
    case(M=2048, N=151936, dtypes=("bfloat16",)),  # that of Qwen 2.5
    case(M=32768, N=4096, dtypes=("bfloat16",)),
    case(M=16384, N=16384, dtypes=("bfloat16",)),
    case(M=4096, N=65536, dtypes=("bfloat16",)),
    case(M=1024, N=262144, dtypes=("bfloat16",)),
)

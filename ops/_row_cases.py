"""Cases that the families over rows share: M rows of length N."""

from ops._spec import make_case

ROW_EDGE = (
    make_case(M=1, N=1),
    make_case(M=3, N=127),
    make_case(M=17, N=129),
    make_case(M=2, N=1024),
    make_case(M=0, N=64),
    make_case(M=9, N=200, layout="padded"),
    make_case(M=9, N=200, layout="offset"),
    make_case(M=5, N=300, values="large"),
    make_case(M=5, N=300, values="equal"),
    make_case(M=5, N=300, values="spike"),
    make_case(M=6, N=100, values="infinities"),
    make_case(M=6, N=100, values="denormal"),
    make_case(M=4, N=136, layout="offset4", dtypes=("float16",)),
    make_case(M=4, N=136, layout="offset8", dtypes=("float16",)),
    make_case(M=9, N=40, layout="transposed"),
    make_case(M=4, N=100, layout="expanded"),
)
# The classic curve: 4096 rows. Then the row lengths of attention scores and vocabularies.
ROW_SWEEP = (
    *(make_case(M=4096, N=2**k, dtypes=("bfloat16",)) for k in (8, 9, 11, 13)),
    *(make_case(M=4096, N=2**k, dtypes=("bfloat16", "float32")) for k in (10, 12, 14)),
    make_case(M=4096, N=12288, dtypes=("float16",)),
    make_case(M=4096, N=50257, dtypes=("bfloat16",)),  # the vocabulary of GPT-2
    make_case(M=2048, N=151936, dtypes=("bfloat16",)),  # that of Qwen 2.5
    make_case(M=32768, N=4096, dtypes=("bfloat16",)),
    make_case(M=16384, N=16384, dtypes=("bfloat16",)),
    make_case(M=4096, N=65536, dtypes=("bfloat16",)),
    make_case(M=1024, N=262144, dtypes=("bfloat16",)),
)

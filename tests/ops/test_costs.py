"""Check the work that each op declares against figures derived by hand at small sizes.

Rates, floors, the bound of a cell and the filters of the paper all rest on `Op.cost`. So each op
and pass has a line here. Its figures come from the formula in the comment, not from the code.
"""

from pathlib import Path

import pytest

from harness.project import registry, source_tree
from ops import activation, vector
from ops._spec import Cost, in_turn, make_case

# Fields: op, pass, case, bytes of an item, bytes read, bytes written, FLOPs.
LINES = [
    # Activations, N = 20. Forward: N items each way. Backward reads the gradient and one other
    # vector for gelu, tanh and cosh. For relu and leaky_relu it reads 20 bits, which is 3 bytes.
    ("relu", "forward", make_case(N=20), 2, 40, 40, 20),
    ("relu", "backward", make_case(N=20), 2, 40 + 3, 40, 20),
    ("leaky_relu", "forward", make_case(N=20), 4, 80, 80, 20),
    ("leaky_relu", "backward", make_case(N=20), 4, 80 + 3, 80, 20),
    # FLOPs of an element: erf, two products, a sum and a factor; 11 for the slope.
    ("gelu", "forward", make_case(N=20), 2, 40, 40, 100),
    ("gelu", "backward", make_case(N=20), 2, 80, 40, 220),
    ("tanh", "forward", make_case(N=20), 2, 40, 40, 20),
    # g (1 - y²): two products and a difference.
    ("tanh", "backward", make_case(N=20), 2, 80, 40, 60),
    ("cosh", "forward", make_case(N=20), 4, 80, 80, 20),
    # g sinh x.
    ("cosh", "backward", make_case(N=20), 4, 160, 80, 40),
    # Element-wise vectors, N = 20: operands read, results written, an operation for each result.
    ("scale", "forward", make_case(N=20), 2, 40, 40, 20),
    ("scale", "backward", make_case(N=20), 2, 40, 40, 20),
    ("add", "forward", make_case(N=20), 4, 160, 80, 20),
    ("mul", "forward", make_case(N=20), 2, 80, 40, 20),
    # x, y and the gradient; dx and dy.
    ("mul", "backward", make_case(N=20), 2, 120, 80, 40),
    # Two bits an element say which input was taken: 3 words of 8 elements, 2 bytes each.
    ("maximum", "forward", make_case(N=20), 2, 80, 40, 20),
    ("maximum", "backward", make_case(N=20), 2, 40 + 6, 80, 40),
    ("minimum", "forward", make_case(N=20), 4, 160, 80, 20),
    ("minimum", "backward", make_case(N=20), 4, 80 + 6, 160, 40),
    # A product and a sum for each pair; the gradient is one item.
    ("dot", "forward", make_case(N=20), 2, 80, 2, 40),
    ("dot", "backward", make_case(N=20), 2, 80 + 2, 80, 40),
    # M = 3 rows of N = 7. Softmax: 5 FLOPs an element; backward reads y and dy.
    ("softmax", "forward", make_case(M=3, N=7), 2, 42, 42, 105),
    ("softmax", "backward", make_case(M=3, N=7), 2, 84, 42, 105),
    # The rows see 5, 6 and 7 keys, together 18; a masked entry is written as zero.
    ("softmax", "forward", make_case("causal", M=3, N=7), 2, 36, 42, 90),
    ("softmax", "backward", make_case("causal", M=3, N=7), 2, 72, 42, 90),
    # More rows than keys: the last three see 1, 2 and 3 of them, the first four none.
    ("softmax", "forward", make_case("causal", M=7, N=3), 2, 12, 42, 30),
    # The mask has one row of 7, which the backward pass does not need.
    ("softmax", "forward", make_case("mask", M=3, N=7), 4, 84 + 28, 84, 105),
    ("softmax", "backward", make_case("mask", M=3, N=7), 4, 168, 84, 105),
    # Norms: forward the rows and the vectors of 7. Backward x, dy and the weight, then dx and the
    # gradients of the vectors. A residual adds a tensor each way forward, a gradient, and a sum for
    # each element.
    ("layer_norm", "forward", make_case(M=3, N=7), 2, 42 + 28, 42, 168),
    ("layer_norm", "backward", make_case(M=3, N=7), 2, 84 + 14, 42 + 28, 252),
    ("layer_norm", "forward", make_case("residual", M=3, N=7), 2, 84 + 28, 84, 189),
    ("layer_norm", "backward", make_case("residual", M=3, N=7), 2, 126 + 14, 42 + 28, 273),
    ("rms_norm", "forward", make_case(M=3, N=7), 4, 84 + 28, 84, 84),
    ("rms_norm", "backward", make_case(M=3, N=7), 4, 168 + 28, 84 + 28, 189),
    ("rms_norm", "forward", make_case("residual", M=3, N=7), 4, 168 + 28, 168, 105),
    ("rms_norm", "backward", make_case("residual", M=3, N=7), 4, 252 + 28, 84 + 28, 210),
    # Without vectors; with a float32 residual, sum and gradient of them, 84 bytes each.
    # In float32 nothing is wider: the gradients of x and of the residual are one tensor.
    ("rms_norm", "backward", make_case("residual", "wide", M=3, N=7), 4, 252 + 28, 84 + 28, 210),
    ("layer_norm", "forward", make_case("bare", M=3, N=7), 2, 42, 42, 168),
    ("layer_norm", "backward", make_case("bare", M=3, N=7), 2, 84, 42, 252),
    ("rms_norm", "backward", make_case("bare", M=3, N=7), 2, 84, 42, 189),
    ("rms_norm", "forward", make_case("residual", "wide", M=3, N=7), 2, 42 + 84 + 14, 42 + 84, 105),
    (
        *("rms_norm", "backward", make_case("residual", "wide", M=3, N=7), 2),
        *(84 + 42 + 84 + 14, 42 + 84 + 14, 210),
    ),
    # Gated: two tensors of 21 make one; backward three make two.
    ("swiglu", "forward", make_case(M=3, N=7), 2, 84, 42, 210),
    ("swiglu", "backward", make_case(M=3, N=7), 2, 126, 84, 420),
    ("geglu", "forward", make_case(M=3, N=7), 4, 168, 84, 210),
    ("geglu", "backward", make_case(M=3, N=7), 4, 252, 168, 420),
    # Losses: 3 targets of 8 bytes, one number out; with gradients those of the logits too.
    ("cross_entropy", "forward", make_case(M=3, V=7), 2, 42 + 24, 2, 105),
    ("cross_entropy", "both", make_case(M=3, V=7), 2, 42 + 24, 42 + 2, 210),
    # x is 3 x 5, weight 7 x 5. A product of 3 x 5 x 7 = 105 is 210 FLOPs; three are 630.
    ("linear_cross_entropy", "forward", make_case(M=3, H=5, V=7), 2, 30 + 70 + 24, 2, 210),
    ("linear_cross_entropy", "both", make_case(M=3, H=5, V=7), 2, 30 + 70 + 24, 30 + 70 + 2, 630),
    # q, k, v and out have 2 x 3 x 5 x 7 = 210 items. Two products have 2 x 3 x 5 x 5 x 7 = 1050.
    ("attention", "forward", make_case(B=2, H=3, S=5, D=7), 2, 1260, 420, 4200),
    ("attention", "forward", make_case("causal", B=2, H=3, S=5, D=7), 4, 2520, 840, 2100),
    # Backward, out, its gradient and 30 sums of rows are read too, and three gradients written.
    ("attention", "backward", make_case(B=2, H=3, S=5, D=7), 2, 2100 + 120, 1260, 10500),
    ("attention", "both", make_case(B=2, H=3, S=5, D=7), 2, 1260 + 2220, 420 + 120 + 1260, 14700),
    ("attention", "forward", make_case("mask", B=2, H=3, S=5, D=7), 2, 1260 + 50, 420, 4200),
    ("attention", "backward", make_case("mask", B=2, H=3, S=5, D=7), 2, 2220 + 50, 1260, 10500),
    # q and out have 2 x 4 x 3 x 8 = 192 items, k and v 2 x 2 x 5 x 8 = 160 each. Rows end at keys
    # 3 to 5, halves of the last square left out: 3 x 5 - 9 / 2 = 10.5 pairs for each of 8 heads.
    (
        "attention",
        "forward",
        make_case("causal", B=2, H=4, K=2, S=3, T=5, D=8),
        4,
        768 + 1280,
        768,
        2688,
    ),
    # The window hides a triangle of 3 x 3 / 2 pairs.
    (
        "attention",
        "forward",
        make_case("causal", B=2, H=4, K=2, W=2, S=3, T=5, D=8),
        2,
        1024,
        384,
        1536,
    ),
    # 4 heads of 3 queries have 2 x 4 x 3 x 8 = 192 items, 2 heads of 5 keys and values 320.
    (
        "decode_attention",
        "forward",
        make_case(B=2, H=4, K=2, Q=3, S=5, D=8),
        2,
        384 + 640,
        384,
        3840,
    ),
    # In the mean half of the keys count; there are two lengths of 8 bytes.
    (
        "decode_attention",
        "forward",
        make_case("lengths", B=2, H=4, K=2, Q=3, S=5, D=8),
        4,
        1424,
        768,
        1920,
    ),
    # q and out have 2 x 4 x 20 x 8 = 1280 items, k and v 640 each. A head has 20 x 20 pairs.
    (
        "block_sparse_attention",
        "forward",
        make_case(B=2, H=4, K=2, I=2, J=2, S=20, D=8),
        2,
        2560 + 2560,
        2560,
        102400,
    ),
    # q, out and its gradient, k, v and 160 sums of rows; then three gradients.
    (
        "block_sparse_attention",
        "backward",
        make_case(B=2, H=4, K=2, I=2, J=2, S=20, D=8),
        4,
        15360 + 5120 + 640,
        5120 + 5120,
        256000,
    ),
    (
        "block_sparse_attention",
        "both",
        make_case(B=2, H=4, K=2, I=2, J=2, S=20, D=8),
        2,
        5120 + 10880,
        2560 + 640 + 5120,
        358400,
    ),
    # Twice as many keys as rows: k and v have 2 x 40 x 8 items each, q and out half of that.
    (
        "block_sparse_attention",
        "forward",
        make_case(B=1, H=2, I=2, J=3, S=20, T=40, D=8),
        2,
        640 + 2560,
        640,
        2 * 800 * 32,
    ),
    # One of two heads: 1 x 2 x 20 x 8 = 320 items. The diagonal is kept: squares of 16 and 4.
    (
        "block_sparse_attention",
        "forward",
        make_case("half", B=1, H=2, I=2, J=2, S=20, D=8),
        2,
        1920,
        640,
        2 * (256 + 16) * 32,
    ),
    # A tenth of 400 squares of 16, a quarter of 100, and half of 16.
    (
        "block_sparse_attention",
        "forward",
        make_case("tenth", B=1, H=1, I=20, J=20, S=320, D=8),
        2,
        15360,
        5120,
        40 * 256 * 32,
    ),
    (
        "block_sparse_attention",
        "forward",
        make_case("quarter", B=3, H=2, A=3, G=1, I=10, J=10, S=160, D=8),
        2,
        46080,
        15360,
        6 * 25 * 256 * 32,
    ),
    (
        "block_sparse_attention",
        "forward",
        make_case("local", "half", B=1, H=2, I=4, J=4, S=64, D=8),
        2,
        6144,
        2048,
        2 * 8 * 256 * 32,
    ),
    # The squares of the diagonal alone: three of 16 x 17 / 2 pairs, and one of 12 x 13 / 2.
    (
        "block_sparse_attention",
        "forward",
        make_case("causal", "quarter", B=1, H=2, G=2, I=4, J=4, S=60, D=8),
        2,
        5760,
        1920,
        2 * (3 * 136 + 78) * 32,
    ),
    # Without the first row of squares and the last column there are 2 x 2, and a quarter is one.
    (
        "block_sparse_attention",
        "forward",
        make_case("gaps", B=1, H=2, A=1, G=1, I=3, J=3, S=48, D=8),
        2,
        4608,
        1536,
        2 * 256 * 32,
    ),
    # a of 3 x 5, b of 5 x 7, out of 3 x 7.
    ("matmul", "forward", make_case(M=3, N=7, K=5), 2, 30 + 70, 42, 210),
    ("matmul", "forward", make_case("gelu", "bias", M=3, N=7, K=5), 4, 60 + 140 + 28, 84, 210),
    ("matmul", "forward", make_case("residual", M=3, N=7, K=5), 2, 30 + 70 + 42, 42, 210),
    ("matmul", "forward", make_case("gated", M=3, N=7, K=5), 2, 30 + 140, 42, 420),
    ("matmul", "forward", make_case("preactivation", M=3, N=7, K=5), 2, 30 + 70, 84, 210),
    (
        "matmul",
        "forward",
        make_case("gated", "preactivation", M=3, N=7, K=5),
        2,
        30 + 140,
        126,
        420,
    ),
    ("matmul", "forward", make_case("residual", B=2, M=3, N=7, K=5), 2, 60 + 140 + 84, 84, 420),
    # Two sequences of 5 rows each with 3 heads of 7: 105 items times 2, and 3 boundaries. The first
    # has 2 x 5 x 5 pairs. Causal triangles are half squares.
    *(
        ("attention_varlen", pass_, make_case(*flags, "even", B=2, H=3, T=10, D=7), 2, *numbers)
        for pass_, flags, numbers in (
            ("forward", (), (1260 + 12, 420, 4200)),
            ("forward", ("causal",), (1260 + 12, 420, 2100)),
            ("backward", (), (2100 + 12 + 120, 1260, 10500)),
            ("both", (), (1272 + 2232, 420 + 120 + 1260, 14700)),
        )
    ),
    # Two rows at the end of 5 keys see 2 x 3 and a triangle of 2; a window of 3 hides a triangle of
    # 2. One key head: 20 items of keys, 42 of rows.
    (
        *("attention_varlen", "forward", make_case("causal", B=1, H=3, K=1, T=2, U=5, D=7), 2),
        *(84 + 140 + 16, 84, 4 * 3 * 7 * 8),
    ),
    (
        *("attention_varlen", "forward", make_case("causal", B=1, H=3, W=3, T=2, U=5, D=7), 2),
        *(84 + 420 + 16, 84, 4 * 3 * 7 * 6),
    ),
    # Two of 5 rows at the end of 2 keys see a triangle.
    (
        *("attention_varlen", "forward", make_case("causal", B=1, H=3, T=5, U=2, D=7), 2),
        *(210 + 168 + 16, 210, 4 * 3 * 7 * 2),
    ),
    # Two batches of 3 tokens with 5 and 1 heads of 8; the angles of 2 pairs turn 4 entries. 6 x 6
    # heads have 288 items. There are 3 x 2 cosines and as many sines; a pair takes 6 FLOPs.
    ("rotary", "forward", make_case(B=2, S=3, H=5, K=1, D=8, R=2), 2, 576 + 24, 576, 432),
    ("rotary", "backward", make_case(B=2, S=3, H=5, K=1, D=8, R=2), 4, 1152 + 48, 1152, 432),
    # Queries alone have 240 items. Positions of 8 bytes choose among 4 rows, then among 6 tokens.
    ("rotary", "forward", make_case("alone", B=2, S=3, H=5, K=1, D=8, R=2), 2, 480 + 24, 480, 360),
    (
        *("rotary", "forward", make_case("positions", B=2, S=3, H=5, K=1, D=8, R=2, L=4), 2),
        *(576 + 32 + 48, 576, 432),
    ),
    (
        *("rotary", "backward", make_case("positions", B=2, S=3, H=5, K=1, D=8, R=2, L=9), 2),
        *(576 + 48 + 48, 576, 432),
    ),
    ("transpose", "forward", make_case(M=3, N=7), 2, 42, 42, 0),
    ("transpose", "backward", make_case(M=3, N=7), 4, 84, 84, 0),
    # 20 items and 7 boundaries in, an index of 8 or 4 bytes for each item out.
    ("bucketize", "forward", make_case(N=20, B=7), 2, 54, 160, 0),
    # Each token reads a row and its id; three uniform ids meet 2 of 7 rows, rounded down.
    ("embedding", "forward", make_case(M=3, V=7, C=5), 2, 24 + 20, 30, 0),
    ("embedding", "backward", make_case(M=3, V=7, C=5), 4, 24 + 60, 140, 15),
    ("embedding", "both", make_case(M=3, V=7, C=5), 2, 44 + 54, 30 + 70, 15),
    # Five tokens, of which a quarter has one id, rounded up: three uniform ones meet 2 of 7 rows.
    ("embedding", "forward", make_case("frequent", M=5, V=7, C=5), 2, 40 + 20, 50, 0),
    ("embedding", "forward", make_case("frequent", M=9, V=7, C=5), 2, 72 + 40, 90, 0),
    ("embedding", "forward", make_case(M=0, V=0, C=5), 2, 0, 0, 0),
    # x 15, weight 35, dy and results 21 items; 105 multiplications a product.
    ("linear", "forward", make_case(M=3, N=7, K=5), 2, 100, 42, 210),
    ("linear", "backward", make_case(M=3, N=7, K=5), 2, 142, 100, 420),
    ("linear", "both", make_case(M=3, N=7, K=5), 2, 100 + 142, 42 + 100, 630),
    ("linear", "forward", make_case("bias", M=3, N=7, K=5), 4, 228, 84, 210),
    ("linear", "backward", make_case("bias", M=3, N=7, K=5), 4, 284, 228, 420),
    # A bit a result: 3 bytes; the result itself; one number a result; two.
    ("linear", "backward", make_case("relu", M=3, N=7, K=5), 2, 145, 100, 420),
    ("linear", "backward", make_case("relu", M=5, N=7, K=3), 2, 72 + 70 + 5, 72, 420),
    ("linear", "both", make_case("leaky_relu", M=3, N=7, K=5), 2, 245, 42 + 3 + 100, 630),
    ("linear", "both", make_case("tanh", M=3, N=7, K=5), 2, 284, 142, 630),
    ("linear", "both", make_case("gelu", M=3, N=7, K=5), 2, 284, 42 + 42 + 100, 630),
    ("linear", "backward", make_case("gelu_tanh", M=3, N=7, K=5), 2, 184, 100, 420),
    ("linear", "forward", make_case("silu", M=3, N=7, K=5), 2, 100, 42, 210),
    ("linear", "backward", make_case("silu", M=3, N=7, K=5), 2, 184, 100, 420),
    ("linear", "forward", make_case("gated", M=3, N=7, K=5), 2, 170, 42, 420),
    ("linear", "both", make_case("gated", M=3, N=7, K=5), 2, 466, 42 + 84 + 170, 1260),
    # Parameters, gradients and two moments are read, all but the gradients and the norm written;
    # and four bytes of the step either way.
    ("adamw", "forward", make_case(P=2, N=20), 2, 160 + 4, 120 + 8, 280),
    ("adamw", "forward", make_case("unclipped", P=2, N=20), 4, 320 + 4, 240 + 4, 280),
    # Moments and masters of four bytes; the parameters are written and not read.
    ("adamw", "forward", make_case("masters", P=2, N=20), 2, 280 + 4, 280 + 8, 280),
    ("bucketize", "forward", make_case("int32", N=20, B=7), 4, 108, 80, 0),
    ("randint", "forward", make_case(N=20), 4, 0, 160, 0),
    ("randint", "forward", make_case("int32", N=20), 4, 0, 80, 0),
    # The mask is drawn again, not kept.
    ("dropout", "forward", make_case(N=20), 2, 40, 40, 0),
    ("dropout", "backward", make_case(N=20), 4, 80, 80, 0),
    # Both passes in turn: each reads and writes its tensors, and the first keeps some for the
    # second. Forward, relu reads x and writes y and 3 bytes of flags. Backward it reads the flags
    # and dy, and writes dx.
    ("relu", "both", make_case(N=20), 2, 40 + 43, 40 + 3 + 40, 40),
    ("leaky_relu", "both", make_case(N=20), 4, 80 + 83, 80 + 3 + 80, 40),
    # If inputs or outputs are kept for the backward pass, nothing more is written.
    ("gelu", "both", make_case(N=20), 2, 40 + 80, 40 + 40, 320),
    ("tanh", "both", make_case(N=20), 2, 40 + 80, 40 + 40, 80),
    ("cosh", "both", make_case(N=20), 4, 80 + 160, 80 + 80, 60),
    ("scale", "both", make_case(N=20), 2, 40 + 40, 40 + 40, 40),
    ("mul", "both", make_case(N=20), 2, 80 + 120, 40 + 80, 60),
    ("maximum", "both", make_case(N=20), 2, 80 + 46, 40 + 6 + 80, 60),
    ("minimum", "both", make_case(N=20), 4, 160 + 86, 80 + 6 + 160, 60),
    ("dot", "both", make_case(N=20), 2, 80 + 82, 2 + 80, 80),
    ("softmax", "both", make_case(M=3, N=7), 2, 42 + 84, 42 + 42, 210),
    ("softmax", "both", make_case("causal", M=3, N=7), 2, 36 + 72, 42 + 42, 180),
    ("softmax", "both", make_case("mask", M=3, N=7), 4, 112 + 168, 84 + 84, 210),
    ("layer_norm", "both", make_case(M=3, N=7), 2, 70 + 98, 42 + 70, 420),
    ("layer_norm", "both", make_case("residual", M=3, N=7), 2, 112 + 140, 84 + 70, 462),
    ("rms_norm", "both", make_case(M=3, N=7), 4, 112 + 196, 84 + 112, 273),
    ("rms_norm", "both", make_case("residual", M=3, N=7), 4, 196 + 280, 168 + 112, 315),
    ("swiglu", "both", make_case(M=3, N=7), 2, 84 + 126, 42 + 84, 630),
    ("geglu", "both", make_case(M=3, N=7), 4, 168 + 252, 84 + 168, 630),
    ("rotary", "both", make_case(B=2, S=3, H=5, K=1, D=8, R=2), 2, 600 + 600, 576 + 576, 864),
    ("transpose", "both", make_case(M=3, N=7), 2, 42 + 42, 42 + 42, 0),
    ("dropout", "both", make_case(N=20), 2, 40 + 40, 40 + 40, 0),
]
ROOT = Path(__file__).parents[2]
OPS = {name: registry.op(name)[0] for name in source_tree.ops(ROOT)}


@pytest.mark.parametrize("name", OPS)
def test_an_op_declares_the_work_that_was_counted_by_hand(name):
    for op, pass_, case, itemsize, read, written, flops in LINES:
        if op == name:
            found = OPS[op].cost(case, pass_, itemsize)
            assert found == Cost(read, written, flops), f"{case.name} {pass_}"


@pytest.mark.parametrize("name", OPS)
def test_no_pass_of_an_op_is_left_out(name):
    assert {line[1] for line in LINES if line[0] == name} == set(OPS[name].passes)


def test_no_line_is_of_an_op_that_is_not_here():
    assert {line[0] for line in LINES} == set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_a_flag_that_changes_the_work_is_counted_too(name):
    """The costs of a case with and without a flag differ, if a line has the flag."""
    op = OPS[name]
    counted = {flag for line in LINES if line[0] == name for flag in line[2].flags}
    for case in (*op.edge, *op.sweep):
        bare = make_case(**case.sizes)
        for flag in set(case.flags) - counted:
            flagged = make_case(flag, **case.sizes)
            for pass_ in op.passes:
                assert op.cost(flagged, pass_, 2) == op.cost(bare, pass_, 2)


def test_the_makers_of_costs_hand_over_what_they_are_given():
    """Ops call these functions at import; a mutant of their lines would not be noticed there."""
    n = make_case(N=20)
    assert in_turn(vector._dot_cost)(n, "both", 2) == Cost(80 + 82, 2 + 80, 80)
    made = vector._cost((2, 1), (3, 2))
    assert made(n, "forward", 2) == Cost(80, 40, 20)
    assert made(n, "backward", 2) == Cost(120, 80, 40)
    plain, flags = activation._cost(5, 11), activation._cost(5, 11, flags=True)
    assert plain(n, "both", 2) == Cost(40 + 80, 40 + 40, 320)
    assert flags(n, "forward", 2) == plain(n, "forward", 2) == Cost(40, 40, 100)
    # Twenty flags fill three bytes.
    assert flags(n, "backward", 2) == Cost(40 + 3, 40, 220)
    assert flags(n, "both", 2) == Cost(40 + 43, 40 + 3 + 40, 320)

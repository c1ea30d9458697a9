"""Repeat the parameter grids of other libraries' tests, written anew for our functions.

Widths, options and dtypes are those of the suites that each test names. More rows, batches and
heads are left out, because they only repeat and the interpreter runs one program at a time.
Combinations of options at wide rows are left out for the same reason. A call that we do not offer
is declined and counted. The reference is PyTorch in float64, not the other library.
"""

import itertools
import random as chance

import pytest
import torch
import torch.nn.functional as F
from conformance import Declined, representable

from harness.machine import nvml
from kernels import (
    attention,
    cross_entropy,
    gated,
    layer_norm,
    linear_cross_entropy,
    matmul,
    rms_norm,
    rotary,
    softmax,
)
from kernels import random as random_numbers

DEVICE = "cuda" if nvml.gpus() else "cpu"
FULL, HALF = torch.float32, torch.float16
# The interpreter computes bfloat16 wrongly; float16 takes its place in the grids.
DTYPES = (FULL, HALF)
ROWS = 3


@pytest.fixture
def draw():
    """Draws a tensor of normal numbers: draw(shape, dtype, grad=False)."""
    generator = torch.Generator().manual_seed(29)

    def drawn(shape, dtype=FULL, grad=False, scale=1.0, shift=0.0):
        x = torch.randn(shape, generator=generator) * scale + shift
        return x.to(DEVICE, dtype).requires_grad_(grad)

    return drawn


def targets(classes, rows, ignored=None):
    generator = torch.Generator().manual_seed(31)
    found = torch.randint(0, classes, (rows,), generator=generator)
    if ignored is not None:
        found[torch.rand(rows, generator=generator) < 0.3] = ignored
    return found.to(DEVICE)


def rms_reference(x, weight, eps, offset=0.0):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * (weight + offset)


# linkedin/Liger-Kernel, test/transformers/test_rms_norm.py: widths; llama, gemma (offset) casts.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_liger_rms_norm(dtype, offset, tally, draw):
    for width in (512, 1024, 2048, 4096, 213, 123, 234, 345, 41):
        x, weight = draw((2, ROWS, width), dtype, True), draw((width,), dtype, True)
        tally.call(
            f"{width} {offset}",
            lambda x, w: rms_norm.rms_norm(x, w, eps=1e-6, add_unit_offset=offset == 1),
            lambda x, w: rms_reference(x, w, 1e-6, offset),
            [x, weight],
        )


# facebookresearch/xformers, tests/test_rmsnorm.py: K, with and without weight, and added in place.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_xformers_rms_norm(dtype, tally, draw):
    for width, weighted, summed in itertools.product((273, 4100), (True, False), (True, False)):
        x, y = draw((ROWS, width), dtype), draw((ROWS, width), dtype)
        weight = draw((width,), dtype) if weighted else None

        def ours(x, y, w, summed=summed):
            return rms_norm.rms_norm(x, w, eps=1e-6, residual=y if summed else None)

        def theirs(x, y, w, summed=summed):
            total = x + y if summed else x
            return (rms_reference(total, w, 1e-6), total) if summed else rms_reference(x, w, 1e-6)

        tally.call(f"{width} {weighted} {summed}", ours, theirs, [x, y, weight])


# Dao-AILab/flash-attention, tests/ops/triton/test_layer_norm.py.
@pytest.mark.parametrize("width", [192, 2048, 2560, 3000, 8192])
@pytest.mark.parametrize("rms", [False, True])
def test_flash_attention_norms(width, rms, tally, draw):
    pairs = ((HALF, HALF), (HALF, FULL), (FULL, FULL))
    for (dtype, total_dtype), weight_dtype, summed, prenorm in itertools.product(
        pairs, DTYPES, (True, False), (True, False)
    ):
        x = draw((ROWS, width), dtype, True)
        residual = draw((ROWS, width), total_dtype, True) if summed else None
        weight = draw((width,), weight_dtype, True)
        bias = None if rms else draw((width,), weight_dtype, True)

        def ours(x, residual, w, b, summed=summed, prenorm=prenorm):
            if prenorm and not summed:
                raise Declined("norms: the sum without a residual")
            if rms:
                found = rms_norm.rms_norm(x, w, eps=1e-6, residual=residual)
            else:
                found = layer_norm.layer_norm(x, w, b, eps=1e-6, residual=residual)
            return found[0] if summed and not prenorm else found

        def theirs(x, residual, w, b, summed=summed, prenorm=prenorm):
            # The sum is rounded once to the dtype of the residual, and normalized as it is then.
            total = x + residual if summed else x
            w, b = w.to(total.dtype), None if b is None else b.to(total.dtype)
            y = rms_reference(total, w, 1e-6) if rms else F.layer_norm(total, w.shape, w, b, 1e-6)
            y = y.to(x.dtype)
            return (y, total) if prenorm else y

        label = f"{width} {rms} {dtype} {total_dtype} {weight_dtype} {summed} {prenorm}"
        tally.call(label, ours, theirs, [x, residual, weight, bias])


# ELS-RD/kernl, test/test_layer_norm.py: values far off zero.
@pytest.mark.parametrize("width", [128, 256, 512])
def test_kernl_layer_norm(width, tally, draw):
    for dtype in DTYPES:
        x = draw((ROWS, width), dtype, True, scale=0.5, shift=-20)
        weight, bias = draw((width,), dtype, True), draw((width,), dtype, True)
        tally.call(
            f"{width} {dtype}",
            lambda x, w, b: layer_norm.layer_norm(x, w, b, eps=1e-5),
            lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
            [x, weight, bias],
        )


def loss_reference(logits, target, z, smoothing, reduction, ignored):
    found = F.cross_entropy(
        logits, target, ignore_index=ignored, label_smoothing=smoothing, reduction=reduction
    )
    squares = torch.where(target == ignored, 0.0, z * logits.logsumexp(-1).square())
    if reduction == "none":
        return found + squares.to(found.dtype)
    total = squares.sum()
    return found + (total / (target != ignored).sum() if reduction == "mean" else total)


# linkedin/Liger-Kernel, test/transformers/test_cross_entropy.py.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_liger_cross_entropy(dtype, tally, draw):
    grid = itertools.product(
        ((4, 8), (5, 41), (1, 32000)),
        ("sum", "mean", "none"),
        (-100, 2),
        (0.0, 0.1),
        (0.0, 1e-4),
        (None, 30.0),
    )
    for (rows, classes), reduction, ignored, smoothing, z, softcap in grid:
        if classes > 1000 and (ignored != 2 or reduction == "sum"):
            continue

        def ours(x, t, r=reduction, i=ignored, s=smoothing, z=z, softcap=softcap):
            options = {"ignore_index": i, "label_smoothing": s, "softcap": softcap, "reduction": r}
            loss, apart = cross_entropy.cross_entropy(x, t, z_loss=z, return_z_loss=True, **options)
            # It has no gradient, which a comparison asks for.
            return loss, apart + 0 * loss

        def theirs(x, t, r=reduction, i=ignored, s=smoothing, z=z, softcap=softcap):
            x = x if softcap is None else softcap * torch.tanh(x / softcap)
            loss = loss_reference(x, t, z, s, r, i)
            apart = loss_reference(x.detach(), t, z, 0.0, r, i)
            return loss, apart - loss_reference(x.detach(), t, 0.0, 0.0, r, i) + 0 * loss

        label = f"{rows} {classes} {reduction} {ignored} {smoothing} {z} {softcap}"
        logits = draw((rows, classes), dtype, True)
        tally.call(label, ours, theirs, [logits, targets(classes, rows, ignored)])


# Dao-AILab/flash-attention, tests/losses/test_cross_entropy.py.
@pytest.mark.parametrize("classes", [50257, 128 * 1024])
def test_flash_attention_cross_entropy(classes, tally, draw):
    grid = itertools.product(DTYPES, (False, True), (0.0, 1e-2), (1.0, 0.7), (0.0, 0.9))
    for dtype, in_place, z, factor, smoothing in grid:
        if (z > 0) != (smoothing > 0):
            continue

        def ours(x, t, z=z, factor=factor, smoothing=smoothing, in_place=in_place):
            if in_place:
                raise Declined("cross_entropy: a gradient in place of the logits")
            if factor != 1:
                raise Declined("cross_entropy: a factor of the logits")
            return cross_entropy.cross_entropy(x, t, label_smoothing=smoothing, z_loss=z)

        def theirs(x, t, z=z, smoothing=smoothing):
            return loss_reference(x, t, z, smoothing, "mean", -100)

        logits = draw((2, classes), dtype, True)
        label = f"{classes} {dtype} {z} {factor} {smoothing}"
        tally.call(label, ours, theirs, [logits, targets(classes, 2)])


# linkedin/Liger-Kernel, test/transformers/test_fused_linear_cross_entropy.py, with its positive
# weights, whose logits all lie close together.
@pytest.mark.parametrize("biased", [True, False])
def test_liger_linear_cross_entropy(biased, tally, draw):
    grid = itertools.product(((8, 64, 96), (5, 128, 200)), DTYPES, ("mean", "sum"), (0.0, 0.1))
    for (rows, width, classes), dtype, reduction, smoothing in grid:
        weight = draw((classes, width), dtype).abs().requires_grad_()
        bias = draw((classes,), dtype, True) if biased else None

        def ours(x, w, b, t, reduction=reduction, smoothing=smoothing):
            return linear_cross_entropy.linear_cross_entropy(
                x, w, t, bias=b, reduction=reduction, label_smoothing=smoothing
            )

        def theirs(x, w, b, t, reduction=reduction, smoothing=smoothing):
            logits = F.linear(x, w, b)
            return F.cross_entropy(logits, t, reduction=reduction, label_smoothing=smoothing)

        x = draw((rows, width), dtype, True, scale=0.1)
        label = f"{rows} {width} {classes} {dtype} {reduction} {smoothing}"
        tally.call(label, ours, theirs, [x, weight, bias, targets(classes, rows, -100)])


def turned(x, cos, sin, interleaved):
    """The rotation of [B, H, S, D] in plain PyTorch; cos and sin are [S, R] or [B, 1, S, R]."""
    r = cos.shape[-1]
    pairs, rest = x[..., : 2 * r], x[..., 2 * r :]
    if interleaved:
        a, b = pairs[..., ::2], pairs[..., 1::2]
    else:
        a, b = pairs[..., :r], pairs[..., r:]
    halves = a * cos - b * sin, a * sin + b * cos
    joined = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    return torch.cat([joined, rest], -1)


def rotation(tally, draw, sizes, dtype, fraction, interleaved, rows="", inplace=False):
    """Compare one call. rows: "" for a table [S, R], "each" for one of each sequence, "offset" for
    a table in which each sequence begins elsewhere."""
    batch, length, heads, shared, width = sizes
    r = int(fraction * width) // 2
    angle = draw((batch, length, r) if rows == "each" else (length + 9 * (rows == "offset"), r))
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    q = draw((batch, heads, length, width), dtype, True)
    k = draw((batch, shared, length, width), dtype, True)
    places = torch.arange(length) + 5 * torch.arange(batch)[:, None] % 9
    places = places if rows == "offset" else None

    def ours(q, k, cos, sin):
        both = (x.transpose(1, 2) for x in ((q.clone(), k.clone()) if inplace else (q, k)))
        found = rotary.rotary(*both, cos, sin, places, interleaved=interleaved, inplace=inplace)
        return tuple(x.transpose(1, 2) for x in found)

    def theirs(q, k, cos, sin):
        if rows == "offset":
            cos, sin = cos[places], sin[places]
        if rows:
            cos, sin = cos[:, None], sin[:, None]
        return turned(q, cos, sin, interleaved), turned(k, cos, sin, interleaved)

    name = f"{sizes} {dtype} {fraction} {interleaved} {rows} {inplace}"
    tally.call(name, ours, theirs, [q, k, cos, sin])


# linkedin/Liger-Kernel, test/transformers/test_rope.py.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_liger_rope(dtype, tally, draw):
    for sizes in ((1, 3, 32, 32, 64), (2, 3, 32, 8, 64), (1, 2, 73, 155, 92), (1, 2, 1, 2, 8)):
        for rows in ("", "each"):
            rotation(tally, draw, sizes, dtype, 1.0, False, rows)


# Dao-AILab/flash-attention, tests/kernels/test_rotary.py.
@pytest.mark.parametrize("interleaved", [False, True])
def test_flash_attention_rotary(interleaved, tally, draw):
    # An offset that all sequences share is a slice of the tables, which is a table.
    for fraction, inplace, rows in itertools.product((1.0, 0.5), (False, True), ("", "", "offset")):
        rotation(tally, draw, (1, 17, 2, 2, 128), HALF, fraction, interleaved, rows, inplace)


# linkedin/Liger-Kernel, test/transformers/test_swiglu.py and test_geglu.py.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_liger_gated(dtype, tally, draw):
    for shape in ((2, 25, 48), (6, 42, 11), (1, 3, 431)):
        pair = [draw(shape, dtype, True), draw(shape, dtype, True)]
        tally.call(f"swiglu {shape}", gated.swiglu, lambda a, b: F.silu(a) * b, pair)
        for form in ("tanh", "none"):
            tally.call(
                f"geglu {shape} {form}",
                lambda a, b, form=form: gated.geglu(a, b, approximate=form),
                lambda a, b, form=form: F.gelu(a, approximate=form) * b,
                pair,
            )


# linkedin/Liger-Kernel, test/transformers/test_softmax.py, and Triton's tutorial 02.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_of_liger_and_the_tutorial(dtype, tally, draw):
    for shape in ((2, 8), (1, 4, 16), (1, 1023), (3, 2, 256), (1, 4096), (7, 781), (2, 40000)):
        x = draw(shape, dtype, True)
        tally.call(f"{shape}", lambda x: softmax.softmax(x), lambda x: F.softmax(x, -1), [x])


def product(tally, label, a, b, bias=None, activation="none"):
    after = {"none": lambda y: y, "relu": F.relu, "gelu": F.gelu, "leaky_relu": F.leaky_relu}

    def ours(a, b, bias):
        if activation not in after:
            raise Declined(f"matmul: {activation}")
        return matmul.matmul(a, b, bias=bias, activation=activation)

    def theirs(a, b, bias):
        y = a @ b
        return after[activation](y if bias is None else y + bias)

    tally.call(label, ours, theirs, [a, b, bias])


# ELS-RD/kernl, test/test_linear_layer.py: batches, activations, x in both layouts.
@pytest.mark.parametrize("activation", ["none", "tanh", "gelu", "relu"])
def test_kernl_linear_layer(activation, tally, draw):
    tally.none = "no epilogue is tanh" if activation == "tanh" else ""
    for (batch, m, n, k), dtype, turned_x in itertools.product(
        ((1, 8, 8, 8), (1, 16, 96, 64), (3, 128, 64, 96)), DTYPES, (False, True)
    ):
        x = draw((batch * m, k), dtype)
        x = x.mT.contiguous().mT if turned_x else x
        weight, bias = draw((n, k), dtype), draw((n,), dtype)
        product(tally, f"{batch} {m} {n} {k} {dtype}", x, weight.mT, bias, activation)


# facebookresearch/xformers, tests/test_tiled_matmul.py: one tile of a drawn size, other layouts.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_xformers_matmul(dtype, tally, draw):
    drawn = chance.Random(0)
    for number in range(8):
        m, n, k = (drawn.randint(2, 160) for _ in range(3))
        a, b = draw((m, k), dtype), draw((k, n), dtype)
        a = a.t().clone().t() if number % 2 else a
        product(tally, f"{m} {n} {k}", a, b)


# ELS-RD/kernl, test/test_attention.py; Triton's tutorial 06. Without a scale of their own.
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_kernl_and_the_tutorial(causal, tally, draw):
    grid = itertools.product(((1, 2, 16), (2, 1, 64), (1, 2, 128), (1, 1, 200)), (64, 128), DTYPES)
    for (batch, heads, length), width, dtype in grid:
        q, k, v = (draw((batch, heads, length, width), dtype) for _ in range(3))
        # As the suite's test of mixed strides: q by columns, batch and heads of k exchanged.
        q = q.mT.contiguous().mT
        k = k.transpose(0, 1).contiguous().transpose(0, 1)
        for scale in (None, 0.3):

            def ours(q, k, v, scale=scale):
                if scale is not None:
                    raise Declined("attention: scale")
                return attention.attention(q, k, v, causal=causal)

            def theirs(q, k, v, scale=scale):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)

            tally.call(f"{batch} {heads} {length} {width} {dtype}", ours, theirs, [q, k, v])


# Triton's tutorial 04: one in two entries, and others.
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_dropout_of_the_tutorial(p, tally, draw):
    x = draw((10, 512), FULL, True)
    p = representable(p)
    kept = random_numbers.dropout(x, p, 123) != 0
    tally.call(
        f"{p}",
        lambda x: random_numbers.dropout(x, p, 123),
        lambda x: torch.where(kept, x / (1 - p), torch.zeros_like(x)),
        [x],
    )
    share = kept.double().mean().item()
    # Five standard deviations of a binomial share.
    assert abs(share - (1 - p)) <= 5 * (p * (1 - p) / x.numel()) ** 0.5
    other = random_numbers.dropout(x, p, 124) != 0
    assert p == 0 or not torch.equal(kept, other)

"""The forms of the product with all that its epilogue may have, on any device."""

import itertools

import torch

from kernels import matmul
from tests.support.values import randn

RESULTS = [(result, kept) for result in ("same", "float32", "added") for kept in (False, True)]
FORMS = [
    (result, kept, *rest)
    for (result, kept), *rest in itertools.product(RESULTS, *[(False, True)] * 3)
    if not (kept and result == "added")
]


# Forms of factors of 8 bits, which have factors of rows and of columns.
FLOAT8_FORMS = [FORMS[index] for index in (0, 3, 6, 9, 15, 32)]
FLOAT8 = torch.float8_e4m3fn


# How many numbers a_scale and b_scale have: one for each line, for each batch, or in all.
SCALES = [
    ("lines", "lines"), ("one", "one"), ("one", "lines"), ("lines", "one"), ("batches", "batches")
]  # fmt: skip


def called(
    result, kept, residual, gated, batched, sizes, turned, dtype=torch.bfloat16, scales=SCALES[0],
    scale=0.5,
):  # fmt: skip
    """Return what `matmul` gives for a form, and what float64 gives.

    - sizes: M, N and K; N and K are multiples of 16 bytes.
    - turned: whether a and b are stored by columns.
    - dtype: of a and b; of all else too, unless it is float8.
    - scales: a pair of SCALES, for float8.
    - scale: the factor of the products; at 1 the kernel has none.
    """
    over_a, over_b = ((2, 1), (3,)) if batched else ((), ())
    m, n, k = sizes
    # The rows of memory begin at multiples of 16 bytes, whatever M is.
    padded = (k, -(-m // 8) * 8) if turned[0] else (m, k)
    a = randn(*over_a, *padded, dtype=dtype)
    a = a[..., :m].mT if turned[0] else a
    shape = (*over_b, n, k) if turned[1] else (*over_b, k, n)
    b, up = (randn(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    b, up = (b.mT, up.mT) if turned[1] else (b, up)
    products, factor = (scale * (a.double() @ each.double()) for each in (b, up))
    options, wide = {}, dtype
    if dtype == FLOAT8:
        wide = torch.bfloat16 if result == "same" else torch.float32
        of_a = {"lines": (*over_a, m, 1), "batches": (*over_a, 1, 1), "one": (1,)}
        of_b = {"lines": (1, n), "batches": (*over_b, 1, 1), "one": (1, 1)}
        rows, columns = (
            randn(*shapes[kind], seed=seed).abs()
            for shapes, kind, seed in zip((of_a, of_b), scales, (7, 8), strict=True)
        )
        options |= {"a_scale": rows, "b_scale": columns}
        products, factor = (each * rows.double() * columns for each in (products, factor))
    bias, up_bias = randn(n, dtype=wide, seed=3), randn(n, dtype=wide, seed=4)
    # Factors of columns come another way if there is no bias.
    given = bias if dtype != FLOAT8 or kept else None
    expected = products if given is None else products + bias
    factor = factor + up_bias if given is not None else factor
    added = randn(*expected.shape, dtype=wide, seed=5)
    buffer = randn(*expected.shape, seed=6)
    out = torch.nn.functional.gelu(expected) * (factor if gated else 1) + (added if residual else 0)
    options |= {"residual": added} if residual else {}
    if gated:
        options |= {"up": up, "up_bias": up_bias if given is not None else None}
    if result == "float32":
        options["out_dtype"] = torch.float32
    if result == "added":
        options["accumulate_into"], out = buffer.clone(), buffer + out
    found = matmul.matmul(a, b, given, "gelu", scale=scale, save_preactivation=kept, **options)
    truths = [out, expected, factor][: 1 + kept * (1 + gated)]
    return (found if kept else (found,)), truths


def compare(found, truths, bound=1e-3):
    """AssertionError if a result is further off than its dtype, or a product in float32, allows."""
    for one, truth in zip(found, truths, strict=True):
        most = 6e-3 if one.dtype == torch.bfloat16 else bound
        assert (one.double() - truth).abs().max() <= most * truth.abs().max()

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


def called(result, kept, residual, gated, batched, sizes, turned, dtype=torch.bfloat16):
    """Return what `matmul` gives for a form, and what float64 gives.

    sizes: M, N and K; N a multiple of 8. turned: whether a and b are stored by columns.
    """
    over_a, over_b = ((2, 1), (3,)) if batched else ((), ())
    m, n, k = sizes
    # The rows of memory begin at multiples of 16 bytes, whatever M is.
    a = (
        randn(*over_a, k, -(-m // 8) * 8, dtype=dtype)[..., :m].mT
        if turned[0]
        else randn(*over_a, m, k, dtype=dtype)
    )
    shape = (*over_b, n, k) if turned[1] else (*over_b, k, n)
    b, up = (randn(*shape, dtype=dtype, seed=seed) for seed in (1, 2))
    b, up = (b.mT, up.mT) if turned[1] else (b, up)
    bias, up_bias = randn(n, dtype=dtype, seed=3), randn(n, dtype=dtype, seed=4)
    expected = 0.5 * (a.double() @ b.double()) + bias
    factor = 0.5 * (a.double() @ up.double()) + up_bias
    added = randn(*expected.shape, dtype=dtype, seed=5)
    buffer = randn(*expected.shape, seed=6)
    out = torch.nn.functional.gelu(expected) * (factor if gated else 1) + (added if residual else 0)
    options = {"residual": added} if residual else {}
    if gated:
        options |= {"up": up, "up_bias": up_bias}
    if result == "float32":
        options["out_dtype"] = torch.float32
    if result == "added":
        options["accumulate_into"], out = buffer.clone(), buffer + out
    found = matmul.matmul(a, b, bias, "gelu", scale=0.5, save_preactivation=kept, **options)
    truths = [out, expected, factor][: 1 + kept * (1 + gated)]
    return (found if kept else (found,)), truths


def compare(found, truths):
    for one, truth in zip(found, truths, strict=True):
        bound = 6e-3 if one.dtype == torch.bfloat16 else 1e-3
        assert (one.double() - truth).abs().max() <= bound * truth.abs().max()

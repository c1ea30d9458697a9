"""References that work in blocks: their results are those of one block."""

import pytest
import torch

from harness.calls import inputs
from harness.calls.invoke import run
from ops import _attention
from ops.attention import ATTENTION
from ops.attention_varlen import ATTENTION_VARLEN
from ops.block_sparse_attention import BLOCK_SPARSE_ATTENTION

# Cases that are not made to be ill-conditioned, in which any order of a sum may be chosen.
OPS = ATTENTION, ATTENTION_VARLEN, BLOCK_SPARSE_ATTENTION
CASES = [(op, case) for op in OPS for case in op.edge if not case.values]


def _results(op, case):
    given = inputs.make(op, case, "float32", 5, "cpu")
    wide = {
        name: t.double() if t is not None and t.is_floating_point() else t
        for name, t in given.items()
    }
    out = run(op, op.reference, case, wide)
    generator = torch.Generator().manual_seed(5)
    seeds = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in out.values()]
    return out | run(op, op.reference, case, wide, seeds)


@pytest.mark.parametrize(
    ("op", "case"), CASES, ids=lambda one: one.name if hasattr(one, "name") else str(one)
)
def test_attention_in_blocks_of_rows_and_heads(op, case, monkeypatch):
    """In blocks of several rows of a long sequence, and of several heads of a short one."""
    whole = _results(op, case)
    monkeypatch.setattr(_attention, "SCORES", 5000)
    assert whole.keys() == {"out", "dq", "dk", "dv"}
    torch.testing.assert_close(_results(op, case), whole, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("s", "t"), [(5, 9), (9, 5), (6, 6)])
@pytest.mark.parametrize("window", [None, 0, 2])
def test_attention_agrees_with_its_formula(s, t, window, monkeypatch):
    """Row by row: the keys up to that of the row, or those of its window; none is zero."""
    monkeypatch.setattr(_attention, "SCORES", 2 * t)
    generator = torch.Generator().manual_seed(7)
    sizes = (4, s, 8), (2, t, 8), (2, t, 8)
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    found = _attention.attend(q, k, v, None, True, window, 3.0)
    for n in range(4):
        for row in range(s):
            last = row + t - s
            first = 0 if window is None else max(0, last - window)
            keys = range(first, last + 1)
            expected = torch.zeros(8, dtype=torch.float64)
            if keys:
                scores = [3 * torch.tanh(q[n, row] @ k[n // 2, j] / 8**0.5 / 3) for j in keys]
                weights = torch.stack(scores).softmax(0)
                expected = sum(w * v[n // 2, j] for w, j in zip(weights, keys, strict=True))
            torch.testing.assert_close(found[n, row], expected)


def test_shapes_alone_need_no_blocks(monkeypatch):
    monkeypatch.setattr(_attention, "_rows", None)
    case = ATTENTION.sweep[0]
    given = inputs.make(ATTENTION, case, "bfloat16", 5, "meta")
    (out,) = run(ATTENTION, ATTENTION.reference, case, given).values()
    assert out.is_meta and out.shape == (32, 32, 512, 64)

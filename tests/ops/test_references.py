"""References that work in blocks: their results are those of one block."""

import pytest
import torch

from harness.calls import inputs
from harness.calls.invoke import run
from ops import attention
from ops.attention import ATTENTION

# Cases that are not made to be ill-conditioned, in which any order of a sum may be chosen.
CASES = [case for case in ATTENTION.edge if not case.values]


def _results(case):
    given = inputs.make(ATTENTION, case, "float32", 5, "cpu")
    wide = {name: None if t is None else t.double() for name, t in given.items()}
    out = run(ATTENTION, ATTENTION.reference, case, wide)
    generator = torch.Generator().manual_seed(5)
    seeds = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in out.values()]
    return out | run(ATTENTION, ATTENTION.reference, case, wide, seeds)


@pytest.mark.parametrize("scores", [700, 2**13])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_in_blocks_of_rows_and_heads(case, scores, monkeypatch):
    whole = _results(case)
    monkeypatch.setattr(attention, "SCORES", scores)
    assert whole.keys() == {"out", "dq", "dk", "dv"}
    torch.testing.assert_close(_results(case), whole, rtol=1e-9, atol=1e-12)


def test_shapes_alone_need_no_blocks(monkeypatch):
    monkeypatch.setattr(attention, "_rows", None)
    case = ATTENTION.sweep[0]
    (out,) = run(
        ATTENTION, ATTENTION.reference, case, inputs.make(ATTENTION, case, "bfloat16", 5, "meta")
    ).values()
    assert out.is_meta and out.shape == (32, 32, 512, 64)

"""Operations that stand for launchers in traced graphs: they promise the results that they give."""

import itertools

import pytest
import torch

from kernels import attention_varlen, linear_cross_entropy
from kernels._runtime import traced

CHECKS = ("test_schema", "test_faketensor")


def check(operation, launcher, arguments):
    """Check what an operation promises, and its results against those of the launcher."""
    torch.library.opcheck(operation, arguments, test_utils=CHECKS)
    found, expected = operation(*arguments), traced.present(launcher(*arguments))
    assert len(found) == len(expected) > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_results_that_are_not_wanted_are_none_again():
    one, two = torch.ones(1), torch.ones(2)
    assert traced.present((one, None, two)) == [one, two]
    assert traced.spread([one, two], (True, False, True, False)) == (one, None, two, None)


LOSSES = list(
    itertools.product(
        ("mean", "sum", "none"), (torch.float16, torch.float32), (False, True), (False, True)
    )
)


@pytest.mark.parametrize(("reduction", "dtype", "penalty", "wide"), LOSSES)
def test_the_fused_loss(reduction, dtype, penalty, wide):
    m, h, v = 5, 8, 24
    x, weight = torch.randn(m, h).half(), torch.randn(v, h).half()
    bias, targets = torch.randn(v).half(), torch.arange(m)
    options = -100, 0.1, 1e-3, 0.0
    for wanted in ([False] * 3, [True, True, True], [True, False, False]):
        if reduction == "none" and any(wanted):
            continue
        given = x, weight, bias, targets, *options, reduction, dtype, penalty, wanted, wide
        check(
            linear_cross_entropy._traced_forward,
            linear_cross_entropy.linear_cross_entropy_fwd,
            given,
        )
        assert [each is None for each in linear_cross_entropy._forward(*given)][1:4] == [
            not each for each in wanted
        ]


@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, False]])
@pytest.mark.parametrize("wide", [False, True])
def test_the_gradients_of_the_losses_of_rows(wanted, wide):
    m, h, v = 5, 8, 24
    x, weight, dlosses = torch.randn(m, h), torch.randn(v, h), torch.randn(m)
    given = dlosses, x, weight, None, torch.arange(m), -100, 0.0, 0.0, 0.0, wanted, wide
    check(
        linear_cross_entropy._traced_backward,
        linear_cross_entropy.linear_cross_entropy_bwd,
        given,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("same", [False, True])
def test_packed_attention(dtype, turned, same):
    total, d = 20, 16
    q, k, v = (
        (torch.randn(h, total, d).transpose(0, 1) if turned else torch.randn(total, h, d)).to(dtype)
        for h in (4, 2, 2)
    )
    cu = torch.tensor([0, 7, 20], dtype=torch.int32)
    both = cu, None if same else cu.clone()
    options = d**-0.5, 0.0, None, 0, 32, 32
    forward, backward = attention_varlen._traced_forward, attention_varlen._traced_backward
    for return_lse, keep_stats in itertools.product((False, True), repeat=2):
        given = q, k, v, *both, *options, return_lse, keep_stats
        check(forward, attention_varlen.varlen_fwd, given)
        there = [each is not None for each in attention_varlen._forward(*given)]
        assert there == [True, return_lse, keep_stats]
    out, lse, stats = attention_varlen.varlen_fwd(q, k, v, *both, *options, True, True)
    dout = torch.randn_like(out)
    for dlse, keys in itertools.product((None, torch.randn_like(lse)), (False, True)):
        given = q, k, v, out, stats, dout, dlse, *both, *options, keys, False
        check(backward, attention_varlen.varlen_bwd, given)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
def test_a_graph_for_one_tensor_of_packed_boundaries_is_not_used_for_two(order, needs_grad):
    def call(q, k, v, cu_q, cu_k):
        return attention_varlen.attention_varlen(q, k, v, cu_q, cu_k, causal=True)

    def results(function, cu_k):
        leaves = [each.clone().requires_grad_(needs_grad) for each in drawn]
        out = function(*leaves, cu, cu_k)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out)) if needs_grad else ()
        return out, *grads

    drawn = [torch.randn(20, 2, 16).half() for _ in range(3)]
    cu, other = (torch.tensor([0, n, 20], dtype=torch.int32) for n in (7, 12))
    torch.compiler.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for same in order:
        expected, found = (results(each, cu if same else other) for each in (call, compiled))
        assert all(map(torch.equal, found, expected))

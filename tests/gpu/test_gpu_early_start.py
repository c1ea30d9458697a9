"""Kernels that start before the one ahead of them has ended read what that one writes."""

import pytest
import torch

from kernels.linear import linear
from kernels.rms_norm import rms_norm

pytestmark = pytest.mark.gpu
WIDE, ROUNDS, REPEATS = 4096, 12, 50


@pytest.fixture
def weights():
    torch.manual_seed(0)
    made = torch.randn(ROUNDS, WIDE, WIDE, device="cuda", dtype=torch.bfloat16)
    return (made / WIDE**0.5).unbind()


def waited(x, weights):
    """Norms and products in turn, each after the one before has ended."""
    for weight in weights:
        x = rms_norm(x)
        torch.cuda.synchronize()
        x = linear(x, weight)
        torch.cuda.synchronize()
    return x


def chained(x, weights):
    for weight in weights:
        x = linear(rms_norm(x), weight)
    return x


@pytest.mark.parametrize("rows", [1, 16])
def test_a_chain_gives_the_bits_of_kernels_that_run_alone(weights, rows):
    x = torch.randn(rows, WIDE, device="cuda", dtype=torch.bfloat16)
    expected = waited(x, weights)
    assert expected.isfinite().all() and expected.abs().max() > 0.1
    for _ in range(REPEATS):
        assert torch.equal(chained(x, weights), expected)


@pytest.mark.parametrize("rows", [1, 16])
def test_a_replayed_chain_reads_what_was_written_before_each_replay(weights, rows):
    x = torch.empty(rows, WIDE, device="cuda", dtype=torch.bfloat16)
    given = torch.randn(REPEATS, rows, WIDE, device="cuda", dtype=torch.bfloat16)
    expected = [waited(each, weights) for each in given]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chained(x, weights)
    found = []
    for each in given:
        x.copy_(each)
        graph.replay()
        found.append(result.clone())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))

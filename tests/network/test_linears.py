"""Products with one input are one product, if their weights lie one after the other."""

import pytest
import torch

from kernels.linear import linear
from network import stack
from network.cache import Cache
from network.flat import bound, size
from network.stacks._linears import one_matrix, with_product
from tests.support.networks import apart, plain, tokens


def weights(*rows, columns=16, dtype=torch.float32):
    """Views of one tensor, one after the other."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(sum(rows) + 1, columns, generator=generator).to(dtype)
    return list(whole[1:].split(rows))


def test_neighbours_are_one_matrix_without_a_copy():
    parts = weights(8, 4, 12)
    whole = one_matrix(parts)
    assert torch.equal(whole, torch.cat(parts))
    assert whole.data_ptr() == parts[0].data_ptr()


APART = {
    "a gap": lambda p: [p[0], p[2]],
    "another order": lambda p: [p[1], p[0]],
    "memory of its own": lambda p: [p[0], weights(8, 4, 12)[1]],
    "one by columns": lambda p: [p[0].view(16, 8).T, p[1]],
    "fewer columns": lambda p: [p[0], p[1].view(8, 8)],
    "another dtype": lambda p: [p[0], p[1].view(torch.int32)],
}


@pytest.mark.parametrize("case", APART)
def test_others_are_not(case):
    assert one_matrix(APART[case](weights(8, 4, 12))) is None


@pytest.mark.parametrize("given", ["neighbours", "apart", "biases"])
def test_results_are_those_of_each_product(given):
    parts = weights(8, 4, 12)
    parts = [w.clone() for w in parts] if given == "apart" else parts
    biases = [torch.ones(len(w)) if given == "biases" else None for w in parts]
    h = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(2))
    found = with_product(linear)(h, parts, biases)
    for one, weight, bias in zip(found, parts, biases, strict=True):
        exact = h.double() @ weight.double().T + (bias is not None)
        assert one.shape == exact.shape and apart(one, exact) < 1e-5


def test_a_network_in_one_tensor_multiplies_once_for_queries_keys_and_values():
    config, (ids, _) = plain("tiny"), tokens()
    flat = 0.1 * torch.randn(size(config), generator=torch.Generator().manual_seed(3))
    called = []

    def counted(h, weight, bias=None):
        called.append(tuple(weight.shape))
        return torch.nn.functional.linear(h, weight, bias)

    eager = stack.load(stack.EAGER).parts
    joined = eager.with_parts(linears=with_product(counted))
    models = [bound(config, parts, flat) for parts in (joined, eager)]
    with torch.no_grad():
        found, expected = (model(ids, cache=Cache(config, 2, 12)) for model in models)
    assert called == [(sum(config.qkv_sizes), config.width)] * config.layers
    assert apart(found, expected) < 1e-5


def test_a_compiler_is_not_asked_where_weights_lie():
    parts, h = weights(8, 4, 12), torch.ones(2, 16)
    joined = with_product(torch.nn.functional.linear)
    traced = torch.compile(joined, backend="eager", fullgraph=True)
    for one, other in zip(traced(h, parts, [None] * 3), joined(h, parts, [None] * 3), strict=True):
        assert apart(one, other) < 1e-6


def test_a_gradient_is_not_lost():
    config, (ids, targets) = plain("tiny"), tokens()
    parts = stack.load(stack.EAGER).parts.with_parts(linears=with_product(linear))
    model = bound(config, parts, 0.1 * torch.randn(size(config)))
    model(ids, targets).backward()
    assert all(weight.grad is not None for weight in model.parameters())

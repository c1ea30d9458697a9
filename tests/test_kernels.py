"""What the kernels promise beyond agreeing with their references: laws, refusals, odd shapes."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import load, nvml, sources
from kernels import _checks as checks
from kernels import attention, layer_norm, matmul, softmax, vector

DEVICE = "cuda" if nvml.gpus() else "cpu"
OPS = sorted(
    value.name
    for module in (attention, layer_norm, matmul, softmax, vector)
    for value in vars(module).values()
    if isinstance(value, load.Op)
)
few = settings(max_examples=12, deadline=None, derandomize=True)
rows = st.integers(1, 6)
columns = st.integers(1, 700)
dtypes = st.sampled_from([torch.float32, torch.float16])


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def close(actual, expected, dtype):
    bound = {torch.float32: 2e-6, torch.float16: 2e-3}[dtype]
    scale = max(expected.abs().max().item(), 1e-30)
    assert (actual.double() - expected.double()).abs().max().item() <= bound * scale


@few
@given(rows, columns, dtypes)
def test_softmax_rows_sum_to_one_and_ignore_a_shift(m, n, dtype):
    x = randn(m, n, dtype=dtype)
    y = softmax.softmax(x)
    close(y.double().sum(-1), torch.ones(m, device=DEVICE), dtype)
    # A shift by a power of two changes no difference between entries of this size; exponents are
    # differences of products, which the interpreter rounds.
    whole = torch.round(x * 8)
    apart = softmax.softmax(whole) - softmax.softmax(whole + 64)
    assert apart.abs().max().item() <= {torch.float32: 2e-5, torch.float16: 2e-3}[dtype]


@few
@given(rows, st.integers(2, 700), dtypes)
def test_layer_norm_rows_are_standard(m, n, dtype):
    x = randn(m, n, dtype=dtype) * 3 + 1
    one, zero = (
        torch.ones(n, device=DEVICE, dtype=dtype),
        torch.zeros(n, device=DEVICE, dtype=dtype),
    )
    y = layer_norm.layer_norm(x, one, zero, 0.0).double()
    assert y.mean(-1).abs().max().item() < 2e-3
    assert (y.var(-1, unbiased=False) - 1).abs().max().item() < 5e-3


@few
@given(st.integers(1, 90), st.integers(1, 90), st.booleans(), dtypes)
def test_matmul_by_the_identity_changes_nothing(m, k, transposed, dtype):
    a = randn(m, k, dtype=dtype)
    eye = torch.eye(k, dtype=dtype, device=DEVICE)
    close(matmul.matmul(a, eye.T if transposed else eye), a, dtype)


@few
@given(st.integers(1, 150), st.booleans())
def test_attention_rows_are_means_of_the_values(s, causal):
    q, k = randn(1, 2, s, 64, seed=1), randn(1, 2, s, 64, seed=2)
    constant = torch.full((1, 2, s, 64), 3.0, device=DEVICE)
    close(attention.attention(q, k, constant, causal=causal), constant, torch.float32)
    if causal:
        v = randn(1, 2, s, 64, seed=3)
        close(attention.attention(q, k, v, causal=True)[:, :, 0], v[:, :, 0], torch.float32)


@few
@given(st.integers(0, 9000), st.sampled_from(["add", "mul", "maximum", "minimum"]), dtypes)
def test_binary_vectors_equal_pytorch_to_the_bit(n, name, dtype):
    x, y = randn(n, dtype=dtype, seed=1), randn(n, dtype=dtype, seed=2)
    if n:
        x[n // 2] = math.nan
    expected = getattr(torch, name)(x, y)
    actual = getattr(vector, name)(x, y)
    assert torch.equal(actual.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(actual.isnan(), expected.isnan())


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (3, 4)])
def test_attention_of_more_heads_than_a_grid_holds(shape, monkeypatch):
    q, k, v = (randn(*shape, 20, 16, seed=seed) for seed in range(3))
    monkeypatch.setattr(attention, "MOST_HEADS", 2)
    expected = attention.attention_reference(q.double(), k.double(), v.double(), True)
    close(attention.attention(q, k, v, causal=True), expected, q.dtype)


def test_a_row_of_minus_infinity_is_nan_as_in_pytorch():
    for n in (100, 70000):
        x = torch.full((1, n), -math.inf, device=DEVICE)
        assert softmax.softmax(x).isnan().all()


def test_keys_that_score_minus_infinity_by_the_tile_are_as_in_pytorch():
    q = torch.full((1, 1, 100, 16), 1e20, device=DEVICE)
    k, v = torch.zeros(1, 1, 100, 16, device=DEVICE), randn(1, 1, 100, 16)
    k[..., :70, :] = -1e20
    close(
        attention.attention(q, k, v),
        torch.nn.functional.scaled_dot_product_attention(q, k, v),
        q.dtype,
    )
    k[:] = -1e20
    assert attention.attention(q, k, v).isnan().all()


def test_more_dimensions_and_broken_layouts_give_the_same():
    x = randn(3, 5, 40)
    assert torch.equal(softmax.softmax(x)[1], softmax.softmax(x[1]))
    assert torch.equal(
        softmax.softmax(x.transpose(0, 2)), softmax.softmax(x.transpose(0, 2).clone())
    )
    q = randn(2, 40, 3, 64).transpose(1, 2)
    assert torch.equal(attention.attention(q, q, q), attention.attention(*[q.contiguous()] * 3))


def test_expanded_factors_are_walked_by_pointers():
    a, b = randn(1, 64, dtype=torch.float16).expand(32, 64), randn(64, 32, dtype=torch.float16)
    assert not matmul.describable(a)
    close(matmul.matmul(a, b), a.double() @ b.double(), torch.float16)


@pytest.mark.parametrize("name", OPS)
def test_reference_is_differentiable_and_right(name):
    """The oracle's own gradients, against finite differences in float64."""
    op, _ = load.op(name)
    case = op.edge[1]
    sizes = {letter: min(size, 4) for letter, size in case.sizes.items()}
    tensors = []
    for tensor in op.inputs.values():
        shape = [sizes[letter] for letter in tensor.shape.split()]
        tensors.append(randn(*shape, seed=len(tensors)).double().requires_grad_())
    extra = op.arguments(case)
    names = list(op.inputs)

    def reference(*values):
        given = dict(zip(names, values, strict=True))
        return op.reference(**{**extra, **given})

    assert torch.autograd.gradcheck(reference, tensors)


@pytest.mark.parametrize("name", sources.ops(Path(__file__).parents[1]))
def test_every_op_declares_what_the_house_expects(name):
    op, family = load.op(name)
    assert "forward" in op.passes and op.differentiable == ("both" in op.passes)
    for case in itertools.chain(op.edge, op.sweep):
        letters = {x for tensor in op.inputs.values() for x in tensor.shape.split()}
        assert letters <= set(case.sizes), f"{family}: {case.name} lacks a size"
        assert set(case.flags) <= set(op.flags), f"{family}: {case.name} has an unknown flag"
    names = [case.name for case in (*op.edge, *op.sweep)]
    assert len(set(names)) == len(names)
    assert callable(load.function(name, load.OURS))


def test_a_matmul_too_large_for_its_indices_is_refused(monkeypatch):
    monkeypatch.setattr(matmul, "MOST_ITEMS", 40)
    for m, n, k in ((41, 2, 2), (2, 41, 2), (2, 2, 41)):
        with pytest.raises(ValueError, match="a size of 41, expected at most 40"):
            matmul.matmul(randn(m, k), randn(k, n))
    close(matmul.matmul(torch.eye(40, device=DEVICE), randn(40, 40)), randn(40, 40), torch.float32)
    largest = max(c["BLOCK_K"] for c in (*matmul.POINTER.candidates, *matmul.DESCRIPTOR.candidates))
    assert checks.MOST_ITEMS + largest < 2**31


REFUSALS = {
    "shapes that differ": lambda: vector.add(randn(3), randn(4)),
    "dtypes that differ": lambda: vector.dot(randn(3), randn(3, dtype=torch.float16)),
    "no dimension": lambda: softmax.softmax(randn(1)[0]),
    "a short weight": lambda: layer_norm.layer_norm(randn(2, 8), randn(7), randn(8), 1e-5),
    "a long bias": lambda: layer_norm.layer_norm(randn(2, 8), randn(8), randn(9), 1e-5),
    "inner sizes": lambda: matmul.matmul(randn(2, 3), randn(4, 5)),
    "three dimensions": lambda: matmul.matmul(randn(1, 2, 3), randn(3, 5)),
    "an unknown activation": lambda: matmul.matmul(randn(2, 3), randn(3, 5), None, "swish"),
    "a bias of another size": lambda: matmul.matmul(randn(2, 3), randn(3, 5), randn(4)),
    "a head dimension of 48": lambda: attention.attention(*[randn(1, 1, 4, 48)] * 3),
    "keys of another length": lambda: attention.attention(
        randn(1, 1, 4, 64), randn(1, 1, 5, 64), randn(1, 1, 5, 64)
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refuses(what):
    with pytest.raises(ValueError, match=r"expected|has no dimension|after"):
        REFUSALS[what]()

"""Check rotary embedding: any shape and layout, laws of a rotation, refusals."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import nvml
from kernels import rotary as family
from kernels.rotary import rotary
from ops.rotary import ROTARY, rotary_reference
from tests.support.examples import many

DEVICE = "cuda" if nvml.gpus() else "cpu"
BOUND = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# Triton 3.6 truncates to bfloat16 in its interpreter.
DTYPES = list(BOUND) if nvml.gpus() else [torch.float32, torch.float16]
pairings = pytest.mark.parametrize("interleaved", [False, True])


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def angles(s, r, dtype=torch.float32):
    """cos and sin: [S, R]."""
    places = torch.arange(s)[:, None] * 10000.0 ** (-torch.arange(r) / r)
    return places.cos().to(dtype).to(DEVICE), places.sin().to(dtype).to(DEVICE)


def agrees(q, k, cos, sin, interleaved):
    """Assert that both passes lie within the dtype's bound, and that inputs do not change."""
    before = [t.clone() for t in (q, k)]
    given = [t.detach().requires_grad_() for t in (q, k)]
    exact = [t.detach().double().requires_grad_() for t in (q, k)]
    outs = rotary(*given, cos, sin, interleaved=interleaved)
    truth = rotary_reference(*exact, cos.double(), sin.double(), interleaved=interleaved)
    seeds = [randn(*out.shape, dtype=out.dtype, seed=7 + i) for i, out in enumerate(outs)]
    grads = torch.autograd.grad(outs, given, seeds)
    exact_grads = torch.autograd.grad(truth, exact, [seed.double() for seed in seeds])
    for ours, theirs in zip((*outs, *grads), (*truth, *exact_grads), strict=True):
        assert ours.dtype == q.dtype and ours.shape == theirs.shape and ours.is_contiguous()
        size = max(theirs.abs().max().item(), 1e-30) if theirs.numel() else 1.0
        assert torch.all((ours.double() - theirs).abs() <= BOUND[q.dtype] * size)
    assert all(torch.equal(*each) for each in zip((q, k), before, strict=True))


@many
@given(st.data())
def test_random_shapes_and_layouts(data):
    b, s = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 3))
    h, heads = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 3))
    d = data.draw(st.integers(2, 70))
    r = data.draw(st.integers(1, d // 2))
    dtype = data.draw(st.sampled_from(DTYPES))
    if data.draw(st.booleans()):
        q, k = randn(b, s, h, d, dtype=dtype), randn(b, s, heads, d, dtype=dtype, seed=1)
    else:
        # Views of one projection, and heads before positions.
        both = randn(b, s, h + heads, d, dtype=dtype)
        q, k = both.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :h], both[:, :, h:]
    cos, sin = angles(s, r, data.draw(st.sampled_from([dtype, torch.float32])))
    agrees(q, k, cos, sin, data.draw(st.booleans()))


@pairings
def test_more_heads_than_a_program_takes(interleaved):
    agrees(randn(1, 2, 19, 32), randn(1, 2, 9, 32, seed=1), *angles(2, 16), interleaved)


@pytest.mark.parametrize(("name", "heads"), [("_rotary_tokens_kernel", 3), ("_rotary_kernel", 9)])
def test_both_tensors_take_one_launch_in_each_pass(name, heads, monkeypatch):
    launches, kernel = [], vars(family)[name]

    class Counted:
        """The kernel, with its launches counted."""

        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(family, name, Counted())
    q, k = (randn(1, 3, h, 22, seed=h).requires_grad_() for h in (heads, 1))
    outs = rotary(q, k, *angles(3, 11))
    assert len(launches) == 1
    torch.autograd.grad(outs, (q, k), [torch.ones_like(out) for out in outs])
    assert len(launches) == 2


@pairings
@pytest.mark.parametrize("shape", [(3, 57, 3, 1), (2, 130, 1, 2), (1, 300, 2, 0)])
def test_few_heads_of_several_tokens_share_a_program(shape, interleaved):
    b, s, h, heads = shape
    q, k = randn(b, s, h, 40), randn(b, s, heads, 40, seed=1)
    assert family._few(max(h, heads), 16, 4, interleaved)
    agrees(q.transpose(1, 2).contiguous().transpose(1, 2), k, *angles(s, 16), interleaved)


@pairings
def test_lengths_and_relative_angles_are_kept(interleaved):
    s, d = 12, 32
    cos, sin = angles(s, d // 2)
    one = randn(1, 1, 2, d).expand(1, s, 2, d)
    q, k = rotary(one, one[:, :, :1], cos, sin, interleaved=interleaved)
    lengths = one[0, :, :, :].norm(dim=-1)
    assert torch.allclose(q[0].norm(dim=-1), lengths, rtol=1e-5)
    # A score depends on the distance of two positions alone.
    scores = q[0, :, 0] @ k[0, :, 0].T
    for distance in range(-s + 1, s):
        band = scores.diagonal(distance)
        assert torch.allclose(band, band[:1].expand_as(band), rtol=1e-4, atol=1e-4)


@pairings
def test_the_backward_pass_rotates_back(interleaved):
    q, k = (randn(2, 3, h, 20, seed=h).requires_grad_() for h in (3, 1))
    cos, sin = angles(3, 7)
    outs = rotary(q, k, cos, sin, interleaved=interleaved)
    grads = torch.autograd.grad(outs, (q, k), [out.detach() for out in outs])
    assert all(torch.allclose(g, x, atol=1e-6) for g, x in zip(grads, (q, k), strict=True))


def test_both_pairings_are_one_rotation_of_reordered_entries():
    q, k = randn(2, 3, 4, 24), randn(2, 3, 2, 24, seed=1)
    cos, sin = angles(3, 8)
    order = torch.cat((torch.arange(16).view(2, 8).T.flatten(), torch.arange(16, 24))).to(DEVICE)
    halves = rotary(q, k, cos, sin)
    neighbours = rotary(q[..., order], k[..., order], cos, sin, interleaved=True)
    for one, other in zip(halves, neighbours, strict=True):
        assert torch.equal(one[..., order], other)


def test_entries_beyond_the_rotated_ones_keep_their_bits():
    q = randn(1, 2, 2, 20)
    q[..., 15] = float("nan")
    out, _ = rotary(q, q, *angles(2, 5))
    assert torch.equal(out[..., 10:].nan_to_num(7), q[..., 10:].nan_to_num(7))
    assert torch.isfinite(out[..., :10]).all()


def test_the_gradient_of_one_output_alone():
    q, k = (randn(1, 2, h, 16, seed=h).requires_grad_() for h in (3, 1))
    cos, sin = angles(2, 8)
    both = torch.autograd.grad(sum(x.sum() for x in rotary(q, k, cos, sin)), (q, k))
    dq, dk = torch.autograd.grad(rotary(q, k, cos, sin)[1].sum(), (q, k))
    assert torch.equal(dk, both[1]) and not dq.any()


@pairings
def test_the_reference_is_differentiable_and_right(interleaved):
    q, k = (randn(2, 2, h, 6, seed=h).double().requires_grad_() for h in (3, 1))
    cos, sin = (x.double() for x in angles(2, 2))
    assert torch.autograd.gradcheck(
        lambda q, k: rotary_reference(q, k, cos, sin, interleaved=interleaved), (q, k)
    )


def test_one_tensor_alone_is_rotated_as_beside_another():
    q, k = randn(2, 3, 5, 24), randn(2, 3, 2, 24, seed=1)
    cos, sin = angles(3, 8)
    both = rotary(q, k, cos, sin)
    for x, expected in zip((q, k), both, strict=True):
        leaf = x.clone().requires_grad_()
        alone = rotary(leaf, None, cos, sin)
        assert torch.equal(alone, expected)
        (grad,) = torch.autograd.grad(alone, leaf, expected)
        assert torch.allclose(grad, x, atol=1e-6)


def per_token(b, s, rows, r):
    """Positions [B, S], a table of `rows`, and its rows of each token: [B, S, R]."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(0, rows, (b, s), generator=generator).to(DEVICE)
    cos, sin = angles(rows, r)
    return positions, (cos, sin), (cos[positions], sin[positions])


@pairings
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
def test_positions_choose_rows_of_the_tables(interleaved, index):
    q, k = (randn(2, 5, h, 40, seed=h).requires_grad_() for h in (3, 1))
    positions, table, rows = per_token(2, 5, 60, 13)
    chosen = rotary(q, k, *table, positions.to(index), interleaved=interleaved)
    whole = rotary(q, k, *rows, interleaved=interleaved)
    exact = [x.double() for x in (q, k, *rows)]
    truth = rotary_reference(*exact, interleaved=interleaved)
    seeds = [randn(*out.shape, seed=9 + i) for i, out in enumerate(whole)]
    for found in (chosen, whole):
        for ours, exact in zip(found, truth, strict=True):
            assert (ours - exact).abs().max() <= 1e-6 * exact.abs().max()
        grads = torch.autograd.grad(found, (q, k), seeds)
        wanted = torch.autograd.grad(truth, (q, k), [x.double() for x in seeds], retain_graph=True)
        for ours, theirs in zip(grads, wanted, strict=True):
            assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def test_positions_of_all_sequences_are_one_row():
    q = randn(2, 4, 2, 16)
    cos, sin = angles(9, 8)
    places = torch.tensor([8, 0, 3, 3], device=DEVICE)
    one = rotary(q, None, cos, sin, places)
    assert torch.equal(one, rotary(q, None, cos, sin, places.expand(2, 4)))
    assert torch.equal(one, rotary(q, None, cos[places], sin[places]))


def test_a_position_out_of_range_is_named_or_its_token_is_nan(monkeypatch):
    q, (cos, sin) = randn(1, 3, 2, 20), angles(4, 8)
    for outside in (4, -1, 1 << 40):
        positions = torch.tensor([1, outside, 3], device=DEVICE)
        if DEVICE == "cpu":
            with pytest.raises(ValueError, match=f"positions: {outside}, expected 0 to 3"):
                rotary(q, None, cos, sin, positions)
        # On a GPU positions are not checked.
        with monkeypatch.context() as patch:
            patch.setattr(family, "_check_positions", lambda *arguments: None)
            out = rotary(q, None, cos, sin, positions)
        assert out[0, 1, :, :16].isnan().all() and torch.equal(out[..., 16:], q[..., 16:])
        assert out[0, [0, 2]].isfinite().all()


@pairings
@pytest.mark.parametrize("alone", [False, True])
def test_in_place_the_given_tensors_are_rotated(interleaved, alone):
    # Entries beyond the rotated ones, and what lies between heads, stay as they are.
    storage = randn(2, 3, 7, 26)
    before = storage.clone()
    q, k = storage[:, :, :4, :22], None if alone else storage[:, :, 4:6, :22]
    cos, sin = angles(3, 9)
    expected = rotary(q, k, cos, sin, interleaved=interleaved)
    address, version = q.data_ptr(), q._version
    found = rotary(q, k, cos, sin, interleaved=interleaved, inplace=True)
    assert (found if alone else found[0]) is q and q.data_ptr() == address
    assert q._version > version
    for ours, theirs in zip((q, k)[: 2 - alone], (expected,) if alone else expected, strict=True):
        assert torch.equal(ours, theirs)
    last = 4 if alone else 6
    assert torch.equal(storage[:, :, last:], before[:, :, last:])
    assert torch.equal(storage[..., 22:], before[..., 22:])


@pairings
@pytest.mark.parametrize("views", [False, True])
def test_in_place_gradients_are_those_of_new_tensors(interleaved, views):
    """As in a model: q and k are parts of one projection, or tensors of their own."""
    leaf = randn(2, 3, 6, 20).requires_grad_()
    cos, sin = angles(3, 7)

    def parts(x):
        if views:
            return x[:, :, :4], x[:, :, 4:]
        return x[:, :, :4].clone(), x[:, :, 4:].clone()

    both = []
    for inplace in (True, False):
        q, k = parts(leaf * 2)
        outs = rotary(q, k, cos, sin, interleaved=interleaved, inplace=inplace)
        both.append(torch.autograd.grad(sum((out**3).sum() for out in outs), leaf)[0])
    torch.testing.assert_close(*both)
    # Only one of the two takes part in a backward pass.
    q, k = (leaf * 2)[:, :, :4], randn(2, 3, 2, 20)
    outs = rotary(q, k, cos, sin, inplace=True)
    assert [x.requires_grad for x in outs] == [True, False]


def test_in_place_autograd_notices_a_saved_tensor_that_was_overwritten():
    for leaf in (randn(1, 2, 2, 8).requires_grad_(), randn(1, 2, 2, 8)):
        factor = randn(1, 2, 2, 8).requires_grad_()
        q = leaf * 1
        product = q * factor
        rotary(q, None, *angles(2, 4), inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:, :, :1]])
def test_in_place_a_leaf_that_wants_a_gradient_is_refused_unchanged(view):
    leaf = randn(1, 2, 2, 8).requires_grad_()
    before = leaf.detach().clone()
    with pytest.raises(ValueError, match=r"q: a leaf that requires a gradient.*expected"):
        rotary(view(leaf), None, *angles(2, 4), inplace=True)
    with pytest.raises(ValueError, match=r"k: a leaf that requires a gradient.*expected"):
        rotary(randn(1, 2, 2, 8), view(leaf), *angles(2, 4), inplace=True)
    assert torch.equal(leaf.detach(), before)
    with torch.no_grad():
        rotary(view(leaf), None, *angles(2, 4), inplace=True)
    assert not torch.equal(leaf.detach(), before)


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize(
    "shape, dtype, error, message",
    [
        ((2, 3, 2, 16), torch.float16, TypeError, "k: torch.float16, expected torch.float32"),
        ((3, 3, 2, 16), torch.float32, ValueError, r"k: shape \(3, .*as q has"),
        ((2, 3, 2, 24), torch.float32, ValueError, r"k: shape .* 24\), expected .* K, 16"),
    ],
)
def test_in_place_a_key_that_does_not_fit_leaves_the_queries_unchanged(
    wants, shape, dtype, error, message
):
    leaf = randn(2, 3, 4, 16)
    q = leaf.clone().requires_grad_(wants) * 1
    with pytest.raises(error, match=message):
        rotary(q, randn(*shape, dtype=dtype), *angles(3, 8), inplace=True)
    assert torch.equal(q.detach(), leaf)


def test_in_place_angles_that_are_no_tensors_are_refused_by_name():
    q, cos, sin = randn(1, 2, 2, 8).requires_grad_() * 1, *angles(2, 4)
    for name, tables in (("cos", (1, sin)), ("sin", (cos, 1)), ("positions", (cos, sin, 1))):
        with pytest.raises(TypeError, match=f"^{name}: 1, expected a tensor"):
            rotary(q, None, *tables, inplace=True)


def test_a_key_has_a_few_candidates_and_the_rule_is_one():
    for case in ROTARY.sweep:
        key = {"heads": case["H"], "r": case["R"], "itemsize": 2}
        key["interleaved"] = "interleaved" in case.flags
        suited = [c for c in family.HEADS if family._suits(c, **key)]
        assert 2 <= len(suited) <= 24 and family._choose(**key) in suited


Q, K = randn(2, 3, 4, 16), randn(2, 3, 2, 16)
COS, SIN = angles(3, 8)
PLACES = torch.arange(3, device=DEVICE)
REFUSALS = {
    "q: 3 dimensions": lambda: rotary(Q[0], K, COS, SIN),
    "k: shape .*as q has": lambda: rotary(Q, K[:1], COS, SIN),
    "k: shape .* K, 16": lambda: rotary(Q, K[..., :8], COS, SIN),
    "k: torch.float16": lambda: rotary(Q, K.half(), COS, SIN),
    "cos: shape .*R": lambda: rotary(Q, K, COS[:2], SIN),
    "cos: shape .*2R <= 16": lambda: rotary(Q, K, *angles(3, 9)),
    "sin: shape .*as cos has": lambda: rotary(Q, K, COS, SIN[:, :5]),
    "sin: shape": lambda: rotary(Q, K, COS, SIN[0]),
    "cos: requires a gradient": lambda: rotary(Q, K, COS.clone().requires_grad_(), SIN),
    "cos: shape .*B?.*2, 3, R": lambda: rotary(Q, K, COS.expand(3, 3, 8), SIN),
    "cos: shape .*L, R": lambda: rotary(Q, K, COS[None], SIN[None], PLACES),
    "positions: torch.float32, expected": lambda: rotary(Q, K, COS, SIN, COS[:, 0]),
    "positions: shape .*expected .*2, 3": lambda: rotary(Q, K, COS, SIN, PLACES[:2]),
    "positions: of tables": lambda: rotary(Q, K, COS[:0], SIN[:0], PLACES),
    "q: strides .*expected 1 last": lambda: rotary(Q.mT.contiguous().mT, K, COS, SIN, inplace=True),
    "k: strides .*no 0": lambda: rotary(Q, K[:1].expand(2, 3, 2, 16), COS, SIN, inplace=True),
    "k: the same tensor as q.*expected None": lambda: rotary(Q, Q, COS, SIN, inplace=True),
    "q: torch.float64, expected": lambda: rotary(Q.double(), K.double(), COS, SIN),
    "cos: torch.int64, expected": lambda: rotary(Q, K, COS.long(), SIN),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_bad_arguments_are_refused(message):
    with pytest.raises(
        TypeError if re.search("(64|32), expected|float16", message) else ValueError, match=message
    ):
        REFUSALS[message]()

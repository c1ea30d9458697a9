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
    truth = rotary_reference(*exact, cos.double(), sin.double(), interleaved)
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


def test_both_tensors_take_one_launch_in_each_pass(monkeypatch):
    launches, kernel = [], family._rotary_kernel

    class Counted:
        """The kernel, with its launches counted."""

        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(family, "_rotary_kernel", Counted())
    q, k = (randn(1, 3, h, 22, seed=h).requires_grad_() for h in (3, 1))
    outs = rotary(q, k, *angles(3, 11))
    assert len(launches) == 1
    torch.autograd.grad(outs, (q, k), [torch.ones_like(out) for out in outs])
    assert len(launches) == 2


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
        lambda q, k: rotary_reference(q, k, cos, sin, interleaved), (q, k)
    )


def test_a_key_has_a_few_candidates_and_the_rule_is_one():
    for case in ROTARY.sweep:
        key = {"heads": case["H"], "r": case["R"], "itemsize": 2}
        key["interleaved"] = "interleaved" in case.flags
        suited = [c for c in family.HEADS if family._suits(c, **key)]
        assert 2 <= len(suited) <= 24 and family._choose(**key) in suited


Q, K = randn(2, 3, 4, 16), randn(2, 3, 2, 16)
COS, SIN = angles(3, 8)
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
    "q: torch.float64, expected": lambda: rotary(Q.double(), K.double(), COS, SIN),
    "cos: torch.int64, expected": lambda: rotary(Q, K, COS.long(), SIN),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_bad_arguments_are_refused(message):
    with pytest.raises(
        TypeError if re.search("64, expected|float16", message) else ValueError, match=message
    ):
        REFUSALS[message]()

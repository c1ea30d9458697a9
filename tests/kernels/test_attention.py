"""Attention: both passes against float64, laws of its rows, layouts, dropout, refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.calls.invoke import run
from harness.project import registry
from harness.verify import problem as oracle_of
from kernels import attention, attention_varlen, block_sparse_attention
from kernels._runtime.checks import MOST_ITEMS
from kernels.attention_details import backward as _attention_backward
from kernels.attention_details.launch import like
from tests.support.attention import kept_by, oracle, visible
from tests.support.values import DEVICE, close, few, randn

attend = attention.attention
BOUND = {torch.float32: 4e-6, torch.float16: 4e-3}


def near(name, ours, exact, dtype):
    """The numbers lie near those of the oracle, relative to the largest of these."""
    assert ours.shape == exact.shape, name
    if not ours.numel():
        return
    size = max(exact.abs().max().item(), 1e-30)
    worst = (ours.double() - exact.to(ours.device)).abs().max().item()
    assert worst <= BOUND[dtype] * size, f"{name}: {worst / size:.1e}"


def agrees(q, k, v, *, dropout=0.0, seed=None, **options):
    """Output, lse and the gradients of q, k and v, by both results, are those of float64."""
    kept = None
    if dropout:
        number = seed.item() if isinstance(seed, torch.Tensor) else seed
        kept = kept_by(number, dropout, *q.shape[:3], k.shape[2])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, return_lse=True, dropout=dropout, seed=seed, **options)
    mask = options.pop("mask", None)
    truth, truth_lse = oracle(
        *exact, mask=None if mask is None else mask.cpu(), kept=kept, **options
    )
    assert lse.dtype == torch.float32 and out.dtype == q.dtype
    assert torch.equal(lse.isneginf().cpu(), truth_lse.isneginf())
    seen = truth_lse.isfinite()
    assert not out.cpu()[~seen].any()
    near("out", out.detach(), truth.detach(), q.dtype)
    near("lse", lse.detach().cpu()[seen], truth_lse.detach()[seen], torch.float32)
    dout = randn(*out.shape, dtype=q.dtype, seed=7)
    # The logarithm of a row without a key is no function of anything.
    dlse = randn(*lse.shape, seed=8) * seen.to(DEVICE)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    parts = (truth, truth_lse.where(seen, 0))
    truths = torch.autograd.grad(parts, exact, (dout.cpu().double(), dlse.cpu().double()))
    # If all cancels, as with a single key, only rounding of numbers of this size is left.
    for name, x, grad, expected in zip("qkv", (q, k, v), grads, truths, strict=True):
        assert grad.dtype == x.dtype and grad.shape == x.shape
        if expected.numel() and expected.abs().max() > 1e-10:
            near(f"d{name}", grad, expected, q.dtype)
        else:
            assert grad.abs().sum() <= 1e-4 * max(1, grad.numel())
    return out, grads


@pytest.mark.parametrize("sizes", [(7, 7), (4, 9), (9, 4), (1, 1), (0, 3)])
@pytest.mark.parametrize("window", [None, 0, 2, (1, 3), (-1, 2), (3, -1)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_oracle_sees_what_each_pair_says(sizes, window, causal):
    left, right = window if isinstance(window, tuple) else (-1 if window is None else window,) * 2
    seen = visible(*sizes, causal, window)
    assert seen.shape == sizes
    for row in range(sizes[0]):
        position = row + sizes[1] - sizes[0]
        for key in range(sizes[1]):
            late = causal and key > position
            far = key < position - left if left >= 0 else False
            ahead = key > position + right if right >= 0 else False
            assert seen[row, key] == (not (late or far or ahead))


def made(b, h, heads, sq, sk, d, order="heads", dtype=torch.float32):
    """q, k and v; between the tokens of "tokens" lie the heads, "parts" are of one projection."""
    sizes = ((h, sq), (heads, sk), (heads, sk))
    if order == "heads":
        return [randn(b, n, s, d, dtype=dtype, seed=i) for i, (n, s) in enumerate(sizes)]
    if order == "tokens":
        return [
            randn(b, s, n, d, dtype=dtype, seed=i).transpose(1, 2) for i, (n, s) in enumerate(sizes)
        ]
    keys = randn(b, sk, 2 * heads, d, dtype=dtype, seed=1).transpose(1, 2)
    return randn(b, sq, h, d, dtype=dtype, seed=0).transpose(1, 2), *keys.chunk(2, 1)


windows = st.one_of(
    st.none(), st.integers(0, 40), st.tuples(st.integers(-1, 40), st.integers(-1, 40))
)


@few
@given(st.data())
def test_random_shapes_flags_and_layouts(data):
    heads, group = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 1, 2, 3]))
    sq, sk = data.draw(st.integers(1, 140)), data.draw(st.integers(1, 140))
    d = 8 * data.draw(st.integers(2, 6))
    order = data.draw(st.sampled_from(["heads", "tokens", "parts"]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16]))
    agrees(
        *made(1, heads * group, heads, sq, sk, d, order, dtype),
        causal=data.draw(st.booleans()),
        window=data.draw(windows),
        scale=data.draw(st.sampled_from([None, 0.5])),
        softcap=data.draw(st.sampled_from([None, 1.5])),
    )


@pytest.mark.parametrize("d", [16, 40, 64, 72, 128, 136, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_head_dimensions(d, dtype):
    agrees(*made(1, 2, 1, 37, 41, d, dtype=dtype), causal=True)


@pytest.mark.parametrize(("sq", "sk"), [(1, 90), (90, 1), (50, 200), (200, 50), (128, 128)])
def test_the_last_row_stands_at_the_last_key(sq, sk):
    q, k, v = made(1, 2, 2, sq, sk, 16)
    out, _ = agrees(q, k, v, causal=True)
    # The interpreter's products add up in an order that depends on the processor and the shape.
    torch.testing.assert_close(out[:, :, -1:], attend(q[:, :, -1:], k, v, causal=True))
    agrees(q, k, v, causal=True, window=5)


@pytest.mark.parametrize("heads", [1, 2, 6])
def test_query_heads_share_the_keys_of_their_group(heads):
    q, k, v = made(2, 6, heads, 33, 50, 16)
    out, _ = agrees(q, k, v, causal=True)
    each = [x.repeat_interleave(6 // heads, 1) for x in (k, v)]
    assert torch.equal(out, attend(q, *each, causal=True))


@pytest.mark.parametrize("order", ["tokens", "parts"])
def test_heads_between_the_tokens_need_no_copy(order, monkeypatch):
    q, k, v = made(2, 4, 2, 40, 50, 32, order)
    given = [x.contiguous() for x in (q, k, v)]
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    dout = randn(2, 40, 4, 32, seed=5).transpose(1, 2)

    def copies(*_):
        raise AssertionError("a tensor was copied")

    monkeypatch.setattr(torch.Tensor, "contiguous", copies)
    out = attend(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    monkeypatch.undo()
    # As the tensors lie: a view of [B, S, H, D] again.
    assert out.transpose(1, 2).is_contiguous() and dq.transpose(1, 2).is_contiguous()
    leaves = [x.requires_grad_() for x in given]
    expected = attend(*leaves)
    assert expected.is_contiguous() and torch.equal(out, expected)
    truth = torch.autograd.grad(expected, leaves, dout.contiguous())
    assert all(map(torch.equal, (dq, dk, dv), truth))


def test_rows_that_overlap_give_a_result_whose_rows_do_not():
    x = randn(1, 1, 80).unfold(-1, 32, 1)
    assert x.stride() == (80, 80, 1, 1) and like(x).stride(-1) == 1
    agrees(x, x.clone(), x.clone())


@pytest.mark.parametrize("window", [(0, 0), 3, (40, 2), (-1, 2), (2, -1), (300, 300), 130])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(window, causal):
    agrees(*made(1, 2, 1, 150, 170, 16), window=window, causal=causal)


@pytest.mark.parametrize("sizes", [(40, 4130), (4130, 40)])
def test_the_largest_window_bounds_nothing(sizes):
    """It fits in 32 bits with the distance of the two lengths, and not with positions."""
    agrees(*made(1, 1, 1, *sizes, 16), window=MOST_ITEMS)


def test_keys_outside_the_window_are_not_read():
    q, k, v = made(1, 1, 1, 300, 300, 16)
    k[:, :, :100], v[:, :, 256:] = math.nan, math.nan
    out = attend(q, k, v, causal=True, window=20)
    # A tile may end at row 255, and one with row 192 may begin with a key below 100, masked.
    assert out[:, :, 192:256].isfinite().all()


def test_a_causal_window_of_w_sees_w_keys_and_its_own():
    q = torch.zeros(1, 1, 9, 16, device=DEVICE)
    v = torch.eye(9, 16, device=DEVICE)[None, None]
    weights = attend(q, q, v, causal=True, window=3)[0, 0, :, :9]
    for row in range(9):
        seen = [key for key in range(9) if weights[row, key] > 0]
        assert seen == list(range(max(0, row - 3), row + 1))


@pytest.mark.parametrize("size", [0, 1])
def test_rows_that_see_no_key(size):
    q, k, v = made(1, 2, 1, 20, size, 16)
    agrees(q, k, v, causal=True)
    out, lse = attend(q, k, v, causal=True, return_lse=True)
    assert not out[:, :, :19].any() and (lse[:, :, :19] == -math.inf).all()


@pytest.mark.parametrize("sizes", [(0, 2, 4, 4), (1, 2, 0, 4), (1, 2, 4, 0), (1, 0, 4, 4)])
def test_empty_tensors(sizes):
    b, h, sq, sk = sizes
    agrees(*made(b, h, h, sq, sk, 16))


MASKS = {
    "of a key": lambda b, h, sq, sk: randn(sk, seed=9),
    "of a row and a key": lambda b, h, sq, sk: randn(sq, sk, seed=9),
    "of a head": lambda b, h, sq, sk: randn(1, h, 1, 1, seed=9),
    "of a batch": lambda b, h, sq, sk: randn(b, 1, 1, sk, seed=9),
    "of all, transposed": lambda b, h, sq, sk: randn(b, h, sk, sq, seed=9).mT,
    "with minus infinity": lambda b, h, sq, sk: randn(sq, sk, seed=9).masked_fill(
        randn(sq, sk, seed=10) > 0, -math.inf
    ),
    "of bool": lambda b, h, sq, sk: randn(b, 1, sq, sk, seed=9) > 0.5,
    "of nothing": lambda b, h, sq, sk: torch.zeros(1, 1, 1, sk, dtype=torch.bool, device=DEVICE),
}


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_masks(kind, causal):
    q, k, v = made(2, 4, 2, 70, 75, 16)
    agrees(q, k, v, mask=MASKS[kind](2, 4, 70, 75), causal=causal, window=(60, -1))


@pytest.mark.parametrize("dtype, least", [(torch.float32, -3.4e38), (torch.float16, -2.3e38)])
def test_a_row_that_a_finite_mask_hides_is_the_mean_of_the_values(dtype, least):
    q, k, v = made(1, 1, 1, 20, 40, 16, dtype=dtype)
    out, lse = attend(q, k, v, mask=torch.full((20, 40), least, device=DEVICE), return_lse=True)
    assert (out.float() - v.float().mean(2, keepdim=True)).abs().max() <= 1e-3
    assert (lse / least - 1).abs().max() <= 1e-6


def test_a_mask_of_the_tensors_dtype_and_one_of_float32():
    tensors = made(1, 2, 2, 40, 40, 16, dtype=torch.float16)
    for dtype in (torch.float16, torch.float32):
        agrees(*tensors, mask=randn(40, 40, dtype=dtype, seed=3))


@pytest.mark.parametrize("softcap", [0.3, 1e30])
@pytest.mark.parametrize("mask", [None, "of all, transposed"])
def test_a_softcap_bends_scores_before_the_mask(softcap, mask):
    """The largest leaves them as they are; the least makes all scores of a row nearly equal."""
    q, k, v = made(1, 2, 1, 40, 45, 16)
    given = None if mask is None else MASKS[mask](1, 2, 40, 45)
    agrees(3 * q, k, v, softcap=softcap, mask=given, causal=True, window=30, dropout=0.2, seed=3)


def test_a_saturated_softcap_has_no_gradient():
    q, k, v = (x.requires_grad_() for x in made(1, 1, 1, 30, 30, 16))
    out = attend(q, k, v, scale=1e6, softcap=2.0)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert not dq.any() and not dk.any() and dv.any()


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("causal", [False, True])
def test_dropout_of_both_passes_is_that_of_the_seed(p, causal):
    agrees(*made(2, 4, 2, 70, 77, 16), dropout=p, seed=2**40 + 3, causal=causal)


@few
@given(st.integers(-(2**63), 2**31 - 1), st.floats(0.01, 0.99), st.integers(1, 90), windows)
def test_dropout_of_any_seed_and_window(seed, p, sk, window):
    agrees(*made(1, 2, 1, 40, sk, 16), dropout=p, seed=seed, window=window, scale=0.5)


def test_a_seed_on_the_device_is_the_same_seed():
    q, k, v = made(1, 2, 2, 40, 40, 16)
    number = 2**33 + 5
    first, grads = agrees(q, k, v, dropout=0.4, seed=number)
    seed = torch.tensor(number, device=DEVICE)
    then, same = agrees(q, k, v, dropout=0.4, seed=seed)
    assert torch.equal(first, then) and all(map(torch.equal, grads, same))
    assert not torch.equal(first, attend(q, k, v, dropout=0.4, seed=number + 1))
    leaf = q.clone().requires_grad_()
    out = attend(leaf, k, v, dropout=0.4, seed=seed)
    seed += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tiles_do_not_change_what_is_dropped(monkeypatch):
    tensors = made(1, 1, 1, 70, 70, 16)
    expected, _ = agrees(*tensors, dropout=0.3, seed=1)
    tiles = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    for configs in (attention.FORWARD, _attention_backward.DQ, _attention_backward.DKDV):
        monkeypatch.setitem(configs.__dict__, "choose", lambda **_: tiles)
    out, _ = agrees(*tensors, dropout=0.3, seed=1)
    assert not torch.equal(out, expected)
    near("out", out.detach(), expected.detach(), torch.float32)


def test_one_gradient_alone():
    tensors = made(1, 2, 1, 40, 50, 16)
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(attend(*leaves).sum(), leaves)
    for index in range(3):
        given = list(tensors)
        given[index] = given[index].clone().requires_grad_()
        (grad,) = torch.autograd.grad(attend(*given).sum(), given[index])
        assert torch.equal(grad, expected[index])


def test_the_gradient_of_either_result_alone():
    leaves = [x.requires_grad_() for x in made(1, 2, 1, 40, 50, 16)]
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    for index in range(2):
        result = attend(*leaves, return_lse=True)[index]
        truth = oracle(*exact)[index]
        weights = randn(*result.shape, seed=4)
        # lse depends on no value.
        wanted = 3 - index
        grads = torch.autograd.grad((result * weights).sum(), leaves[:wanted])
        truths = torch.autograd.grad((truth * weights.cpu()).sum(), exact[:wanted])
        for grad, expected in zip(grads, truths, strict=True):
            near(f"result {index}", grad, expected, torch.float32)


def test_weights_of_one_key_are_exact_however_large_the_score():
    """m and log2(l) are kept apart in float32: their sum would be off by a part in a hundred."""
    q, k, v = made(1, 1, 1, 20, 20, 16)
    leaves = [(300 * q).requires_grad_(), (300 * k).requires_grad_(), v.requires_grad_()]
    exact = [x.detach().cpu().double().requires_grad_() for x in leaves]
    dout = randn(1, 1, 20, 16, seed=4)
    (dv,) = torch.autograd.grad(attend(*leaves), leaves[2], dout)
    (truth,) = torch.autograd.grad(oracle(*exact)[0], exact[2], dout.cpu().double())
    near("dv", dv, truth, torch.float32)


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    "name, case, seed",
    [
        ("attention", "B1-H1-S140-D64-equal", 3220174511),
        ("block_sparse_attention", "B1-H1-I3-J3-S140-D64-half-equal", 1475473380),
    ],
)
def test_weights_that_add_up_to_an_ulp_more_than_one_cost_no_digits(name, case, seed):
    """In these draws one key has nearly all the weight, and dk is small beside what it sums."""
    op, _ = registry.op(name)
    ours, eager = (registry.function(name, impl) for impl in ("ours", "torch_eager"))
    (case,) = (each for each in op.edge if each.name == case)
    problem = oracle_of.problem(op, case, "float32", seed, "cpu", eager)
    found = problem.judge(run(op, ours, case, problem.tensors, problem.seeds))["dk"]
    assert found.distance.max < 1.5 * problem.eager["dk"].max


def test_two_runs_give_the_same_bits():
    leaves = [x.requires_grad_() for x in made(1, 4, 1, 90, 90, 16)]
    first, second = (torch.autograd.grad(attend(*leaves).sum(), leaves) for _ in range(2))
    assert all(map(torch.equal, first, second))


@few
@given(st.integers(1, 150), st.booleans())
def test_attention_rows_are_means_of_the_values(s, causal):
    q, k = randn(1, 2, s, 64, seed=1), randn(1, 2, s, 64, seed=2)
    constant = torch.full((1, 2, s, 64), 3.0, device=DEVICE)
    close(attend(q, k, constant, causal=causal), constant, torch.float32)
    if causal:
        v = randn(1, 2, s, 64, seed=3)
        close(attend(q, k, v, causal=True)[:, :, 0], v[:, :, 0], torch.float32)


def test_keys_that_score_minus_infinity_by_the_tile_are_as_in_pytorch():
    q = torch.full((1, 1, 100, 16), 1e20, device=DEVICE)
    k, v = torch.zeros(1, 1, 100, 16, device=DEVICE), randn(1, 1, 100, 16)
    k[..., :70, :] = -1e20
    close(attend(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v), q.dtype)
    k[:] = -1e20
    out, lse = attend(q, k, v, return_lse=True)
    assert not out.any() and (lse == -math.inf).all()


def test_later_keys_and_values_do_not_reach_a_causal_row():
    q, k, v = (randn(1, 2, 70, 32, seed=seed) for seed in range(3))
    before = attend(q, k, v, causal=True)
    k[:, :, 40:] = 1e4
    v[:, :, 40:] = 1e4
    assert torch.equal(attend(q, k, v, causal=True)[:, :, :40], before[:, :, :40])


half = torch.float16
REFUSALS = {
    "q: head dimension 20, expected": lambda: attend(*[randn(1, 1, 4, 20)] * 3),
    "q: head dimension 264, expected": lambda: attend(*[randn(1, 1, 4, 264)] * 3),
    "q: 3 dimensions, expected": lambda: attend(*[randn(1, 4, 16)] * 3),
    r"k: shape \(1, 1, 4, 32\), expected": lambda: attend(
        randn(1, 1, 4, 16), *[randn(1, 1, 4, 32)] * 2
    ),
    "k: 2 heads, expected": lambda: attend(randn(1, 3, 4, 16), *[randn(1, 2, 4, 16)] * 2),
    "k: 0 heads, expected": lambda: attend(randn(1, 3, 4, 16), *[randn(1, 0, 4, 16)] * 2),
    r"v: shape \(1, 1, 5, 16\), expected": lambda: attend(
        *[randn(1, 1, 4, 16)] * 2, randn(1, 1, 5, 16)
    ),
    r"mask: shape \(4, 5\), expected": lambda: attend(*[randn(1, 1, 4, 16)] * 3, mask=randn(4, 5)),
    r"mask: shape \(1, 1, 1, 4, 4\), expected": lambda: attend(
        *[randn(1, 1, 4, 16)] * 3, mask=randn(1, 1, 1, 4, 4)
    ),
    "mask: requires a gradient, .*expected": lambda: attend(
        *[randn(1, 1, 4, 16)] * 3, mask=randn(4, 4).requires_grad_()
    ),
    "scale: 0.0, expected": lambda: attend(*[randn(1, 1, 4, 16)] * 3, scale=0.0),
    "scale: -1.0, expected": lambda: attend(*[randn(1, 1, 4, 16)] * 3, scale=-1.0),
    "softcap: 0.0, expected": lambda: attend(*[randn(1, 1, 4, 16)] * 3, softcap=0.0),
    "softcap: inf, expected": lambda: attend(*[randn(1, 1, 4, 16)] * 3, softcap=math.inf),
    "dropout: 1.5, expected": lambda: attend(*[randn(1, 1, 4, 16)] * 3, dropout=1.5, seed=1),
    "seed: None, expected": lambda: attend(*[randn(1, 1, 4, 16)] * 3, dropout=0.5),
    r"seed: \(2,\) torch.int64, expected": lambda: attend(
        *[randn(1, 1, 4, 16)] * 3, dropout=0.5, seed=torch.zeros(2, dtype=torch.int64)
    ),
    "window: -2, expected": lambda: attend(*[randn(1, 1, 4, 16)] * 3, window=-2),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_bad_arguments_are_refused(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        REFUSALS[message]()


def test_refuses_tensors_of_two_dtypes():
    with pytest.raises(TypeError, match=r"^v: torch.float16, expected"):
        attend(*[randn(1, 1, 4, 16)] * 2, randn(1, 1, 4, 16, dtype=half))


def test_refuses_a_mask_of_another_dtype():
    with pytest.raises(TypeError, match=r"^mask: torch.int64, expected"):
        attend(*[randn(1, 1, 4, 16)] * 3, mask=torch.zeros(4, 4, dtype=torch.int64))


@pytest.mark.parametrize("shared", [65536, 101376, 166912, 232448])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_in_the_shared_memory_that_there_is(itemsize, shared):
    for d in range(16, 257, 8):
        key, wide = {"d": d, "itemsize": itemsize, "shared": shared}, 1 << (d - 1).bit_length()
        chosen = (
            ("BLOCK_M", "BLOCK_N", 1, attention.FORWARD.choose(s=4096, causal=True, **key)),
            ("BLOCK_M", "BLOCK_N", 2, _attention_backward.DQ.choose(**key)),
            *(
                ("BLOCK_N", "BLOCK_M", 2, _attention_backward.DKDV.choose(**key, tensor_memory=has))
                for has in (False, True)
            ),
        )
        for own, walked, owned, config in chosen:
            rows = owned * config[own] + 2 * config["num_stages"] * config[walked]
            assert rows * wide * itemsize <= shared, f"head dimension {d}: {config}"


@pytest.mark.parametrize(
    ("configs", "further"),
    [
        (_attention_backward.DKDV, {}),
        (attention_varlen.DKDV, {"longest": 4096}),
        (block_sparse_attention.DKDV, {"block": 128}),
    ],
    ids=["attention", "attention_varlen", "block_sparse_attention"],
)
def test_wide_heads_have_tiles_that_leave_room_in_tensor_memory(configs, further):
    """With 64 keys of a head above 128, Triton 3.6 compiles a program for sm_100 to nothing."""

    def chosen(d, itemsize, tensor_memory):
        return configs.choose(
            d=d, itemsize=itemsize, shared=232448, tensor_memory=tensor_memory, **further
        )["BLOCK_N"]

    assert chosen(256, 2, True) < 64 <= chosen(256, 2, False)
    assert chosen(136, 2, True) < 64
    assert chosen(128, 2, True) == chosen(128, 2, False) >= 64
    assert chosen(256, 4, True) == chosen(256, 4, False)

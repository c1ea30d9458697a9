"""Packed sequences: each as attention alone computes it, tiles that cover all rows, refusals."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import attention_varlen as varlen
from kernels.attention import attention
from kernels.attention_details import packed
from tests.support.attention import oracle
from tests.support.values import DEVICE, few, randn

attend = varlen.attention_varlen
BOUND = {torch.float32: 4e-6, torch.float16: 4e-3}
# They have 16 rows, so that short sequences have several.
SMALL_TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}


@pytest.fixture
def small_tiles(monkeypatch):
    for configs in (varlen.FORWARD, varlen.DQ, varlen.DKDV):
        monkeypatch.setitem(configs.__dict__, "choose", lambda **_: SMALL_TILES)


def ends_of(lengths, dtype=torch.int32):
    ends = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(ends, dtype=dtype, device=DEVICE)


def made(rows, keys, h=2, heads=1, d=16, dtype=torch.float32, after=0):
    """q, k, v and both boundaries; `after` rows and keys lie past the last sequence."""
    sizes = ((sum(rows) + after, h), (sum(keys) + after, heads), (sum(keys) + after, heads))
    tensors = [randn(s, n, d, dtype=dtype, seed=i) for i, (s, n) in enumerate(sizes)]
    return *tensors, ends_of(rows), ends_of(keys)


def near(name, ours, exact, dtype):
    """The numbers lie near those of the oracle, relative to the largest of these."""
    assert ours.shape == exact.shape, name
    if ours.numel():
        size = max(exact.abs().max().item(), 1e-30)
        worst = (ours.double().cpu() - exact).abs().max().item()
        assert worst <= BOUND[dtype] * size, f"{name}: {worst / size:.1e}"


def agrees(q, k, v, cu_q, cu_k, **options):
    """Both results and the gradients of q, k and v by both are those of each sequence alone."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, cu_q, cu_k, return_lse=True, **options)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        options.pop(name, None)
    truths, sums = [], []
    pairs = itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist())
    for (start, end), (first, last) in zip(*pairs, strict=True):
        rows, keys, values = exact[0][start:end], exact[1][first:last], exact[2][first:last]
        parts = (x.transpose(0, 1)[None] for x in (rows, keys, values))
        truth, total = oracle(*parts, **options)
        truths.append(truth[0].transpose(0, 1))
        sums.append(total[0])
    rest = len(q) - cu_q[-1].item()
    truths.append(0 * exact[0][len(q) - rest :])
    sums.append(torch.full((q.shape[1], rest), -math.inf, dtype=torch.float64))
    truth, total = torch.cat(truths), torch.cat(sums, 1)
    seen = total.isfinite()
    assert torch.equal(lse.isneginf().cpu(), ~seen) and not out.transpose(0, 1).cpu()[~seen].any()
    near("out", out.detach(), truth.detach(), q.dtype)
    near("lse", lse.detach().cpu()[seen], total.detach()[seen], torch.float32)
    dout, dlse = randn(*out.shape, dtype=q.dtype, seed=7), randn(*lse.shape, seed=8)
    # The logarithm of a row without a key is no function of anything.
    dlse = dlse * seen.to(DEVICE)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    given_back = dout.cpu().double(), dlse.cpu().double()
    expected = torch.autograd.grad((truth, total.where(seen, 0)), exact, given_back)
    for name, grad, right in zip("qkv", grads, expected, strict=True):
        assert grad.dtype == q.dtype
        near(f"d{name}", grad, right, q.dtype)
    return out, lse, *grads


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=4)
windows = st.one_of(
    st.none(), st.integers(0, 20), st.tuples(st.integers(-1, 20), st.integers(-1, 20))
)


@few
@given(st.data())
def test_random_lengths_are_as_each_sequence_alone(data):
    rows = data.draw(lengths)
    keys = data.draw(
        st.one_of(st.just(rows), st.permutations(rows), st.just([3 * n for n in rows]))
    )
    heads = data.draw(st.integers(1, 2))
    agrees(
        *made(
            *(rows, keys, heads * data.draw(st.sampled_from([1, 3])), heads),
            8 * data.draw(st.integers(2, 5)),
            data.draw(st.sampled_from([torch.float32, torch.float16])),
            data.draw(st.sampled_from([0, 0, 9])),
        ),
        causal=data.draw(st.booleans()),
        window=data.draw(windows),
        softcap=data.draw(st.sampled_from([None, 1.5])),
        max_seqlen_q=data.draw(st.sampled_from([None, max(rows), 1])),
    )


@pytest.mark.parametrize("causal", [False, True])
def test_many_tiles_of_a_sequence(small_tiles, causal):
    agrees(*made([33, 0, 70, 16], [40, 5, 70, 0]), causal=causal, window=(25, -1))


def test_more_sequences_than_boundaries_that_are_read_at_once():
    rows = [*[0] * (packed.AT_ONCE.value - 1), 3, 0, 2, 9, 0]
    q, k, v, ends, _ = made(rows, rows, h=1)
    few_ends = ends_of([3, 2, 9])
    out = attend(q, k, v, ends, ends, causal=True)
    assert torch.equal(out, attend(q, k, v, few_ends, few_ends, causal=True))


def test_one_sequence_is_that_of_attention(small_tiles):
    q, k, v, cu_q, cu_k = made([50], [70], h=4, heads=2)
    out, lse = attend(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
    parts = [x.transpose(0, 1)[None] for x in (q, k, v)]
    truth, total = attention(*parts, causal=True, return_lse=True)
    torch.testing.assert_close(out, truth[0].transpose(0, 1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, total[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [16, 64])
def test_each_tile_has_a_slot_of_its_own(block):
    """The law of `packed.py`, told without a kernel: for any lengths no two tiles share a slot."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        count = int(torch.randint(1, 9, (), generator=generator))
        each = torch.randint(0, 3 * block, (count,), generator=generator).tolist()
        ends, used = ends_of(each).tolist(), []
        total = ends[-1] + int(torch.randint(0, block, (), generator=generator))
        for index, (start, end) in enumerate(itertools.pairwise([*ends, total])):
            first = start // block + index
            used += range(first, first + -(-(end - start) // block))
        assert len(set(used)) == len(used)
        assert all(slot < total // block + count + 1 for slot in used)


def test_wrong_boundaries_read_nothing_outside(small_tiles):
    """Numbers beyond the tensors are moved into them; memory around these holds NaN."""
    whole = [torch.full((90, 2, 16), math.nan, device=DEVICE) for _ in range(3)]
    q, k, v = (x[30:60].copy_(randn(30, 2, 16, seed=i)) for i, x in enumerate(whole))
    wrong = torch.tensor([-7, -3, 20, 99], dtype=torch.int32, device=DEVICE)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, wrong, wrong)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(x.isfinite().all() for x in (out, *grads))


def test_boundaries_of_64_bits_and_with_gaps_are_the_same():
    q, k, v, cu_q, cu_k = made([20, 7], [20, 7])
    expected = attend(q, k, v, cu_q, cu_k, causal=True)
    for cu in (cu_q.long(), torch.stack((cu_q, cu_q + 1), 1)[:, 0]):
        assert torch.equal(attend(q, k, v, cu, cu_k, causal=True), expected)


def test_heads_of_one_projection_need_no_copy(monkeypatch):
    both = randn(40, 6, 16, seed=1)
    q, k, v = both[:, :2], both[:, 2:4], both[:, 4:]
    ends = ends_of([25, 15])
    expected = attend(q.clone(), k.clone(), v.clone(), ends, ends)

    def copies(*_):
        raise AssertionError("a tensor was copied")

    monkeypatch.setattr(torch.Tensor, "contiguous", copies)
    assert torch.equal(attend(q, k, v, ends, ends), expected)


def test_the_host_never_reads_the_boundaries(monkeypatch):
    given_tensors = made([20, 7], [20, 7])

    def read(*_):
        raise AssertionError("the host waited for the device")

    for name in ("item", "tolist", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, read)
    # The interpreter itself fetches arguments; it must not run here.
    monkeypatch.setattr(type(varlen._forward_kernel), "__getitem__", lambda *_: lambda **_: None)
    attend(*given_tensors, causal=True, max_seqlen_q=20)


def test_two_runs_give_the_same_bits():
    q, k, v, cu_q, cu_k = made([30, 60], [50, 60], h=4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    first, second = (
        torch.autograd.grad(attend(*leaves, cu_q, cu_k).sum(), leaves) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_one_gradient_alone():
    *tensors, cu_q, cu_k = made([30, 20], [50, 10])
    leaves = [x.clone().requires_grad_() for x in tensors]
    expected = torch.autograd.grad(attend(*leaves, cu_q, cu_k).sum(), leaves)
    for index in range(3):
        some = list(tensors)
        some[index] = some[index].clone().requires_grad_()
        (grad,) = torch.autograd.grad(attend(*some, cu_q, cu_k).sum(), some[index])
        assert torch.equal(grad, expected[index])


def test_no_tile_is_larger_than_the_longest_sequence_needs():
    key = {"d": 64, "itemsize": 2, "shared": 232448}
    for longest in (32, 64, 4096):
        chosen = varlen.FORWARD.choose(rows=longest, s=longest, causal=True, **key)
        assert chosen["BLOCK_M"] <= longest
        assert varlen.DQ.choose(longest=longest, **key)["BLOCK_M"] <= longest
        chosen = varlen.DKDV.choose(longest=longest, **key, tensor_memory=False)
        assert chosen["BLOCK_N"] <= longest


def swapped(**others):
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    return attend(**dict(zip(names, made([4, 5], [4, 5]), strict=True)) | others)


REFUSALS = {
    "q: 4 dimensions, expected 3": lambda: swapped(q=randn(1, 9, 2, 16)),
    "k: 2 dimensions, expected 3": lambda: swapped(k=randn(9, 16)),
    r"k: shape \(9, 1, 32\), expected": lambda: swapped(k=randn(9, 1, 32)),
    "k: 3 heads, expected": lambda: swapped(k=randn(9, 3, 16), v=randn(9, 3, 16)),
    r"v: shape \(8, 1, 16\), expected": lambda: swapped(v=randn(8, 1, 16)),
    "cu_seqlens_q: 2 dimensions, expected": lambda: swapped(cu_seqlens_q=ends_of([4, 5])[None]),
    r"cu_seqlens_q: shape \(0,\), expected": lambda: swapped(cu_seqlens_q=ends_of([])[:0]),
    r"cu_seqlens_k: shape \(2,\), expected \(3,\)": lambda: swapped(cu_seqlens_k=ends_of([9])),
    "max_seqlen_q: -1, expected": lambda: swapped(max_seqlen_q=-1),
    "softcap: 0.0, expected": lambda: swapped(softcap=0.0),
    "window: -2, expected": lambda: swapped(window=-2),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refuses(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        REFUSALS[message]()


def test_refuses_boundaries_that_are_no_integers():
    with pytest.raises(TypeError, match=r"^cu_seqlens_k: torch.float32, expected"):
        swapped(cu_seqlens_k=ends_of([4, 5], torch.float32))

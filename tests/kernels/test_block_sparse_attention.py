"""Block-sparse attention: both passes against float64, block masks, builders, tiles, refusals."""

import itertools
import math

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import block_sparse_attention as sparse
from kernels.block_sparse_attention import BlockMask
from kernels.block_sparse_attention_details import backward, walk
from kernels.block_sparse_attention_details.block_mask import BLOCK_SIZES
from tests.support.attention import oracle
from tests.support.values import DEVICE, few, randn

attend = sparse.block_sparse_attention
BOUND = {torch.float32: 4e-6, torch.float16: 4e-3}


def made(b, h, heads, sq, sk, d, dtype=torch.float32):
    sizes = ((h, sq), (heads, sk), (heads, sk))
    return [randn(b, n, s, d, dtype=dtype, seed=i) for i, (n, s) in enumerate(sizes)]


def kept(*shape, share=0.5, seed=5):
    """A random mask of blocks."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) < share


def expanded(mask, block, sq, sk):
    """The mask of entries, on the CPU."""
    wide = mask.cpu().repeat_interleave(block, -2).repeat_interleave(block, -1)
    return wide[..., :sq, :sk]


def near(name, ours, exact, dtype):
    """The numbers lie near those of the oracle, relative to the largest of these."""
    assert ours.shape == exact.shape and ours.isfinite().all(), name
    size = max(exact.abs().max().item(), 1e-3) if exact.numel() else 1
    worst = (ours.cpu().double() - exact).abs().amax().item() if ours.numel() else 0
    assert worst <= BOUND[dtype] * size, f"{name}: {worst / size:.1e}"


def agrees(q, k, v, mask, block, **options):
    """Output, lse and the gradients of q, k and v, by both results, are those of float64."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().cpu().double().requires_grad_() for x in (q, k, v)]
    out, lse = attend(*leaves, mask, block_size=block, return_lse=True, **options)
    dense = mask.to_dense() if isinstance(mask, BlockMask) else mask
    entries = expanded(dense, block, q.shape[2], k.shape[2])
    truth, truth_lse = oracle(*exact, mask=entries, **options)
    seen = truth_lse.isfinite()
    assert torch.equal(lse.isneginf().cpu(), ~seen) and not out.cpu()[~seen].any()
    near("out", out.detach(), truth.detach(), q.dtype)
    near("lse", lse.detach().cpu()[seen], truth_lse.detach()[seen], torch.float32)
    dout = randn(*out.shape, dtype=q.dtype, seed=7)
    # The logarithm of a row without a key is no function of anything.
    dlse = randn(*lse.shape, seed=8) * seen.to(DEVICE)
    grads = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    parts = (truth, truth_lse.where(seen, 0))
    truths = torch.autograd.grad(parts, exact, (dout.cpu().double(), dlse.cpu().double()))
    for name, grad, expected in zip("qkv", grads, truths, strict=True):
        near(f"d{name}", grad, expected, q.dtype)
    return out, grads


CALLS = {
    "one mask for all heads": ((2, 2, 2, 64, 64, 16), (2, 2), 32, {}),
    "a mask for each head": ((1, 4, 2, 64, 96, 16), (4, 2, 3), 32, {}),
    "a mask for each batch": ((2, 2, 1, 64, 64, 16), (2, 1, 2, 2), 32, {}),
    "a mask for each head of a batch": ((2, 2, 2, 64, 64, 16), (2, 2, 2, 2), 32, {"scale": 0.5}),
    "last blocks are shorter": ((1, 2, 1, 75, 83, 16), (2, 3, 3), 32, {}),
    "causal": ((1, 2, 2, 96, 96, 16), (2, 3, 3), 32, {"causal": True}),
    "causal, more keys": ((1, 2, 1, 50, 83, 16), (2, 2, 3), 32, {"causal": True}),
    "causal, more rows": ((1, 1, 1, 83, 50, 16), (3, 2), 32, {"causal": True}),
    "tiles are smaller than blocks": ((1, 1, 1, 150, 140, 16), (2, 2), 128, {"causal": True}),
}


@pytest.mark.parametrize("words", CALLS)
def test_agrees(words):
    sizes, shape, block, options = CALLS[words]
    agrees(*made(*sizes), kept(*shape, share=0.6), block, **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [64, 128])
def test_the_tiles_of_16_bits_agree(block, causal):
    tensors = made(1, 2, 1, 150, 270, 64, dtype=torch.float16)
    mask = kept(2, -(-150 // block), -(-270 // block), share=0.7)
    agrees(*tensors, mask, block, causal=causal)


@settings(few, max_examples=7)
@given(st.data())
def test_random_shapes_and_masks(data):
    b, heads, h = data.draw(st.sampled_from([(1, 1, 2), (2, 1, 1), (2, 2, 2), (1, 1, 1)]))
    sq, sk = data.draw(st.integers(1, 45)), data.draw(st.integers(1, 45))
    lead = data.draw(st.sampled_from([(), (1,), (h,), (1, h), (b, 1), (b, h)]))
    mask = kept(
        *lead, -(-sq // 16), -(-sk // 16),
        share=data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])), seed=data.draw(st.integers(0, 99)),
    )  # fmt: skip
    agrees(*made(b, h, heads, sq, sk, 16), mask, 16, causal=data.draw(st.booleans()))


# A compiled kernel holds the number that it was compiled with.
@pytest.mark.no_gpu
def test_a_list_longer_than_is_compared_at_once(monkeypatch):
    monkeypatch.setattr(walk, "AT_ONCE", tl.constexpr(4))
    rows, keys, values = made(1, 1, 1, 16, 16 * 11 - 3, 16)
    mask = kept(1, 11, share=0.9)
    assert mask.sum() > 4
    agrees(rows, keys, values, mask, 16, causal=True)
    agrees(keys, rows, rows.flip(2), mask.mT, 16)


def test_blocks_that_are_not_kept_are_neither_read_nor_given_a_gradient():
    q, k, v = made(1, 1, 1, 96, 96, 16)
    mask = torch.tensor([[1, 0, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool, device=DEVICE)
    expected, (_, dk, dv) = agrees(q, k, v, mask, 32)
    for x in (k, v):
        x[:, :, 32:64] = math.nan
    q[:, :, 32:64] = math.nan
    for x in (q, k, v):
        x.requires_grad_()
    out = attend(q, k, v, mask, block_size=32)
    assert torch.equal(out, expected)
    grads = torch.autograd.grad(out, (q, k, v), randn(*out.shape, seed=7))
    assert all(x[:, :, :32].isfinite().all() and x[:, :, 64:].isfinite().all() for x in grads)
    assert not dk[:, :, 32:64].any() and not dv[:, :, 32:64].any()


def test_a_causal_list_ends_at_the_diagonal():
    q, k, v = made(1, 1, 1, 96, 96, 16)
    mask = torch.ones(3, 3, dtype=torch.bool, device=DEVICE)
    expected = attend(q, k, v, mask.tril(), block_size=32, causal=True)
    k[:, :, 64:], v[:, :, 64:] = math.nan, math.nan
    out = attend(q, k, v, mask, block_size=32, causal=True)
    assert torch.equal(out[:, :, :64], expected[:, :, :64])


def test_a_block_mask_gives_the_bits_of_its_dense_mask_and_serves_many_calls():
    tensors, dense = made(2, 2, 1, 70, 90, 16), kept(2, 3, 3)
    mask = BlockMask.from_dense(dense, block_size=32)
    expected = [attend(*tensors, dense, block_size=32, causal=c) for c in (False, True)]
    dense.zero_()
    for causal, block_size in itertools.product((False, True), (None, 32)):
        again = attend(*tensors, mask, block_size=block_size, causal=causal)
        assert torch.equal(again, expected[causal])


def test_the_order_of_axes_in_memory_is_kept_and_copies_nothing(monkeypatch):
    q, k, v = made(2, 2, 1, 50, 60, 16)
    mask = BlockMask.from_dense(kept(2, 2), block_size=32)
    expected = attend(q, k, v, mask)
    tokens = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]

    def copies(*_):
        raise AssertionError("a tensor was copied")

    monkeypatch.setattr(torch.Tensor, "contiguous", copies)
    out = attend(*tokens, mask)
    assert torch.equal(out, expected) and out.stride() == tokens[0].stride()


def test_no_keys_no_rows_and_no_heads():
    mask = torch.ones(2, 0, dtype=torch.bool, device=DEVICE)
    out, lse = attend(*made(1, 2, 1, 30, 0, 16), mask, block_size=16, return_lse=True)
    assert not out.any() and lse.isneginf().all()
    out, lse = attend(*made(1, 2, 1, 0, 30, 16), mask.mT, block_size=16, return_lse=True)
    assert out.shape == (1, 2, 0, 16) and lse.shape == (1, 2, 0)
    q, k, v = (x.requires_grad_() for x in made(1, 2, 1, 0, 30, 16))
    grads = torch.autograd.grad(attend(q, k, v, mask.mT, block_size=16).sum(), (q, k, v))
    assert not any(grad.any() for grad in grads)


@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (2, 3, 4, 6), (1, 1, 1, 1)])
def test_the_lists_hold_the_kept_blocks_in_order(shape):
    dense = kept(*shape, share=0.4)
    mask = BlockMask.from_dense(dense)
    full = dense.view((1,) * (4 - dense.dim()) + dense.shape)
    assert mask.block_size == 128 and mask.shape == shape and mask.device == dense.device
    assert torch.equal(mask.to_dense(), dense)
    sides = (
        (full, mask.row_offsets, mask.row_indices, mask.row_order),
        (full.mT, mask.column_offsets, mask.column_indices, mask.column_order),
    )
    for side, offsets, indices, order in sides:
        assert {x.dtype for x in (offsets, indices, order)} == {torch.int32}
        lists = []
        for b, h in itertools.product(*map(range, side.shape[:2])):
            ends = offsets[b, h].tolist()
            for row, (first, last) in enumerate(itertools.pairwise(ends)):
                assert indices[first:last].tolist() == side[b, h, row].nonzero().flatten().tolist()
                lists += range(first, last)
            lengths = side[b, h].sum(-1)[order[b, h].long()].tolist()
            assert lengths == sorted(lengths, reverse=True)
            assert sorted(order[b, h].tolist()) == list(range(side.shape[2]))
        # Each kept block has a place of its own, and no place is left out.
        assert lists == list(range(int(dense.sum())))


def test_lists_are_made_without_a_wait_of_the_host():
    """On this device no number can be asked for."""
    mask = BlockMask.from_dense(torch.ones(2, 3, 4, dtype=torch.bool, device="meta"))
    assert mask.row_indices.shape == mask.column_indices.shape == (24,)
    assert mask.row_offsets.shape == (1, 2, 4) and mask.column_order.shape == (1, 2, 4)


BUILDERS = {
    "block_diagonal": ({"size": 2}, lambda p, j: p // 2 == j // 2),
    "local": ({"window": 1}, lambda p, j: -1 <= p - j <= 1),
    "strided": ({"stride": 3, "window": 1}, lambda p, j: abs(p - j) <= 1 or (p - j) % 3 == 0),
    "butterfly": ({}, lambda p, j: p == j or (p >= 0 and (p ^ j).bit_count() == 1)),
}


@pytest.mark.parametrize(("rows", "keys"), [(128, 128), (100, 170), (170, 100), (1, 40), (0, 5)])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_builder_keeps_the_blocks_that_it_says_and_has_room_for_no_other(name, rows, keys):
    options, keeps = BUILDERS[name]
    mask = getattr(BlockMask, name)(rows, keys, **options, block_size=16, device=DEVICE)
    m, n = -(-rows // 16), -(-keys // 16)
    told = [[keeps(i + n - m, j) for j in range(n)] for i in range(m)]
    expected = torch.tensor(told, dtype=torch.bool, device=DEVICE).view(m, n)
    assert torch.equal(mask.to_dense(), expected) and mask.block_size == 16
    assert mask.row_indices.numel() == mask.column_indices.numel() == expected.sum()


def test_a_built_mask_agrees():
    mask = BlockMask.butterfly(64, 75, block_size=16, device=DEVICE)
    agrees(*made(1, 1, 1, 64, 75, 16), mask, 16)


@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_tiles_fill_a_block_without_rest(block):
    rules = [(sparse.FORWARD, {}), (backward.DQ, {})]
    rules += [(backward.DKDV, {"tensor_memory": has}) for has in (False, True)]
    for (rule, more), d, itemsize, shared in itertools.product(
        rules, (16, 64, 96, 128, 256), (2, 4), (65536, 232448)
    ):
        config = rule.choose(d=d, itemsize=itemsize, block=block, shared=shared, **more)
        assert block % config["BLOCK_M"] == block % config["BLOCK_N"] == 0
        key = {"d": d, "itemsize": itemsize, "shared": shared, **more}
        assert config in rule.candidates and rule.suits(config, block=block, **key)
    assert not sparse.FORWARD.suits({"BLOCK_M": 2 * block, "BLOCK_N": 16}, block=block)


def small(mask, **options):
    return attend(*made(1, 2, 1, 40, 40, 16), mask, **options)


ONES = torch.ones(3, 3, dtype=torch.bool, device=DEVICE)
REFUSALS = {
    r"block_mask: shape \(3, 3\), expected \(1, 2, 1, 1\)": lambda: small(ONES),
    r"block_mask: shape \(3, 3, 3\), expected \(1, 2, 3, 3\)": lambda: small(
        ONES.expand(3, 3, 3), block_size=16
    ),
    r"block_mask: shape \(2, 1, 3, 3\), expected \(1, 2, 3, 3\)": lambda: small(
        ONES.expand(2, 1, 3, 3), block_size=16
    ),
    "block_mask: 1 dimensions, expected 2 to 4": lambda: small(ONES[0]),
    "block_size: 48, expected one of": lambda: small(ONES, block_size=48),
    "block_size: 32, expected 16 as block_mask has": lambda: small(
        BlockMask.from_dense(ONES, block_size=16), block_size=32
    ),
    "block_size: 24, expected one of": lambda: BlockMask.from_dense(ONES, block_size=24),
    f"block_mask: on meta, expected {DEVICE}": lambda: small(
        BlockMask.from_dense(ONES.to("meta"), block_size=16)
    ),
    "k: 2 heads, expected a number that divides the 3 of q": lambda: attend(
        *made(1, 3, 2, 40, 40, 16), ONES, block_size=16
    ),
    "scale: 0.0, expected": lambda: small(ONES, block_size=16, scale=0.0),
    "window: -1, expected": lambda: BlockMask.local(9, 9, -1),
    "stride: 0, expected": lambda: BlockMask.strided(9, 9, 0),
    "size: 0, expected": lambda: BlockMask.block_diagonal(9, 9, 0),
    "rows: -1, expected": lambda: BlockMask.butterfly(-1, 9),
}


@pytest.mark.parametrize("message", REFUSALS)
def test_refuses(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        REFUSALS[message]()


@pytest.mark.parametrize("mask", [ONES.int(), [[True]], None])
def test_refuses_a_mask_of_another_kind(mask):
    with pytest.raises(TypeError, match=r"^block_mask: .*, expected"):
        small(mask)

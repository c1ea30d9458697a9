"""Block-sparse attention's kernels for Hopper: on threads, and compiled for sm_90.

The threads (`tests/support/gluon_threads.py`) run the kernels' own Python with late products, so
they check lists, masks, orders of barriers and numbers. They know no layout and no register.
"""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.experimental.gluon import language as gl

from kernels import block_sparse_attention as sparse
from kernels._runtime.device import assume_device
from kernels.attention_details import forward_hopper as dense
from kernels.attention_details.launch import like
from kernels.block_sparse_attention import BlockMask, block_sparse_attention
from kernels.block_sparse_attention_details import backward_hopper, forward_hopper, lists_hopper
from tests.support import hopper_build
from tests.support.attention import oracle, rounded
from tests.support.gluon_threads import StuckError, on_threads
from tests.support.values import close, differs, few, randn

# Batch, heads, key heads, rows, keys, leading sizes of the mask, block, causal, share of blocks.
SHAPES = [
    (1, 2, 2, 512, 512, (), 128, False, 0.5),
    (1, 2, 1, 512, 512, (2,), 128, True, 0.6),
    (2, 2, 2, 300, 400, (2, 2), 128, False, 0.5),
    (2, 2, 1, 300, 457, (2, 1), 128, True, 0.7),
    (1, 3, 1, 457, 203, (1, 3), 128, True, 0.6),
    (1, 1, 1, 200, 700, (), 256, False, 1.0),
    (1, 2, 2, 600, 600, (2,), 256, True, 0.8),
    (1, 1, 1, 600, 130, (), 256, True, 1.0),
    (1, 2, 2, 260, 260, (), 128, False, 0.0),
    (1, 4, 2, 70, 900, (4,), 128, True, 0.4),
]


def made(b, h, heads, sq, sk, lead, block, share):
    """q, k and v in float16, and a random mask of blocks."""
    generator = torch.Generator().manual_seed(sq + 7 * sk)
    sizes = ((h, sq), (heads, sk), (heads, sk))
    tensors = [torch.randn(b, n, s, 64, generator=generator).half() for n, s in sizes]
    shape = (*lead, -(-sq // block), -(-sk // block))
    return *tensors, torch.rand(shape, generator=generator) < share


def forward_of(q, k, v, mask, block, causal, config, **broken):
    """The result, lse and statistics of the kernel on threads, on memory that holds no numbers."""
    out = torch.full_like(like(q), float("nan"))
    lse = torch.full(q.shape[:3], float("nan"))
    stats = lse.clone()[None]
    lists = BlockMask.from_dense(mask, block_size=block)
    with assume_device(sm_count=3), on_threads(forward_hopper, **broken):
        forward_hopper.forward_hopper(
            q, k, v, out, lse, stats, lists.row_offsets, lists.row_indices, lists.row_order,
            block, 0.125, causal, config,
        )  # fmt: skip
    return out, lse, stats


def grads_of(q, k, v, mask, block, causal, config, out, lse, dout, dlse, **broken):
    """The gradients of q, k and v by the kernels on threads, from results in float64."""
    stats = torch.where(lse.isneginf(), math.inf, lse / math.log(2)).float()[None]
    lists = BlockMask.from_dense(mask, block_size=block)
    with on_threads(backward_hopper, **broken):
        return backward_hopper.backward_hopper(
            q, k, v, out.half(), stats, dout, dlse, lists.column_offsets, lists.column_indices,
            lists.column_order, block, 0.125, causal, config,
        )  # fmt: skip


def exact(q, k, v, mask, block, causal, scale=0.125):
    """The result and lse in float64."""
    wide = mask.repeat_interleave(block, -2).repeat_interleave(block, -1)
    entries = wide[..., : q.shape[2], : k.shape[2]]
    return oracle(*(x.double() for x in (q, k, v)), mask=entries, causal=causal, scale=scale)


def agrees(shape, config):
    b, h, heads, sq, sk, lead, block, causal, share = shape
    q, k, v, mask = made(b, h, heads, sq, sk, lead, block, share)
    truth, truth_lse = exact(q, k, v, mask, block, causal)
    out, lse, stats = forward_of(q, k, v, mask, block, causal, config)
    seen = truth_lse.isfinite()
    assert differs(out, truth) < 5e-4 and not out[~seen].any()
    assert torch.equal(lse.isneginf(), ~seen) and torch.equal(stats[0].isposinf(), ~seen)
    if seen.any():
        close(lse[seen], truth_lse[seen], torch.float32)
        close(stats[0][seen] * math.log(2), truth_lse[seen], torch.float32)


@pytest.mark.no_gpu
@pytest.mark.parametrize("config", forward_hopper.CONFIGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_forward_pass_on_threads_is_that_of_float64(shape, config):
    agrees(shape, config)


# All shapes with one configuration, some with the others.
BACKWARD = [(shape, 0) for shape in SHAPES] + [
    (SHAPES[n], i) for n in (3, 5, 6) for i in (1, 2, 3, 4)
]


@pytest.mark.no_gpu
@pytest.mark.parametrize(("shape", "config"), BACKWARD)
def test_the_backward_pass_on_threads_is_that_of_float64(shape, config):
    config = backward_hopper.CONFIGS[config]
    b, h, heads, sq, sk, lead, block, causal, share = shape
    q, k, v, mask = made(b, h, heads, sq, sk, lead, block, share)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = exact(*leaves, mask, block, causal)
    seen = lse.isfinite()
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).half()
    dlse = torch.linspace(-1, 1, lse.numel()).view(lse.shape) * seen
    results = out, lse.where(seen, 0)
    truths = torch.autograd.grad(results, leaves, (dout.double(), dlse.double()))
    grads = grads_of(q, k, v, mask, block, causal, config, out.detach(), lse.detach(), dout, dlse)
    for x, grad, truth in zip((q, k, v), grads, truths, strict=True):
        assert grad.dtype == x.dtype and grad.stride() == like(x).stride()
        assert differs(grad, truth) < 1e-3


@pytest.mark.no_gpu
def test_a_list_longer_than_is_compared_at_once(monkeypatch):
    monkeypatch.setattr(lists_hopper, "AT_ONCE", gl.constexpr(2))
    agrees((1, 1, 1, 128, 128 * 9 - 3, (), 128, True, 0.9), forward_hopper.CONFIGS[0])


@pytest.mark.no_gpu
def test_keys_that_are_not_kept_are_not_read():
    q, k, v, _ = made(1, 1, 1, 384, 384, (), 128, 1.0)
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 0, 0]], dtype=torch.bool)
    expected, _, _ = forward_of(q, k, v, mask, 128, True, forward_hopper.CONFIGS[0])
    for x in (k, v):
        x[:, :, 128:256] = math.nan
    found, _, _ = forward_of(q, k, v, mask, 128, True, forward_hopper.CONFIGS[0])
    assert found.isfinite().all() and torch.equal(found, expected)


@pytest.mark.no_gpu
def test_the_counter_of_tiles_is_zero_again(monkeypatch):
    counters = []

    def counter(device):
        counters.append(torch.zeros(1, dtype=torch.int32))
        return counters[-1]

    monkeypatch.setattr(forward_hopper, "arrival_counter", counter)
    for heads, rows in ((2, 500), (1, 100)):
        q, k, v, mask = made(1, heads, heads, rows, rows, (), 128, 0.5)
        forward_of(q, k, v, mask, 128, True, forward_hopper.CONFIGS[0])
    assert [each.item() for each in counters] == [0, 0]


# The sets of barriers of the kernel, in its order.
WAITS = ["q full", "told", "k full", "k free", "v full", "v free", "read"]


@pytest.mark.no_gpu
@pytest.mark.parametrize("which", range(len(WAITS)), ids=WAITS)
def test_a_wait_that_is_left_out_is_found(which):
    """Each wait of the kernel is needed."""
    q, k, v, mask = made(1, 8, 8, 600, 600, (8,), 128, 0.4)
    truth, _ = exact(q, k, v, mask, 128, False)
    found = None
    # Threads that happen to run in order hide it; the first disorder ends the search.
    for _ in range(40):
        try:
            out, _, _ = forward_of(
                q, k, v, mask, 128, False, forward_hopper.CONFIGS[0], unwaited=which, patience=2.0
            )
        except (AssertionError, StuckError) as error:
            found = error
        else:
            found = not differs(out, truth) < 5e-4
        if found:
            break
    assert found


# Those of the backward kernel.
BACKWARD_WAITS = ["kv full", "q full", "dout full", "free"]


@pytest.mark.no_gpu
@pytest.mark.parametrize("which", range(len(BACKWARD_WAITS)), ids=BACKWARD_WAITS)
def test_a_wait_of_the_backward_pass_that_is_left_out_is_found(which):
    q, k, v, mask = made(1, 4, 2, 600, 600, (4,), 128, 0.7)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = exact(*leaves, mask, 128, False)
    truths = torch.autograd.grad(out, leaves, out)
    results = out.detach(), lse.detach(), out.detach().half(), None
    config, found = backward_hopper.CONFIGS[0], None
    for _ in range(40):
        try:
            grads = grads_of(
                q, k, v, mask, 128, False, config, *results, unwaited=which, patience=2.0
            )
        except (AssertionError, StuckError) as error:
            found = error
        else:
            pairs = zip(grads, truths, strict=True)
            found = not all(differs(grad, truth) < 1e-3 for grad, truth in pairs)
        if found:
            break
    assert found


@pytest.fixture(scope="module")
def built():
    return hopper_build.built("sparse")


@pytest.mark.slow
@pytest.mark.no_gpu
def test_the_binaries_use_the_tensor_cores_and_wait_where_they_are_told(built):
    assert len(built) == 8
    for name, row in built.items():
        hopper_build.check(name, row)
        if "forward" in name:
            assert row["spill_stores"] == row["spill_loads"] == 0, name


@pytest.mark.no_gpu
def test_the_public_function_takes_these_kernels():
    q, k, v, mask = made(1, 4, 2, 300, 400, (4,), 128, 0.6)
    truths = [x.double().requires_grad_() for x in (q, k, v)]
    truth, _ = exact(*truths, mask, 128, True, scale=None)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(3)).half()
    expected = torch.autograd.grad(truth, truths, dout.double())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with (
        # No interpreter has Hopper's instructions.
        mock.patch.object(dense, "is_hopper", lambda device: True),
        assume_device(sm_count=3),
        on_threads(forward_hopper),
        on_threads(backward_hopper),
        mock.patch.object(sparse.FORWARD.kernel, "run", side_effect=AssertionError),
        mock.patch.object(sparse.DQ.kernel, "run", side_effect=AssertionError),
    ):
        out = block_sparse_attention(*leaves, mask, causal=True)
        grads = torch.autograd.grad(out, leaves, dout)
    assert differs(out.detach(), truth.detach()) < 5e-4
    assert all(differs(grad, each) < 1e-3 for grad, each in zip(grads, expected, strict=True))


@pytest.mark.no_gpu
@pytest.mark.parametrize("block", [64, 128, 256])
def test_hopper_takes_blocks_that_its_tiles_fill(block):
    q = torch.empty(1, 2, 512, 64, dtype=torch.bfloat16, device="meta")
    with assume_device(hopper=True):
        assert forward_hopper.suits(q, q, q, block) == (block >= 128)
        assert not forward_hopper.suits(q.float(), q.float(), q.float(), block)


@pytest.mark.hopper
@few
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 1500), st.integers(1, 1500)),
    st.sampled_from([64, 128]),
    st.sampled_from([128, 256]),
    st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    st.booleans(),
)
def test_random_shapes_on_a_gpu(heads, lengths, d, block, share, causal):
    (b, key_heads, group), (sq, sk) = heads, lengths
    sizes = ((key_heads * group, sq), (key_heads, sk), (key_heads, sk), (key_heads * group, sq))
    q, k, v, dout = (
        randn(b, h, s, d, dtype=torch.bfloat16, seed=i) for i, (h, s) in enumerate(sizes)
    )
    generator = torch.Generator().manual_seed(sq + sk)
    mask = torch.rand(q.shape[1], -(-sq // block), -(-sk // block), generator=generator) < share
    assert forward_hopper.suits(q, k, v, block)
    truths = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    truth, _ = exact(*truths, mask, block, causal, scale=None)
    expected = torch.autograd.grad(truth, truths, dout.cpu().double())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = block_sparse_attention(*leaves, mask.to(q.device), block_size=block, causal=causal)
    grads = torch.autograd.grad(out, leaves, dout)
    for ours, exactly in zip((out, *grads), (truth, *expected), strict=True):
        assert rounded(ours, exactly, dout)


@pytest.mark.hopper
@pytest.mark.parametrize("d", [64, 128])
def test_a_hundred_runs_give_the_same_result(d):
    q, k, v = (randn(2, 8, 1100, d, dtype=torch.bfloat16, seed=i) for i in range(3))
    mask = torch.rand(8, 9, 9, generator=torch.Generator().manual_seed(1)).to(q.device) < 0.5
    lists = BlockMask.from_dense(mask)
    first = block_sparse_attention(q, k, v, lists, causal=True)
    assert all(
        torch.equal(first, block_sparse_attention(q, k, v, lists, causal=True)) for _ in range(100)
    )

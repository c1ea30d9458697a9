"""Attention's kernels for Hopper: on threads, compiled for sm_90, and on a GPU if there is one.

The threads (`tests/support/gluon_threads.py`) run the kernels' own Python with late products, so
they check masks, ends, orders of barriers and numbers. They know no layout and no register.
"""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.build.recorder import recorded
from kernels import attention
from kernels._runtime.device import assume_device
from kernels.attention_details import backward_hopper, forward_hopper
from kernels.attention_details.forward_hopper import DEEP, PAIR, SHORT, TRIPLE
from kernels.attention_details.launch import like
from tests.support import hopper_build
from tests.support.attention import oracle, rounded
from tests.support.gluon_threads import StuckError, on_threads
from tests.support.values import close, differs, few, randn

FORWARD = "forward_hopper_kernel"
# Batch, heads, key heads, rows, keys, window (None: no bound), whether heads lie between tokens.
SHAPES = [
    (1, 2, 2, 256, 256, (None, None), False),
    (2, 4, 2, 384, 384, (None, 0), False),
    (1, 3, 1, 203, 457, (None, None), True),
    (1, 4, 2, 457, 203, (None, 0), True),
    (2, 2, 1, 70, 600, (None, 0), False),
    (1, 1, 1, 1, 130, (None, 0), False),
    (1, 2, 2, 700, 700, (130, 0), False),
    (1, 2, 1, 333, 500, (64, 100), True),
    (1, 1, 1, 300, 300, (None, 40), False),
    (1, 2, 1, 256, 512, (None, 0), False),
    (2, 2, 2, 512, 512, (None, 0), True),
    (1, 2, 2, 384, 256, (None, 0), False),
    (1, 2, 2, 384, 384, (200, 0), False),
]


def made(b, h, heads, sq, sk, between, d=64):
    """q, k, v and the gradient of the result, in float16; heads may lie between the tokens."""
    generator = torch.Generator().manual_seed(sq + 7 * sk)

    def one(count, length):
        shape = (b, length, count, d) if between else (b, count, length, d)
        x = torch.randn(shape, generator=generator).half()
        return x.transpose(1, 2) if between else x

    return one(h, sq), one(heads, sk), one(heads, sk), one(h, sq)


def exact(q, k, v, bounds, dout):
    """The result, lse and the gradients in float64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    window = tuple(-1 if size is None else size for size in bounds)
    out, lse = oracle(*leaves, window=window)
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, dout.double())


def forward_of(q, k, v, bounds, config, **broken):
    """The result, lse and statistics of the kernel on threads, on memory that holds no numbers."""
    out = torch.full_like(like(q), float("nan"))
    lse = torch.full(q.shape[:3], float("nan"))
    stats = lse.clone()[None]
    with assume_device(sm_count=3), on_threads(forward_hopper, **broken):
        scale = q.shape[3] ** -0.5
        forward_hopper.forward_hopper(q, k, v, out, lse, stats, scale, *bounds, config)
    return out, lse, stats


@pytest.mark.no_gpu
@pytest.mark.parametrize("config", forward_hopper.CONFIGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_forward_pass_on_threads_is_that_of_float64(shape, config):
    *sizes, bounds, between = shape
    q, k, v, dout = made(*sizes, between)
    truth, truth_lse, _ = exact(q, k, v, bounds, dout)
    out, lse, stats = forward_of(q, k, v, bounds, config)
    assert differs(out, truth) < 5e-4
    seen = truth_lse.isfinite()
    assert torch.equal(lse.isneginf(), ~seen) and torch.equal(stats[0].isposinf(), ~seen)
    close(lse[seen], truth_lse[seen], torch.float32)
    close(stats[0][seen] * math.log(2), truth_lse[seen], torch.float32)


# Width of heads, heads, key heads, rows, keys, window; then the tiles that the rule takes, and
# which of LEFT, RIGHT, WHOLE and DIAGONAL hold.
FORMS = {
    "square": (64, 2, 2, 512, 512, (None, 0), DEEP, "RIGHT DIAGONAL"),
    "square, grouped heads, more keys": (64, 4, 2, 256, 512, (None, 0), DEEP, "RIGHT DIAGONAL"),
    "square, ragged": (64, 2, 2, 333, 333, (None, 0), DEEP, "RIGHT DIAGONAL"),
    "square, window": (64, 2, 2, 384, 384, (200, 0), DEEP, "LEFT RIGHT DIAGONAL"),
    "square, wide": (128, 2, 1, 384, 384, (None, 0), PAIR, "RIGHT DIAGONAL"),
    "no square": (64, 4, 2, 256, 264, (None, 0), DEEP, "RIGHT"),
    "no square, window": (64, 2, 2, 384, 384, (200, 30), DEEP, "LEFT RIGHT"),
    "no square, wide": (128, 2, 2, 256, 300, (None, 0), SHORT, "RIGHT"),
    "no square, wide, long": (128, 1, 1, 200, 1100, (None, 0), PAIR, "RIGHT"),
    "full": (64, 4, 2, 300, 512, (None, None), PAIR, "WHOLE"),
    "full, ragged": (64, 2, 2, 333, 333, (None, None), PAIR, ""),
    "full, wide": (128, 2, 2, 300, 384, (None, None), PAIR, "WHOLE"),
    "full, long": (64, 2, 2, 400, 2048, (None, None), TRIPLE, "WHOLE"),
}


@pytest.mark.no_gpu
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_the_rule_is_taken_and_right(form):
    d, h, heads, sq, sk, bounds, config, holds = FORMS[form]
    q, k, v, dout = made(1, h, heads, sq, sk, False, d)
    with recorded() as calls:
        window = tuple(-1 if size is None else size for size in bounds)
        attention.attention(*(x.to("meta") for x in (q, k, v)), window=window)
    [(kernel, given, _)] = calls
    assert kernel.fn.__name__ == FORWARD
    assert {name: given[name] for name in config} == config and config in forward_hopper.CONFIGS
    flags = ("LEFT", "RIGHT", "WHOLE", "DIAGONAL")
    assert [name for name in flags if given[name]] == holds.split()
    truth, _, _ = exact(q, k, v, bounds, dout)
    assert differs(forward_of(q, k, v, bounds, config)[0], truth) < 5e-4


@pytest.mark.no_gpu
@pytest.mark.parametrize("config", backward_hopper.CONFIGS)
@pytest.mark.parametrize(("shape", "d"), [*((x, 64) for x in SHAPES), (SHAPES[1], 128)])
def test_the_backward_pass_on_threads_is_that_of_float64(shape, d, config):
    *sizes, bounds, between = shape
    q, k, v, dout = made(*sizes, between, d)
    out, lse, truths = exact(q, k, v, bounds, dout)
    stats = torch.where(lse.isneginf(), math.inf, lse / math.log(2)).float()[None]
    with on_threads(backward_hopper):
        grads = backward_hopper.backward_hopper(
            q, k, v, out.half(), stats, dout, None, d**-0.5, *bounds, config
        )
    for x, grad, truth in zip((q, k, v), grads, truths, strict=True):
        assert grad.dtype == x.dtype and grad.stride() == like(x).stride()
        assert differs(grad, truth) < 1e-3


@pytest.mark.no_gpu
@pytest.mark.parametrize("spread", [False, True])
def test_the_gradient_of_lse_enters_by_delta(spread):
    """A sum over lse gives a gradient that is one number, spread over all rows."""
    q, k, v, dout = made(1, 2, 2, 100, 100, False)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = oracle(*leaves)
    dlse = torch.linspace(-1, 1, lse.numel()).view(lse.shape)
    if spread:
        dlse = torch.tensor(0.7).expand(lse.shape)
    truths = torch.autograd.grad((out, lse), leaves, (dout.double(), dlse.double()))
    stats = (lse / math.log(2)).float().detach()[None]
    with on_threads(backward_hopper):
        grads = backward_hopper.backward_hopper(
            q, k, v, out.detach().half(), stats, dout, dlse, 0.125, None, None,
            backward_hopper.CONFIGS[0],
        )  # fmt: skip
    assert all(differs(grad, truth) < 1e-3 for grad, truth in zip(grads, truths, strict=True))


@pytest.mark.no_gpu
def test_the_counter_of_tiles_is_zero_again():
    counters = []

    def counter(device):
        counters.append(torch.zeros(1, dtype=torch.int32))
        return counters[-1]

    q, k, v, _ = made(2, 2, 2, 500, 500, False)
    with mock.patch.object(forward_hopper, "arrival_counter", counter):
        forward_of(q, k, v, (None, 0), forward_hopper.CONFIGS[0])
        forward_of(q, k, v, (None, None), forward_hopper.CONFIGS[0])
    assert [each.item() for each in counters] == [0]


# The sets of barriers of the forward kernel, in its order.
WAITS = ["q full", "q free", "k full", "k free", "v full", "v free"]


@pytest.mark.no_gpu
@pytest.mark.parametrize("which", range(len(WAITS)), ids=WAITS)
def test_a_wait_that_is_left_out_is_found(which):
    """Each wait of the forward kernel is needed."""
    heads, rows, bounds = 8, 600, (None, 0)
    if WAITS[which] == "q free":
        # Rows are loaded two tiles ahead, if the tiles have few keys and no counter hands them out.
        heads, rows, bounds = 24, 100, (None, None)
    q, k, v, dout = made(1, heads, heads, rows, rows, False)
    truth, _, _ = exact(q, k, v, bounds, dout)
    found = None
    # Threads that happen to run in order hide it; the first disorder ends the search.
    for _ in range(40):
        try:
            out, _, _ = forward_of(
                q, k, v, bounds, forward_hopper.CONFIGS[0], unwaited=which, patience=2.0
            )
        except (AssertionError, StuckError) as error:
            found = error
        else:
            found = not differs(out, truth) < 5e-4
        if found:
            break
    assert found


@pytest.fixture(scope="module")
def built():
    return hopper_build.built("dense")


@pytest.mark.slow
@pytest.mark.no_gpu
def test_the_binaries_use_the_tensor_cores_and_wait_where_they_are_told(built):
    assert len(built) == 16
    for name, row in built.items():
        hopper_build.check(name, row)
        if name.startswith(f"{FORWARD} 128"):
            assert row["spill_stores"] == row["spill_loads"] == 0, name
        if name.startswith(FORWARD):
            # Under a square on the diagonal no loop over keys has code for a mask.
            masked = any("mask" in x for x in hopper_build.steady(row))
            assert masked == (" None None " not in name and " None 0 4096 0" not in name), name


@pytest.mark.hopper
@few
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 1500),
    # Keys without a relation to rows, or such that they end in a square on the diagonal.
    st.integers(1, 1500) | st.sampled_from(["+0", "+128", "+640"]),
    st.sampled_from([64, 128]),
    st.sampled_from([None, 100, (300, 20), (-1, 30)]),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_random_shapes_on_a_gpu(heads, sq, keys, d, window, causal, dtype):
    b, key_heads, group = heads
    sk = sq + int(keys) if isinstance(keys, str) else keys
    q, k, v, dout = (
        randn(b, h, s, d, dtype=dtype, seed=i).requires_grad_(i < 3)
        for i, (h, s) in enumerate(
            ((key_heads * group, sq), (key_heads, sk), (key_heads, sk), (key_heads * group, sq))
        )
    )
    assert forward_hopper.suits(q, k, v)
    truths = [x.detach().double().requires_grad_() for x in (q, k, v)]
    mask = None
    truth, lse_truth = oracle(*(x.cpu() for x in truths), causal=causal, window=window, mask=mask)
    out, lse = attention.attention(q, k, v, causal=causal, window=window, return_lse=True)
    # Products of 16-bit numbers are exact in float32. Sums of up to 128 of them, below 100, are off
    # by some 1e-5.
    assert torch.allclose(lse.double().cpu(), lse_truth.detach(), rtol=0, atol=1e-4)
    expected = torch.autograd.grad(truth, truths, dout.detach().cpu().double())
    grads = torch.autograd.grad(out, (q, k, v), dout.detach())
    for ours, exactly in zip((out, *grads), (truth, *expected), strict=True):
        assert rounded(ours, exactly, dout)


@pytest.mark.hopper
@pytest.mark.parametrize("d", [64, 128])
def test_a_hundred_deterministic_runs_give_the_same_bits(d):
    q, k, v, dout = (randn(2, 8, 1100, d, dtype=torch.bfloat16, seed=i) for i in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def run():
        out = attention.attention(*leaves, causal=True)
        return (out, *torch.autograd.grad(out, leaves, dout))

    torch.use_deterministic_algorithms(True)
    try:
        first = run()
        assert all(torch.equal(a, b) for _ in range(100) for a, b in zip(first, run(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)

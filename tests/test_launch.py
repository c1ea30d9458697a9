"""A call that is known starts the kernel that Triton would start, and no other."""

import math

import pytest
import torch
import triton
import triton.language as tl
from fake_gpu import GPU, on_gpu
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from triton import knobs
from triton.runtime.jit import JITFunction

from harness import nvml
from kernels import _launch
from kernels._launch import launch, needs_grad
from kernels._plan import width

gpu = pytest.mark.skipif(not nvml.gpus(), reason="needs a GPU")


# Without a GPU other tests need the interpreter; here the kernel is Triton's own, and not run.
@JITFunction
def _fill_kernel(out_ptr, start, step, N, LEFT: tl.constexpr, BLOCK_N: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs >= LEFT) & (offs < N)
    value = start + tl.cast(step, tl.int64) * offs.to(tl.int64)
    tl.store(out_ptr + offs, value.to(out_ptr.dtype.element_ty), mask=mask)


_seeded_kernel = JITFunction(_fill_kernel.fn, do_not_specialize=["start"])


@JITFunction
def _add_kernel(out_ptr, start, N, BLOCK_N: tl.constexpr):
    offs = tl.arange(0, BLOCK_N)
    tl.store(out_ptr + offs, tl.load(start) + offs, mask=offs < N)


_loaded_kernel = JITFunction(_add_kernel.fn, do_not_specialize=["start"])


def fill(out, start=0, step=1.0, left=0, kernel=_fill_kernel, **options):
    launch(
        kernel, (triton.cdiv(out.numel(), 256),),
        out_ptr=out, start=start, step=step, N=out.numel(), LEFT=left, BLOCK_N=256, **options,
    )  # fmt: skip
    return out


@pytest.fixture
def started(monkeypatch):
    """Counts what is looked up by Triton."""
    calls = []
    run = _launch._run

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return run(*args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", counted)
    monkeypatch.setattr(_launch, "_run", counted)
    _launch._calls.clear()
    yield calls
    _launch._calls.clear()


@gpu
def test_a_known_call_asks_triton_nothing(started):
    for start in (3, 3, 3):
        out = fill(torch.full((1000,), -1.0, device="cuda"), start, 2.0)
        assert torch.equal(out, 3 + 2.0 * torch.arange(1000, device="cuda"))
    assert len(started) == 1
    fill(out, 3, 5.0)
    assert out[7] == 38 and len(started) == 2


@gpu
@pytest.mark.parametrize(
    "start", [0, 1, 2, 15, 16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40]
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_kernel_fits_the_arguments(start, dtype, first):
    for n in (1, 16, 255, 1000):
        for _ in range(2):
            room = torch.full((n + first,), -1, dtype=dtype, device="cuda")
            expected = start + torch.arange(n, device="cuda").to(dtype)
            assert torch.equal(fill(room[first:], start, 1.0), expected)
            assert (room[:first] == -1).all()


@gpu
def test_constants_and_options_are_told_apart(started):
    out = torch.zeros(100, device="cuda")
    fill(out, left=50, num_warps=4)
    fill(out, left=50, num_warps=8)
    fill(out, left=98, num_warps=8)
    assert len(started) == 3 and out[50] == 50


@gpu
def test_a_seed_needs_no_kernel_of_its_own(started):
    out = torch.zeros(100, device="cuda", dtype=torch.int64)
    for seed in (5, 1, 16, 12345, 2**31 - 1):
        assert fill(out, seed, kernel=_seeded_kernel)[0] == seed
    assert len(started) == 1
    assert fill(out, 2**33, kernel=_seeded_kernel)[0] == 2**33
    assert len(started) == 2


@gpu
def test_a_captured_graph_holds_the_call():
    out = torch.zeros(100, device="cuda")
    fill(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fill(out)
    out.zero_()
    graph.replay()
    assert out[99] == 99


@gpu
def test_ever_new_sizes_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(_launch, "MOST_CALLS", 4)
    for n in range(1, 20):
        fill(torch.zeros(n, device="cuda"))
    assert len(_launch._calls) <= 4


@given(st.integers(-(2**63), 2**64 - 1))
def test_the_width_of_a_number_is_what_triton_takes_it_for(value):
    names = {"i32": 0, "i64": 1, "u64": 2}
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    found = native_specialize_impl(BaseBackend, value, False, False, False)
    assert names[found[0]] == width(value)


@pytest.fixture
def stubbed(monkeypatch):
    return GPU(monkeypatch)


def test_ever_new_floats_start_one_kernel_without_triton(stubbed):
    for step in (2.5, 1.5, -1.0, math.nan, math.nan, 0.0):
        fill(on_gpu(100), 3, step)
    assert len(stubbed.asked) == 1
    assert [handed[15] for handed in stubbed.begun][:2] == [1.5, -1.0]
    fill(on_gpu(100), 3, 2)
    assert len(stubbed.asked) == 2


def test_a_bool_has_a_kernel_of_its_own(stubbed):
    for start in (True, 5, 6, True):
        fill(on_gpu(100), start, kernel=_seeded_kernel)
    assert len(stubbed.asked) == 2 and [handed[14] for handed in stubbed.begun] == [6, True]


def test_a_tensor_without_an_address_is_refused_though_its_like_is_known(stubbed):
    fill(on_gpu(100))
    with FakeTensorMode():
        fake = torch.empty(100, device="cuda")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out: on cuda:0 without an address \(FakeTensor\)"):
            fill(fake)
    assert len(stubbed.asked) == 1


def test_an_empty_tensor_is_not_what_others_are_known_by(stubbed):
    fill(on_gpu(0))
    fill(on_gpu(0))
    assert len(stubbed.asked) == 2 and not stubbed.begun


@pytest.mark.parametrize("place", ["launch_enter_hook", "launch_exit_hook"])
def test_triton_is_asked_where_its_hooks_watch(stubbed, place):
    fill(on_gpu(100))
    hook = getattr(knobs.runtime, place)
    hook.add(print)
    try:
        fill(on_gpu(100))
    finally:
        hook.remove(print)
    assert len(stubbed.asked) == 2 and stubbed.asked == [0, 0]
    fill(on_gpu(100))
    assert len(stubbed.begun) == 1


def test_a_launcher_of_triton_in_another_order_is_left_to_triton(stubbed, monkeypatch):
    monkeypatch.setattr(_launch.internals, "launches_in_order", lambda launcher: False)
    for count in (1, 2):
        fill(on_gpu(100))
        assert len(stubbed.asked) == count


def test_a_tensor_by_another_name_is_refused():
    with pytest.raises(TypeError, match="start is a tensor, name it start_ptr"):
        fill(torch.zeros(4), start=torch.zeros(1))


@gpu
def test_equal_numbers_of_two_types_are_told_apart():
    for step in (2, 2.0, 2, 1.0, 1, 1.0):
        assert fill(torch.zeros(100, device="cuda"), 0, step)[50] == 50 * step


@gpu
def test_a_seed_may_lie_on_the_gpu():
    out, seed = torch.zeros(100, device="cuda", dtype=torch.int64), torch.tensor(7, device="cuda")
    launch(_loaded_kernel, (1,), out_ptr=out, start=seed, N=100, BLOCK_N=128)
    assert out[3] == 10
    launch(_loaded_kernel, (1,), out_ptr=out, start=seed + 1, N=100, BLOCK_N=128)
    assert out[3] == 11


def test_a_backward_pass_is_wanted_where_an_input_asks_for_one():
    x, weight = torch.zeros(2), torch.zeros(2, requires_grad=True)
    assert needs_grad(x, None, weight) and not needs_grad(x, None)
    with torch.no_grad():
        assert not needs_grad(weight)

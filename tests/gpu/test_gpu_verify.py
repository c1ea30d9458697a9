"""Check verification on a real GPU: memory of C++ libraries, and streams."""

import pytest
import torch
import triton

from harness.calls import guards
from harness.machine import gpu_lock
from harness.project import registry
from harness.verify import check
from harness.verify import problem as oracle
from ops._spec import Cost, Op, Tensor, make_case

tl = triton.language
pytestmark = pytest.mark.gpu
# Bound before any function is replaced, as an allocation in C++ is.
EMPTY_LIKE = torch.empty_like
# 4000 bytes in float32: the allocator rounds to 4096.
N = 1000
DOUBLE = Op(
    "double",
    lambda x: x * 2,
    {"x": Tensor("N")},
    lambda *a: Cost(0, 0, 0),
    edge=(),
    sweep=(),
    passes=("forward", "backward"),
)


@triton.jit
def _double_kernel(x_ptr, out_ptr, N, WRITTEN, BLOCK_N: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + offs, mask=offs < N, other=0.0)
    tl.store(out_ptr + offs, x * 2, mask=offs < WRITTEN)


@pytest.fixture(scope="module", autouse=True)
def leased():
    with gpu_lock.hold(exclusive=False):
        yield


def found(function, ours, pass_="forward", n=N):
    op, case = DOUBLE, make_case(N=n)
    problem = oracle.problem(op, case, "float32", 1, "cuda", op.reference)
    return check.check(function, problem, pass_, ours)


def kernel(ours, beyond):
    """Doubles by a kernel that writes `beyond` elements more than there are."""

    def double(x):
        out = torch.empty_like(x) if ours else EMPTY_LIKE(x)
        n = x.numel()
        _double_kernel[(triton.cdiv(n + 1, 128),)](x, out, n, n + beyond, BLOCK_N=128)
        return out

    return double


@pytest.mark.parametrize(
    ("ours", "beyond", "reason"),
    [
        (True, 0, ""),
        (False, 0, ""),
        (True, -1, "out has inf or NaN where the oracle has none, or none where it has"),
        (False, -1, "out has inf or NaN where the oracle has none, or none where it has"),
        (True, 1, f"writes past the end of an output or a workspace of {4 * N} bytes"),
        (False, 1, f"writes past the end of an output of {4 * N} bytes"),
    ],
)
def test_a_kernel_that_writes_too_little_or_too_much(ours, beyond, reason):
    finding = found(kernel(ours, beyond), ours)
    assert finding.reason == reason
    assert finding.deterministic is (None if reason else True)


@pytest.mark.parametrize("n", [N, 2**20 + 3, 2**25])
def test_memory_from_the_cache_is_nan(n):
    found(kernel(False, 0), ours=False, n=n)
    finding = found(lambda x: EMPTY_LIKE(x), ours=False, n=n)
    assert finding.reason.startswith("out has inf or NaN")


@pytest.mark.parametrize("pass_", DOUBLE.passes)
@pytest.mark.parametrize("n", [1, N, 2**22 + 1])
def test_right_implementations_pass_with_any_allocator(n, pass_):
    def with_workspace(x):
        return (torch.cat([x, x]) * 2)[: x.numel()].clone()

    compiled = torch.compile(lambda x: x * 2, dynamic=False, fullgraph=True)
    for function in (DOUBLE.reference, with_workspace, compiled):
        assert found(function, ours=False, pass_=pass_, n=n).reason == ""


def test_allocations_between_bands_are_aligned_as_others_are():
    with guards.guarded() as bands:
        for shape in ((1,), (N,), (33, 65)):
            for dtype in (torch.float32, torch.float16, torch.int8):
                tensor = torch.empty(shape, dtype=dtype, device="cuda")
                plain = EMPTY_LIKE(tensor)
                assert tensor.data_ptr() % 512 == plain.data_ptr() % 512 == 0
                assert tensor.stride() == plain.stride() and tensor.storage_offset() == 0
    assert bands.broken() == ""


def test_a_call_on_a_stream_that_does_not_wait_is_found():
    side = torch.cuda.Stream()

    def elsewhere(x, waits):
        here = torch.cuda.current_stream()
        if waits:
            side.wait_stream(here)
        with torch.cuda.stream(side):
            out = x * 2
        if waits:
            here.wait_stream(side)
            out.record_stream(here)
        return out

    assert "times as far" in found(lambda x: elsewhere(x, False), ours=False).reason
    assert found(lambda x: elsewhere(x, True), ours=False).reason == ""


@pytest.mark.parametrize("op", ["softmax", "layer_norm", "matmul"])
def test_pytorch_writes_nothing_beside_its_results(op):
    declared, _ = registry.op(op)
    eager = registry.function(op, "torch_eager")
    for case in declared.edge:
        problem = oracle.problem(declared, case, "float32", 1, "cuda", eager)
        assert "writes" not in check.check(eager, problem, "forward", ours=False).reason

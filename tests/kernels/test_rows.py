"""Check kernels on rows of any address and length: what they read and write, and how wide."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from kernels._triton.row_access import max_body, needs_peeling
from kernels.cross_entropy import cross_entropy
from kernels.softmax import softmax
from kernels.softmax_details import short_rows as _softmax_short
from ops.cross_entropy import cross_entropy_reference
from ops.softmax import softmax_reference
from tests.support.modules import interpreted

ROOT = Path(__file__).parents[2]
KERNELS = """
import triton
import triton.language as tl

from kernels._triton.row_access import body_ptr, peeled_columns, vector_body


@triton.jit
def one_row(x_ptr, y_ptr, stride_x, stride_y, M, N, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x
    y_ptr += row * stride_y
    lead, width = vector_body(x_ptr, N)
    peel_cols, peel_mask = peeled_columns(lead, width, N, x_ptr.dtype)
    peel = tl.load(x_ptr + peel_cols, mask=peel_mask)
    tl.store(y_ptr + peel_cols, peel, mask=peel_mask)
    for start in range(0, width, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        x = tl.load(body_ptr(x_ptr, lead) + columns, mask=columns < width)
        tl.store(body_ptr(y_ptr, lead) + columns, x, mask=columns < width)


@triton.jit
def some_rows(x_ptr, y_ptr, stride_x, stride_y, M, N, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    x_row = x_ptr + rows * stride_x
    y_row = y_ptr + rows * stride_y
    lead, width = vector_body(x_row, N)
    peel_cols, peel_mask = peeled_columns(lead, width, N, x_row.dtype)
    peel = tl.load(x_row + peel_cols, mask=peel_mask & (rows < M))
    tl.store(y_row + peel_cols, peel, mask=peel_mask & (rows < M))
    columns = tl.arange(0, BLOCK_N)[None, :]
    inside = (columns < width) & (rows < M)
    x = tl.load(body_ptr(x_row, lead) + columns, mask=inside)
    tl.store(body_ptr(y_row, lead) + columns, x, mask=inside)
"""
# Print the memory accesses of each kernel by width; kernels are compiled in this process.
COMPILED = """
import collections, importlib.util, json, re, sys

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton

spec = importlib.util.spec_from_file_location("copies", sys.argv[1])
copies = importlib.util.module_from_spec(spec)
spec.loader.exec_module(copies)
found = {}
for kernel in (copies.one_row, copies.some_rows):
    for dtype in ("bf16", "fp32"):
        constants = {"ROWS": 2, "BLOCK_N": 2048}
        signature = {name: "i32" for name in kernel.arg_names}
        signature |= dict.fromkeys(constants, "constexpr")
        signature |= dict.fromkeys(("x_ptr", "y_ptr"), "*" + dtype)
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs={})
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
        widths = re.findall(r"(?:ld|st)\\.global\\S*?\\.(v\\d\\.b\\d+|b\\d+)", ptx)
        found[f"{kernel.fn.__name__} {dtype}"] = collections.Counter(widths)
print(json.dumps(found))
"""
# Print how the launches of an op access rows of some widths; compiled in this process too.
LAUNCHED = """
import json, re, sys
from harness.build import compiler, recorder
from harness.project import registry
from ops._spec import make_case

found = []
for name, letter in (("softmax", "N"), ("cross_entropy", "V")):
    op = registry.op(name)[0]
    for width in map(int, sys.argv[1:]):
        for dtype in ("bfloat16", "float16"):
            for each in recorder.launched(op, make_case(M=9, **{letter: width}), dtype):
                if "PEELED" in each.arguments or "short" in each.name:
                    ptx = compiler.compile(each, "90").asm["ptx"]
                    wide = re.findall(r"(?:ld|st)\\.global\\S*?\\.v[248]\\.b(?:32|64)", ptx)
                    single = re.findall(r"(ld|st)\\.global\\S*?(?<!v\\d)\\.b16", ptx)
                    spilled = compiler.row(each, "90")["spill_stores"]
                    counts = len(wide), single.count("ld"), single.count("st"), spilled
                    found.append((each.name, width, each.arguments.get("PEELED", True), *counts))
print(json.dumps(found))
"""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BOUND = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
ACCESS_BYTES = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "copies.py"
    path.write_text(KERNELS)
    return path


@pytest.fixture(scope="module")
def copies(path):
    return interpreted(path)


def rows_in(storage, begin, stride, m, n):
    return torch.as_strided(storage, (m, n), (stride, 1), begin)


@pytest.mark.no_gpu
@settings(max_examples=60, derandomize=True)
@given(st.data())
def test_all_of_a_row_is_copied_and_nothing_beside_it(copies, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    # The shortest row is a sector of 32 bytes.
    n = data.draw(st.integers(32 // dtype.itemsize, 100))
    # Rows that lie alike: their distances and their beginnings differ by vector accesses.
    access = ACCESS_BYTES // dtype.itemsize
    begin, apart = data.draw(st.integers(0, 9)), n + data.draw(st.integers(0, 9))
    further = [access * data.draw(st.integers(0, 3)) for _ in range(2)]
    m, size = 5, begin + 48 + 5 * (apart + 48)
    values = torch.arange(m * n).reshape(m, n) % 200
    # NaN surrounds the rows: the copy must not read it and must not overwrite it.
    source, target = (torch.full((size,), torch.nan, dtype=dtype) for _ in range(2))
    # The first element of both lies at a multiple of 16 bytes.
    assert source.data_ptr() % ACCESS_BYTES == target.data_ptr() % ACCESS_BYTES == 0
    x = rows_in(source, begin, apart, m, n).copy_(values)
    y = rows_in(target, begin + further[0], apart + further[1], m, n)
    kernel, programs = data.draw(st.sampled_from([(copies.one_row, m), (copies.some_rows, 3)]))
    kernel[(programs,)](x, y, apart, apart + further[1], m, n, ROWS=2, BLOCK_N=128)
    assert torch.equal(y.int(), values.int())
    y.fill_(torch.nan)
    assert target.isnan().all()


def test_whole_accesses_and_few_single_ones(path):
    done = subprocess.run(
        [sys.executable, "-c", COMPILED, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 4
    for name, widths in found.items():
        # A peeled column takes a load and a store of one element; all other accesses have 16 bytes.
        single = {"b16": 2} if name.endswith("bf16") else {"b32": 2}
        assert widths.pop("v4.b32") >= 2 and widths == single, name


def placed(begin, stride, n=50, m=3, dtype=torch.bfloat16):
    return rows_in(torch.zeros(begin + m * stride, dtype=dtype), begin, stride, m, n), stride


@pytest.mark.parametrize(
    "n, rows, expected",
    [
        (50, [placed(0, 50)], True),
        (17, [placed(0, 17, 17)], True),
        (15, [placed(0, 15, 15)], False),
        # Triton recognizes multiples of 16 elements only.
        (56, [placed(0, 56, 56)], True),
        (48, [placed(0, 48, 48)], False),
        (48, [placed(0, 49, 48)], True),
        (48, [placed(1, 48, 48)], True),
        (48, [placed(8, 48, 48)], False),
        (50, [placed(0, 50), placed(0, 50)], True),
        (50, [placed(3, 50), placed(11, 58)], True),
        # The rows begin at different offsets in the two tensors.
        (50, [placed(0, 50), placed(1, 50)], False),
        (50, [placed(0, 50), placed(0, 64)], False),
        (50, [placed(0, 50, dtype=torch.float32), placed(4, 54, dtype=torch.float32)], True),
        (50, [placed(0, 50, dtype=torch.float32), placed(2, 50, dtype=torch.float32)], False),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_are_split_where_they_lie_alike(n, rows, expected, device):
    def moved(x):
        if device == "cpu":
            return x
        size = x.untyped_storage().nbytes() // x.element_size()
        storage = torch.empty(size, dtype=x.dtype, device=device)
        return torch.as_strided(storage, x.shape, x.stride(), x.storage_offset())

    assert needs_peeling(n, *((moved(x), stride) for x, stride in rows)) == expected


def test_a_traced_graph_is_not_asked_for_addresses():
    seen = []

    def function(x):
        seen.append(needs_peeling(50, (x, 50)))
        return x + 1

    x = placed(0, 50)[0]
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), x + 1)
    function(x)
    assert seen == [False, True]


@pytest.mark.parametrize(
    "n, itemsize, expected", [(50, 2, 48), (50, 4, 48), (51, 4, 48), (7, 2, 0)]
)
def test_most_whole(n, itemsize, expected):
    assert max_body(n, itemsize) == expected


def within(x, begin, apart):
    """Return x as rows in a storage filled with NaN.
    begin: vector accesses before the first row. apart: vector accesses between the end of a row and
    the next row."""
    access, (m, n) = ACCESS_BYTES // x.element_size(), x.shape
    stride = n + apart * access
    storage = torch.full((begin * access + m * stride,), torch.nan, dtype=x.dtype)
    return rows_in(storage, begin * access, stride, m, n).copy_(x)


def randn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(ours, exact):
    bound = BOUND[ours.dtype] * max(exact.abs().max().item(), 1e-2)
    assert (ours.double() - exact).abs().max().item() <= bound


@pytest.fixture
def splits(monkeypatch):
    """Record for each launch with long or peeled rows whether it peels them."""
    seen = []
    run = InterpretedFunction.run

    def noted(kernel, *args, **arguments):
        # Kernels of short rows always peel them.
        if "PEELED" in arguments or kernel.fn.__module__ == _softmax_short.__name__:
            seen.append(arguments.get("PEELED", True))
        return run(kernel, *args, **arguments)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return seen


# Widths of several rows to a program, one row to a program, chunks, loops, and a multiple of 8.
WIDTHS = (77, 129, 403, 1001, 1016, 4097, 13001, 20011)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_softmax_of_peeled_rows(splits, n, dtype):
    x = within(randn(3, n, dtype=dtype), 1, 2).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = softmax(x, scale=0.7), softmax_reference(exact, 0.7, False, None)
    dy = within(randn(3, n, dtype=dtype, seed=1), 0, 1)
    (dx,) = torch.autograd.grad(y, x, dy)
    near(y, expected)
    near(dx, torch.autograd.grad(expected, exact, dy.double())[0])
    assert splits == [True, True]


@pytest.mark.parametrize(
    "causal, masked, scale", [(True, False, 1), (False, True, 1), (True, True, -1)]
)
@pytest.mark.parametrize("n", [131, 13001, 16999])
def test_a_diagonal_and_a_mask_on_peeled_rows(splits, causal, masked, scale, n):
    x = within(randn(9, n, dtype=torch.float16), 0, 3).requires_grad_()
    mask = randn(n, dtype=torch.float16, seed=2) if masked else None
    exact = x.detach().double().requires_grad_()
    y = softmax(x, scale=scale, causal=causal, mask=mask)
    expected = softmax_reference(exact, scale, causal, mask.double() if masked else None)
    dy = randn(9, n, dtype=torch.float16, seed=1)
    (dx,) = torch.autograd.grad(y, x, dy)
    near(y, expected)
    near(dx, torch.autograd.grad(expected, exact, dy.double())[0])
    assert splits == [True, True]


@pytest.mark.parametrize("v", (17, *WIDTHS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cross_entropy_of_peeled_rows(splits, v, dtype):
    logits = within(randn(6, v, dtype=dtype), 2, 1).requires_grad_()
    # Targets in the peeled elements of both ends, in the middle, and ignored.
    targets = torch.tensor([0, v - 1, v // 2, -100, 3, v - 4])
    exact = logits.detach().double().requires_grad_()
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 1e-3}):
        loss = cross_entropy(logits, targets, **options)
        expected = cross_entropy_reference(exact, targets, **options)
        (dlogits,) = torch.autograd.grad(loss, logits)
        near(loss, expected)
        near(dlogits, torch.autograd.grad(expected, exact)[0])
        near(cross_entropy(logits.detach(), targets, **options), expected)
    assert len(splits) >= 4 and all(splits)


@pytest.mark.parametrize("place", [0, 3, 60, 128])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_a_row_of_nothing_else_than_minus_infinity(place, value):
    logits = torch.full((2, 129), -torch.inf)
    logits[:, place] = 2.0
    logits[1, 64] = value
    loss = cross_entropy(logits, torch.tensor([place, place]), reduction="none")
    expected = torch.nn.functional.cross_entropy(
        logits, torch.tensor([place, place]), reduction="none"
    )
    assert torch.equal(loss.isnan(), expected.isnan())
    assert torch.equal(loss.nan_to_num(), expected.nan_to_num())


def test_kernels_access_rows_of_any_width_in_vectors():
    widths = (129, 1001, 4097, 20011, 50257, 262145)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHED, *map(str, widths)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kernels = {name for name, *_ in found}
    assert len(kernels) >= 9 and {width for _, width, *_ in found} == set(widths)
    for name, width, peeled, wide, loads, stores, spilled in found:
        assert peeled and wide and not spilled, (name, width)
        # Single accesses: peeled elements of one or two tensors, of several rows or lanes; a
        # target; a loss.
        assert loads <= 10 and stores <= 4, (name, width, loads, stores)

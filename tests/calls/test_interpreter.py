"""Check that the harness's faster interpreter functions give the results of Triton's own."""

import inspect
import itertools

import pytest
import torch

from harness.calls import interpreter
from tests.support.modules import interpreted

pytestmark = pytest.mark.no_gpu
KERNELS = """
import triton
import triton.language as tl


@triton.jit
def _after(a, b, c, d):
    # x -> a x + b, then x -> c x + d: the order counts.
    return a * c, b * c + d


@triton.jit
def chain(a_ptr, b_ptr, out_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    offs = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    a, b = tl.load(a_ptr + offs), tl.load(b_ptr + offs)
    slope, shift = tl.reduce((a, b), AXIS, _after, keep_dims=KEEP)
    found = slope * 100 + shift
    if AXIS == 1:
        at = tl.arange(0, 8)
        if KEEP:
            at = at[:, None]
    else:
        at = tl.arange(0, 16)
        if KEEP:
            at = at[None, :]
    tl.store(out_ptr + at, found)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def least(a_ptr, out_ptr):
    offs = tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr, tl.reduce(tl.load(a_ptr + offs), None, _smaller))


@triton.jit
def product(a_ptr, b_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr):
    m, n, k = tl.arange(0, M)[:, None], tl.arange(0, N)[:, None], tl.arange(0, 64)[None, :]
    a, b = tl.load(a_ptr + m * 64 + k), tl.load(b_ptr + n * 64 + k)
    if TRANSPOSED:
        out = tl.trans(tl.dot(b, tl.trans(a)))
    else:
        out = tl.dot(a, tl.trans(b))
    tl.store(out_ptr + m * N + tl.trans(n), out)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "reductions.py"
    path.write_text(KERNELS)
    return interpreted(path)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("keep", [False, True])
def test_the_order_of_a_reduction_is_kept(kernels, axis, keep):
    a, b = torch.randn(2, 8, 16, dtype=torch.float64)
    a = a / 4 + 1
    out = torch.full((16 if axis == 0 else 8,), torch.nan, dtype=torch.float64)
    kernels.chain[(1,)](a, b, out, AXIS=axis, KEEP=keep)
    value = torch.full_like(out, 100.0)
    slope, shift = torch.ones_like(value), torch.zeros_like(value)
    for index in range(a.shape[axis]):
        slope, shift = (
            slope * a.select(axis, index),
            shift * a.select(axis, index) + b.select(axis, index),
        )
    torch.testing.assert_close(out, slope * value + shift)


def test_a_reduction_of_all_elements_gives_a_number(kernels):
    a, out = torch.randn(8, 16), torch.zeros(1)
    kernels.least[(1,)](a, out)
    assert out.item() == a.min().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("equal", [False, True])
def test_an_entry_of_a_product_is_the_same_in_each_tile(kernels, dtype, equal):
    a, b = torch.randn(2, 64, 1 if equal else 64).to(dtype).expand(2, 64, 64).contiguous()
    found = {}
    for m, n, transposed in itertools.product((16, 64), (16, 32, 64), (False, True)):
        out = torch.full((m, n), torch.nan)
        kernels.product[(1,)](a, b, out, M=m, N=n, TRANSPOSED=transposed)
        found[m, n, transposed] = out
    whole = found[64, 64, False]
    torch.testing.assert_close(whole, a.float() @ b.float().T)
    for (m, n, _), out in found.items():
        assert torch.equal(out, whole[:m, :n])


def test_the_faster_reduction_is_installed_where_kernels_are_verified():
    from triton.runtime.interpreter import ReduceOps

    assert ReduceOps.generic_reduce is interpreter._reduce


def test_types_and_shapes_are_those_of_triton():
    """Compare both without and with a cached value, for valid shapes and invalid ones."""
    from triton.language import core
    from triton.runtime.interpreter import _get_np_dtype as numpy_dtype

    shapes = [[], [4], (2, 8), core.tuple([2, core.constexpr(4)]), [core.constexpr(2), 8]]
    shapes += [[True], [1.5, 2], [core.constexpr(core.float32), 1], core.tuple([core.float32, 3])]
    for quick in (core._type_for_tuple_values, core._unwrap_shape):
        for shape in shapes + shapes:
            found, expected = quick(shape), quick.__wrapped__(shape)
            assert (type(found), str(found)) == (type(expected), str(expected))
            assert found == expected
    for dtype in (core.int1, core.bfloat16, core.pointer_type(core.int8)):
        for each in (dtype, core.block_type(dtype, [2]), dtype):
            assert numpy_dtype(each) == numpy_dtype.__wrapped__(each)
    with pytest.raises(KeyError):
        numpy_dtype(core.void)


def test_the_language_is_as_before_after_a_launch(kernels):
    from triton import language as tl

    def builtins():
        places = (tl, tl.math, tl.tensor)
        found = [inspect.getmembers(place, tl.core.is_builtin) for place in places]
        return [dict(members) for members in found]

    before = builtins()
    kernels.least[(1,)](torch.randn(8, 16), torch.zeros(1))
    assert all(before) and builtins() == before

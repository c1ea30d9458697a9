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


@triton.jit
def _total(a, b):
    return tl.sum(a + b, axis=0)


@triton.jit
def total(a_ptr, b_ptr, out_ptr):
    offs = tl.arange(0, 16)
    a, b = tl.load(a_ptr + offs), tl.load(b_ptr + offs)
    tl.store(out_ptr, _total(a, b))
    tl.store(out_ptr + 1, _total(b, a))
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
    # Rounded once, as far as the oracle can tell: no error of a sum in float32.
    assert torch.equal(whole, (a.double() @ b.double().T).float())
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


def test_tiles_and_tensors_are_those_of_triton():
    from triton.language import core

    shapes = [[4], core.tuple([2, 8]), core.tuple([2, core.constexpr(4)]), [core.constexpr(2), 8]]
    for shape, element in itertools.product(shapes, (core.int1, core.pointer_type(core.int8))):
        expected = object.__new__(core.block_type)
        core.block_type.__init__.__wrapped__(expected, element, shape)
        for found in (core.block_type(element, shape), core.block_type(element, shape)):
            assert {k: str(v) for k, v in vars(found).items()} == {
                k: str(v) for k, v in vars(expected).items()
            }
            assert found == expected and type(found.shape) is type(expected.shape)
            plain = object.__new__(core.tensor)
            core.tensor.__init__.__wrapped__(plain, "handle", expected)
            for tensor in (core.tensor("handle", found), core.tensor("handle", expected)):
                assert vars(tensor).keys() == vars(plain).keys()
                assert all(value == vars(plain)[key] for key, value in vars(tensor).items())
                assert [type(size) for size in tensor.shape] == [core.constexpr] * len(shape)
    number = core.tensor("handle", core.float32)
    assert number.shape.values == [] and number.numel.value == 1
    wrong = {TypeError: [], ValueError: [3], AssertionError: (4,)}
    for error, shape in [*wrong.items(), *wrong.items()]:
        with pytest.raises(error):
            core.block_type(core.int1, shape)


def test_operands_of_equal_shape_are_left_as_they_are():
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    tile, other = (core.tensor("handle", core.block_type(core.int1, [4])) for _ in range(2))
    found = TritonSemantic.broadcast_impl_value(None, tile, other)
    assert found[0] is tile and found[1] is other
    plain = TritonSemantic.broadcast_impl_value.__wrapped__(None, tile, other)
    assert plain[0] is tile and plain[1] is other


def test_a_sum_of_integers_wraps_as_in_tritons_own(kernels):
    a, b = torch.zeros(2, 16, dtype=torch.int32)
    a[0], b[0], out = 2**31 - 1, 1, torch.zeros(2, dtype=torch.int32)
    kernels.total[(1,)](a, b, out)
    assert out.tolist() == [-(2**31)] * 2


@pytest.mark.parametrize("kernel", ["least", "total"])
def test_the_language_is_as_before_after_a_launch(kernels, kernel):
    from triton import language as tl

    def members():
        return [dict(inspect.getmembers(place)) for place in (tl, tl.core, tl.math, tl.tensor)]

    before = members()
    operands = [torch.randn(8, 16), torch.randn(8, 16), torch.zeros(2)]
    getattr(kernels, kernel)[(1,)](*(operands[::2] if kernel == "least" else operands))
    assert members() == before

"""Check transpose: every shape, dtype and layout to the bit; its gradient; its refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.build import recorder
from harness.machine import nvml
from kernels import transpose as family
from kernels.transpose import transpose
from ops.transpose import transpose_reference
from tests.support.examples import many

DEVICE = "cuda" if nvml.gpus() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]
sizes = st.one_of(st.integers(0, 20), st.integers(1, 300))


def numbered(m, n, dtype):
    """Return a matrix of any dtype in which neighbours differ."""
    flat = torch.arange(m * n, device=DEVICE) * 7919 % 251
    return (flat % 2 if dtype == torch.bool else flat % 127).to(dtype).view(m, n)


@many
@given(sizes, sizes, st.sampled_from(DTYPES), st.integers(0, 5))
def test_transpose_equals_pytorch_to_the_bit(m, n, dtype, padding):
    x = numbered(m, n + padding, dtype)[:, :n]
    out = transpose(x)
    assert torch.equal(out, x.T) and out.is_contiguous()
    assert not out.numel() or out.data_ptr() != x.data_ptr()


EVERY_DTYPE = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_a_dtype_is_refused_by_name_or_transposed(dtype):
    bits = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    x = bits.view(dtype).view(2, 3).to(DEVICE)
    for view in (x, x.T):
        try:
            found = transpose(view)
        except TypeError as error:
            assert str(error) == f"x: {dtype}, expected a dtype of real numbers"
            assert dtype not in (*DTYPES, torch.float64)
        else:
            assert found.is_contiguous() and dtype not in (torch.complex64, torch.complex128)
            found, expected = (each.contiguous().view(torch.uint8) for each in (found, view.T))
            assert torch.equal(found, expected)


SHAPES = [(64, 64), (130, 66), (258, 34), (65, 97), (129, 64), (64, 129), (33, 1), (1, 33)]


@pytest.mark.parametrize("down", [0, 1])
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_every_order_of_tiles_covers_the_matrix(m, n, down, monkeypatch):
    tile = {"BLOCK_M": 32, "BLOCK_N": 32, "COLUMN_MAJOR_GRID": down, "num_warps": 4}
    for configs in (family.TILES, family.WORDS):
        monkeypatch.setitem(configs.__dict__, "choose", lambda **key: tile)
    x = numbered(m, n, torch.float16)
    assert torch.equal(transpose(x), x.T)


@pytest.mark.parametrize(
    ("m", "stride", "dtype", "kernel"),
    [
        (96, 472, torch.bfloat16, "_transpose_kernel"),
        # As drawn for a run: 98 rows took seven times as long in large tiles.
        (98, 472, torch.bfloat16, "_items_kernel"),
        (104, 472, torch.int8, "_items_kernel"),
        (98, 472, torch.float32, "_transpose_kernel"),
        (99, 472, torch.bfloat16, "_items_kernel"),
        (98, 473, torch.bfloat16, "_words_kernel"),
        (96, 473, torch.bfloat16, "_words_kernel"),
        (99, 473, torch.bfloat16, "_items_kernel"),
    ],
)
def test_the_kernel_follows_from_the_rows_that_it_can_write(m, stride, dtype, kernel):
    x = numbered(m, stride, dtype)[:, :472]
    launched = {}
    for name in ("_transpose_kernel", "_items_kernel", "_words_kernel"):
        with recorder.uncached(), recorder.launches(getattr(family, name)) as calls:
            assert torch.equal(transpose(x), x.T)
        launched[name] = len(calls)
    assert launched == {name: int(name == kernel) for name in launched}


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_rows_may_begin_at_any_element(first, padding):
    flat = numbered(1, 70000, torch.bfloat16)[0]
    for m, n in ((130, 131), (131, 130), (129, 193)):
        x = flat[first:].as_strided((m, n), (n + padding, 1))
        assert torch.equal(transpose(x), x.T)


def test_layouts_without_runs_of_memory():
    x = numbered(40, 30, torch.float32)
    for view in (x.T, x[:, ::2], x[:1].expand(7, 30), x[:, :1].expand(40, 5)):
        out = transpose(view)
        assert torch.equal(out, view.T) and out.is_contiguous()
        assert out.data_ptr() != view.data_ptr()


def test_two_transposes_cancel_in_both_passes():
    x = torch.randn(70, 50, device=DEVICE, requires_grad=True)
    dy = torch.randn(70, 50, device=DEVICE)
    assert torch.equal(transpose(transpose(x)), x)
    (dx,) = torch.autograd.grad(transpose(transpose(x)), x, dy)
    assert torch.equal(dx, dy)
    (dx,) = torch.autograd.grad(transpose(x).sum(), x)
    assert torch.equal(dx, torch.ones_like(x))


def test_the_gradients_of_the_reference_are_right():
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(transpose_reference, x)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_refuses_what_is_no_matrix(shape):
    with pytest.raises(ValueError, match=r"^x: shape \(.*expected two dimensions"):
        transpose(torch.ones(shape, device=DEVICE))

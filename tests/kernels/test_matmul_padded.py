"""Products of operands that TMA cannot read: which are copied, and that the result is the same."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import matmul
from kernels._runtime.call_cache import uncached
from kernels.matmul_details import cost, padded, split
from kernels.matmul_details.batches import Operand, Walk
from tests.support.values import randn

SIZES = st.integers(1, 600) | st.integers(1, 20000)
ALWAYS = {"FLOPS_OF_BYTE": 0, "FLOPS_OF_COPY": 0, "LEAST_ENTRIES": 0}


def stored(rows, columns, turned, **kind):
    return randn(columns, rows, **kind).T if turned else randn(rows, columns, **kind)


def walk(m, n, k, dtype=torch.bfloat16, **more):
    def operand(*shape):
        return Operand(torch.empty(shape, dtype=dtype, device="meta"))

    names = ("up", "pre", "up_pre", "residual", "a_scale", "b_scale")
    given = {"a": operand(m, k), "b": operand(k, n), "out": operand(m, n)}
    return Walk((1, 1), dict.fromkeys(names) | given | more)


@pytest.fixture
def copies():
    """The shapes of what is copied while every copy pays."""
    seen, copy = [], padded._copy

    def noted(source, target):
        seen.append(tuple(source.shape))
        copy(source, target)

    with mock.patch.multiple(padded, _copy=noted, **ALWAYS), uncached():
        yield seen


@pytest.mark.no_gpu
@pytest.mark.parametrize("turned", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [
        (67, 33, 45, 3),
        (64, 40, 45, None),
        (67, 40, 48, None),
        (64, 40, 48, 0),
    ],
)
def test_a_product_of_copies_is_that_of_its_operands(m, n, k, expected, turned, copies):
    a = stored(m, k, turned[0], dtype=torch.float16)
    b = stored(k, n, turned[1], dtype=torch.float16, seed=1)
    bias, residual = (randn(*shape, dtype=torch.float16, seed=2) for shape in ((n,), (m, n)))
    found = matmul.matmul(a, b, bias, "silu", residual=residual)
    truth = torch.nn.functional.silu(a.double() @ b.double() + bias) + residual
    assert found.is_contiguous()
    assert (found.double() - truth).abs().max() <= 2e-3 * truth.abs().max()
    by_hand = (k if not turned[0] else m, n if not turned[1] else k, n)
    wanted = sum(row % 8 != 0 for row in by_hand)
    assert len(copies) == wanted
    assert expected is None or wanted == expected


@pytest.mark.no_gpu
def test_a_gated_product_copies_the_second_factor_too(copies):
    a, b, up = (randn(*shape, dtype=torch.float16) for shape in ((40, 24), (24, 33), (24, 33)))
    found = matmul.matmul(a, b, activation="silu", up=up)
    truth = torch.nn.functional.silu(a.double() @ b.double()) * (a.double() @ up.double())
    assert (found.double() - truth).abs().max() <= 2e-3 * truth.abs().max()
    assert copies == [(24, 33), (24, 33), (40, 33)]


@pytest.mark.no_gpu
@pytest.mark.parametrize("turned", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize(("m", "n", "k"), [(40, 48, 640), (40, 48, 641), (33, 35, 325)])
@pytest.mark.parametrize("given", ["plain", "epilogue", "float32", "added"])
def test_a_product_in_parts_of_k_is_that_of_its_operands(m, n, k, turned, given):
    """Also if K is no multiple of the parts, and with all that the second kernel does."""
    a = stored(m, k, turned[0], dtype=torch.float16)
    b = stored(k, n, turned[1], dtype=torch.float16, seed=1)
    options, truth = {}, a.double() @ b.double()
    if given == "epilogue":
        bias, residual = (randn(*x, dtype=torch.float16, seed=2) for x in ((n,), (m, n)))
        options = {"bias": bias, "activation": "gelu", "residual": residual, "scale": 0.5}
        truth = torch.nn.functional.gelu(0.5 * truth + bias) + residual
    elif given == "float32":
        options = {"out_dtype": torch.float32}
    elif given == "added":
        buffer = randn(m, n, seed=3)
        options, truth = {"accumulate_into": buffer.clone()}, truth + buffer
    launched = []

    def noted(*arguments):
        launched.append(1)
        split.launch_parts(*arguments)

    with (
        mock.patch.multiple(padded, **ALWAYS),
        mock.patch.multiple(
            matmul, parts_of=lambda *_: 5, is_hopper=lambda device: True, launch_parts=noted
        ),
        mock.patch.object(matmul.hopper, "is_hopper", lambda device: False),
        uncached(),
    ):
        found = matmul.matmul(a, b, **options)
    assert launched
    bound = 2e-3 if found.dtype == torch.float16 else 1e-5
    assert (found.double() - truth).abs().max() <= bound * truth.abs().max()


# Sizes, and the parts of K of the fastest form of those that an H200 timed (docs/lab/matmul.md).
FASTEST = [
    ((768, 3072, 16384), 3),
    ((784, 1424, 10768), 3),
    ((240, 560, 8000), 12),
    ((352, 112, 5696), 8),
    ((2048, 2048, 2048), 1),
    ((11504, 928, 6752), 1),
    ((512, 176, 80), 1),
]
# Products that a division of K cannot help: K is short, or the tiles are many.
WHOLE = [(512, 2048, 2048), (512, 512, 64), (8192, 8192, 8192), (2048, 2048, 16384)]


@pytest.mark.parametrize(("sizes", "parts"), FASTEST + [(sizes, 1) for sizes in WHOLE])
def test_k_is_divided_as_measured_to_be_the_fastest(sizes, parts):
    assert cost.parts_of(*sizes, 132) == parts


@given(m=SIZES, n=SIZES, k=st.just(0) | SIZES, whole=st.booleans())
def test_a_part_keeps_items_of_k_and_pays(m, n, k, whole):
    parts = cost.parts_of(m, n, k, 132, whole)
    assert parts == 1 or k >= parts * cost.LEAST_ITEMS
    # No part is empty: the others leave a step for the last one.
    steps = -(-k // 64)
    assert parts == 1 or -(-steps // parts) * (parts - 1) < steps
    # Tiles that fill the GPU several times gain nothing.
    assert parts == 1 or m * n < 6 * 132 * 128 * 256


def test_copies_pay_for_long_products_alone():
    with mock.patch.object(padded, "_copy"):
        assert padded.with_copies(walk(4096, 4097, 4097), False) is not None
        assert padded.with_copies(walk(4096, 4097, 8), False) is None
        assert padded.with_copies(walk(64, 65, 65), False) is None
        assert padded.with_copies(walk(200, 201, 30001), False) is None
        assert padded.with_copies(walk(200, 201, 30001), False, summed=True) is not None


@pytest.mark.parametrize(
    ("given", "accumulates"),
    [
        (walk(4097, 4097, 4097), True),
        (walk(4097, 4097, 4097, pre=Operand(torch.empty(1, 1, device="meta"))), False),
    ],
)
def test_a_result_with_one_place_has_no_buffer(given, accumulates):
    with mock.patch.multiple(padded, _copy=mock.Mock(), **ALWAYS):
        assert padded.with_copies(given, accumulates) is None
        # The sum of parts goes to any place.
        summed = padded.with_copies(given, accumulates, summed=True)
        assert summed.operands["out"] is given.operands["out"]


def test_operands_that_need_no_copy_stay():
    given = walk(4096, 4096, 4096)
    assert padded.with_copies(given, False) is given
    assert padded.with_copies(given, True, summed=True) is given


@pytest.mark.no_gpu
@pytest.mark.parametrize("always", [False, True])
def test_a_result_goes_where_it_is_told(always):
    """Rows apart, odd or not, and the residual in the same place."""
    a, b = (
        randn(*shape, dtype=torch.float16, seed=n) for n, shape in enumerate([(40, 24), (24, 33)])
    )
    given = ALWAYS if always else {"LEAST_ENTRIES": 2**30}
    wide = randn(40, 80, dtype=torch.float16, seed=3)
    narrow = randn(40, 33, dtype=torch.float16, seed=3)
    places = [
        (narrow, slice(0, 33)), (wide, slice(0, 33)), (wide.clone(), slice(0, 66, 2)),
        (narrow.T.contiguous().T, slice(0, 33)),
    ]  # fmt: skip
    for place, columns in places:
        out, beside = place[:, columns], place.clone()
        truth = a.double() @ b.double() + out
        with mock.patch.multiple(padded, **given), uncached():
            matmul.product(a, b, residual=out, out=out)
        assert (out.double() - truth).abs().max() <= 2e-3 * truth.abs().max()
        beside[:, columns] = out
        assert torch.equal(place, beside)
    with pytest.raises(ValueError, match="out: shape"):
        matmul.product(a, b, out=torch.empty(40, 32, dtype=torch.float16))

"""Check matmul: layouts, batches, the epilogue, sizes at the limits, refusals."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kernels import matmul
from kernels._runtime import call_cache, checks, device, launch_guard
from kernels.matmul_details import batches, descriptor, epilogue, hopper, tiles
from ops.matmul import LEAKY_SLOPE, matmul_reference
from tests.support.values import DEVICE, close, dtypes, few, randn


@few
@given(st.integers(1, 90), st.integers(1, 90), st.booleans(), dtypes)
def test_matmul_by_the_identity_changes_nothing(m, k, transposed, dtype):
    a = randn(m, k, dtype=dtype)
    eye = torch.eye(k, dtype=dtype, device=DEVICE)
    close(matmul.matmul(a, eye.T if transposed else eye), a, dtype)


def test_expanded_factors_are_walked_by_pointers():
    a, b = randn(1, 64, dtype=torch.float16).expand(32, 64), randn(64, 32, dtype=torch.float16)
    assert not batches.Operand(a).describable()
    close(matmul.matmul(a, b), a.double() @ b.double(), torch.float16)


def test_a_matmul_too_large_for_its_indices_is_refused(monkeypatch):
    monkeypatch.setattr(matmul, "MOST_ITEMS", 40)
    for m, n, k in ((41, 2, 2), (2, 41, 2), (2, 2, 41)):
        with pytest.raises(ValueError, match="a size of 41, expected at most 40"):
            matmul.matmul(randn(m, k), randn(k, n))
    close(matmul.matmul(torch.eye(40, device=DEVICE), randn(40, 40)), randn(40, 40), torch.float32)
    largest = max(c["BLOCK_K"] for c in (*matmul.POINTER.candidates, *matmul.DESCRIPTOR.candidates))
    assert checks.MOST_ITEMS + largest < 2**31


LAYOUTS = ("rows", "columns", "padded", "strided", "offset", "expanded")


def laid_out(x, layout):
    """Return the values of x in another memory layout."""
    if layout == "columns":
        return x.mT.contiguous().mT
    if layout == "expanded":
        return x[:1].expand(x.shape)
    if layout == "rows":
        return x
    *batch, m, n = x.shape
    if layout == "padded":
        return torch.cat([x, x[..., :3]], -1)[..., :n]
    if layout == "strided":
        return x.repeat_interleave(2, -1)[..., ::2]
    flat = torch.cat([x.flatten()[:1], x.flatten()])
    return flat[1:].view(*batch, m, n)


sizes = st.integers(1, 70) | st.sampled_from([8, 16, 64, 128])
batched = st.sampled_from(
    [((), ()), ((3,), ()), ((), (2,)), ((2, 3), (2, 3)), ((2, 1), (3,)), ((2, 1, 2), (1, 3, 2))]
)


@few
@given(sizes, sizes, sizes, batched, *[st.sampled_from(LAYOUTS)] * 3, dtypes, st.booleans())
def test_any_layout_and_batch_is_the_formula(
    m, n, k, over, a_layout, b_layout, r_layout, dtype, rich
):
    a = laid_out(randn(*over[0], m, k, dtype=dtype), a_layout)
    b = laid_out(randn(*over[1], k, n, dtype=dtype, seed=1), b_layout)
    expected = a.double() @ b.double()
    if not rich:
        close(matmul.matmul(a, b), expected, dtype)
        return
    residual = laid_out(randn(*expected.shape, dtype=dtype, seed=2), r_layout)
    up = randn(*over[1], k, n, dtype=dtype, seed=3)
    bias, up_bias = randn(n, dtype=dtype, seed=4), randn(n, dtype=dtype, seed=5)
    found = matmul.matmul(
        a, b, bias, "silu", residual=residual, up=up, up_bias=up_bias, scale=0.5,
        out_dtype=torch.float32, save_preactivation=True,
    )  # fmt: skip
    pre, factor = 0.5 * expected + bias, 0.5 * (a.double() @ up.double()) + up_bias
    out = pre * torch.sigmoid(pre) * factor + residual
    for one, other in zip(found, (out, pre, factor), strict=True):
        assert one.dtype == torch.float32
        close(one, other, dtype)


@few
@given(
    sizes, sizes, sizes, st.booleans(), st.booleans(), dtypes,
    st.sampled_from(["rows", "padded", "columns", "strided"]),
)  # fmt: skip
@example(40, 24, 72, False, False, torch.float32, "columns")
@example(40, 24, 72, True, True, torch.float16, "strided")
def test_a_product_is_added_to_a_buffer(m, n, k, turned_a, turned_b, dtype, layout):
    a, b = (
        randn(k, m, dtype=dtype).T if turned_a else randn(m, k, dtype=dtype),
        randn(n, k, dtype=dtype),
    )
    b = b.T if turned_b else b.T.contiguous()
    start = randn(m, n, seed=3)
    buffer = laid_out(start.clone(), layout)
    assert matmul.matmul(a, b, accumulate_into=buffer) is buffer
    close(buffer, start + a.double() @ b.double(), torch.float32)


def test_a_buffer_that_autograd_has_saved_is_noticed():
    buffer, factor = torch.ones(4, 4, device=DEVICE), torch.ones(4, 4, device=DEVICE)
    out = buffer * factor.requires_grad_()
    matmul.matmul(torch.ones_like(buffer), torch.ones_like(buffer), accumulate_into=buffer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_buffer_may_be_a_tensor_of_inference_mode():
    with torch.inference_mode():
        buffer = torch.ones(4, 4, device=DEVICE)
        matmul.matmul(buffer.clone(), buffer.clone(), accumulate_into=buffer)
    close(buffer, torch.full((4, 4), 5.0, device=DEVICE), torch.float32)


@pytest.fixture
def launched(monkeypatch):
    """Return names and arguments of the kernels that a call of matmul would launch."""
    found = []

    class Noting:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda **arguments: found.append((self.name, arguments))

    for module, name in (
        (matmul, "_pointer_kernel"),
        (descriptor, "_descriptor_kernel"),
        (hopper, "matmul_hopper_kernel"),
    ):
        monkeypatch.setattr(module, name, Noting(name))

    def call(*arguments, **options):
        found.clear()
        with launch_guard.shapes_only(), call_cache.uncached():
            matmul.matmul(*arguments, **options)
        return list(found)

    return call


def shaped(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("turned_a", [False, True])
@pytest.mark.parametrize("turned_b", [False, True])
def test_each_of_four_layouts_is_described_without_a_copy(launched, turned_a, turned_b):
    a, b = shaped(256, 192), shaped(192, 128)
    a, b = (a.mT.contiguous().mT if turned_a else a), (b.mT.contiguous().mT if turned_b else b)
    with device.assume_device(hopper=False):
        [(name, arguments)] = launched(a, b)
    assert name == "_descriptor_kernel"
    assert (arguments["A_TRANSPOSED"], arguments["B_TRANSPOSED"]) == (turned_a, turned_b)
    assert list(arguments["a_desc"].shape) == ([192, 256] if turned_a else [256, 192])


@pytest.mark.parametrize(
    ("a", "b", "launches", "m", "batch"),
    [
        ((4, 8, 64), (64, 16), 1, 32, 1),  # the rows of all batches are one matrix
        ((4, 1, 64), (64, 16), 1, 4, 1),
        ((4, 8, 64), (4, 64, 16), 1, 8, 4),
        ((2, 3, 8, 64), (2, 3, 64, 16), 1, 8, 6),
        ((2, 1, 8, 64), (3, 64, 16), 1, 8, 6),
        ((2, 1, 2, 8, 64), (1, 3, 1, 64, 16), 1, 16, 6),
        ((2, 1, 2, 8, 64), (1, 3, 2, 64, 16), 2, 8, 12),
    ],
)
def test_batches_take_as_few_launches_as_their_strides_allow(launched, a, b, launches, m, batch):
    found = launched(shaped(*a), shaped(*b))
    assert len(found) == launches
    for _, arguments in found:
        assert (arguments["M"], arguments["batches"]) == (m, batch // launches)


def test_no_copy_of_heads_that_lie_between_rows(launched):
    q, k = (shaped(2, 128, 4, 64).transpose(1, 2) for _ in range(2))
    [(name, arguments)] = launched(q, k.mT)
    assert name == "_descriptor_kernel" and list(arguments["a_desc"].shape) == [2, 4, 128, 64]


@pytest.mark.parametrize("activation", ["none", "gelu", "relu"])
@pytest.mark.parametrize("biased", [False, True])
def test_matmul_is_the_formula(biased, activation):
    a, b = randn(70, 33, seed=1), randn(33, 50, seed=2)
    bias = randn(50, seed=3) if biased else None
    wide = bias.double() if biased else None
    expected = matmul_reference(a.double(), b.double(), wide, activation)
    close(matmul.matmul(a, b, bias, activation), expected, a.dtype)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 2), (3, 0, 2), (3, 2, 0)])
def test_an_empty_side_gives_what_pytorch_gives(m, n, k):
    a, b = randn(m, k), randn(k, n)
    assert torch.equal(matmul.matmul(a, b), a @ b)


@pytest.mark.parametrize(
    ("m", "dtype"), [(1, torch.float16), (16, torch.float16), (40, torch.float32)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_a_sum_in_parts_of_k_is_the_sum(monkeypatch, m, dtype, gated):
    n, k = 70, 1100
    counters = torch.zeros(8, dtype=torch.int32, device=DEVICE)
    monkeypatch.setattr(matmul, "arrival_counters", lambda device: counters)
    a, b, up = randn(m, k, dtype=dtype), randn(k, n, dtype=dtype, seed=1), randn(k, n, dtype=dtype)
    expected = a.double() @ b.double()
    if gated:
        expected = torch.relu(expected) * (a.double() @ up.double())
    found = matmul.matmul(a, b, activation="relu" if gated else "none", up=up if gated else None)
    close(found, expected, dtype)
    assert not counters.any()


EIGHT = {
    torch.float8_e4m3fn: lambda *shape: randn(*shape).to(torch.float8_e4m3fn),
    torch.int8: lambda *shape: (40 * randn(*shape)).clamp(-128, 127).to(torch.int8),
}


@pytest.mark.parametrize("dtype", EIGHT)
@pytest.mark.parametrize("over", [(), (3,)])
@pytest.mark.parametrize("turned", [False, True])
def test_factors_of_eight_bits_with_scales(dtype, over, turned):
    a, b = EIGHT[dtype](*over, 40, 128), EIGHT[dtype](*over, 48, 128).mT
    b = b if turned else b.contiguous()
    rows, columns = randn(*over, 40, 1, seed=3).abs(), randn(1, 48, seed=4).abs()
    expected = a.double() @ b.double()
    plain = matmul.matmul(a, b)
    if dtype == torch.int8:
        assert plain.dtype == torch.int32 and torch.equal(plain.double(), expected)
    else:
        assert plain.dtype == torch.bfloat16
    bias = torch.ones(48, device=DEVICE)
    found = matmul.matmul(
        a, b, bias, "relu", scale=0.5, a_scale=rows, b_scale=columns, out_dtype=torch.float32,
        up=b,
    )  # fmt: skip
    scaled = 0.5 * expected * rows * columns
    close(found, torch.relu(scaled + 1) * scaled, torch.float32)
    one = torch.tensor(2.0, device=DEVICE)
    found = matmul.matmul(a, b, a_scale=one, b_scale=one, out_dtype=torch.float16, scale=2**-8)
    close(found, expected / 64, torch.float16)


@pytest.mark.parametrize("activation", ["none", "tanh"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("m", [4, 40])
def test_sums_of_eight_bits_do_not_overflow_in_the_epilogue(activation, gated, m):
    """The sums are 129032. Their squares, and products of two of them, do not fit in 31 bits."""
    a = torch.full((m, 8), 127, dtype=torch.int8, device=DEVICE)
    b = torch.full((48, 8), 127, dtype=torch.int8, device=DEVICE).T
    up = -b if gated else None
    pre = a.double() @ b.double()
    expected = (pre if activation == "none" else torch.tanh(pre)) * (-pre if gated else 1)
    for options in (
        {"out_dtype": torch.float32},
        {"accumulate_into": pre.new_zeros(m, 48).float()},
    ):
        found = matmul.matmul(a, b, activation=activation, up=up, **options)
        close(found, expected, torch.float32)


def test_eight_bits_are_refused_what_they_cannot_have():
    a, b = EIGHT[torch.int8](4, 16), EIGHT[torch.int8](16, 8)
    with pytest.raises(ValueError, match=r"^out_dtype: torch.int32, expected a floating dtype"):
        matmul.matmul(a, b, scale=2.0)
    with pytest.raises(TypeError, match=r"^out_dtype: torch.int8, expected"):
        matmul.matmul(a, b, out_dtype=torch.int8)
    with pytest.raises(TypeError, match=r"^a_scale: torch.float16, expected torch.float32"):
        matmul.matmul(a, b, a_scale=randn(4, 1, dtype=torch.float16), out_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^b_scale: shape \(8, 1\), expected one that"):
        matmul.matmul(a, b, b_scale=randn(8, 1), out_dtype=torch.float32)


@pytest.mark.parametrize(
    ("sizes", "turned", "items"),
    [
        # By rows K is the run of a and N that of b; by columns M and K.
        ((24, 40, 8), (False, False), (4, 4, 4)),
        ((24, 40, 6), (False, False), (2, 4, 4)),
        ((24, 42, 7), (False, False), (1, 2, 2)),
        ((6, 40, 7), (True, False), (2, 4, 4)),
        ((24, 41, 6), (True, True), (4, 2, 1)),
    ],
)
def test_the_pointer_kernel_knows_of_which_accesses_its_runs_are_multiples(
    launched, sizes, turned, items
):
    m, n, k = sizes
    a, b = shaped(m, k, dtype=torch.float32), shaped(k, n, dtype=torch.float32)
    a, b = (x.mT.contiguous().mT if t else x for x, t in zip((a, b), turned, strict=True))
    [(name, arguments)] = launched(a, b)
    assert name == "_pointer_kernel"
    assert tuple(arguments[f"{x}_ITEMS"] for x in ("A", "B", "OUT")) == items


# M, N and K, and the kernel of the fastest form that an H200 timed.
FASTER = [
    ((512, 512, 512), "_descriptor_kernel"),
    ((1024, 1024, 1024), "_descriptor_kernel"),
    ((2736, 12256, 384), "matmul_hopper_kernel"),
    ((8192, 8192, 8192), "matmul_hopper_kernel"),
    ((3560, 160, 2096), "matmul_hopper_kernel"),
]


@pytest.mark.parametrize(("sizes", "kernel"), FASTER)
def test_the_faster_kernel_is_launched(launched, sizes, kernel):
    """docs/lab/matmul.md has the times."""
    m, n, k = sizes
    with device.assume_device(hopper=True, sm_count=132):
        [(name, _)] = launched(shaped(m, k), shaped(k, n))
    assert name == kernel


def test_k_is_split_while_tiles_are_few():
    key = {
        "n": 4096, "k": 4096, "batches": 1, "sms": 132, "shared": 232448, "itemsize": 2,
        "transposed": True, "activation": "none", "gated": False, "staged": 2,
        "whole_sectors": True,
    }  # fmt: skip
    for m, n, splits in ((1, 4096, 4), (16, 4096, 4), (16, 14336, 1), (16, 64, 8), (17, 4096, 2)):
        assert tiles.choose_pointer(**key | {"m": m, "n": n})["SPLITS"] == splits
    for k, splits in ((64, 1), (512, 1), (1024, 2), (2048, 4)):
        assert tiles.choose_pointer(**key | {"m": 16, "n": 4096, "k": k})["SPLITS"] == splits
    assert tiles.choose_pointer(**key | {"m": 16, "n": 64, "batches": 9999})["SPLITS"] == 1
    for tile in (*tiles.POINTER_TILES, *tiles.ROW_TILES):
        for splits in (1, 2, 4, 8, 16):
            assert tile | {"SPLITS": splits} in tiles.POINTER_CONFIGS


# The tile that was the fastest of those measured: M, N, K, bytes of an item, activation, tile.
FASTEST = [
    (512, 512, 512, 2, "none", (64, 64)),
    (1024, 1024, 1024, 2, "none", (64, 128)),
    (2048, 2048, 2048, 2, "none", (128, 256)),
    (1000, 3000, 1000, 2, "none", (128, 256)),
    (4096, 4096, 512, 2, "none", (128, 256)),
    (4096, 4096, 4096, 2, "gelu", (128, 128)),
    (512, 512, 512, 4, "none", (32, 64)),
    (1024, 1024, 1024, 4, "none", (128, 64)),
    (4096, 4096, 4096, 4, "none", (128, 64)),
]


@pytest.mark.parametrize("shape", FASTEST, ids=str)
def test_the_rules_take_the_tiles_that_were_measured_to_be_the_fastest(shape):
    """docs/lab/matmul.md has the times."""
    m, n, k, itemsize, activation, tile = shape
    key = {
        "m": m, "n": n, "k": k, "batches": 1, "sms": 132, "shared": 232448, "itemsize": itemsize,
        "transposed": False, "activation": activation, "gated": False, "staged": itemsize,
        "whole_sectors": True,
    }  # fmt: skip
    rules = [tiles.choose_pointer] if itemsize == 4 else [tiles.choose_descriptor]
    if itemsize == 2 and activation == "none" and m > 1024:
        rules.append(hopper.choose)
    for rule in rules:
        assert (rule(**key)["BLOCK_M"], rule(**key)["BLOCK_N"]) == tile


REFUSALS = {
    "inner sizes": lambda: matmul.matmul(randn(2, 3), randn(4, 5)),
    "one dimension": lambda: matmul.matmul(randn(3), randn(3, 5)),
    "batches": lambda: matmul.matmul(randn(2, 2, 3), randn(3, 3, 5)),
    "a residual of another shape": lambda: matmul.matmul(
        randn(2, 3), randn(3, 5), residual=randn(3, 5)
    ),
    "a factor of another shape": lambda: matmul.matmul(randn(2, 3), randn(3, 5), up=randn(3, 4)),
    "a bias of no factor": lambda: matmul.matmul(randn(2, 3), randn(3, 5), up_bias=randn(5)),
    "a buffer of another shape": lambda: matmul.matmul(
        randn(2, 3), randn(3, 5), accumulate_into=randn(2, 4)
    ),
    "a buffer and a pre-activation": lambda: matmul.matmul(
        randn(2, 3), randn(3, 5), accumulate_into=randn(2, 5), save_preactivation=True
    ),
    "a buffer with a lazy sign": lambda: matmul.matmul(
        randn(2, 3),
        randn(3, 5),
        accumulate_into=torch.complex(randn(2, 5), randn(2, 5)).conj().imag,
    ),
    "an unknown activation": lambda: matmul.matmul(randn(2, 3), randn(3, 5), None, "swish"),
    "a bias of another size": lambda: matmul.matmul(randn(2, 3), randn(3, 5), randn(4)),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_bad_arguments_are_refused(what):
    with pytest.raises(ValueError, match=r"expected|has no dimension|after"):
        REFUSALS[what]()


def test_dtypes_that_do_not_fit_are_refused():
    a, b, half = randn(2, 3), randn(3, 5), torch.float16
    for name, value in (
        ("b", b.to(half)), ("bias", randn(5, dtype=half)), ("up", b.to(half)),
        ("residual", randn(2, 5, dtype=half)), ("accumulate_into", randn(2, 5, dtype=half)),
        ("out_dtype", half),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=rf"^{name}: .*expected"):
            matmul.matmul(**{"a": a, "b": b, name: value})
    with pytest.raises(
        TypeError, match=r"^out_dtype: torch.float16, expected None or torch.float32"
    ):
        matmul.matmul(a.to(half), b.to(half), out_dtype=half, accumulate_into=randn(2, 5))
    with pytest.raises(ValueError, match=r"^up_bias: a tensor of shape \(5,\) .*, expected None"):
        matmul.matmul(a, b, up_bias=randn(5))


def test_the_slope_is_the_one_that_the_problem_defines():
    assert epilogue.LEAKY_SLOPE.value == LEAKY_SLOPE

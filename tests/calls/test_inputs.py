"""The tensors of a cell: always the same, laid out and valued as the case asks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.calls import inputs
from ops._spec import DTYPES, LAYOUTS, OFFSETS, VALUES, Cost, Op, Tensor, make_case


def no_cost(case, pass_, itemsize):
    return Cost(0, 0, 0)


SPECS = {
    "x": Tensor("M N"),
    "w": Tensor("K N", transposed="nt", tame=True),
    "b": Tensor("N", when="bias"),
    "i": Tensor("M", dtype="int64"),
    "s": Tensor(""),
}
MADE = Op("made", None, SPECS, no_cost, edge=(), sweep=())
sizes = st.fixed_dictionaries({letter: st.integers(1, 9) for letter in "MNK"})
layouts = st.sampled_from(LAYOUTS)
kinds = st.sampled_from(VALUES)
flags = st.lists(st.sampled_from(["nt", "bias"]), unique=True).map(tuple)


@settings(deadline=None)
@given(sizes, flags, layouts, kinds, st.sampled_from(DTYPES), st.integers(0, 2**40))
def test_a_cell_always_has_the_same_inputs(sizes, flags, layout, kind, dtype, seed):
    case = make_case(*flags, layout=layout, values=kind, **sizes)
    torch.manual_seed(seed)
    first = inputs.make(MADE, case, dtype, seed, "cpu")
    torch.rand(3)
    again = inputs.make(MADE, case, dtype, seed, "cpu")
    assert list(first) == list(SPECS)
    assert (first["b"] is None) == ("bias" not in flags)
    for name, tensor in first.items():
        spec = SPECS[name]
        if tensor is None:
            continue
        assert list(tensor.shape) == [sizes[letter] for letter in spec.shape.split()]
        assert tensor.dtype == getattr(torch, spec.dtype or dtype)
        assert torch.equal(tensor, again[name])
        assert not tensor.requires_grad
    only = inputs.make(MADE, case, dtype, seed, "cpu", only="w")
    assert list(only) == ["w"] and torch.equal(only["w"], first["w"])
    assert first["i"].min() >= 0 and first["i"].max() < min(sizes.values())
    if "nt" in flags and not layout and sizes["K"] > 1 < sizes["N"]:
        assert first["w"].stride() == (1, sizes["K"])


def test_integers_stay_below_the_size_that_the_op_names_and_some_are_its_sentinel():
    specs = {
        "free": Tensor("M", dtype="int64"),
        "bound": Tensor("M", dtype="int64", below="V", sentinel=("ignored", -100)),
    }
    op = Op("made", None, specs, no_cost, edge=(), sweep=())
    plain = inputs.make(op, make_case(M=2000, V=5000), "float32", 0, "cpu")
    assert plain["bound"].min() >= 0 and 4900 < plain["bound"].max() < 5000
    assert plain["free"].max() < 2000
    some = inputs.make(op, make_case("ignored", M=2000, V=3), "float32", 0, "cpu")["bound"]
    share = (some == -100).double().mean().item()
    assert abs(share - inputs.SHARE_OF_SENTINEL) < 0.05
    assert sorted(set(some.tolist())) == [-100, 0, 1, 2]


def test_inputs_differ_by_name_case_dtype_and_seed():
    op = Op("pair", None, {"x": Tensor("N"), "y": Tensor("N")}, no_cost, edge=(), sweep=())

    def made(seed=0, dtype="float32", **kwargs):
        return inputs.make(op, make_case(N=64, **kwargs), dtype, seed, "cpu")

    base = made()
    others = [base["y"], made(seed=1)["x"], made(dtype="float16")["x"].float()]
    others += [made(layout="offset")["x"], made(values="large")["x"] / inputs.LARGE]
    for other in others:
        assert not torch.allclose(base["x"], other, atol=1e-3)


def test_layouts():
    padded = inputs.make(MADE, make_case(M=3, N=4, K=2, layout="padded"), "float32", 0, "cpu")["x"]
    assert padded.stride() == (4 + inputs.PADDING, 1)
    memory = torch.empty(0).set_(padded.untyped_storage())
    assert memory.isnan().sum() == 3 * inputs.PADDING
    strided = inputs.make(MADE, make_case(M=3, N=4, K=2, layout="strided"), "float32", 0, "cpu")
    assert (strided["x"].stride(), strided["i"].stride()) == ((8, 2), (2,))
    transposed = inputs.make(
        MADE, make_case(M=3, N=4, K=2, layout="transposed"), "float32", 0, "cpu"
    )
    assert (transposed["x"].stride(), transposed["i"].stride()) == ((1, 3), (1,))
    expanded = inputs.make(MADE, make_case(M=3, N=4, K=2, layout="expanded"), "float32", 0, "cpu")
    assert expanded["x"].stride() == (0, 1) and expanded["x"].untyped_storage().nbytes() == 16


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("layout", OFFSETS)
def test_offsets(layout, dtype):
    x = inputs.make(MADE, make_case(M=3, N=4, K=2, layout=layout), dtype, 0, "cpu")["x"]
    assert x.is_contiguous() and not x.isnan().any()
    assert x.data_ptr() % 64 == OFFSETS[layout] * x.element_size()


def test_kinds_of_values():
    def x(kind):
        return inputs.make(MADE, make_case(M=50, N=40, K=1, values=kind), "float16", 0, "cpu")["x"]

    assert x("").std() == pytest.approx(1, abs=0.1)
    assert x("large").std() == pytest.approx(inputs.LARGE, rel=0.1)
    equal = x("equal")
    assert (equal == equal[:, :1]).all() and equal[:, 0].unique().numel() > 40
    assert ((x("spike") == inputs.SPIKE).sum(1) == 1).all()
    hidden = x("inf") == -math.inf
    assert hidden.any(1).sum() > 40 and not hidden.all(1).any()
    one_column = inputs.make(MADE, make_case(M=9, N=1, K=1, values="inf"), "float16", 0, "cpu")["x"]
    assert one_column.isfinite().all()
    infinite = x("infinities").isinf().sum(1)
    assert set(infinite.tolist()) == {0, 1} and 10 < infinite.sum() < 40
    assert x("infinities").min() == -math.inf and x("infinities").max() == math.inf


@pytest.mark.parametrize("dtype", DTYPES)
def test_denormal_numbers_and_a_tame_tensor_beside_them(dtype):
    made = inputs.make(MADE, make_case(M=5, N=40, K=30, values="denormal"), dtype, 0, "cpu")
    kind = torch.finfo(made["x"].dtype)
    assert (made["x"].double().abs() < kind.tiny).float().mean() > 0.99
    assert made["x"].unique().numel() > 20
    assert made["w"].double().std() == pytest.approx(1, abs=0.1)
    vector = Op("vector", None, {"x": Tensor("N")}, no_cost, edge=(), sweep=())
    made = inputs.make(vector, make_case(N=400, values="infinities"), dtype, 0, "cpu")["x"]
    assert 20 < (made == math.inf).sum() < 80 and 20 < (made == -math.inf).sum() < 80


def test_gradients_follow_the_outputs():
    outputs = (torch.zeros(3, 4).mT, torch.zeros(2, dtype=torch.float16))
    first, again = inputs.gradients(outputs, 5), inputs.gradients(outputs, 5)
    assert [g.dtype for g in first] == [torch.float32, torch.float16]
    assert first[0].shape == (4, 3) and first[0].is_contiguous()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], inputs.gradients(outputs, 6)[0])
    expanded = inputs.gradients(outputs, 5, "expanded")
    assert [g.stride() for g in expanded] == [(0, 0), (0,)]
    assert [g.shape for g in expanded] == [o.shape for o in outputs]

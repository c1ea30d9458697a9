"""Check linear and its gradients against float64, for any layout, activation and gate."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import nvml
from kernels import linear as family
from kernels.linear import linear
from kernels.matmul_details.epilogue import ACTIVATIONS
from ops.linear import ACTIVATIONS as FORMULAS
from tests.support.examples import many
from tests.support.values import randn

DEVICE = "cuda" if nvml.gpus() else "cpu"
NAMES = ("x", "weight", "bias", "up", "up_bias")
sizes = st.integers(1, 40)


def made(m, n, k, names=NAMES, dtype=torch.float32):
    shapes = {"x": (m, k), "weight": (n, k), "bias": (n,), "up": (n, k), "up_bias": (n,)}
    scales = {"weight": k**-0.5, "up": k**-0.5}
    return {
        name: (scales.get(name, 1.0) * randn(*shapes[name], seed=seed)).to(DEVICE, dtype)
        for seed, name in enumerate(NAMES)
        if name in names
    }


def formula(activation, x, weight, bias=None, up=None, up_bias=None):
    def product(factor, added):
        out = x @ factor.T
        return out if added is None else out + added

    out = FORMULAS[activation](product(weight, bias))
    return out if up is None else out * product(up, up_bias)


def gradients(function, given, dy):
    leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
    out = function(**leaves)
    return out, dict(zip(leaves, torch.autograd.grad(out, [*leaves.values()], dy), strict=True))


def agrees(given, activation, rtol=1e-5, atol=2e-5):
    """Two float32 sums of some dozen products of about one differ by a few roundings."""
    exact = {name: t.double() for name, t in given.items()}
    dy = randn(*given["x"].shape[:-1], len(given["weight"]), seed=9).to(DEVICE)
    dy = dy.to(given["x"].dtype)
    out, found = gradients(lambda **t: linear(activation=activation, **t), given, dy)
    wanted, expected = gradients(lambda **t: formula(activation, **t), exact, dy.double())
    torch.testing.assert_close(out.double(), wanted, rtol=rtol, atol=atol)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), expected[name], rtol=rtol, atol=atol, msg=name)
    return found


def test_every_activation_has_a_formula():
    assert set(FORMULAS) == set(ACTIVATIONS)


@many
@given(sizes, sizes, sizes, st.sampled_from(sorted(FORMULAS)), st.booleans(), st.booleans())
def test_as_the_formula_for_any_sizes(m, n, k, activation, biased, gated):
    names = {"x", "weight"} | ({"bias"} if biased else set()) | ({"up"} if gated else set())
    agrees(made(m, n, k, names | ({"up_bias"} if biased and gated else set())), activation)


@pytest.mark.parametrize("shape", [(6,), (2, 3, 6), (0, 6), (2, 1, 3, 6)])
def test_x_of_any_shape(shape):
    given = made(1, 5, 6, ("x", "weight", "bias"))
    agrees(given | {"x": randn(*shape, seed=3).to(DEVICE)}, "gelu")


LAYOUTS = {
    "x by columns": {"x": lambda t: t.T.contiguous().T},
    "x in heads": {"x": lambda t: t.view(4, 3, 10).transpose(0, 1).contiguous().transpose(0, 1)},
    "weight by columns": {"weight": lambda t: t.T.contiguous().T},
    "apart": {name: lambda t: torch.stack([t, t], -1)[..., 0] for name in NAMES},
    "expanded": {"x": lambda t: t[:1].expand(12, 10)},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_of_any_layout(layout):
    given = made(12, 7, 10)
    given |= {name: turn(given[name]) for name, turn in LAYOUTS[layout].items()}
    agrees(given, "silu")


def test_the_gradient_of_a_weight_by_columns_lies_as_the_weight_does():
    given = made(12, 7, 10, ("x", "weight"))
    given["weight"] = given["weight"].T.contiguous().T
    assert agrees(given, "none")["weight"].stride() == given["weight"].stride()


def test_a_gradient_of_the_result_that_is_expanded():
    given = made(6, 5, 4, ("x", "weight", "bias"))
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    linear(**leaves).sum().backward()
    torch.testing.assert_close(leaves["bias"].grad, torch.full_like(leaves["bias"], 6.0))


@pytest.mark.parametrize("wanted", NAMES)
def test_a_gradient_of_one_input_alone(wanted):
    given = made(6, 5, 4)
    leaf = given[wanted].requires_grad_()
    linear(**given, activation="tanh").sum().backward()
    exact = {name: t.detach().double() for name, t in given.items()}
    exact[wanted].requires_grad_()
    formula("tanh", **exact).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), exact[wanted].grad, rtol=1e-5, atol=1e-5)
    assert all(t.grad is None for name, t in given.items() if name != wanted)


@pytest.mark.parametrize("gated", [False, True])
def test_gradients_are_added_to_a_buffer_in_float32(gated):
    names = ("x", "weight", "up") if gated else ("x", "weight")
    given = made(6, 5, 4, names, torch.float16)
    main = {"main_grad": torch.ones(5, 4, device=DEVICE)}
    main |= {"up_main_grad": torch.full((4, 5), 2.0, device=DEVICE).T} if gated else {}
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    exact = {name: t.detach().double().requires_grad_() for name, t in given.items()}
    for _ in range(2):
        linear(**leaves, activation="gelu", **main).sum().backward()
        formula("gelu", **exact).sum().backward()
    assert leaves["weight"].grad is None and leaves["x"].grad is not None
    # The numbers that the sum is made of are rounded to float16.
    torch.testing.assert_close(
        main["main_grad"].double(), 1 + exact["weight"].grad, rtol=5e-3, atol=5e-3
    )
    if gated:
        assert leaves["up"].grad is None
        torch.testing.assert_close(
            main["up_main_grad"].double(), 2 + exact["up"].grad, rtol=5e-3, atol=5e-3
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_second_derivative_in_biases_alone_is_no_constant(activation, gated):
    given = made(6, 5, 4) if gated else made(6, 5, 4, ("x", "weight", "bias"))
    biases = [t.requires_grad_() for name, t in given.items() if "bias" in name]
    out = linear(**given, activation=activation)
    first = torch.autograd.grad(out.sum(), biases, create_graph=True)
    if activation == "none" and not gated:
        # The gradient is a number of rows, whatever the bias is.
        assert not first[0].requires_grad
        return
    for each in first:
        with pytest.raises(RuntimeError, match="Linear: its gradient was differentiated again"):
            torch.autograd.grad(each.sum() + biases[0].sum(), biases[0], retain_graph=True)


def test_a_buffer_that_autograd_has_saved_is_noticed():
    buffer, factor = torch.ones(5, 4, device=DEVICE), torch.ones(5, 4, device=DEVICE)
    out = buffer * factor.requires_grad_()
    given = made(6, 5, 4, ("x", "weight"))
    linear(given["x"], given["weight"].requires_grad_(), main_grad=buffer).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(4,), (6, 4), (2, 3, 4)])
def test_the_result_may_be_written_in_place(activation, gated, shape):
    given = made(6, 5, 4) if gated else made(6, 5, 4, ("x", "weight", "bias"))
    given["x"] = given["x"].flatten()[: torch.Size(shape).numel()].view(shape)
    exact = {name: t.double() for name, t in given.items()}
    for each in (given, exact):
        each["weight"].requires_grad_()
    out, wanted = linear(activation=activation, **given), formula(activation, **exact)
    for each in (out, wanted):
        each += 1
        each.square().sum().backward()
    torch.testing.assert_close(
        given["weight"].grad.double(), exact["weight"].grad, rtol=1e-5, atol=1e-4
    )


def test_a_write_to_a_result_that_its_slope_comes_from_is_noticed():
    given = made(6, 5, 4, ("x", "weight"))
    out = linear(given["x"][None], given["weight"].requires_grad_(), None, "tanh")
    out += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_buffer_keeps_what_float16_would_lose():
    x = torch.full((1, 1), 2.0**-12, dtype=torch.float16, device=DEVICE)
    weight = torch.ones(1, 1, dtype=torch.float16, device=DEVICE, requires_grad=True)
    buffer = torch.ones(1, 1, device=DEVICE)
    linear(x, weight, main_grad=buffer).sum().backward()
    assert buffer.item() == 1 + 2.0**-12


@pytest.mark.parametrize(
    ("activation", "gated", "kept"),
    [
        ("none", False, 0),
        ("relu", False, 0),
        ("tanh", False, 0),
        ("gelu", False, 1),
        ("silu", False, 1),
        ("silu", True, 2),
        ("none", True, 2),
    ],
)
def test_a_layer_keeps_no_more_than_its_activation_needs(activation, gated, kept):
    """Count the tensors of the size of the result that are neither inputs nor the result."""
    given = made(6, 5, 4, ("x", "weight", "up") if gated else ("x", "weight"))
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        out = linear(**leaves, activation=activation)
    known = {t.data_ptr() for t in (*leaves.values(), out)}
    assert sum(t.data_ptr() not in known for t in saved) == kept


@pytest.mark.parametrize("m", [1, 63, 64, 65, 300])
def test_sums_of_columns_over_any_number_of_rows(m, monkeypatch):
    monkeypatch.setattr(family, "ROWS_AT_ONCE", 4)
    given = made(m, 33, 3, ("x", "weight", "bias"))
    agrees(given, "relu", atol=1e-4)


def test_gradients_repeat_bit_for_bit():
    given = made(64, 24, 16)
    dy = randn(64, 24, seed=5).to(DEVICE)
    call = lambda **t: linear(activation="silu", **t)  # noqa: E731
    first = gradients(call, given, dy)[1]
    for _ in range(100 if DEVICE == "cuda" else 2):
        again = gradients(call, given, dy)[1]
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_slopes_at_zero_infinity_and_nan_are_pytorchs(activation):
    values = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0]
    x = torch.tensor(values, device=DEVICE)[:, None]
    bias = torch.zeros(1, device=DEVICE, requires_grad=True)
    out = linear(x, torch.ones(1, 1, device=DEVICE), bias, activation)
    z = x.clone().requires_grad_()
    FORMULAS[activation](z).backward(torch.ones_like(z))
    for row in range(len(values)):
        (found,) = torch.autograd.grad(out[row], bias, torch.ones_like(out[row]), retain_graph=True)
        # The other rows have a gradient of zero, and a slope that is finite.
        torch.testing.assert_close(found, z.grad[row], equal_nan=True)


WRONG = {
    "up_bias without up": ({"up": None}, "up_bias: .*expected None"),
    "a buffer in bfloat16": (
        {"main_grad": torch.zeros(5, 4, dtype=torch.bfloat16)},
        "main_grad: torch.bfloat16, expected torch.float32",
    ),
    "a buffer of another shape": ({"main_grad": torch.zeros(4, 5)}, r"main_grad: shape \(4, 5\)"),
    "a buffer with a lazy sign": (
        {"main_grad": torch.zeros(5, 4, dtype=torch.complex64).conj().imag},
        "main_grad: a view with a lazy sign, expected plain memory",
    ),
    "a buffer for no up": (
        {"up": None, "up_bias": None, "up_main_grad": torch.zeros(5, 4)},
        "up_main_grad: .*expected None",
    ),
    "a narrow weight": (
        {"weight": torch.zeros(5, 3)},
        r"weight: shape \(5, 3\), expected \(N, 4\)",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_shapes_that_do_not_fit_are_refused(kind):
    change, words = WRONG[kind]
    change = {name: t if t is None else t.to(DEVICE) for name, t in change.items()}
    with pytest.raises((TypeError, ValueError), match=words):
        linear(**made(6, 5, 4) | change)

"""Check the judgement if eager is exact by chance: right results pass, wrong ones do not."""

import dataclasses

import pytest
import torch

from harness import status
from harness.calls import tolerance
from harness.verify import problem as oracle
from ops._spec import DTYPES, Cost, Op, Tensor, make_case


def no_cost(case, pass_, itemsize):
    return Cost(0, 0, 0)


def test_eager_that_is_exact_here_alone_allows_what_it_is_off_beside():
    def off(input):
        """Return a sum that is off by a third, but exact if the first entry is one."""
        return input.sum() * (1.0 if input[0] == 1 else 1.3)

    total = Op("total", torch.sum, {"input": Tensor("N")}, no_cost, edge=(), sweep=())
    problem = oracle.problem(total, make_case(N=40), "float32", 0, "cpu", off)
    problem.tensors["input"].abs_().div_(problem.tensors["input"][0].clone())
    exact = problem.tensors["input"].double().sum()
    lucky = {"out": tolerance.Distance(0.0, 0.0)}
    problem = dataclasses.replace(problem, oracle={"out": exact}, eager=lucky)
    result = {"out": (1.2 * exact).float()}
    assert problem.judge(result)["out"].ratio > 1 > problem.judge(result, strict=False)["out"].ratio
    result = {"out": (1.6 * exact).float()}
    assert problem.judge(result, strict=False)["out"].ratio > 1
    # Without eager only the floor of the bound remains.
    alone = dataclasses.replace(problem, eager={}, rival=None)
    assert alone.judge({"out": (1.2 * exact).float()}, strict=False)["out"].ratio > 1


@pytest.mark.parametrize("seed", range(5))
def test_a_long_sum_that_eager_rounds_without_an_error_is_allowed_its_error_beside(seed):
    def coarse(input):
        """Return the norm as PyTorch gives that of gradients: in the dtype of its terms."""
        return input.float().square().sum().sqrt().bfloat16().float()

    def norm(input):
        wide = input if input.dtype == torch.float64 else input.float()
        return wide.square().sum().sqrt()

    op = Op("norm", norm, {"input": Tensor("N")}, no_cost, edge=(), sweep=())
    problem = oracle.problem(op, make_case(N=2**16), "bfloat16", seed, "cpu", coarse)
    # That of ones is 256, which bfloat16 holds.
    problem.tensors["input"].fill_(1.0)
    exact = torch.tensor(256.0, dtype=torch.float64)
    lucky = {"out": tolerance.Distance(0.0, 0.0)}
    problem = dataclasses.replace(problem, oracle={"out": exact}, eager=lucky)
    ulp = torch.finfo(torch.bfloat16).eps
    for off, is_right in ((0.3 * ulp, True), (2 * ulp, False)):
        result = {"out": (exact * (1 + off)).float()}
        assert problem.judge(result)["out"].ratio > 1
        assert (problem.judge(result, strict=False)["out"].ratio <= 1) == is_right


@pytest.mark.parametrize("seed", range(5))
def test_a_gradient_that_cancels_is_allowed_the_error_that_eager_has_at_other_gradients(seed):
    """As in a softmax of one large score: its gradient is what is left of two equal numbers."""
    left = 3 * 2.0**-20

    class Eager(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * left

        @staticmethod
        def backward(ctx, dy):
            # The product is rounded to a multiple of an ulp of dy.
            return dy - dy * (1 - left)

    op = Op(
        "left",
        lambda x: x * left,
        {"x": Tensor("N")},
        no_cost,
        edge=(),
        sweep=(),
        passes=("forward", "backward"),
    )
    problem = oracle.problem(op, make_case(N=1), "float32", seed, "cpu", Eager.apply)
    # Here the product is exact.
    (dy,) = problem.seeds
    dy.fill_(1.0)
    exact = torch.tensor([left], dtype=torch.float64)
    lucky = problem.eager | {"dx": tolerance.Distance(0.0, 0.0)}
    problem = dataclasses.replace(problem, oracle=problem.oracle | {"dx": exact}, eager=lucky)
    assert problem.judge({"dx": exact.float()})["dx"].ratio == 0
    half_an_ulp = torch.finfo(torch.float32).eps / 4
    for off, is_right in ((half_an_ulp, True), (20 * half_an_ulp, False)):
        result = {"dx": (exact + off).float()}
        assert problem.judge(result)["dx"].ratio > 1
        assert (problem.judge(result, strict=False)["dx"].ratio <= 1) == is_right


def test_an_ill_conditioned_sum_is_allowed_what_rounding_its_terms_does():
    total = Op("total", torch.sum, {"input": Tensor("N")}, no_cost, edge=(), sweep=())
    problem = oracle.problem(total, make_case(N=4000), "float32", 0, "cpu", torch.sum)
    mean = problem.tensors["input"].mean()
    # Now the terms cancel, and eager is exact by luck.
    problem.tensors["input"].sub_(mean)
    exact = problem.tensors["input"].double().sum()
    lucky = {"out": tolerance.Distance(0.0, 0.0)}
    problem = dataclasses.replace(problem, oracle={"out": exact}, eager=lucky)
    result = {"out": (exact + 2e-6).float()}
    assert problem.judge(result)["out"].ratio > 1 > problem.judge(result, strict=False)["out"].ratio
    result = {"out": (exact + 2e-3).float()}
    assert problem.judge(result, strict=False)["out"].ratio > 1


def test_a_gradient_from_a_result_is_allowed_what_rounding_that_result_does():
    """tanh is flat near 3.6: its results at the next numbers are the same number."""
    op = Op("tanh", torch.tanh, {"x": Tensor("N")}, no_cost, (), (), passes=("forward", "backward"))
    problem = oracle.problem(op, make_case(N=500), "float32", 0, "cpu", torch.tanh)
    # Here eager's result is exact by luck, and so is its gradient.
    some = torch.linspace(3.5, 3.7, 4000)
    luckiest = (torch.tanh(some) - torch.tanh(some.double())).abs().argmin()
    problem.tensors["x"].fill_(some[luckiest].item())
    y = torch.tanh(problem.tensors["x"].double())
    exact = {"out": y, "dx": problem.seeds[0].double() * (1 - y.square())}
    lucky = dict.fromkeys(exact, tolerance.Distance(0.0, 0.0))
    problem = dataclasses.replace(problem, oracle=exact, eager=lucky)
    ulp = torch.finfo(torch.float32).eps / 2
    for ulps, right in ((0, True), (0.5, True), (5, False)):
        slope = 1 - (y + ulps * ulp).square()
        found = {"dx": (problem.seeds[0].double() * slope).float()}
        assert (problem.judge(found, strict=False)["dx"].ratio <= 1) == right


# Float64 holds this factor; in float32 it rounds to one, as do float32 results computed with it.
FACTOR = 1 + 2.0**-40


def scaled(x):
    return x * FACTOR


SCALED = Op(
    "scaled",
    scaled,
    {"x": Tensor("N")},
    no_cost,
    edge=(),
    sweep=(),
    passes=("forward", "backward"),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_oracle_is_computed_in_float64(dtype):
    problem = oracle.problem(SCALED, make_case(N=50), dtype, 0, "cpu", scaled)
    x, (dy,) = problem.tensors["x"].double(), problem.seeds
    for name, exact in (("out", x * FACTOR), ("dx", dy.double() * FACTOR)):
        assert problem.oracle[name].dtype == torch.float64
        assert torch.equal(problem.oracle[name], exact)
        assert not torch.equal(problem.oracle[name], exact.to(problem.tensors["x"].dtype).double())
        if dtype == "float32":
            # Float32 would round the distance to zero, so it is taken in float64.
            assert 2.0**-41 < problem.eager[name].max <= torch.finfo(torch.float32).eps


def test_eager_beside_the_inputs_is_held_against_float64_too():
    problem = oracle.problem(SCALED, make_case(N=50), "float32", 0, "cpu", scaled)
    exact = dict.fromkeys(problem.eager, tolerance.Distance(0.0, 0.0))
    problem = dataclasses.replace(problem, eager=exact)
    for found in problem.eager_worst_nearby.values():
        assert 2.0**-41 < found.max <= torch.finfo(torch.float32).eps


def test_the_sensitivity_is_of_the_oracle_in_float64():
    seen = []

    def noting(x):
        seen.append(x.dtype)
        return x * FACTOR

    op = dataclasses.replace(SCALED, reference=noting)
    problem = oracle.problem(op, make_case(N=50), "float32", 0, "cpu", scaled)
    seen.clear()
    half = torch.finfo(torch.float32).eps / 2
    for found in problem.sensitivity.values():
        assert half / 4 < found.max <= half * (1 + 1e-6)
    assert seen == [torch.float64] * oracle.ROUNDINGS


def test_an_oracle_gets_a_narrow_tensor_as_it_is_and_others_in_float64():
    seen = []

    def reference(x, m):
        seen.append((x.dtype, m.dtype))
        return x + m.to(x.dtype)

    inputs = {"x": Tensor("N"), "m": Tensor("N", grad=False, narrow=True)}
    op = Op("sum", reference, inputs, no_cost, edge=(), sweep=())
    problem = oracle.problem(op, make_case(N=40), "bfloat16", 0, "cpu", lambda x, m: x + m)
    wide = torch.float64, torch.bfloat16
    assert wide in seen
    x, m = (problem.tensors[name].double() for name in ("x", "m"))
    assert torch.equal(problem.oracle["out"], x + m)
    for nearby in ("sensitivity", "eager_worst_nearby"):
        seen.clear()
        getattr(problem, nearby)
        assert set(seen) == {wide}


@pytest.mark.parametrize("full", [True, False])
def test_a_bound_without_eager_is_not_for_want_of_memory(full):
    """The reference in the dtype of the cell takes the place of eager, and may find none either."""

    def total(input):
        if full and input.dtype == torch.float32 and not input.is_meta:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return input.sum()

    def starved(input):
        raise torch.OutOfMemoryError("CUDA out of memory")

    op = Op("total", total, {"input": Tensor("N")}, no_cost, edge=(), sweep=())
    if not full:
        assert oracle.problem(op, make_case(N=40), "float32", 0, "cpu", starved).rival is total
        return
    with pytest.raises(MemoryError, match="CUDA out of memory") as raised:
        oracle.problem(op, make_case(N=40), "float32", 0, "cpu", starved)
    assert status.of(raised.value) == "oom"

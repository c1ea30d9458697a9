"""Where eager is exact by chance, what is right is not refused, and what is wrong still is."""

import dataclasses

import torch

from harness import oracle, tolerance
from kernels._contract import Cost, Op, Tensor, case


def no_cost(a_case, direction, itemsize):
    return Cost(0, 0, 0)


def test_eager_that_is_exact_here_alone_allows_what_it_is_off_beside():
    def off(input):
        """A third off, but exact where the first entry is one."""
        return input.sum() * (1.0 if input[0] == 1 else 1.3)

    total = Op("total", torch.sum, {"input": Tensor("N")}, no_cost, edge=(), sweep=())
    problem = oracle.problem(total, case(N=40), "float32", 0, "cpu", off)
    problem.tensors["input"].abs_().div_(problem.tensors["input"][0].clone())
    exact = problem.tensors["input"].double().sum()
    lucky = {"out": tolerance.Distance(0.0, 0.0)}
    problem = dataclasses.replace(problem, oracle={"out": exact}, eager=lucky)
    result = {"out": (1.2 * exact).float()}
    assert problem.judge(result)["out"].ratio > 1 > problem.judge(result, closely=True)["out"].ratio
    result = {"out": (1.6 * exact).float()}
    assert problem.judge(result, closely=True)["out"].ratio > 1
    # Where there is no eager, the floor alone is left.
    alone = dataclasses.replace(problem, eager={}, rival=None)
    assert alone.judge({"out": (1.2 * exact).float()}, closely=True)["out"].ratio > 1


def test_an_ill_conditioned_sum_is_allowed_what_rounding_its_terms_does():
    total = Op("total", torch.sum, {"input": Tensor("N")}, no_cost, edge=(), sweep=())
    problem = oracle.problem(total, case(N=4000), "float32", 0, "cpu", torch.sum)
    mean = problem.tensors["input"].mean()
    # Now the terms cancel, and eager is exact by luck.
    problem.tensors["input"].sub_(mean)
    exact = problem.tensors["input"].double().sum()
    lucky = {"out": tolerance.Distance(0.0, 0.0)}
    problem = dataclasses.replace(problem, oracle={"out": exact}, eager=lucky)
    result = {"out": (exact + 2e-6).float()}
    assert problem.judge(result)["out"].ratio > 1 > problem.judge(result, True)["out"].ratio
    result = {"out": (exact + 2e-3).float()}
    assert problem.judge(result, closely=True)["out"].ratio > 1

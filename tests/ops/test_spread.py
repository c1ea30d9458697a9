"""Check that inputs resemble a network's: no result vanishes, saturates or explodes.

With logits of standard deviation 45 a softmax is a step and nearly all gradients are zero. An error
bound relative to the largest entry then says nothing. Each op is checked at the sizes of its sweep,
cut so that float64 takes a moment.
"""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from harness.calls import inputs, invoke, tolerance
from harness.project import registry, source_tree
from harness.verify import problem
from ops._spec import Case, make_case

ROOT = Path(__file__).parents[2]

OPS = {name: registry.op(name)[0] for name in source_tree.ops(ROOT)}
# Sums over a dimension grow with it unless weights shrink with it, so sizes are not cut below this.
LONGEST, ROWS = 512, 4
LEAST, MOST = 1e-4, 10.0
# A single number is a sum over all entries.
MOST_ALONE = 100.0
# An entry is nearly zero below this share of the largest entry; relu and masks leave such entries.
NOTHING, MOST_NOTHING = 1e-6, 0.6


def cut(case: Case) -> Case:
    """Return the case with few rows; a product and heads keep their last two sizes."""
    letters = list(case.sizes)
    rows = letters[: max(len(letters) - 2, len(letters) > 1)]
    most = {letter: ROWS if letter in rows else LONGEST for letter in case.sizes}
    sizes = {letter: min(size, most[letter]) for letter, size in case.sizes.items()}
    return dataclasses.replace(case, sizes=sizes)


def computed(op, case, seed):
    """Return the inputs of a case, and the outputs and gradients of the oracle."""
    tensors = {
        name: t.double() if t is not None and t.is_floating_point() else t
        for name, t in inputs.make(op, case, "float32", seed, "cpu").items()
    }
    outputs = invoke.run(op, op.reference, case, tensors)
    seeds = inputs.gradients(tuple(outputs.values()), seed) if op.differentiable else None
    return tensors, invoke.run(op, op.reference, case, tensors, seeds)


def odd(op, case):
    """Yield each result whose entries are too small, too large or mostly zero, with the reason."""
    tensors, results = computed(op, case, 5)
    for name, result in results.items():
        if not result.is_floating_point():
            continue
        assert result.isfinite().all(), name
        if op.name == "embedding" and name == "dweight":
            # A row of the gradient is zero unless a token has it.
            result = result[tensors["ids"]]
        size, largest = result.square().mean().sqrt().item(), result.abs().max().item()
        if not LEAST <= size <= (MOST if result.numel() > 1 else MOST_ALONE):
            yield f"{name}: root mean square {size:.2g}"
        share = (result.abs() <= NOTHING * largest).double().mean().item()
        if share > MOST_NOTHING:
            yield f"{name}: {share:.1%} next to nothing"


@pytest.mark.parametrize("name", OPS)
def test_results_and_gradients_are_of_the_size_that_networks_compute_with(name):
    op = OPS[name]
    for case in {cut(each).name: cut(each) for each in op.sweep}.values():
        assert list(odd(op, case)) == [], case.name


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", [name for name in OPS if "attention" in name])
def test_large_scores_leave_gradients_that_do_not_cancel(name, seed):
    # Seen on a GPU: if they cancel, kernels of ours and of all libraries fail or pass by chance.
    op = OPS[name]
    case = next(case for case in op.edge if case.values == "large")
    _, results = computed(op, case, seed)
    assert all(result.abs().max() > 0.1 for result in results.values())


@pytest.mark.parametrize(("name", "tensor"), [("linear_cross_entropy", "weight"), ("matmul", "b")])
def test_a_weight_without_its_scale_is_seen(name, tensor):
    op = OPS[name]
    plain = {tensor: dataclasses.replace(op.inputs[tensor], scale=1.0)}
    broken = dataclasses.replace(op, inputs=dict(op.inputs) | plain)
    # Label smoothing gives every class a gradient, however steep the softmax is.
    cases = [cut(each) for each in op.sweep if "smooth" not in each.flags]
    assert all(list(odd(broken, each)) for each in cases)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.02), ("float16", 0.0025)])
def test_the_bound_of_a_fused_loss_is_a_few_roundings(dtype, most):
    """With logits of standard deviation 22 the bound of bfloat16 gradients was 0.15."""
    op = OPS["linear_cross_entropy"]
    eager = registry.function(op.name, "torch_eager")
    found = problem.problem(op, make_case(M=64, H=512, V=2000), dtype, 3, "cpu", eager, ones=True)
    for name in ("dx", "dweight"):
        verdict = tolerance.judge(found.eager[name], found.eager[name], getattr(torch, dtype))
        assert verdict.bound.max < most


def test_scaled_scores_are_of_unit_deviation():
    op = OPS["softmax"]
    for case in (make_case(M=40, N=500), make_case("scaled", M=40, N=500)):
        x = inputs.make(op, case, "float32", 0, "cpu")["x"]
        assert (x * op.arguments(case)["scale"]).std().item() == pytest.approx(1, abs=0.05)


def test_angles_turn_and_do_not_stretch():
    op, case = OPS["rotary"], make_case(B=1, S=6, H=1, K=1, D=8, R=4)
    made = [inputs.make(op, case, "float32", seed, "cpu") for seed in (0, 1)]
    for each in made:
        unit = each["cos"].square() + each["sin"].square()
        torch.testing.assert_close(unit, torch.ones(6, 4))
        # The first pair turns by one radian from a position to the next, the others by less.
        angles = torch.atan2(each["sin"], each["cos"]).diff(dim=0).remainder(2 * math.pi)
        torch.testing.assert_close(angles[:, 0], torch.ones(5), atol=1e-5, rtol=0)
        assert (angles.mean(0).diff() < 0).all()
    assert not torch.equal(made[0]["cos"], made[1]["cos"])

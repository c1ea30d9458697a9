"""Check the verifying worker if memory runs out, and that it keeps none between two cases."""

import weakref

import pytest
import torch

from harness.project import registry
from harness.verify import problem as oracle
from harness.verify import worker
from ops._spec import Cost, Op, Tensor, make_case

OP = Op(
    "scaled",
    lambda x, weight: x * weight,
    {"x": Tensor("M N"), "weight": Tensor("N")},
    lambda *_: Cost(0, 0, 0),
    edge=(),
    sweep=(make_case(M=8, N=16),),
    passes=("forward", "backward"),
)


@pytest.fixture
def moved(monkeypatch):
    """The tensors that went to the memory of the host."""
    found = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: found.append(tensor) or tensor)
    return found


@pytest.fixture
def checked(monkeypatch):
    """Return what a worker says of the case of OP, by implementation and passes."""

    def check(function, *passes, spare=False):
        fake = {"in_place": False, "wide": (), "settings": "", "accumulates": "", "version": "1"}
        for name, value in fake.items():
            monkeypatch.setattr(registry, name, lambda *_, value=value: value)
        monkeypatch.setattr(registry, "op", lambda name: (OP, "family"))
        monkeypatch.setattr(registry, "function", lambda op, impl: function())
        made = worker.VerifyWorker("scaled", "ours", 0)
        made.choose(False, ["float32"], passes, ["sweep"], spare=spare)
        return made.check(0)

    return check


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_the_oracle_leaves_the_gpu_if_memory_runs_out(checked, moved, spare, full):
    """It may do so if nothing else helps, and does it only for want of memory."""

    def crowded(x, weight):
        if full and not moved:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * weight

    found = checked(lambda: crowded, "forward", spare=spare)
    assert [cell["status"] for cell in found.cells] == ["oom" if full and not spare else "ok"]
    assert found.alive == (spare or not full)
    assert [tensor.dtype for tensor in moved] == [torch.float64] * len(moved)
    assert bool(moved) == (spare and full)


class Network:
    """Keep what a call was given, as a network keeps its weights, until it is told to forget it.

    As long as nothing has moved, results are wrong and a backward pass finds no memory.
    """

    def __init__(self, moved, given):
        self.moved, self.given, self.kept = moved, given, []

    def __call__(self, x, weight):
        self.given.append(weakref.ref(x))
        self.kept += [x, self.kept]
        if torch.is_grad_enabled() and not self.moved:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return x * weight * (1 if self.moved else 2)

    def forget(self):
        self.kept = []


def test_passes_without_memory_run_again_as_in_a_new_process(checked, moved, monkeypatch):
    """A verdict on another pass stays. Nothing of the first run is in the way of the second."""
    given, left, problem = [], [], oracle.problem

    def noting(*about):
        left.append(sum(each() is not None for each in given))
        return problem(*about)

    monkeypatch.setattr(oracle, "problem", noting)
    found = checked(lambda: Network(moved, given), "forward", "backward", spare=True)
    judged = [(cell["pass"], cell["status"]) for cell in found.cells]
    assert judged == [("forward", "inaccurate"), ("backward", "ok")]
    assert found.alive and given and left == [0, 0]


def test_a_network_holds_no_memory_between_two_cases(checked):
    """Other verifications share the GPU."""
    given = []
    found = checked(lambda: Network([1], given), "forward")
    assert [cell["status"] for cell in found.cells] == ["ok"]
    assert given and all(each() is None for each in given)

"""A training step as a CUDA graph: what it does on the host, with a graph that calls again."""

import contextlib
import copy
import dataclasses

import pytest
import torch

from network import calls, stack
from network.config import preset
from network.step_graph import StepGraph
from network.train import TrainStep
from tests.support.networks import built, plain, tokens


class Graph:
    """A graph whose replay calls the step again; its results lie where the captured ones lay."""

    made, owner = 0, None

    def __init__(self):
        type(self).made += 1

    def replay(self):
        graph = self.owner
        number = graph.step.number
        graph._loss.copy_(graph.step(graph._ids, graph._targets))
        graph.step.number = number


@pytest.fixture
def captured(monkeypatch):
    """Make a graph on the CPU, whose capture changes nothing, as one on a GPU does."""
    monkeypatch.setattr(Graph, "made", 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)

    @contextlib.contextmanager
    def capture(graph):
        step = graph.owner.step
        held = [*step.model.parameters(), step.model.dropout_seed]
        held += [x for state in step.optimizer.state.values() for x in state.values()]
        before = [x.detach().clone() for x in held]
        yield
        with torch.no_grad():
            for each, value in zip(held, before, strict=True):
                each.copy_(value)

    monkeypatch.setattr(torch.cuda, "graph", capture)

    def graphed():
        graph = StepGraph(TrainStep(built(plain("tiny")), check=False))
        monkeypatch.setattr(Graph, "owner", graph)
        return graph

    return graphed


def test_each_call_takes_one_step_on_its_own_tokens(captured):
    graph, plain_step = captured(), TrainStep(built(plain("tiny")), check=False)
    for number in range(5):
        batch = tokens(seed=number)
        loss, expected = graph(*batch), plain_step(*batch)
        assert torch.equal(loss, expected)
        assert graph.step.number == plain_step.number == number + 1
    pairs = zip(graph.step.model.parameters(), plain_step.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert Graph.made == 1


def test_a_loss_outlives_the_next_call(captured):
    graph = captured()
    *_, second, third = (graph(*tokens()) for _ in range(3))
    kept = third.item()
    fourth = graph(*tokens())
    assert third.item() == kept != fourth.item() and second.item() != kept


def begun(graph):
    """Take two steps: the second is captured."""
    for _ in range(2):
        graph(*tokens())


def test_a_step_that_is_taken_once_keeps_no_graph(captured):
    graph = captured()
    graph(*tokens())
    assert Graph.made == 0


def test_moved_weights_are_captured_anew(captured):
    graph = captured()
    begun(graph)
    weight = next(graph.step.model.parameters())
    weight.data = weight.detach().clone()
    graph(*tokens())
    assert Graph.made == 1
    begun(graph)
    assert Graph.made == 2


def lower_rate(step):
    step.optimizer.param_groups[1]["lr"] /= 2


def rate_as_a_tensor(step):
    step.optimizer.param_groups[0]["lr"] = torch.tensor(1e-4)


def lower_clip(step):
    step.clip /= 2


def moved_seed(step):
    step.model.dropout_seed = step.model.dropout_seed.clone()


def frozen_weight(step):
    next(step.model.parameters()).requires_grad_(False)


def own_backward_pass(step):
    step.model(*tokens(seed=9)).backward()


CHANGES = [
    lower_rate, rate_as_a_tensor, lower_clip, moved_seed, frozen_weight, own_backward_pass
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_that_a_graph_does_not_hold_runs_as_it_is(captured, change):
    graph, plain_step = captured(), TrainStep(built(plain("tiny")), check=False)
    for number in range(6):
        if number == 3:
            change(graph.step)
            change(plain_step)
        assert torch.equal(graph(*tokens()), plain_step(*tokens()))
        assert Graph.made == (0, 1, 1, 1, 2, 2)[number]


@pytest.mark.parametrize("name", ["clip", "beta1", "beta2", "eps"])
def test_a_changed_number_of_our_optimizer_runs_as_it_is(captured, name):
    graph = captured()
    setattr(graph.step.optimizer, name, 0.5)
    begun(graph)
    setattr(graph.step.optimizer, name, 0.25)
    graph(*tokens())
    assert graph._graph is None


def test_targets_of_another_shape_are_not_spread(captured):
    graph, (ids, targets) = captured(), tokens()
    begun(graph)
    with pytest.raises(ValueError, match="batch_size"):
        graph(ids, targets[:1])


def test_a_replay_leaves_the_model_in_training(captured, monkeypatch):
    graph = captured()
    begun(graph)
    graph.step.model.eval()
    monkeypatch.setattr(Graph, "replay", lambda self: None)
    graph(*tokens())
    assert all(module.training for module in graph.step.model.modules())


@pytest.mark.parametrize("late", [False, True], ids=["within-a-step", "after-it"])
def test_a_capture_that_fails_leaves_the_step_as_it_was(captured, monkeypatch, late):
    def failing(*args):
        raise RuntimeError("no capture")

    @contextlib.contextmanager
    def refusing(graph):
        yield
        failing()

    graph, plain_step = captured(), TrainStep(built(plain("tiny")), check=False)
    assert torch.equal(graph(*tokens()), plain_step(*tokens()))
    held = copy.deepcopy(graph.step.model.state_dict())
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no capture"):
        if late:
            # The model of the CPU computes in a capture; on a GPU it would not.
            patch.setattr(graph.step, "update", lambda: None)
            patch.setattr(torch.cuda, "graph", refusing)
        else:
            patch.setattr(graph.step, "update", failing)
        graph(*tokens())
    assert graph.step.number == 1 and graph._loss is None
    graph.step.model.load_state_dict(held)
    assert all(weight.grad is None for weight in graph.step.model.parameters())
    for _ in range(3):
        assert torch.equal(graph(*tokens()), plain_step(*tokens()))


def test_a_dropped_graph_is_captured_anew(captured):
    graph = captured()
    begun(graph)
    graph.drop()
    begun(graph)
    assert Graph.made == 2 and graph.step.number == 4


def test_other_shapes_are_captured_anew(captured):
    graph, plain_step = captured(), TrainStep(built(plain("tiny")), check=False)
    for length in (12, 12, 12, 3, 3, 3):
        batch = [x[:, :length] for x in tokens()]
        assert torch.equal(graph(*batch), plain_step(*batch))
    assert Graph.made == 2


@pytest.mark.parametrize("settings", [{"check": True}, {"check": False, "warmup": 3}])
def test_a_step_with_work_on_the_host_is_refused(settings):
    with pytest.raises(ValueError, match="has a check or a warmup, which a graph does not hold"):
        StepGraph(TrainStep(built(plain("tiny")), **settings))


def test_a_stack_whose_loss_reads_a_number_on_the_host_is_not_captured():
    plain_stack = stack.load("torch_eager")
    host = dataclasses.replace(plain_stack, name="host", graph=False)
    assert calls.Train(plain_stack).graph and not calls.Train(host).graph
    assert calls.Train(plain_stack).remarks != calls.Train(host).remarks
    assert not calls.Train(plain_stack, graph=False).graph
    assert not plain_stack.with_parts_of(host).graph


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch_eager", "torch_compile", "ours", "ours_cublas"])
def test_a_replayed_step_gives_the_losses_of_one_that_the_host_launches(name):
    found = []
    for graphed in (False, True):
        used = stack.load(name)
        model = used.build(plain("tiny"), device="cuda")
        step = TrainStep(model, check=False, optimizer=used.optimizer)
        step = StepGraph(step) if graphed else step
        batches = ([x.cuda() for x in tokens(seed=number)] for number in range(6))
        found.append(torch.stack([step(*batch) for batch in batches]))
    assert torch.allclose(*found, rtol=1e-4), found


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch_eager", "ours"])
def test_each_replay_drops_other_entries(name):
    used = stack.load(name)
    model = used.build(preset("tiny-gpt2"), device="cuda")
    step = TrainStep(model, check=False, rate=0.0, optimizer=used.optimizer)
    graph, batch = StepGraph(step), [x.cuda() for x in tokens()]
    assert len({graph(*batch).item() for _ in range(6)}) == 6


@pytest.mark.gpu
def test_the_memory_of_a_graph_is_given_back():
    """A graph that is made and dropped in each block of a measurement must leave nothing."""
    used = stack.load("ours")
    model = used.build(plain("tiny"), device="cuda")
    graph = StepGraph(TrainStep(model, check=False, optimizer=used.optimizer))
    batch, held = [x.cuda() for x in tokens()], []
    for _ in range(6):
        graph(*batch)
        graph(*batch)
        graph(*batch)
        graph.drop()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[1:] == held[1:2] * 5

"""Inference as a CUDA graph: what is refused, in words; a GPU also replays."""

import pytest
import torch

from network import stack
from network.cache import Cache
from network.config import undropped
from network.cuda_graph import _require_alike, _split, cuda_graph
from network.decode import decode
from tests.support.networks import built, plain, tokens


@pytest.fixture
def model():
    return built(plain("tiny")).eval()


def refused(model, example):
    with cuda_graph(model, example):
        raise AssertionError("the block ran")


def test_a_model_in_training_or_with_a_gradient_is_refused(model):
    ids, _ = tokens()
    with pytest.raises(ValueError, match="wants a gradient, which a captured graph does not"):
        refused(model, ids)
    with torch.no_grad(), pytest.raises(ValueError, match=r"training mode, expected model\.eval"):
        refused(model.train(), ids)
    assert "forward" not in model.__dict__


@pytest.mark.no_gpu
def test_a_machine_without_a_gpu_is_named(model):
    with torch.no_grad(), pytest.raises(ValueError, match="no GPU is visible, and a CUDA graph"):
        refused(model, tokens()[0])


def test_tensors_must_be_on_the_gpu(model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with torch.no_grad():
        with pytest.raises(ValueError, match="model: a tensor on cpu, expected cuda"):
            refused(model, tokens()[0])
        with pytest.raises(ValueError, match="example: has no tensor"):
            refused(model, (3,))
        with pytest.raises(TypeError, match="example: list, expected a tensor, a tuple or a map"):
            refused(model, [tokens()[0]])


def test_an_example_is_a_tensor_a_tuple_or_a_mapping():
    x = torch.ones(2)
    assert _split(x) == ((x,), {}) and _split((x, 1)) == ((x, 1), {})
    assert _split({"ids": x}) == ((), {"ids": x})


@pytest.mark.parametrize(
    ("given", "held", "error", "words"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), ValueError, r"shape \(2, 3\), expected \(2, 4\)"),
        (torch.ones(2), torch.ones(2).half(), ValueError, "dtype torch.float32, expected torch.f"),
        (5, torch.ones(2), TypeError, "argument 1: int, expected a tensor"),
        (5, 6, ValueError, "argument 1: 5, expected 6 as in the example"),
    ],
)
def test_a_call_unlike_the_example_is_refused(given, held, error, words):
    with pytest.raises(error, match=words):
        _require_alike(1, given, held)
    _require_alike(1, held, held)


@pytest.mark.gpu
def test_a_replay_gives_what_the_model_gives_and_leaves_it_as_it_was():
    config = undropped("tiny-gpt2")
    model = stack.load("torch_eager").build(config, device="cuda").eval()
    ids, others = (tokens(seed=seed)[0].cuda() for seed in (0, 1))
    with torch.no_grad():
        expected = model(ids), model(others)
        with cuda_graph(model, ids) as same:
            assert same is model
            found = model(ids), model(others)
            with pytest.raises(ValueError, match="a graph serves the shapes of its example"):
                model(ids[:, :3])
        assert "forward" not in model.__dict__
        assert model(ids[:, :3]).shape == (2, 3, 256)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch_eager", "ours"])
def test_decoded_tokens_of_a_graph_are_those_without(name):
    from network.token_graph import TokenGraph

    model = stack.load(name).build(undropped("tiny"), device="cuda").eval()
    ids = tokens()[0].cuda()
    with torch.no_grad():
        plain_tokens = decode(model, ids, 6)
        cache = Cache(model.config, 2, 18, device="cuda")
        found = [model(ids, cache=cache).argmax(-1, keepdim=True)]
        graph = TokenGraph(model, cache)
        for _ in range(5):
            found.append(graph(found[-1]).argmax(-1, keepdim=True))
        assert torch.equal(torch.cat(found, 1), plain_tokens)
        graph(found[-1])
        with pytest.raises(ValueError, match="full, 18 of 18 positions"):
            graph(found[-1])
    assert graph.valid()

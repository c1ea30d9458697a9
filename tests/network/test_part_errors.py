"""Each part of ours within a training step in bfloat16, beside eager PyTorch and float64."""

import dataclasses

import pytest
import torch

from kernels.cross_entropy_details import linear_chunks
from network import flat, stack
from network.config import undropped
from tests.support.bfloat16 import right_bfloat16, rounded, widened
from tests.support.part_errors import (
    compared,
    gradient_error,
    gradients,
    part_errors,
    restless,
)

# The heads of GPT-2, its odd vocabulary, and rows that make whole tiles and a part of one.
GPT2 = dataclasses.replace(
    undropped("tiny-gpt2"), layers=1, width=128, heads=2, kv_heads=2, head_dim=64, vocabulary=1031,
    length=192,
)  # fmt: skip
ROWS, FEW = (1, 150), (1, 40)


def drawn(rows=ROWS):
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(flat.size(GPT2), generator=generator).bfloat16()
    ids, targets = torch.randint(GPT2.vocabulary, (2, *rows), generator=generator)
    return flat.scale_as_drawn(GPT2, weights), ids, targets


@pytest.fixture
def short_chunks(monkeypatch):
    """The last chunk of the loss is shorter than the others, as with GPT-2's 16,384 rows."""
    monkeypatch.setattr(linear_chunks, "LEAST_ROWS", 1)
    monkeypatch.setattr(linear_chunks, "BUFFER_BYTES", 1)


def test_bfloat16_of_the_interpreter_is_pytorch_s():
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    found = torch.from_numpy(rounded(x.numpy()).view("int16")).view(torch.bfloat16)
    same = (found == x.bfloat16()) | (found.isnan() & x.isnan())
    assert same.all() and x.isnan().any()
    wide = widened(found.view(torch.int16).numpy())
    assert torch.equal(torch.from_numpy(wide).nan_to_num(), found.float().nan_to_num())


@pytest.mark.no_gpu
def test_each_part_of_ours_is_as_near_to_float64_as_eager(short_chunks):
    ours = stack.load("ours")
    groups = compared(ours, GPT2)
    assert {"layer_norm", "attention", "gelu", "loss"} < set(groups[0])
    with right_bfloat16():
        errors = [error for names in groups for error in part_errors(ours, names, GPT2, *drawn())]
    assert {error.part for error in errors} == {name for names in groups for name in names}
    assert [str(error) for error in errors if not error.verdict.ratio <= 1] == []


def of_eager(**others):
    """Eager PyTorch as a stack of its own, with some parts replaced."""
    eager = stack.load(stack.EAGER)
    parts = eager.parts.with_parts(**others)
    return dataclasses.replace(eager, parts=parts, own=("attention", "gelu", "layer_norm", "loss"))


def forgets_its_mean(x, weight, bias, eps, residual):
    """A layer norm whose gradient keeps the mean that it should not have."""
    y, total = stack.load(stack.EAGER).parts.layer_norm(x, weight, bias, eps, residual)
    leaked = total - total.detach()
    return y + leaked.mean(-1, keepdim=True), total


def loses_a_chunk(x, weight, targets):
    """A loss whose last eighth of the rows gives the weight no gradient."""
    last = len(x) - len(x) // 8
    logits = torch.cat((x[:last] @ weight.T, x[last:] @ weight.detach().T))
    return torch.nn.functional.cross_entropy(logits, targets)


@pytest.mark.parametrize(
    ("part", "tensor", "fault"),
    [("layer_norm", "d0", forgets_its_mean), ("loss", "d1", loses_a_chunk)],
)
def test_a_fault_has_the_name_of_its_part_and_tensor(part, tensor, fault):
    faulty = of_eager(**{part: fault})
    (names,) = compared(faulty, GPT2)
    wrong = [e for e in part_errors(faulty, names, GPT2, *drawn(FEW)) if e.verdict.ratio > 1]
    assert {error.part for error in wrong} == {part}
    assert str(wrong[0]).startswith(f"{part}, call ") and tensor in {e.tensor for e in wrong}


def test_gradients_of_the_step_show_such_a_fault_too():
    weights, ids, targets = drawn(FEW)
    eager = stack.load(stack.EAGER).parts
    exact = gradients(None, GPT2, weights, ids, targets)
    plain = gradients(eager, GPT2, weights, ids, targets)
    assert gradient_error(plain, plain, exact)[0] < 0.5
    lost = gradients(eager.with_parts(loss=loses_a_chunk), GPT2, weights, ids, targets)
    ratio, named = gradient_error(lost, plain, exact)
    assert ratio > 1 and named.startswith("transformer.wte.weight")


def test_the_oracle_takes_sequences_one_by_one():
    weights, ids, targets = drawn((3, 9))
    exact = gradients(None, GPT2, weights, ids, targets)
    parts = stack.load(stack.EAGER).parts
    at_once = gradients(parts, GPT2, weights.double(), ids, targets)
    for name, gradient in at_once.items():
        assert torch.allclose(gradient, exact[name], rtol=1e-9, atol=1e-12)


def test_a_part_that_varies_is_named():
    def varies(x):
        return torch.nn.functional.gelu(x, approximate="tanh") + 1e-3 * torch.rand(())

    def run(parted):
        weights, ids, _ = drawn((1, 9))
        with torch.no_grad():
            flat.bound(GPT2, parted.parts, weights.float())(ids)

    assert restless(of_eager(), run) == {}
    assert restless(of_eager(gelu=varies), run) == {"gelu": GPT2.layers}

"""Check tensors of more than 2**31 elements: their last rows equal those rows computed alone.

Without a GPU, where that would take days, the same law is tried on some thousand elements.
"""

import dataclasses
import gc
from pathlib import Path

import pytest
import torch

from harness.calls import inputs, invoke
from harness.machine import nvml
from harness.project import registry
from harness.project.implementations import OURS
from harness.study import jobs
from kernels.attention_varlen import attention_varlen
from kernels.random import LEVELS, dropout, randint
from ops._philox import philox_words

DEVICE = "cuda" if nvml.gpus() else "cpu"
ELEMENTS = 2**31 if DEVICE == "cuda" else 2**12
# The largest of these calls, a backward pass of five tensors, fits into this memory.
MEMORY = 64 * 2**30
DTYPE = "bfloat16"
# The interpreter takes seconds for a long row.
LONGEST = 2**30 if DEVICE == "cuda" else 2**12
# Elements between rows: three such steps pass 2**31. The number is a multiple of 16, because
# otherwise another kernel may run, which rounds differently.
APART = 2**30 + 16
OPS = [
    name
    for name in sorted(jobs.ops(Path(__file__).parents[2]))
    if not registry.op(name)[0].properties
    # An op over lists of tensors has no rows.
    and "lengths" not in registry.op(name)[0].params
]


def _cut(name):
    """Return whether rows belong to parts, so that the last of them mean nothing alone."""
    return any(spec.cuts for spec in registry.op(name)[0].inputs.values())


def _rank(name):
    op = registry.op(name)[0]
    return len(next(iter(op.inputs.values())).letters(plain(op).sizes))


pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.mem_get_info()[0] < MEMORY,
    reason="needs a GPU with 64 GiB of free memory",
)


@pytest.fixture(autouse=True)
def emptied():
    yield
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def plain(op):
    """Return the largest plain edge case without a flag."""
    found = [case for case in op.edge if not (case.flags or case.layout or case.values)]
    found = [case for case in found if DTYPE in op.dtypes_of(case)]
    return max(
        (case for case in found if max(case.sizes.values()) <= LONGEST or case is found[0]),
        key=lambda case: sum(case.sizes.values()),
    )


def grown(tail, spec, letter, rows):
    """Return a tensor that ends in the rows of `tail`, after rows of zeros or ignored targets."""
    always = [each for each in spec.shape.split() if not each.endswith("?")]
    if tail is None or always[:1] != [letter]:
        return tail
    size = rows, *tail.shape[1:]
    whole = torch.full(
        size, spec.sentinel[1] if spec.sentinel else 0, dtype=tail.dtype, device=DEVICE
    )
    whole[-len(tail) :] = tail
    return whole


def last(whole, part):
    """Return the end of a result, as long as the result of the last rows alone."""
    for axis, (size, length) in enumerate(zip(whole.shape, part.shape, strict=True)):
        whole = whole.narrow(axis, size - length, length)
    return whole


@pytest.mark.parametrize("name", [name for name in OPS if not _cut(name)])
def test_the_last_rows_equal_the_same_rows_alone(name):
    op, function = registry.op(name)[0], registry.function(name, OURS)
    case = plain(op)
    letter = next(iter(op.inputs.values())).letters(case.sizes)[0]
    alone = inputs.make(op, case, DTYPE, 0, DEVICE)
    parts = invoke.run(op, function, case, alone)
    widest = max(t.numel() for t in (*alone.values(), *parts.values()) if _grows(t, case[letter]))
    rows = ELEMENTS // (widest // case[letter]) + 3 + case[letter]
    whole = {key: grown(t, op.inputs[key], letter, rows) for key, t in alone.items()}
    seeds = inputs.gradients(tuple(parts.values()), 0) if op.differentiable else None
    parts = invoke.run(op, function, case, alone, seeds)
    if seeds is not None:
        wide = invoke.run(op, function, case, whole)
        seeds = tuple(_placed(seed, out) for seed, out in zip(seeds, wide.values(), strict=True))
        del wide
    results = invoke.run(op, function, case, whole, seeds)
    assert max(t.numel() for t in (*whole.values(), *results.values()) if t is not None) > ELEMENTS
    for key, part in parts.items():
        # Sums over rows are taken in another order.
        bound = 2e-2 * part.is_floating_point()
        least = bound * part.abs().max().item()
        torch.testing.assert_close(last(results[key], part), part, rtol=bound, atol=least)


def _grows(tensor, length):
    return tensor is not None and length in tensor.shape


def _placed(seed, out):
    """Return a gradient of `out` that is zero except at the end, which is `seed`."""
    if seed.shape == out.shape:
        return seed
    whole = torch.zeros_like(out)
    last(whole, seed).copy_(seed)
    return whole


@pytest.mark.parametrize("name", [name for name in OPS if _rank(name) > 1])
def test_rows_may_lie_gibibytes_apart(name):
    """Untouched memory costs nothing, so this needs no GPU."""
    op, function = registry.op(name)[0], registry.function(name, OURS)
    case = plain(op)
    letter = next(iter(op.inputs.values())).letters(case.sizes)[0]
    sizes = {**case.sizes, letter: 3}
    near = inputs.make(op, dataclasses.replace(case, sizes=sizes), DTYPE, 0, DEVICE)
    far = dict(near)
    for key, tensor in near.items():
        letters = op.inputs[key].letters(case.sizes)
        if tensor is not None and letters[0] == letter and len(letters) > 1:
            memory = torch.empty(3 * APART, dtype=tensor.dtype, device=DEVICE)
            far[key] = memory.as_strided(tensor.shape, (APART, *tensor.stride()[1:]))
            far[key].copy_(tensor)
    parts = invoke.run(op, function, case, near)
    for key, result in invoke.run(op, function, case, far).items():
        assert torch.equal(result, parts[key])


def test_the_last_sequence_equals_that_sequence_alone():
    before, rows, shape = ELEMENTS // (2 * 64) + 3, 5, (2, 64)
    alone = [torch.randn(rows, *shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    whole = []
    for part in alone:
        whole.append(torch.zeros(before + rows, *shape, device=DEVICE, dtype=torch.bfloat16))
        whole[-1][before:] = part
    # One row a sequence takes a tile each; a thousand long ones are enough for a GPU.
    starts = torch.arange(0, before, -(-before // 1000), device=DEVICE, dtype=torch.int32)
    ends = torch.tensor([before, before + rows], device=DEVICE, dtype=torch.int32)
    results = []
    for (q, k, v, dout), cu in ((alone, ends - before), (whole, torch.cat([starts, ends]))):
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attention_varlen(*leaves, cu, cu, causal=True)
        results.append((out, *torch.autograd.grad(out, leaves, dout)))
    for part, full in zip(*results, strict=True):
        # Short sequences alone have smaller tiles, whose sums are taken in another order.
        torch.testing.assert_close(full[before:], part, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_last_random_integers_are_those_of_an_offset(dtype):
    count = ELEMENTS + 4099
    whole = randint(0, 50257, (count,), 7, dtype=dtype, device=DEVICE)
    alone = randint(0, 50257, (4096,), 7, offset=count - 4096, dtype=dtype, device=DEVICE)
    assert torch.equal(whole[-4096:], alone)


def test_the_last_elements_are_dropped_by_their_place():
    count, p = ELEMENTS + 4096, 0.25
    x = torch.ones(count, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    out = dropout(x, p, 7)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    words = philox_words(torch.tensor(7, device=DEVICE), (count - 4096) // 2, 2048)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1).flatten()
    kept = halves >= round(p * LEVELS)
    assert torch.equal(out[-4096:] != 0, kept) and torch.equal(dx[-4096:] != 0, kept)

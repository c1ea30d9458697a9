"""Check embedding against PyTorch for any tokens, and that its gradient repeats bit for bit."""

import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import nvml
from kernels import embedding as family
from kernels._runtime.call_cache import uncached
from kernels.embedding import embedding
from kernels.embedding_details import sort, sums
from tests.support.examples import many
from tests.support.values import randn

DEVICE = "cuda" if nvml.gpus() else "cpu"
sizes = st.integers(1, 40)
SMALL = {"SORTED": 32, "PLACED": 16, "SEEN": 8, "RANKED": 8}


def gradient(ids, weight, dy, **options):
    leaf = weight.clone().requires_grad_()
    embedding(ids, leaf, **options).backward(dy)
    return leaf.grad


def agrees(ids, v, c, padding_idx=None):
    """Hold rows and gradient against float64; two sums of float32 numbers differ by roundings."""
    ids, weight = ids.to(DEVICE), randn(v, c, seed=1).to(DEVICE)
    dy = randn(*ids.shape, c, seed=2).to(DEVICE)
    assert torch.equal(embedding(ids, weight, padding_idx=padding_idx), weight[ids.long()])
    exact = weight.double().requires_grad_()
    F.embedding(ids, exact, padding_idx=padding_idx).backward(dy.double())
    found = gradient(ids, weight, dy, padding_idx=padding_idx)
    worst = 1e-6 * (1 + ids.numel() ** 0.5)
    torch.testing.assert_close(found.double(), exact.grad, rtol=1e-5, atol=worst)


@many
@given(sizes, sizes, st.data(), st.sampled_from([torch.int64, torch.int32]))
def test_as_pytorch_for_any_tokens_and_sizes(v, c, data, dtype):
    ids = data.draw(st.lists(st.integers(0, v - 1), max_size=150))
    padding_idx = data.draw(st.one_of(st.none(), st.integers(-v, v - 1)))
    agrees(torch.tensor(ids, dtype=dtype), v, c, padding_idx)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 5), (2, 0), (2, 3, 4)])
def test_ids_of_any_shape(shape):
    agrees(torch.arange(24)[: torch.Size(shape).numel()].reshape(shape) % 7, 7, 5)


@pytest.mark.no_gpu
@pytest.mark.parametrize(
    ("tokens", "v", "c", "dtype", "by_columns"),
    [
        (9, 8, 16, torch.bfloat16, True),
        (9, 8, 8, torch.float32, True),
        (8, 8, 16, torch.bfloat16, False),
        (9, 8, 24, torch.bfloat16, False),
        (9, 8, 17, torch.float32, False),
    ],
)
def test_columns_come_first_for_many_tokens_of_rows_that_are_whole_sectors(
    tokens, v, c, dtype, by_columns, monkeypatch
):
    asked, pick = [], family.FORWARD.pick

    def noted(device, **key):
        asked.append(key["by_columns"])
        return pick(device, **key)

    monkeypatch.setattr(family, "FORWARD", types.SimpleNamespace(pick=noted))
    ids, weight = torch.arange(tokens) % v, randn(v, c, dtype=dtype)
    with uncached():
        assert torch.equal(embedding(ids, weight), weight[ids])
    assert asked == [by_columns]


@pytest.mark.parametrize("tokens", [63, 64, 65, 127, 128, 200, 700])
@pytest.mark.parametrize("v", [1, 3])
def test_chunks_of_one_id_are_added_once(tokens, v):
    agrees((torch.arange(tokens) * 7 % 11 >= 8).long() * (v - 1), v, 12)


@pytest.mark.no_gpu
@pytest.mark.parametrize("before", [0, 1, 64])
def test_a_sum_that_is_ready_is_not_added_up_again(before, monkeypatch):
    """The chunks' sums are spoilt, so the row of the frequent id shows that it has taken them."""
    ids = torch.cat([torch.zeros(before, dtype=torch.int64), torch.ones(192, dtype=torch.int64)])

    class Spoilt:
        def __getitem__(self, grid):
            return lambda **given: given["parts_ptr"].fill_(float("nan"))

    dy = torch.ones(len(ids), 4)
    assert gradient(ids, torch.zeros(3, 4), dy)[1].eq(192).all()
    monkeypatch.setattr(sums, "_chunk_kernel", Spoilt())
    found = gradient(ids, torch.zeros(3, 4), dy)
    assert found[1].isnan().all()
    assert found[2].eq(0).all() and found[0].eq(before).all() == (before < 64)


@pytest.mark.parametrize("order", ["ascending", "descending", "mixed", "one"])
@pytest.mark.parametrize("few", [6, 7])
def test_several_sorted_blocks_become_one_order(order, few, monkeypatch):
    """With blocks of 32 keys the ranks of 200 tokens come from seven, four or two at a time."""
    sizes = {"BISECTED_OF_FEW": 4, "BISECTED": 2, "FEW": few}
    for name, size in (SMALL | sizes).items():
        monkeypatch.setattr(sort, name, size)
    ids = torch.arange(200) // 3
    orders = {
        "ascending": ids,
        "descending": ids.flip(0),
        "mixed": ids * 17 % 67,
        "one": ids * 0,
    }
    agrees(orders[order], 70, 3)


@pytest.mark.parametrize("tokens", [31, 33, 200])
def test_ids_that_need_wide_numbers_are_sorted_by_the_same_rule(tokens, monkeypatch):
    for name, size in (SMALL | {"NARROW": 0}).items():
        monkeypatch.setattr(sort, name, size)
    agrees(torch.arange(tokens) * 17 % 67, 70, 3, padding_idx=0)


def test_more_tokens_than_are_ranked(monkeypatch):
    for name, size in (SMALL | {"MOST_RANKED": 100}).items():
        monkeypatch.setattr(sort, name, size)
    agrees(torch.arange(200) * 17 % 67, 70, 3)


def test_the_gradient_repeats_bit_for_bit():
    ids = torch.arange(600, device=DEVICE) * 31 % 5
    weight, dy = randn(5, 16, seed=0).to(DEVICE), randn(600, 16, seed=1).to(DEVICE)
    first = gradient(ids, weight, dy)
    for _ in range(100 if DEVICE == "cuda" else 2):
        assert torch.equal(gradient(ids, weight, dy), first)


def test_a_sum_of_halves_is_rounded_once():
    """Each token adds less than half a step of the sum, which a sum in bfloat16 would lose."""
    ids = torch.zeros(65, dtype=torch.int64, device=DEVICE)
    dy = torch.full((65, 4), 2.0**-9, dtype=torch.bfloat16, device=DEVICE)
    dy[0] = 1.0
    found = gradient(ids, torch.zeros(2, 4, dtype=torch.bfloat16, device=DEVICE), dy)
    assert torch.equal(found[0], torch.full_like(found[0], 1.125))
    assert torch.equal(found[1], torch.zeros_like(found[1]))


@pytest.mark.gpu
def test_an_id_out_of_range_reads_nothing():
    weight, dy = torch.ones(4, 8, device="cuda"), torch.ones(3, 8, device="cuda")
    ids = torch.tensor([1, 4, -1], device="cuda")
    out = embedding(ids, weight)
    assert torch.equal(out[0], weight[1]) and out[1:].isnan().all()
    assert gradient(ids, weight, dy).sum().item() == 8


@pytest.mark.no_gpu
@pytest.mark.parametrize("bad", [-1, 4])
def test_an_id_out_of_range_is_refused_on_a_cpu(bad):
    with pytest.raises(ValueError, match=f"ids: {bad}, expected 0 to 3"):
        embedding(torch.tensor([1, bad]), torch.ones(4, 8))


@pytest.mark.parametrize("bad", [-5, 4])
def test_a_padding_row_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=f"padding_idx: {bad}, expected"):
        embedding(
            torch.tensor([1], device=DEVICE), torch.ones(4, 8, device=DEVICE), padding_idx=bad
        )

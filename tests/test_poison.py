"""Memory between canary bytes: as torch.empty gives it, but for what lies in and around it."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from harness import poison

# By name at the time of the call: a function that was bound before cannot be replaced.
MAKERS = {
    "empty": lambda x: torch.empty(x.shape, dtype=x.dtype),
    "empty_like": lambda x: torch.empty_like(x),
    "empty_strided": lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype),
    "empty_permuted": lambda x: torch.empty_permuted(x.shape, (1, 0), dtype=x.dtype),
    "new_empty": lambda x: x.new_empty(x.shape),
    "new_empty_strided": lambda x: x.new_empty_strided(x.shape, x.stride()),
    "zeros": lambda x: torch.zeros(x.shape, dtype=x.dtype),
    "zeros_like": lambda x: torch.zeros_like(x),
    "ones": lambda x: torch.ones(x.shape, dtype=x.dtype),
    "ones_like": lambda x: torch.ones_like(x),
    "full": lambda x: torch.full(x.shape, 3, dtype=x.dtype),
    "full_like": lambda x: torch.full_like(x, 3),
    "new_zeros": lambda x: x.new_zeros(x.shape),
    "new_ones": lambda x: x.new_ones(x.shape),
    "new_full": lambda x: x.new_full(x.shape, 3),
}
dtypes = st.sampled_from(
    [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]
)


def test_every_replaced_function_is_tried_here_and_replaced_for_a_while_only():
    names = {(o, n) for each in (poison.EMPTY, poison.FILLED) for o in each for n in each[o]}
    assert {name for _, name in names} == set(MAKERS)
    before = {(owner, name): getattr(owner, name) for owner, name in names}
    with pytest.raises(KeyError), poison.guarded():
        assert all(getattr(owner, name) is not before[owner, name] for owner, name in names)
        raise KeyError
    assert all(getattr(owner, name) is before[owner, name] for owner, name in names)


@settings(deadline=None)
@given(st.sampled_from(sorted(MAKERS)), st.integers(1, 40), st.integers(1, 40), dtypes)
def test_a_tensor_between_bands_is_what_the_factory_gives(name, m, n, dtype):
    like = torch.zeros(n, m, dtype=dtype).T
    plain = MAKERS[name](like)
    with poison.guarded() as bands:
        tensor = MAKERS[name](like)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (plain.shape, plain.stride(), dtype)
    assert tensor.storage_offset() == 0 and tensor.data_ptr() % 64 == 0
    assert tensor.untyped_storage().nbytes() == plain.untyped_storage().nbytes()
    if "empty" not in name:
        assert torch.equal(tensor, plain)
    elif dtype.is_floating_point:
        assert tensor.isnan().all()
    else:
        assert (poison.memory(tensor) == poison.ODD_BYTE).all()
    assert bands.broken() == ""


@settings(deadline=None)
@given(
    st.sampled_from(sorted(MAKERS)),
    st.integers(1, 300),
    st.integers(0, poison.BAND - 1),
    st.booleans(),
)
def test_one_byte_outside_shows(name, n, far, early):
    with poison.guarded() as bands:
        tensor = MAKERS[name](torch.zeros(1, n))
    address = tensor.data_ptr() + (-1 - far if early else 4 * n + far)
    ctypes.memset(address, 0, 1)
    where = "before the start" if early else "past the end"
    assert bands.broken() == f"writes {where} of an output or a workspace of {4 * n} bytes"


def test_what_cannot_lie_between_bands_is_left_as_it_is():
    target = torch.zeros(3)
    with poison.guarded() as bands:
        assert torch.zeros(3, out=target) is target
        assert torch.empty(0, 4).shape == (0, 4)
        assert torch.empty(3, device="meta").is_meta
        with FakeTensorMode():
            assert type(torch.empty(3)) is not torch.Tensor
        assert torch.empty(3, requires_grad=True).requires_grad
        assert torch.zeros(2, 2).to_sparse().is_sparse
        assert torch.empty(2, 2, layout=torch.sparse_coo).is_sparse
    assert bands.broken() == ""


def test_past_the_budget_memory_is_poisoned_without_bands(monkeypatch):
    monkeypatch.setattr(poison, "HELD", 4000)
    with poison.guarded() as bands:
        tensors = [torch.empty(500) for _ in range(4)]
        odd = torch.empty(500, dtype=torch.int64)
    assert len(bands._held) == 2
    assert all(tensor.isnan().all() for tensor in tensors)
    assert (odd == poison.ODD_BYTE).all()


def test_results_are_wiped_but_not_in_the_memory_of_inputs():
    kept, done = torch.ones(6), torch.ones(6)
    poison.wipe([done[2:].expand(3, 4), kept.view(2, 3)], keep=[kept])
    assert done.isnan().all() and torch.equal(kept, torch.ones(6))


def block(size, state):
    return {"size": size, "state": state}


SNAPSHOT = [
    {
        "device": 0,
        "address": 10_000,
        "segment_pool_id": (0, 0),
        "blocks": [
            block(512, "active_allocated"),
            block(1024, "inactive"),
            block(1024, "active_allocated"),
            block(512, "active_allocated"),
            block(8192, "inactive"),
        ],
    },
    {"device": 0, "address": 90_000, "blocks": [block(512, "inactive")]},
    {"device": 1, "address": 50_000, "blocks": [block(512, "inactive")]},
    {
        "device": 0,
        "address": 70_000,
        "segment_pool_id": (0, 7),
        "blocks": [block(512, "inactive")],
    },
]


def test_free_blocks_are_those_of_the_common_pool_of_the_device():
    assert poison.free_blocks(SNAPSHOT, 0) == [(10_512, 1024), (13_072, 8192), (90_000, 512)]
    assert poison.free_blocks(SNAPSHOT, 1) == [(50_000, 512)]


def test_behind_a_result_lies_what_rounding_left_and_the_free_block_that_follows():
    sizes = {10_000: 100, 11_536: 1000, 12_560: 512}
    assert poison.behind(SNAPSHOT, 0, sizes) == [
        (100, (10_100, 412 + 1024)),
        (1000, (12_536, 24)),
        (512, (13_072, poison.BAND)),
    ]
    # Full to its end, and another allocation follows.
    assert poison.behind(SNAPSHOT, 0, {11_536: 1024, 70_000: 5}) == []


@pytest.fixture
def heap(monkeypatch):
    """4096 bytes in place of a GPU's, its one segment, and what its allocator counts."""
    heap = torch.zeros(4096, dtype=torch.uint8)
    segment = {"device": 0, "address": heap.data_ptr()}
    stats = {"allocation.all.allocated": 5, "segment.all.allocated": 1}
    cuda = {
        "synchronize": lambda: None,
        "current_device": lambda: 0,
        "memory_stats": lambda: dict(stats),
        "memory_snapshot": lambda: [segment],
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    base = heap.data_ptr()
    monkeypatch.setattr(poison, "_at", lambda address, size: heap[address - base :][:size])
    return heap, segment, stats


def aliased(memory):
    """A tensor whose storage is this memory and no more."""
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(memory))


@pytest.mark.parametrize(
    ("written", "taken", "reason"),
    [
        (0, 1, ""),
        (1, 1, "writes past the end of an output of 1000 bytes"),
        # A second allocation may have left its own bytes there.
        (1, 2, ""),
    ],
)
def test_bytes_behind_a_result_prove_an_overrun_only_of_a_call_without_workspace(
    heap, written, taken, reason
):
    memory, segment, stats = heap
    segment["blocks"] = [block(512, "active_allocated"), block(3584, "inactive")]
    free = poison.FreeMemory()
    assert (memory[:512] == 0).all() and (memory[512:] == poison.NAN_BYTE).all()
    segment["blocks"] = [
        block(512, "active_allocated"),
        block(1024, "active_allocated"),
        block(2560, "inactive"),
    ]
    stats["allocation.all.allocated"] += taken
    memory[512 : 1512 + written] = 7
    assert free.overrun([aliased(memory[512:1512])]) == reason


@pytest.mark.parametrize(
    ("written", "reason"), [(0, ""), (1, "writes past the end of an output of 1000 bytes")]
)
def test_what_was_freed_during_the_call_proves_nothing(heap, written, reason):
    memory, segment, stats = heap
    segment["blocks"] = [block(1024, "inactive"), block(3072, "active_allocated")]
    free = poison.FreeMemory()
    segment["blocks"] = [block(1024, "active_allocated"), block(3072, "inactive")]
    stats["allocation.all.allocated"] += 1
    memory[: 1000 + written] = 7
    assert (memory[1024:] == 0).all()
    assert free.overrun([aliased(memory[:1000])]) == reason

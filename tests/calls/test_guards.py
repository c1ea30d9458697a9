"""Check tensors between canary bytes: they behave like those of torch.empty, and overruns show."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.calls import guards

# Looked up by name at the time of the call: a function bound earlier cannot be replaced.
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
    names = {(o, n) for each in (guards.EMPTY, guards.FILLED) for o in each for n in each[o]}
    assert {name for _, name in names} == set(MAKERS)
    before = {(owner, name): getattr(owner, name) for owner, name in names}
    with pytest.raises(KeyError), guards.guarded():
        assert all(getattr(owner, name) is not before[owner, name] for owner, name in names)
        raise KeyError
    assert all(getattr(owner, name) is before[owner, name] for owner, name in names)


@settings(deadline=None)
@given(st.sampled_from(sorted(MAKERS)), st.integers(1, 40), st.integers(1, 40), dtypes)
def test_a_tensor_between_bands_is_what_the_factory_gives(name, m, n, dtype):
    like = torch.zeros(n, m, dtype=dtype).T
    plain = MAKERS[name](like)
    with guards.guarded() as bands:
        tensor = MAKERS[name](like)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == (plain.shape, plain.stride(), dtype)
    assert tensor.storage_offset() == 0 and tensor.data_ptr() % 64 == 0
    assert tensor.untyped_storage().nbytes() == plain.untyped_storage().nbytes()
    if "empty" not in name:
        assert torch.equal(tensor, plain)
    elif dtype.is_floating_point:
        assert tensor.isnan().all()
    else:
        assert (guards.memory(tensor) == guards.ODD_BYTE).all()
    assert bands.broken() == ""


@settings(deadline=None)
@given(
    st.sampled_from(sorted(MAKERS)),
    st.integers(1, 300),
    st.integers(0, guards.BAND - 1),
    st.booleans(),
)
def test_a_write_of_one_byte_outside_shows(name, n, far, early):
    with guards.guarded() as bands:
        tensor = MAKERS[name](torch.zeros(1, n))
    address = tensor.data_ptr() + (-1 - far if early else 4 * n + far)
    ctypes.memset(address, 0, 1)
    where = "before the start" if early else "past the end"
    assert bands.broken() == f"writes {where} of an output or a workspace of {4 * n} bytes"


def test_a_tensor_that_cannot_lie_between_bands_is_left_as_it_is():
    target = torch.zeros(3)
    with guards.guarded() as bands:
        assert torch.zeros(3, out=target) is target
        assert torch.empty(0, 4).shape == (0, 4)
        assert torch.empty(3, device="meta").is_meta
        with FakeTensorMode():
            assert type(torch.empty(3)) is not torch.Tensor
        assert torch.empty(3, requires_grad=True).requires_grad
        assert torch.zeros(2, 2).to_sparse().is_sparse
        assert torch.empty(2, 2, layout=torch.sparse_coo).is_sparse
    assert bands.broken() == ""


def test_any_plain_tensor_with_elements_can_lie_between_bands():
    bands = guards.Bands()
    assert [bands.hold(torch.zeros(count)) for count in (0, 1, 2)] == [False, True, True]
    assert not bands.hold(torch.zeros(3, device="meta"))
    assert not bands.hold(3) and not bands.hold(torch.zeros(2, 2).to_sparse())


def test_bands_lie_on_the_device_of_the_tensor_whatever_the_default_is():
    tensor, bands = torch.ones(3), guards.Bands()
    with torch.device("meta"):
        assert guards.memory(tensor).device.type == "cpu"
        copy = bands.copy(tensor)
    assert torch.equal(copy, tensor) and bands.broken() == ""


def test_past_the_budget_memory_is_poisoned_without_bands(monkeypatch):
    monkeypatch.setattr(guards, "HELD", 4000)
    with guards.guarded() as bands:
        tensors = [torch.empty(500) for _ in range(4)]
        odd = torch.empty(500, dtype=torch.int64)
    assert len(bands._held) == 2
    assert all(tensor.isnan().all() for tensor in tensors)
    assert (odd == guards.ODD_BYTE).all()


def test_results_are_wiped_but_not_in_the_memory_of_inputs():
    kept, done = torch.ones(6), torch.ones(6)
    guards.wipe([done[2:].expand(3, 4), kept.view(2, 3)], keep=[kept])
    assert done.isnan().all() and torch.equal(kept, torch.ones(6))


def block(size, state):
    return {"size": size, "requested_size": size, "state": state}


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
    assert guards.free_blocks(SNAPSHOT, 0) == [(10_512, 1024), (13_072, 8192), (90_000, 512)]
    assert guards.free_blocks(SNAPSHOT, 1) == [(50_000, 512)]


def test_behind_a_result_lies_what_rounding_left_and_the_free_block_that_follows():
    sizes = {10_000: 100, 11_536: 1000, 12_560: 512}
    assert guards.behind(SNAPSHOT, 0, sizes) == [
        (100, (10_100, 412 + 1024)),
        (1000, (12_536, 24)),
        (512, (13_072, guards.BAND)),
    ]
    # The allocation is full to its end, and another allocation follows.
    assert guards.behind(SNAPSHOT, 0, {11_536: 1024, 70_000: 5}) == []


def test_only_filled_bytes_are_known():
    free = object.__new__(guards.FreeMemory)
    free._filled = [(100, 50), (200, 50)]
    assert free._known(120, 100) == [(120, 30), (200, 20)]
    assert free._known(150, 50) == []
    within = [(100, 50), (120, 30), (200, 1)]
    assert all(free._was_free(*bytes_) for bytes_ in within)
    assert not any(free._was_free(*bytes_) for bytes_ in [(99, 9), (120, 31), (149, 52), (150, 1)])


def test_bytes_at_an_address_are_read_where_they_lie(monkeypatch):
    monkeypatch.setattr(torch, "as_tensor", lambda data, device: (data, device))
    data, device = guards._at(10_000, 512)
    assert device == "cuda"
    assert data.__cuda_array_interface__ == {
        "shape": (512,), "typestr": "|u1", "data": (10_000, False), "version": 2,
    }  # fmt: skip


class Heap:
    """Imitate GPU memory and PyTorch's caching allocator.

    Blocks are multiples of 512 bytes. The first block that fits is taken, split and later merged.
    The class keeps the allocator's counters and a snapshot of one segment.
    private: the address at which the memory of a private pool begins.
    """

    STEP = 512

    def __init__(self, size=16384, private=None):
        self.memory = torch.zeros(size + self.STEP, dtype=torch.uint8)
        aligned = -self.memory.data_ptr() % self.STEP
        self.memory = self.memory[aligned:][:size]
        self.base, self.size, self.counted = self.memory.data_ptr(), size, 7
        self.private = size if private is None else private
        self.segments, self.used = 1, {}

    def map_anew(self):
        """Return free memory to the driver and get it again at the same address."""
        self.segments += 1
        for offset, size in self._gaps(0, self.private):
            self.memory[offset : offset + size] = 0

    def allocate(self, size, private=False):
        """Return a tensor of the given number of bytes; a tensor of no bytes has address 0."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        self.counted += 1
        whole = -(-size // self.STEP) * self.STEP
        first, last = (self.private, self.size) if private else (0, self.private)
        starts = (offset for offset, free in self._gaps(first, last) if free >= whole)
        offset = next(starts)
        self.used[offset] = size
        return self.at(offset, size)

    def free(self, tensor):
        del self.used[tensor.data_ptr() - self.base]

    def at(self, offset, size):
        """A tensor whose storage is this memory and no more."""
        part = self.memory[offset : offset + size]
        return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(part))

    def write(self, tensor, value, beyond=0):
        offset = tensor.data_ptr() - self.base
        self.memory[offset : offset + tensor.numel() + beyond] = value

    def snapshot(self):
        pools = [(0, self.private, (0, 0)), (self.private, self.size, (0, 7))]
        return [
            {
                "device": 0,
                "address": self.base + first,
                "segment_pool_id": pool,
                "blocks": list(self._blocks(first, last)),
            }
            for first, last, pool in pools
            if first < last
        ]

    def stats(self):
        return {"allocation.all.allocated": self.counted, "segment.all.allocated": self.segments}

    def view(self, address, size):
        return self.memory[address - self.base :][:size]

    def _gaps(self, first, last):
        offset = first
        for start in [*sorted(one for one in self.used if first <= one < last), last]:
            yield offset, start - offset
            offset = start + (-(-self.used.get(start, 0) // self.STEP) * self.STEP)

    def _blocks(self, first, last):
        for offset, free in self._gaps(first, last):
            if free:
                yield block(free, "inactive") | {"requested_size": 0}
            if size := self.used.get(offset + free):
                whole = -(-size // self.STEP) * self.STEP
                yield block(whole, "active_allocated") | {"requested_size": size}


@pytest.fixture
def allocator(monkeypatch):
    """Replace the GPU's memory by a heap and return the heap."""

    def put(heap):
        cuda = {
            "synchronize": lambda: None,
            "current_device": lambda: 0,
            "memory_stats": heap.stats,
            "memory_snapshot": heap.snapshot,
        }
        for name, function in cuda.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(guards, "_at", heap.view)
        return heap

    return put


def past_the_end(size):
    return f"writes past the end of an output of {size} bytes"


@pytest.mark.parametrize(
    ("beyond", "workspace", "reason"),
    [
        (0, False, ""),
        (1, False, past_the_end(1000)),
        # A second allocation may have left its own bytes there.
        (1, True, ""),
    ],
)
def test_bytes_behind_a_result_prove_an_overrun_only_of_a_call_without_workspace(
    allocator, beyond, workspace, reason
):
    heap = allocator(Heap())
    heap.allocate(512)
    free = guards.FreeMemory()
    assert (heap.memory[:512] == 0).all() and (heap.memory[512:] == guards.NAN_BYTE).all()
    result = heap.allocate(1000)
    if workspace:
        heap.free(heap.allocate(100))
    heap.write(result, 7, beyond)
    assert free.overrun([result]) == reason


def nll_loss(heap):
    """PyTorch's mean over no rows makes two allocations. One is freed and written to its last byte.
    The gradient of no rows allocates nothing."""
    loss, total_weight = heap.allocate(4), heap.allocate(4)
    for tensor in (loss, total_weight):
        heap.write(tensor, 7)
    heap.free(total_weight)
    return [loss, heap.allocate(0)]


def cached_and_workspace(heap, kept):
    """One result from an earlier call, one of this, and a workspace that ends where that begins."""
    result, workspace = heap.allocate(1000), heap.allocate(512)
    heap.write(workspace, 7)
    heap.free(workspace)
    return [kept, result]


def halves_and_workspace(heap, kept):
    """Two results in one allocation, each with a storage of its own, and a workspace."""
    whole, workspace = heap.allocate(1024), heap.allocate(512)
    heap.write(workspace, 7)
    heap.free(workspace)
    offset = whole.data_ptr() - heap.base
    return [heap.at(offset, 512), heap.at(offset + 512, 512)]


def graph_and_workspace(heap, kept):
    """One result that a graph has written in its private pool, and a workspace."""
    result, workspace = heap.allocate(500), heap.allocate(512)
    heap.write(workspace, 7)
    heap.free(workspace)
    return [result, heap.at(heap.private, 100)]


def part_of_an_allocation(heap, kept):
    """A result that is the first part of what the library has asked for, and has used."""
    whole = heap.allocate(900)
    heap.write(whole, 7)
    return [heap.at(whole.data_ptr() - heap.base, 100)]


def two_workspaces_and_nothing_else(heap, kept):
    """Results in memory from before the call, as many as there are workspaces."""
    for workspace in [heap.allocate(512), heap.allocate(512)]:
        heap.write(workspace, 7)
        heap.free(workspace)
    return [kept, heap.at(kept.data_ptr() - heap.base, 10)]


def empty_cache(heap, kept):
    heap.map_anew()
    return [heap.allocate(100)]


@pytest.mark.parametrize(
    "call",
    [
        lambda heap, kept: nll_loss(heap),
        empty_cache,
        cached_and_workspace,
        halves_and_workspace,
        graph_and_workspace,
        part_of_an_allocation,
        two_workspaces_and_nothing_else,
    ],
)
def test_a_call_that_writes_in_bounds_is_not_accused(allocator, call):
    heap = allocator(Heap(private=8192))
    kept = heap.allocate(300)
    free = guards.FreeMemory()
    assert free.overrun(call(heap, kept)) == ""


def test_a_workspace_that_is_still_held_is_no_result(allocator):
    """The workspace lies right before the result, so an overrun of the result is not proved."""
    heap = allocator(Heap())
    free = guards.FreeMemory()
    workspace, result = heap.allocate(512), heap.allocate(1000)
    assert workspace.data_ptr() + 512 == result.data_ptr()
    heap.write(result, 7, beyond=1)
    assert free.overrun([result]) == ""
    assert free.overrun([workspace, result]) == past_the_end(1000)


def test_an_overrun_beside_an_empty_or_a_shared_result_is_found(allocator):
    heap = allocator(Heap())
    kept = heap.allocate(300)
    free = guards.FreeMemory()
    result = heap.allocate(1000)
    heap.write(result, 7, beyond=3)
    results = [heap.allocate(0), result, heap.at(result.data_ptr() - heap.base, 1000), kept]
    assert free.overrun(results) == past_the_end(1000)


STEPS = st.tuples(
    st.sampled_from(["result", "workspace", "empty", "kept", "free", "graph", "alias"]),
    st.integers(1, 1500),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(STEPS, max_size=8))
def test_no_order_of_allocations_within_bounds_is_an_overrun(steps):
    heap = Heap(2**17, private=2**16)
    held, kept, before = [], heap.allocate(300), heap.allocate(700)
    inner = heap.allocate(200, private=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "memory_stats", heap.stats)
        patch.setattr(torch.cuda, "memory_snapshot", heap.snapshot)
        patch.setattr(guards, "_at", heap.view)
        heap.free(before)
        free = guards.FreeMemory()
        results = []
        for what, size in steps:
            if what == "empty":
                results.append(heap.allocate(0))
            elif what == "kept":
                results.append(kept)
            elif what == "graph":
                results.append(inner)
            elif what == "free" and held:
                heap.free(held.pop())
            elif what == "alias" and results:
                results.append(results[-1])
            elif what in ("result", "workspace"):
                tensor = heap.allocate(size)
                heap.write(tensor, 7)
                (results if what == "result" else held).append(tensor)
        for tensor in held:
            heap.free(tensor)
        assert free.overrun(results) == ""


@pytest.mark.parametrize(("beyond", "reason"), [(0, ""), (1, past_the_end(1000))])
def test_memory_freed_during_the_call_proves_nothing(allocator, beyond, reason):
    heap = allocator(Heap(4096))
    first, rest = heap.allocate(1024), heap.allocate(3072)
    heap.free(first)
    free = guards.FreeMemory()
    heap.free(rest)
    result = heap.allocate(1000)
    heap.write(result, 7, beyond)
    assert (heap.memory[1024:] == 0).all()
    assert free.overrun([result]) == reason

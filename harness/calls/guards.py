"""Memory that gives away what an implementation leaves unwritten and what it writes beside its own.

Allocations that pass Python (torch.empty and its kin, as Triton's launchers use them) are filled
with NaN and lie between two bands of canary bytes, on any device. Allocations that do not (those of
C++ libraries and of compiled graphs) can be prepared on a GPU only. The free memory of the caching
allocator is filled with NaN before the call. Afterwards the bytes behind each result are read, up
to the next allocation. Those prove an overrun only where the call took nothing but its results from
that free memory, since a workspace may rightly have left its own bytes there. On a CPU the memory
of such libraries comes from the heap, and nothing is known about it.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch.utils import dlpack

from kernels._runtime.call_trace import counted_as_allocation
from kernels._runtime.plan_compiler import public_allocations

# Bytes before and after each allocation; more than a tile's row, and a multiple of any alignment.
BAND = 4096
# The byte that repeats: NaN in every floating dtype, and an unlikely number in any other.
NAN_BYTE, ODD_BYTE = 0xFF, 0x4D
# Bytes of allocations whose bands are kept at a time; past these they are poisoned only.
HELD = 2**32
EMPTY = {
    torch: ("empty", "empty_like", "empty_strided", "empty_permuted"),
    torch.Tensor: ("new_empty", "new_empty_strided"),
}
FILLED = {
    torch: ("zeros", "zeros_like", "ones", "ones_like", "full", "full_like"),
    torch.Tensor: ("new_zeros", "new_ones", "new_full"),
}

# Bound before anything is patched.
_EMPTY, _FULL = torch.empty, torch.full

Blocks = list[tuple[int, int]]


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, also those that the tensor does not cover."""
    empty = torch.tensor([], dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


def start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def wipe(tensors: Iterable[torch.Tensor], keep: Collection[torch.Tensor]) -> None:
    """Overwrites results that are done with: freed memory shall not hold the right answer.

    Those that lie in the memory of a tensor of `keep` stay as they are.
    """
    kept = {start(tensor) for tensor in keep}
    for tensor in tensors:
        if start(tensor) not in kept:
            memory(tensor).fill_(NAN_BYTE)


class Bands:
    """The canary bytes around allocations, kept until they are looked at."""

    def __init__(self):
        self._held: list[tuple[torch.Tensor, int]] = []
        self._bytes = 0

    def around(self, tensor: torch.Tensor) -> torch.Tensor:
        """A poisoned tensor as `tensor` is, in storage of the same size between two bands."""
        byte = NAN_BYTE if tensor.is_floating_point() or tensor.is_complex() else ODD_BYTE
        size = tensor.untyped_storage().nbytes()
        raw = _FULL((size + 2 * BAND,), byte, dtype=torch.uint8, device=tensor.device)
        self._held.append((raw, byte))
        self._bytes += size
        # The capsule makes a storage that begins and ends within the raw bytes.
        storage = dlpack.from_dlpack(dlpack.to_dlpack(raw[BAND : BAND + size])).untyped_storage()
        fresh = _EMPTY((), dtype=tensor.dtype, device=tensor.device)
        return fresh.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes between two bands, those that the tensor does not cover included."""
        between = self.around(tensor)
        memory(between).copy_(memory(tensor))
        return between

    def hold(self, tensor: object) -> bool:
        """Whether a new tensor is a plain one that can lie between bands."""
        return (
            type(tensor) is torch.Tensor
            and tensor.layout == torch.strided
            and not tensor.is_meta
            and tensor.numel() > 0
            and self._bytes + tensor.untyped_storage().nbytes() <= HELD
            and not tensor.is_pinned()
        )

    def broken(self) -> str:
        """Says what was written outside of an allocation; "" if nothing."""
        for raw, byte in self._held:
            for where, band in (("before the start", raw[:BAND]), ("past the end", raw[-BAND:])):
                if not (band == byte).all():
                    size = raw.numel() - 2 * BAND
                    return f"writes {where} of an output or a workspace of {size} bytes"
        return ""


@contextlib.contextmanager
def guarded(filled: bool = True) -> Iterator[Bands]:
    """Has torch.empty and its kin return poisoned memory between bands.

    filled: zeros, ones and the like lie between bands as well.
    """
    bands, saved = Bands(), []
    for factories, poisons in ((EMPTY, True), (FILLED if filled else {}, False)):
        for owner, names in factories.items():
            for name in names:
                saved.append((owner, name, getattr(owner, name)))
                guarding = _guarding(saved[-1][-1], poisons, bands)
                # Calls are traced, and made by plan, as they are without these functions.
                setattr(owner, name, counted_as_allocation(guarding) if poisons else guarding)
    try:
        with public_allocations():
            yield bands
    finally:
        for owner, name, factory in saved:
            setattr(owner, name, factory)


def _guarding(factory: Callable, poisons: bool, bands: Bands) -> Callable:
    def guarding_factory(*args, **kwargs):
        fresh = factory(*args, **kwargs)
        # A graph that is being traced must see the factory alone; so must the owner of `out`.
        if torch.compiler.is_compiling() or kwargs.get("out") is not None:
            return fresh
        with torch.no_grad():
            if bands.hold(fresh):
                between = bands.around(fresh) if poisons else bands.copy(fresh)
                return between.requires_grad_(fresh.requires_grad)
            if poisons and type(fresh) is torch.Tensor and fresh.layout == torch.strided:
                floats = fresh.is_floating_point() or fresh.is_complex()
                fresh.fill_(torch.nan if floats else ODD_BYTE)
        return fresh

    return guarding_factory


class FreeMemory:
    """The free memory of the current GPU's caching allocator, filled with NaN."""

    def __init__(self):
        torch.cuda.synchronize()
        device = torch.cuda.current_device()
        self._filled = free_blocks(torch.cuda.memory_snapshot(), device)
        for address, size in self._filled:
            _at(address, size).fill_(NAN_BYTE)
        # A call that takes a block on another stream finds it filled, because the fill ends here.
        torch.cuda.synchronize()
        self._before = self._counts()

    def overrun(self, results: Iterable[torch.Tensor]) -> str:
        """Says what was written behind a result of the call since then; "" where nothing is proved.

        Proof takes a call that allocated its results and nothing else. So the allocations since
        then are counted by the allocator, and the results by the blocks that hold them: a block
        that was free before the call. A result without elements has no block, and results that
        share one count once. A result that lay there before the call, or in a graph's private pool,
        is not of the call. If the two counts differ, the call had a workspace, which may have left
        its own bytes behind a result.
        """
        (calls, segments), (calls_before, segments_before) = self._counts(), self._before
        if segments != segments_before:
            return ""
        snapshot, device = torch.cuda.memory_snapshot(), torch.cuda.current_device()
        held = [start(tensor) for tensor in results]
        sizes = {
            address: block["requested_size"]
            for address, block in _blocks(snapshot, device)
            if any(address <= one < address + block["size"] for one in held)
            and self._was_free(address, block["size"])
        }
        if calls - calls_before != len(sizes):
            return ""
        for size, (address, gap) in behind(snapshot, device, sizes):
            for first, length in self._known(address, gap):
                # On the host, since a kernel that compares would itself take free memory.
                if not (_at(first, length).cpu() == NAN_BYTE).all():
                    return f"writes past the end of an output of {size} bytes"
        return ""

    def _was_free(self, address: int, size: int) -> bool:
        return any(at <= address and address + size <= at + length for at, length in self._filled)

    def _known(self, address: int, size: int) -> Blocks:
        """The parts of some bytes that were filled. Memory that was freed since then holds its old
        content, such as a tensor that garbage collection freed during the call.
        """
        ends = ((max(address, at), min(address + size, at + length)) for at, length in self._filled)
        return [(first, end - first) for first, end in ends if first < end]

    @staticmethod
    def _counts() -> tuple[int, int]:
        stats = torch.cuda.memory_stats()
        return stats["allocation.all.allocated"], stats["segment.all.allocated"]


def free_blocks(snapshot: list[dict], device: int) -> Blocks:
    """Address and size of each free block of `torch.cuda.memory_snapshot()`."""
    return [
        (address, block["size"])
        for address, block in _blocks(snapshot, device)
        if block["state"] == "inactive"
    ]


def behind(snapshot: list[dict], device: int, sizes: dict[int, int]) -> list[tuple[int, tuple]]:
    """The size of each allocation, and address and size of the unused bytes that follow it.

    sizes: bytes that were asked for, by the address of the allocation.
    """
    blocks, found = dict(_blocks(snapshot, device)), []
    for address, block in blocks.items():
        if address not in sizes:
            continue
        first, end = address + sizes[address], address + block["size"]
        follower = blocks.get(end)
        if follower and follower["state"] == "inactive":
            end += follower["size"]
        if end > first:
            found.append((sizes[address], (first, min(BAND, end - first))))
    return found


def _blocks(snapshot: list[dict], device: int) -> Iterator[tuple[int, dict]]:
    for segment in snapshot:
        # Private pools belong to CUDA graphs, which count on what they left there.
        if segment["device"] == device and segment.get("segment_pool_id", (0, 0)) == (0, 0):
            address = segment["address"]
            for block in segment["blocks"]:
                yield address, block
                address += block["size"]


def _at(address: int, size: int) -> torch.Tensor:
    """The bytes at an address of the current GPU, as they lie there."""

    class Bytes:
        __cuda_array_interface__ = {  # noqa: RUF012, a protocol's name for an instance's value
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

    return torch.as_tensor(Bytes(), device="cuda")

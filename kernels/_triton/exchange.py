"""Sums over several programs of a launch: each program waits for the partials of the others.

A partial is its own message. An empty slot holds a value that no partial has. A program that reads
another value has read the partial, so the exchange needs no fence.

No program waits for ever. The programs of a group have neighbouring numbers, and GPUs start
programs in the order of their numbers. In the first group that has not ended, either all programs
run, or the next ones to start belong to it. They do start if the device can hold a whole group.
`may_wait` says whether it can. If it cannot, a launcher takes a path without waiting:

    may_wait(device, programs, per_sm=1) -> bool

The single-pass scan of Merrill and Garland (2016) relies on the order as well, but its programs
wait for earlier ones alone. Here they wait for later ones too, hence the count. Several launches
that wait may share a device, each with a group that has started in part. SHARERS of them cannot
fill the device together.

Two other ways were not taken. Numbers drawn on arrival would make the order of the starts
indifferent. But they cost each program an atomic operation before its first load, and do not help
against other launches. A cooperative launch helps against both, but the device must hold the whole
grid at once. It does not if each row has programs of its own. tests/kernels/test_interleaved.py
tests these claims, and shows the deadlock without them.
"""

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .._runtime.device import has_ptx
from .._runtime.multiprocessors import available

# The bits of an empty slot. As float32 they are a NaN, but not the one that `_bits` writes for all.
NOT_READY = -1
# So many launches whose programs wait may run on a device at once, and all of them end.
SHARERS = 4
# A loop of Triton would keep the compiler from fetching the next tile while this one waits. Strings
# of kernels have one line, because PyTorch's compiler writes them into a source of its own.
WAIT = tl.constexpr(
    "{ .reg .pred unsaid; "
    "again: "
    "ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2]; "
    "setp.eq.s32 unsaid, $0, -1; "
    "@unsaid bra again; "
    "setp.eq.s32 unsaid, $1, -1; "
    "@unsaid bra again; }"
)

# True while programs in the interpreter take turns.
_plan = {"turns": False}


def supports_spin_wait(device: torch.device) -> bool:
    """Return whether kernels with a wait run on `device` at all.

    Triton's interpreter runs one program after the other, and the instructions are NVIDIA's. If a
    kernel has such instructions, PyTorch's compiler assumes that it writes to all tensors.
    """
    waits = has_ptx(device) or _plan["turns"]
    return waits and not torch.compiler.is_dynamo_compiling()


def may_wait(device: torch.device, programs: int, per_sm: int = 1) -> bool:
    """Return whether groups of so many `programs` may wait for each other on `device`.

    per_sm: how many programs a multiprocessor holds for sure; one always. The multiprocessors are
    those of the current stream, also in a slice (MIG) or a green context. SHARERS groups must find
    room, so that SHARERS launches in different streams cannot stop each other.
    """
    return supports_spin_wait(device) and SHARERS * programs <= per_sm * available(device)


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """Let programs in the interpreter wait for each other within the body: they take turns."""
    before = _plan["turns"]
    _plan["turns"] = True
    try:
        yield
    finally:
        _plan["turns"] = before


def empty_slots(groups: int, programs: int, device: torch.device) -> torch.Tensor:
    """Return empty slots for the pairs of partials of groups of programs: [groups, programs, 2].

    They are int32 and new in each call, so a call that allocates them has no plan. A launch that
    reused slots would read the partials of the launch before.
    """
    return torch.full((groups, programs, 2), NOT_READY, dtype=torch.int32, device=device)


@triton.jit
def _bits(part):
    """Return the bits of a float32 number; all NaNs have the same ones."""
    return tl.where(part == part, part, float("nan")).to(tl.int32, bitcast=True)


@triton.jit
def exchange_partials(slots_ptr, program, first, second, PROGRAMS: tl.constexpr):
    """Return the partials of all programs of a group, to each of them: two blocks [PROGRAMS].

    Zeros fill the blocks up to the next power of two. slots_ptr: the slots of the group. program:
    the number of this program in its group. first, second: its partials.
    """
    publish(slots_ptr, program, first, second)
    return collect(slots_ptr, PROGRAMS)


@triton.jit
def publish(slots_ptr, program, first, second):
    """Store a program's partials in its slots; the arguments are those of `exchange_partials`."""
    own = slots_ptr + 2 * program
    tl.atomic_xchg(own, _bits(first), sem="relaxed")
    tl.atomic_xchg(own + 1, _bits(second), sem="relaxed")


@triton.jit
def collect(slots_ptr, PROGRAMS: tl.constexpr):
    """Wait for the partials of a group and return them as `exchange_partials` does."""
    ROOM: tl.constexpr = triton.next_power_of_2(PROGRAMS)
    which = tl.arange(0, ROOM)
    if PROGRAMS < ROOM:
        which = tl.minimum(which, PROGRAMS - 1)
    first, second = tl.inline_asm_elementwise(
        WAIT, "=r,=r,l", [slots_ptr + 2 * which],
        dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    if PROGRAMS < ROOM:
        first = tl.where(tl.arange(0, ROOM) < PROGRAMS, first, 0)
        second = tl.where(tl.arange(0, ROOM) < PROGRAMS, second, 0)
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)

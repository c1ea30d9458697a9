"""Sums that several programs of a launch take together, each waiting for the parts of the others.

A part is its own message. A slot holds a value that no sum has until the part stands there. A
program that reads anything else has read the part, so nothing needs a fence.

Why nobody waits for ever. The programs of a group have neighbouring numbers, and GPUs start
programs in the order of their numbers. So of the first group that has not ended, either all
programs run, or the next ones to start are its own. They do start if the device can hold a whole
group. `may_wait` says whether it can; a launcher that hears no takes a path without waiting:

    may_wait(device, programs, per_sm=1) -> bool

The single-pass scan of Merrill and Garland (2016) relies on the order as well, but its programs
wait for earlier ones alone. Here they wait for later ones too, hence the count. Several launches
that wait may share a device, each with a group that has started in part. SHARERS of them cannot
fill it together.

Numbers drawn on arrival would make the order of the starts indifferent. They cost each program an
atomic operation before its first load, and do not help against other launches. A cooperative launch
helps against both, if the device holds the whole grid at once, as it does not where each row has
programs of its own. tests/kernels/test_interleaved.py shows what is claimed here, and what happens
without.
"""

import contextlib
from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from .._runtime.device import has_ptx
from .._runtime.multiprocessors import available

# As an integer; as a float32 number it is a NaN, and not the one that stands for all others here.
NOT_READY = -1
# How many launches whose programs wait may run on a device at once, and still all end.
SHARERS = 4
# A loop of Triton would keep the compiler from fetching the next tile while this one waits. In one
# line, as all strings of kernels: PyTorch's compiler writes them into a source of its own.
WAIT = tl.constexpr(
    "{ .reg .pred unsaid; "
    "again: "
    "ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2]; "
    "setp.eq.s32 unsaid, $0, -1; "
    "@unsaid bra again; "
    "setp.eq.s32 unsaid, $1, -1; "
    "@unsaid bra again; }"
)

# Whether whoever runs the interpreter has its programs take turns.
_plan = {"turns": False}


def supports_spin_wait(device: torch.device) -> bool:
    """Whether kernels with a wait run on `device` at all.

    Triton's interpreter runs one program after the other, and the instructions are NVIDIA's.
    PyTorch's compiler believes of a kernel that has any that it writes to all tensors.
    """
    waits = has_ptx(device) or _plan["turns"]
    return waits and not torch.compiler.is_dynamo_compiling()


def may_wait(device: torch.device, programs: int, per_sm: int = 1) -> bool:
    """Whether groups of so many `programs` of a launch may wait for each other on `device`.

    per_sm: how many programs a multiprocessor holds for sure; one always. The multiprocessors are
    those that the current stream has, of a slice (MIG) or a green context too. SHARERS groups must
    find room, so that SHARERS launches in different streams cannot stop each other.
    """
    return supports_spin_wait(device) and SHARERS * programs <= per_sm * available(device)


@contextlib.contextmanager
def taking_turns() -> Iterator[None]:
    """Within the body programs may wait for each other in the interpreter too, since it has them
    take turns."""
    before = _plan["turns"]
    _plan["turns"] = True
    try:
        yield
    finally:
        _plan["turns"] = before


def empty_slots(groups: int, programs: int, device: torch.device) -> torch.Tensor:
    """Slots for the bits of pairs of sums, of groups of programs: int32 [groups, programs, 2].

    They are new in each call, so a call that allocates them has no plan (`_plan.py`). A launch
    that reads a slot twice would read what the launch before left there.
    """
    return torch.full((groups, programs, 2), NOT_READY, dtype=torch.int32, device=device)


@triton.jit
def _bits(part):
    return tl.where(part == part, part, float("nan")).to(tl.int32, bitcast=True)


@triton.jit
def exchange_partials(slots_ptr, program, first, second, PROGRAMS: tl.constexpr):
    """The parts of all programs of a group, in each of them: two blocks of PROGRAMS, which zeros
    fill up to the next power of two.

    slots_ptr: the slots of the group. program: which of them this is. first, second: its parts.
    """
    publish(slots_ptr, program, first, second)
    return collect(slots_ptr, PROGRAMS)


@triton.jit
def publish(slots_ptr, program, first, second):
    """Store a program's parts where its group finds them; arguments as of `exchange_partials`."""
    own = slots_ptr + 2 * program
    tl.atomic_xchg(own, _bits(first), sem="relaxed")
    tl.atomic_xchg(own + 1, _bits(second), sem="relaxed")


@triton.jit
def collect(slots_ptr, PROGRAMS: tl.constexpr):
    """Wait for the parts of all programs of a group; result as of `exchange_partials`."""
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

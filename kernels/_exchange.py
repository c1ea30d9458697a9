"""Sums that several programs of a launch take together, each waiting for the parts of the others.

A part is its own message: a slot holds a value that no sum has until the part stands there, so
who reads anything else has read the part, and nothing needs a fence. Programs that wait for each
other have neighbouring numbers. GPUs start programs in the order of their numbers, so those of the
first unfinished group run, or start as soon as others end; the single-pass scan of Merrill and
Garland (2016) relies on the same.
"""

import torch
import triton
import triton.language as tl

from kernels._device import has_ptx

# As an integer; as a float32 number it is a NaN, and not the one that stands for all others here.
UNSAID = -1
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


def side_by_side(device: torch.device) -> bool:
    """Whether programs of a launch may wait for each other on `device`: Triton's interpreter runs
    one after the other, the instructions are NVIDIA's, and of a kernel that has any PyTorch's
    compiler believes that it writes to all tensors."""
    return has_ptx(device) and not torch.compiler.is_dynamo_compiling()


def unsaid(groups: int, programs: int, device: torch.device) -> torch.Tensor:
    """Slots for the bits of pairs of sums, of groups of programs: int32 [groups, programs, 2]."""
    return torch.full((groups, programs, 2), UNSAID, dtype=torch.int32, device=device)


@triton.jit
def _bits(part):
    return tl.where(part == part, part, float("nan")).to(tl.int32, bitcast=True)


@triton.jit
def parts_together(slots_ptr, program, first, second, PROGRAMS: tl.constexpr):
    """The parts of all programs of a group, [PROGRAMS] and [PROGRAMS], in each of them.

    slots_ptr: the slots of the group. program: which of them this is. first, second: its parts.
    """
    own = slots_ptr + 2 * program
    tl.atomic_xchg(own, _bits(first), sem="relaxed")
    tl.atomic_xchg(own + 1, _bits(second), sem="relaxed")
    first, second = tl.inline_asm_elementwise(
        WAIT, "=r,=r,l", [slots_ptr + 2 * tl.arange(0, PROGRAMS)],
        dtype=(tl.int32, tl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return first.to(tl.float32, bitcast=True), second.to(tl.float32, bitcast=True)

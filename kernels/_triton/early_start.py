"""Programmatic dependent launch: a kernel starts while the one before it still runs.

A launch with `launch_pdl` may begin as soon as each program of the kernel before has called
`start_next`, or has ended. `wait_for_previous` returns when that kernel has ended and its writes
can be read. So until then a program may compute addresses and fetch lines to the L2 cache, and
must neither read nor write otherwise. Each program has to wait, even if it reads nothing of the
kernel before: the one behind takes its end for the end of all kernels before.

A program starts the next kernel after it has waited, when its own reads are on their way. Else
many kernels would wait at once, and what they fetch would not stay in the L2 cache.

Source: NVIDIA, "CUDA C++ programming guide", programmatic dependent launch and synchronization.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Bytes of a line of the L2 cache.
LINE_BYTES = tl.constexpr(128)


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Wait for the end of the kernel before, if this one is EARLY."""
    if EARLY:
        gdc_wait()


@triton.jit
def start_next(EARLY: tl.constexpr):
    """Let the next kernel start, if this one is EARLY and all of its programs have come here.

    The next one cannot take the room of a program of this one: all of them have started by then.
    """
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def fetch_lines(ptrs, mask):
    """Fetch the lines of ptrs to the L2 cache if the mask, of one shape with ptrs, is true."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r", [ptrs.to(tl.int64), mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip

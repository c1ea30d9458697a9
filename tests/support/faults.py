"""Implementations of known behaviour: the size of the input selects one.

The reference is `small`; copied into a tree of its own, this file serves as an op of ours and as a
baseline.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections import Counter

import torch

# Bound before any function is replaced, as in a library that imports names.
EMPTY_LIKE = torch.empty_like
ROOM, LEAK, TOO_MUCH = 2**29, 2**28, 2**50
MEGABYTES = 8
# With this size it never answers.
HANGS = 119

calls = Counter()
kept = {}


def small(x):
    """So small that an absolute tolerance of 0.01 would pass zeros."""
    return x * 1e-3


def raises(x):
    raise ValueError("not this size\nand other words")


def leaves_a_tail_unwritten(x):
    out = torch.empty_like(x)
    out[:-1] = small(x[:-1])
    return out


def writes_one_element_too_far(x):
    out = torch.empty_like(x)
    ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 0, out.element_size())
    return out.copy_(small(x))


def right_at_first_and_wrong_later(x):
    calls[x.dtype] += 1
    return small(x) * (1.0 if calls[x.dtype] <= 3 else 1.03)


def replays_an_earlier_result(x):
    if x.dtype not in kept:
        kept[x.dtype] = small(x)
    return kept[x.dtype].clone()


def changes_its_input(x):
    out = small(x)
    x[0] = 0
    return out


def prints_megabytes(x):
    os.write(1, b"not json\n" * (MEGABYTES * 2**20 // 9))
    print("x" * MEGABYTES * 2**20)
    return small(x)


def leaks_memory(x):
    """This address space is never given back, on a machine that has little."""
    if "leak" not in kept:
        pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115
        most = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    kept.setdefault("leak", []).append(torch.empty(LEAK, dtype=torch.uint8))
    return small(x)


def segfaults(x):
    ctypes.string_at(0)


def is_killed(x):
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {
    100: small,
    101: raises,
    102: lambda x: torch.zeros_like(x),
    103: lambda x: torch.full_like(x, float("nan")),
    104: leaves_a_tail_unwritten,
    105: writes_one_element_too_far,
    106: right_at_first_and_wrong_later,
    107: lambda x: small(x) * 1.03,
    108: lambda x: x,
    109: changes_its_input,
    110: replays_an_earlier_result,
    111: lambda x: EMPTY_LIKE(x),
    112: prints_megabytes,
    113: leaks_memory,
    114: lambda x: torch.empty(TOO_MUCH),
    115: lambda x: sys.exit(3),
    116: lambda x: os._exit(0),
    117: segfaults,
    118: is_killed,
    HANGS: lambda x: time.sleep(3600),
    120: small,
}


def faulty(x):
    return FAULTS[x.numel()](x)

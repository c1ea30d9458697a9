"""What the element-wise families share: tiles of a flat vector, and packed flags.

Where a gradient follows from a yes or a no about each element, the forward pass packs the answers
of eight elements into a word, and the backward pass reads those words in place of the inputs: an
eighth of a byte an element. Jain et al., "Gist: Efficient data encoding for deep neural network
training" (2018), kept relu's that way.
"""

import torch
import triton
import triton.language as tl

from .._runtime.configs import Configs
from .._runtime.device import sm_count

ACCESS_BYTES = 16
# Programs of two warps that a multiprocessor has at a time.
RESIDENT = 32
# Bytes of results that stay in the L2, of which an H200 has 60 MiB, until they are read.
STAYING = 2**25
# Elements whose flags make a word: as many 16-bit numbers as a thread reads at once, so that it
# packs and unpacks them alone.
FLAGS = 8
WORD = tl.constexpr(FLAGS)
BLOCKS = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (256, 512, 1024, 2048, 4096, 8192)
    for warps in (2, 4, 8)
    if 4 <= block // (32 * warps) <= 32
)


def choose_block(n, itemsize, light=False, sms=0, **what):
    """One 16-byte access for each of 128 threads, and as many programs as that takes.

    Or, where the map is light, reads one vector and does next to no arithmetic, four accesses for
    each of 64 threads if so few programs fill the device once, at most, or nearly twice: then none
    begins when the others are about to end. docs/lab/activation.md has the times on either side.
    """
    # A graph that is traced may not ask for the value of a size.
    if light and not torch.compiler.is_dynamo_compiling():
        few = {"BLOCK_N": 256 * ACCESS_BYTES // itemsize, "num_warps": 2}
        waves = -(-n // few["BLOCK_N"]) / (RESIDENT * sms)
        if 0.45 <= waves <= 1 or 1.75 <= waves <= 2:
            return few
    return {"BLOCK_N": 128 * ACCESS_BYTES // itemsize, "num_warps": 4}


def length(n, config):
    """What a kernel is told of a length of n: None where whole blocks fill it.

    Where each block first asks whether it reaches beyond the end its loads begin later, which a
    vector of some MiB shows. A graph that is traced may not ask for the value of a size.
    """
    return n if torch.compiler.is_dynamo_compiling() or n % config["BLOCK_N"] else None


def store_policy(n, itemsize, light=False):
    """The cache modifier of the stores of a map: past the L2's older lines, which it leaves to the
    loads, unless the map is light and the L2 has room for all that it writes."""
    # A graph that is traced may not ask for the value of a size.
    if light and not torch.compiler.is_dynamo_compiling() and n * itemsize <= STAYING:
        return ""
    return ".cs"


def map_tiles(configs, x, light):
    """The configuration and the store policy of a map of x, whose kernel has these `Configs`;
    light: as `choose_block` has it."""
    what = {"n": x.numel(), "itemsize": x.element_size(), "light": light}
    return configs.pick(x.device, **what, sms=sm_count(x.device)), store_policy(**what)


def suits_block(candidate, n, itemsize, **what):
    """Whether a thread makes one to four accesses of 16 bytes."""
    item_bytes = candidate["BLOCK_N"] * itemsize // (32 * candidate["num_warps"])
    return ACCESS_BYTES <= item_bytes <= 4 * ACCESS_BYTES


def tiles(kernel, family=""):
    """The tiles of a kernel that walks flat vectors; family: as `Configs` has it."""
    return Configs(kernel, BLOCKS, choose_block, suits_block, family=family)


@triton.jit
def block_offsets(BLOCK_N: tl.constexpr):
    """The offsets of this program's block in a flat vector, int64."""
    return tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def block_is_full(N, BLOCK_N: tl.constexpr):
    """Whether this program's block ends within the vector.

    A full block is loaded without a mask, because a mask whose bound is no multiple of the vector
    width makes every access of a kernel scalar; only the last block pays for its tail.
    """
    return (tl.program_id(0) + 1).to(tl.int64) * BLOCK_N <= N


@triton.jit
def store_by(ptrs, value, mask, POLICY: tl.constexpr):
    """Stores in the dtype of the pointers; POLICY: that of `store_policy`."""
    tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=mask, cache_modifier=POLICY)


@triton.jit
def store_once(ptrs, value, mask):
    """Stores in the dtype of the pointers what nobody here reads again, past the L2's older lines.

    Not by a default of `store_by`: the compiler takes none that is a string.
    """
    store_by(ptrs, value, mask, ".cs")


def words_of(n):
    """The number of words that hold the flags of n elements."""
    return -(-n // FLAGS)


@triton.jit
def word_offsets(BLOCK_N: tl.constexpr):
    """The offsets of the words of this program's block, int64."""
    return tl.program_id(0).to(tl.int64) * (BLOCK_N // WORD) + tl.arange(0, BLOCK_N // WORD)


@triton.jit
def packed(flags, BLOCK_N: tl.constexpr):
    """The flags of a block by words, int32: the first of eight elements is the lowest bit."""
    rows = tl.reshape(flags.to(tl.int32), (BLOCK_N // WORD, WORD))
    return tl.sum(rows << tl.arange(0, WORD)[None, :], axis=1)


@triton.jit
def unpacked(words, BLOCK_N: tl.constexpr):
    """The flags of a block from its words, whose higher bits may hold anything."""
    rows = words.to(tl.int32)[:, None] >> tl.arange(0, WORD)[None, :]
    return tl.reshape(rows & 1, (BLOCK_N,)) != 0

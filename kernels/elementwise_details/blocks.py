"""Parts of the element-wise families: tiles of a flat vector, and packed flags.

If a gradient depends on one bit an element, the forward pass packs the bits of eight elements into
a word. The backward pass reads the words instead of the inputs: an eighth of a byte an element.
Jain et al., "Gist: Efficient data encoding for deep neural network
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
# Bytes of results that stay in the L2 until they are read; an H200 has 60 MiB of it.
STAYING = 2**25
# Elements whose flags make a word: as many 16-bit numbers as one access of a thread reads, so that
# a thread packs and unpacks a word alone.
FLAGS = 8
WORD = tl.constexpr(FLAGS)
BLOCKS = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (256, 512, 1024, 2048, 4096, 8192)
    for warps in (2, 4, 8)
    if 4 <= block // (32 * warps) <= 32
)


def choose_block(n, itemsize, light=False, sms=0, **key):
    """Return the tile of a map: one 16-byte access for each of 128 threads.

    A light map reads one vector and does next to no arithmetic. It has four accesses for each of 64
    threads if its programs fill the device at most once, or nearly twice. No program then begins
    when the others are about to end (docs/lab/activation.md has the times of both tiles).
    """
    # A traced graph may not ask for the value of a size.
    if light and not torch.compiler.is_dynamo_compiling():
        few = {"BLOCK_N": 256 * ACCESS_BYTES // itemsize, "num_warps": 2}
        waves = -(-n // few["BLOCK_N"]) / (RESIDENT * sms)
        if 0.45 <= waves <= 1 or 1.75 <= waves <= 2:
            return few
    return {"BLOCK_N": 128 * ACCESS_BYTES // itemsize, "num_warps": 4}


def length(n, config):
    """Return the argument N of a kernel for a length of n: None if whole blocks fill it.

    If each block first tests whether it reaches beyond the end, its loads begin later, which is
    measurable on a vector of some MiB. A traced graph may not ask for the value of a size.
    """
    return n if torch.compiler.is_dynamo_compiling() or n % config["BLOCK_N"] else None


def store_policy(n, itemsize, light=False):
    """Return the cache modifier of the stores of a map.

    Streaming stores leave the older lines of the L2 to the loads. A light map does without them if
    the L2 has room for its whole result.
    """
    # A traced graph may not ask for the value of a size.
    if light and not torch.compiler.is_dynamo_compiling() and n * itemsize <= STAYING:
        return ""
    return ".cs"


def map_tiles(configs, x, light):
    """Return the configuration and the store policy of a map of x; light: as in `choose_block`."""
    key = {"n": x.numel(), "itemsize": x.element_size(), "light": light}
    return configs.pick(x.device, **key, sms=sm_count(x.device)), store_policy(**key)


def suits_block(candidate, n, itemsize, **key):
    """Return whether a thread makes one to four accesses of 16 bytes."""
    item_bytes = candidate["BLOCK_N"] * itemsize // (32 * candidate["num_warps"])
    return ACCESS_BYTES <= item_bytes <= 4 * ACCESS_BYTES


def tiles(kernel, family=""):
    """Return the `Configs` of a kernel of flat vectors; family: as in `Configs`."""
    return Configs(kernel, BLOCKS, choose_block, suits_block, family=family)


@triton.jit
def block_offsets(BLOCK_N: tl.constexpr):
    """Return the offsets of this program's block in a flat vector, int64 `[BLOCK_N]`."""
    return tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def block_is_full(N, BLOCK_N: tl.constexpr):
    """Return whether this program's block ends within the vector.

    A full block is loaded without a mask. A mask whose bound is no multiple of the vector width
    makes every access of a kernel scalar, so only the last block has one.
    """
    return (tl.program_id(0) + 1).to(tl.int64) * BLOCK_N <= N


@triton.jit
def store_by(ptrs, value, mask, POLICY: tl.constexpr):
    """Store in the dtype of the pointers; POLICY: cache modifier, from `store_policy`."""
    tl.store(ptrs, value.to(ptrs.dtype.element_ty), mask=mask, cache_modifier=POLICY)


@triton.jit
def store_once(ptrs, value, mask):
    """Store data that is not read again in the dtype of the pointers, by a streaming store.

    A default of `store_by` would do, but the compiler takes no string as a default.
    """
    store_by(ptrs, value, mask, ".cs")


def words_of(n):
    """Return the number of words that hold the flags of n elements."""
    return -(-n // FLAGS)


@triton.jit
def word_offsets(BLOCK_N: tl.constexpr):
    """Return the offsets of the words of this program's block, int64 `[BLOCK_N // WORD]`."""
    return tl.program_id(0).to(tl.int64) * (BLOCK_N // WORD) + tl.arange(0, BLOCK_N // WORD)


@triton.jit
def packed(flags, BLOCK_N: tl.constexpr):
    """Return the flags of a block in words, int32; the first of eight is the lowest bit."""
    rows = tl.reshape(flags.to(tl.int32), (BLOCK_N // WORD, WORD))  # [BLOCK_N // WORD, WORD]
    return tl.sum(rows << tl.arange(0, WORD)[None, :], axis=1)


@triton.jit
def unpacked(words, BLOCK_N: tl.constexpr):
    """Return the flags of a block from its words; higher bits of a word are ignored."""
    rows = words.to(tl.int32)[:, None] >> tl.arange(0, WORD)[None, :]
    return tl.reshape(rows & 1, (BLOCK_N,)) != 0

"""The tokens of an embedding in the order of their ids.

A key holds the id of a token and the token's place, so all keys differ and every correct sort gives
the same order. The place of a key in a block of keys is the number of smaller keys, which a program
counts. Its place in the whole is the sum of such numbers, found in each sorted block by bisection.

Sources: sorting by ranks in sorted blocks is that of Satish, Harris and Garland, "Designing
efficient sorting algorithms for manycore GPUs" (2009).
"""

import torch
import triton
import triton.language as tl

from .._runtime.checks import MOST_ITEMS

# Keys of a sorted block, and of these those that a program places, and that it compares at a time.
SORTED, PLACED, SEEN = 1024, 16, 512
# Below so many ids, an id and a place within a block fit in 31 bits.
NARROW = 2**31 // SORTED - 1
# The bits of any number of tokens; one that depends on their number would ask for a graph for each.
MOST_STEPS = MOST_ITEMS.bit_length()
# Keys that a program ranks. It bisects several sorted blocks at once, as each step of a bisection
# waits for the one before: the second number if there are few blocks, else the third.
RANKED, BISECTED_OF_FEW, BISECTED, FEW = 32, 8, 4, 16
# Beyond so many tokens the bisections take more time than PyTorch's sort.
MOST_RANKED = 2**16
# The upper half of a key is the id, the lower half the place of the token.
PLACE_BITS = tl.constexpr(32)
PLACE = tl.constexpr(2**32 - 1)
LAST_KEY = tl.constexpr(2**63 - 1)


def sorted_keys(ids: torch.Tensor, rows: int, padding: int) -> torch.Tensor:
    """Return the keys of all tokens, ascending, int64 `[M]`.

    ids: contiguous, M of them, of a weight of so many rows. padding: an id that counts as no row,
    or -1. The keys of such tokens, and of those with an id out of range, have the id `rows`.
    """
    m = ids.numel()
    keys = torch.empty(m, dtype=torch.int64, device=ids.device)
    if m == 0:
        return keys
    few, blocks = m <= MOST_RANKED, (m - 1) // SORTED + 1
    unranked = keys if blocks == 1 else torch.empty_like(keys)
    _sort_kernel[((m - 1) // PLACED + 1,)](
        ids_ptr=ids, keys_ptr=unranked, M=m, V=rows, padding=padding,
        BLOCK=SORTED if few else PLACED, OWN=PLACED, SEEN=SEEN if few else PLACED,
        NARROW=rows < NARROW, num_warps=4,
    )  # fmt: skip
    if not few:
        return torch.sort(unranked)[0]
    if blocks > 1:
        _rank_kernel[((m - 1) // RANKED + 1,)](
            unranked_ptr=unranked, keys_ptr=keys, M=m, blocks=blocks, steps=SORTED.bit_length(),
            BLOCK=SORTED, OWN=RANKED, BISECTED=BISECTED_OF_FEW if blocks <= FEW else BISECTED,
            num_warps=4,
        )  # fmt: skip
    return keys


@triton.jit
def _sort_kernel(
    ids_ptr, keys_ptr, M, V, padding,
    BLOCK: tl.constexpr, OWN: tl.constexpr, SEEN: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """keys = the keys of each block of BLOCK tokens, ascending.

    Grid: cdiv(M, OWN). A program owns OWN tokens of a block. It reads the ids of the block, SEEN at
    a time and as many beyond it, and counts those before each of its own. It writes its keys to
    those places of keys [M]. OWN and SEEN divide BLOCK. NARROW: whether (V + 1) * BLOCK fits in 31
    bits.
    """
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    block = tl.program_id(0) * OWN // BLOCK * BLOCK
    ids = _ids(ids_ptr, own, M, V, padding)
    order = _order(ids, own - block, BLOCK, NARROW)
    rank = tl.zeros((OWN,), tl.int32)
    within = tl.arange(0, SEEN)
    ahead = _ids(ids_ptr, block + within, M, V, padding)
    for _ in range(0, BLOCK, SEEN):
        seen = _order(ahead, within, BLOCK, NARROW)
        # The next ids are on their way while these are compared.
        within += SEEN
        ahead = _ids(ids_ptr, block + within, M, V, padding)
        before = seen[None, :] < order[:, None]  # [OWN, SEEN]
        rank += tl.sum(before.to(tl.int32), 1)
    keys = (ids.to(tl.int64) << PLACE_BITS) | own
    tl.store(keys_ptr + block + rank, keys, mask=own < M)


@triton.jit
def _ids(ids_ptr, places, M, V, padding):
    """Return the ids at these places; `padding` and those out of range become V, that of no row.

    So do places past the last token, which are the last in order.
    """
    ids = tl.load(ids_ptr + places, mask=places < M, other=-1)
    return tl.where((ids < 0) | (ids >= V) | (ids == padding), V, ids)


@triton.jit
def _order(ids, within, BLOCK: tl.constexpr, NARROW: tl.constexpr):
    """Return numbers that order the tokens of a block by id, then by place within the block."""
    KEY: tl.constexpr = tl.int32 if NARROW else tl.int64
    return ids.to(KEY) * BLOCK + within


@triton.jit
def _rank_kernel(
    unranked_ptr, keys_ptr, M, blocks, steps,
    BLOCK: tl.constexpr, OWN: tl.constexpr, BISECTED: tl.constexpr,
):  # fmt: skip
    """keys = all keys, ascending, from blocks of which each is.

    Grid: cdiv(M, OWN). A program owns OWN keys of a block. It reads them, and bisects each of the
    `blocks` blocks of BLOCK keys for the number of keys below each of its own, BISECTED blocks at a
    time. The sum of these numbers is the place in keys [M]. steps: the number of bits of BLOCK.
    """
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    inside = own < M
    keys = tl.load(unranked_ptr + own, mask=inside, other=LAST_KEY)
    rank = tl.zeros((OWN,), tl.int32)
    for block in range(0, blocks, BISECTED):
        first = tl.minimum((block + tl.arange(0, BISECTED)) * BLOCK, M)[:, None]
        low = first + tl.zeros((BISECTED, OWN), tl.int32)
        high = tl.minimum(low + BLOCK, M)
        rank += tl.sum(bisect(unranked_ptr, keys[None, :], low, high, steps) - first, 0)
    tl.store(keys_ptr + rank, keys, mask=inside)


@triton.jit
def bisect(keys_ptr, wanted, low, high, steps):
    """Return the first places in [low, high) whose keys are not below `wanted`, else high.

    low, high: integers of one shape. The ranges have fewer than 2**steps keys.
    """
    for _ in range(steps):
        middle = (low + high) // 2
        key = tl.load(keys_ptr + middle, mask=low < high, other=LAST_KEY)
        below = key < wanted
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, tl.minimum(high, middle))
    return low

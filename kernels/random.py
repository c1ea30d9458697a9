"""Random integers, and dropout, whose mask nobody stores.

randint: out[i] = low + floor(w[offset + i] (high - low) / 2**bits), w the words of a stream.
dropout: out[i] = x[i] / q where h[i] >= t, else zero; dx = dy / q where h[i] >= t, h drawn again.
The numbers h have 16 bits, so t / 2**16 is the nearest to p, and q = 1 - t / 2**16 the share that
is kept in truth: with 1 - p in its place the mean would be off by up to 2**-17 / (1 - p) of itself.

The stream of a seed is that of Philox (`kernels/random_details/philox.py`). An element takes its
word, or half a word, by its place alone, so no result depends on the tiles.

Range: multiplying by it and keeping the high part (Lemire, "Fast random integer generation in an
interval", 2019) gives each value as many of the 2**bits words as any other, or one more, so that
its probability is off by less than (high - low) / 2**bits of itself. Ranges up to 2**24 take a
word of 32 bits, and are off by less than 2**-8; others take two words, 64 bits, and are off by
less than 2**-32 where they fit 32 bits.

There are no FLOPs, and both would wait for the generator if they wasted words. So a call serves
four elements of randint, or two, and eight of dropout; and the two halves of a product come from
one multiplication.
"""

import torch
import triton
import triton.language as tl

from ._runtime import checks
from ._runtime.autograd import needs_grad, once
from ._runtime.call_cache import cached_launch
from ._runtime.checks import check_flag, check_floating, check_integer, shown
from ._runtime.configs import Config, Configs
from .elementwise_details.blocks import block_is_full, block_offsets, length, store_once
from .random_details.philox import boxed, interleave, number, philox

# Widest range that takes 32 bits.
NARROW = 2**24
# The least and the greatest bound; that from above is itself a number of int64, as in PyTorch.
BOUNDS = {torch.int32: (-(2**31), 2**31), torch.int64: (-(2**63), 2**63 - 1)}
# Numbers of 16 bits decide what dropout keeps.
LEVELS = 2**16


def _levels(p):
    """How many of the LEVELS numbers drop an entry; some keep it unless p is one."""
    return LEVELS if p == 1 else min(round(p * LEVELS), LEVELS - 1)


def _scale(dropped):
    return LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0


# The tuner's choices on an H200.
def _choose_randint(itemsize, words):
    return {"BLOCK_N": 512 if itemsize > 4 * words else 1024, "num_warps": itemsize // 2}


def _choose_dropout(itemsize):
    # What a call of the generator serves: eight elements, 16 bytes of 16-bit ones.
    return {"BLOCK_N": 2048 // itemsize, "num_warps": 8 // itemsize}


def _suits_randint(candidate, itemsize, words):
    # One to four accesses of 16 bytes a thread, and a whole call at least.
    each = candidate["BLOCK_N"] // (32 * candidate["num_warps"])
    return 16 <= each * itemsize <= 64 and each * words >= 4


CONFIGS = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (512, 1024, 2048, 4096, 8192)
    for warps in (2, 4, 8)
    if 2 <= block // (32 * warps) <= 32
)
DROPOUT_CONFIGS = tuple(
    each for each in CONFIGS if 8 <= each["BLOCK_N"] // (32 * each["num_warps"]) <= 32
)


@triton.jit(do_not_specialize=["seed", "first", "skip", "low", "high"])
def _randint_kernel(
    out_ptr, seed, first, skip, low, high, N,
    UNIT: tl.constexpr, WORDS: tl.constexpr, LONG: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # The tiles lie on the stream, of which the output begins skip * UNIT elements into the first.
    pid = tl.program_id(0)
    a, b, c, d = philox(seed, number(first) + pid, BLOCK_N * WORDS // 4)
    low = number(low)
    span = (number(high) - low).to(tl.uint64)
    if WORDS == 1:
        value = tl.umulhi(interleave(a, b, c, d, BLOCK_N), span.to(tl.uint32))
    elif LONG:
        even = a.to(tl.uint64) | (b.to(tl.uint64) << 32)
        odd = c.to(tl.uint64) | (d.to(tl.uint64) << 32)
        value = tl.umulhi(tl.join(even, odd).reshape(BLOCK_N), span)
    else:
        # The same for a range of one word, by two multiplications.
        factor = span.to(tl.uint32).to(tl.uint64)
        low_word, high_word = tl.join(a, c).reshape(BLOCK_N), tl.join(b, d).reshape(BLOCK_N)
        carry = (low_word.to(tl.uint64) * factor) >> 32
        value = (high_word.to(tl.uint64) * factor + carry) >> 32
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    out = value.to(dtype) + low.to(dtype)
    offs = pid.to(tl.int64) * BLOCK_N - skip * UNIT + tl.arange(0, BLOCK_N)
    if (pid > 0) & ((pid + 1).to(tl.int64) * BLOCK_N - skip * UNIT <= N):
        tl.store(out_ptr + offs, out)
    else:
        tl.store(out_ptr + offs, out, mask=(offs >= 0) & (offs < N))


@triton.jit
def _dropout_block(x_ptr, out_ptr, offs, mask, seed, dropped, scale, BLOCK_N: tl.constexpr):
    # First, so that it is on its way while the generator computes.
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    a, b, c, d = philox(seed, tl.program_id(0), BLOCK_N // 8)
    words = interleave(a, b, c, d, BLOCK_N // 2)
    # At the top of a word, what is below 16 bits decides nothing. Zero less one is the greatest.
    bound = (tl.cast(dropped, tl.uint32) << 16) - 1
    keep = tl.join(words << 16, words).reshape(BLOCK_N) > bound
    # A traced graph hands floats over as float64.
    store_once(out_ptr + offs, tl.where(keep, x * tl.cast(scale, tl.float32), 0.0), mask)


@triton.jit(do_not_specialize=["seed", "dropped"])
def _dropout_kernel(x_ptr, out_ptr, seed, dropped, scale, N, BLOCK_N: tl.constexpr):
    offs = block_offsets(BLOCK_N)
    if N is None or block_is_full(N, BLOCK_N):
        _dropout_block(x_ptr, out_ptr, offs, None, seed, dropped, scale, BLOCK_N)
    else:
        _dropout_block(x_ptr, out_ptr, offs, offs < N, seed, dropped, scale, BLOCK_N)


RANDINT_TILES = Configs(_randint_kernel, CONFIGS, _choose_randint, _suits_randint)
DROPOUT_TILES = Configs(_dropout_kernel, DROPOUT_CONFIGS, _choose_dropout)


def randint(
    low: int,
    high: int,
    size: int | tuple[int, ...],
    seed: int | torch.Tensor,
    offset: int = 0,
    dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Uniform integers from [low, high): the elements of a seed's sequence from `offset` on.

    size: the shape. seed: of 64 bits; a tensor of one int64 is read on its device. dtype: int32 or
    int64. device: of the result where the seed is a number. The sequence of a seed depends on low,
    high and nothing else but its dtype's range. TypeError for a seed, bound, size or offset that is
    no integer, as a bool is none. ValueError for an empty range, bounds that the dtype cannot hold,
    another dtype, a size or an offset below zero.
    """
    low, high = check_integer("low", low), check_integer("high", high)
    offset = check_integer("offset", offset, 0)
    size = _shape(size)
    if offset == 0 and isinstance(seed, torch.Tensor):
        return _randint_from_start(seed, low, high, size, dtype)
    _check_randint(low, high, seed, dtype)
    device = seed.device if isinstance(seed, torch.Tensor) else device
    out = torch.empty(size, dtype=dtype, device=device)
    block = _randint_config(out, high - low)["BLOCK_N"]
    # A graph that is traced with sizes unknown has no divmod.
    _randint(out, seed, offset // block, offset % block, low, high)
    return out


def _shape(size: object) -> tuple[int, ...]:
    """A size as a shape; TypeError or ValueError where it is none."""
    if isinstance(size, int):
        return (check_integer("size", size, 0),)
    if not isinstance(size, (tuple, list)):
        raise TypeError(f"size: {shown(size)}, expected an integer or a tuple of them")
    return tuple(check_integer("size", each, 0) for each in size)


def _check_randint(low: int, high: int, seed: int | torch.Tensor, dtype: torch.dtype) -> None:
    """ValueError for bounds that the dtype cannot hold, or another dtype; errors of `_check`."""
    if not (isinstance(dtype, torch.dtype) and dtype in BOUNDS):
        raise ValueError(f"dtype: {shown(dtype)}, expected int32 or int64")
    least, most = BOUNDS[dtype]
    if not least <= low < high <= most:
        raise ValueError(f"low, high: {low}, {high}, expected {least} <= low < high <= {most}")
    _check(seed)


def _randint_config(out: torch.Tensor, span: int) -> Config:
    words = 1 if span <= NARROW else 2
    return RANDINT_TILES.pick(out.device, itemsize=out.element_size(), words=words)


def _randint_from_start(
    seed: torch.Tensor, low: int, high: int, size: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """`randint` with a seed on its device and no offset: here the whole call can have a plan."""
    _check_randint(low, high, seed, dtype)
    out = torch.empty(size, dtype=dtype, device=seed.device)
    _randint(out, seed, 0, 0, low, high)
    return out


def _randint(
    out: torch.Tensor,
    seed: int | torch.Tensor,
    first: int | torch.Tensor,
    skip: int,
    low: int,
    high: int,
) -> None:
    """Write the integers of a seed to out: those from element `skip` of tile `first` on.

    The number of the tile is handed over, so that ever new offsets need no plan of their own.
    """
    n, span = out.numel(), high - low
    if n == 0:
        return
    config = _randint_config(out, span)
    # A compiler that knows the start to be a multiple of 16 elements stores 16 bytes at a time.
    unit = 1 if skip % 16 else 16
    seed, first, low, high = (boxed(each, out.device) for each in (seed, first, low, high))
    _randint_kernel[(-(-(skip + n) // config["BLOCK_N"]),)](
        out_ptr=out, seed=seed, first=first, skip=skip // unit, low=low, high=high, N=n,
        UNIT=unit, WORDS=1 if span <= NARROW else 2, LONG=span > 2**32 - 1, **config,
    )  # fmt: skip


def _check(seed: int | torch.Tensor) -> None:
    """TypeError or ValueError for a seed that is none, such as the `training` of PyTorch's dropout,
    which stands in its place there."""
    if not isinstance(seed, torch.Tensor):
        check_integer("seed", seed, -(2**63), 2**63 - 1)
    elif seed.dtype != torch.int64 or seed.numel() != 1:
        raise ValueError(f"seed: {tuple(seed.shape)} {seed.dtype}, expected one int64")


def _dropout(x: torch.Tensor, dropped: int, seed: int | torch.Tensor) -> torch.Tensor:
    check_floating(x=x)
    if isinstance(seed, torch.Tensor) and seed.device != x.device:
        raise ValueError(f"seed: on {seed.device}, expected {x.device} as x is")
    x = x.contiguous()
    out = torch.empty_like(x)
    if n := x.numel():
        config = DROPOUT_TILES.pick(x.device, itemsize=x.element_size())
        _dropout_kernel[(-(-n // config["BLOCK_N"]),)](
            x_ptr=x, out_ptr=out, seed=boxed(seed, x.device), dropped=dropped,
            scale=_scale(dropped), N=length(n, config), **config,
        )  # fmt: skip
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dropped, seed):
        ctx.dropped = dropped
        # A seed on the device may be changed before the backward pass: autograd watches it.
        ctx.number = None if isinstance(seed, torch.Tensor) else seed
        ctx.save_for_backward(*(() if ctx.number is not None else (seed,)))
        return _dropout(x, dropped, seed)

    @staticmethod
    @once
    def backward(ctx, dy):
        seed = ctx.number if ctx.number is not None else ctx.saved_tensors[0]
        return _dropout(dy, ctx.dropped, seed), None, None


def dropout(
    x: torch.Tensor, p: float, seed: int | torch.Tensor, training: bool = True
) -> torch.Tensor:
    """Zeroes each entry with probability p and divides the others by the share that is kept.

    x: any shape; float32, float16 or bfloat16. p: from 0 to 1, taken to the nearest multiple of
    2**-16; below 1 something is kept. seed: of 64 bits, a number or a tensor of one int64; the same
    seed drops the same entries. training: without it, as where p is 0, x itself is returned.
    TypeError for another dtype, a p that is no number, or a seed that is no integer, as a bool is
    none; ValueError for another p, or a seed elsewhere. Returns the shape and dtype of x.
    Differentiable once: only the seed is kept for the backward pass.
    """
    checks.check_tensor("x", x)
    p = checks.check_number("p", p, 0, 1)
    check_flag("training", training)
    _check(seed)
    dropped = _levels(p)
    if not (training and dropped):
        return x
    return _Dropout.apply(x, dropped, seed) if needs_grad(x) else _dropout(x, dropped, seed)


_randint_from_start = cached_launch(_randint_from_start)
_randint = cached_launch(_randint)
_dropout = cached_launch(_dropout)

"""Random integers, and dropout, whose mask is not stored.

randint: out[i] = low + floor(w[offset + i] (high - low) / 2**bits), w the words of a stream.

dropout: out[i] = x[i] / q if h[i] >= t, else zero; dx = dy / q if h[i] >= t, h drawn again. The
numbers h have 16 bits, so t / 2**16 is p rounded to them, and q = 1 - t / 2**16 the share that is
kept. With 1 - p in its place the mean would be off by up to 2**-17 / (1 - p) of itself.

The stream of a seed is that of Philox (`kernels/random_details/philox.py`). The index of an element
alone gives its word, or half a word, so no result depends on the tiles.

Range: the high part of the product of a word and the range is the value (Lemire, "Fast random
integer generation in an interval", 2019). Each value belongs to as many of the 2**bits words as any
other, or one more. So its probability is off by less than (high - low) / 2**bits of itself. Ranges
up to 2**24 take a word of 32 bits, an error below 2**-8. Others take two words, 64 bits. If they
fit 32 bits, their error is below 2**-32.

There are no FLOPs, and both would wait for the generator if they wasted words. So a call serves
four elements of randint, or two, and eight of dropout. The two halves of a product come from one
multiplication.
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


def randint(
    low: int,
    high: int,
    size: int | tuple[int, ...],
    seed: int | torch.Tensor,
    offset: int = 0,
    dtype: torch.dtype = torch.int64,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return uniform integers from [low, high): elements of a seed's sequence.

    The sequence depends on seed, low, high and the range of the dtype only.

    Args:
        low: least value.
        high: bound above the greatest value.
        size: the shape, an integer or a tuple of them.
        seed: an integer of 64 bits, or a tensor of one int64, which is read on its device.
        offset: index in the sequence of the first element, 0 or more.
        dtype: int32 or int64.
        device: that of the result, if the seed is an integer.

    Returns:
        A new tensor of this size and dtype. It has no gradient.

    Raises:
        TypeError: low, high, size, seed, offset or dtype has another kind; a bool is no integer.
        ValueError: the range is empty or beyond the dtype, or another value is out of range.

    Source:
        Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); Lemire, "Fast random
        integer generation in an interval" (2019).

    Example:
        >>> seed = torch.tensor([7], device="cuda")
        >>> randint(0, 10, (4, 3), seed).shape
        torch.Size([4, 3])
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


def _randint_from_start(
    seed: torch.Tensor, low: int, high: int, size: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return `randint` for a seed on its device and no offset: this call can have a plan."""
    _check_randint(low, high, seed, dtype)
    out = torch.empty(size, dtype=dtype, device=seed.device)
    _randint(out, seed, 0, 0, low, high)
    return out


def _shape(size: object) -> tuple[int, ...]:
    """Return a size as a shape; raise TypeError or ValueError if it is none."""
    if isinstance(size, int):
        return (check_integer("size", size, 0),)
    if not isinstance(size, (tuple, list)):
        raise TypeError(f"size: {shown(size)}, expected an integer or a tuple of them")
    return tuple(check_integer("size", each, 0) for each in size)


def _check_randint(low: int, high: int, seed: int | torch.Tensor, dtype: torch.dtype) -> None:
    """Raise an error for a dtype, bounds that it cannot hold, or a seed."""
    if not (isinstance(dtype, torch.dtype) and dtype in BOUNDS):
        raise TypeError(f"dtype: {shown(dtype)}, expected int32 or int64")
    least, most = BOUNDS[dtype]
    if not least <= low < high <= most:
        raise ValueError(f"low, high: {low}, {high}, expected {least} <= low < high <= {most}")
    _check(seed)


def _check(seed: int | torch.Tensor) -> None:
    """Raise TypeError or ValueError for a wrong seed.

    PyTorch's dropout has `training` in its place, and a bool is refused.
    """
    if not isinstance(seed, torch.Tensor):
        check_integer("seed", seed, -(2**63), 2**63 - 1)
    elif seed.dtype != torch.int64:
        raise TypeError(f"seed: {seed.dtype}, expected one int64")
    elif seed.numel() != 1:
        raise ValueError(f"seed: shape {tuple(seed.shape)}, expected one int64")


def dropout(
    x: torch.Tensor, p: float, seed: int | torch.Tensor, training: bool = True
) -> torch.Tensor:
    """Return x with each entry zeroed with probability p, and the others divided by 1 - p.

    Only the seed is saved for the backward pass.

    Args:
        x: any shape, float32, float16 or bfloat16.
        p: from 0 to 1, rounded to a multiple of 2**-16. Below 1 some entries are kept.
        seed: an integer of 64 bits, or a tensor of one int64 on the device of x. The same seed
            drops the same entries.
        training: if False, x itself is returned, as for p = 0.

    Returns:
        A tensor with the shape and dtype of x. It is differentiable once, in x.

    Raises:
        TypeError: an argument has another kind or dtype; a bool is no integer.
        ValueError: p or the seed is out of range, or the seed is on another device.

    Source:
        Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting"
        (2014).

    Example:
        >>> x = torch.randn(4, 100, device="cuda")
        >>> dropout(x, 0.5, seed=7).shape
        torch.Size([4, 100])
    """
    checks.check_tensor("x", x)
    p = checks.check_number("p", p, 0, 1)
    check_flag("training", training)
    _check(seed)
    dropped = _levels(p)
    if not (training and dropped):
        return x
    return _Dropout.apply(x, dropped, seed) if needs_grad(x) else _dropout(x, dropped, seed)


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


def _levels(p):
    """How many of the LEVELS numbers drop an entry; some keep it unless p is one."""
    return LEVELS if p == 1 else min(round(p * LEVELS), LEVELS - 1)


def _scale(dropped):
    return LEVELS / (LEVELS - dropped) if dropped < LEVELS else 0.0


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


def _randint_config(out: torch.Tensor, span: int) -> Config:
    words = 1 if span <= NARROW else 2
    return RANDINT_TILES.pick(out.device, itemsize=out.element_size(), words=words)


@triton.jit(do_not_specialize=["seed", "first", "skip", "low", "high"])
def _randint_kernel(
    out_ptr, seed, first, skip, low, high, N,
    UNIT: tl.constexpr, WORDS: tl.constexpr, LONG: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out[i] = low + floor(w[s + i] (high - low) / 2**bits), from element s of the stream on.

    Grid: programs of BLOCK_N elements of the stream, from block `first` on; s lies skip * UNIT
    elements into the first. seed, first, low, high: integers or pointers to int64. Writes out [N].
    UNIT: 1 or 16. WORDS: words of 32 bits an element, 1 or 2. LONG: high - low >= 2**32.
    """
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


@triton.jit(do_not_specialize=["seed", "dropped"])
def _dropout_kernel(x_ptr, out_ptr, seed, dropped, scale, N, BLOCK_N: tl.constexpr):
    """out[i] = scale * x[i] if h[i] >= dropped, else 0; h the 16-bit numbers of the seed.

    Grid: cdiv(N, BLOCK_N) programs of BLOCK_N elements. seed: an integer or a pointer to int64.
    Reads x [N], writes out [N]. N is None if all blocks are full. BLOCK_N: a multiple of 8.
    """
    offs = block_offsets(BLOCK_N)
    if N is None or block_is_full(N, BLOCK_N):
        _dropout_block(x_ptr, out_ptr, offs, None, seed, dropped, scale, BLOCK_N)
    else:
        _dropout_block(x_ptr, out_ptr, offs, offs < N, seed, dropped, scale, BLOCK_N)


@triton.jit
def _dropout_block(x_ptr, out_ptr, offs, mask, seed, dropped, scale, BLOCK_N: tl.constexpr):
    """Store the dropout of the elements at offs [BLOCK_N]."""
    # First, so that it is on its way while the generator computes.
    x = tl.load(x_ptr + offs, mask=mask).to(tl.float32)
    a, b, c, d = philox(seed, tl.program_id(0), BLOCK_N // 8)
    words = interleave(a, b, c, d, BLOCK_N // 2)
    # At the top of a word, what is below 16 bits decides nothing. Zero less one is the greatest.
    bound = (tl.cast(dropped, tl.uint32) << 16) - 1
    keep = tl.join(words << 16, words).reshape(BLOCK_N) > bound
    # A traced graph hands floats over as float64.
    store_once(out_ptr + offs, tl.where(keep, x * tl.cast(scale, tl.float32), 0.0), mask)


CONFIGS = tuple(
    {"BLOCK_N": block, "num_warps": warps}
    for block in (512, 1024, 2048, 4096, 8192)
    for warps in (2, 4, 8)
    if 2 <= block // (32 * warps) <= 32
)
DROPOUT_CONFIGS = tuple(
    each for each in CONFIGS if 8 <= each["BLOCK_N"] // (32 * each["num_warps"]) <= 32
)


# The tuner's choices on an H200.
def _choose_randint(itemsize, words):
    return {"BLOCK_N": 512 if itemsize > 4 * words else 1024, "num_warps": itemsize // 2}


def _suits_randint(candidate, itemsize, words):
    # One to four accesses of 16 bytes a thread, and a whole call at least.
    each = candidate["BLOCK_N"] // (32 * candidate["num_warps"])
    return 16 <= each * itemsize <= 64 and each * words >= 4


def _choose_dropout(itemsize):
    # A call of the generator serves eight elements, 16 bytes of 16-bit ones.
    return {"BLOCK_N": 2048 // itemsize, "num_warps": 8 // itemsize}


RANDINT_TILES = Configs(_randint_kernel, CONFIGS, _choose_randint, _suits_randint)
DROPOUT_TILES = Configs(_dropout_kernel, DROPOUT_CONFIGS, _choose_dropout)

_randint_from_start = cached_launch(_randint_from_start)
_randint = cached_launch(_randint)
_dropout = cached_launch(_dropout)

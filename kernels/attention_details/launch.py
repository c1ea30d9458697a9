"""The host's side that the launchers of attention share: views, allocations, kernel arguments."""

from collections.abc import Sequence

import torch

from .._runtime.checks import (
    MOST_ITEMS,
    check_floating,
    check_integer,
    check_number,
    check_same_device,
    check_same_dtype,
    check_that,
    shown,
)
from .._runtime.configs import Config
from .._runtime.device import float32_dot
from .._runtime.layout import as_read

# Numbers of 16 bits decide what dropout keeps.
LEVELS = 2**16

LEAST_D, MOST_D, STEP_D = 16, 256, 8
# Scales and softcaps are normal numbers of float32 above zero: a negative scale would turn the
# maximum.
SCALES = 2.0**-126, 2.0**127


def check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """TypeError or ValueError where these are not [B, H, Sq, D] and twice [B, K, Sk, D]."""
    check_that(q.dim() == 4, f"q: {q.dim()} dimensions, expected 4: [B, H, S, D]")
    b, h, sq, d = q.shape
    check_width(q)
    check_that(k.dim() == 4, f"k: {k.dim()} dimensions, expected 4: [B, H, S, D]")
    heads, sk = k.shape[1], k.shape[2]
    fits = k.shape[0] == b and k.shape[3] == d
    check_that(fits, f"k: shape {tuple(k.shape)}, expected [{b}, K, Sk, {d}] as q has")
    check_keys(q, k, v, h, heads, max(sq, sk))


def check_width(q: torch.Tensor) -> None:
    """TypeError or ValueError where the kernels know no such heads, or not the dtype."""
    d = q.shape[-1]
    fits = LEAST_D <= d <= MOST_D and d % STEP_D == 0
    wide = f"expected a multiple of {STEP_D} from {LEAST_D} to {MOST_D}"
    check_that(fits, f"q: head dimension {d}, {wide}")
    check_floating(q=q)


def check_keys(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, h: int, heads: int, longest: int
) -> None:
    """TypeError or ValueError where v is not like k, or k not for q.

    h, heads: those of q and of k. longest: the larger number of positions.
    """
    groups = h % heads == 0 if heads else h == 0
    check_that(groups, f"k: {heads} heads, expected a number that divides the {h} of q")
    shape = tuple(k.shape)
    check_that(v.shape == k.shape, f"v: shape {tuple(v.shape)}, expected {shape} as k has")
    check_same_dtype(q=q, k=k, v=v)
    check_same_device(q=q, k=k, v=v)
    check_that(longest <= MOST_ITEMS, f"q, k: {longest} positions, expected {MOST_ITEMS} or fewer")


def cap_number(softcap: float | None) -> float:
    """Return the softcap as launchers take it: zero if there is none."""
    if softcap is None:
        return 0.0
    return check_number("softcap", softcap, *SCALES)


def window_sizes(
    window: int | tuple[int, int] | None, causal: bool
) -> tuple[int | None, int | None]:
    """How many keys before and after its own a row sees; None where there is no bound."""
    if window is None or isinstance(window, int):
        window = -1 if window is None else check_integer("window", window)
        window = (window, window)
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise TypeError(f"window: {shown(window)}, expected an integer or a pair of them")
    left, right = (check_integer("window", each, -1, MOST_ITEMS) for each in window)
    return None if left < 0 else left, 0 if causal else None if right < 0 else right


def in_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it if the entries of a row lie apart or are to be read with another sign."""
    x = as_read(x)
    return x if x.stride(-1) == 1 else x.contiguous()


def like(x: torch.Tensor) -> torch.Tensor:
    """A new tensor of x's shape with its order of axes in memory, the last one contiguous."""
    made = torch.empty_like(x)
    # Rows that overlap, as those of a sliding view do, may come out with their entries apart.
    return made if made.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def strides_of(axes: str = "bhs", **tensors: torch.Tensor) -> dict[str, int]:
    """The strides of axes but the last, by parameter: `stride_qb` of a tensor named q.

    axes: a letter each for batch, head and position, in their order in the tensors.
    """
    return {
        f"stride_{name}{letter}": tensor.stride(axis)
        for name, tensor in tensors.items()
        for axis, letter in enumerate(axes)
    }


def strides_of_mask(mask: torch.Tensor | None, shape: tuple[int, ...]) -> dict[str, int]:
    """The strides of a mask that is broadcast to [B, H, Sq, Sk]; zeros if there is none."""
    strides = (0, 0, 0, 0) if mask is None else mask.expand(shape).stride()
    return dict(zip(("stride_mb", "stride_mh", "stride_mm", "stride_mn"), strides, strict=True))


def options_of(
    q: torch.Tensor,
    k: torch.Tensor,
    left: int | None,
    right: int | None,
    dropped: int,
    inverse: float,
) -> dict[str, object]:
    """The arguments that follow from shapes, window and dropout, as all kernels take them.

    left, right: sizes of the window, None if unbounded. dropped, inverse: as `attention_fwd` takes
    them.
    """
    (h, sq), (heads, sk) = q.shape[1:3], k.shape[1:3]
    return {
        "H": h,
        "GROUP": h // max(1, heads),
        "SQ": sq,
        "SK": sk,
        "left": 0 if left is None else sk - sq - left,
        "right": 0 if right is None else sk - sq + right,
        "dropped": dropped,
        "inverse": inverse,
        "LEFT": left is not None,
        "RIGHT": right is not None,
        "DROPOUT": dropped > 0,
        **widths_of(q),
    }


def widths_of(q: torch.Tensor) -> dict[str, object]:
    """The arguments that follow from dtype and head dimension."""
    return {
        # Only float32 has anything to split.
        "PRECISION": float32_dot() if q.dtype == torch.float32 else "ieee",
        "D": q.shape[-1],
        "BLOCK_D": padded(q.shape[-1]),
    }


def padded(d: int) -> int:
    """The power of two that a head takes in a tile."""
    return 1 << (d - 1).bit_length()


def tile(m: int, n: int, warps: int, stages: int) -> Config:
    """A configuration of a kernel: rows and keys of a tile."""
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}


# For little shared memory, and for float32. All kernels of float32 take the same tensor core
# instructions, so that they round scores alike.
SMALL = (tile(32, 32, 4, 2), tile(32, 32, 4, 1), tile(16, 16, 4, 1))


def in_tensor_memory(ranked: Sequence[Config], d: int, tensor_memory: bool) -> Sequence[Config]:
    """Leave out tiles whose accumulators of dk and dv do not fit in tensor memory.

    With 64 keys or more, heads above 128 take all of its 512 columns. Triton 3.6 then compiles a
    program that does nothing. With 32 keys it takes no tensor memory.
    """
    if not tensor_memory or d <= 128:
        return ranked
    return [config for config in ranked if config["BLOCK_N"] < 64]


def first_to_fit(
    ranked: Sequence[Config], sides: tuple[str, str], owned: int, d: int, itemsize: int, shared: int
) -> Config:
    """The first configuration whose tiles fit in shared memory, or the last.

    sides: the sizes of the side that a program owns, `owned` tiles of which stay, and of the side
    that it walks, two tiles of which each stage has.
    """
    own, walked = sides
    if itemsize == 4 and d > 128:
        # With more rows accumulators fill the registers many times over.
        return SMALL[-1]
    # The parts of a float32 product are laid out anew, in half as much again.
    itemsize = 6 if itemsize == 4 else itemsize
    for config in ranked:
        rows = owned * config[own] + 2 * config["num_stages"] * config[walked]
        if rows * padded(d) * itemsize <= shared:
            return config
    return ranked[-1]

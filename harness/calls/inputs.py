"""The tensors of a cell: one source for verification, measurement and ahead-of-time builds.

A cell's values depend on the seed, the op, the case, the dtype and the name of the tensor, never on
the order of the calls. Up to CPU_ELEMENTS elements they do not depend on the device either.
"""

import hashlib
import math
from collections.abc import Sequence

import torch

from ops._spec import OFFSETS, Case, Op
from ops._spec import Tensor as Spec

# Larger tensors are drawn on the device itself: the CPU would take seconds for each.
CPU_ELEMENTS = 2**20
# Elements between one row's end and the next row's start: odd, so that no row but the first is
# aligned to more than one element.
PADDING = 5
LARGE = 100.0
SPIKE, BESIDE_SPIKE = 1e3, 1e-2
SHARE_OF_INF = SHARE_OF_SENTINEL = 0.25
# Kinds of values that a tensor declared tame does not take.
EXTREME = ("inf", "infinities", "denormal")
# The tables of a cell begin below this position of a token.
MOST_START = 2**16


def make(
    op: Op, case: Case, dtype: str, seed: int, device: str, only: str = ""
) -> dict[str, torch.Tensor | None]:
    """The tensor arguments of `op` by name, on `device`; None where the case leaves one out.

    Floating tensors are normal with the standard deviation that the op declares, or of the kind
    that `case.values` names, or a table that the op declares. Integers are uniform below the size
    that the op names, else the smallest of the case, so that they index any of its dimensions.
    Memory of a layout that lies outside the tensor is NaN. On the device "meta" there are shapes
    only. only: the name of a single tensor to make.
    """
    cell = f"{seed}/{op.name}/{case.name}/{dtype}"
    return {
        name: _tensor(spec, case, dtype, cell, name, device) if spec.is_in(case) else None
        for name, spec in op.inputs.items()
        if only in ("", name)
    }


def gradients(
    outputs: Sequence[torch.Tensor], seed: int, layout: str = ""
) -> tuple[torch.Tensor, ...]:
    """Normal gradients for outputs: their shapes, dtypes and device, contiguous.

    In the layout "expanded" a gradient is one value in all places, as that of a sum is.
    """
    found = []
    for index, output in enumerate(outputs):
        key = f"{seed}/{index}/{tuple(output.shape)}/{output.dtype}"
        shape = () if layout == "expanded" else output.shape
        drawn = _normal(shape, key, output.device).to(output.dtype).contiguous()
        found.append(drawn.expand(output.shape))
    return tuple(found)


def _tensor(spec: Spec, case: Case, dtype: str, cell: str, name: str, device: str) -> torch.Tensor:
    key = f"{cell}/{name}"
    shape = spec.sizes(case.sizes)
    if swapped := spec.transposed and spec.transposed in case.flags:
        shape[-2:] = reversed(shape[-2:])
    element = getattr(torch, spec.dtype_in(case, dtype))
    device = torch.device(device)
    if spec.table and device.type != "meta":
        values = spec.table(case, _start(cell)).to(device, element)
        if list(values.shape) != shape:
            raise ValueError(f"{name}: its table is {tuple(values.shape)}, expected {shape}")
    elif element.is_floating_point:
        kind = "" if spec.tame and case.values in EXTREME else case.values
        values = _floating(shape, kind, spec.scale_of(case), key, device, element)
    else:
        least = min(case.sizes.values(), default=1)
        bound = 2 if element == torch.bool else case[spec.below] if spec.below else least
        values = (_uniform(shape, key, device) * bound).to(element)
        if spec.sentinel and spec.sentinel[0] in case.flags:
            chance = _uniform(shape, f"{key}/sentinel", device)
            values = values.masked_fill(chance < SHARE_OF_SENTINEL, spec.sentinel[1])
    if finish := getattr(spec, "finish", None):
        values = finish(case, values)
    if spec.ascending:
        values = values.sort(-1).values
    values = _laid_out(values, case.layout)
    return values.mT if swapped else values


def _start(cell: str) -> int:
    """Return the position at which the tables of a cell begin."""
    return int(_uniform((), f"{cell}/start", torch.device("cpu")).item() * MOST_START)


def _floating(
    shape: Sequence[int],
    kind: str,
    scale: float,
    key: str,
    device: torch.device,
    element: torch.dtype,
) -> torch.Tensor:
    x = _normal(shape, key, device)
    if scale != 1:
        x = x * scale
    if kind == "large":
        x = x * LARGE
    elif kind == "denormal":
        x = x * (torch.finfo(element).tiny / 4)
    elif kind == "equal":
        one = _normal((*shape[:-1], 1)[: len(shape)], key, device)
        x = (one * scale).expand(shape).contiguous()
    elif kind and shape and x.numel():
        position = torch.arange(shape[-1], device=device)
        row = _uniform((*shape[:-1], 1), f"{key}/row", device)
        chosen = (row * shape[-1]).long() == position
        chance = _uniform(shape, f"{key}/inf", device)
        if kind == "spike":
            x = torch.where(chosen, SPIKE, x * BESIDE_SPIKE)
        elif kind == "inf":
            x = x.masked_fill((chance < SHARE_OF_INF) & ~chosen, -math.inf)
        else:
            # Half of the rows stay finite: they show whether the rows are kept apart.
            hit = chosen & (row < 0.5) if len(shape) > 1 else chance < SHARE_OF_INF
            x = torch.where(hit, torch.where(x < 0, -math.inf, math.inf), x)
    return x.to(element)


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in storage of their own, laid out as the case asks."""
    outside = float("nan") if values.is_floating_point() else 0
    if layout == "padded" and values.dim() >= 2:
        storage = values.new_full((*values.shape[:-1], values.shape[-1] + PADDING), outside)
        view = storage[..., : values.shape[-1]]
    elif layout == "strided" and values.dim():
        storage = values.new_full((*values.shape[:-1], 2 * values.shape[-1]), outside)
        view = storage[..., ::2]
    elif layout == "transposed" and values.dim() >= 2:
        return values.mT.contiguous().mT
    elif layout == "expanded" and values.dim() >= 2 and values.shape[0]:
        return values[:1].clone().expand(values.shape)
    elif layout in OFFSETS:
        first = OFFSETS[layout]
        view = values.new_full((values.numel() + first,), outside)[first:].view(values.shape)
    else:
        return values
    return view.copy_(values)


def _normal(shape: Sequence[int], key: str, device: torch.device) -> torch.Tensor:
    return _drawn(torch.randn, shape, key, device)


def _uniform(shape: Sequence[int], key: str, device: torch.device) -> torch.Tensor:
    return _drawn(torch.rand, shape, key, device)


def _drawn(draw, shape: Sequence[int], key: str, device: torch.device) -> torch.Tensor:
    if device.type == "meta":
        return torch.empty(shape, device=device)
    source = torch.device("cpu") if torch.Size(shape).numel() <= CPU_ELEMENTS else device
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    generator = torch.Generator(source).manual_seed(int.from_bytes(digest, "little") >> 1)
    return draw(tuple(shape), generator=generator, device=source).to(device)

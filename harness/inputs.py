"""The tensors of a cell: one source for verification, measurement and ahead-of-time builds.

A cell's values depend on the seed, the op, the case, the dtype and the name of the tensor, never on
the order of the calls; up to CPU_ELEMENTS elements they do not depend on the device either.
"""

import hashlib
from collections.abc import Sequence

import torch

from kernels._contract import Case, Op
from kernels._contract import Tensor as Spec

# Larger tensors are drawn on the device itself: the CPU would take seconds for each.
CPU_ELEMENTS = 2**20
# Elements between one row's end and the next row's start: odd, so that no row but the first is
# aligned to more than one element.
PADDING = 5
LARGE = 100.0
SPIKE, BESIDE_SPIKE = 1e3, 1e-2
SHARE_OF_INF = 0.25


def make(op: Op, case: Case, dtype: str, seed: int, device: str) -> dict[str, torch.Tensor | None]:
    """The tensor arguments of `op` by name, on `device`; None where the case leaves one out.

    Floating tensors are normal, or of the kind that `case.values` names; integers are uniform
    below the smallest size of the case, so that they index any of its dimensions. Memory of a
    layout that lies outside the tensor is NaN. On the device "meta" there are shapes only.
    """
    return {
        name: _tensor(spec, case, dtype, f"{seed}/{op.name}/{case.name}/{dtype}/{name}", device)
        if not spec.when or spec.when in case.flags
        else None
        for name, spec in op.inputs.items()
    }


def gradients(outputs: Sequence[torch.Tensor], seed: int) -> tuple[torch.Tensor, ...]:
    """Normal gradients for outputs: their shapes, dtypes and device, contiguous."""
    return tuple(
        _normal(output.shape, f"{seed}/{index}/{tuple(output.shape)}/{output.dtype}", output.device)
        .to(output.dtype)
        .contiguous()
        for index, output in enumerate(outputs)
    )


def _tensor(spec: Spec, case: Case, dtype: str, key: str, device: str) -> torch.Tensor:
    shape = [case[letter] for letter in spec.shape.split()]
    if swapped := spec.transposed and spec.transposed in case.flags:
        shape[-2:] = reversed(shape[-2:])
    element = getattr(torch, spec.dtype or dtype)
    device = torch.device(device)
    if element.is_floating_point:
        values = _floating(shape, case.values, key, device).to(element)
    else:
        bound = 2 if element == torch.bool else min(case.sizes.values(), default=1)
        values = (_uniform(shape, key, device) * bound).to(element)
    values = _laid_out(values, case.layout)
    return values.mT if swapped else values


def _floating(shape: Sequence[int], kind: str, key: str, device: torch.device) -> torch.Tensor:
    if kind == "equal":
        return _normal((), key, device).expand(shape).contiguous()
    x = _normal(shape, key, device)
    if kind == "large":
        return x * LARGE
    if not kind or not shape or not x.numel():
        return x
    position = torch.arange(shape[-1], device=device)
    chosen = (_uniform((*shape[:-1], 1), f"{key}/row", device) * shape[-1]).long() == position
    if kind == "spike":
        return torch.where(chosen, SPIKE, x * BESIDE_SPIKE)
    hit = _uniform(shape, f"{key}/inf", device) < SHARE_OF_INF
    return x.masked_fill(hit & ~chosen, -float("inf"))


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in storage of their own, laid out as the case asks."""
    outside = float("nan") if values.is_floating_point() else 0
    if layout == "padded" and values.dim() >= 2:
        storage = values.new_full((*values.shape[:-1], values.shape[-1] + PADDING), outside)
        view = storage[..., : values.shape[-1]]
    elif layout == "offset":
        view = values.new_full((values.numel() + 1,), outside)[1:].view(values.shape)
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

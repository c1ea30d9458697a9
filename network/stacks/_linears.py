"""Several products with one input as one, where the weights lie one after the other in memory.

A product of few rows is bound by its weights, and a small one by its launch. A decoded
token of `llama-1b` multiplies with 8 MB for its queries, and with 2 MB each for keys and values.
"""

from collections.abc import Callable, Sequence

import torch


def with_product(linear: Callable) -> Callable:
    """Return the part `linears` by a part `linear`; it returns views of one result if it can."""

    def linears(
        h: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        whole = None if any(bias is not None for bias in biases) else one_matrix(weights)
        if whole is None:
            return tuple(linear(h, *pair) for pair in zip(weights, biases, strict=True))
        return linear(h, whole).split([len(weight) for weight in weights], dim=-1)

    return linears


def one_matrix(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return weights [N_i, C] as one [sum of N_i, C] without a copy; None if they lie apart.

    A compiler that traces the call cannot ask where they lie, so there it is None too.
    """
    if torch.compiler.is_compiling():
        return None
    first, place = weights[0], weights[0].storage_offset()
    for weight in weights:
        if (
            weight.untyped_storage()._cdata != first.untyped_storage()._cdata
            or weight.storage_offset() != place
            or not weight.is_contiguous()
            or (weight.shape[1], weight.dtype) != (first.shape[1], first.dtype)
        ):
            return None
        place += weight.numel()
    rows = sum(map(len, weights))
    return first.detach().as_strided((rows, first.shape[1]), first.stride(), first.storage_offset())

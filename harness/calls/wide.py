"""Tensors that a library has in float32, whatever the dtype of the others.

A user of such a library keeps these parameters in float32 and takes its results so. A cast in each
timed call would be a cost that this user does not pay. So the timed call gets the parameters as
they are kept, and its results and gradients stay as they come. Verification judges the same
function with all tensors in one dtype: the casts are part of what is judged, and of no time.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

OUT = "out"


def given(
    tensors: Mapping[str, torch.Tensor | None], names: Sequence[str]
) -> dict[str, torch.Tensor | None]:
    """The tensors as a user of the library holds them: those of these names in float32."""
    return {name: _float32(t) if name in names else t for name, t in tensors.items()}


def judged(function: Callable, names: Sequence[str]) -> Callable:
    """The function for tensors of one dtype, with results and gradients of that dtype.

    The function is called by names, and so is what this returns. Without names to widen it is the
    function itself.
    """
    if not names:
        return function

    def narrow(**arguments: object) -> object:
        found = [a.dtype for a in arguments.values() if _floating(a)]
        results = function(**given(arguments, names))
        if OUT not in names:
            return results
        if isinstance(results, tuple):
            return tuple(_to(result, found[0]) for result in results)
        return _to(results, found[0])

    return narrow


def _float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.float() if _floating(tensor) else tensor


def _to(result: object, dtype: torch.dtype) -> object:
    return result.to(dtype) if _floating(result) else result


def _floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()

"""Calls a function with inputs that its library has prepared once, as its users do.

The prepared object of a tensor is kept as long as the tensor lives. It is made anew if the tensor
was written since, which its version tells, or if another argument has changed its kind. The time of
the first call with a tensor holds the making, and no later time does.
"""

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Mapping


def prepared(function: Callable, makers: Mapping[str, Callable]) -> Callable:
    """Return the function as it is called with plain tensors.

    makers: by input, (arguments of the call) -> what takes its place. An argument that is no tensor
    is handed on as it is, and a traced graph gets plain tensors.
    """
    if not makers:
        return function
    # By name: parents import this module, and none imports torch.
    is_compiling = importlib.import_module("torch.compiler").is_dynamo_compiling
    names = tuple(inspect.signature(function).parameters)
    kept: dict[tuple[str, int], tuple] = {}

    @functools.wraps(function)
    def call(*given, **arguments):
        arguments |= dict(zip(names, given, strict=False))
        if is_compiling():
            return function(**arguments)
        made = {name: _made(kept, name, maker, arguments) for name, maker in makers.items()}
        return function(**arguments | made)

    return call


def _made(kept: dict, name: str, maker: Callable, arguments: dict) -> object:
    tensor = arguments.get(name)
    if not hasattr(tensor, "_version"):
        return tensor
    place, state = (name, id(tensor)), (tensor._version, _kinds(arguments))
    reference, known, made = kept.get(place, (None, None, None))
    if reference is None or reference() is not tensor or known != state:
        made = maker(**arguments)
        kept[place] = weakref.ref(tensor, lambda _: kept.pop(place, None)), state, made
    return made


def _kinds(arguments: dict) -> list[tuple]:
    """All that a maker may know besides the entries of its tensor."""
    return [
        (name, value.shape, value.dtype, value.device) if hasattr(value, "shape") else (name, value)
        for name, value in sorted(arguments.items())
    ]

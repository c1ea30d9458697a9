"""Norms as a part: they return the stream as well, which is x where nothing is added."""

import functools
from collections.abc import Callable


def with_stream(norm: Callable) -> Callable:
    """Return a part from norm(x, weight, [bias,] eps, residual), which returns y or (y, total)."""

    @functools.wraps(norm)
    def part(x, *weights_and_eps_and_residual):
        *given, residual = weights_and_eps_and_residual
        out = norm(x, *given, residual)
        return (out, x) if residual is None else out

    return part

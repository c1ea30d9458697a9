"""The check of arguments that layer norm and RMS norm share."""

from .._runtime.checks import floating, same, shaped


def check_norm(x, residual, **vectors):
    """TypeError or ValueError where the arguments of a norm do not belong together."""
    vectors = {name: tensor for name, tensor in vectors.items() if tensor is not None}
    floating(x=x, **vectors)
    if x.dim() == 0:
        raise ValueError("x: has no dimension to normalize over, expected one at least")
    n, device = x.shape[-1], x.device
    for name, tensor in vectors.items():
        if tensor.dim() != 1 or tensor.shape[0] != n:
            shaped(name, tensor, (n,))
        if tensor.device != device:
            raise ValueError(f"{name}: on {tensor.device}, expected {device} as x")
    if residual is not None:
        same(x=x, residual=residual)

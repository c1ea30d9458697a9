"""Arguments of both cross entropies, checked, and results in the shape that was asked for."""

import math

import torch

from .._runtime.checks import (
    check_flag,
    check_integer,
    check_number,
    check_one_of,
    check_tensors,
    shown,
)

REDUCTIONS = ("mean", "sum", "none")


def options_of(
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
) -> tuple[int, float, float, float, str]:
    """The options, numbers as int and float; TypeError or ValueError names a wrong one.

    The softcap of the result is 0 if there is none.
    """
    check_integer("ignore_index", ignore_index, -(2**63), 2**63 - 1)
    label_smoothing = check_number("label_smoothing", label_smoothing, 0, 1)
    z_loss = check_number("z_loss", z_loss)
    cap = 0.0 if softcap is None else check_number("softcap", softcap)
    if softcap is not None and not 0 < cap < math.inf:
        raise ValueError(f"softcap: {cap}, expected a positive number or None")
    check_one_of("reduction", reduction, REDUCTIONS)
    return ignore_index, label_smoothing, z_loss, cap, reduction


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on the device of x, None where it is not enabled."""
    kind = x.device.type
    if x.is_meta or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def dtype_of_loss(
    x: torch.Tensor, loss_dtype: torch.dtype | None, return_z_loss: bool
) -> torch.dtype:
    """Return the dtype of the loss of logits or factors x; check the two options of the result."""
    check_flag("return_z_loss", return_z_loss)
    if loss_dtype is None:
        return x.dtype if autocast_dtype(x) is None else torch.float32
    if not isinstance(loss_dtype, torch.dtype) or loss_dtype not in (x.dtype, torch.float32):
        raise TypeError(
            f"loss_dtype: {shown(loss_dtype)}, expected {x.dtype} as the logits have, or float32"
        )
    return loss_dtype


def as_rows(name: str, x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x of shape `[..., N]` as `[M, N]` and targets `[...]` as `[M]`.

    Raises ValueError if the shape of the targets is another one.
    """
    check_tensors(**{name: x, "targets": targets})
    rows = x.shape[:-1]
    if targets.shape != rows:
        raise ValueError(f"targets: shape {tuple(targets.shape)}, expected {tuple(rows)}")
    if x.dim() == 2:
        return x, targets
    return x.reshape(targets.numel(), x.shape[-1]), targets.reshape(-1)


def check_targets(targets: torch.Tensor, rows: int, classes: int, ignore_index: int) -> None:
    """Raise TypeError or ValueError for targets that do not fit `rows` rows of `classes` logits.

    The values of the targets are checked only on a CPU.
    """
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets: {targets.dtype}, expected int64 or int32")
    # The message is formatted on failure only: a traced graph cannot format a symbolic size.
    if targets.shape != (rows,):
        raise ValueError(f"targets: shape {tuple(targets.shape)}, expected ({rows},)")
    if classes == 0:
        raise ValueError("logits: 0 classes, expected at least one")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        valid = targets[targets != ignore_index]
        outside = valid[(valid < 0) | (valid >= classes)]
        if outside.numel():
            raise ValueError(f"targets: {outside[0].item()}, expected 0 to {classes - 1}")


def comparable(targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return targets of a dtype that holds ignore_index: a kernel would cut off its upper half."""
    if targets.dtype == torch.int32 and not -(2**31) <= ignore_index < 2**31:
        return targets.long()
    return targets


def counted(factors: torch.Tensor, targets: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """Return the factors of the gradients of rows, with one in the place of an ignored row.

    Its gradient is zero, and a factor that is not finite would make it NaN.
    """
    return factors.masked_fill(targets == ignore_index, 1)


def with_penalty(
    loss: torch.Tensor, penalty: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the loss, and the z-loss alone unless it is None.

    An autograd function may not return None beside it, because a traced graph cannot.
    """
    return loss if penalty is None else (loss, penalty)


def in_shape(
    result: torch.Tensor | tuple[torch.Tensor, torch.Tensor], shape: torch.Size
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return the result of `with_penalty`; losses of rows get the shape of their targets."""
    if isinstance(result, tuple):
        return tuple(in_shape(each, shape) for each in result)
    return result.view(shape) if result.dim() and result.shape != shape else result

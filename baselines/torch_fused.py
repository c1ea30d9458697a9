"""PyTorch's fused AdamW: a kernel for each dtype and many tensors (`fused=True`)."""

import functools

from baselines import _torch_formulas as formulas

LIBRARY = "torch"
IN_PLACE = ("adamw",)

adamw = functools.partial(formulas.adamw, fused=True)

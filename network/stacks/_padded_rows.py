"""Logits whose rows begin at multiples of 128 bytes, though a vocabulary has an odd size.

GPT-2 has 50257 words. A contiguous row of so many logits of 16 bits begins anywhere, and a Hopper
GPU copies no tile there. So the product would write a buffer with longer rows, and copy 1.6 GB out
of it for 16 x 1024 tokens. Here that buffer itself is the result.
"""

from collections.abc import Callable

import torch

from kernels.matmul import FEW_ROWS, product

ACCESS_BYTES, LINE_BYTES = 16, 128


def with_padded_rows(linear: Callable) -> Callable:
    """Return a part `linear` by another one; a result of poor rows is a view of longer ones.

    It takes over if no gradient is wanted, rows are many, and they have no multiple of 16 bytes.
    """

    def padded(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        n, itemsize = len(weight), weight.element_size()
        if n * itemsize % ACCESS_BYTES == 0 or torch.compiler.is_compiling():
            return linear(x, weight, bias)
        flat = x.flatten(0, -2)
        wants_grad = any(each is not None and each.requires_grad for each in (x, weight, bias))
        if len(flat) <= FEW_ROWS or (wants_grad and torch.is_grad_enabled()):
            return linear(x, weight, bias)
        line = LINE_BYTES // itemsize
        out = flat.new_empty(len(flat), -(-n // line) * line)[:, :n]
        return product(flat, weight.T, bias, out=out)[0].unflatten(0, x.shape[:-1])

    return padded

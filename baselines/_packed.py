"""Lengths of packed sequences on the host, and masks made of them, for libraries that want these.

A data loader knows the lengths before their boundaries go to the device, and a training step makes
a mask once for all layers. So both are made once for each pair of boundaries, and later calls find
them.
"""

import weakref
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

Made = TypeVar("Made")
# By the boundaries of rows: what was made, by its options and versions, with those of the keys.
_made = WeakTensorKeyDictionary()


def made_once(
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    options: Hashable,
    make: Callable[[], Made],
) -> Made:
    """Return what `make` returns for these boundaries and options, made at the first such call."""
    if cu_seqlens_q not in _made:
        _made[cu_seqlens_q] = {}
    found = _made[cu_seqlens_q]
    key = options, cu_seqlens_q._version, cu_seqlens_k._version, id(cu_seqlens_k)
    of, value = found.get(key, (lambda: None, None))
    if of() is not cu_seqlens_k:
        value = make()
        found[key] = weakref.ref(cu_seqlens_k), value
    return value


def lengths_of(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> tuple[list[int], list[int]]:
    """Return the number of rows and the number of keys of each sequence."""

    def make():
        return cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()

    return made_once(cu_seqlens_q, cu_seqlens_k, "lengths", make)

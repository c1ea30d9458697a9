"""Keeps copies of a call's inputs, to restore them after the call has written over them.

Some libraries compute in place, as a training step may allow: a gradient over the logits, a turned
query over the query. Their calls are verified and timed as they are, each on restored inputs.
"""

from collections.abc import Iterable

import torch

from harness.calls import guards


class InputSnapshot:
    """A copy of all bytes under some tensors; those that lie in one storage count once."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()):
        # All tensors without elements lie at the address 0, which is no memory.
        memories = {
            guards.start(tensor): guards.memory(tensor)
            for tensor in tensors
            if tensor.untyped_storage().nbytes()
        }
        self._pairs = {start: (memory, memory.clone()) for start, memory in memories.items()}

    @property
    def nbytes(self) -> int:
        """The bytes that the copies take."""
        return sum(copy.numel() for _, copy in self._pairs.values())

    @property
    def changed(self) -> bool:
        """Whether any byte has changed."""
        return any(not torch.equal(*pair) for pair in self._pairs.values())

    def drop_unchanged(self) -> None:
        """Drop the copies of memory that has not changed."""
        self._pairs = {start: pair for start, pair in self._pairs.items() if not torch.equal(*pair)}

    def restore(self) -> None:
        """Write the copies back."""
        for memory, copy in self._pairs.values():
            memory.copy_(copy)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Return whether a copy of the memory of a tensor exists."""
        return guards.start(tensor) in self._pairs

"""What calls were given, as it was before they wrote over it.

Some libraries compute in place, as a training step may allow: a gradient over the logits, a turned
query over the query. Their calls are judged and timed as they are, each of inputs put back.
"""

from collections.abc import Iterable

import torch

from harness.calls import guards


class InputSnapshot:
    """A copy of all bytes under some tensors; those that lie in one storage count once."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()):
        # Tensors without elements all lie at the address 0, which is nobody's memory.
        memories = {
            guards.start(tensor): guards.memory(tensor)
            for tensor in tensors
            if tensor.untyped_storage().nbytes()
        }
        self._pairs = {start: (memory, memory.clone()) for start, memory in memories.items()}

    @property
    def nbytes(self) -> int:
        """What the copies take."""
        return sum(copy.numel() for _, copy in self._pairs.values())

    @property
    def changed(self) -> bool:
        """Whether any byte is another than it was."""
        return any(not torch.equal(*pair) for pair in self._pairs.values())

    def drop_unchanged(self) -> None:
        """Drops the copies of what is still as it was."""
        self._pairs = {start: pair for start, pair in self._pairs.items() if not torch.equal(*pair)}

    def restore(self) -> None:
        for memory, copy in self._pairs.values():
            memory.copy_(copy)

    def covers(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory of which there is a copy."""
        return guards.start(tensor) in self._pairs

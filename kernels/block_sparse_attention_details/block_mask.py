"""A block mask: which blocks of scores are kept, as the lists that kernels walk.

A list holds the kept blocks of a row of blocks, or of a column of blocks, in ascending order. The
lists of all rows lie one behind the other, as in the CSR format, and offsets say where each begins.
Everything is computed on the device of the mask, and the host waits for nothing. So a mask that is
on a GPU has room in its lists for every block: its number of kept blocks is not known on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .._runtime.checks import MOST_ITEMS, check_integer, check_tensor, check_that

BLOCK_SIZES = (16, 32, 64, 128, 256)
DEFAULT_SIZE = 128


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of scores attention computes; made once, and reused by any number of calls.

    A row of scores is cut into blocks of `block_size` keys, a column into as many rows. The last
    block may be shorter. A block that is not kept costs no time.

    Make one with `from_dense`, `block_diagonal`, `local`, `strided` or `butterfly`. In the last
    four a block of rows i stands at p = i + N - M, M and N being the numbers of blocks of rows and
    of keys. So the last block of rows stands at the last block of keys.

    - block_size: rows and keys of a block.
    - shape: that of the dense mask, `[M, N]`, `[H or 1, M, N]` or `[B or 1, H or 1, M, N]`.
    - row_offsets: `[B or 1, H or 1, M + 1]`, int32. A list of row i begins at entry i of them, and
      ends at entry i + 1.
    - row_indices: int32: the lists of all rows, each the columns of its kept blocks.
    - row_order: `[B or 1, H or 1, M]`, int32: the rows, those with the longest lists first.
    - column_offsets, column_indices, column_order: the same of columns, whose lists hold rows.
    """

    block_size: int
    shape: tuple[int, ...]
    row_offsets: torch.Tensor
    row_indices: torch.Tensor
    row_order: torch.Tensor
    column_offsets: torch.Tensor
    column_indices: torch.Tensor
    column_order: torch.Tensor

    @property
    def device(self) -> torch.device:
        """The device on which the lists lie."""
        return self.row_offsets.device

    @classmethod
    def from_dense(cls, block_mask: torch.Tensor, *, block_size: int = DEFAULT_SIZE) -> "BlockMask":
        """Return the lists of a dense mask, made on its device without a wait of the host.

        Args:
            block_mask: bool, True for a block that is kept; `[M, N]` for all heads alike,
                `[H or 1, M, N]`, or `[B or 1, H or 1, M, N]`.
            block_size: rows and keys of a block: 16, 32, 64, 128 or 256.

        Returns:
            A new BlockMask. Later changes of the dense mask do not reach it.

        Raises:
            TypeError: the mask is no bool tensor, or the size no integer.
            ValueError: the mask has another number of dimensions, or the size is not offered.
        """
        check_mask(block_mask)
        return _listed(block_mask, check_block_size(block_size), None)

    @classmethod
    def block_diagonal(
        cls,
        rows: int,
        keys: int,
        size: int = 1,
        *,
        block_size: int = DEFAULT_SIZE,
        device: torch.device | str | None = None,
    ) -> "BlockMask":
        """Return squares along the diagonal: block p keeps j if p // size = j // size.

        Args:
            rows: positions of the queries, Sq.
            keys: positions of the keys, Sk.
            size: blocks along the side of a square.
            block_size: as `from_dense` takes it.
            device: where the lists lie; PyTorch's default device if None.

        Returns:
            A new BlockMask for all batches and heads.
        """
        check_integer("size", size, 1)
        return _built(lambda p, j: p // size == j // size, rows, keys, block_size, device)

    @classmethod
    def local(
        cls,
        rows: int,
        keys: int,
        window: int,
        *,
        block_size: int = DEFAULT_SIZE,
        device: torch.device | str | None = None,
    ) -> "BlockMask":
        """Return a band: block p keeps j if |p - j| <= window.

        Args:
            rows: positions of the queries, Sq.
            keys: positions of the keys, Sk.
            window: blocks on either side.
            block_size: as `from_dense` takes it.
            device: where the lists lie; PyTorch's default device if None.

        Returns:
            A new BlockMask for all batches and heads.
        """
        check_integer("window", window, 0)
        return _built(lambda p, j: (p - j).abs() <= window, rows, keys, block_size, device)

    @classmethod
    def strided(
        cls,
        rows: int,
        keys: int,
        stride: int,
        window: int = 0,
        *,
        block_size: int = DEFAULT_SIZE,
        device: torch.device | str | None = None,
    ) -> "BlockMask":
        """Return a band and every block at a multiple of the stride from the diagonal.

        Block p keeps j if |p - j| <= window, or if p - j is a multiple of the stride (Child et al.,
        "Generating long sequences with sparse transformers", 2019).

        Args:
            rows: positions of the queries, Sq.
            keys: positions of the keys, Sk.
            stride: blocks from one to the next.
            window: blocks on either side of the diagonal.
            block_size: as `from_dense` takes it.
            device: where the lists lie; PyTorch's default device if None.

        Returns:
            A new BlockMask for all batches and heads.
        """
        check_integer("stride", stride, 1)
        check_integer("window", window, 0)

        def keeps(p, j):
            return ((p - j).abs() <= window) | ((p - j) % stride == 0)

        return _built(keeps, rows, keys, block_size, device)

    @classmethod
    def butterfly(
        cls,
        rows: int,
        keys: int,
        *,
        block_size: int = DEFAULT_SIZE,
        device: torch.device | str | None = None,
    ) -> "BlockMask":
        """Return the flat butterfly: block p keeps p, and each j that differs from it in one bit.

        These are the blocks of all factors of a butterfly matrix, about log2(N) + 1 in a row (Dao
        et al., "Pixelated butterfly", 2022).

        Args:
            rows: positions of the queries, Sq.
            keys: positions of the keys, Sk.
            block_size: as `from_dense` takes it.
            device: where the lists lie; PyTorch's default device if None.

        Returns:
            A new BlockMask for all batches and heads.
        """

        def keeps(p, j):
            differing = p ^ j
            # Zero and the powers of two share no bit with the number before them.
            return (p >= 0) & ((differing & (differing - 1)) == 0)

        return _built(keeps, rows, keys, block_size, device)

    def to_dense(self) -> torch.Tensor:
        """Return the bool mask of the shape that was given."""
        batches, heads, m = self.row_order.shape
        n = self.column_order.shape[2]
        room = self.row_indices.numel()
        entries = torch.arange(room, device=self.device, dtype=torch.int32)
        ends = self.row_offsets[..., 1:].flatten()
        row = torch.searchsorted(ends, entries, right=True)
        # Entries behind the last list go to a place that is cut off.
        last = batches * heads * m * n
        place = torch.where(row < batches * heads * m, row * n + self.row_indices, last)
        dense = torch.zeros(last + 1, dtype=torch.bool, device=self.device)
        return dense.index_fill(0, place, True)[:last].view(self.shape)


def check_mask(block_mask: torch.Tensor) -> None:
    """TypeError or ValueError unless this is a dense block mask."""
    check_tensor("block_mask", block_mask)
    if block_mask.dtype != torch.bool:
        raise TypeError(f"block_mask: {block_mask.dtype}, expected torch.bool")
    dims = block_mask.dim()
    check_that(2 <= dims <= 4, f"block_mask: {dims} dimensions, expected 2 to 4: [B, H, M, N]")
    blocks = block_mask.numel()
    check_that(blocks <= MOST_ITEMS, f"block_mask: {blocks} blocks, expected {MOST_ITEMS} or fewer")


def check_block_size(block_size: object) -> int:
    """Return the size; TypeError or ValueError unless it is one of BLOCK_SIZES."""
    check_integer("block_size", block_size)
    # A traced graph cannot word a message about a number that is symbolic.
    if block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size: {block_size}, expected one of {BLOCK_SIZES}")
    return block_size


def _built(
    keeps: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    rows: int,
    keys: int,
    block_size: int,
    device: torch.device | str | None,
) -> BlockMask:
    """The mask whose block of rows p keeps the block of keys j if keeps(p, j).

    It is made on the host, where its kept blocks are counted, and its lists are moved.
    """
    check_block_size(block_size)
    m, n = (
        -(-check_integer(name, value, 0, MOST_ITEMS) // block_size)
        for name, value in (("rows", rows), ("keys", keys))
    )
    p = torch.arange(n - m, n, device="cpu")[:, None]
    mask = keeps(p, torch.arange(n, device="cpu")[None, :])
    made = _listed(mask, block_size, int(mask.sum()))
    device = torch.get_default_device() if device is None else device
    lists = {name: x.to(device) for name, x in vars(made).items() if isinstance(x, torch.Tensor)}
    return BlockMask(block_size, made.shape, **lists)


def _listed(mask: torch.Tensor, block_size: int, kept: int | None) -> BlockMask:
    """The lists of a dense mask. kept: how many blocks it keeps; None if the host cannot know."""
    full = mask.view((1,) * (4 - mask.dim()) + mask.shape)
    return BlockMask(block_size, tuple(mask.shape), *_lists(full, kept), *_lists(full.mT, kept))


def _lists(full: torch.Tensor, kept: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The offsets, indices and order of the rows of a mask [B, H, M, N]."""
    counts = full.sum(-1, dtype=torch.int32)
    ends = counts.flatten().cumsum(0, dtype=torch.int32).view(counts.shape)
    begins = ends - counts
    offsets = torch.cat([begins.narrow(-1, 0, min(1, begins.shape[-1])), ends], -1)
    # A stable sort puts the kept blocks first and leaves them in their order.
    places = torch.argsort(full.logical_not().flatten().to(torch.uint8), stable=True)
    if kept is not None:
        places = places.narrow(0, 0, kept)
    indices = (places % max(1, full.shape[-1])).to(torch.int32)
    order = torch.argsort(counts, dim=-1, descending=True, stable=True).to(torch.int32)
    return offsets, indices, order

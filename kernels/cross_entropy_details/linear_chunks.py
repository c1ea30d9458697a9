"""The chunks of rows whose logits lie in memory at a time, and the buffer for them.

The buffer has an eighth of the logits, or BUFFER_BYTES, or LEAST_ROWS rows, whichever is most: a
smaller buffer would save little and leave matmuls idle.
"""

import torch

from ..matmul_details.padded import LINE_BYTES

# dw is rounded, and read and written, once in each chunk.
MOST_CHUNKS = 8
BUFFER_BYTES, LEAST_ROWS = 2**28, 1024
# Rows of a chunk in steps of a matmul's tile.
ROW_STEP = 128


def rows_of_chunk(m: int, row_bytes: int) -> int:
    """Return the rows of each chunk but the last, for logits of row_bytes a row."""
    chunks = -(-m // max(LEAST_ROWS, BUFFER_BYTES // row_bytes, -(-m // MOST_CHUNKS)))
    return max(1, -(-m // (max(1, chunks) * ROW_STEP))) * ROW_STEP


def buffer_of_chunk(x: torch.Tensor, rows: int, v: int) -> torch.Tensor:
    """Return memory for `rows` rows of v logits, of the dtype and on the device of x.

    Rows begin at whole lines of memory, so they are longer: products of others are slow, or are
    copied.
    """
    line = LINE_BYTES // x.element_size()
    return torch.empty((rows, -(-v // line) * line), dtype=x.dtype, device=x.device)

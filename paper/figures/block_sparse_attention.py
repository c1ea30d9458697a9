"""Block-sparse attention: TFLOP/s of each mask over the kept blocks, by pass."""

import _figure
from _data import run, summary


def main(arguments):
    _figure.by_cell(summary(arguments.run), ["block_sparse_attention"], arguments.out)


if __name__ == "__main__":
    run(main, __doc__)

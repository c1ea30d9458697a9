"""Embedding: GB/s of each vocabulary, by pass."""

import _figure
from _data import run, summary


def main(arguments):
    _figure.by_cell(summary(arguments.run), ["embedding"], arguments.out)


if __name__ == "__main__":
    run(main, __doc__)

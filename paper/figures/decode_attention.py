"""Decoding: GB/s of each cache."""

import _figure
from _data import run, summary


def main(arguments):
    _figure.by_cell(summary(arguments.run), ["decode_attention"], arguments.out)


if __name__ == "__main__":
    run(main, __doc__)

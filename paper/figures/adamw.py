"""AdamW: GB/s of each list of parameters."""

import _figure
from _data import run, summary


def main(arguments):
    _figure.by_cell(summary(arguments.run), ["adamw"], arguments.out)


if __name__ == "__main__":
    run(main, __doc__)

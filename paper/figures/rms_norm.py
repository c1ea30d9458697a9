"""RMS norm: GB/s over the row length, by pass and dtype."""

import _figure
from _data import run, summary


def main(arguments):
    _figure.over_rows(summary(arguments.run), "rms_norm", arguments.out)


if __name__ == "__main__":
    run(main, __doc__)

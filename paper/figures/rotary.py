"""Rotary embedding: GB/s over the sequence length, by pass and dtype; other heads below."""

import _figure
from _data import run, summary


def main(arguments):
    every = summary(arguments.run)
    _figure.family(
        every,
        every[every["family"] == "rotary"],
        arguments.out,
        x=lambda cells: cells["size_S"],
        label="sequence length S",
        rate="gbps",
        down="pass",
        across="dtype",
        fixed=("size_B", "size_K", "flags"),
    )


if __name__ == "__main__":
    run(main, __doc__)

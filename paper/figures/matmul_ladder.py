"""The forms of the matrix product and what each technique buys, from the simplest on."""

import _ladder
from _data import run


def main(arguments):
    _ladder.draw(arguments, "matmul_ladder")


if __name__ == "__main__":
    run(main, __doc__)

"""Ranges of shapes that are met in practice, from which each run draws a few to time."""

import math
import random

from ops._spec import Case, make_case

# Elements of a drawn tensor: from what an L2 holds to what outlasts it several times.
LEAST_DRAWN, MOST_DRAWN = 2**20, 2**27


def log_uniform(generator: random.Random, least: int, most: int, step: int = 1) -> int:
    """A multiple of `step` from least to most, which are such too; as likely in each octave."""
    exact = math.exp(generator.uniform(math.log(least), math.log(most)))
    return min(most, max(least, round(exact / step) * step))


def drawn_length(generator: random.Random, least: int, most: int) -> int:
    """The length of a row: of four three are multiples of 8, as most are that a model has.

    least, most: multiples of 64.
    """
    return log_uniform(generator, least, most, generator.choice((1, 8, 8, 64)))


def drawn_vector(generator: random.Random) -> Case:
    """A flat vector of any length."""
    return make_case(N=log_uniform(generator, 2**18, 2**28))


def drawn_rows(longest: int, letter: str = "N"):
    """Draws M rows of 128 to `longest` elements, of any number that fits in MOST_DRAWN."""

    def draw(generator: random.Random) -> Case:
        length = drawn_length(generator, 128, longest)
        elements = log_uniform(generator, LEAST_DRAWN, MOST_DRAWN)
        return make_case(**{"M": max(1, elements // length), letter: length})

    return draw

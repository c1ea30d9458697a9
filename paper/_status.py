"""The statuses of a cell without a time that counts: the mark in the figures, and the meaning."""

from typing import NamedTuple


class Status(NamedTuple):
    """mark: of matplotlib. meaning: as a caption says it; "" if the status needs no words."""

    mark: str
    meaning: str = ""


STATUSES = {
    "impossible": Status(
        "_",
        "faster than memory and arithmetic units allow for the work that is counted, so other work "
        "was done; PyTorch's gradient of a transpose, for one, is a view of the gradient that it "
        "is given and moves no byte",
    ),
    "hung": Status("4", "no answer within the time limit"),
    "unsupported": Status("x", "the library declines the case"),
    "unavailable": Status("+", "library or hardware absent"),
    "inaccurate": Status("1", "refused by the gate"),
    "oom": Status("2", "out of memory"),
    "crashed": Status("3"),
    "unreached": Status(
        "$?$", "the measurement was closed before its turn, or another part times it"
    ),
    "throttled": Status(
        "|", "timed while something slowed the GPU, so the time stands in tables alone"
    ),
}

"""A cell is what is timed at one go: a case in one dtype and one pass."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from harness.calls import drawn
from ops._spec import Case, Op


@dataclass(frozen=True)
class Cell:
    """set: "grid" of the sweep, "drawn" of a shape that was drawn for the run."""

    case: Case
    dtype: str
    pass_: str
    set: str = drawn.GRID

    def __str__(self) -> str:
        return f"{self.case.name} {self.dtype} {self.pass_}"


def share(cells: Iterable[Cell], number: int, of: int) -> list[Cell]:
    """The cells of one of `of` parts of a sweep, numbered from 1.

    The shapes go to the parts in turn, each in one dtype and with all its passes.
    """
    shapes: dict[tuple[str, str], int] = {}
    found = []
    for each in cells:
        turn = shapes.setdefault((each.case.name, each.dtype), len(shapes))
        if turn % of == number - 1:
            found.append(each)
    return found


def sweep(
    op: Op,
    dtypes: Iterable[str],
    passes: Iterable[str],
    max_cases: int | None,
    drawn_seed: int | None = None,
) -> Iterator[Cell]:
    """The cells of an op's sweep in these dtypes and passes, first cases first.

    Then those of the shapes that the seed draws, if there is one. max_cases: of either.
    """
    sets = {drawn.GRID: (op.sweep, op.passes)}
    sets |= {drawn.DRAWN: (drawn.cases(op, drawn_seed), drawn.passes(op))}
    for name, (cases, offered) in sets.items():
        for case in cases[:max_cases]:
            for dtype in op.dtypes_of(case):
                for pass_ in offered:
                    if dtype in dtypes and pass_ in passes:
                        yield Cell(case, dtype, pass_, name)

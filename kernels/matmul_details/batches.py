"""Walks over batched operands: at most two batch dimensions in a launch, and no copies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from .._runtime.layout import ACCESS_BYTES, tma_compatible


@dataclass(frozen=True)
class Operand:
    """The matrices of an operand in a launch.

    - matrix: `[rows, columns]`, that of the first batch.
    - steps: strides along the outer and the inner batch dimension; zero if a matrix is repeated.
    """

    matrix: torch.Tensor
    steps: tuple[int, int] = (0, 0)

    @property
    def transposed(self) -> "Operand":
        return Operand(self.matrix.T, self.steps)

    def by_columns(self) -> bool:
        """Return whether columns, and not rows, are runs of memory."""
        return self.matrix.stride(0) == 1 and self.matrix.shape[1] > 1

    @property
    def stored(self) -> "Operand":
        """The operand by the rows of its memory."""
        return self.transposed if self.by_columns() else self

    def describable(self) -> bool:
        """Return whether a TMA descriptor can describe the matrices, by rows."""
        size = self.matrix.element_size()
        aligned = all(step % (ACCESS_BYTES // size) == 0 and step >= 0 for step in self.steps)
        return aligned and tma_compatible(self.matrix)

    def moving(self) -> int:
        """Return 2 if there is a matrix for each outer batch, plus 1 if for each inner one."""
        return 2 * (self.steps[0] != 0) + (self.steps[1] != 0)

    def is_one_number(self) -> bool:
        """Return whether all entries of all matrices are the same place in memory."""
        lines = zip(self.matrix.shape, self.matrix.stride(), strict=True)
        return not any(self.steps) and all(size == 1 or stride == 0 for size, stride in lines)


@dataclass(frozen=True)
class Walk:
    """One launch: the sizes of its outer and inner batch dimension, and its operands by name.

    parted: inner batches are parts of K, of which each has a result.
    """

    sizes: tuple[int, int]
    operands: Mapping[str, Operand | None]
    parted: bool = False

    @property
    def count(self) -> int:
        return self.sizes[0] * self.sizes[1]

    def described(self, operand: Operand, block: Sequence[int]) -> tuple[Sequence[int], ...]:
        """Return shape, strides and block of a descriptor of an operand, whose rows are runs.

        It has two dimensions, or four if there are batches.
        """
        shape, strides = operand.matrix.shape, operand.matrix.stride()
        if self.count == 1:
            return shape, strides, block
        # A matrix that all batches share has a single place along that dimension.
        over = [size if step else 1 for size, step in zip(self.sizes, operand.steps, strict=True)]
        steps = [step or ACCESS_BYTES for step in operand.steps]
        return [*over, *shape], [*steps, *strides], [1, 1, *block]


def walks(
    batch: tuple[int, ...],
    by_row: Mapping[str, torch.Tensor | None],
    by_column: Mapping[str, torch.Tensor | None],
) -> Iterator[Walk]:
    """Yield the launches of a product whose operands have these batch dimensions.

    by_row: operands `[*batch, M, C]`, such as a and the result. by_column: operands
    `[*batch, R, N]`, such as b. Two dimensions are one if each operand walks them in equal steps.
    If all batches have the same columns, and their rows lie in equal steps, they are one matrix.
    A third dimension that is left takes a launch for each of its indices.
    """
    if not batch:
        every = {**by_row, **by_column}
        yield Walk((1, 1), {name: x if x is None else Operand(x) for name, x in every.items()})
        return
    present = {name: x for name, x in {**by_row, **by_column}.items() if x is not None}
    kept = [d for d, size in enumerate(batch) if size != 1]
    sizes: list[int] = []
    steps: dict[str, list[int]] = {name: [] for name in present}
    for d in kept:
        merges = bool(sizes) and all(
            steps[name][-1] == x.stride(d) * batch[d] for name, x in present.items()
        )
        sizes.append(sizes.pop() * batch[d] if merges else batch[d])
        for name, x in present.items():
            if merges:
                steps[name].pop()
            steps[name].append(x.stride(d))
    rows = next(x.shape[-2] for name, x in present.items() if name in by_row)
    lines = {name: x.stride(-2) for name, x in present.items()}
    while sizes and all(
        steps[name][-1] == 0
        if name in by_column
        else rows == 1 or steps[name][-1] == lines[name] * rows
        for name in present
    ):
        for name in present:
            step = steps[name].pop()
            if rows == 1 and name in by_row:
                lines[name] = step
        rows *= sizes.pop()
    if len(sizes) > 2:
        for index in range(batch[kept[0]]):
            yield from walks(
                (*batch[: kept[0]], *batch[kept[0] + 1 :]),
                *(
                    {n: x if x is None else x.select(kept[0], index) for n, x in group.items()}
                    for group in (by_row, by_column)
                ),
            )
        return
    operands: dict[str, Operand | None] = dict.fromkeys({**by_row, **by_column})
    for name, x in present.items():
        shape = (rows if name in by_row else x.shape[-2], x.shape[-1])
        matrix = x.as_strided(shape, (lines[name], x.stride(-1)))
        operands[name] = Operand(matrix, (0, 0, *steps[name])[-2:])
    yield Walk((1, 1, *sizes)[-2:], operands)

"""The parts of a declared op: inputs, cases, cost. This module imports the standard library only.

The harness reads the declarations to make inputs, check outputs and turn times into rates. Kernels
and baselines do not know them.
"""

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PASSES = ("forward", "backward", "both")
DTYPES = ("float32", "float16", "bfloat16")
ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}
OFFSETS = {"offset": 1, "offset2": 2, "offset4": 4, "offset8": 8}
LAYOUTS = ("", "padded", "strided", "transposed", "expanded", *OFFSETS)
VALUES = ("", "large", "equal", "spike", "inf", "infinities", "denormal")
# Flags of a hostile case: whole numbers from a range wider than 2**62.
EXTREME = ("wide",)


@dataclass(frozen=True)
class Tensor:
    """One tensor argument.

    - shape: size letters separated by blanks, such as `M N`; empty for a tensor without dimensions.
      From letters joined by a bar, such as `T|S`, the first counts that the case has. A letter with
      a question mark, such as `B?`, is left out in cases that lack it. A last `B+1` is one
      more than B, as the boundaries of B parts are.
    - dtype: a fixed dtype, such as `int64`; if empty, the dtype of the cell.
    - grad: the backward pass computes its gradient.
    - when: a flag. The tensor is present in cases with this flag; other cases pass None.
    - unless: a flag. The tensor is None in cases with this flag.
    - wide: a flag. In cases with this flag the tensor is float32 in a cell of any dtype.
    - transposed: a flag. In cases with this flag the last two dimensions are stored in reverse
      order, and the argument is a view of that storage.
    - tame: it stays normal in cases whose values are `inf`, `infinities` or `denormal`. Such a
      factor does not hide the values of the other one.
    - ascending: sorted along its last dimension.
    - below: the size letter that bounds its integers from above; if empty, the smallest size.
    - sentinel: (flag, value). In cases with the flag a quarter of its integers are the value.
    - scale: the standard deviation of its plain entries, or (case) -> one. A weight has that of a
      network, so the results have the size that a network computes with.
    - table: (case, start) -> its entries, a float64 tensor on the CPU. They follow from their place
      and are not drawn, and no kind of values changes them. The number `start`, from 0 to 2**16, is
      drawn once for all tables of a cell.
    - finish: (case, values) -> the values that the tensor takes in place of those drawn, such as
      their magnitudes.
    - narrow: the oracle gets the tensor itself, not a copy in float64, which might not fit. It
      widens what it reads, and writes nothing there.
    """

    shape: str
    dtype: str = ""
    grad: bool = True
    when: str = ""
    unless: str = ""
    wide: str = ""
    transposed: str = ""
    tame: bool = False
    ascending: bool = False
    below: str = ""
    sentinel: tuple[str, int] | None = None
    scale: "float | Callable[[Case], float]" = 1.0
    table: "Callable[[Case, int], object] | None" = None
    finish: "Callable[[Case, object], object] | None" = None
    narrow: bool = False

    def letters(self, sizes: Mapping[str, int]) -> list[str]:
        """Return the letters of its sizes in a case with these sizes; KeyError if it lacks one."""
        found = []
        for letters in self.shape.split():
            if letters.endswith("?") and letters[:-1] not in sizes:
                continue
            letters = letters.removesuffix("?").removesuffix("+1")
            *others, last = letters.split("|")
            found.append(next((each for each in others if each in sizes), last))
            if found[-1] not in sizes:
                raise KeyError(f"no size {letters}")
        return found

    @property
    def cuts(self) -> bool:
        """Whether it holds the boundaries of parts, so that rows belong together."""
        return self.shape.endswith("+1")

    def sizes(self, sizes: Mapping[str, int]) -> list[int]:
        """Return its sizes in a case with these sizes; KeyError if it lacks one."""
        found = [sizes[letter] for letter in self.letters(sizes)]
        return [*found[:-1], found[-1] + 1] if self.cuts else found

    def is_in(self, case: "Case") -> bool:
        """Return whether a case has the tensor."""
        return (not self.when or self.when in case.flags) and self.unless not in case.flags

    def dtype_in(self, case: "Case", cell: str) -> str:
        """Return its dtype in a case, in a cell of the dtype `cell`."""
        return "float32" if self.wide in case.flags else self.dtype or cell

    def scale_of(self, case: "Case") -> float:
        """Return the standard deviation of its plain entries in a case."""
        return self.scale(case) if callable(self.scale) else self.scale


def fan_in(letter: str) -> "Callable[[Case], float]":
    """The scale of a weight that sums over this size: unit inputs give results of unit variance.

    LeCun et al., "Efficient BackProp" (1998), start networks so. GPT-2 and Llama draw their weights
    with a deviation of 0.02, which is 1.28 / sqrt(4096): the same, to a factor near one.
    """
    return lambda case: max(1, case[letter]) ** -0.5


@dataclass(frozen=True)
class Case:
    """The sizes, flags, memory layout and kind of values of one problem; made by `make_case`.

    layout: "" contiguous; "padded" rows lie further apart than they are long; "strided" every
        second element of storage; "transposed" the last two dimensions are stored in reverse
        order; "expanded" all of the first dimension is the same memory, and so are all entries of
        the gradient of an output; "offset", "offset2", "offset4", "offset8" the first element is
        so many elements past an aligned address. A tensor with too few dimensions is contiguous.
    values: "" normal; "large" scaled to a hundred; "equal" one value in all of a row; "spike" one
        huge value among small ones; "inf" some entries are minus infinity, never a whole row;
        "infinities" some entries are infinite, of either sign: of a vector many, of a matrix one
        in about half of the rows; "denormal" below the smallest normal number of the dtype.
    """

    sizes: Mapping[str, int]
    flags: tuple[str, ...] = ()
    layout: str = ""
    values: str = ""
    dtypes: tuple[str, ...] = ()

    def __getitem__(self, letter: str) -> int:
        return self.sizes[letter]

    def __post_init__(self):
        if self.layout not in LAYOUTS or self.values not in VALUES:
            raise ValueError(f"case {self.name}: layout {self.layout!r}, values {self.values!r}")
        if twice := {*LAYOUTS, *VALUES}.intersection(self.flags):
            raise ValueError(f"case {self.name}: {sorted(twice)} is a layout or a kind of values")
        if unknown := set(self.dtypes) - set(DTYPES):
            raise ValueError(f"case {self.name}: unknown dtypes {sorted(unknown)}")

    @property
    def name(self) -> str:
        sizes = [f"{letter}{size}" for letter, size in self.sizes.items()]
        return "-".join([*sizes, *self.flags, *filter(None, (self.layout, self.values))])

    @property
    def hostile(self) -> bool:
        """Whether few programs ask for such a case, so that a failure condemns no library.

        A case is hostile if one of these holds. Every other case is ordinary.

        - The values are not normal ones.
        - Rows or a first element lie off the alignment of an allocation, or entries share memory.
        - Tensors have one element or none.
        - A flag is extreme.
        """
        sizes = self.sizes.values()
        degenerate = min(sizes, default=2) == 0 or max(sizes, default=2) == 1
        odd = self.layout in ("padded", "expanded", *OFFSETS)
        return bool(self.values) or odd or degenerate or not set(EXTREME).isdisjoint(self.flags)


def make_case(*flags: str, layout: str = "", values: str = "", dtypes=(), **sizes: int) -> Case:
    """Make a `Case`, its sizes in the order written: `make_case("causal", B=1, H=2, S=64)`."""
    return Case(dict(sizes), flags, layout, values, tuple(dtypes))


@dataclass(frozen=True)
class Cost:
    """The work no implementation can avoid: each input read once, each output written once.

    If the forward pass can keep less than an input, the backward pass is charged for that only:
    relu needs a bit an element. If no gradient is wanted nothing is kept, so "forward" counts none
    of it; "both" counts that it is written and, later, read.
    """

    bytes_read: int
    bytes_written: int
    flops: int


def in_turn(cost, kept=None):
    """Return the cost of three passes from that of two: "both" is forward and then backward.

    - cost: as `Op.cost`, for "forward" and "backward".
    - kept: (case) -> bytes that the forward pass writes for the backward pass alone, whose cost
      holds their reading. None if it keeps nothing.
    """
    return functools.partial(_cost_in_turn, cost, kept)


def _cost_in_turn(cost, kept, case, pass_, itemsize):
    if pass_ != "both":
        return cost(case, pass_, itemsize)
    first, then = (cost(case, each, itemsize) for each in ("forward", "backward"))
    return Cost(
        first.bytes_read + then.bytes_read,
        first.bytes_written + (kept(case) if kept else 0) + then.bytes_written,
        first.flops + then.flops,
    )


@dataclass(frozen=True)
class Op:
    """One op of the study.

    - name: that of the public function in our kernel file and in every baseline that offers it.
    - reference: plain PyTorch of any dtype, run in float64 as the oracle. It is never timed.
    - inputs: tensor arguments by name, in the order of the signature.
    - params: keyword arguments common to all cases. A function is called with the case.
    - flags: keyword arguments that a flag of a case adds, by flag.
    - edge: small and awkward cases, for verification. They run in the interpreter: keep them small.
    - sweep: the cases that are timed, with shapes of named models. They are verified on a GPU too.
    - adapted: (function) -> the function as the harness calls an implementation, for an op whose
      users hand over other things than a tensor for each name, such as lists of them.
    - prepared: the inputs of which a user makes something of the library's own once for many calls,
      such as the lists of a block mask. No time and no memory of a call counts it.
    - drawn: (generator) -> a case from the range of shapes that are met in practice. Each run draws
      a few and times them too. No kernel may know them.
    - cost: (case, pass_, itemsize) -> Cost; `pass_` is one of the passes.
    - passes: `forward`, if no gradient is wanted. `backward`, the gradients alone, after a forward
      pass that is not timed. `both`, the two in turn as in training, with all that the first keeps
      for the second. Every differentiable op has `both`. An op that may compute its gradients in
      the forward pass has no `backward`, because its time alone would mislead.
    - deterministic: whether two runs of ours on the same inputs give the same bits, or the passes
      in which they do.
    - properties: (given, results, **arguments) -> the fault, or an empty text. A random op has
      them: its rivals draw from streams of their own and are held to the law of the numbers. Ours
      is held to the reference, which draws the same stream. The inputs are `given` by name and, in
      a backward pass, with `dy`, the gradient of the output. The `results` are `out`, and in a
      backward pass `d<input>`.
    """

    name: str
    reference: Callable
    inputs: Mapping[str, Tensor]
    cost: Callable[[Case, str, int], Cost]
    edge: tuple[Case, ...]
    sweep: tuple[Case, ...]
    passes: tuple[str, ...] = ("forward",)
    dtypes: tuple[str, ...] = DTYPES
    params: Mapping[str, object] = field(default_factory=dict)
    flags: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    deterministic: bool | tuple[str, ...] = True
    properties: Callable | None = None
    drawn: Callable[[random.Random], Case] | None = None
    adapted: Callable[[Callable], Callable] | None = None
    prepared: tuple[str, ...] = ()

    def dtypes_of(self, case: Case) -> tuple[str, ...]:
        return tuple(d for d in self.dtypes if not case.dtypes or d in case.dtypes)

    @property
    def differentiable(self) -> bool:
        """Whether gradients take part in any pass."""
        return self.passes != ("forward",)

    @property
    def unit_gradient(self) -> bool:
        """Whether "both" is timed for gradients of one, as a loss gets them, and not for any."""
        return "both" in self.passes and "backward" not in self.passes

    def repeats(self, pass_: str) -> bool:
        """Return whether ours gives the same bits again in a pass."""
        return self.deterministic is True or pass_ in (self.deterministic or ())

    def judged(self, ours: bool) -> str:
        """Return the standard of an implementation: "oracle", or "properties"."""
        return "properties" if self.properties and not ours else "oracle"

    def arguments(self, case: Case) -> dict[str, object]:
        """Return the keyword arguments of a case that are not tensors."""
        merged = {k: v(case) if callable(v) else v for k, v in self.params.items()}
        for flag in case.flags:
            merged |= self.flags.get(flag, {})
        return merged

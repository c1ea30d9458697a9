"""Messages between the verification of an implementation and its worker.

A unit is a case in a dtype with all its passes. A cell is a row of the report, in the report's
format: one pass of a unit.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from harness.workers.messages import Answer, Request


@dataclass(frozen=True)
class Chosen(Answer):
    """The units to verify.

    - device: the name of the GPU, or "cpu".
    - units: for each unit its cells before they have run.
    - declared: the facts for the ledger that the implementation's file declares.
    - elsewhere: the numbers of the units that another part of the verification runs.
    """

    device: str
    units: list[list[dict[str, object]]]
    declared: dict[str, object]
    elsewhere: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class UnitChecked(Answer):
    """The cells of a unit that has run.

    alive: false if the process cannot go on: it has lost its GPU context, or memory ran out and an
    implementation may keep what it took until the process ends.
    """

    cells: list[dict[str, object]]
    alive: bool


@dataclass(frozen=True)
class CallProfiles(Answer):
    """The contents of one call of each pass of a unit, see `harness.verify.call_profile`."""

    entries: dict[str, dict[str, object]]


@dataclass(frozen=True)
class ChooseUnits(Request):
    """Choose the units to verify.

    - gpu: on the GPU, else on the CPU.
    - kinds: of the cases, "edge", "sweep" or "drawn", in the order in which they run.
    - most: the number of cases of each kind, None for all.
    - drawn_seed: the seed of the drawn shapes, None for no such shape.
    - spare: whether the passes of a unit that run out of memory run again with the results of the
      oracle in that of the host.
    - part: its number, from 1, and how many there are; None if all units are run here.
    """

    do: ClassVar[str] = "choose"
    answer: ClassVar[type[Answer]] = Chosen
    gpu: bool
    dtypes: list[str]
    passes: list[str]
    kinds: list[str]
    most: int | None = None
    drawn_seed: int | None = None
    spare: bool = False
    part: list[int] | None = None


@dataclass(frozen=True)
class CheckUnit(Request):
    """Verify the unit of this number. passes: those that are verified, None for all."""

    do: ClassVar[str] = "check"
    answer: ClassVar[type[Answer]] = UnitChecked
    unit: int
    passes: list[str] | None = None


@dataclass(frozen=True)
class ProfileCalls(Request):
    """Profile a call of each pass of the unit of this number."""

    do: ClassVar[str] = "profile"
    answer: ClassVar[type[Answer]] = CallProfiles
    unit: int


REQUESTS = (ChooseUnits, CheckUnit, ProfileCalls)

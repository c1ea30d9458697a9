"""Which GPU and how many cores each job of a study has, as Snakemake's resources and options.

An op has one board for all its jobs; `harness.study.placement` plans it. Imports neither torch nor
Triton: the Snakefile asks while it parses.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from harness.cli import UserError
from harness.files import read_json
from harness.machine import gpu_lock
from harness.results import parts
from harness.study import placement

# Libraries that compile at a time at most, for each GPU: as many as most ops have. Else the one
# that compiles the longest may begin when the others have ended.
TRIALS = 4


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a study; methods that take `wildcards` are Snakemake input functions.

    - boards: the UUIDs of those over which the jobs that time are spread.
    - spread: whether they are spread here. If not, a batch system gives each job its GPU.
    - folder: of the run. The boards of jobs that are done stand in its files.
    - recorded: the folder of the recorded run, which tells how long the ops take.
    - tuned_by: for each op the libraries that tune themselves for it.
    - others: the jobs besides those of ops that have a GPU alone; by wildcard, its values.
    """

    boards: tuple[str, ...]
    spread: bool
    folder: Path
    recorded: Path
    tuned_by: Mapping[str, Sequence[str]]
    others: Mapping[str, Sequence[str]]

    def board(self, wildcards) -> str:
        """The board on which libraries must tune themselves for an op, and which measures it. On
        another board they tune themselves again.

        It is the one on which the op was measured. Otherwise it is that on which one of them has
        tuned itself, if that board is here, and else the planned one.
        """
        op = wildcards.op
        with contextlib.suppress(UserError):
            sidecar = read_json(self.folder / f"raw/{op}.json", "")
            if sidecar.get("mode") == "measured":
                return (sidecar.get("environment", {}).get("gpu") or {}).get("uuid", "")
        for impl in self.tuned_by[op]:
            with contextlib.suppress(UserError):
                report = read_json(self.folder / f"autotune/{op}/{impl}.json", "")
                board = report.get("gpu", {}).get("uuid")
                if board in self.boards:
                    return board
        return self._plan.get(op, "")

    def verify_board(self, wildcards) -> str:
        """The board on which an op is verified: its own, where it is in the way of no other op.

        It is the word for any board if some of them are no op's, or if there is one at most.
        """
        several = 1 < len(self.boards) <= len(self.tuned_by)
        return self.board(wildcards) if several else gpu_lock.ANY

    def compile_board(self, wildcards) -> str:
        """The board on which the libraries of an op that tune themselves compile.

        It is one on which no op is planned, if there is any. On the op's own board its other
        libraries would wait for the longest compile phase. Otherwise it is that of the op. It is
        the word for any board if there is one at most.
        """
        if len(self.boards) < 2:
            return gpu_lock.ANY
        ops = sorted(self.tuned_by)
        mine = {self._plan[op] for op in ops}
        spare = [board for board in self.boards if board not in mine]
        return spare[ops.index(wildcards.op) % len(spare)] if spare else self.board(wildcards)

    def one_gpu(self, wildcard: str) -> dict[str, object]:
        """The resources of a job that has a GPU alone: the GPU, and of several boards that one, by
        name and as an amount. So no job waits for a board while another is idle.

        wildcard: the one that names the job, `op`, `family` or `subject`. No resource makes a
        finished job run again, and so another plan repeats no measurement.
        """

        def board(wildcards) -> str:
            if len(self.boards) < 2:
                return gpu_lock.ANY
            if wildcard == "op":
                return self.board(wildcards)
            return self._plan[f"{wildcard} {wildcards.get(wildcard)}"]

        def takes(uuid: str) -> Callable:
            return lambda wildcards: int(board(wildcards) == uuid)

        lanes = {name: takes(self.boards[n]) for n, name in self._lanes}
        return {"gpu": 1, "board": board, **lanes}

    @property
    def compiling(self) -> dict[str, object]:
        """The resources of the compile phase of a library: a place among those of its GPU.

        It shares the GPU. If it kept it from others, they would wait for minutes. It has four
        compilers for each of its cores. They wait for the GPU and for each other's locks, and the
        library that compiles the longest is alone in the end.

        A batch system that gives out GPUs gives it one, as `one_gpu` asks, and a compiler for each
        of its cores.
        """
        if not self.spread:
            return self.one_gpu("op") | {"compilers": lambda wildcards, threads: threads}
        places = self._places(self.compile_board, 1)
        compilers = {"compilers": lambda wildcards, threads: 4 * threads}
        return {"board": self.compile_board} | places | compilers

    @property
    def choosing(self) -> dict[str, object]:
        """The resources of a library that chooses alone: those of `one_gpu`, and all places of it.

        So it begins when no library compiles there, nor is to. If it waited for the lock instead,
        no library could begin to compile, and the cores would be idle until the longest has ended.
        """
        alone = self.one_gpu("op")
        return alone | self._places(self.board, self._trials) if self.spread else alone

    def _places(self, board: Callable, amount: int) -> dict[str, object]:
        """So many places for libraries that compile, among those of a job's board."""

        def taken(uuid: str) -> Callable:
            return lambda wildcards: amount * (board(wildcards) == uuid)

        lanes = {f"trial{n}": taken(self.boards[n]) for n, _ in self._lanes}
        return lanes or {"trial": amount}

    @property
    def at_once(self) -> dict[str, int]:
        """How much there is on this machine of each resource of `one_gpu` and `compiling`."""
        lanes = {name: 1 for _, name in self._lanes}
        places = self._places(self.board, 0) if self.spread and self.boards else ()
        return {"gpu": max(1, len(self.boards))} | lanes | dict.fromkeys(places, self._trials)

    def threads(self, cores: int | None) -> int | None:
        """The cores of a job that has a GPU alone: all, if there is one GPU, so that nothing runs
        beside it. None if Snakemake was told of no cores.
        """
        return cores and max(1, cores // self.at_once["gpu"])

    def autotune_threads(self, cores: int | None) -> int | None:
        """The cores of either phase of a library that tunes itself: those of `threads` if a batch
        system gives them out. Else all that compile at a time have half of the cores, so that
        verifications go on beside them.
        """
        share = self.threads(cores)
        return share and (max(1, share // (2 * self._trials)) if self.spread else share)

    @property
    def _trials(self) -> int:
        """How many libraries compile at a time on each GPU: no more than the most that one has."""
        there: Counter[str] = Counter()
        for op, impls in self.tuned_by.items():
            there[self.compile_board(SimpleNamespace(op=op))] += len(impls)
        return max(1, min(TRIALS, max(there.values(), default=0)))

    @functools.cached_property
    def _plan(self) -> dict[str, str]:
        """The board of each op, and of each job besides by its wildcard and value."""
        seconds = {op: found for op in self.tuned_by if (found := self._recorded_s(op))}
        others = [f"{kind} {name}" for kind, names in self.others.items() for name in names]
        return placement.plan(self.tuned_by, seconds, self.boards, later=others)

    @property
    def _lanes(self) -> list[tuple[int, str]]:
        """The resource of each of several boards, by the board's number."""
        return [(n, f"board{n}") for n in range(len(self.boards)) if len(self.boards) > 1]

    def _recorded_s(self, op: str) -> float | None:
        """The seconds that measuring an op took in the recorded run, in all its parts."""
        # A plan needs no whole record; the command that reads it says what is wrong.
        with contextlib.suppress(UserError, TypeError):
            sidecar = read_json(self.recorded / f"raw/{op}.json", "")
            each = [part.get("overhead", {}).get("total_s") for part in parts.of(sidecar)]
            return None if None in each else sum(each)
        return None

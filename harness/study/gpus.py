"""Which GPU and how many cores each job of a study has, as Snakemake's resources and options.

An op has one board for all its jobs; `harness.study.placement` plans it. Imports neither torch nor
Triton: the Snakefile asks while it parses.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.cli import UserError
from harness.files import read_json
from harness.machine import gpu_lock
from harness.study import placement

# Libraries that tune themselves at a time at most, for each GPU: as many as an op has. Else the one
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
        libraries would wait for the longest compile phase. The word for any board stands for it.
        """
        ops = sorted(self.tuned_by)
        mine = {self._plan[op] for op in ops} if self._plan else set()
        spare = [board for board in self.boards if board not in mine]
        return spare[ops.index(wildcards.op) % len(spare)] if spare else gpu_lock.ANY

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
    def trial(self) -> dict[str, object]:
        """The resources of a library that tunes itself: a place among those of its GPU.

        It compiles most of the time, beside others, and the lock gives it its GPU alone for the
        rest. If it kept the GPU from other trials and verifications meanwhile, they would wait for
        minutes. It has four compilers for each of its cores. They wait for the GPU and for each
        other's locks, and the trial that compiles the longest is alone in the end.

        A batch system that gives out GPUs gives it one, as `one_gpu` asks, and a compiler for each
        of its cores.
        """
        resources = self.one_gpu("op") | {"compile_board": self.compile_board}
        if not self.spread:
            return resources | {"compilers": lambda wildcards, threads: threads}
        boards = {name: resources[name] for name in ("board", "compile_board")}
        return boards | {"trial": 1, "compilers": lambda wildcards, threads: 4 * threads}

    @property
    def at_once(self) -> dict[str, int]:
        """How much there is of each resource of `one_gpu` and `trial` on this machine."""
        count = max(1, len(self.boards))
        lanes = {name: 1 for _, name in self._lanes}
        trials = {"trial": self._trials * count} if self.spread and self.boards else {}
        return {"gpu": count} | lanes | trials

    def threads(self, cores: int | None) -> int | None:
        """The cores of a job that has a GPU alone: all, if there is one GPU, so that nothing runs
        beside it. None if Snakemake was told of no cores.
        """
        return cores and max(1, cores // self.at_once["gpu"])

    def autotune_threads(self, cores: int | None) -> int | None:
        """The cores of a library that tunes itself: those of `threads` if a batch system gives them
        out. Else all such libraries together have half of the cores, so that verifications go on
        beside them.
        """
        share = self.threads(cores)
        return share and (max(1, share // (2 * self._trials)) if self.spread else share)

    @property
    def _trials(self) -> int:
        """How many libraries tune themselves at a time for each GPU: no more than there are."""
        there = sum(map(len, self.tuned_by.values()))
        return max(1, min(TRIALS, -(-there // max(1, len(self.boards)))))

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
        """The seconds that measuring an op took in the recorded run."""
        with contextlib.suppress(UserError):
            sidecar = read_json(self.recorded / f"raw/{op}.json", "")
            return sidecar.get("overhead", {}).get("total_s")
        return None

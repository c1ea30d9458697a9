"""Verifies one implementation, in a process of its own."""

import gc
import os
import traceback
from dataclasses import asdict
from functools import partial

import torch

from harness import status as statuses
from harness.calls import candidates, cell, context, drawn, interpreter, wide
from harness.cli import UserError
from harness.project import registry
from harness.project.implementations import is_ours
from harness.verify import call_profile, check, messages
from harness.verify import problem as oracle
from ops._spec import Case

EAGER = "torch_eager"


class VerifyWorker:
    """Verifies one implementation unit by unit: a case in a dtype, all its passes.

    Raises Unavailable or UserError as `registry.function` does.
    """

    requests = messages.REQUESTS

    def __init__(self, op: str, impl: str, seed: int):
        self.op, _ = registry.op(op)
        self.function = registry.function(op, impl)
        self.version = registry.version(impl)
        self.in_place = registry.in_place(op, impl)
        self.wide = registry.wide(op, impl)
        self.declared = {
            "accumulates": registry.accumulates(op, impl),
            "settings": registry.settings(op, impl),
            "wide": " ".join(self.wide),
        }
        self.ours = is_ours(impl)
        if os.environ.get("TRITON_INTERPRET") == "1":
            interpreter.amend()
        self.seed = seed
        self.device, self.spare = "cpu", False
        self.units: list[tuple[Case, str]] = []
        self.blanks: list[list[dict]] = []
        self.eager_in_place = False
        try:
            self.eager = registry.function(op, EAGER)
            self.eager_in_place = registry.in_place(op, EAGER)
        except (registry.Unavailable, UserError):
            self.eager = self.op.reference

    def choose(
        self,
        gpu: bool,
        dtypes: list[str],
        passes: list[str],
        kinds: list[str],
        most: int | None = None,
        drawn_seed: int | None = None,
        spare: bool = False,
        part: list[int] | None = None,
    ) -> messages.Chosen:
        """Choose the device and the units, see `messages.ChooseUnits`.

        The time of a baseline may be limited, so its hostile edge cases come last, and within both
        classes those in a dtype that is not timed. A library may take minutes to compile such a
        cell, as flex_attention does in float32.

        A part has the shapes that are timed in it, and edge cases in turn with the other parts.
        """
        self.device, self.spare = "cuda" if gpu else "cpu", spare
        passes = [name for name in passes if name in self.op.passes]
        cases = {"edge": self.op.edge, "sweep": self.op.sweep}
        cases["drawn"] = drawn.cases(self.op, drawn_seed)
        chosen = [
            (kind, case, dtype)
            for kind in kinds
            for case in cases[kind][:most]
            for dtype in self.op.dtypes_of(case)
            if dtype in dtypes and passes
        ]
        if not self.ours:
            shapes = (*cases["sweep"], *cases["drawn"])
            timed = {dtype for case in shapes for dtype in self.op.dtypes_of(case)}

            def late(kind: str, case: Case, dtype: str) -> tuple[bool, bool]:
                return kind == "edge" and case.hostile, kind == "edge" and dtype not in timed

            chosen.sort(key=lambda unit: late(*unit))
        self.units = [(case, dtype) for _, case, dtype in chosen]
        judged = self.op.judged(self.ours)
        self.blanks = [[_blank(*unit, name, judged) for name in passes] for unit in chosen]
        elsewhere = []
        if part is not None:
            cells = cell.sweep(self.op, dtypes, passes, most, drawn_seed)
            elsewhere = _elsewhere(chosen, cell.share(cells, *part), *part)
        device = torch.cuda.get_device_name() if gpu else "cpu"
        return messages.Chosen(device, self.blanks, self.declared, elsewhere)

    def check(self, unit: int, passes: list[str] | None = None) -> messages.UnitChecked:
        """Run a unit: these of its passes, one at least, or all."""
        case, dtype = self.units[unit]
        blanks = [b for b in self.blanks[unit] if passes is None or b["pass"] in passes]
        rows = _rows(self, case, dtype, blanks)
        if self.spare and _starved(rows) and context.alive():
            # Copies to the host and back take far longer than most oracles.
            self._forget(collect=True)
            again = [b for b, row in zip(blanks, rows, strict=True) if row["status"] == "oom"]
            found = iter(_rows(self, case, dtype, again, spare=True))
            # A fault that was found stays, even if it does not come back.
            rows = [next(found) if row["status"] == "oom" else row for row in rows]
        alive = context.alive() and not _starved(rows)
        if alive:
            # Other verifications share the GPU.
            self._forget()
        return messages.UnitChecked(rows, alive)

    def _forget(self, collect: bool = False) -> None:
        """Give back what earlier calls have left.

        collect: cycles of objects too. A network has some, so they are looked for in any case.
        """
        for function in (self.function, self.eager):
            if forget := getattr(function, "forget", None):
                forget()
                collect = True
        if collect:
            gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def profile(self, unit: int) -> messages.CallProfiles:
        """Profile a call of each pass of a unit."""
        case, dtype = self.units[unit]
        passes = [blank["pass"] for blank in self.blanks[unit]]
        look = partial(call_profile.observe, self.op, self.function, case, dtype)
        where = self.seed, self.device, self.wide
        return messages.CallProfiles({name: look(name, *where) for name in passes})


def _elsewhere(
    units: list[tuple[str, Case, str]], timed: list[cell.Cell], number: int, of: int
) -> list[int]:
    """The numbers of the units that other parts verify. timed: the cells of this part."""
    mine = {(each.case.name, each.dtype) for each in timed}
    edges = [(case.name, dtype) for kind, case, dtype in units if kind == "edge"]
    mine.update(edges[number - 1 :: of])
    return [n for n, (_, case, dtype) in enumerate(units) if (case.name, dtype) not in mine]


def _starved(rows: list[dict]) -> bool:
    return any(row["status"] == "oom" for row in rows)


def _rows(
    worker: VerifyWorker, case: Case, dtype: str, blanks: list[dict], spare: bool = False
) -> list[dict]:
    """Judge a unit. spare: with the results of the oracle in the memory of the host."""
    try:
        # Edge cases give a loss other gradients than one.
        ones = worker.op.unit_gradient and blanks[0]["kind"] != "edge"
        problem = oracle.problem(
            worker.op,
            case,
            dtype,
            worker.seed,
            worker.device,
            worker.eager,
            ones,
            worker.eager_in_place,
            spare,
        )
    except Exception as error:
        fault = _fault(error, ours=True)
        fault["reason"] = f"oracle: {fault['reason']}"
        return [blank | fault for blank in blanks]
    found: dict[bool, dict] = {}
    for blank in blanks:
        # Passes with gradients are verified by one call, which gives outputs and gradients.
        differentiated = blank["pass"] != "forward"
        if differentiated not in found:
            cell = worker, problem, blank["pass"]
            whichever = not worker.ours and blank["kind"] == "edge"
            found[differentiated] = _whichever(*cell) if whichever else _cell(*cell)
    return [blank | found[blank["pass"] != "forward"] for blank in blanks]


def _whichever(worker: VerifyWorker, problem: oracle.Problem, pass_: str) -> dict:
    """Judge a cell that is not timed with one candidate of each tuner of Triton's.

    A tuner would compile all of them first, and some take minutes. If the results are not right,
    the candidate is not to blame before the library has chosen for itself.
    """
    with candidates.only(None) as counts:
        found = _cell(worker, problem, pass_)
    again = found["status"] != "ok" and max(counts, default=1) > 1 and context.alive()
    return _cell(worker, problem, pass_) if again else found


def _cell(worker: VerifyWorker, problem: oracle.Problem, pass_: str) -> dict:
    function = wide.judged(worker.function, worker.wide)
    try:
        found = check.check(function, problem, pass_, worker.ours, worker.in_place)
    except Exception as error:
        return _fault(error, worker.ours)
    return {"status": "inaccurate" if found.reason else "ok"} | asdict(found)


def _fault(error: Exception, ours: bool) -> dict[str, str]:
    if statuses.no_compiler(error):
        raise UserError(
            "needs a C++ compiler and finds none; run: apt-get install g++, or leave it out of"
            " `baselines` in config/config.yaml"
        ) from error
    if statuses.out_of_memory(error):
        status = "oom"
    elif ours or not context.alive():
        status = "crashed"
        traceback.print_exception(error)
    else:
        status = "unsupported"
    return {"status": status, "reason": statuses.first_line(error) or type(error).__name__}


def _blank(kind: str, case: Case, dtype: str, pass_: str, judged: str) -> dict:
    cell = {"case": case.name, "dtype": dtype, "pass": pass_, "kind": kind}
    cell |= {"hostile": case.hostile, "judged": judged, "status": "ok", "reason": ""}
    return cell | {"tensors": [], "deterministic": None}

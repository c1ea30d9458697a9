"""Check the command that verifies an implementation in a process of its own, whatever it does."""

import argparse
import contextlib
import csv
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
import types
from concurrent import futures
from functools import partial
from pathlib import Path

import pytest

from harness import files
from harness.calls.cell import share, sweep
from harness.cli import UserError
from harness.machine import gpu_lock
from harness.measure import __main__ as measure
from harness.measure.gate import Gate
from harness.project import fingerprint
from harness.results import hung, parts, reports, withdrawn
from harness.results.choices import FOLDERS, KEEP, ONE_COMPILER
from harness.summarize.__main__ import summarize
from harness.verify import __main__ as verification
from harness.verify import worker
from harness.verify.messages import ChooseUnits, Chosen, UnitChecked
from harness.workers.messages import Failure, Hello
from ops._spec import PASSES, Cost, Tensor, make_case
from tests.support.measuring import ENVIRONMENT, OP, FakeMonitor, plan
from tests.support.tuners import tuner
from tests.support.verifying import KERNELS, OPS, verify
from tests.support.workflows import small, snakemake


def test_a_right_kernel_is_verified_in_the_interpreter(tree):
    done, report = verify(tree, "double", "ours", "--dtypes", "bfloat16", "float32,float16")
    assert done.returncode == 0, done.stderr
    assert (report["mode"], report["status"]) == ("interpreter", "ok")
    cells = [(cell["case"], cell["dtype"]) for cell in report["cells"]]
    assert cells == [(n, d) for n in ("N100", "N1000") for d in ("float32", "float16")]
    seed = report["seed"]
    assert done.stdout == f"verify double ours (interpreter): seed {seed}: 4 of 4 cells ok; ok\n"


@pytest.mark.parametrize("parts_of", [2, 3])
def test_the_parts_of_a_verification_make_up_the_whole(parts_of):
    made = worker.VerifyWorker("softmax", "torch_compile", 1)
    op, asked = made.op, (["bfloat16", "float32"], ["forward", "backward"])
    words = {"kinds": ["sweep", "drawn", "edge"], "most": 5, "drawn_seed": 3}
    whole = made.choose(False, *asked, **words)
    assert whole.elsewhere == []
    here = []
    for number in range(1, parts_of + 1):
        plan = made.choose(False, *asked, part=[number, parts_of], **words)
        assert plan.units == whole.units
        mine = set(range(len(plan.units))) - set(plan.elsewhere)
        here.append(mine)
        timed = {
            (plan.units[n][0]["case"], plan.units[n][0]["dtype"])
            for n in mine
            if plan.units[n][0]["kind"] != "edge"
        }
        cells = share(sweep(op, *asked, 5, 3), number, parts_of)
        assert timed == {(each.case.name, each.dtype) for each in cells}
        edges = sum(plan.units[n][0]["kind"] == "edge" for n in mine)
        assert abs(edges - 10 / parts_of) < 1
    assert sorted(itertools.chain(*here)) == list(range(len(whole.units)))


@pytest.mark.parametrize("impl", ["ours", "picky"])
def test_a_part_of_a_baseline_leaves_cells_to_the_others_and_one_of_ours_none(tree, impl):
    found = []
    for part in ("1/2", "2/2"):
        options = ("--dtypes", "float16", "--part", part)
        _, report = verify(tree, "double", impl, *options)
        cells = {cell["case"]: cell for cell in report["cells"]}
        assert list(cells) == ["N100", "N1000"]
        left = {cell["reason"] for cell in cells.values() if cell["status"] == "unreached"}
        assert left == (set() if impl == "ours" else {parts.ELSEWHERE})
        found.append([cell["status"] for cell in cells.values()])
    if impl == "ours":
        assert found == [["ok", "ok"]] * 2
    else:
        assert found == [["oom", "unreached"], ["unreached", "ok"]]


def test_a_wrong_kernel_fails_and_names_its_worst_cell(tree):
    done, report = verify(tree, "broken", "ours", "--dtypes", "float32", "--max-cases", "1")
    assert done.returncode == 1
    assert report["status"] == report["cells"][0]["status"] == "inaccurate"
    assert len(report["cells"]) == 1 and report["cells"][0]["tensors"][0]["ratio"] is None
    last = done.stdout.splitlines()[-1]
    assert "0 of 1 cells ok; inaccurate: N100 float32 forward: out has inf or NaN" in last


def test_a_wrong_kernel_fails_the_study_and_is_not_timed(tmp_path):
    root = small(tmp_path / "tree")
    (root / "ops/toy.py").write_text(OPS.replace("EDGE, ())", "EDGE, EDGE)"))
    (root / "kernels/toy.py").write_text(KERNELS)
    built = root / "results/study/build/toy"
    built.mkdir(parents=True)
    built.with_suffix(".json").touch()
    wanted = ("measure=True", "ops=[broken]", "baselines=[]", "dtypes=[float32]")
    done = snakemake(root, "results/study/raw/broken.csv", "--config", *wanted)
    assert done.returncode != 0
    assert "Verify broken of ours" in done.stderr and "Measure broken" not in done.stderr
    assert "0 of 2 cells ok; inaccurate: N100 float32 forward: out has inf or NaN" in done.stderr
    assert not list((root / "results/study").glob("*/broken*/*.json"))


def test_a_baseline_may_die_refuse_or_run_out_of_memory(tree):
    done, report = verify(tree, "double", "picky")
    assert done.returncode == 0, done.stderr
    cells = [(cell["status"], cell["reason"]) for cell in report["cells"]]
    assert cells == [
        ("crashed", "died by SIGABRT"),
        ("oom", "no room"),
        ("unsupported", "only halves"),
        ("ok", ""),
    ]
    assert (report["status"], report["mode"]) == ("crashed", "cpu")
    assert report["impl_version"]


def test_several_processes_find_what_one_does(tree):
    one, three = (
        verify(tree, "double", "picky", "--seed", "5", *more) for more in ((), ("--jobs", "3"))
    )
    for done, report in (one, three):
        assert done.returncode == 0, done.stderr
        report.pop("spent_s")
    assert three[1] == one[1] and len(one[1]["cells"]) == 4


@pytest.mark.parametrize("jobs, compilers", [("1", None), ("3", "1")])
def test_each_of_several_processes_compiles_by_itself(monkeypatch, tmp_path, jobs, compilers):
    """Else each would start as many compilers as there are cores."""
    (name,) = ONE_COMPILER
    monkeypatch.setenv(name, "restored at the end")
    monkeypatch.delenv(name)
    seen = []

    def verify(arguments, mode):
        seen.append(os.environ.get(name))
        raise UserError("enough")

    out = str(tmp_path / "report.json")
    command = ["verify", "--op", "add", "--impl", "ours", "--out", out, "--jobs", jobs]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(verification, "verify", verify)
    with pytest.raises(UserError, match="enough"):
        verification.main()
    assert seen == [compilers]


def test_a_second_attempt_follows_several_processes(tree):
    """The server of the workers outlives the thread that asked for it first."""
    program = (
        "import argparse; from harness.verify import __main__ as v\n"
        "given = argparse.Namespace(op='double', impl='ours', seed=1, jobs=3, cell_timeout_s=60.0,"
        " edge_only=False, dtypes=['float32'], passes=['forward'], max_cases=None, drawn=None,"
        " part=None, sweep_s=None, ordinary_s=None, hostile_s=None, hung={})\n"
        "with v._surroundings('interpreter', 'shared', None, None):\n"
        "    for spare in (False, True):\n"
        "        print(len(v._run(given, 'interpreter', v._Queue({}), spare)[1]))\n"
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "2"], done.stderr


def test_units_are_handed_out_once_and_no_more_after_the_end():
    queue, plan = verification._Queue({1: ["done"]}), Chosen("cpu", [[], [], [], []], {})
    with futures.ThreadPoolExecutor(4) as pool:
        taken = list(pool.map(lambda _: queue.take(plan), range(4)))
    assert sorted(taken, key=str) == [0, 2, 3, None]
    late, ended = verification._Queue({}), []
    worker, unborn = (
        types.SimpleNamespace(pid=pid, send_sigkill=lambda pid=pid: ended.append(pid))
        for pid in (7, None)
    )
    with late.served_by(worker), late.served_by(unborn):
        first = late.closed_for(KeyboardInterrupt())
    assert late.closed_for(UserError("died")) is first
    assert late.take(plan) is None and ended == [7]


def test_a_fault_in_one_lane_ends_all(monkeypatch, tree):
    units = [[{"kind": "edge", "hostile": False}]] * 50
    ran, both = [], threading.Barrier(2)

    class Worker:
        pid = None

        def answer(self, limit_s):
            return Hello("1")

        def log_tail(self):
            return ""

    def ask(worker, limit_s, request):
        if isinstance(request, ChooseUnits):
            both.wait(60)
            return Chosen("a GPU", units, {})
        ran.append(request.unit)
        if len(ran) == 1:
            return Failure("unsupported", "no")
        time.sleep(0.01)
        return UnitChecked([{"status": "ok"}], True)

    monkeypatch.setattr(verification, "_worker", lambda _: contextlib.nullcontext(Worker()))
    monkeypatch.setattr(verification, "_ask", ask)
    arguments = argparse.Namespace(
        op="double", impl="ours", cell_timeout_s=60.0, edge_only=False, dtypes=["float32"],
        passes=["forward"], max_cases=None, part=None, drawn=None, jobs=2, ordinary_s=None,
        hung={},
    )  # fmt: skip
    with pytest.raises(UserError, match="double ours: no"):
        verification._run(arguments, "gpu", verification._Queue({}), spare=False)
    assert len(ran) < 10


def test_a_seed_is_fresh_each_time_and_can_be_repeated(tree):
    first, second = (verify(tree, "double", "skewed")[1] for _ in range(2))
    assert first["seed"] != second["seed"]
    done, again = verify(tree, "double", "skewed", "--seed", str(first["seed"]))
    for report in (first, again):
        assert set(report.pop("spent_s")) == {"ordinary"}
    assert again == first and f"seed {first['seed']}: 2 of 4 cells ok" in done.stdout


def test_a_baseline_that_is_wrong_in_case_is_not_timed_there_and_shown(tree, tmp_path, monkeypatch):
    """Follow a wrong case from harness.verify through the gate to harness.summarize."""
    impls = ["ours", "ours_twin", "skewed"]
    for impl in ("ours", "skewed"):
        done, report = verify(tree, "double", impl)
        assert done.returncode == 0
        # Mark the report as one of a machine with a GPU.
        files.write_json(tmp_path / "verify" / "double" / f"{impl}.json", report | {"mode": "gpu"})
    cases = (make_case(N=100), make_case(N=1000))
    op = dataclasses.replace(OP, name="double", inputs={"x": Tensor("N")}, sweep=cases)
    op = dataclasses.replace(op, cost=lambda *a: Cost(10**6, 10**6, 10**3))
    cells = list(sweep(op, ["float32"], ["forward"], None))
    origin = measure.origin_of("double", ENVIRONMENT, [])
    out = tmp_path / "raw" / "double.csv"
    gate = Gate(
        tmp_path / "verify", "double", impls, partial(fingerprint.implementation, tree, "toy")
    )
    a_plan = plan(impls, op=op, family="toy", cells=cells)
    measure.measure(a_plan, gate, FakeMonitor(), origin, out, time.monotonic())
    files.write_json(tmp_path / "environment.json", ENVIRONMENT)
    # The baseline is of that tree, and a report on one that is in none is left out.
    monkeypatch.setattr(reports, "ROOT", tree)
    summarize(tmp_path, tmp_path / "recorded")

    def rows(name):
        with (tmp_path / name).open(newline="") as file:
            return list(csv.DictReader(file))

    (wrong,) = (r for r in rows("summary.csv") if (r["impl"], r["case"]) == ("skewed", "N1000"))
    assert wrong["status"] == "inaccurate" and wrong["device_us"] == ""
    assert re.fullmatch("out is .* times as far .*", wrong["reason"])
    others = [r for r in rows("summary.csv") if r is not wrong and r != wrong]
    assert len(others) == 5 and all(r["status"] == "ok" and r["device_us"] for r in others)
    (shown,) = (r for r in rows("verification.csv") if r["impl"] == "skewed")
    assert (shown["status"], shown["cells"], shown["passed"]) == ("inaccurate", "4", "2")


def test_cells_left_out_by_a_time_limit_are_named_and_are_no_fault(tree):
    done, report = verify(tree, "double", "slow", "--ordinary-s", "0.01")
    assert done.returncode == 0, done.stderr
    late = ("unreached", "time limit of 0.01 s")
    cells = [(cell["status"], cell["reason"]) for cell in report["cells"]]
    assert cells == [("ok", ""), late, late, late]
    assert (report["status"], report["reason"]) == ("ok", "")
    assert done.stdout.endswith(": 1 of 4 cells ok, 3 not reached; ok\n")
    assert len(done.stdout.splitlines()) == 1
    assert verify(tree, "double", "slow")[1]["status"] == "inaccurate"
    limits = ("--ordinary-s", "0", "--hostile-s", "0")
    _, report = verify(tree, "double", "ours", *limits)
    assert [cell["status"] for cell in report["cells"]] == ["ok"] * 4


def test_hostile_cases_of_a_baseline_come_last_and_have_their_own_limit(tree):
    one = ("--dtypes", "float32")
    _, report = verify(tree, "mixed", "slow", *one, "--hostile-s", "0.01")
    found = [(cell["case"], cell["hostile"], cell["status"]) for cell in report["cells"]]
    assert found == [
        ("N100", False, "ok"),
        ("N1000", False, "inaccurate"),
        ("N0", True, "ok"),
        ("N100-large", True, "unreached"),
    ]
    assert set(report["spent_s"]) == {"ordinary", "hostile"} and report["guard"] == withdrawn.GUARD
    # Ours has no limit, so its cases stay in the order of its file.
    _, report = verify(tree, "mixed", "ours", *one)
    assert [cell["case"] for cell in report["cells"]] == ["N0", "N100-large", "N100", "N1000"]


def test_cells_that_will_be_timed_are_verified_first(monkeypatch):
    clock = itertools.count(step=10)
    worker = types.SimpleNamespace(answer=lambda limit_s: Hello("1"), units=[])

    def ask(worker, limit_s, request):
        blank = {"case": "N1", "dtype": "float32", "pass": "forward", "status": "ok", "reason": ""}
        blank |= {"hostile": True}
        if isinstance(request, ChooseUnits):
            kinds = request.kinds
            worker.units = [[blank | {"kind": kind}] for kind in kinds for _ in range(2)]
            return Chosen("a GPU", worker.units, {})
        return UnitChecked(worker.units[request.unit], True)

    monkeypatch.setattr(verification, "_worker", lambda _: contextlib.nullcontext(worker))
    monkeypatch.setattr(verification, "_ask", ask)
    monkeypatch.setattr(verification.ledger, "take", lambda *_: [])
    monkeypatch.setattr(verification.time, "monotonic", lambda: next(clock))
    arguments = argparse.Namespace(
        op="double", impl="slow", hostile_s=5.0, sweep_s=None, cell_timeout_s=60.0,
        edge_only=False, dtypes=["float32"], passes=["forward"], max_cases=None, drawn=None, jobs=1,
        part=None,
        hung={},
    )  # fmt: skip

    def run():
        _, units = verification._run(arguments, "gpu", verification._Queue({}), spare=False)
        return [(cells[0]["kind"], cells[0]["status"]) for _, cells in sorted(units.items())]

    timed, late = [("sweep", "ok")] * 2 + [("drawn", "ok")] * 2, ("edge", "unreached")
    # Either class has a limit of its own, and its own seconds count.
    assert run() == [*timed, ("edge", "ok"), late]
    arguments.sweep_s = 5.0
    cut = [("sweep", "ok"), ("sweep", "unreached"), *[("drawn", "unreached")] * 2]
    assert run() == [*cut, ("edge", "ok"), late]
    arguments.sweep_s = 300.0
    arguments.hostile_s = 25.0
    assert run() == [*timed, *[("edge", "ok")] * 2]
    arguments.impl = "ours"
    assert run() == [*[("edge", "ok")] * 2, *timed]


CELLS = [
    (kind, case, pass_)
    for kind, case in (("sweep", "N1"), ("sweep", "N2"), ("drawn", "N3"), ("edge", "N4"))
    for pass_ in PASSES
]


def told(folder, hung, **changes):
    """Write the report of a library beside its choices; return the folder of these."""
    reason = "compiling took longer than 720 s"
    cells = [{"cell": name, "status": "hung", "reason": reason} for name in hung]
    # These may depend on the neighbours of that moment.
    others = ("N2 float32 both", "crashed"), ("N3 float32 forward", "oom")
    cells += [{"cell": name, "status": status, "reason": "no"} for name, status in others]
    report = {"op": "double", "impl": "slow", "code_sha256": "now", "gpu": {"uuid": "GPU-00-fake"}}
    report |= {"date": "2026-11-29T00:00:00Z", "cells": cells} | changes
    (folder / "slow.json").write_text(json.dumps(report))
    return folder / "slow"


@pytest.mark.parametrize("case", ["N1", "N3", "N4"])
@pytest.mark.parametrize("passes", [PASSES, PASSES[:1], PASSES[1:2]])
def test_a_cell_that_hung_while_its_library_tuned_itself_is_not_called(
    monkeypatch, tmp_path, case, passes
):
    """As seen on a GPU: one cell of AdamW hung for 720 s, for 180 s, and here for 300 s again."""
    calls = []
    worker = types.SimpleNamespace(answer=lambda limit_s: Hello("1"))
    blanks = [
        {"case": name, "dtype": "float32", "pass": pass_, "kind": kind, "hostile": False}
        | {"status": "ok", "reason": ""}
        for kind, name, pass_ in CELLS
    ]
    units = [list(group) for _, group in itertools.groupby(blanks, lambda blank: blank["case"])]

    def ask(worker, limit_s, request):
        if isinstance(request, ChooseUnits):
            return Chosen("a GPU", units, {})
        wanted = request.passes or list(PASSES)
        rows = [row for row in units[request.unit] if row["pass"] in wanted]
        calls.extend((row["case"], row["pass"]) for row in rows)
        return UnitChecked(rows, True)

    monkeypatch.setattr(verification, "_worker", lambda _: contextlib.nullcontext(worker))
    monkeypatch.setattr(verification, "_ask", ask)
    monkeypatch.setattr(verification.ledger, "take", lambda *_: [])
    lost = [f"{case} float32 {pass_}" for pass_ in passes]
    arguments = argparse.Namespace(
        op="double", impl="slow", sweep_s=None, ordinary_s=None, cell_timeout_s=60.0, jobs=1,
        edge_only=False, dtypes=["float32"], passes=PASSES, max_cases=None, part=None, drawn=None,
        hung=hung.cells(told(tmp_path, lost), "now"),
    )  # fmt: skip
    _, found = verification._run(arguments, "gpu", verification._Queue({}), spare=False)
    rows = {(row["case"], row["pass"]): row for unit in found.values() for row in unit}
    assert len(rows) == len(CELLS) == sum(map(len, found.values()))
    # Nothing was tuned for an edge case.
    not_called = {(case, pass_) for pass_ in passes if case != "N4"}
    assert set(calls) == rows.keys() - not_called and len(calls) == len(set(calls))
    marked = {key for key, row in rows.items() if row["status"] == "hung"}
    assert marked == not_called
    reasons = {rows[key]["reason"] for key in marked}
    assert reasons <= {"compiling took longer than 720 s"}


def test_only_a_report_of_the_code_at_hand_says_what_hangs(tmp_path):
    names = ["N1 float32 forward"]
    assert hung.cells(told(tmp_path, names), "now").keys() == set(names)
    assert hung.cells(told(tmp_path, names, code_sha256="older"), "now") == {}
    assert hung.cells(tmp_path / "absent", "now") == hung.cells(None, "now") == {}
    (tmp_path / "slow.json").write_text("{}")
    with pytest.raises(UserError, match=r"slow\.json: has no 'op'"):
        hung.cells(tmp_path / "slow", "now")


def test_the_command_reads_the_report_beside_the_choices(monkeypatch, tmp_path):
    code = fingerprint.implementation(verification.ROOT, "vector", "torch_compile")
    folder, seen = told(tmp_path, ["N1 float32 forward"], code_sha256=code), []

    def verify(arguments, mode):
        seen.append(arguments.hung)
        raise UserError("enough")

    command = ["verify", "--op", "scale", "--impl", "torch_compile", "--choices", str(folder)]
    monkeypatch.setattr(sys, "argv", [*command, "--out", str(tmp_path / "report.json")])
    monkeypatch.setattr(verification, "verify", verify)
    with pytest.raises(UserError, match="enough"):
        verification.main()
    assert [found.keys() for found in seen] == [{"N1 float32 forward"}]


def test_an_absent_library_is_a_status(tree):
    done, report = verify(tree, "double", "absent")
    assert done.returncode == 0, done.stderr
    assert report["status"] == "unavailable" and report["cells"] == []
    assert "a_library_that_is_not_here" in report["reason"]


@pytest.mark.parametrize("remedy", ["in turn", "alone", None])
def test_memory_that_runs_out_in_company_is_asked_for_again(monkeypatch, remedy, capfd):
    attempts = []

    @contextlib.contextmanager
    def surroundings(mode, attempt, *_):
        attempts.append(attempt)
        yield

    def run(arguments, mode, queue, spare):
        assert spare == (attempts[-1] != "shared")
        fine = {"case": "N1", "dtype": "float32", "pass": "forward", "tensors": []}
        assert set(queue.units) == (set() if attempts[-1] == "shared" else {0})
        queue.spend("ordinary", 2.0)
        status = "ok" if attempts[-1] == remedy else "oom"
        cells = {1: [fine | {"status": status, "reason": ""}], 0: [fine | {"status": "ok"}]}
        return {"device": "a GPU"}, cells

    monkeypatch.setattr(verification, "_surroundings", surroundings)
    monkeypatch.setattr(verification, "_run", run)
    given = {"op": "double", "impl": "ours", "seed": 0, "choices": None, "board": None, "jobs": 1}
    arguments = argparse.Namespace(**given)
    report = verification.verify(arguments, "gpu")
    assert attempts == ["shared", "in turn", "alone"][: 2 if remedy == "in turn" else 3]
    assert report["status"] == ("ok" if remedy else "oom")
    assert report["spent_s"] == {"ordinary": 2 * len(attempts)}
    told = [f"verify double ours: 1 of 2 cases found no memory ({name})" for name in attempts[:-1]]
    assert capfd.readouterr().err.splitlines() == told
    assert [cell["status"] for cell in report["cells"]] == ["ok", report["status"]]
    attempts.clear()
    assert verification.verify(arguments, "cpu")["status"] == "oom" and attempts == ["shared"]


@pytest.mark.parametrize("jobs", [1, 8])
def test_verifying_gives_way_to_a_job_that_waits_for_the_gpu_alone(monkeypatch, jobs):
    """Each turn runs a unit, on any GPU; time limits count the seconds of all turns.

    So it is where several processes found no memory, and one after the other goes on.
    """
    units = [[{"kind": "sweep", "case": f"N{n}"}] for n in range(4)]
    turns, asked, attempts, processes = [], [], [], []
    full = jobs > 1

    @contextlib.contextmanager
    def surroundings(mode, attempt, *_):
        attempts.append(attempt)
        if full and attempt == "shared":
            turns.append([])
            yield lambda: False
            turns.clear()
            return
        turns.append([])
        yield lambda: len(turns) < 3

    def ask(worker, limit_s, request):
        if isinstance(request, ChooseUnits):
            return Chosen("a GPU", units, {})
        turns[-1].append(request.unit)
        found = {"status": "oom" if full and attempts[-1] == "shared" else "ok", "reason": ""}
        return UnitChecked([units[request.unit][0] | found | {"tensors": []}], True)

    def take(done, declared, ask):
        asked.append(sorted(done))
        return {}

    worker = types.SimpleNamespace(answer=lambda limit_s: Hello("1"), pid=None)
    monkeypatch.setattr(verification, "_surroundings", surroundings)

    def made(_):
        processes.append(attempts[-1])
        return contextlib.nullcontext(worker)

    monkeypatch.setattr(verification, "_worker", made)
    monkeypatch.setattr(verification, "_ask", ask)
    monkeypatch.setattr(verification.ledger, "take", take)
    clock = itertools.count()
    monkeypatch.setattr(verification.time, "monotonic", lambda: next(clock))
    arguments = argparse.Namespace(
        op="double", impl="slow", seed=0, choices=None, jobs=jobs, cell_timeout_s=60.0, drawn=None,
        edge_only=False, dtypes=["float32"], passes=["forward"], max_cases=None, sweep_s=None,
        board=None, part=None, hung={},
    )  # fmt: skip
    report = verification.verify(arguments, "gpu")
    assert turns == [[0], [1], [2, 3]] and asked[-1] == [0, 1, 2, 3]
    assert attempts == [*["shared"] * full, *["in turn" if full else "shared"] * 3]
    # A turn has one process, however many there were before.
    assert processes.count(attempts[-1]) == 3
    assert [cell["case"] for cell in report["cells"]] == ["N0", "N1", "N2", "N3"]
    # Several processes share a clock here that ticks at each look.
    assert full or report["spent_s"] == {"sweep": 4}


def test_verifying_gives_way_when_no_library_compiles_any_more(driver, monkeypatch):
    """As seen on GPUs: while one call compiled for minutes, nothing else ran."""
    for name in (*FOLDERS, *KEEP):
        monkeypatch.setenv(name, "of the user")
    # No wait is needed.
    monkeypatch.setattr(gpu_lock, "hold", partial(gpu_lock.hold, wait_s=0))
    # Both locks set it, and the first one ends first. The test must not leave it set.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    plan = Chosen("a GPU", [[{"case": f"N{n}"}] for n in range(9)], {})
    with contextlib.ExitStack() as waits, contextlib.ExitStack() as compiling:
        gpu = compiling.enter_context(gpu_lock.hold(exclusive=False, compiles=True))
        gpu_lock._mark(gpu, gpu_lock.AWAITED, waits)
        # It begins there, and goes on.
        with verification._surroundings("gpu", "shared", None, None) as awaited:
            queue = verification._Queue({}, awaited=awaited)
            assert [queue.take(plan) for _ in range(3)] == [0, 1, 2] and not queue.paused
            compiling.close()
            assert queue.take(plan) is None and queue.paused


def test_verifying_shares_the_gpu_until_memory_runs_out(monkeypatch):
    held = []

    @contextlib.contextmanager
    def hold(exclusive, rather):
        # The turn of any GPU will do.
        assert rather == (None if attempt == "in turn" else "GPU-of-the-op")
        held.append("alone" if exclusive else "shared")
        yield "a GPU"

    monkeypatch.setattr(gpu_lock, "hold", hold)
    turns = iter([False, True])

    def turn(gpu):
        held.append(gpu)
        return contextlib.nullcontext(next(turns))

    monkeypatch.setattr(gpu_lock, "turn", turn)
    monkeypatch.setattr(verification, "TURN_S", 0.0)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of the user")
    for name in KEEP:
        monkeypatch.setenv(name, "")
    for attempt in verification.ATTEMPTS:
        with verification._surroundings("gpu", attempt, None, "GPU-of-the-op") as awaited:
            assert (awaited is None) == (attempt == "alone")
            held.append(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]))
            assert held[-1].is_dir() and os.environ.items() >= KEEP.items()
    kept = [held.pop(index) for index in (8, 6, 1)]
    # The one whose turn it is not lets the GPU go before it asks again.
    assert held == ["shared", *["shared", "a GPU"] * 2, "alone"]
    assert len(set(kept)) == 3 and not any(path.exists() for path in kept)


def test_a_library_is_judged_by_a_copy_of_what_it_chose_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_lock, "hold", lambda *_, **__: contextlib.nullcontext("a GPU"))
    for name in (*FOLDERS, *KEEP):
        monkeypatch.setenv(name, "of the user")
    (tmp_path / "inductor").mkdir()
    (tmp_path / "inductor/chosen").touch()
    with verification._surroundings("gpu", "shared", tmp_path, None):
        seen = {name: Path(os.environ[name]) for name in FOLDERS}
        assert (seen["TORCHINDUCTOR_CACHE_DIR"] / "chosen").exists()
        assert not any(path.is_relative_to(tmp_path) for path in seen.values())
        assert len({path.parent for path in seen.values()}) == 1
    assert not any(path.parent.exists() for path in seen.values())


@pytest.mark.parametrize(
    ("op", "impl", "dtype"),
    [
        ("triple", "ours", "float32"),
        ("double", "nobody", "float32"),
        ("double", "ours", "flot32"),
    ],
)
def test_unknown_names_are_one_line(tree, op, impl, dtype):
    done, report = verify(tree, op, impl, "--dtypes", dtype)
    assert (done.returncode, report) == (2, None)
    assert done.stderr.startswith("tilewright: ") and len(done.stderr.splitlines()) == 1


def test_both_passes_are_verified_by_the_calls_of_the_backward_pass(monkeypatch):
    made, asked = worker.VerifyWorker("scale", "torch_eager", 1), []
    plain = worker.check.check

    def check(function, problem, pass_, *more):
        asked.append(pass_)
        return plain(function, problem, pass_, *more)

    monkeypatch.setattr(worker.check, "check", check)
    made.choose(gpu=False, dtypes=["float32"], passes=list(PASSES), kinds=["edge"], most=1)
    cells = made.check(0).cells
    assert asked == ["forward", "backward"]
    assert [cell["pass"] for cell in cells] == ["forward", "backward", "both"]
    alone = made.check(0, ["both"]).cells
    assert [cell["pass"] for cell in alone] == ["both"] and asked[2:] == ["both"]
    names = [[tensor["name"] for tensor in cell["tensors"]] for cell in cells]
    assert names == [["out"], ["out", "dx"], ["out", "dx"]]
    assert {cell["status"] for cell in cells} == {"ok"}


@pytest.mark.parametrize(
    ("kind", "right", "status", "ran"),
    [
        ("sweep", {1, 8}, "ok", {1, 4, 8}),
        ("edge", {8}, "ok", {8}),
        # Its own choice is the first.
        ("edge", {1}, "ok", {1, 4, 8}),
        ("edge", set(), "inaccurate", {1, 4, 8}),
    ],
)
def test_one_candidate_of_a_tuner_suffices_where_nothing_is_timed(kind, right, status, ran):
    """A library is wrong with its own choice, or it is not wrong."""
    made, tuned = worker.VerifyWorker("scale", "torch_eager", 1), tuner(1, 4, 8)
    plain = made.function

    def function(*args, **options):
        tuned.run(n=len(tuned.fn.ran))
        return plain(*args, **options) + (tuned.fn.ran[-1] not in right)

    made.function, made.op = function, dataclasses.replace(made.op, sweep=made.op.edge)
    made.choose(gpu=False, dtypes=["float32"], passes=["forward"], kinds=[kind], most=1)
    assert made.check(0).cells[0]["status"] == status
    assert set(tuned.fn.ran) == ran


def test_a_dtype_that_is_not_timed_comes_after_those_that_are():
    every = {"passes": ["forward"], "kinds": ["sweep", "edge"]}
    dtypes = ["float32", "float16", "bfloat16"]

    def order(impl):
        made = worker.VerifyWorker("attention_varlen", impl, 1)
        blanks = made.choose(gpu=False, dtypes=dtypes, **every).units
        return [(cell["kind"], cell["hostile"], cell["dtype"] == "float32") for (cell,) in blanks]

    # The sweep has bfloat16 and float16.
    found = order("torch_eager")
    edge = [key[1:] for key in found if key[0] == "edge"]
    assert [key for key, _ in itertools.groupby(edge)] == [
        (False, False), (False, True), (True, False), (True, True),
    ]  # fmt: skip
    assert not any(is_untimed for kind, _, is_untimed in found if kind == "sweep")
    edge = [key[1:] for key in order("ours") if key[0] == "edge"]
    assert edge != sorted(edge)

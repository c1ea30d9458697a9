"""Compare two runs: each exit code, other GPUs, other ops, and runs that cannot be read."""

import contextlib
import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from harness import cli
from harness.compare import __main__ as compare
from harness.compare import changes, text
from harness.results import times
from harness.summarize import comparisons
from tests.support import networks_run, synthetic

OP = "softmax"


def other(row, impls=(), factor=1.0, **values):
    """A row with the time of some implementations multiplied, and other values."""
    if row["impl"] in impls and row["device_us"]:
        values["device_us"] = repr(float(row["device_us"]) * factor)
    return row | values


def write(folder, rows, op=OP, **where):
    synthetic.write_raw(folder, op, rows, **where)
    return folder


def run(*arguments):
    """Run the command in this process, because starting a process takes longer."""
    words, out, err = ["compare", *map(str, arguments)], io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        patch.setattr(sys, "argv", words)
        cli.run(compare.main)
    return subprocess.CompletedProcess(words, end.value.code, out.getvalue(), err.getvalue())


def table(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


OURS = ("ours", "ours_twin")


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return write(tmp_path_factory.mktemp("old"), synthetic.rows_of(OP, seed=1))


@pytest.fixture(scope="module")
def again():
    """Times of a second run of the same code."""
    return synthetic.rows_of(OP, seed=2)


def test_the_same_code_twice_is_the_same(old, again, tmp_path):
    done = run(old, write(tmp_path / "new", again))
    assert (done.returncode, done.stderr) == (0, "")
    assert "The same or better" in done.stdout
    assert "torch_eager tells" in done.stdout
    assert len(done.stdout.splitlines()) <= 55
    # The two lines that name the folders are as long as those names.
    assert max(map(len, done.stdout.splitlines()[3:])) <= 80
    assert "\x1b" not in done.stdout


def test_a_run_is_the_same_as_itself(old):
    assert run(old, old).returncode == 0


def test_the_command_does_the_same(old, again, tmp_path):
    lost = [other(row, OURS, 1.2) for row in again]
    for new in (write(tmp_path / "new", lost), tmp_path / "nowhere"):
        call = [sys.executable, "-m", "harness.compare", str(old), str(new)]
        done, here = subprocess.run(call, capture_output=True, text=True), run(old, new)
        assert (done.returncode, done.stdout, done.stderr) == (
            here.returncode,
            here.stdout,
            here.stderr,
        )


def test_one_slow_cell_is_a_regression_and_is_listed_first(old, again, tmp_path):
    slow = [
        other(row, OURS if (row["case"], row["dtype"]) == ("M4096-N4096", "float16") else (), 1.2)
        for row in again
    ]
    done = run(old, write(tmp_path / "new", slow), "--csv", tmp_path / "out.csv")
    assert done.returncode == 1
    assert "Regression: 2 cells slower" in done.stdout
    lines = done.stdout.splitlines()
    first = next(place for place, line in enumerate(lines) if "M4096" in line)
    assert "M4096-N4096 float16" in lines[first] and lines[first - 1].endswith("slower")
    found = [row for row in table(tmp_path / "out.csv") if row["verdict"] == "slower"]
    assert {row["case"] for row in found} == {"M4096-N4096"}
    assert all(0.8 < float(row["ratio"]) < 0.87 for row in found)


def test_faster_everywhere_is_no_regression(old, again, tmp_path):
    done = run(old, write(tmp_path / "new", [other(row, OURS, 0.9) for row in again]))
    assert done.returncode == 0
    assert "faster" in done.stdout


def test_a_slow_mean_is_a_regression_though_no_cell_shows_it(old, again, tmp_path):
    slow = [other(row, OURS, 1.025) for row in again]
    done = run(old, write(tmp_path / "new", slow))
    assert done.returncode == 1
    assert "mean of softmax forward" in done.stdout


def test_each_ratio_stands_with_its_interval(old, again, tmp_path):
    """Ratios of cells, means, and claims in both runs: as the CSV has it, offsets included."""
    slow = [other(row, OURS, 1.025) for row in again]
    new = write(tmp_path / "new", slow)
    page = run(old, new, "--all", "--csv", tmp_path / "out.csv").stdout.splitlines()
    means, said = (page.index(next(line for line in page if line.startswith(begin))) for begin in
                   ("Geometric means", "Claims of the first against each"))  # fmt: skip
    rows = [row for row in table(tmp_path / "out.csv") if row["kind"] == "mean"]
    assert rows
    for row in rows:
        line = next(x for x in page[means:said] if f"{row['op']} {row['pass']} " in x)
        assert f" {float(row['ci_lo']):.3f}..{float(row['ci_hi']):.3f} " in line
    for folder, place in ((old, 0), (new, 1)):
        study = times.measurements(folder)
        one = changes.Run.of(study)
        claimed = comparisons.claim_rows(one.compared, one.summary)
        assert claimed
        claimed += comparisons.best_rows(one.compared, one.summary)
        for row in claimed:
            first, best = f"{row['op']} {row['pass']} ", row["against"] == "best"
            blocks = (" ".join(page[n : n + 3]) for n in range(said, len(page)) if first in page[n])
            (block,) = [
                block for block in blocks
                if re.search(rf"\b{row['baseline']}\b", block) and ("the best" in block) == best
            ]  # fmt: skip
            interval = re.findall(r"[\d.]+\.\.[\d.]+", block)[place]
            assert interval == f"{row['ci_lo']:.3f}..{row['ci_hi']:.3f}"


def test_a_slow_machine_that_slows_the_control_alike_is_no_regression(old, again, tmp_path):
    every = {row["impl"] for row in again}
    done = run(old, write(tmp_path / "new", [other(row, every, 1.03) for row in again]))
    assert done.returncode == 3
    assert "undecided" in done.stdout


def test_a_cell_of_ours_that_lost_its_time_is_a_regression(old, again, tmp_path):
    lost = [row for row in again if (row["case"], row["impl"]) != ("M4096-N256", "ours")]
    reason = {"status": "crashed", "reason": "CUDA error: misaligned address", "device_us": ""}
    lost += [
        row | reason | {"call_us": ""}
        for row in again
        if (row["case"], row["impl"], row["block"]) == ("M4096-N256", "ours", 0)
    ]
    for new in (
        write(tmp_path / "same", lost),
        write(tmp_path / "elsewhere", lost, gpu="Other GPU"),
    ):
        done = run(old, new)
        assert done.returncode == 1
        plain = " ".join(done.stdout.split())
        assert "lost: ok, now crashed CUDA error: misaligned address" in plain
    back = " ".join(run(new.parent / "same", old).stdout.split())
    assert "gained: crashed CUDA error: misaligned address, now ok" in back


def test_a_cell_that_one_run_did_not_reach_is_no_regression(old, again, tmp_path):
    """A closed measurement says as little of it as one that was never asked."""
    closed = [row for row in again if row["case"] != "M4096-N256"]
    nothing = {"status": "unreached", "device_us": "", "call_us": "", "block": 0}
    unreached = [row | nothing for row in again if row["case"] == "M4096-N256"]
    once = {(row["dtype"], row["pass"], row["impl"]): row for row in unreached}
    new = write(tmp_path / "new", [*closed, *once.values()])
    done = run(old, new)
    assert done.returncode == 3
    assert "missing: 6 of softmax" in done.stdout
    done = run(new, old)
    assert done.returncode == 0
    assert "new: 6 of softmax" in done.stdout


def test_a_cell_that_neither_run_reached_is_not_missing(old, again):
    """The first run does not have it either."""
    rows, sidecar = times.measurements(old)[OP]
    nothing = {"status": "unreached", "device_us": None, "call_us": None}
    rows = [row | (nothing if row["case"] == "M4096-N256" else {}) for row in rows]
    run = changes.Run.of({OP: (rows, sidecar)})
    found = [row for row in changes.cell_rows(run, run) if row["case"] == "M4096-N256"]
    assert {(row["verdict"], row["new_status"]) for row in found} == {("untimed", "unreached")}


def with_networks(study, folder, seed, factor=1.0, **where):
    """Return a study with whole networks, of which no two times agree. factor: of ours there."""
    rng = np.random.default_rng(seed)
    for op, cases in networks_run.CASES.items():
        rows = [
            other(row, OURS, factor) for case in cases for row in networks_run.raw_rows(op, *case)
        ]
        wild = {key: math.exp(rng.normal(0, 0.3)) for key in {(r["impl"], r["case"]) for r in rows}}
        rows = [other(row, [row["impl"]], wild[row["impl"], row["case"]]) for row in rows]
        write(folder, rows, op, **where)
    return study | times.measurements(folder)


@pytest.mark.parametrize("gpu", ["Synthetic GPU", "Other GPU"])
def test_networks_teach_no_noise_and_decide_nothing(old, again, tmp_path, gpu):
    new = write(tmp_path / "new", [other(row, OURS, 0.97) for row in again], gpu=gpu)
    studies = [times.measurements(folder) for folder in (old, new)]
    alone = [changes.Run.of(study) for study in studies]
    both = [
        changes.Run.of(with_networks(study, tmp_path / str(seed), seed, 1 + seed, gpu=where))
        for seed, (study, where) in enumerate(zip(studies, ("Synthetic GPU", gpu), strict=True))
    ]
    rows, (means, p) = changes.cell_rows(*both), changes.mean_rows(*both)
    whole = [row for row in rows if row["op"] in networks_run.CASES]
    assert {row["verdict"] for row in whole} == {"undecided"}
    # Text, since nan is not itself.
    assert str([row for row in rows if row not in whole]) == str(changes.cell_rows(*alone))
    kept = [row for row in means if row["op"] not in networks_run.CASES]
    assert str((kept, p)) == str(changes.mean_rows(*alone))
    assert p < 0.05
    assert str(changes.claim_rows(*both)) == str(changes.claim_rows(*alone)) != "[]"
    networks = [changes.Run.of({op: run[op] for op in networks_run.CASES}) for run in
                (with_networks(study, tmp_path / "0", 1) for study in studies)]  # fmt: skip
    assert changes.control(*networks) == "" and changes.mean_rows(*networks)[1] == 1.0


def test_shapes_that_were_drawn_for_one_run_are_not_missing_in_the_other(old, again):
    rows, sidecar = times.measurements(old)[OP]
    drawn = [row | {"set": "drawn", "case": f"{row['case']}1"} for row in rows[:200]]
    runs = [changes.Run.of({OP: (found, sidecar)}) for found in ([*rows, *drawn], rows)]
    assert runs[0].summary == runs[1].summary
    rows = changes.cell_rows(*runs)
    assert {row["verdict"] for row in rows} <= {"same", "undecided"}


def test_a_claim_on_times_by_events_is_compared_with_its_like(old):
    """Half of the cells by events: two claims of one op, pass and baseline."""
    rows, sidecar = times.measurements(old)[OP]
    events = "events: the host takes part"
    for row in rows:
        if row["impl"] == "torch_eager" and row["dtype"] == "float16" and row["device_us"]:
            row |= {"device_us": 3 * row["device_us"], "reason": events}
    run = changes.Run.of({OP: (rows, sidecar)})
    found = [row for row in changes.claim_rows(run, run) if row["baseline"] == "torch_eager"]
    found = [row for row in found if row["against"] == "each"]
    assert len(found) == 4
    assert all(row["old_ratio"] == row["new_ratio"] for row in found)


def test_missing_cells_are_listed_and_leave_it_undecided(old, again, tmp_path):
    fewer = [row for row in again if row["case"] != "M4096-N256"]
    new = write(tmp_path / "new", fewer)
    done = run(old, new, "--csv", tmp_path / "out.csv")
    assert done.returncode == 3
    assert "missing: 6 of softmax" in done.stdout
    gone = [row for row in table(tmp_path / "out.csv") if row["verdict"] == "missing"]
    assert {(row["case"], row["old_status"], row["new_status"]) for row in gone} == {
        ("M4096-N256", "ok", "absent")
    }
    # A cell that only the second run has is listed and is no fault.
    done = run(new, old)
    assert done.returncode == 0
    assert "new: 6 of softmax" in done.stdout


def test_without_a_control_times_decide_nothing(old, again, tmp_path):
    renewed = [row if row["impl"] in OURS else row | {"impl_version": "9"} for row in again]
    done = run(old, write(tmp_path / "new", renewed))
    assert done.returncode == 3
    assert "no baseline is the same in both" in done.stdout


def test_on_another_gpu_ratios_and_claims_are_compared(old, again, tmp_path):
    every = {row["impl"] for row in again}
    half = [other(row, every, 2.0) for row in again]
    new = write(tmp_path / "new", half, gpu="Other GPU")
    done = run(old, new, "--csv", tmp_path / "out.csv")
    assert done.returncode == 0
    assert "Several GPU models" in done.stdout
    assert "of 6 claims none fell" in done.stdout
    cells = [row for row in table(tmp_path / "out.csv") if row["kind"] == "cell"]
    assert {row["baseline"] for row in cells} == {"torch_compile", "torch_eager"}
    assert all(row["unit"] == "ratio" and row["new_pct_sol"] for row in cells)
    assert not {row["verdict"] for row in cells} & {"higher", "lower"}


def test_on_another_gpu_a_claim_that_falls_is_a_regression(old, again, tmp_path):
    slow = [other(row, OURS, 2.5) for row in again]
    done = run(old, write(tmp_path / "new", slow, gpu="Other GPU"))
    assert done.returncode == 1
    assert "claim softmax forward torch_eager" in done.stdout
    assert "not reproduced" in done.stdout


def test_on_another_gpu_a_claim_that_is_not_tested_is_undecided(old, again, tmp_path):
    alone = [row for row in again if row["impl"] != "torch_eager"]
    done = run(old, write(tmp_path / "new", alone, gpu="Other GPU"))
    assert done.returncode == 3
    assert "not testable" in done.stdout


def test_all_rows_are_shown_when_asked_for(old, again, tmp_path):
    new = write(tmp_path / "new", again)
    short, full = run(old, new).stdout, run(old, new, "--all").stdout
    assert "--all shows them" in short
    assert "--all" not in full
    cells = len({(row["case"], row["dtype"], row["pass"]) for row in again})
    assert sum("M4096-" in line or "M32768-" in line for line in full.splitlines()) == cells


def test_the_table_is_aligned_and_its_csv_whole(old, again, tmp_path):
    done = run(old, write(tmp_path / "new", again), "--csv", tmp_path / "out.csv", "--all")
    lines = done.stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("  cell "))
    rows = lines[start + 1 : lines.index("", start)]
    for name in ("us", "% SOL", "old/new", "noise, p", "verdict"):
        place = lines[start].index(name)
        assert all(line[place - 1 : place] in (" ", "") for line in rows)
        assert all(line[place] != " " for line in rows[::2])
    kinds = [row["kind"] for row in table(tmp_path / "out.csv")]
    cells = len(rows) // 2
    assert {kind: kinds.count(kind) for kind in kinds} == {"cell": cells, "mean": 2, "claim": 6}


def test_a_wide_terminal_is_used_and_a_narrow_one_is_not_obeyed(old, again, tmp_path, monkeypatch):
    new, longest = write(tmp_path / "new", again), {}
    for columns in ("40", "80", "300"):
        monkeypatch.setenv("COLUMNS", columns)
        longest[columns] = max(map(len, run(old, new, "--all").stdout.splitlines()[3:]))
    assert longest["40"] == longest["80"] <= 80 and longest["300"] <= 120


def test_the_longest_names_fit_into_eighty_columns():
    """Every entry at its widest: the name of a cell gives way, and no number is cut."""
    row = dict.fromkeys(("op", "pass", "case", "dtype", "baseline"), "")
    row |= {"op": "linear_cross_entropy", "pass": "backward", "dtype": "bfloat16"}
    row |= {"case": "B16-H128-S16384-D128-causal-scaled", "baseline": "torch_compile_max"}
    row |= {"old": 12345.678, "new": 0.00012345, "old_pct_sol": 100.44, "new_pct_sol": 0.012345}
    row |= {"ratio": 0.123456, "ci_lo": 100.1234, "ci_hi": 200.2345, "noise": 0.1234}
    row |= {"p_holm": 0.0001, "verdict": "undecided"}
    claim = row | {"against": "best", "cells": 100, "of": 100, "outcome": "not reproduced"}
    for when in ("old", "new"):
        claim |= {f"{when}_ratio": 12.3456, f"{when}_verdict": "no difference"}
        claim |= {f"{when}_ci_lo": 100.1234, f"{when}_ci_hi": 200.2345}
    lines = text.page([row], [row | {"cells": 100}], [claim], every=True)
    assert max(map(len, lines)) <= 80
    page = "\n".join(lines)
    for number in ("1.235e+04", "0.0001234", "100.123..200.234", "12.3 %", "<0.001", "undecided"):
        assert number in page


def test_the_mean_over_all_weighs_an_op_once(old, again, tmp_path):
    """Both passes in one call twice as fast, and each of the two 3 % slower."""

    def proof(*passes):
        runs = []
        for name, factor in (("old", 1.0), ("new", 0.5)):
            alone, both = (1.0, factor) if name == "old" else (1.03, factor)
            rows = [other(row, OURS, alone) for row in again]
            rows += [
                other(row, OURS, both) | {"pass": "both"}
                for row in again
                if row["pass"] == "backward"
            ]
            rows = [row for row in rows if row["pass"] in passes]
            study = times.measurements(write(tmp_path / name, rows))
            runs.append(changes.Run.of(study))
        return changes.mean_rows(*runs)[1]

    assert proof("forward", "backward", "both") > 0.95
    # A loss has no separate backward pass, so `both` counts like any other pass.
    assert proof("forward", "both") < 0.01


def test_without_a_cell_of_the_mean_over_all_nothing_is_proven(old):
    """Both runs share calls of training only: `both` of an op whose backward pass failed."""
    rows, sidecar = times.measurements(old)[OP]
    rows = [row for row in rows if row["pass"] == "backward"]
    failed = [row | {"status": "crashed", "device_us": None} for row in rows]
    run = changes.Run.of({OP: ([*failed, *(row | {"pass": "both"} for row in rows)], sidecar)})
    means, p_worse = changes.mean_rows(run, run)
    assert [row["pass"] for row in means] == ["both"] and p_worse == 1.0


def test_drawn_shapes_are_not_compared(old):
    study = times.measurements(old)
    rows, sidecar = study[OP]
    apart = [row | {"case": "N12345", "set": "drawn"} for row in rows]
    alone, both = (changes.Run.of({OP: (found, sidecar)}) for found in (rows, [*rows, *apart]))
    assert list(both.summary) == list(alone.summary) == list(both.counted)


def test_claims_say_the_same_as_claims_csv(old, again, tmp_path):
    first, second = (
        changes.Run.of(study)
        for study in map(times.measurements, (old, write(tmp_path / "new", again)))
    )
    rows = changes.claim_rows(first, second)
    assert [row["outcome"] for row in rows] == ["reproduced"] * 6
    assert [row["against"] for row in rows] == ["best"] * 2 + ["each"] * 4
    assert all(row["cells"] == row["of"] for row in rows)


def rivals_of(old, again, factor, without=()):
    """The rows of claims against the best rival, where the new run has the rivals' times so."""
    study = times.measurements(old)
    rows = [other(row, [row["impl"]] if row["impl"] not in OURS else (), factor) for row in again]
    rows = [row for row in rows if row["impl"] not in without]
    runs = [changes.Run.of(study)]
    folder = old.parent / f"rivals{factor}{len(without)}"
    study = times.measurements(write(folder, rows))
    runs.append(changes.Run.of(study))
    return [row for row in changes.claim_rows(*runs) if row["against"] == "best"]


def test_claims_against_the_best_rival_are_compared(old, again):
    same = rivals_of(old, again, 1.0)
    assert [row["outcome"] for row in same] == ["reproduced"] * 2
    for row in same:
        assert row["baseline"] in ("torch_eager", "torch_compile")
        assert row["old_ratio"] == pytest.approx(row["new_ratio"], rel=0.02)
    fallen = rivals_of(old, again, 0.3)
    assert {row["old_verdict"] for row in same} == {"better"}
    assert [(row["new_verdict"], row["outcome"]) for row in fallen] == [
        ("worse", "not reproduced")
    ] * 2
    code, why = compare.verdict([], [], fallen, 1.0, on_times=False)
    assert code == compare.REGRESSION
    assert f"claim softmax forward the best ({fallen[0]['baseline']})" in why


def test_to_be_ahead_of_fewer_rivals_reproduces_nothing(old, again):
    fewer = rivals_of(old, again, 1.0, without=("torch_eager",))
    assert [row["outcome"] for row in fewer] == ["not testable"] * 2
    behind = rivals_of(old, again, 0.3, without=("torch_eager",))
    assert [row["outcome"] for row in behind] == ["not reproduced"] * 2


@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        ("better", "better", "reproduced"),
        ("better", "worse", "not reproduced"),
        ("worse", "better", "not reproduced"),
        ("better", "undecided", "undecided"),
        ("undecided", "better", "undecided"),
        ("better", "", "not testable"),
    ],
)
def test_the_outcome_of_a_claim(old, new, outcome):
    assert changes.outcome(old, new) == outcome


def test_a_claim_that_improves_is_no_regression():
    claim = {"op": OP, "pass": "forward", "baseline": "torch_eager", "outcome": "not reproduced"}
    risen = [claim | {"old_verdict": "worse", "new_verdict": "better"}]
    code, why = compare.verdict([], [], risen, 1.0, on_times=False)
    assert code == compare.SAME
    assert "none fell" in why


def test_a_run_that_decides_nothing_proves_nothing():
    claim = {"op": OP, "pass": "forward", "baseline": "torch_eager", "outcome": "undecided"}
    unsure = [claim | {"old_verdict": "undecided", "new_verdict": "better"}]
    for some in ([], unsure):
        code, why = compare.verdict([], [], some, 1.0, on_times=False)
        assert (code, why) == (compare.UNDECIDED, "Undecided: the first run decides no claim.")


def unusable(done, *words):
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) <= 2
    assert all(word in done.stderr for word in words), done.stderr


def test_a_missing_folder_is_unusable(old, tmp_path):
    unusable(run(old, tmp_path / "nowhere"), "nowhere: no such folder")
    unusable(run(old, tmp_path), "no CSV file")


def test_a_truncated_file_is_unusable(old, tmp_path):
    new = shutil.copytree(old, tmp_path / "new")
    path = new / "raw" / f"{OP}.csv"
    path.write_bytes(path.read_bytes()[:-1])
    unusable(run(old, new), f"{OP}.csv", "truncated")


def test_a_changed_number_is_unusable(old, tmp_path):
    new = shutil.copytree(old, tmp_path / "new")
    sidecar = new / "raw" / f"{OP}.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"csv_sha256": "0" * 64}))
    unusable(run(old, new), "SHA-256")


def test_runs_of_other_ops_are_unusable(old, tmp_path):
    new = write(tmp_path / "new", synthetic.rows_of("dot", seed=1), op="dot")
    unusable(run(old, new), "no cell of", "the same ops")

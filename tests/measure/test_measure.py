"""Check that a faulty implementation gets its status while the others keep their times."""

import dataclasses
import hashlib
import json
import os
import re

import pytest

from harness.calls.cell import Cell, sweep
from harness.cli import UserError
from harness.files import whole_file
from harness.measure import scheduler
from harness.measure.gate import Gate
from harness.measure.stopping import REASONS, Rule
from harness.results import raw
from harness.summarize import comparisons, timings
from harness.workers import pool
from ops._spec import Cost, Op, make_case
from tests.support.measuring import (
    BLOCKS,
    CELLS,
    ENVIRONMENT,
    LIMIT_S,
    TIMING,
    FakeMonitor,
    children,
    code_of,
    of,
    report,
    run,
)

# For each implementation: the statuses of its rows in the first case, and the last reason.
FAULTS = {
    "raises": (["ok", "crashed"], "RuntimeError: CUDA error: an illegal memory access"),
    "exhausts_memory": (["ok", "oom"], "OutOfMemoryError: CUDA out of memory"),
    "segfaults": (["ok", "crashed"], "died by SIGSEGV"),
    "is_killed": (["ok", "crashed"], "died by SIGKILL"),
    "exits": (["ok", "crashed"], "exited with code 3"),
    "hangs": (["ok", "hung"], "no answer within 4 s"),
    "closes_its_pipes": (["ok", "crashed"], "closed the socket of its answers"),
    "garbles": (["ok", "crashed"], "wrote into the socket of its answers"),
    "forges_nan": (["ok", "crashed"], "wrote into the socket of its answers"),
    "answers_zero": (["ok", "crashed"], "answers without a time above zero"),
    "forges_success": (["ok", "crashed"], "answers with no message"),
    "leaves_out_a_time": (["ok", "crashed"], "answers with BlockTimes without call_us"),
    "adds_a_field": (["ok", "crashed"], "answers with BlockTimes with an unknown field 'speed'"),
    "says_a_word": (
        ["ok", "crashed"],
        "answers with BlockTimes with device_us = 'soon'",
    ),
    "answers_other": (
        ["ok", "crashed"],
        "answers with 'Released' in place of BlockTimes",
    ),
    "answers_nan": (["ok", "crashed"], "answers with a number that is not finite"),
    "declines_at_once": (["unsupported"], "only even sizes"),
    "exits_at_once": (["crashed"], "exited with code 3"),
    "hangs_at_once": (["hung"], "no answer within 4 s"),
    "exhausts_memory_at_once": (["oom"], "OutOfMemoryError: CUDA out of memory"),
    "wrong_later": (["inaccurate"] * BLOCKS, "output 0 changed"),
    "says_half": (["ok", "hung"], "no answer within 4 s"),
    "exits_at_last": (["ok"] * BLOCKS + ["crashed"], "exited with code 4"),
    "prints": (["ok"] * BLOCKS, ""),
    "reads": (["ok"] * BLOCKS, ""),
    "keeps_memory": (["ok"] * BLOCKS, ""),
}


@pytest.mark.slow
def test_every_fault_has_its_status_and_harms_no_other_implementation(timed, monkeypatch):
    # One of them closes its socket and lives on, so the parent waits for so long.
    monkeypatch.setattr(pool, "EXIT_S", 15.0)
    rows = timed(["ours", "ours_twin", "slow", *FAULTS])
    for impl, (statuses, reason) in FAULTS.items():
        first = of(rows, impl)
        assert [row["status"] for row in first] == statuses, impl
        assert first[-1]["reason"].startswith(reason), impl
        # In the next case a fresh process replaces a lost one.
        assert [row["status"] for row in of(rows, impl, "M2")] == ["ok"] * BLOCKS, impl
    for impl, time_us in {"ours": 100.0, "ours_twin": 100.0, "slow": 103.0}.items():
        for name in ("M1", "M2"):
            taken = of(rows, impl, name)
            assert [row["device_us"] for row in taken] == [time_us] * BLOCKS
            assert [row["block"] for row in taken] == list(range(BLOCKS))
    assert not children()


def test_memory_that_rivals_held_is_asked_for_once_more(timed, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    rows = timed(["ours", "starves_beside_others"])
    assert [row["status"] for row in of(rows, "starves_beside_others")] == ["ok"] * BLOCKS
    assert [row["status"] for row in of(rows, "ours")] == ["ok"] * BLOCKS


def test_memory_of_one_that_found_too_little_is_there_for_the_next(timed):
    """Both find none together. The first finds none alone either, and is ended before the next."""
    rows = timed(["ours", "exhausts_memory_at_once", "crowded_in_other_cells"])
    assert [row["status"] for row in of(rows, "exhausts_memory_at_once")] == ["oom"]
    assert [row["status"] for row in of(rows, "crowded_in_other_cells")] == ["ok"] * BLOCKS


def test_a_check_without_memory_is_made_again_when_rivals_have_given_theirs_back(
    timed, tmp_path, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Alone there is nobody to wait for.
    rows = timed(["crowded_in_its_check"], cells=CELLS[:1])
    assert [row["status"] for row in rows] == ["ok"] * BLOCKS + ["oom"]
    rows = timed(["ours", "crowded_in_its_check", "slow"])
    assert {row["status"] for row in rows} == {"ok"}


def test_a_library_that_cannot_be_imported_is_unavailable(timed):
    rows = timed(["ours", "absent"])
    assert [row["status"] for row in rows if row["impl"] == "absent"] == ["unavailable"] * 2
    assert {row["impl_version"] for row in rows if row["impl"] == "absent"} == {"0.9"}
    assert {row["impl_version"] for row in rows if row["impl"] == "ours"} == {"1.0"}


def test_a_slowdown_of_three_percent_is_found_and_equal_times_are_not(timed):
    """Follow a slowdown from the clock to the verdict."""
    rows = timed(["ours", "ours_twin", "slow", "same"], min_blocks=10, max_blocks=10)
    study = {key: timings.counted(rivals, {}) for key, rivals in timings.group(rows).items()}
    found = comparisons.claim_rows(comparisons.comparisons(study), study)
    verdicts = {row["baseline"]: (round(row["ratio"], 6), row["verdict"]) for row in found}
    assert verdicts == {"slow": (1.03, "better"), "same": (1.0, "no difference")}


def test_a_throttled_block_is_marked_and_keeps_its_time(timed):
    rows = of(timed(["ours", "hot"]), "hot")
    assert {(row["status"], row["reason"]) for row in rows} == {("throttled", "thermal slowdown")}
    assert {row["device_us"] for row in rows} == {100.0}


def test_a_power_cap_is_noted_and_no_fault(timed):
    rows = timed(["ours"])
    assert {(row["status"], row["throttle"]) for row in rows} == {("ok", "power cap")}


@pytest.mark.parametrize(
    ("impl", "watch", "why"),
    [
        ("eventful", (), ""),
        ("eventful_and_hot", (), "; thermal slowdown"),
        ("eventful", ("process 7 (trainer)",), "; shared with process 7 (trainer)"),
        ("eventful_and_wrong_later", (), "; output 0 changed"),
        ("eventful_and_fast", (), "; faster than the floor of 5.00 us"),
    ],
)
def test_a_row_timed_by_events_says_so_whatever_else_befell_it(timed, impl, watch, why):
    limits = {"read": 200.0, "write": 200.0}
    rows = of(timed(["ours", impl], FakeMonitor(foreign=watch), ceilings=limits), impl)
    assert {row["reason"] for row in rows} == {f"events: no graph{why}"}


def test_a_time_far_below_the_floor_of_its_cell_is_impossible(timed):
    # 1 MB read in 1 us is 1 TB/s, five times the bandwidth; the 1 MB written may stay in the L2.
    limits = {"read": 200.0, "write": 200.0, "float32": 50.0}
    rows = timed(["ours", "fast"], ceilings=limits)
    assert {row["status"] for row in of(rows, "fast")} == {"impossible"}
    assert of(rows, "fast")[0]["reason"] == "faster than the floor of 5.00 us"
    assert {row["status"] for row in of(rows, "ours")} == {"ok"}


def test_the_order_is_drawn_anew_and_stored(timed):
    names = ["ours", "ours_twin", "slow", "other"]
    long = {"min_blocks": 12, "max_blocks": 12}
    rows = timed(names, **long)
    assert [(row["block"], row["order"]) for row in rows] == [
        (block, order) for _ in CELLS for block in range(12) for order in range(4)
    ]
    visits = [tuple(row["impl"] for row in rows[at : at + 4]) for at in range(0, len(rows), 4)]
    assert all(sorted(visit) == sorted(names) for visit in visits)
    assert len(set(visits)) > 6
    assert [row["impl"] for row in timed(names, **long)] == [row["impl"] for row in rows]
    assert [row["impl"] for row in timed(names, seed=2, **long)] != [row["impl"] for row in rows]


# A call takes 100 us of the GPU and 200 of the host; LONG is three blocks.
BLOCK_CALLS = [(0.001, 1), (0.066, 1), (0.067, 3), (1.0, 10), (5.0, 50), (1000.0, 100)]


@pytest.mark.parametrize(("block_ms", "calls"), BLOCK_CALLS)
def test_a_block_fills_its_time_within_bounds(timed, block_ms, calls):
    assert {row["calls"] for row in timed(["ours"], block_ms=block_ms)} == {calls}


def test_a_plan_says_how_many_calls_a_block_has_at_least(timed):
    assert {row["calls"] for row in timed(["ours"], block_ms=0.067, least_calls=2)} == {2}


@pytest.mark.parametrize(
    ("block_ms", "min_blocks", "every"),
    [(0.033, 15, 3), (0.035, 15, 1), (0.033, 11, 2), (0.033, 4, 1)],
)
def test_calls_far_longer_than_others_are_timed_in_some_blocks(
    timed, monkeypatch, block_ms, min_blocks, every
):
    """Only long ones, at least five times, and a rival that has each block ends the cell."""
    rules = []

    def rule(timing, impls):
        rules.append(impls)
        return Rule(timing, impls)

    monkeypatch.setattr(scheduler, "Rule", rule)
    blocks = {"min_blocks": min_blocks, "max_blocks": min_blocks}
    rows = timed(["ours", "ours_twin", "slow", "fast"], block_ms=block_ms, **blocks)
    for impl in ("ours", "ours_twin", "slow"):
        found = [row["block"] for row in of(rows, impl)]
        assert found == list(range(0, min_blocks, every)), impl
    assert [row["block"] for row in of(rows, "fast")] == list(range(min_blocks))
    together = [[r["order"] for r in rows if (r["case"], r["block"]) == ("M1", n)] for n in (0, 1)]
    assert [sorted(orders) for orders in together] == [
        [0, 1, 2, 3],
        [0] if every > 1 else [0, 1, 2, 3],
    ]
    first = "fast" if block_ms < 0.035 else "slow"
    assert [next(i for i in impls if not i.startswith("ours")) for impls in rules] == [first] * len(
        CELLS
    )


def test_the_gate_keeps_the_unverified_from_the_clock(tmp_path):
    report(tmp_path, "fake", "ours", CELLS)
    bad = {"case": "M1", "dtype": "float32", "pass": "forward"}
    cells = [bad | {"status": "inaccurate", "reason": "out: 3 x the bound"}]
    report(tmp_path, "fake", "wrong", CELLS, status="inaccurate", cells=cells)
    report(tmp_path, "fake", "partial", CELLS[:1])
    late = {"case": "M2", "dtype": "float32", "pass": "forward"}
    late |= {"status": "unreached", "reason": "time limit of 5 s"}
    report(tmp_path, "fake", "late", CELLS, cells=[late])
    report(tmp_path, "fake", "later", CELLS, cells=[late], status="unreached")
    gone = {"status": "unavailable", "reason": "no such library", "mode": "cpu"}
    report(tmp_path, "fake", "absent", [], **gone)
    impls = ["ours", "wrong", "partial", "late", "later", "absent"]
    rows, _ = raw.read(run(tmp_path, impls), "")
    assert [(row["status"], row["reason"]) for row in of(rows, "wrong")] == [
        ("inaccurate", "out: 3 x the bound")
    ]
    assert of(rows, "wrong", "M2")[0]["status"] == "inaccurate"
    assert len(of(rows, "partial")) == BLOCKS
    never = ("inaccurate", "never verified")
    slow = ("hung", "not verified within the time limit of 5 s")
    places = {("partial", "M2"): never, ("late", "M1"): never, ("late", "M2"): slow}
    for (impl, name), why in (places | {("later", "M1"): never}).items():
        assert [(row["status"], row["reason"]) for row in of(rows, impl, name)] == [why]
    assert [(row["status"], row["reason"]) for row in of(rows, "absent")] == [
        ("unavailable", "no such library")
    ]
    assert all(row["device_us"] is None for row in rows if row["status"] != "ok")


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.write_text(path.read_text()[:-5]), "not readable as JSON"),
        (lambda path: path.write_text("{}"), "has no 'op'"),
    ],
)
def test_a_bad_report_is_named(tmp_path, spoil, problem):
    report(tmp_path, "fake", "ours", CELLS)
    spoil(tmp_path / "fake/ours.json")
    with pytest.raises(UserError, match=rf"ours\.json.*{problem}.*harness\.verify --op fake"):
        Gate(tmp_path, "fake", ["ours"], code_of)


def test_a_report_from_the_interpreter_opens_no_gate(tmp_path):
    report(tmp_path, "fake", "ours", CELLS, mode="interpreter")
    with pytest.raises(UserError, match=r"ours\.json: made without a GPU"):
        Gate(tmp_path, "fake", ["ours", "ours_twin"], code_of)


def test_a_report_of_other_code_opens_no_gate(tmp_path):
    for impl in ("ours", "rival"):
        report(tmp_path, "fake", impl, CELLS)
    now = {"ours": "code", "ours_twin": "code", "rival": "code"}
    Gate(tmp_path, "fake", list(now), now.get)
    problem = r"^\S*rival\.json: is of other code or another version .* --impl rival --out \S*json$"
    with pytest.raises(UserError, match=problem):
        Gate(tmp_path, "fake", list(now), (now | {"rival": "edited"}).get)
    with pytest.raises(UserError, match=r"ours\.json: is of other code"):
        Gate(tmp_path, "fake", ["ours_twin"], {"ours_twin": "edited"}.get)


def test_the_sidecar_makes_the_record_whole(timed, tmp_path, capsys):
    rows = timed(["ours", "slow"])
    sidecar = json.loads((tmp_path / "raw/fake.json").read_text())
    assert sidecar["rows"] == len(rows) == 2 * BLOCKS * len(CELLS)
    assert sidecar["environment"] == ENVIRONMENT
    text = json.dumps(ENVIRONMENT, sort_keys=True).encode()
    assert sidecar["environment_sha256"] == hashlib.sha256(text).hexdigest()
    assert [sidecar[key] for key in ("op", "run_id", "mode", "dirty")] == [
        "fake",
        "r",
        "measured",
        False,
    ]
    assert sidecar["schedule"] == dataclasses.asdict(TIMING) | {
        "seed": 1,
        "drawn_seed": None,
        "cores": len(os.sched_getaffinity(0)),
        "stopped": {name: len(CELLS) if name == "interval" else 0 for name in REASONS},
    }
    assert sidecar["resumed"] == 0
    overhead = sidecar["overhead"]
    # Two implementations prepare at the same time; their blocks and energy come in turn.
    busy_s = 0.002 + 2 * (0.001 * (BLOCKS + 1) + 0.003)
    assert overhead["timed_s"] == pytest.approx(busy_s * len(CELLS))
    assert overhead["first_s"] == pytest.approx(0.004 * len(CELLS))
    share = 1 - (overhead["timed_s"] + overhead["first_s"]) / overhead["total_s"]
    assert overhead["share"] == pytest.approx(share, abs=0.05)
    said = capsys.readouterr().err.splitlines()[-1]
    printed = re.fullmatch(r"fake: 16 rows in \d+\.\d s, first calls \d+%, overhead (\d+)%", said)
    # So short a total is rounded by up to a percent; the share beside it is not rounded.
    assert int(printed[1]) == pytest.approx(100 * overhead["share"], abs=0.51)


def test_a_first_call_without_an_end_is_a_first_call(timed, tmp_path):
    """The library compiled or tuned until its time was over, which is no time of the harness."""
    timed(["ours", "hangs_at_once"], cells=CELLS[:1])
    overhead = json.loads((tmp_path / "raw/fake.json").read_text())["overhead"]
    assert LIMIT_S <= overhead["first_s"] < overhead["total_s"]


def files(folder):
    return {path.name: path.read_bytes() for path in (folder / "raw").iterdir()}


@pytest.mark.parametrize(
    "without", [{"impls": ["exits_at_once"], "cells": CELLS[:1]}, {"cells": []}]
)
def test_a_measurement_without_a_time_replaces_no_measured_times(timed, tmp_path, without):
    """A GPU that fell off the bus gives such a measurement, as does a study without a case."""
    timed(["ours"])
    before = files(tmp_path)
    changes = {"impls": ["ours"]} | without
    for _ in range(2):
        with pytest.raises(UserError, match=r"fake\.csv: holds measured times, and this meas"):
            timed(changes["impls"], **{k: v for k, v in changes.items() if k != "impls"})
        assert files(tmp_path) == before
    # If there was no time before either, nothing is lost.
    (tmp_path / "raw/fake.csv").unlink()
    (tmp_path / "raw/fake.json").unlink()
    for _ in range(2):
        rows = timed(changes["impls"], **{k: v for k, v in changes.items() if k != "impls"})
        assert all(row["device_us"] is None for row in rows)


def test_an_error_that_is_not_the_systems_keeps_its_words(tmp_path):
    with pytest.raises(OSError, match="only words"), whole_file(tmp_path / "out"):
        raise OSError("only words")
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_is_what_was_asked_for():
    op = Op(
        "op",
        None,
        {},
        lambda *_: Cost(0, 0, 0),
        edge=(),
        sweep=(make_case(M=1), make_case(M=2, dtypes=["float16"])),
        passes=("forward", "backward"),
    )
    cells = list(sweep(op, ["float16", "float32"], ["backward"], None))
    assert [str(cell) for cell in cells] == [
        "M1 float32 backward",
        "M1 float16 backward",
        "M2 float16 backward",
    ]
    assert list(sweep(op, ["float32"], ["forward"], 1)) == [
        Cell(make_case(M=1), "float32", "forward")
    ]

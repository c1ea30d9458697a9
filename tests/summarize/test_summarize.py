"""Check harness.summarize on made-up runs whose results are known."""

import csv
import json
import math
import re
import shutil
import subprocess
import sys

import pytest
from scipy import stats

from harness import stats as statistics
from harness.cli import UserError
from harness.results import parts, raw
from harness.summarize import inference, tables, timings
from harness.summarize.__main__ import summarize
from tests.support import synthetic
from tests.support.paper_scripts import PAPER, call, numbers
from tests.support.synthetic import block

CEILINGS = {name: value for name, (_, value) in synthetic.CEILINGS.items()}


def rows_of(folder, name):
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = synthetic.write_run(tmp_path_factory.mktemp("measured"))
    summarize(folder, folder / "recorded")
    return folder


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replayed")
    recorded = tmp_path_factory.mktemp("recorded")
    synthetic.write_run(folder, ("softmax",), "replayed", recorded)
    summarize(folder, recorded)
    return folder


def cell_of(*rows):
    return next(iter(timings.group(rows).values()))


def test_the_call_time_is_the_least_of_the_blocks():
    calls = [10.6, 7.2, 10.4, 7.1, 10.5]
    rivals = cell_of(*(block(i, "ours", 4000.0, call_us=call) for i, call in enumerate(calls)))
    (ours,) = timings.summary(rivals, CEILINGS)
    assert ours["call_us"] == 7.1


def test_a_row_of_the_summary_is_what_its_blocks_say():
    times = [4000.0, 4010.0, 3990.0, 4005.0, 3995.0]
    rivals = cell_of(
        *(block(i, "ours", time) for i, time in enumerate(times)),
        *(block(i, "torch_eager", 2 * time) for i, time in enumerate(times)),
    )
    ours, eager = timings.summary(rivals, CEILINGS)
    floor = 8e9 / 4400e3 + 4e9 / 4000e3
    assert ours["device_us"] == 4000.0
    log = statistics.log_median(times)
    half = stats.t.ppf(0.975, log.freedom) * math.sqrt(log.variance)
    assert ours["ci_hi"] == pytest.approx(4000 * math.exp(half))
    assert ours["ci_lo"] == pytest.approx(4000 * math.exp(-half))
    assert (ours["timed_by"], ours["set"]) == ("graph", "grid")
    assert ours["gbps"] == pytest.approx(12e9 / 4000 / 1e3)
    assert ours["tflops"] == pytest.approx(1e9 / 4000 / 1e6)
    assert ours["floor_us"] == pytest.approx(floor)
    assert ours["pct_sol"] == pytest.approx(100 * floor / 4000)
    assert (ours["bound"], ours["blocks"], ours["size_N"]) == ("memory", 5, 1024)
    assert ours["speedup_vs_torch_eager"] == ours["speedup_vs_torch_eager_lo"] == 2
    assert ours["speedup_vs_torch_eager_hi"] == 2
    assert eager["speedup_vs_ours"] == 0.5


def test_an_interval_holds_the_offsets_of_processes():
    """Blocks that agree to the last digit prove nothing: another process differs by 2 %."""
    gaps = [statistics.Estimate(sign * 0.02, 0.0, 9.0) for sign in (1, -1) * 10]
    known = inference.Offsets([4000.0] * 20, gaps)
    rivals = cell_of(
        *(block(i, "ours", 4000.0) for i in range(10)),
        *(block(i, "torch_eager", 8000.0) for i in range(10)),
    )
    ours, _ = timings.summary(rivals, CEILINGS, known)
    t = stats.t.ppf(0.975, 20)
    assert ours["speedup_vs_torch_eager_hi"] == pytest.approx(2 * math.exp(t * 0.02))
    assert ours["speedup_vs_torch_eager_lo"] == pytest.approx(2 * math.exp(-t * 0.02))
    # One process has half of the variance between two.
    assert ours["ci_hi"] == pytest.approx(4000 * math.exp(t * 0.02 / math.sqrt(2)))
    assert ours["ci_lo"] == pytest.approx(4000 * math.exp(-t * 0.02 / math.sqrt(2)))


def test_times_by_events_are_named_whatever_else_befell_the_row():
    events = "events: no graph, the host is in it"
    rivals = cell_of(
        *(block(i, "ours", 4000.0) for i in range(6)),
        *(block(i, "liger", 4000.0, reason=events if i == 3 else "") for i in range(6)),
    )
    ours, liger = timings.summary(rivals, CEILINGS)
    assert (ours["timed_by"], liger["timed_by"]) == ("graph", "events")


def test_compute_bounds_a_cell_whose_arithmetic_takes_longer():
    rivals = cell_of(block(0, "ours", 9000.0, flops=4 * 10**11))
    (row,) = timings.summary(rivals, CEILINGS)
    rate = max(CEILINGS["float32"], CEILINGS["bfloat16"] / 6)
    assert (row["bound"], row["floor_us"]) == ("compute", pytest.approx(4e11 / rate / 1e6))


def test_without_ceilings_there_is_no_floor():
    (row,) = timings.summary(cell_of(block(0, "ours", 9000.0)), {})
    assert not {"floor_us", "bound", "pct_sol"} & set(row)


def test_only_blocks_that_both_have_are_compared():
    rivals = cell_of(
        *(block(i, "ours", 100.0) for i in range(6)),
        *(block(i, "torch_eager", 300.0 if i < 5 else 1.0) for i in (1, 3, 4)),
    )
    ours, eager = timings.summary(rivals, {})
    assert ours["speedup_vs_torch_eager"] == 3
    assert (ours["blocks"], eager["blocks"]) == (6, 3)


def test_a_wrong_result_voids_the_times_of_its_cell():
    wrong = block(3, "ours", None, status="inaccurate", reason="call 3 differs")
    rivals = cell_of(*(block(i, "ours", 100.0) for i in range(3)), wrong)
    (row,) = timings.summary(rivals, CEILINGS)
    assert (row["status"], row["reason"], row["blocks"]) == ("inaccurate", "call 3 differs", 0)
    assert "device_us" not in row


@pytest.mark.parametrize("status", ["crashed", "hung", "oom", "unsupported"])
def test_a_failure_before_the_check_voids_the_times_of_its_cell(status):
    end = block(3, "ours", None, status=status, reason="as it says")
    rivals = cell_of(*(block(i, "ours", 5000.0) for i in range(3)), end)
    (row,) = timings.summary(rivals, CEILINGS)
    assert (row["status"], row["reason"], row["blocks"]) == (status, "as it says", 0)
    assert "device_us" not in row and not timings.counted(rivals, CEILINGS)


def test_a_few_throttled_blocks_are_named_and_kept():
    rows = [block(i, "ours", 5000.0, status="throttled" if i < 2 else "ok") for i in range(6)]
    (row,) = timings.summary(cell_of(*rows), CEILINGS)
    assert (row["status"], row["reason"], row["blocks"]) == ("ok", "2 of 6 blocks throttled", 6)


def test_a_time_far_below_the_floor_is_impossible():
    (row,) = timings.summary(cell_of(block(0, "ours", 1000.0)), CEILINGS)
    assert row["status"] == "impossible"
    assert "faster than the floor" in row["reason"]


def test_writes_that_stay_in_the_cache_are_not_called_impossible():
    small = {"bytes_read": 0, "bytes_written": 100 << 20, "flops": 0}
    (row,) = timings.summary(cell_of(block(0, "ours", 5.0, **small)), CEILINGS)
    assert row["status"] == "ok"
    assert row["pct_sol"] > 100


def test_an_impossible_block_does_not_count():
    rows = [block(i, "ours", 5000.0) for i in range(6)]
    rows += [block(6, "ours", 1.0, status="impossible", reason="faster than the floor")]
    (row,) = timings.summary(cell_of(*rows), CEILINGS)
    assert (row["blocks"], row["device_us"], row["ci_lo"]) == (6, 5000.0, 5000.0)
    assert row["reason"] == "1 of 7 blocks impossible"
    rows[0]["status"] = "throttled"
    (row,) = timings.summary(cell_of(*rows), CEILINGS)
    assert row["reason"] == "1 of 7 blocks throttled; 1 of 7 blocks impossible"


@pytest.mark.parametrize("place", [0, 3])
def test_an_impossible_block_among_throttled_ones_does_not_count_wherever_it_stands(place):
    rows = [block(i, "ours", 5000.0, status="throttled", reason="hot") for i in range(4)]
    rows[place] |= {"status": "impossible", "reason": "too fast", "device_us": 1.0}
    rivals = cell_of(*rows)
    (row,) = timings.summary(rivals, CEILINGS)
    assert (row["status"], row["reason"], row["blocks"]) == ("throttled", "hot", 3)
    assert timings.counted(rivals, CEILINGS) == rivals


def test_more_than_the_speed_of_light_is_remarked():
    small = {"bytes_read": 0, "bytes_written": 100 << 20, "flops": 0}
    (row,) = timings.summary(cell_of(block(0, "ours", 25.0, **small)), CEILINGS)
    assert row["pct_sol"] > 100
    assert row["reason"] == f"{row['pct_sol']:.1f} % of the speed of light"


def test_readings_are_medians_and_absent_ones_stay_empty():
    rows = [block(i, "ours", 5000.0, power_w=500.0 + i, temp_c=40) for i in range(5)]
    rows[-1] |= {"energy_uj": 900.0, "energy_pm_uj": 9.0, "status": "throttled"}
    (row,) = timings.summary(cell_of(*rows), CEILINGS)
    assert (row["power_w"], row["temp_c"], row["throttled"]) == (502.0, 40, 1)
    assert (row["energy_uj"], row["energy_pm_uj"]) == (900.0, 9.0)
    assert "sm_mhz" not in row


def test_times_are_not_rounded_and_the_least_is_the_least():
    times = [3.125, 3.25, 3.0625, 3.1875, 3.09375]
    (row,) = timings.summary(cell_of(*(block(i, "ours", t) for i, t in enumerate(times))), {})
    assert row["device_us"] == 3.125


def test_flags_and_sizes_come_from_the_name_of_the_case(measured):
    rows = rows_of(measured, "summary")
    causal = next(row for row in rows if row["case"] == "B4-H16-S4096-D128-causal")
    found = {key: causal[key] for key in ("size_B", "size_S", "size_D", "size_N", "flags")}
    assert found == {
        "size_B": "4",
        "size_S": "4096",
        "size_D": "128",
        "size_N": "",
        "flags": "causal",
    }


def test_holes_stay_rows_with_their_reasons(measured):
    holes = [row for row in rows_of(measured, "summary") if row["status"] != "ok"]
    assert {row["status"] for row in holes} == {"oom", "hung", "unsupported"}
    assert all(row["reason"] and not row["device_us"] for row in holes)


def test_every_cell_is_compared_with_every_baseline_that_has_a_time(measured):
    timed = [row for row in rows_of(measured, "summary") if row["device_us"]]
    rivals = [row for row in timed if not row["impl"].startswith("ours")]
    verdicts = rows_of(measured, "verdicts")
    assert len(verdicts) == len(rivals) > 500
    assert {row["verdict"] for row in verdicts} <= {"better", "worse", "no difference", "undecided"}
    assert all(float(row["p_holm"]) >= float(row["p"]) for row in verdicts)


def test_every_claim_names_its_cells(measured):
    claims = rows_of(measured, "claims")
    rows = [row for row in claims if row["against"] == "each"]
    assert len({(row["op"], row["pass"], row["baseline"]) for row in rows}) == len(rows)
    best = [row for row in claims if row["against"] == "best"]
    pairs = {(row["op"], row["pass"]) for row in rows}
    assert {(row["op"], row["pass"]) for row in best} == pairs and len(best) == len(pairs)
    verdicts = rows_of(measured, "verdicts")
    assert sum(int(row["cells"]) for row in rows) == len(verdicts)
    flash = next(row for row in rows if row["baseline"] == "sdpa_flash")
    assert int(flash["cells"]) < int(flash["of"])


def test_the_overhead_is_that_of_the_sidecars(measured):
    rows = {row["op"]: row for row in rows_of(measured, "overhead")}
    assert (rows["dot"]["share"], rows["all"]["share"]) == ("0.2", "0.2")
    assert float(rows["all"]["total_s"]) == 100 * len(synthetic.FAMILIES)
    assert (rows["dot"]["self_tuned"], rows["all"]["self_tuned"]) == ("1", str(len(rows) - 1))
    assert (rows["dot"]["host_cores"], rows["all"]["host_cores"]) == ("16", "16")
    assert int(rows["all"]["cells"]) == sum(
        int(row["cells"]) for op, row in rows.items() if op != "all"
    )


def test_a_cell_that_was_not_reached_took_no_time(tmp_path):
    folder = synthetic.write_run(tmp_path, ("dot",))
    with (folder / "raw/dot.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    keys = [(row["case"], row["dtype"], row["pass"]) for row in rows]
    nothing = {"status": "unreached", "device_us": "", "call_us": ""}
    gone = [row | (nothing if key == keys[0] else {}) for key, row in zip(keys, rows, strict=True)]
    # A rival that verification refused has the word of that in a cell that nobody reached.
    gone[-1 - keys[::-1].index(keys[0])]["status"] = "inaccurate"
    synthetic.write_raw(folder, "dot", gone)
    summarize(folder, folder)
    (found,) = [row for row in rows_of(folder, "overhead") if row["op"] == "dot"]
    assert int(found["cells"]) == len(set(keys)) - 1


@pytest.mark.parametrize(("board", "elsewhere"), [("GPU-1", "0"), ("GPU-2", "1")])
def test_choices_of_another_board_are_counted(tmp_path, board, elsewhere):
    folder = synthetic.write_run(tmp_path, ("dot",))
    path = folder / "raw" / "dot.json"
    told = json.loads(path.read_text())
    told["environment"]["gpu"] = {"name": "H", "uuid": "GPU-1"}
    told["environment_sha256"] = raw.environment_sha256(told["environment"])
    path.write_text(json.dumps(told | {"autotuned": {"quack": {"date": "", "gpu": board}}}))
    summarize(folder, folder)
    found = {row["tuned_elsewhere"] for row in rows_of(folder, "overhead")}
    assert found == {elsewhere}


@pytest.mark.parametrize(
    ("alone", "beside"),
    [((), "1"), (("torch_compile",), "0"), (("quack",), "1"), (("torch_compile", "quack"), "0")],
)
def test_libraries_that_tuned_themselves_beside_others_are_counted(tmp_path, alone, beside):
    """The rival torch.compile tunes itself, eager PyTorch does not; quack has no time."""
    folder = synthetic.write_run(tmp_path, ("dot",))
    path = folder / "raw" / "dot.json"
    told = {impl: {"date": "", "gpu": "GPU-0"} for impl in alone}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"autotuned": told}))
    summarize(folder, folder)
    assert {row["tuned_beside"] for row in rows_of(folder, "overhead")} == {beside}
    assert call("claims.py", folder, folder / "numbers.tex").returncode == 0
    assert numbers(folder).get("tuned_beside") == ({"1": "1"}.get(beside))
    assert numbers(folder).get("self_tuned") == (str(len(alone)) if alone else None)


def test_the_paper_says_of_no_library_that_it_tuned_alone_but_by_the_data():
    """In older records the compiler chose while its rivals made their first calls."""
    texts = [path.read_text() for path in (PAPER / "sections").glob("*.tex")]
    said = [text for text in texts if re.search(r"themselves|tunes itself", text)]
    assert said
    for text in said:
        for paragraph in re.split(r"\n\s*\n|\\paragraph", text):
            if re.search(r"tunes? (itself|themselves)", paragraph) and "alone" in paragraph:
                assert r"\whenresult{self_tuned}" in text and r"\result{tuned_beside}" in paragraph


def test_an_unknown_overhead_is_empty_and_not_zero(tmp_path):
    folder = synthetic.write_run(tmp_path, ("dot", "softmax"))
    path = folder / "raw" / "dot.json"
    told = json.loads(path.read_text())
    del told["autotuned"], told["schedule"]
    path.write_text(json.dumps(told | {"overhead": {}}))
    assert summarize(folder, folder) == "measuring took 100 s, overhead 20 %"
    replayed, recorded = folder / "replayed", folder / "recorded"
    synthetic.write_run(replayed, ("dot",), "replayed", recorded)
    said = summarize(replayed, recorded)
    assert said == "of the recorded run, measuring took 100 s, overhead 20 %"
    rows = {row["op"]: row for row in rows_of(folder, "overhead")}
    assert (rows["dot"]["total_s"], rows["dot"]["share"]) == ("", "")
    assert (rows["dot"]["self_tuned"], rows["all"]["self_tuned"]) == ("0", "1")
    assert (rows["dot"]["host_cores"], rows["all"]["host_cores"]) == ("", "16")
    assert rows["all"]["total_s"] == "100"


def test_a_run_names_its_environment_by_hash(measured):
    (run,) = rows_of(measured, "runs")
    environment = json.loads((measured / "raw" / "dot.json").read_text())["environment"]
    text = json.dumps(environment, sort_keys=True).encode()
    assert run["environment_sha256"] == raw.sha256(text)


def test_tables_are_separated_by_commas_and_hold_all_rows(measured):
    text = (measured / "summary.csv").read_text()
    assert ";" not in text.splitlines()[0]
    written = {
        tuple(row[name] for name in ("op", "case", "dtype", "pass", "impl"))
        for path in (measured / "raw").glob("*.csv")
        for row in csv.DictReader(path.open(newline=""))
    }
    assert len(rows_of(measured, "summary")) == len(written)


def test_a_measured_run_shows_its_own_reports_and_machine(measured):
    assert {row["mode"] for row in rows_of(measured, "verification")} == {"gpu"}
    (shown,) = rows_of(measured, "runs")
    assert (shown["mode"], shown["machine"], shown["gpu"]) == (
        "measured",
        "synthetic",
        "Synthetic GPU",
    )
    assert len(rows_of(measured, "shown_ceilings")) == len(synthetic.CEILINGS)
    assert len({row["run_id"] for row in rows_of(measured, "environment")}) == 1


def test_a_replayed_run_adds_the_recorded_reports_to_its_own(replayed):
    modes = [(row["impl"], row["mode"]) for row in rows_of(replayed, "verification")]
    assert modes[:2] == [("ours", "gpu"), ("ours", "interpreter")]
    assert ("torch_eager", "cpu") in modes
    assert ("torch_eager", "gpu") in modes
    assert len({row["run_id"] for row in rows_of(replayed, "environment")}) == 2
    (shown,) = rows_of(replayed, "runs")
    assert (shown["mode"], shown["ops"]) == ("replayed", "softmax")


def test_an_op_whose_code_is_not_what_the_recorded_run_verified_is_named(replayed):
    one = {"op": "dot", "impl": "ours", "code_sha256": "a"}
    rival = one | {"impl": "torch_eager", "code_sha256": "b"}
    other, silent, lost = (one | {"code_sha256": code} for code in ("c", "", None))
    here, there = {"dot": {"mode": "measured"}}, {"dot": {"mode": "replayed"}}
    assert tables.changed([one, one, rival], there) == set()
    assert tables.changed([one, other], there) == {"dot"}
    # Reports that prove nothing about the code count as a change.
    for found in ([one], [rival], [one, silent], [silent, silent], [lost, lost]):
        assert tables.changed([*found, one | {"op": "scale"}], there) == {"dot"}
    assert tables.changed([one], here) == set()
    assert tables.changed([silent], here) == tables.changed([], here) == {"dot"}
    sidecar = json.loads((replayed / "raw" / "softmax.json").read_text())
    runs = tables.runs({"dot": sidecar, "scale": sidecar, "softmax": sidecar}, {"dot", "softmax"})
    assert [row["changed_ops"] for row in runs] == ["dot softmax"]
    assert [row["changed_ops"] for row in rows_of(replayed, "runs")] == [""]


def test_runs_of_two_boards_or_two_harnesses_are_two_rows():
    def sidecar(board, **more):
        environment = {"gpu": {"name": "H", "uuid": board}}
        told = {"run_id": "a-b-c", "mode": "measured", "date": "d", "commit": "c", "dirty": False}
        return told | {"environment": environment, "environment_sha256": board} | more

    cars = {"dot": sidecar("GPU-1"), "scale": sidecar("GPU-1", harness_sha256="ab")}
    cars |= {"add": sidecar("GPU-2"), "mul": sidecar("GPU-1")}
    # Two parts of one run are one row, which names the op once.
    cars["mul"]["earlier"] = [sidecar("GPU-1")]
    rows = [(row["board"], row["harness_sha256"], row["ops"]) for row in tables.runs(cars)]
    assert rows == [("GPU-1", "", "dot mul"), ("GPU-1", "ab", "scale"), ("GPU-2", "", "add")]


def test_an_op_in_two_parts_stands_with_both_of_its_boards(tmp_path):
    """One half of the cells is of another board, whose ceilings are twice as high."""

    def reached_of(folder):
        rows = (row for row in rows_of(folder, "summary") if row["impl"] == "ours")
        return {parts.cell(row): float(row["pct_sol"]) for row in rows}

    folder = synthetic.write_run(tmp_path, ("dot",))
    summarize(folder, folder)
    before = reached_of(folder)
    path = folder / "raw/dot.csv"
    rows, sidecar = raw.read(path, "")
    keys = list(dict.fromkeys(map(parts.cell, rows)))
    for row in rows:
        row["board"] = "GPU-a" if parts.cell(row) in keys[::2] else "GPU-00000000"
    taken = sidecar["environment"] | {"gpu": sidecar["environment"]["gpu"] | {"uuid": "GPU-a"}}
    about = {"environment": taken, "environment_sha256": raw.environment_sha256(taken)}
    high = [row | {"value": row["value"] * 2} for row in sidecar["ceilings"]]
    told = {name: {"date": "", "gpu": "GPU-b"} for name in ("a", "a_library")}
    about |= {"ceilings": high, "autotuned": told}
    sidecar["autotuned"] = {"a_library": {"date": "", "gpu": "GPU-00000000"}}
    earlier = {key: sidecar[key] for key in ("date", "commit", "dirty", "overhead")} | about
    earlier |= {"run_id": "first-part-x", "cells": [" ".join(key) for key in keys[::2]]}
    earlier |= {"schedule": {"cores": 8}}
    raw.write(path, rows, sidecar | {"earlier": [earlier]})
    summarize(folder, folder)
    shown = [(row["run_id"], row["board"], row["ops"]) for row in rows_of(folder, "runs")]
    assert shown == [("first-part-x", "GPU-a", "dot"), (sidecar["run_id"], "GPU-00000000", "dot")]
    assert {row["board"] for row in rows_of(folder, "shown_ceilings")} == {"GPU-a", "GPU-00000000"}
    (spent,) = [row for row in rows_of(folder, "overhead") if row["op"] == "dot"]
    assert [float(spent[key]) for key in ("total_s", "timed_s", "first_s")] == [200, 140, 20]
    assert float(spent["share"]) == pytest.approx(0.2)
    assert (spent["self_tuned"], spent["tuned_elsewhere"]) == ("2", "2")
    assert spent["host_cores"] == "8"
    took = {parts.cell(row): row["run_id"] for row in rows_of(folder, "summary")}
    assert took == {key: sidecar["run_id"] if key in keys[1::2] else "first-part-x" for key in keys}
    for key, reached in reached_of(folder).items():
        assert reached == pytest.approx(before[key] / (2 if key in keys[::2] else 1), rel=1e-5)


def test_unsupported_cells_are_not_counted_as_failed(measured):
    rows = rows_of(measured, "verification")
    flash = next(row for row in rows if row["impl"] == "sdpa_flash")
    assert (flash["cells"], flash["passed"]) == ("11", "11")
    assert 0 < float(flash["worst_ratio"]) < 1


def test_cells_that_were_not_reached_are_counted_apart():
    row = verified("slow", ("N8", "ok"), ("N8", "unreached"), ("N8", "unsupported"))
    assert (row["cells"], row["passed"], row["unreached"]) == (1, 1, 1)


def verified(impl, *cells):
    """Return the row of verification.csv for cells of these names, statuses and ratios."""
    found = [
        {
            **{"case": case, "dtype": "float32", "pass": "forward", "status": status},
            **{"reason": status, "tensors": [{"ratio": one} for one in ratio]},
        }
        for case, status, *ratio in cells
    ]
    report = {"op": "softmax", "impl": impl, "impl_version": "1", "mode": "gpu", "status": "?"}
    (row,) = tables.verification([report | {"reason": "", "cells": found}], {})
    return row


def test_hostile_cells_count_apart_and_are_a_fault_of_ours_alone():
    cells = [("N8", "ok", 0.25), ("N8-large", "inaccurate", 3.0), ("N0", "ok", 0.5)]
    row = verified("lib", *cells)
    assert [row[name] for name in ("cells", "passed", "hostile", "hostile_passed")] == [3, 2, 2, 1]
    assert (row["status"], row["worst_ratio"]) == ("ok", 0.25)
    assert row["worst_case"] == "N8 float32 forward"
    ours = verified("ours", *cells)
    assert (ours["status"], ours["worst_ratio"]) == ("inaccurate", 3.0)
    assert ours["reason"] == "N8-large float32 forward: inaccurate"
    wrong = verified("lib", ("N9", "inaccurate", 2.0), *cells)
    assert (wrong["status"], wrong["worst_ratio"]) == ("inaccurate", 2.0)


def test_resources_flatten_the_instructions(measured):
    row = rows_of(measured, "resources")[0]
    assert next(iter(row)) == "file"
    assert {"wgmma", "ldg128", "registers", "shared_bytes"} <= set(row)


def test_tuned_keys_say_where_they_leave_the_rule_and_what_binds_no_more():
    def entry(n, warps, tie):
        rival = {"config": "num_warps=8", "us": 2.0, "gap": 0.1, "tie": tie}
        config = {"BLOCK": n, "num_warps": warps}
        timed = {"BLOCK=64 num_warps=4": 2.0, "num_warps=8": 2.2}
        return {"key": {"n": n}, "config": config, "us": 2.0, "runner_up": rival} | {
            "rule": "BLOCK=64 num_warps=4",
            "timed": timed,
        }

    kernels = {"one": {"keys": [entry(64, 4, True), entry(32, 4, False)]}}
    in_force = {
        name: {"device": gpu, "families": {"vector": {"run_id": gpu, "kernels": kernels}}}
        for name, gpu in (("here.json", "GPU A"), ("other.json", "GPU B"))
    }
    finding = {"table": "here.json", "kernel": "one", "state": "stale", "reason": "edited"}
    builds = [{"file": "vector", "tables": [finding]}]
    rows = list(tables.tuning(in_force, builds, {"GPU A"}))
    assert [row["run_id"] for row in rows] == ["GPU A", "GPU A"]
    assert [row["changed"] for row in rows] == [False, True]
    assert [row["tie"] for row in rows] == [True, False]
    assert rows[0]["key"] == "n=64" and rows[0]["candidates"] == 2
    assert {row["state"] for row in rows} == {"stale"}


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes(measured, tmp_path):
    again = synthetic.write_run(tmp_path / "again")
    summarize(again, again / "recorded")
    for path in measured.glob("*.csv"):
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_ops_that_an_earlier_run_left_are_not_shown(measured, tmp_path):
    folder = synthetic.write_run(tmp_path / "wide")
    summarize(folder, folder / "recorded", ["dot", "softmax"])
    for name in ("summary", "verdicts", "verification"):
        assert {row["op"] for row in rows_of(folder, name)} == {"dot", "softmax"}
    assert {row["file"] for row in rows_of(folder, "resources")} <= {"vector", "softmax"}


def test_a_run_without_measurements_is_refused(tmp_path):
    with pytest.raises(UserError, match="no CSV file"):
        summarize(tmp_path, tmp_path)


def test_a_damaged_sidecar_ends_the_command_with_a_short_message(tmp_path):
    folder = synthetic.write_run(tmp_path, ("dot",))
    sidecar = folder / "raw" / "dot.json"
    sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"rows": 3}))
    command = [sys.executable, "-m", "harness.summarize", "--run", folder, "--recorded", folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "dot.csv" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "summary.csv").exists()


def spoil(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: spoil(path, status="inaccurate", reason="forged"), "its SHA-256 is not"),
        (lambda path: path.write_text("{}"), "its SHA-256 is not"),
        (lambda path: path.unlink(), "missing"),
        (lambda path: path.rename(path.with_name("new.json")), "(missing|does not list it)"),
        (lambda path: shutil.rmtree(path.parent), "missing"),
        (lambda path: (path.parents[2] / "manifest.json").unlink(), "has no manifest.json"),
        (lambda path: (path.parents[2] / "manifest.json").write_text("[]"), "no JSON object"),
        (lambda path: (path.parents[2] / "manifest.json").write_text("{}"), "has no 'files'"),
        (lambda path: spoil(path.parents[2] / "manifest.json", files=3), "'files' cannot be 3"),
        (lambda path: spoil(path.parents[2] / "manifest.json", files={}), "does not list it"),
    ],
)
def test_no_replay_is_shown_without_the_evidence_of_its_record(tmp_path, change, problem):
    run, recorded = tmp_path / "run", tmp_path / "recorded"
    synthetic.write_run(run, ("dot",), "replayed", recorded)
    summarize(run, recorded)
    change(recorded / "verify/dot/torch_eager.json")
    with pytest.raises(UserError, match=problem) as caught:
        summarize(run, recorded)
    assert "recorded" in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_a_report_of_this_machine_that_says_nothing_is_named(tmp_path):
    synthetic.write_run(tmp_path, ("dot",))
    (tmp_path / "verify/dot/ours.json").write_text("{}")
    with pytest.raises(UserError, match=r"ours\.json: has no 'op'; remove it and run"):
        summarize(tmp_path, tmp_path / "recorded")


def test_a_run_on_several_boards_names_each_with_its_ops(tmp_path):
    cars = {}
    for op, board in (("add", "GPU-a"), ("mul", "GPU-b"), ("dot", "GPU-a")):
        taken = synthetic.environment()
        taken["gpu"] |= {"uuid": board, "vbios": f"v {board}"}
        rate = 1.0 + (board == "GPU-b")
        limits = [{"quantity": "read", "unit": "GB/s", "value": rate, "source": "measured"}]
        about = {key: taken[key] for key in ("run_id", "date", "commit", "dirty")}
        cars[op] = about | {"mode": "measured", "environment": taken, "ceilings": limits}
        cars[op]["environment_sha256"] = raw.environment_sha256(taken)
    runs = tables.runs(cars)
    assert [(row["board"], row["ops"]) for row in runs] == [("GPU-a", "add dot"), ("GPU-b", "mul")]
    shown = [(row["board"], row["value"]) for row in tables.ceilings(cars)]
    assert shown == [("GPU-a", 1.0), ("GPU-b", 2.0)]
    every = list(tables.environment((car["run_id"], car["environment"]) for car in cars.values()))
    found = {row["key"]: row["value"] for row in every}
    assert len(found) == len(every)
    assert found["gpu.uuid"] == "GPU-a; GPU-b" and found["gpu.vbios"] == "v GPU-a; v GPU-b"
    assert found["gpu.name"] == "Synthetic GPU" and found["cores"] == 16

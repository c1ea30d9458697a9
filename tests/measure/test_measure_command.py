"""Check the command that measures an op: its files, its messages and its exit."""

import contextlib
import json
import re
import signal
import sys
import time
import types
from pathlib import Path

import pytest

from harness.calls import drawn
from harness.calls.cell import Cell, share, sweep
from harness.cli import UserError
from harness.machine import gpu_lock
from harness.measure import __main__ as measure
from harness.measure.gate import Gate, Verdict
from harness.project import fingerprint, registry
from harness.results import parts, raw
from tests.support.measuring import ENVIRONMENT, ROOT
from tests.support.patience import wait_until


def test_the_command_measures_with_a_twin(command, tmp_path):
    job = command("ours", "slow")
    job.communicate()
    assert job.returncode == 0
    rows, sidecar = raw.read(tmp_path / "raw/scale.csv", "")
    assert {row["impl"] for row in rows} == {"ours", "ours_twin", "slow"}
    assert {row["status"] for row in rows} == {"ok"}
    assert sidecar["harness_sha256"] == fingerprint.harness(ROOT)
    assert sidecar["environment"]["gpu"]["name"] == "NVIDIA H200"


def test_the_command_times_drawn_shapes_and_keeps_their_seed(measured, tmp_path):
    (tmp_path / "drawn.json").write_text('{"drawn_seed": 17}')
    measured("ours", "torch_eager", drawn=tmp_path / "drawn.json")
    rows, sidecar = raw.read(tmp_path / "raw/scale.csv", "")
    assert sidecar["schedule"]["drawn_seed"] == 17
    op, _ = registry.op("scale")
    found = {(row["set"], row["case"], row["pass"]) for row in rows}
    chosen, apart = op.sweep[0].name, drawn.cases(op, 17)[0].name
    assert found == {("grid", chosen, name) for name in op.passes} | {
        ("drawn", apart, name) for name in ("forward", "backward")
    }
    assert {row["status"] for row in rows} == {"ok"}


def test_a_part_times_its_shapes_and_the_other_one_the_rest(measured, tmp_path):
    found = []
    for number in (1, 2):
        out = tmp_path / f"raw{number}/scale.csv"
        measured("ours", "torch_eager", part=f"{number}/2", out=out, **{"max-cases": 3})
        rows, sidecar = raw.read(out, "")
        timed = {parts.cell(row) for row in rows if row["status"] == "ok"}
        left = {parts.cell(row) for row in rows if row["status"] == "unreached"}
        assert not timed & left and len(left) == sidecar["unreached"]
        assert re.fullmatch("[0-9a-f]{64}", sidecar["tables_sha256"])
        reasons = {row["reason"] for row in rows if row["status"] == "unreached"}
        assert reasons == {"another part of the measurement times this cell"}
        found.append((timed, left))
    (one, rest), (two, others) = found
    assert (
        one == others and two == rest and len(one | two) == 3 * len(registry.op("scale")[0].passes)
    )


def test_a_part_is_not_timed_with_the_verification_of_another(measured, tmp_path, monkeypatch):
    op, _ = registry.op("scale")
    cells = list(sweep(op, ["bfloat16"], op.passes, 3))
    elsewhere = set(map(str, share(cells, 2, 2)))
    verdict = Gate.verdict

    def parted(gate, impl, cell):
        left = impl == "torch_eager" and str(cell) in elsewhere
        return Verdict("unreached", parts.ELSEWHERE, "") if left else verdict(gate, impl, cell)

    monkeypatch.setattr(Gate, "verdict", parted)
    with pytest.raises(UserError, match=r"torch_eager\.json: leaves .* to another part"):
        measured("ours", "torch_eager", part="2/2", **{"max-cases": 3})
    assert not (tmp_path / "raw").exists()
    measured("ours", "torch_eager", part="1/2", **{"max-cases": 3})


def test_cells_that_the_record_did_not_reach_are_timed_first(measured, tmp_path, monkeypatch):
    """A broken record says nothing, and ends no measurement."""
    recorded = tmp_path / "recorded"
    measured("ours", "torch_eager", part="1/2", out=recorded / "raw/scale.csv", **{"max-cases": 3})
    rows, _ = raw.read(recorded / "raw/scale.csv", "")
    left = {" ".join(parts.cell(row)) for row in rows if row["status"] == "unreached"}
    seen, in_turn = [], measure._in_turn
    monkeypatch.setattr(
        measure, "_in_turn", lambda *given: seen.append(in_turn(*given)) or seen[-1]
    )
    for number in range(2):
        out = tmp_path / f"raw{number}/scale.csv"
        measured("ours", "torch_eager", recorded=recorded, out=out, **{"max-cases": 3})
        (recorded / "raw/scale.json").write_text("{")
    first, second = (list(map(str, each)) for each in seen)
    assert left and set(first[: len(left)]) == left and set(first) == set(second) != left
    assert set(second[: len(left)]) != left


def test_a_part_may_be_timed_again_and_takes_no_other_away(measured, tmp_path):
    """A study that is started once more may have to renew what it has."""
    out = tmp_path / "raw/scale.csv"
    for _ in range(2):
        measured("ours", "torch_eager", part="1/2", out=out, **{"max-cases": 2})
    with pytest.raises(UserError, match=r"leaves out \(shapes of other parts\)"):
        measured("ours", "torch_eager", part="2/2", out=out, **{"max-cases": 2})


def test_a_part_without_a_shape_ends_well(measured, tmp_path):
    out = tmp_path / "raw/scale.csv"
    measured("ours", "torch_eager", part="3/3", out=out, **{"max-cases": 1})
    rows, sidecar = raw.read(out, "")
    assert {row["status"] for row in rows} == {"unreached"}
    assert sidecar["unreached"] == len({parts.cell(row) for row in rows})


def test_shapes_with_short_calls_are_timed_first():
    op, _ = registry.op("scale")
    large, small = sorted(op.sweep, key=lambda case: -case["N"])[:: len(op.sweep) - 1]
    cells = [Cell(case, "float32", pass_) for case in (large, small) for pass_ in op.passes]
    plan = types.SimpleNamespace(op=op, cells=cells, ceilings={"read": 3000.0, "write": 3000.0})
    half = len(op.passes)
    assert measure._in_turn(plan) == [*cells[half:], *cells[:half]]
    lacking = {str(cells[half - 1])}
    first, *others = measure._in_turn(plan, lacking)
    assert {str(first)} == lacking and others == [*cells[half:], *cells[: half - 1]]
    plan.ceilings = {}
    assert measure._in_turn(plan) == cells


def test_rows_stay_in_the_order_of_the_sweep(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "_in_turn", lambda plan, lacking: plan.cells[::-1])
    (tmp_path / "drawn.json").write_text('{"drawn_seed": 17}')
    measured("ours", "torch_eager", drawn=tmp_path / "drawn.json")
    rows, _ = raw.read(tmp_path / "raw/scale.csv", "")
    op, _ = registry.op("scale")
    found = list(dict.fromkeys((row["set"], row["pass"]) for row in rows))
    assert found == [
        *(("grid", name) for name in op.passes),
        ("drawn", "forward"),
        ("drawn", "backward"),
    ]


@pytest.mark.parametrize("whole", [False, True])
def test_networks_take_turns_in_memory_in_fewer_blocks_and_all_have_energy(
    measured, monkeypatch, whole
):
    plans = []
    monkeypatch.setattr(registry, "of_network", lambda name: whole)
    monkeypatch.setattr(measure, "measure", lambda plan, *rest: plans.append(plan))
    measured("ours", "torch_eager", worker="", processes=6, **{"min-blocks": 16})
    (plan,) = plans
    assert plan.timing.processes == (1 if whole else 6)
    assert plan.timing.min_blocks == (6 if whole else 16)
    assert plan.singly == whole == plan.worker.endswith("ParkedWorker")
    assert plan.least_calls == (1 if whole else 3)
    assert (plan.timing.energy_impls == plan.impls) == whole


def test_a_tuner_finds_what_it_chose_alone(measured, tmp_path, monkeypatch):
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)
    measured("ours", "says_how_it_tunes")
    rows, sidecar = raw.read(tmp_path / "raw/scale.csv", "")
    told = {row["reason"] for row in rows if row["impl"] == "says_how_it_tunes"}
    assert told == {"kept"}
    assert sidecar["autotuned"] == {}


def test_the_wait_for_a_gpu_counts_as_no_time_of_the_measurement(measured, tmp_path, monkeypatch):
    """Another job seems to have the GPU for a day."""
    day, clock, hold = 86400.0, time.monotonic, gpu_lock.hold
    waited = []

    @contextlib.contextmanager
    def held(**options):
        with hold(**options) as gpu:
            waited.append(day)
            yield gpu

    monkeypatch.setattr(time, "monotonic", lambda: clock() + sum(waited))
    monkeypatch.setattr(gpu_lock, "hold", held)
    measured("ours")
    overhead = raw.read(tmp_path / "raw/scale.csv", "")[1]["overhead"]
    assert waited and 0 < overhead["timed_s"] < overhead["total_s"] < day / 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"op": "nonesuch"}, "ops/: no file declares an op 'nonesuch'"),
        ({"passes": "sideways"}, "--passes: 'sideways' is none of forward, backward, both"),
        (
            {"ceilings": "none.csv"},
            "none.csv: missing; make it with python -m harness.machine.ceilings",
        ),
    ],
)
def test_bad_input_is_named(arguments, tmp_path, monkeypatch, changes, problem):
    monkeypatch.setattr(sys, "argv", ["measure", *arguments("ours", **changes)])
    with pytest.raises(UserError, match=problem):
        measure.main()
    assert not (tmp_path / "raw").exists()


def test_an_op_that_the_configuration_leaves_nothing_of_has_files_without_rows(
    measured, tmp_path, capsys
):
    # The op scale has this pass, but the first cases of its sweep have no such dtype.
    measured("ours", "slow", dtypes="float32")
    said = capsys.readouterr().err
    assert "scale: left out, no case of its sweep in dtypes float32" in said
    rows, sidecar = raw.read(tmp_path / "raw/scale.csv", "")
    assert (rows, sidecar["rows"], sidecar["mode"]) == ([], 0, "measured")


def test_the_machine_is_described_anew_only_where_it_has_changed(measured, tmp_path):
    sidecars = []
    for out in ("one/scale.csv", "two/scale.csv"):
        measured("ours", out=tmp_path / out)
        sidecars.append(json.loads((tmp_path / out).with_suffix(".json").read_text()))
    # The made-up description in place of the file was that of another machine.
    assert sidecars[0]["environment"]["gpu"]["name"] == "NVIDIA H200"
    assert sidecars[0]["environment_sha256"] == sidecars[1]["environment_sha256"]
    assert sidecars[0]["run_id"] == sidecars[1]["run_id"] != ENVIRONMENT["run_id"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_parent(command, tmp_path, number):
    job = command("hangs_at_once")
    log = tmp_path / "prepared"
    wait_until(lambda: log.exists() and log.read_text())
    # The children are the fork server and the worker that hangs.
    others = [*children_of(job.pid), int(log.read_text().split()[0])]
    assert len(others) == 2
    assert all(map(running, others))
    job.send_signal(number)
    job.communicate()
    assert job.returncode == (-number if number == signal.SIGKILL else 128 + number)
    wait_until(lambda: not any(map(running, others)))
    assert [path.name for path in (tmp_path / "raw").iterdir()] == [".scale.journal"]


def children_of(parent: int) -> list[int]:
    """Return the processes that any thread of a process has started."""
    threads = (Path("/proc") / str(parent) / "task").glob("*/children")
    return [int(word) for thread in threads for word in thread.read_text().split()]


def running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False

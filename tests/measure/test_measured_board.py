"""Check that all rows of an op are of one GPU, and that a GPU which vanishes costs no cell."""

import json

import pytest

from harness.cli import UserError
from harness.measure import autotune
from harness.results import raw
from tests.support.measuring import BOARD, CELLS, FakeMonitor, report, run

OTHER = "GPU-11-fake"


@pytest.fixture
def verified(tmp_path):
    report(tmp_path, "fake", "ours", CELLS)
    return tmp_path


class Vanishing(FakeMonitor):
    """Imitate a GPU that vanishes during a cell, counted from 0."""

    def __init__(self, cell):
        super().__init__()
        self.left = cell

    def refuse_vanished(self):
        self.left -= 1
        if self.left < 0:
            raise UserError("gone")


@pytest.mark.parametrize("cell", range(len(CELLS)))
def test_a_gpu_that_vanishes_ends_the_job_and_keeps_the_cells_before(verified, cell):
    with pytest.raises(UserError, match="gone"):
        run(verified, ["ours"], Vanishing(cell))
    assert [path.name for path in (verified / "raw").iterdir()] == [".fake.journal"]
    lines = (verified / "raw/.fake.journal").read_text().splitlines()
    kept = [json.loads(line)["name"] for line in lines if '"what": "cell"' in line]
    assert kept == [str(each) for each in CELLS[:cell]]
    rows, sidecar = raw.read(run(verified, ["ours"]), "")
    assert sidecar["resumed"] == 1
    assert {row["case"] for row in rows} == {each.case.name for each in CELLS}


def test_rows_and_sidecar_name_the_board_and_the_time(verified):
    path = run(verified, ["ours"])
    rows, sidecar = raw.read(path, "")
    assert {row["board"] for row in rows} == {BOARD}
    span = sidecar["span"]
    assert span["began"].endswith("Z") and span["began"] <= span["ended"]
    # Rows of a GPU that is not the one described are refused.
    sidecar["environment"]["gpu"]["uuid"] = OTHER
    sidecar["environment_sha256"] = raw.environment_sha256(sidecar["environment"])
    path.with_suffix(".json").write_text(json.dumps(sidecar))
    with pytest.raises(UserError, match=rf"rows of board {BOARD} where fake.json says {OTHER}"):
        raw.read(path, "")


def test_rows_of_former_runs_name_no_board(verified):
    path = run(verified, ["ours"])
    rows, sidecar = raw.read(path, "")
    column = raw.HEADER.index("board")
    lines = [line.split(",") for line in path.read_text().splitlines()]
    lines = [",".join(line[:column] + line[column + 1 :]) for line in lines]
    path.write_text("\n".join(lines) + "\n")
    sidecar["csv_sha256"] = raw.sha256(path.read_bytes())
    path.with_suffix(".json").write_text(json.dumps(sidecar))
    assert raw.read(path, "")[0] == [row | {"board": ""} for row in rows]


def test_an_op_is_measured_on_the_board_that_is_asked_for(command, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_GPUS", "2")
    job = command("ours", board=OTHER)
    _, words = job.communicate()
    assert job.returncode == 0, words
    rows, sidecar = raw.read(tmp_path / "raw/scale.csv", "")
    assert {row["board"] for row in rows} == {OTHER}
    assert sidecar["environment"]["gpu"]["uuid"] == OTHER
    assert "gpus" not in sidecar["environment"]
    # The rates of that board, which the sidecar names once.
    assert [row["quantity"] for row in sidecar["ceilings"]] == ["launch"]
    machine = json.loads((tmp_path / "environment.json").read_text())
    assert [gpu["uuid"] for gpu in machine["gpus"]] == [BOARD, OTHER]
    assert sidecar["run_id"] == machine["run_id"]


@pytest.mark.parametrize(
    ("tuned", "wanted", "found"),
    [
        ({}, None, BOARD),
        ({}, OTHER, OTHER),
        ({"quack": {"gpu": OTHER}}, None, OTHER),
        ({"quack": {"gpu": OTHER}}, BOARD, OTHER),
    ],
)
def test_choices_bind_an_op_to_their_board(driver, monkeypatch, tmp_path, tuned, wanted, found):
    monkeypatch.setenv("FAKE_GPUS", "2")
    with autotune.lock_board(tmp_path, "matmul", tuned, wanted) as gpu:
        assert gpu.uuid == found

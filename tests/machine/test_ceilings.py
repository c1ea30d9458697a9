"""Check that ceilings are read back as written, and that none passes its peak unseen."""

import contextlib
import csv
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from harness.cli import UserError
from harness.machine import ceilings, datasheets
from harness.machine.nvml import Gpu
from harness.results import columns, times

ROOT = Path(__file__).resolve().parents[2]
HEADER = "quantity,unit,value,sm_mhz,source,board\n"
BOARD = "GPU-1"
GPUS = ["a100-sxm4-80gb", "h100-80gb-hbm3", "h200", "b200"]
READ = ("read", "GB/s", 4380.5, 1755, "measured")
LAUNCH = ("launch", "us", 4.5, None, "measured")
FP8 = "float8_e4m3fn"


def run(tmp_path, monkeypatch, gpu=None, measured=()):
    """Return the file that the command writes with this GPU, whose probes find these rows."""
    out = tmp_path / "ceilings.csv"
    monkeypatch.setattr(sys, "argv", ["ceilings", "--out", str(out)])
    monkeypatch.setattr(ceilings.gpu_lock, "gpus", lambda: [gpu] if gpu else [])

    def hold(exclusive, uuid):
        assert exclusive and uuid is None
        return contextlib.nullcontext(gpu)

    monkeypatch.setattr(ceilings.gpu_lock, "hold", hold)
    probes = types.ModuleType("harness.machine.peaks")
    probes.measure = lambda: [row[:-1] for row in measured]
    monkeypatch.setitem(sys.modules, "harness.machine.peaks", probes)
    monkeypatch.setattr("harness.machine.peaks", probes, raising=False)
    ceilings.main()
    return out


def test_without_a_gpu_they_are_a_header(tmp_path, monkeypatch):
    out = run(tmp_path, monkeypatch)
    assert out.read_text() == HEADER
    assert ceilings.read(out) == []


def test_they_are_read_as_written(tmp_path):
    out = tmp_path / "ceilings.csv"
    rows = [(*row, BOARD) for row in (READ, LAUNCH)]
    ceilings.write(out, rows)
    assert ceilings.read(out) == [dict(zip(ceilings.HEADER, row, strict=True)) for row in rows]


def test_the_data_sheet_follows_what_was_measured(tmp_path, monkeypatch):
    rows = ceilings.read(run(tmp_path, monkeypatch, Gpu(0, "GPU-1", "NVIDIA H200"), [READ]))
    assert rows[0]["source"] == "measured"
    assert {row["quantity"]: row["value"] for row in rows[1:]} == {
        "memory": 4800,
        FP8: 1979,
        "bfloat16": 989.5,
        "float16": 989.5,
        "float32": 67,
    }
    assert all(row["source"].startswith("data sheet: NVIDIA H200") for row in rows[1:])
    assert all(row["sm_mhz"] is None for row in rows[1:])


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H100 PCIe", "Another GPU"])
def test_a_gpu_without_a_data_sheet_has_its_own_rows_only(tmp_path, monkeypatch, name):
    rows = ceilings.read(run(tmp_path, monkeypatch, Gpu(0, "GPU-1", name), [READ]))
    assert [row["quantity"] for row in rows] == ["read"]


def test_a_value_above_the_data_sheet_is_said(tmp_path, monkeypatch, capsys):
    fast = ("write", "GB/s", 4801.0, 1980, "measured")
    run(tmp_path, monkeypatch, Gpu(0, "GPU-1", "NVIDIA H200"), [READ, fast, LAUNCH])
    said = capsys.readouterr().err
    assert said == "tilewright: write: 4801 GB/s measured, above the data sheet's 4800\n"


def test_data_sheets_are_dense_and_name_their_sources():
    rows = datasheets.rows()
    assert list(dict.fromkeys(row["gpu"] for row in rows)) == GPUS
    for row in rows:
        assert row["source"].startswith("NVIDIA ") and " 20" in row["source"]
        before, halved, sparse = row["source"].partition("; half of ")
        if halved:
            assert float(sparse.split(",")[0]) == 2 * float(row["value"])
            assert sparse.endswith("which is with sparsity")
        assert "," in before and row["unit"] == (
            "GB/s" if row["quantity"] == "memory" else "TFLOP/s"
        )
    for gpu in GPUS:
        values = {row[0]: row[2] for row in datasheets.of(gpu)}
        assert values["float32"] < values["bfloat16"] == values["float16"]
        # On these GPUs float8 has twice the rate of bfloat16, or does not exist.
        assert values.get(FP8, 2 * values["bfloat16"]) == 2 * values["bfloat16"]


def test_a_measured_row_binds_and_the_data_sheet_stands_in():
    sheet = {"quantity": "bfloat16", "value": 989.5, "source": "data sheet: x"}
    measured = {"quantity": "bfloat16", "value": 700.0, "source": "measured"}
    for rows in ([sheet, measured], [measured, sheet]):
        assert times.limits({"ceilings": rows}) == {"bfloat16": 700.0}
    assert times.limits({"ceilings": [sheet]}) == {"bfloat16": 989.5}


@pytest.mark.parametrize(
    "text", ["", "a,b\n", HEADER + "read,GB/s\n", HEADER + "read,GB/s,x,1,y\n"]
)
def test_a_table_that_holds_no_ceilings_is_refused(tmp_path, text):
    out = tmp_path / "ceilings.csv"
    out.write_text(text)
    with pytest.raises(UserError, match=r"ceilings\.csv.*make it with"):
        ceilings.read(out)
    out.unlink()
    with pytest.raises(UserError, match="missing"):
        ceilings.read(out)


def table(folder: Path, rows: list[tuple], *boards: str) -> str:
    """Return the paper's table for a run with these rows of each board."""
    shown = [("run_id", *ceilings.HEADER)]
    for board in boards or [BOARD]:
        shown += [("20000101T0000Z-a-h200", *row, board) for row in rows]
    sheets = [list(datasheets.rows()[0]), *(row.values() for row in datasheets.rows())]
    for name, lines in (("shown_ceilings", shown), ("datasheets", sheets)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows(lines)
    (folder / "columns.json").write_text(columns.declared())
    out = folder / "table.tex"
    call = [sys.executable, ROOT / "paper/tables/ceilings.py", "--run", folder, "--out", out]
    subprocess.run(call, check=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"})
    return out.read_text()


def test_the_table_compares_with_the_data_sheets(tmp_path):
    text = table(tmp_path, [READ, LAUNCH, *datasheets.of("h200")])
    assert r"{\%} & {A100} & {H100} & {B200} \\" in text
    assert r"read & GB/s & 4380 & 1755 & 4800 & 91.3 & 2039 & 3350 & 7700 \\" in text
    assert r"launch & us & 4.5 & {--} & {--} & {--} & {--} & {--} & {--} \\" in text
    assert "NVIDIA H200 Tensor Core GPU, November 2023, SXM" in text and "halved" in text
    assert "Above the data sheet" not in text


def test_the_table_of_an_unknown_gpu_has_all_data_sheets_beside_it(tmp_path):
    text = table(tmp_path, [READ])
    assert r"{A100} & {H100} & {H200} & {B200} \\" in text
    assert r"read & GB/s & 4380 & 1755 & {--} & {--} & 2039" in text


def test_no_share_above_the_peak_is_printed_as_if_it_were_any_other(tmp_path):
    fast = ("bfloat16", "TFLOP/s", 1000.0, 1980, "measured")
    text = table(tmp_path, [fast, READ, *datasheets.of("h200")])
    assert r"& 989.5 & {\textbf{101.1!}} &" in text
    assert r"\textbf{Above the data sheet, so one of the two is wrong: bfloat16.}" in text


def test_each_board_of_a_run_has_its_ceilings(tmp_path):
    text = table(tmp_path, [READ], "GPU-00000000", "GPU-11111111")
    titles = [line for line in text.replace(r"\allowbreak{}", "").splitlines() if "Run" in line]
    assert [line.partition(", board ")[2] for line in titles] == [
        r"\texttt{GPU-00000000}",
        r"\texttt{GPU-11111111}",
    ]
    assert text.count("read & GB/s & 4380") == 2
    assert "board" not in table(tmp_path, [READ])


def test_a_run_without_ceilings_says_so(tmp_path):
    assert "without ceilings" in table(tmp_path, [])

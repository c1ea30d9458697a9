"""Check the table of targets on made-up cells: which count, how they are shown, met or missed."""

import importlib
import re
from pathlib import Path

import pandas as pd
import pytest

from harness.study import jobs
from tests.support.paper_scripts import save, script

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "paper" / "tables" / "targets.py"
TARGETS = ROOT / "paper" / "targets.csv"
COLUMNS = ["kernel", "op", "pass", "case", "dtype", "least_mib", "quantity", "must", "aim"]
COLUMNS += ["gpu", "source"]
MIB = 2**20
MISSED = r"\textbf{missed}"


def row(impl, us, op="add", case="N8", mib=64, **more):
    same = {"op": op, "family": "vector", "case": case, "dtype": "bfloat16", "pass": "forward"}
    same |= {"set": "grid", "timed_by": "graph", "run_id": "r"}
    same |= {"impl": impl, "device_us": us, "call_us": us + 5, "peak_mem_bytes": 100}
    return same | {"status": "ok", "gbps": mib * MIB / us / 1e3, "size_N": 8} | more


def lost(**more):
    """A cell of ours that ran out of memory."""
    none = dict.fromkeys(("device_us", "call_us", "gbps"))
    return row("ours", 1.0, status="oom") | none | more


def shared(monkeypatch):
    """Return the module that reads the targets."""
    for folder in (TABLE.parents[1], TABLE.parent):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("_targets")


@pytest.fixture
def typeset(tmp_path, monkeypatch):
    """Run a script of the tables on some targets and rows; return the text that it wrote."""

    def make(path, targets, rows):
        save(tmp_path, "summary", rows)
        run = {"run_id": "r", "mode": "replayed", "date": "2026-11-23", "commit": "c", "board": "g"}
        run |= {"gpu": "one GPU"}
        runs = [run | {"ops": "add mul", "changed_ops": "mul"}]
        other = {"run_id": "s", "board": "h", "gpu": "another"}
        runs += [run | other | {"ops": "add", "changed_ops": ""}]
        save(tmp_path, "runs", runs)
        # Another GPU of the run, whose rates bound none of these cells.
        limits = [("r", "other", "copy", 1.0), ("r", "other", "write", 1.0)]
        limits += [("r", "g", "copy", 4000.0), ("r", "g", "write", 2000.0)]
        limits += [("s", "h", "copy", 2000.0), ("s", "h", "write", 1000.0)]
        ceilings = pd.DataFrame(limits, columns=["run_id", "board", "quantity", "value"])
        save(tmp_path, "shown_ceilings", ceilings.assign(source="measured"))
        listed = pd.DataFrame([dict.fromkeys(COLUMNS, "") | one for one in targets])
        listed.to_csv(tmp_path / "targets.csv", index=False)
        monkeypatch.setattr(shared(monkeypatch), "TARGETS", tmp_path / "targets.csv")
        return script(path, tmp_path, tmp_path / "out.tex").read_text()

    return make


@pytest.fixture
def table(typeset):
    """Set the table for some targets and rows; return its lines as lists of cells."""

    def make(targets, rows):
        text = typeset(TABLE, targets, rows)
        text = text.replace(r"\allowbreak{}", "").split(r"\midrule")[1]
        lines = [line for line in text.splitlines() if line.endswith(r"\\") and "&" in line]
        return [[cell.strip() for cell in line[:-2].split("&")] for line in lines]

    return make


def target(**more):
    same = {"kernel": "a kernel", "op": "add", "pass": "forward", "quantity": "tb_s"}
    return same | {"dtype": "bfloat16", "must": "2.0", "aim": "4.0", "source": "here"} | more


def test_rounding_hides_no_miss(table):
    """A rate of 1.997 TB/s is not 2.0, and 10.02 µs are not 10."""
    (line,) = table([target()], [row("ours", 64 * MIB / 1.997e6), row("lib", 20.0)])
    assert line[5] == "1.997" and MISSED in line[7]
    slow = target(quantity="us", must="10", aim="6")
    (line,) = table([slow], [row("ours", 10.02), row("lib", 20.0)])
    assert line[5] == "10.02" and MISSED in line[7]


@pytest.mark.parametrize(("us", "state"), [(16.0, "aim met"), (30.0, "must met"), (40.0, MISSED)])
def test_a_rate_is_held_against_both_bounds(table, us, state):
    (line,) = table([target()], [row("ours", us), row("lib", 20.0)])
    assert line[3:6] == ["2.0", "4.0", f"{64 * MIB / us / 1e6:.2f}"]
    assert line[6:8] == ["0/1" if state == MISSED else "1/1", state]
    assert line[8:] == [r"\texttt{lib}", "3.36"]


def test_less_is_better_for_times_and_shares_of_eager(table):
    held = 64 * MIB
    rows = [row("ours", 30.0, peak_mem_bytes=held + 12)]
    rows += [row("torch_eager", 40.0, peak_mem_bytes=held + 100)]
    targets = [target(quantity="us", must="31", aim="29")]
    targets += [target(quantity="call_ratio", must="1.1", aim="0.7")]
    targets += [target(quantity="memory_share", must="0.15", aim="")]
    lines = table(targets, rows)
    assert [(line[5], line[7]) for line in lines] == [
        ("30.0", "must met"),
        ("0.78", "must met"),
        ("0.120", "must met"),
    ]


def test_shares_of_ceilings_and_of_rivals(table):
    rows = [row("ours", 20.0), row("lib", 10.0), row("torch_eager", 50.0), row("ours_twin", 1.0)]
    # A time by events and a drawn shape are never the best rival and never among the cells.
    rows += [row("hosted", 5.0, timed_by="events"), row("ours", 9.0, case="N7", set="drawn")]
    names = ("copy_share", "write_share", "peer_ratio", "eager_ratio")
    lines = table([target(quantity=name, must="1", aim="") for name in names], rows)
    assert [line[5] for line in lines] == ["0.839", "1.678", "0.500", "2.50"]
    assert [line[7] for line in lines] == [MISSED, "must met", MISSED, "must met"]


def test_a_target_on_every_op_speaks_of_no_network(table):
    """The wall time of a network stood among host times."""
    rows = [row("ours", 20.0), row("torch_eager", 40.0)]
    whole = {"op": "model_decode", "family": "model"}
    rows += [row("ours", 90.0, **whole), row("torch_eager", 40.0, **whole)]
    (line,) = table([target(op="*", quantity="call_ratio", must="1", aim="")], rows)
    assert line[5:8] == ["0.56", "1/1", "must met"]


def test_each_part_of_an_op_is_measured_by_its_own_ceiling(table):
    rows = [row("ours", 20.0), row("ours", 20.0, case="N9", run_id="s")]
    for case, share in (("N8", "0.839"), ("N9", "1.678")):
        (line,) = table([target(quantity="copy_share", case=case, must="1", aim="")], rows)
        assert line[5] == share


def test_the_furthest_of_several_cells_is_shown_and_how_many_meet(table):
    rows = [row("ours", 20.0), row("ours", 60.0, case="N9"), row("ours", 25.0, case="N10")]
    rows += [row("ours", 999.0, case="N11", mib=1), row("ours", 999.0, op="mul")]
    (line,) = table([target(least_mib="64", aim="")], rows)
    assert (line[1], line[6], line[7]) == (r"\texttt{N9}", "2/3", MISSED)


def test_a_cell_at_the_least_traffic_counts(table):
    (line,) = table([target(least_mib="64")], [row("ours", 20.0, gbps=3.35544e3)])
    assert line[6] == "1/1"


def test_a_pattern_is_for_the_whole_name(table):
    rows = [row("ours", 20.0), row("ours", 99.0, case="N8-causal")]
    (line,) = table([target(case="N8", op="add mul")], rows)
    assert line[1] == r"\texttt{add} \texttt{N8}"


def test_code_that_has_changed_since_is_marked(table):
    lines = table([target(), target(op="mul")], [row("ours", 16.0), row("ours", 16.0, op="mul")])
    assert [line[7] for line in lines] == ["aim met", r"aim met$^\dagger$"]


def test_a_constant_time_is_told_apart_from_the_rate(typeset):
    def cells(op, start, rate):
        sizes = {f"N{mib}": mib for mib in (64, 256, 1024)}
        return [
            row("ours", start + mib * MIB / rate / 1e6, op=op, case=case, mib=mib)
            for case, mib in sizes.items()
        ]

    rows = [*cells("add", 5.0, 4.0), *cells("mul", 7.0, 4.2), *cells("scale", 9.0, 4.4)]
    rows += [one | {"impl": "lib"} for one in cells("add", 3.0, 2.0)]
    rows += [one | {"impl": "lib"} for one in cells("mul", 3.0, 2.0)]
    rows += cells("dot", 5.0, 4.0)[:1]
    targets = [target(op="add mul scale dot", least_mib="64"), target(op="add", least_mib="")]
    text = typeset(TABLE.with_name("latency_fit.py"), targets, rows)
    found = re.findall(r"\\SI\{([\d.]+)\}", text)
    reached = [64 * MIB / (us * 1e6 + 64 * MIB / rate) for us, rate in ((6, 4.1), (3, 2))]
    assert found == ["6.0", "4.10", "3.0", "2.00", "64", *(f"{rate:.1f}" for rate in reached)]
    assert "in the median over 2~operations." in text
    one = typeset(TABLE.with_name("latency_fit.py"), targets[:1], [*rows[:3], *rows[9:12]])
    assert "median" not in one and r"in \texttt{add}." in one


def test_a_rate_for_one_gpu_judges_no_cell_of_another(table, typeset):
    """A target of the H200 stood as missed by an H100, whose memory cannot give that rate."""
    rows = [row("ours", 60.0, run_id="s"), row("ours", 40.0, case="N9", run_id="s")]
    named = [target(gpu="one GPU"), target(gpu="another"), target()]
    lines = table(named, rows)
    assert [line[5:8] for line in lines] == [
        ["1.12", "--", "other GPU"],
        ["1.12", "0/2", MISSED],
        ["1.12", "0/2", MISSED],
    ]
    text = typeset(TABLE, named, rows)
    assert "1 were set for another GPU" in text and "``Other GPU''" in text
    # The cells that this GPU took are judged, and by them alone.
    lines = table([target(gpu="one GPU")], [*rows, row("ours", 16.0, case="N10")])
    assert lines[0][1:2] + lines[0][5:8] == [r"\texttt{N10}", "4.19", "1/1", "aim met"]


def test_a_target_without_a_record_or_time_says_so(table):
    rows = [row("ours", 20.0), lost(op="mul"), row("lib", 20.0, op="mul")]
    rows += [lost(case="N9"), row("lib", 20.0, case="N9")]
    lines = table([target(op="dot"), target(op="mul"), target()], rows)
    states = [line[7] for line in lines]
    assert states == ["not recorded", "no time", MISSED]
    assert [line[6] for line in lines] == ["--", "--", "1/2"]


def test_an_aim_that_stands_alone_is_missed_apart(table):
    (line,) = table([target(must="", aim="4.0")], [row("ours", 20.0)])
    assert line[6:8] == ["0/1", "aim missed"]


def test_the_committed_targets_are_well_formed(monkeypatch):
    quantities = shared(monkeypatch).QUANTITIES
    frame = pd.read_csv(TARGETS, dtype=str, keep_default_na=False)
    assert list(frame.columns) == COLUMNS
    known = {*jobs.ops(ROOT), "*"}
    for one in frame.itertuples():
        assert set(one.op.split()) <= known, one.kernel
        assert one.quantity in quantities
        assert re.compile(one.case)
        assert one.must or one.aim
        # Shares and ratios hold on any GPU; a rate or a time is that of one.
        assert bool(one.gpu) == (one.quantity in ("tb_s", "us", "ms")), one.kernel
        assert all(float(bound) for bound in (one.must, one.aim) if bound)

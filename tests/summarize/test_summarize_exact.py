"""Check which rows go into which CSV file; stand-ins make the rows, so each test is quick.

`make mutants` runs these tests. The files of a whole run are tested in test_summarize.py.
"""

import json
import sys

import pytest

from harness.cli import UserError
from harness.machine import datasheets
from harness.project import libraries, source_tree
from harness.results import columns, manifest, raw, reports, schema, times
from harness.summarize import (
    __main__ as summarize,
)
from harness.summarize import (
    capabilities,
    comparisons,
    inference,
    ledger,
    networks,
    rates,
    tables,
    timings,
)
from tests.support.synthetic import block


def named(patch, module, *names):
    """Make functions of a module answer with their name and arguments."""
    for name in names:
        patch.setattr(module, name, lambda *args, name=name: (name, *args))


@pytest.fixture
def written(monkeypatch):
    """Record the arguments of `_write`: columns and rows, by the name of the file."""
    found = {}

    def write(folder, table, rows, **names):
        assert table.name not in found
        found[table.name] = folder, table, rows
        found[table.name] += (names,) if names else ()

    monkeypatch.setattr(summarize, "_write", write)
    return found


def unchecked(path, name, remedy):
    """Return the content of a JSON file. Its folder says of which format it is."""
    assert name == {"build": "build", "tuned": "tuned", "other": "tuned"}.get(
        path.parent.name, path.stem
    )
    assert remedy == reports.REMEDY
    return json.loads(path.read_text())


def car(mode, run_id="a", **other):
    return {"mode": mode, "run_id": run_id, "environment": {"gpu": f"gpu of {run_id}"}} | other


STUDY = {
    "add": ([{"family": "vector", "n": 1}, {"family": "wrong"}], car("measured")),
    "mul": (
        [{"family": "vector"}],
        car("replayed", "b", environment_sha256="digest", ceilings={"read": 1.0}),
    ),
    "dot": ([], car("replayed", "b", environment_sha256="digest")),
    "gone": ([], car("replayed", "b", environment_sha256="digest")),
}
OVERHEAD = [{"share": share, "total_s": 7.0} for share in (0.5, 0.1)]
OVERHEAD += [{"share": 0.25, "total_s": 90.4}]
OPS = {"dot": "reductions", "softmax": "softmax", "add": "wrong", "relu": "activation"}


@pytest.fixture
def rooms(monkeypatch, tmp_path, written):
    """Make a folder of a run; return it with the calls of the checking and writing rooms."""
    calls = {"checked": []}
    named(
        monkeypatch, tables, "verification", "sanitizer", "ir", "changed", "tuning", "instructions"
    )
    named(monkeypatch, tables, "environment", "ceilings")
    named(monkeypatch, reports, "verified")
    named(monkeypatch, capabilities, "rows", "gaps")
    named(monkeypatch, ledger, "rows")
    named(monkeypatch, datasheets, "rows")
    named(monkeypatch, networks, "rows", "call_times", "remarks", "dissected")
    monkeypatch.setattr(schema, "read", unchecked)

    def runs(*args):
        calls["runs"] = args
        return [{"gpu": "H200"}, {"gpu": "H100"}]

    def overhead(*args):
        calls["overhead"] = args
        return OVERHEAD

    def resources(builds):
        calls["builds"] = builds
        return iter([{"file": "vector", "kernel": "k"}, {"file": "vector", "spills": 1}])

    def ops(root):
        assert root == summarize.ROOT
        return OPS

    monkeypatch.setattr(reports, "folders", lambda *args: [("folders", *args)])
    monkeypatch.setattr(tables, "runs", runs)
    monkeypatch.setattr(tables, "overhead", overhead)
    monkeypatch.setattr(tables, "resources", resources)
    monkeypatch.setattr(source_tree, "ops", ops)
    monkeypatch.setattr(manifest, "check", lambda *args: calls["checked"].append(args))

    def write_cells(*args):
        calls["cells"] = args
        return [{"op": "mul"}]

    def network_ops(root):
        assert root == summarize.ROOT
        return {"absent": "models", "mul": "models"}

    monkeypatch.setattr(source_tree, "network_ops", network_ops)
    monkeypatch.setattr(summarize, "_write_cells", write_cells)
    (tmp_path / "environment.json").write_text('{"run_id": "here", "gpu": null, "gpus": []}')
    (tmp_path / "build").mkdir()
    for name in ("vector", "softmax", "reductions", "other"):
        (tmp_path / "build" / f"{name}.json").write_text(json.dumps({"name": name}))
    (tmp_path / "build" / "vector.txt").write_text("{}")
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "gpu.json").write_text('{"device": "a"}')
    (tmp_path / "tuned" / "gpu.txt").write_text("")
    monkeypatch.setattr(summarize, "TUNED", tmp_path / "tuned")
    monkeypatch.delenv("TILEWRIGHT_TUNED", raising=False)
    return calls


@pytest.fixture
def study(monkeypatch, rooms):
    """Make `measurements` give STUDY, or what is left of it."""
    found = dict(STUDY)

    def measurements(*args):
        rooms["asked"] = args
        return found

    monkeypatch.setattr(summarize, "measurements", measurements)
    return found


def test_each_file_has_the_rows_of_its_room(rooms, study, written, tmp_path):
    recorded = tmp_path / "recorded"
    said = summarize.summarize(tmp_path, recorded, ["add"], ["softmax", "mul"])
    assert said == "measuring took 90 s, overhead 25 %"
    rows = {op: rows for op, (rows, _) in STUDY.items()}
    cars = {op: sidecar for op, (_, sidecar) in STUDY.items()}
    families = {"add": "vector", "mul": "vector", "dot": "reductions", "softmax": "softmax"}
    folders = [("folders", tmp_path, recorded, cars), tmp_path / "verify" / "softmax"]
    found = ("verified", folders)
    built = [{"name": name} for name in ("reductions", "softmax", "vector")]
    other = {"gpu": "gpu of b", "environment_sha256": "digest"}
    environments = [("a", {"gpu": "gpu of a"}), *[("b", other)] * 3]
    environments += [("here", {"run_id": "here", "gpu": None})]
    assert rooms["asked"] == (tmp_path, ["add"])
    assert rooms["cells"] == (tmp_path, STUDY)
    assert rooms["checked"] == [(recorded, ["mul", "dot", "gone"], {"vector", "reductions"})]
    assert rooms["builds"] == built
    assert rooms["runs"] == (cars, ("changed", found, cars))
    assert rooms["overhead"] == (rows, cars)
    assert {folder for folder, *_ in written.values()} == {tmp_path}
    assert {columns.TABLES[name] is found[1] for name, found in written.items()} == {True}
    shown = {name: found[2:] for name, found in written.items()}
    (sanitized,) = shown.pop("sanitizer")
    assert sanitized[:3] == ("sanitizer", tmp_path, recorded)
    assert list(sanitized[3]) == list(families.values())
    told = [(name, rows["mul"]) for name in ("call_times", "remarks")]
    resources = [{"file": "vector", "kernel": "k"}, {"file": "vector", "spills": 1}]
    assert shown == {
        "verification": (("verification", found, families),),
        "capabilities": (("rows", found, families),),
        "gaps": (("gaps", found, families),),
        "ledger": (("rows", found, families, rows),),
        "resources": (resources, {"instruction": ("instructions", built)}),
        "ir": (("ir", built),),
        "runs": ([{"gpu": "H200"}, {"gpu": "H100"}],),
        "tuning": (("tuning", {"gpu.json": {"device": "a"}}, built, {"H200", "H100"}),),
        "environment": (("environment", environments),),
        "shown_ceilings": (("ceilings", cars),),
        "datasheets": (("rows",),),
        "overhead": (OVERHEAD,),
        "network": (("rows", [{"op": "mul"}], {("mul", "b"): {"read": 1.0}}, *told),),
    } | {
        name: (("dissected", tmp_path, recorded, table),)
        for name, table in columns.DISSECTED.items()
    }
    assert (tmp_path / "columns.json").read_text() == columns.declared()


def test_a_run_that_was_replayed_whole_says_so(rooms, study, tmp_path):
    del study["add"]
    said = summarize.summarize(tmp_path, tmp_path)
    assert said == "of the recorded run, measuring took 90 s, overhead 25 %"


def test_a_run_that_was_measured_whole_needs_no_manifest(rooms, study, tmp_path):
    for op in ("mul", "dot", "gone"):
        del study[op]
    assert summarize.summarize(tmp_path, tmp_path).startswith("measuring took")
    assert rooms["checked"] == []


def test_the_environment_of_a_run_is_that_beside_its_times(rooms, study, written, tmp_path):
    (tmp_path / "environment.json").write_text('{"run_id": "a", "gpu": "another"}')
    summarize.summarize(tmp_path, tmp_path)
    _, _, (_, environments) = written["environment"]
    assert [run_id for run_id, _ in environments] == ["a", "b", "b", "b"]
    assert environments[0] == ("a", {"gpu": "gpu of a"})


@pytest.mark.parametrize(("place", "found"), [("", {}), ("other", {"b.json": {"c": 1}})])
def test_the_tables_shown_are_those_that_the_kernels_read(
    rooms, study, written, tmp_path, monkeypatch, place, found
):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.json").write_text('{"c": 1}')
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "c.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("TILEWRIGHT_TUNED", str(tmp_path / place) if place else "")
    summarize.summarize(tmp_path, tmp_path)
    assert written["tuning"][2][1] == found


def test_a_run_without_a_cell_is_refused(rooms, study, written, tmp_path):
    for op in ("add", "mul"):
        del study[op]
    with pytest.raises(UserError, match="raw: no op has a cell; widen dtypes, passes or ops"):
        summarize.summarize(tmp_path, tmp_path)
    assert not written and "cells" not in rooms


def test_measurements_are_those_of_the_ops_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(raw, "read", lambda path, remedy: (path, remedy))
    folder = tmp_path / "raw"
    folder.mkdir()
    with pytest.raises(UserError, match="raw: no CSV file; run the measure or replay stage first"):
        times.measurements(tmp_path)
    for name in ("mul.csv", "add.csv", "add.json"):
        (folder / name).write_text("")
    add, mul = ((folder / f"{op}.csv", f"measure or replay {op} again") for op in ("add", "mul"))
    assert list(times.measurements(tmp_path).items()) == [("add", add), ("mul", mul)]
    assert times.measurements(tmp_path, ["mul", "dot"]) == {"mul": mul}
    with pytest.raises(UserError, match="no CSV file"):
        times.measurements(tmp_path, ["dot"])


def ceiling(quantity, value, source):
    return {"quantity": quantity, "value": value, "source": source}


def test_a_measured_ceiling_goes_before_the_data_sheet():
    rows = [
        ceiling("read", "4400", "measured"),
        ceiling("read", "4800", "data sheet: a page"),
        ceiling("write", 4000, "data sheet: a page"),
    ]
    found = times.limits({"ceilings": rows})
    assert found == {"read": 4400.0, "write": 4000.0}
    assert {type(value) for value in found.values()} == {float}
    assert times.limits({"ceilings": rows[::-1]}) == found


def timed(impl, factor, **other):
    return [block(n, impl, factor * (4000.0 + 10 * n), **other) for n in range(5)]


def test_the_cells_of_a_study_are_summarized_compared_and_claimed(tmp_path, monkeypatch, written):
    """Two ops, each with the ceilings of its own run, and a drawn shape beside the grid."""
    add = [
        *timed("ours", 1.0), *timed("ours_twin", 1.02), *timed("rival", 2.0),
        *timed("ours", 1.0, case="M3-N9", set="drawn"),
        *timed("rival", 3.0, case="M3-N9", set="drawn"),
    ]  # fmt: skip
    mul = [
        *timed("ours", 1.0, op="mul"), *timed("another", 1.5, op="mul"),
        *timed("ours", 1.0, op="mul", **{"pass": "backward"}),
        *timed("ours", 1.0, op="mul", **{"pass": "both"}),
        *timed("another", 1.0, op="mul", **{"pass": "both"}),
    ]  # fmt: skip
    limits = {"add": {"read": 4400.0, "write": 4000.0}, "mul": {"read": 3300.0, "write": 3000.0}}
    study = {
        op: (
            rows,
            {"run_id": op, "ceilings": [ceiling(*one, "measured") for one in limits[op].items()]},
        )
        for op, rows in (("add", add), ("mul", mul))
    }
    monkeypatch.setattr(rates, "material", lambda *args: ("material", args))
    named(monkeypatch, rates, "rows")
    # One cell has an offset of its own.
    own = {("add", "N1024", "float32", "forward"): inference.Offset(0.04, 6.0, 6.0)}
    monkeypatch.setattr(
        comparisons, "known", lambda study: inference.known(comparisons.noise(study), own)
    )
    # The offsets take a while to find, so those of the summary are passed on.
    compare, handed = comparisons.comparisons, []

    def comparing(study, known=None):
        handed.append(known)
        return compare(study, known)

    monkeypatch.setattr(comparisons, "comparisons", comparing)
    summarize._write_cells(tmp_path, study)
    assert [type(known) for known in handed] == [inference.Offsets]
    assert {folder for folder, *_ in written.values()} == {tmp_path}
    grouped = timings.group(add) | timings.group(mul)
    counted = {key: timings.counted(rivals, limits[key[0]]) for key, rivals in grouped.items()}
    noise = comparisons.noise(counted)
    known = comparisons.known(counted)
    assert len(noise) == 1 and known.at(1.0).variance > 0
    assert set(own) < set(grouped)
    summary = [
        row | {"run_id": key[0]}
        for key, rivals in grouped.items()
        for row in timings.summary(rivals, limits[key[0]], known.of(key))
    ]
    compared = comparisons.comparisons(counted, known)
    parts = {"letter": ["M", "N"], "impl": dict.fromkeys(("ours", "ours_twin", "rival", "another"))}
    assert written["summary"][1:] == (columns.SUMMARY, summary, parts)
    assert list(written["summary"][3]["impl"]) == list(parts["impl"])
    _, table, rows = written["verdicts"]
    described = list(summarize._described(comparisons.verdict_rows(compared), summary))
    assert table is columns.VERDICTS
    assert repr(list(rows)) == repr(described)
    grid = [key for key in grouped if key[1] != "M3-N9"]
    said = comparisons.best_rows(compared, grid) + comparisons.claim_rows(compared, grid)
    assert written["claims"][1] is columns.CLAIMS
    assert repr(written["claims"][2]) == repr(said)
    headline = comparisons.members([one for one in compared if one.part == "headline"])
    assert len(headline) == 2 < len(comparisons.members(compared))
    _, table, (name, material, (first, counts, second)) = written["rates"]
    assert (table, name, material) == (columns.RATES, "rows", "material")
    assert (repr(first), repr(second)) == (repr(noise), repr(headline))
    assert counts == comparisons.processes(counted)
    assert list(written) == ["summary", "verdicts", "claims", "rates"]


def test_a_verdict_says_what_its_cell_moves_and_whose_the_baseline_is(monkeypatch):
    monkeypatch.setattr(summarize, "_library", lambda name: name.partition("_")[0])
    place = {"op": "add", "case": "N1", "dtype": "float32", "pass": "forward"}
    far = place | {"case": "N2"}
    summary = [
        place | {"impl": "torch_eager", "gbps": 1.0, "device_us": 1.0, "flags": "wrong"},
        place | {"impl": "ours", "gbps": 2.0**20, "device_us": 3.0, "flags": "a", "bound": "read"},
        far | {"impl": "ours", "gbps": 2.0**20, "device_us": 5.0, "flags": "b"},
    ]
    verdicts = [
        place | {"baseline": "torch_eager", "ratio": 2.0},
        place | {"baseline": "liger"},
        far | {"baseline": "quack_b"},
        far | {"baseline": "quack_c"},
    ]
    first, *others = summarize._described(iter(verdicts), iter(summary))
    assert first == verdicts[0] | {
        "bound": "read", "mib": 3000.0, "flags": "a", "library": "torch", "outside": 2,
    }  # fmt: skip
    assert [row["library"] for row in others] == ["liger", "quack", "quack"]
    assert [row["outside"] for row in others] == [2, 2, 2]
    assert [row["bound"] for row in others] == ["read", "", ""]
    assert [row["mib"] for row in others] == [3000.0, 5000.0, 5000.0]
    assert "bound" not in verdicts[0]


def test_the_libraries_of_another_op_do_not_count(monkeypatch):
    monkeypatch.setattr(summarize, "_library", lambda name: name)
    place = {"case": "N1", "dtype": "float32", "pass": "forward"}
    summary = [
        place | {"op": op, "impl": "ours", "gbps": 1.0, "device_us": 1.0, "flags": ""}
        for op in ("add", "mul")
    ]
    names = {"add": ("liger", "quack"), "mul": ("liger", "torch", "triton")}
    verdicts = [place | {"op": op, "baseline": name} for op in names for name in names[op]]
    found = [row["outside"] for row in summarize._described(verdicts, summary)]
    assert found == [2, 2, 1, 1, 1]


def test_a_baseline_is_of_the_library_of_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(summarize, "BASELINES", tmp_path)
    monkeypatch.setattr(libraries, "distribution", lambda path: f"library of {path.name}")
    (tmp_path / "liger.py").write_text("")
    assert summarize._library("liger") == "library of liger.py"
    assert summarize._library("quack") == "quack"


def test_the_duration_of_measuring_is_told_if_it_is_known():
    assert summarize._took({"share": 0.256, "total_s": 12.4}) == (
        "measuring took 12 s, overhead 26 %"
    )
    assert summarize._took({"total_s": 12}) == "measuring: no sidecar tells what it took"


def test_a_file_holds_a_line_a_row_with_six_digits_of_a_number(tmp_path):
    rows = [{"b": 1 / 3, "a": "x, ü", "c": 0}, {"a": None, "b": float("nan")}, {"b": 1234567}]
    table = columns.Table("a", "a row", tuple(columns.Column(n, "text", "") for n in "ab"))
    summarize._write(tmp_path, table, iter(rows))
    text = (tmp_path / "a.csv").read_bytes().decode("utf-8")
    assert text == 'a,b\n"x, ü",0.333333\n,\n,1234567\n'
    assert summarize.texts({"a": 1234567.0, "b": True}) == {"a": "1.23457e+06", "b": True}


def called(monkeypatch, *arguments):
    """Return the arguments with which a command line calls `summarize`."""
    calls = []
    monkeypatch.setattr(sys, "argv", ["summarize", *arguments])
    monkeypatch.setattr(summarize, "summarize", lambda *args: calls.append(args) or "it took long")
    summarize.main()
    return calls


def test_the_command_hands_over_its_options(monkeypatch, capsys, tmp_path):
    folders = ["--run", str(tmp_path), "--recorded", str(tmp_path / "r")]
    assert called(monkeypatch, *folders) == [(tmp_path, tmp_path / "r", None, [])]
    assert capsys.readouterr().out == "it took long\n"
    more = ["--ops", "add", "mul", "--untimed", "dot", "softmax"]
    assert called(monkeypatch, *folders, *more) == [
        (tmp_path, tmp_path / "r", ["add", "mul"], ["dot", "softmax"])
    ]
    assert called(monkeypatch, *folders, "--untimed")[0][3] == []


@pytest.mark.parametrize("options", [["--run", "a"], ["--recorded", "a"], ["--run", "a", "--ops"]])
def test_the_command_needs_both_folders(monkeypatch, options):
    with pytest.raises(SystemExit):
        called(monkeypatch, *options)
    with pytest.raises(SystemExit):
        called(monkeypatch, "--run", "a", "--recorded", "b", "--ops")


def test_the_help_tells_each_option(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        called(monkeypatch, "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: harness.summarize [-h]")
    assert " Turns raw rows and reports into the CSV files that the paper reads. " in text
    assert text.endswith(
        " --run RUN folder of the run --recorded RECORDED folder of the recorded run"
        " --ops OPS [OPS ...] leave out what the folder holds beside these"
        " --untimed [UNTIMED ...] ops that are verified only"
    )

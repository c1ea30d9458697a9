"""Check that only a new measurement replaces measured times; anything replaces replayed ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import UserError
from harness.results import measured, replay
from tests.support.raw_files import PLAIN, save
from tests.support.workflows import MEASURE, jobs, snakemake, touched

ROOT = Path(__file__).resolve().parents[2]
RAW = "results/study/raw"


def measure(folder, op="softmax", **changes):
    """Make a run that measured one op."""
    save(folder / f"raw/{op}.csv", [PLAIN | {"op": op}], op=op, **changes)
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("words", [(), ("--config", "measure=False"), ("--forceall",)])
def test_a_measured_run_refuses_a_replay_in_one_line(tree, words):
    measure(tree / "results/study")
    before = contents(tree / RAW)
    done = snakemake(tree, *words)
    assert done.returncode != 0
    assert done.stdout == ""
    *_, line = done.stderr.splitlines()
    assert len(done.stderr.splitlines()) <= 4 and "Traceback" not in done.stderr
    assert line.startswith(f"tilewright: {RAW}: holds measured times (softmax)")
    assert "--config run=replay" in line
    assert contents(tree / RAW) == before
    # The command that the message names works.
    assert "Replay softmax from results/recorded/hopper" in jobs(tree, "--config", "run=replay")


@pytest.mark.parametrize("missing", [".csv", ".json"])
def test_half_of_a_measurement_is_kept_as_well(tree, missing):
    measure(tree / "results/study")
    (tree / RAW / f"softmax{missing}").unlink()
    assert "holds measured times" in snakemake(tree, "--dry-run").stderr


def test_a_replayed_run_is_replayed_again(tree):
    measure(tree / "results/study", mode="replayed")
    assert "Replay softmax from results/recorded/hopper" in jobs(tree, "--forceall")


@pytest.mark.slow
def test_a_measurement_that_fails_leaves_the_former_times_and_is_made_again(finished):
    measure(finished / "results/study")
    words = (f"{RAW}/softmax.csv", *MEASURE)
    touched(finished, *words)
    before = contents(finished / RAW)
    script = finished / "harness/measure/__main__.py"
    script.write_text("import sys\nsys.exit('no GPU')\n")
    assert snakemake(finished, *words).returncode != 0
    failed = (finished / RAW / ".softmax.failed").read_bytes()
    assert contents(finished / RAW) == before | {".softmax.failed": failed}
    assert jobs(finished, *words) == {"Measure softmax"}
    script.write_text(
        "import sys\n"
        "out = sys.argv[sys.argv.index('--out') + 1]\n"
        "open(out, 'w').close()\n"
        "open(out.replace('.csv', '.json'), 'w').close()\n"
    )
    done = snakemake(finished, *words)
    assert done.returncode == 0, done.stderr
    assert (finished / RAW / "softmax.csv").read_bytes() == b""
    assert jobs(finished, *words) == set()


@pytest.mark.parametrize("option", ["--delete-all-output", "--delete-all"])
def test_a_measured_run_is_deleted_only_by_name(finished, option):
    run = measure(finished / "results/study")
    before = contents(run / "raw")
    done = snakemake(finished, option, *MEASURE)
    assert done.returncode != 0
    *_, line = done.stderr.splitlines()
    assert line.startswith("tilewright: results/study: was measured, and --delete-all-output")
    assert "make clean RUN=study" in line and "Traceback" not in done.stderr
    assert contents(run / "raw") == before
    assert (finished / "results/study/summary.csv").exists()


def test_a_replayed_run_may_be_deleted(finished):
    for path in (finished / RAW).iterdir():
        path.unlink()
    measure(finished / "results/study", mode="replayed")
    done = snakemake(finished, "--delete-all-output", "--config", "measure=False")
    assert done.returncode == 0, done.stderr
    assert not (finished / RAW / "softmax.csv").exists()


# Columns: more rows beside PLAIN, a word that the refusal must contain, options that leave it out.
WIDER = [
    ({"dtype": "float32"}, "float32", ("dtypes=[float16,bfloat16]",)),
    ({"pass": "backward"}, "backward", ("passes=[forward]",)),
    ({"impl": "torch_compile"}, "torch_compile", ("baselines=[torch_eager]",)),
    ({"case": "M1-N2"}, "1 cases", ("max_cases=1",)),
    # A rival that had times, but whose library is not installed.
    ({"impl": "quack"}, "quack", ()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("more", "word", "wish"), WIDER)
def test_a_narrower_measurement_replaces_no_wider_one(tree, more, word, wish):
    path = tree / RAW / "softmax.csv"
    save(path, [PLAIN, PLAIN | more])
    done = snakemake(tree, "--dry-run", *MEASURE, *wish)
    *_, line = done.stderr.splitlines()
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert line.startswith(f"tilewright: {RAW}/softmax.csv: holds measured times that this")
    assert f"({word})" in line and "narrower=True" in line
    # Allowed are: naming it, a run of another name, and a measurement of all that lies there.
    again = ("--force", f"{RAW}/softmax.csv", *MEASURE, *wish)
    assert "Measure softmax" in jobs(tree, *again, "narrower=True")
    other = "results/other/raw/softmax.csv"
    assert "Measure softmax" in jobs(tree, other, *MEASURE, *wish, "run=other")
    save(path, [PLAIN])
    assert "Measure softmax" in jobs(tree, *again)


def test_a_part_replaces_no_times_of_others(tmp_path):
    path, wanted = tmp_path / "raw/softmax.csv", {"dtypes": ["float16"], "passes": ["forward"]}

    def lacking(part, *timed):
        absent = {"status": "unreached", "device_us": None, "call_us": None}
        rows = [PLAIN | {"case": f"M{m}-N1"} | ({} if m in timed else absent) for m in range(1, 6)]
        save(path, rows)
        return list(measured.lacking(path, ["ours"], max_cases=None, part=part, **wanted))

    assert lacking((1, 2), 1, 2, 3, 4, 5) == lacking((1, 2), 2, 4) == ["shapes of other parts"]
    assert lacking((2, 2), 1) == lacking((2, 3), 2, 3) == ["shapes of other parts"]
    assert lacking(None, 1, 2, 3, 4, 5) == lacking((1, 1), 1, 2, 3, 4, 5) == []
    # A study in parts that was interrupted goes on.
    assert lacking((1, 2), 1, 3, 5) == lacking((2, 2), 2, 4) == lacking((2, 3), 2, 5) == []


def test_a_cell_without_a_time_is_no_loss(tmp_path):
    absent = {"status": "unavailable", "reason": "no such library", "device_us": "", "call_us": ""}
    drawn = {"set": "drawn", "case": "M77-N3"}
    path = tmp_path / "raw/softmax.csv"
    wanted = {"dtypes": ["float16"], "passes": ["forward"], "max_cases": 1}
    save(path, [PLAIN, PLAIN | {"impl": "ours_twin"}, PLAIN | {"impl": "liger"} | absent])
    assert list(measured.lacking(path, ["ours"], **wanted)) == []
    save(path, [PLAIN, PLAIN | drawn])
    assert list(measured.lacking(path, ["ours"], **wanted)) == []
    path.write_text("garbage\n")
    assert list(measured.lacking(path, ["ours"], **wanted)) == []
    save(path, [PLAIN | {"dtype": "float32"}], mode="replayed")
    assert list(measured.lacking(path, ["ours"], **wanted)) == []


def test_the_command_that_measures_refuses_as_the_workflow_does(tmp_path):
    path = tmp_path / "raw/softmax.csv"
    save(path, [PLAIN, PLAIN | {"impl": "liger"}])
    before = contents(path.parent)
    words = (
        "--op softmax --verify v --autotuned a --environment e --ceilings c --seed 1 --min-blocks 5"
    )
    words += " --max-blocks 9 --interval 0.01 --cell-cap-s 1 --block-ms 1 --energy-ms 1"
    words += " --energy-impls ours --cell-timeout-s 9 --cell-limit-s 9"
    words += " --processes 1 --short-us 0 --impls ours,torch_eager"
    call = [sys.executable, "-m", "harness.measure", *words.split(), "--out", path]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "leaves out (liger)" in done.stderr
    assert contents(path.parent) == before
    # With the option the command goes on and stops at its other inputs, which are missing.
    again = subprocess.run([*call, "--narrower"], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2 and "leaves out" not in again.stderr


def test_the_command_refuses_as_the_workflow_does(tmp_path):
    run, recorded = measure(tmp_path / "study"), measure(tmp_path / "recorded")
    before = contents(run / "raw")
    with pytest.raises(UserError, match=r"softmax\.csv: holds measured times; name another file"):
        replay.replay("softmax", recorded, run / "raw/softmax.csv")
    assert contents(run / "raw") == before


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    for name in ("recorded/hopper", "study", "again"):
        measure(folder / name)
    measure(folder / "smoke", mode="replayed")
    (folder / "begun/raw").mkdir(parents=True)
    (folder / "begun/raw/.softmax.journal").write_text("{}")
    (folder / "tuning/tuned").mkdir(parents=True)
    (folder / "tuning/tuned/softmax.json").write_text("{}")
    return folder


def test_cleaning_keeps_what_was_measured_and_what_is_recorded(results):
    assert measured.clean(results, []) == ["again", "begun", "study", "tuning"]
    left = {path.name for path in results.iterdir()}
    assert left == {"recorded", "again", "begun", "study", "tuning"}
    assert measured.clean(results, ["study", "begun"]) == ["again", "tuning"]
    assert {path.name for path in results.iterdir()} == {"recorded", "again", "tuning"}


@pytest.mark.parametrize("left", ["raw/softmax.csv", "raw/.softmax.journal", "tuned/softmax.json"])
def test_cleaning_keeps_what_was_measured_in_a_folder_of_runs(tmp_path, left):
    measure(tmp_path / "archive/replay", mode="replayed")
    assert measured.clean(tmp_path, []) == [] and not [*tmp_path.iterdir()]
    kept = tmp_path / "archive/november/board" / left
    if kept.suffix == ".csv":
        measure(kept.parents[1])
    else:
        kept.parent.mkdir(parents=True)
        kept.write_text("{}")
    assert measured.clean(tmp_path, []) == ["archive"]
    assert kept.is_file()


@pytest.mark.parametrize("name", ["recorded", "nobody"])
def test_cleaning_removes_nothing_where_a_name_is_no_run(results, name):
    with pytest.raises(UserError, match=f"{name}: no such run; there are: again, begun"):
        measured.clean(results, [name])
    assert (results / "smoke").is_dir()


def test_make_clean_names_what_it_keeps(tmp_path):
    for name in ("harness", "Makefile"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    measure(tmp_path / "results/study")
    (tmp_path / "results/smoke").mkdir()
    # A variable of this name that a shell happens to export is no option.
    exported = os.environ | {"RUN": "study"}
    done = subprocess.run(
        ["make", "-s", "clean"], cwd=tmp_path, capture_output=True, text=True, env=exported
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "kept results/study: measured; make clean RUN=study removes it\n"
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["study"]
    named = ["make", "-s", "clean", "RUN=study"]
    assert subprocess.run(named, cwd=tmp_path, capture_output=True).returncode == 0
    assert not [*(tmp_path / "results").iterdir()]


def test_a_sidecar_decides(tmp_path):
    run = measure(tmp_path, mode="replayed")
    assert measured.held(run) == []
    (run / "raw/softmax.json").write_text(json.dumps(["replayed"]))
    assert measured.held(run) == ["softmax"]

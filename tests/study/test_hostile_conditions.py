"""Check a study on a machine that is not as it should be: one message, and nothing is lost."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from harness.cli import UserError
from harness.study import surroundings
from tests.support import synthetic
from tests.support.paper_scripts import PAPER
from tests.support.workflows import RECORDED, REPLAY, ROOT, interruptible, small, snakemake

RAW = "results/study/raw/dot.csv"
SURVEY = "results/study/survey.csv"
ENVIRONMENT = "results/study/environment.json"
PATIENCE_S = 300
WAITS = f"""
import pathlib, sys, time

print("begun", flush=True)
last = time.monotonic() + {PATIENCE_S}
while not pathlib.Path("go").exists() and time.monotonic() < last:
    time.sleep(0.1)
pathlib.Path(sys.argv[-1]).touch()
"""


@pytest.fixture
def recorded(tmp_path):
    """Make a tree with the recorded run; its path has blanks and letters beyond ASCII."""
    tree = small(tmp_path / "проба für é")
    shutil.copytree(ROOT / RECORDED, tree / RECORDED, dirs_exist_ok=True)
    return tree


def command(*words):
    return [sys.executable, "-m", "snakemake", "--nocolor", *words, *REPLAY]


def limited(tree, *words):
    """Run Snakemake as a user that must obey the rights of files, which root alone need not."""
    drop = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []
    if drop and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, to take root's privileges away")
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    call = [*drop, *command(*words)]
    return subprocess.run(call, cwd=tree, env=variables, capture_output=True, text=True)


def started(tree, *words):
    """Start Snakemake in a session of its own."""
    out = (tree / "said").open("w")
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with out:
        return subprocess.Popen(
            command(*words), cwd=tree, env=variables, stdout=out, stderr=out,
            start_new_session=True, preexec_fn=interruptible,
        )  # fmt: skip


def ended(study):
    try:
        return study.wait(PATIENCE_S)
    finally:
        if study.poll() is None:
            os.killpg(study.pid, signal.SIGKILL)


def until(there, study):
    last = time.monotonic() + PATIENCE_S
    while not there():
        assert study.poll() is None and time.monotonic() < last
        time.sleep(0.05)


def complaint(done):
    """Return the only line of the project's own, which may stand twice, without a traceback."""
    assert done.returncode != 0 and "Traceback" not in done.stderr, done.stderr
    [line] = {line for line in done.stderr.splitlines() if line.startswith("tilewright: ")}
    return line


def survey(tree):
    """Put a survey in place that waits for the file `go`; return a function: has it begun?"""
    (tree / "harness/survey.py").write_text(WAITS)
    log = tree / "results/study/logs/survey.log"
    return lambda: log.is_file() and "begun" in log.read_text()


def test_a_path_with_blanks_and_other_letters_is_no_hindrance(recorded):
    done = snakemake(recorded, RAW, ENVIRONMENT, *REPLAY)
    assert done.returncode == 0, done.stderr
    assert (recorded / RAW).is_file() and (recorded / ENVIRONMENT).is_file()


@pytest.mark.latex
def test_a_paper_is_typeset_below_such_a_path(tmp_path):
    place = tmp_path / "проба für é"
    for name in ("paper", "run"):
        (place / name).mkdir(parents=True)
    (place / "paper/main.tex").write_text(r"\documentclass{article}\begin{document}A\end{document}")
    code = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "build = runpy.run_path(sys.argv[1] + '/build.py'); compile_tex = build['compile_tex']\n"
        "compile_tex.__globals__['PAPER'] = Path(sys.argv[2], 'paper')\n"
        "print(compile_tex(Path(sys.argv[2], 'run')).read_bytes()[:4])\n"
    )
    call = [sys.executable, "-c", code, str(PAPER), str(place)]
    done = subprocess.run(call, capture_output=True, text=True)
    assert done.stdout == "b'%PDF'\n", done.stderr


def test_a_checkout_that_may_not_be_written_is_one_line(recorded):
    try:
        for path in (recorded, recorded / "results"):
            path.chmod(0o555)
        line = complaint(limited(recorded, RAW))
    finally:
        for path in (recorded, recorded / "results"):
            path.chmod(0o755)
    assert line.startswith("tilewright: this folder: user ") and "it is read-only" in line
    assert not (recorded / ".snakemake").exists() and not (recorded / "results/study").exists()


def test_results_of_another_user_are_named_with_their_owner(recorded):
    if os.geteuid() != 0:
        pytest.skip("only root may give a folder away")
    folder = recorded / "results/study"
    folder.mkdir()
    os.chown(folder, 65534, 65534)
    line = complaint(limited(recorded, RAW))
    assert "results/study: user 0 may not write there, it belongs to user 65534" in line


def test_a_full_disk_is_named_and_the_study_goes_on_when_there_is_room(recorded):
    folder = recorded / "results/study"
    folder.mkdir()
    wanted = (RAW, "results/study/raw/softmax.csv")
    sources = [recorded / RECORDED / name.removeprefix("results/study/") for name in wanted]
    # Room for any one of them, and for not both.
    bytes_ = sorted(path.stat().st_size for path in sources)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={bytes_[1] + bytes_[0] // 2}", "tmpfs"]
    mount.append(str(folder))
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk, and not everywhere")
    try:
        done = snakemake(recorded, *wanted, "--cores", "1", *REPLAY)
        assert "No space left on device" in complaint(done)
        kept = [path for path in folder.glob("raw/*.csv") if path.stat().st_size]
        assert not list(folder.glob("raw/.*.csv*"))
        room = ["mount", "-o", "remount,size=100m", str(folder)]
        subprocess.run(room, check=True)
        times = {path: path.stat().st_mtime_ns for path in kept}
        assert snakemake(recorded, *wanted, *REPLAY).returncode == 0
        for name, recorded_csv in zip(wanted, sources, strict=True):
            assert len((recorded / name).read_text().splitlines()) == len(
                recorded_csv.read_text().splitlines()
            )
        assert times == {path: path.stat().st_mtime_ns for path in kept}
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_second_study_in_the_folder_is_refused_and_the_first_one_ends_well(recorded):
    begun = survey(recorded)
    first = started(recorded, SURVEY)
    try:
        until(begun, first)
        second = snakemake(recorded, SURVEY, *REPLAY)
        assert first.poll() is None
        assert second.returncode != 0
        assert "LockException" in second.stderr and "--unlock" in second.stderr
    finally:
        (recorded / "go").touch()
        code = ended(first)
    assert code == 0, (recorded / "said").read_text()
    assert (recorded / SURVEY).is_file()


def test_after_ctrl_c_the_same_command_goes_on_and_repeats_nothing(recorded):
    begun = survey(recorded)
    study = started(recorded, RAW, SURVEY)
    try:
        until(lambda: begun() and "1 of 2 jobs done" in (recorded / "said").read_text(), study)
        os.killpg(study.pid, signal.SIGINT)
    finally:
        assert ended(study) != 0
    before = (recorded / RAW).stat().st_mtime_ns
    assert not (recorded / SURVEY).exists()
    (recorded / "go").touch()
    done = snakemake(recorded, RAW, SURVEY, *REPLAY)
    assert done.returncode == 0, done.stderr
    assert (recorded / SURVEY).is_file() and (recorded / RAW).stat().st_mtime_ns == before


def test_without_a_network_and_a_home_the_study_runs(recorded):
    call = ["unshare", "--net", "--map-root-user", "true"]
    if subprocess.run(call, capture_output=True).returncode:
        pytest.skip("this machine lets no program leave the network")
    nowhere = {"HOME": "/nowhere", "XDG_CACHE_HOME": str(recorded / "cache")}
    variables = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | nowhere
    call = [*call[:-1], *command(RAW, ENVIRONMENT)]
    done = subprocess.run(call, cwd=recorded, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (recorded / RAW).is_file()


@pytest.mark.parametrize("name", ["results/study/summary.csv", "kernels/softmax.py"])
def test_a_clock_that_was_set_back_is_noticed_before_an_edit_is_lost(tmp_path, name):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.touch()
    now = path.stat().st_mtime
    surroundings.refuse_future(tmp_path, "results/study", now)
    surroundings.refuse_future(tmp_path, "results/study", now - surroundings.AHEAD_S)
    with pytest.raises(UserError, match=rf"{name}: was written 3600 s after .* set the clock"):
        surroundings.refuse_future(tmp_path, "results/study", now - 3600)


def test_snakemake_tells_of_the_clock(recorded):
    later = time.time() + 86400
    os.utime(recorded / "kernels/softmax.py", (later, later))
    line = complaint(snakemake(recorded, RAW, *REPLAY))
    assert line.startswith("tilewright: kernels/softmax.py: was written 86")
    assert not (recorded / RAW).exists()


@pytest.mark.slow
def test_outputs_are_the_same_if_commas_are_decimal_points(tmp_path):
    locales = tmp_path / "locales"
    locales.mkdir()
    call = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(locales / "de_DE.UTF-8")]
    if shutil.which("localedef"):
        subprocess.run(call, capture_output=True)
    german = {"LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de", "LOCPATH": str(locales)}
    said = subprocess.run(["locale", "decimal_point"], env=os.environ | german, capture_output=True)
    if said.stdout != b",\n":
        pytest.skip("needs localedef and the sources of locales: apt-get install locales")
    made = {}
    for name, variables in (("plain", {"LC_ALL": "C.UTF-8"}), ("german", german)):
        run = synthetic.write_run(tmp_path / name, ("dot", "softmax"))
        python(
            variables, ROOT, "-m", "harness.summarize", "--run", run, "--recorded", run / "recorded"
        )
        for out in ("figures/headline.py", "tables/claims.py"):
            suffix = ".pdf" if out.startswith("figures") else ".tex"
            python(
                variables, ROOT, PAPER / out, "--run", run, "--out", (run / out).with_suffix(suffix)
            )
        made[name] = {
            path.relative_to(run): path.read_bytes()
            for path in run.rglob("*")
            if path.suffix in (".csv", ".svg", ".tex")
        }
    assert len(made["plain"]) > 10 and made["plain"] == made["german"]


def python(variables, folder, *words):
    call = [sys.executable, *map(str, words)]
    done = subprocess.run(
        call, cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

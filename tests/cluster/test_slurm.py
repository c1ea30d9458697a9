"""The profile of SLURM on a real cluster of one node: `make slurm-test`."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

from tests.support import slurm
from tests.support.workflows import ROOT, copied

PROFILE = ROOT / "profiles/slurm/config.yaml"
# Longer than any command of these tests takes on two busy cores.
PATIENCE_S = 400
CONFIG = "run: small\nops: [dot]\nmax_cases: 1\nbuild: {archs: [90]}\n"
SHOWN = 'import os, sys\nopen(sys.argv[-1], "w").write(os.environ["CUDA_VISIBLE_DEVICES"])\n'
needs_slurm = pytest.mark.skipif(bool(slurm.lacks()), reason=slurm.lacks() or "it is here")


def test_the_profile_says_of_each_rule_that_measures_how_many_threads_it_has():
    """`workflow.cores` is the cluster's there, which no node has."""
    profile = yaml.safe_load(PROFILE.read_text())
    rules = "".join(path.read_text() for path in (ROOT / "workflow/rules").glob("*.smk"))
    parts = rules.split("rule ")[1:]
    whole = {
        part.partition(":")[0] for part in parts if re.search(r"threads: .*workflow.cores", part)
    }
    assert whole and set(profile["set-threads"]) == whole
    assert profile["config"] == {"measure": True}


@pytest.fixture(scope="module")
def cluster():
    # A socket's name has at most 107 characters; the folders of pytest are longer.
    with tempfile.TemporaryDirectory(prefix="slurm") as folder:
        running = slurm.Cluster(folder)
        try:
            yield running.start()
        finally:
            running.stop()


@pytest.fixture
def tree(tmp_path):
    tree = copied(tmp_path / "tree")
    shutil.copytree(ROOT / "results/recorded", tree / "results/recorded", dirs_exist_ok=True)
    (tree / "small.yaml").write_text(CONFIG)
    return tree


def command(*words):
    return [
        *(sys.executable, "-m", "snakemake", "--nocolor", "--profile", "profiles/slurm"),
        *("--configfile", "small.yaml", "--config", "measure=False", "--set-threads", "ceilings=2"),
        *("--slurm-init-seconds-before-status-checks", "2", "--latency-wait", "5", *words),
    ]


def submit(tree, cluster, *words, **more):
    """Start Snakemake on the cluster; its words go to a file beside the tree."""
    variables = os.environ | cluster.variables | {"CUDA_VISIBLE_DEVICES": ""} | more
    with (tree / "said").open("w") as out:
        return subprocess.Popen(
            command(*words), cwd=tree, env=variables, stdout=out, stderr=out, start_new_session=True
        )


def finished(study, tree, patience_s=PATIENCE_S):
    """The exit code and the words of a study that ends; it is killed if it does not."""
    try:
        return study.wait(patience_s), (tree / "said").read_text()
    finally:
        if study.poll() is None:
            os.killpg(study.pid, signal.SIGKILL)


def until(there, what, study, tree):
    """Wait for what a running study brings about."""
    last = time.monotonic() + PATIENCE_S
    while not there():
        assert study.poll() is None and time.monotonic() < last, (
            f"{what}: {(tree / 'said').read_text()}"
        )
        time.sleep(0.3)


@needs_slurm
def test_jobs_run_on_the_cluster_with_a_gpu_where_a_rule_asks_for_one(cluster, tree):
    wanted = ("results/small/raw/dot.csv", "results/small/ceilings.csv")
    (tree / "harness/machine/ceilings.py").write_text(SHOWN)
    code, said = finished(submit(tree, cluster, *wanted, SBATCH_PARTITION="other"), tree)
    assert code == 0, said
    assert all((tree / name).is_file() for name in wanted)
    assert set(cluster.jobs("%P %T")[-2:]) == {"other COMPLETED"}
    assert (tree / "results/small/ceilings.csv").read_text() == "0"


@needs_slurm
def test_a_node_that_is_drained_ends_its_job_and_takes_the_next_when_it_is_back(cluster, tree):
    """The report of dot needs its build, so the second job waits while the node drains."""
    wait(tree / "harness/build/__main__.py", 5)
    study = submit(tree, cluster, "results/small/verify/dot/ours.json")
    until(lambda: cluster.state() == "mix", "the first job did not begin", study, tree)
    cluster.update("drain")
    assert cluster.state() in ("drng", "drain")
    until(
        lambda: (tree / "results/small/build/vector.json").is_file(),
        "the job was not ended",
        study,
        tree,
    )
    until(lambda: cluster.jobs()[-1] == "PENDING", "the second job was not submitted", study, tree)
    assert study.poll() is None and cluster.state() == "drain"
    cluster.update("resume")
    code, said = finished(study, tree)
    assert code == 0, said
    assert (tree / "results/small/verify/dot/ours.json").is_file()


@needs_slurm
def test_a_node_that_dies_fails_its_job_and_the_same_command_goes_on(cluster, tree):
    wait(tree / "harness/build/__main__.py", 60, unless=tree / "go")
    wanted = ("results/small/raw/dot.csv", "results/small/build/vector.json")
    study = submit(tree, cluster, *wanted)
    states = {"COMPLETED", "RUNNING"}
    until(lambda: set(cluster.jobs()[-2:]) == states, "the second job goes on alone", study, tree)
    cluster.update("down")
    code, said = finished(study, tree)
    assert code != 0, said
    before = (tree / "results/small/raw/dot.csv").stat().st_mtime_ns
    assert not (tree / "results/small/build/vector.json").is_file()
    cluster.update("resume")
    (tree / "go").touch()
    code, said = finished(submit(tree, cluster, *wanted), tree)
    assert code == 0, said
    assert (tree / "results/small/build/vector.json").is_file()
    assert (tree / "results/small/raw/dot.csv").stat().st_mtime_ns == before


@needs_slurm
@pytest.mark.skipif("SLURM_SMOKE" not in os.environ, reason="takes 20 minutes: make slurm-test")
def test_the_small_study_reaches_the_paper(cluster, tree):
    shutil.copy(ROOT / "config/smoke.yaml", tree / "small.yaml")
    study = submit(tree, cluster, "--seconds-between-status-checks", "5")
    code, said = finished(study, tree, patience_s=3600)
    assert code == 0, said
    assert (tree / "results/smoke/report.html").is_file()
    assert shutil.which("latexmk") is None or (tree / "results/smoke/paper.pdf").is_file()
    # SLURM itself forgets a job after five minutes.
    assert said.count("has been submitted with SLURM") > 100


def wait(script, seconds, unless=Path("none")):
    """Let a script begin with a pause, unless a file is there."""
    pause = f"import os, time\ntime.sleep(0 if os.path.exists({str(unless)!r}) else {seconds})\n"
    head, last, tail = script.read_text().rpartition("if __name__ ==")
    script.write_text(head + pause + last + tail)

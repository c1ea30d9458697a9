"""Check the README: its graph is the workflow's and its headline the recorded run's."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.replayed import replayed_once

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "results/recorded/hopper"


def edges(mermaid):
    names = dict(re.findall(r"(id\d+)\[(\w+)\]", mermaid))
    pairs = re.findall(r"(\w+) --> (\w+)", mermaid)
    return {(names.get(a, a), names.get(b, b)) for a, b in pairs}


def test_the_graph_is_that_of_the_rules():
    command = [sys.executable, "-m", "snakemake", "--rulegraph", "mermaid-js"]
    command += ["--config", "measure=True"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    drawn = {pair for pair in edges(done.stdout) if pair[1] != "all"}
    block = re.search(r"```mermaid\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert edges(block[1]) == drawn


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """The recorded run, summarized as a replay is."""
    return replayed_once(tmp_path_factory, RECORDED)


@pytest.mark.slow
def test_the_headline_is_that_of_the_recorded_run(replayed, tmp_path):
    script = ROOT / "paper/figures/headline.py"
    command = [sys.executable, script, "--run", replayed, "--out", tmp_path / "headline.pdf"]
    subprocess.run(command, check=True)
    assert (tmp_path / "headline.svg").read_bytes() == (ROOT / "docs/headline.svg").read_bytes()


@pytest.mark.slow
def test_the_numbers_are_those_of_the_recorded_run(replayed, tmp_path):
    copy = shutil.copy(ROOT / "README.md", tmp_path)
    command = [sys.executable, ROOT / "paper/readme.py", "--run", replayed, "--out", copy]
    subprocess.run(command, check=True)
    assert Path(copy).read_text() == (ROOT / "README.md").read_text(), "make headline"


@pytest.mark.slow
def test_a_readme_without_markers_is_refused_and_left(replayed, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("# Tilewright\n")
    command = [sys.executable, ROOT / "paper/readme.py", "--run", replayed, "--out", readme]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, readme.read_text()) == (2, "# Tilewright\n")
    assert "lacks the lines" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_readme_that_is_gone_is_named(replayed, tmp_path):
    gone = tmp_path / "gone.md"
    command = [sys.executable, ROOT / "paper/readme.py", "--run", replayed, "--out", gone]
    done = subprocess.run(command, capture_output=True, text=True)
    told = f"tilewright: {gone}: No such file or directory\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_every_kernel_file_of_the_package_stands_in_the_readme():
    text = (ROOT / "README.md").read_text()
    package = (ROOT / "src/tilewright/__init__.py").read_text()
    families = re.findall(r"^from \.kernels\.(\w+) import", package, re.MULTILINE)
    assert len(families) > 12
    for family in families:
        assert f"(kernels/{family}.py)" in text, family

"""Check the scripts of findings: each runs or says what it lacks, and the index names each."""

import py_compile
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.machine import nvml
from harness.results import hostile, reports

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "docs" / "findings"
SCRIPTS = sorted(FINDINGS.glob("*.py"))
# These need only a CPU, so the finding must be reproduced wherever the tests run.
CPU = ("torch_randint_range", "torch_smoothing_fp16")


def names(paths):
    return [path.stem for path in paths]


def called(path, *more):
    call = [sys.executable, str(path), *more]
    return subprocess.run(call, capture_output=True, text=True, check=False, timeout=300)


def test_each_finding_has_a_script_a_page_and_a_line_of_the_index():
    index = (FINDINGS / "README.md").read_text(encoding="utf-8")
    pages = [path for path in sorted(FINDINGS.glob("*.md")) if path.stem != "README"]
    assert names(pages) == names(SCRIPTS) and set(CPU) < set(names(SCRIPTS))
    for name in names(SCRIPTS):
        page = (FINDINGS / f"{name}.md").read_text(encoding="utf-8")
        title = re.search(r"^# (.+)$", page, re.M)[1]
        kind = re.search(r"^\| class \| (ordinary|hostile) \|$", page, re.M)[1]
        assert f"| [{title}]({name}.md) | {kind} | [`{name}.py`]({name}.py) |" in index
        for field in ("call", "expected", "observed", "seen with", "recorded cells"):
            assert re.search(rf"^\| {field} \| \S.+ \|$", page, re.M), (name, field)


@pytest.mark.parametrize("path", SCRIPTS, ids=names(SCRIPTS))
def test_a_script_compiles_and_needs_nothing_of_this_project(path, tmp_path):
    py_compile.compile(str(path), cfile=str(tmp_path / "compiled"), doraise=True)
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"^\s*(from|import) (harness|kernels|baselines)\b", text, re.M)


@pytest.mark.parametrize("name", CPU)
def test_a_finding_on_the_cpu_is_reproduced_here(name):
    done = called(FINDINGS / f"{name}.py")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "torch " in done.stdout and done.stdout.endswith("reproduced\n")
    assert "not reproduced" not in done.stdout
    assert re.search(r"^expected: \S.*\nobserved: \S", done.stdout, re.M)


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.stem not in CPU], ids=str)
def test_a_script_that_needs_a_gpu_says_so(path):
    done = called(path, "--check")
    lines = done.stdout.splitlines()
    assert re.match(r"python \S+, torch \S+", lines[0]) and not done.stderr
    if done.returncode == 0:
        assert lines[-1] == "can run here" and nvml.gpus()
        return
    assert done.returncode == 2
    assert re.fullmatch(
        r"needs an NVIDIA GPU.*; (finds no NVIDIA GPU|\S+ is not installed)", lines[-1]
    )


def test_the_cells_of_a_finding_are_in_the_recorded_reports():
    """Each case that a page names was verified for a named implementation, in the named class."""
    verified: dict[str, set[str]] = {}
    for report in reports.verified((ROOT / "results/recorded/hopper/verify").iterdir()):
        for cell in report["cells"]:
            verified.setdefault(cell["case"], set()).add(report["impl"])
    impls = set().union(*verified.values())
    for name in names(SCRIPTS):
        page = (FINDINGS / f"{name}.md").read_text(encoding="utf-8")
        row = re.search(r"^\| recorded cells \| (.+) \|$", page, re.M)[1]
        cases = re.findall(r"`([A-Z]\d+-\S+)`", row)
        named = {impl for impl in impls if re.search(rf"\b{impl}\b", row)}
        assert named, name
        for case in cases:
            assert verified[case] & named, (name, case)
        odd = [hostile.parsed(case).hostile for case in cases]
        assert all(odd) if "| class | hostile |" in page else not all(odd), name


def test_every_ordinary_verdict_of_the_record_has_a_finding():
    """Each wrong ordinary result has a page that names the case and the implementation."""
    pages = [path.read_text(encoding="utf-8") for path in FINDINGS.glob("*.md")]
    for report in reports.verified((ROOT / "results/recorded/hopper/verify").iterdir()):
        for cell in report["cells"]:
            if cell["status"] in ("inaccurate", "crashed", "hung") and not cell["hostile"]:
                told = any(f"`{cell['case']}`" in page and report["impl"] in page for page in pages)
                assert told, (report["op"], report["impl"], cell["case"])

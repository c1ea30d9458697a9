"""Follow each guide to the letter in a copy of the tree, and run the tests there."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.summarize.__main__ import summarize
from tests.support import synthetic
from tests.support.workflows import MEASURE, copied, jobs

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"`([\w/]+\.(?:py|tex))`:\n\n```\w+\n(.*?)```", re.DOTALL)


def followed(folder, guide):
    """Copy this tree, add the code of a guide, and return the names of the files it touches."""
    copied(folder)
    ignored = shutil.ignore_patterns("__pycache__")
    for path in ROOT.glob("[!.]*/"):
        if path.name not in ("results", "mutants") and not (folder / path.name).exists():
            shutil.copytree(path, folder / path.name, ignore=ignored)
    # All files at the top are copied, because a test of the whole tree may read any of them.
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git" and not (folder / path.name).exists():
            shutil.copy(path, folder / path.name)
    shutil.rmtree(folder / "results/recorded")
    (folder / "results/recorded").symlink_to(ROOT / "results/recorded")
    return written(folder, guide)


def written(folder, guide):
    """Write the code of a guide into a tree; return the names of the files."""
    blocks = BLOCK.findall((ROOT / "docs" / guide).read_text())
    for name, code in blocks:
        path = folder / name
        # Append as a person does: two lines apart.
        path.write_text(f"{path.read_text()}\n\n{code}" if path.exists() else code)
    return [name for name, _ in blocks]


def run(folder, *words, **variables):
    """Run a command of a page with the tools of this environment on the path."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PATH": path}
    left_out = ("PYTEST_", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    variables |= kept | hidden
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True)


def counts(done):
    return {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done)}


@pytest.fixture(scope="module")
def squared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("square")
    names = followed(folder, "add-a-kernel.md")
    assert names[:2] == ["ops/square.py", "kernels/square.py"] and len(names) == 7
    return folder


def test_the_tests_of_a_kernel_that_was_added_pass(squared):
    done = run(squared, "pytest", "-q", "-k", "square", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-3000:]
    assert counts(done.stdout)["passed"] > 12


def test_the_tests_that_look_at_all_files_pass_beside_it(squared):
    tests = [
        "tests/baselines/test_baselines.py",
        "tests/project_rules/test_workflow.py",
        "tests/project_rules/test_house.py",
        "tests/project_rules/test_readme.py",
        "tests/tilewright/test_docstrings.py",
        "tests/ops/test_costs.py",
    ]
    some = "baseline_offers or reference_impl or every_op_reaches or share_private"
    # A kernel without a record changes nothing that rests on the recorded run.
    some += " or finds_nothing or no_line or the_graph_is or every_kernel_file or test_docstrings"
    done = run(squared, "pytest", "-q", *tests, "-k", some, "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-3000:]
    assert counts(done.stdout)["passed"] >= 6


def test_a_kernel_without_a_rival_passes_as_well(tmp_path):
    followed(tmp_path, "add-a-kernel.md")
    for path in (tmp_path / "baselines").glob("*.py"):
        shutil.copy(ROOT / "baselines" / path.name, path)
    tests = ["tests/baselines/test_baselines.py", "tests/project_rules/test_workflow.py"]
    some = "baseline_offers or reference_impl"
    done = run(tmp_path, "pytest", "-q", *tests, "-k", some, "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout[-3000:]
    assert counts(done.stdout)["passed"] >= 3


def test_the_commands_of_the_page_build_and_verify_a_kernel_that_was_added(squared):
    page = (ROOT / "docs/add-a-kernel.md").read_text()
    commands = [
        shlex.split(line, comments=True) for line in re.findall("^snakemake .*", page, re.M)
    ]
    built, verified, measured = commands
    for words in (built, verified):
        done = run(squared, *words)
        assert done.returncode == 0, done.stderr
    report = json.loads((squared / verified[-1]).read_text())
    assert report["status"] == "ok"
    assert {cell["status"] for cell in report["cells"]} == {"ok"}
    # Without a GPU there is nothing to time, and no recorded run has the op.
    done = run(squared, *measured)
    assert done.returncode != 0
    assert "tilewright: results/recorded/hopper: has no times of square" in done.stderr
    planned = run(squared, *measured, "measure=True", "run=plan", "-n")
    assert planned.returncode == 0, planned.stderr
    assert "Measure square" in planned.stdout + planned.stderr


def test_a_baseline_that_was_added_is_a_skipped_row(tmp_path):
    assert followed(tmp_path, "add-a-baseline.md") == ["baselines/example.py"]
    call = ("pytest", "-q", "-p", "no:cacheprovider", "tests/baselines/test_baselines.py")
    done = run(tmp_path, *call, "-k", "example or baseline_offers")
    assert done.returncode == 0, done.stdout[-3000:]
    assert counts(done.stdout) == {"passed": 1, "skipped": 1}
    assert "No module named 'example_kernels'" in done.stdout
    plan = ("snakemake", "-n", "--config", "measure=True", "run=plan")
    planned = run(tmp_path, *plan)
    assert planned.returncode == 0, planned.stderr
    assert "Verify softmax of example" in planned.stdout + planned.stderr


def test_a_figure_that_was_added_is_one_job_and_shows_in_the_documents(finished, tmp_path_factory):
    names = ["paper/figures/power.py", "paper/sections/appendix.tex"]
    assert written(finished, "add-a-figure.md") == names
    documents = {"Typeset results/study/paper.pdf", "Write results/study/report.html"}
    assert jobs(finished, *MEASURE) == {"Draw figure power"} | documents
    made = synthetic.write_run(tmp_path_factory.mktemp("run"), ("dot", "softmax"))
    summarize(made, made)
    figures, drawn = made / "figures", ("power", "headline", "softmax", "matmul")
    for name in drawn:
        out = ("--run", str(made), "--out", str(figures / f"{name}.pdf"))
        done = run(finished, "python", f"paper/figures/{name}.py", *out)
        assert done.returncode == 0, done.stderr
    for path in (finished / "paper/figures").glob("[!_]*.py"):
        if path.stem not in drawn:
            # The figure of a family without rows, such as matmul's here, stands in for any other.
            shutil.copy(figures / "matmul.svg", figures / f"{path.stem}.svg")
    done = run(finished, "python", "paper/report.py", "--run", str(made), "--out", "r.html")
    assert done.returncode == 0, done.stderr
    text = (finished / "r.html").read_text()
    more = text.partition('id="more"')[2].partition("<h2")[0]
    assert re.findall("<figcaption>(.*?)</figcaption>", more) == ["power"]

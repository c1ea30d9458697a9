"""Check that each skipped test says why, in words that a user reads at the end of a run."""

import ast
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.support.marks import MARKS, SLOW

ROOT = Path(__file__).parents[2]
SKIPS = ("skip", "skipif", "importorskip", "xfail")
FEWEST_WORDS = 3


def without_reason(text):
    """Yield the line of each skip or expected failure whose reason is missing or too short."""
    tree = ast.parse(text)
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in SKIPS:
            continue
        if ast.unparse(node.value) not in ("pytest", "pytest.mark"):
            continue
        call = called.get(id(node))
        reasons = [word.value for word in call.keywords if word.arg == "reason"] if call else []
        if call and node.attr == "skip":
            reasons += call.args
        fixed = [reason.value for reason in reasons if isinstance(reason, ast.Constant)]
        if not reasons or any(len(str(reason).split()) < FEWEST_WORDS for reason in fixed):
            yield node.lineno


def test_each_skip_has_a_reason():
    found = {
        path.relative_to(ROOT).as_posix(): list(without_reason(path.read_text(encoding="utf-8")))
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert len(found) > 100
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ('pytest.skip("needs a thing")', False),
        ("pytest.skip(f'no {thing}')", False),
        ('pytest.skip("")', True),
        ("pytest.skip()", True),
        ("pytest.mark.skip", True),
        ("pytest.mark.skipif(here)", True),
        ('pytest.mark.skipif(here, reason="a GPU")', True),
        ('pytest.mark.skipif(here, reason="needs a GPU")', False),
        ('pytest.importorskip("torch")', True),
        ('pytest.importorskip("torch", reason="needs PyTorch, which is absent")', False),
        ("pytest.mark.xfail(strict=True)", True),
        ("self.skip(3)", False),
    ],
)
def test_a_skip_without_a_reason_is_found(code, missing):
    assert list(without_reason(f"x = 1\n{code}\n")) == [2] * missing


def test_each_marker_has_a_reason():
    """A marker that is declared but not in MARKS would skip nothing, and one not declared fails."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert {line.partition(":")[0] for line in options["markers"]} == {*MARKS, SLOW}
    assert all(len(reason.split()) >= FEWEST_WORDS for _, reason in MARKS.values())


def test_ci_runs_the_tests_that_make_test_leaves_out():
    said = [
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
        for target in ("test", "test-all")
    ]
    fast, whole = (next(x for x in run.stdout.splitlines() if "-m pytest" in x) for run in said)
    assert f"-m 'not {SLOW}'" in fast and SLOW not in whole
    assert "make test-all" in (ROOT / ".ci/run").read_text().splitlines()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in MARKS]
)
def test_a_marked_test_runs_only_if_it_can(name):
    """The skip of this test is the right result: its body runs only where it is possible."""
    assert MARKS[name][0]

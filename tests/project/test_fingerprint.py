"""Check that a digest changes with the parts of an implementation, and with nothing else."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.project import fingerprint, libraries
from kernels._runtime import configs as _tuned

FILES = {
    "ops/toy.py": "from ops import _spec\n",
    "ops/_spec.py": "x = 1\n",
    "ops/else.py": "",
    "kernels/toy.py": "from . import toy_details\nfrom .toy_details.rows import f\n",
    "kernels/toy_details/rows.py": "from .._triton import memory\nf = memory.x\n",
    "kernels/_triton/memory.py": "from .math import x\n",
    "kernels/_triton/math.py": "x = 1\n",
    "kernels/_other.py": "",
    "kernels/else.py": "",
    "baselines/rival.py": 'import rival\nfrom baselines._formulas import f\nLIBRARY = "rival"\n',
    "baselines/_formulas.py": "def f():\n    pass\n",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(libraries, "version", {"triton": "3", "rival": "1"}.get)
    return tmp_path


def both(tree):
    return [fingerprint.implementation(tree, "toy", impl) for impl in ("ours", "rival")]


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("ops/toy.py", [True, True]),
        ("ops/_spec.py", [True, True]),
        ("kernels/toy.py", [True, False]),
        ("kernels/toy_details/rows.py", [True, False]),
        ("kernels/_triton/memory.py", [True, False]),
        ("kernels/_triton/math.py", [True, False]),
        ("baselines/rival.py", [False, True]),
        ("baselines/_formulas.py", [False, True]),
        ("kernels/_other.py", [False, False]),
        ("kernels/else.py", [False, False]),
        ("ops/else.py", [False, False]),
    ],
)
def test_an_edit_moves_what_it_belongs_to(tree, name, moved):
    before = both(tree)
    with (tree / name).open("a") as file:
        file.write("edited = True\n")
    assert [a != b for a, b in zip(before, both(tree), strict=True)] == moved


def test_the_clock_is_what_measures_and_all_that_it_imports(tmp_path):
    files = {
        "harness/measure/__main__.py": (
            "from harness.measure import scheduler\n"
            'BOTH = "harness.measure.worker:Worker", "harness.measure.parked_worker:Worker"\n'
        ),
        "harness/measure/worker.py": "import harness.machine.timer\n",
        "harness/measure/parked_worker.py": "x = 1\n",
        "harness/measure/scheduler.py": "x = 1\n",
        "harness/machine/timer.py": "x = 1\n",
        "harness/summarize/__main__.py": "x = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = fingerprint.harness(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}# a word\n")
        assert fingerprint.harness(tmp_path) == before
        (tmp_path / name).write_text(f"{text}y = 2\n")
        assert (fingerprint.harness(tmp_path) != before) == (
            name != "harness/summarize/__main__.py"
        )
        (tmp_path / name).write_text(text)


@pytest.mark.parametrize(
    ("versions", "moved"),
    [
        ({"triton": "3", "rival": "2"}, [False, True]),
        ({"triton": "4", "rival": "1"}, [True, False]),
    ],
)
def test_another_version_of_a_library_is_another_thing(tree, monkeypatch, versions, moved):
    before = both(tree)
    monkeypatch.setattr(libraries, "version", versions.get)
    assert [a != b for a, b in zip(before, both(tree), strict=True)] == moved


def test_the_twin_is_ours_and_the_place_does_not_matter(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere")
    for name, text in FILES.items():
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text(text)
    assert both(tree) == both(other)
    assert fingerprint.implementation(tree, "toy", "ours_twin") == both(tree)[0]
    assert fingerprint.implementation(tree, "toy", "nobody") == ""


CODE = '''"""A file."""

import torch


class Row:
    """A row."""

    def end(self, start, length=1):
        """Where it ends."""
        return start + length if length is not None else [start, 0.5, "text"]
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A file."""', '"""Another text."""'),
        ('    """A row."""\n\n', ""),
        ('        """Where it ends."""\n', "        # a comment\n"),
        ("import torch\n", "import torch  # noqa\n\n\n"),
        ("start + length if", "(start + length) if"),
        ('"text"', "'text'"),
    ],
)
def test_words_and_layout_move_no_digest(old, new):
    assert old in CODE
    assert fingerprint.syntax(CODE.replace(old, new)) == fingerprint.syntax(CODE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("start + length", "start - length"),
        ("start + length", "length + start"),
        ("length=1", "length=1.0"),
        ("length=1", "length=True"),
        ("is not None", "is not 0"),
        ("is not None", "is None"),
        ("import torch", "import torch as t"),
        ("def end", "async def end"),
        ("self, start, length=1", "self, start=1, length=1"),
        ("self, start, length", "self, start, *, length"),
        ('[start, 0.5, "text"]', '(start, 0.5, "text")'),
        ('[start, 0.5, "text"]', '[start, [0.5, "text"]]'),
        ('"text"', 'b"text"'),
        ('"text"', 'f"{start}"'),
        ('    """A row."""\n\n', '    TEXT = """A row."""\n\n'),
    ],
)
def test_each_change_of_what_runs_moves_the_digest(old, new):
    assert old in CODE
    assert fingerprint.syntax(CODE.replace(old, new)) != fingerprint.syntax(CODE)


@given(st.lists(st.sampled_from(["a = 1", "b = 2", "if a: b", "a[b:1]", "a + b * 2"]), max_size=4))
def test_equal_digests_are_equal_trees(statements):
    text = "\n".join(statements)
    for other in (text + "\na", "\n".join(reversed(statements)), text.replace("2", "3")):
        same = ast.dump(ast.parse(text)) == ast.dump(ast.parse(other))
        assert (fingerprint.syntax(text) == fingerprint.syntax(other)) == same


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("return x * 2", "return x * 3", False),
        ("return x * 2", "return x * 2  # twice", True),
        ('    """Twice x."""\n', "", True),
        ('"""Twice x."""', '"""The double of x."""', True),
    ],
)
def test_a_tuned_kernel_may_be_documented(old, new, same):
    text = '@triton.jit\ndef twice(x):\n    """Twice x."""\n    return x * 2\n'
    assert (_tuned._code(text.replace(old, new)) == _tuned._code(text)) == same

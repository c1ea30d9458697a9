"""A digest moves with what an implementation is made of, and with nothing else."""

import pytest

from harness import digests, environment

FILES = {
    "kernels/toy.py": "from kernels import _tile\n",
    "kernels/_tile.py": "import torch\n",
    "kernels/_other.py": "",
    "kernels/else.py": "",
    "baselines/rival.py": 'import rival\nfrom baselines._formulas import f\nLIBRARY = "rival"\n',
    "baselines/_formulas.py": "def f():\n    pass\n",
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(environment, "version", {"triton": "3", "rival": "1"}.get)
    return tmp_path


def both(tree):
    return [digests.implementation(tree, "toy", impl) for impl in ("ours", "rival")]


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("kernels/toy.py", [True, False]),
        ("kernels/_tile.py", [True, False]),
        ("baselines/rival.py", [False, True]),
        ("baselines/_formulas.py", [False, True]),
        ("kernels/_other.py", [False, False]),
        ("kernels/else.py", [False, False]),
    ],
)
def test_an_edit_moves_what_it_belongs_to(tree, name, moved):
    before = both(tree)
    with (tree / name).open("a") as file:
        file.write("# edited\n")
    assert [a != b for a, b in zip(before, both(tree), strict=True)] == moved


@pytest.mark.parametrize(
    ("versions", "moved"),
    [
        ({"triton": "3", "rival": "2"}, [False, True]),
        ({"triton": "4", "rival": "1"}, [True, False]),
    ],
)
def test_another_version_of_a_library_is_another_thing(tree, monkeypatch, versions, moved):
    before = both(tree)
    monkeypatch.setattr(environment, "version", versions.get)
    assert [a != b for a, b in zip(before, both(tree), strict=True)] == moved


def test_the_twin_is_ours_and_the_place_does_not_matter(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("elsewhere")
    for name, text in FILES.items():
        (other / name).parent.mkdir(exist_ok=True)
        (other / name).write_text(text)
    assert both(tree) == both(other)
    assert digests.implementation(tree, "toy", "ours_twin") == both(tree)[0]
    assert digests.implementation(tree, "toy", "nobody") == ""

"""Check that the digest of tuned tables is of what binds for an op, and of nothing else."""

import json

import pytest

from harness.cli import UserError
from harness.measure import tables


def entry(us: float) -> dict:
    return {"run_id": "r", "triton": "3.6.0", "kernels": {}, "us": us}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree with two families and one that uses the details of the first, all tuned."""
    monkeypatch.delenv("TILEWRIGHT_TUNED", raising=False)
    for path, text in {
        "kernels/softmax.py": "import kernels.softmax_details.rows\n",
        "kernels/softmax_details/rows.py": "",
        "kernels/gated.py": "",
        "kernels/both.py": "import kernels.softmax_details.rows\n",
        "network/ops/models.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    write(tmp_path / "kernels/tuned", softmax=1.0, gated=1.0)
    return tmp_path


def write(folder, **us: float) -> None:
    folder.mkdir(exist_ok=True)
    families = {family: entry(value) for family, value in us.items()}
    (folder / "h200.json").write_text(json.dumps({"device": "H200", "families": families}))


@pytest.mark.parametrize(
    ("family", "moves"),
    [("softmax", True), ("both", True), ("gated", False), ("models", True)],
)
def test_a_table_of_kernels_that_an_op_launches_moves_the_digest(tree, family, moves):
    before = tables.digest(tree, family)
    assert before == tables.digest(tree, family)
    write(tree / "kernels/tuned", softmax=2.0, gated=1.0)
    assert (tables.digest(tree, family) != before) == moves


def test_other_tables_or_none_may_be_in_force(tree, monkeypatch):
    committed = tables.digest(tree, "softmax")
    monkeypatch.setenv("TILEWRIGHT_TUNED", "")
    none = tables.digest(tree, "softmax")
    monkeypatch.setenv("TILEWRIGHT_TUNED", str(tree / "own"))
    write(tree / "own", gated=1.0)
    assert tables.digest(tree, "softmax") == none != committed
    write(tree / "own", softmax=3.0)
    assert tables.digest(tree, "softmax") not in (none, committed)
    (tree / "own/h200.json").write_text("{")
    with pytest.raises(UserError, match="tune again"):
        tables.digest(tree, "softmax")

"""Shapes drawn for a run: what an op declares, the same for all jobs, apart from the grid."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from harness.calls import cell, drawn, inputs
from harness.cli import UserError
from harness.measure.rows import Rows
from harness.project import registry, source_tree
from harness.results import raw
from harness.workers.messages import Failure
from ops._spec import DTYPES, ITEMSIZE, PASSES, make_case

ROOT = Path(__file__).parents[2]
OPS = {name: registry.op(name)[0] for name in source_tree.ops(ROOT)}
# The most work in one call that a rival's untuned kernel still finishes in milliseconds.
MOST_BYTES, MOST_FLOPS = 5 * 2**30, 2**42


@pytest.mark.parametrize("name", OPS)
def test_an_op_draws_shapes_that_it_takes(name):
    op = OPS[name]
    generator, longest = random.Random(7), {}
    for _ in range(300):
        one = op.drawn(generator)
        assert list(one.sizes) == list(op.sweep[0].sizes) and min(one.sizes.values()) > 0
        assert set(one.flags) <= set(op.flags) and not one.layout and not one.values
        for pass_ in drawn.passes(op):
            cost = op.cost(one, pass_, ITEMSIZE["bfloat16"])
            assert cost.bytes_read + cost.bytes_written <= MOST_BYTES
            assert cost.flops <= MOST_FLOPS
        made = inputs.make(op, one, "bfloat16", 0, "meta")
        assert sum(t.numel() * t.element_size() for t in made.values() if t is not None) < 2**31
        for letter, size in one.sizes.items():
            longest.setdefault(letter, set()).add(size)
    # It is a range, and not a list: most draws of the size that varies most are new.
    assert max(map(len, longest.values())) > 150


@pytest.mark.parametrize("name", OPS)
def test_a_seed_gives_an_op_its_shapes(name):
    op = OPS[name]
    once, again, other = drawn.cases(op, 5), drawn.cases(op, 5), drawn.cases(op, 6)
    assert once == again and {c.name for c in once} != {c.name for c in other}
    assert len({c.name for c in once} | {c.name for c in op.sweep}) == drawn.SHAPES + len(op.sweep)
    dtype = "bfloat16" if "bfloat16" in op.dtypes else op.dtypes[0]
    assert {c.dtypes for c in once} == {(dtype,)}
    assert drawn.cases(op, None) == ()
    # A worker receives a case only by its name.
    for each in (*once, *op.sweep):
        assert (drawn.named(op, each.name).sizes, drawn.named(op, each.name).flags) == (
            each.sizes, each.flags,
        )  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_ours_and_the_reference_take_what_is_drawn(name):
    """The tensors have no data, and the process compiles kernels instead of interpreting them."""
    assert name in shapes_taken()


def shapes_taken(found={}):  # noqa: B006
    if not found:
        script = (
            "from pathlib import Path; from harness.build import recorder\n"
            "from harness.calls import drawn; from harness.project import registry, source_tree\n"
            "for name in source_tree.ops(Path()):\n"
            "    op, _ = registry.op(name)\n"
            "    if all(recorder.launched(op, c, c.dtypes[0]) for c in drawn.cases(op, 3)):\n"
            "        print(name)\n"
        )
        call = [sys.executable, "-c", script]
        done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found |= dict.fromkeys(done.stdout.split())
    return found


def test_cells_of_both_sets_are_told_apart_and_losses_keep_both_passes():
    op = OPS["softmax"]
    cells = list(cell.sweep(op, DTYPES, PASSES, 2, drawn_seed=5))
    grid = [each for each in cells if each.set == "grid"]
    apart = [each for each in cells if each.set == "drawn"]
    assert cells == grid + apart and len(apart) == 2 * 2
    assert {each.pass_ for each in grid} == set(PASSES)
    assert {each.pass_ for each in apart} == {"forward", "backward"}
    loss = cell.sweep(OPS["cross_entropy"], DTYPES, PASSES, None, drawn_seed=5)
    assert {each.pass_ for each in loss if each.set == "drawn"} == {"forward", "both"}
    assert {each.set for each in cell.sweep(op, DTYPES, PASSES, None)} == {"grid"}
    rows = Rows(op, "softmax", apart[0], {})
    rows.failed("ours", "1", Failure("oom", ""), 0, 0)
    assert rows.taken[0]["set"] == "drawn"


def test_the_seed_of_a_run_is_drawn_once_and_read_by_all(tmp_path):
    path = tmp_path / "drawn.json"
    call = [sys.executable, "-m", "harness.calls.drawn", "--out", str(path), "--seed"]
    subprocess.run([*call, "17"], check=True, cwd=ROOT)
    assert json.loads(path.read_text()) == {"drawn_seed": 17} and drawn.read(path) == 17
    subprocess.run([*call, "fresh"], check=True, cwd=ROOT)
    assert drawn.read(path) not in (17, None)
    assert drawn.read(None) is None
    for broken in ('{"drawn_seed": "x"}', '{"drawn_seed": true}', "{}", "{"):
        path.write_text(broken)
        with pytest.raises(UserError, match=r"harness.calls.drawn --seed fresh"):
            drawn.read(path)


ROW = dict.fromkeys(raw.FILLED, 1) | {"op": "add", "family": "vector", "case": "N1"}
ROW |= {"dtype": "float32", "pass": "forward", "impl": "ours", "status": "oom"}


def test_a_row_says_of_which_set_it_is_and_former_rows_are_of_the_grid():
    text = raw.header_line() + raw.line(ROW | {"set": "drawn"}) + raw.line(ROW | {"set": "grid"})
    assert [row["set"] for row in raw.parse(text, "f", "r")] == ["drawn", "grid"]
    place = raw.HEADER.index("set")
    former = [
        ",".join(v for i, v in enumerate(x.split(",")) if i != place) for x in text.split("\n")
    ]
    rows = raw.parse("\n".join(former[:2]) + "\n", "f", "r")
    assert [row["set"] for row in rows] == ["grid"]
    assert rows[0] | {"set": "drawn"} == raw.parse(text, "f", "r")[0]
    with pytest.raises(UserError, match="set 'chosen' is none of grid, drawn"):
        raw.parse(text.replace(",drawn,", ",chosen,"), "f", "r")


def test_the_name_of_case_says_all_of_it():
    one = make_case("causal", "scaled", M=3, N=40)
    assert drawn.named(OPS["softmax"], one.name) == one

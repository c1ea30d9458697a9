"""Kernels are compiled ahead of time, with the arguments that their launchers would give them."""

import json
import re
import subprocess
import sys

import pytest

from tests.support.toy_tree import KERNELS, OPS, build, make_tree


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = make_tree(tmp_path_factory.mktemp("tree"))
    done, table = build(root, "90", "80", "gfx942", "--candidates")
    assert done.returncode == 0, done.stderr
    return root, done, table


def rows(table, **wanted):
    return [r for r in table["kernels"] if all(r[key] == value for key, value in wanted.items())]


def test_default_launches_are_built_for_every_architecture(built):
    table = built[2]
    assert {row["arch"] for row in table["kernels"]} == {"90", "80", "gfx942"}
    for arch in ("90", "80", "gfx942"):
        for dtype in ("bfloat16", "float32"):
            for row in rows(table, arch=arch, dtype=dtype, default=True, kernel="_double_kernel"):
                assert row["config"] == "BLOCK_N=512 num_warps=4"
                assert (row["status"], row["reason"], row["fits"]) == ("ok", "", True)
                assert row["registers"] > 0 and row["warps"] == 4
                assert row["spill_stores"] == row["spill_loads"] == 0
                assert len(row["sha256"]) == 64
    # Both sizes are multiples of 16: one binary. 512 elements on 128 threads: 8 or 16 bytes each.
    [row] = rows(table, arch="90", dtype="bfloat16", default=True, kernel="_double_kernel")
    assert row["instructions"]["ldg128"] == row["instructions"]["stg128"] == 0
    [row] = rows(table, arch="90", dtype="float32", default=True, kernel="_double_kernel")
    assert row["instructions"]["ldg128"] == row["instructions"]["stg128"] == 1


def test_a_kernel_that_only_edge_cases_reach_is_built(built):
    assert len(rows(built[2], kernel="_small_kernel", arch="90")) == 1
    assert not rows(built[2], kernel="_twice")


def test_candidates_are_built_for_one_architecture(built):
    table = built[2]
    candidates = rows(table, default=False)
    assert {(row["arch"], row["dtype"]) for row in candidates} == {("90", "bfloat16")}
    wide, odd = (rows(table, default=False, config=c) for c in
                 ("BLOCK_N=1024 num_warps=8", "BLOCK_N=1000 num_warps=4"))  # fmt: skip
    assert (wide[0]["status"], wide[0]["warps"]) == ("ok", 8)
    assert odd[0]["status"] == "unsupported" and "power of 2" in odd[0]["reason"]
    assert "power of 2" in built[1].stdout


def test_ir_of_every_stage_is_kept(built):
    root, _, table = built
    stages = [row["stage"] for row in table["ir"] if row["kernel"] == "_double_kernel"]
    assert stages == ["ttir", "ttgir", "llir", "ptx", "sass"]
    for row in table["ir"]:
        text = (root / "results" / row["path"]).read_text()
        assert (row["bytes"], row["lines"]) == (len(text.encode()), len(text.splitlines()))
        assert str(root) not in text
    ptx = (root / "results/toy/_double_kernel.ptx").read_text()
    assert ".target sm_90a" in ptx


def test_binaries_do_not_depend_on_the_folder(built, tmp_path):
    done, table = build(make_tree(tmp_path / "elsewhere"), "90", "--candidates")
    assert done.returncode == 0, done.stderr
    assert table["kernels"] == rows(built[2], arch="90")
    assert table["ir"] == built[2]["ir"]


def test_a_default_that_does_not_build_is_an_error(tmp_path):
    broken = KERNELS.replace('DEFAULT = {"BLOCK_N": 512', 'DEFAULT = {"BLOCK_N": 500')
    done, table = build(make_tree(tmp_path / "tree", broken), "90")
    assert done.returncode == 1
    assert rows(table, default=True, dtype="bfloat16")[0]["status"] == "unsupported"
    assert "_double_kernel 90 bfloat16 BLOCK_N=500" in done.stdout


def test_a_binary_that_writes_nothing_is_a_fault(tmp_path):
    silent = re.sub(r"tl\.store\(.*, (_twice\(tl\.load\([^)]*\)\)).*", r"\1", KERNELS)
    assert "tl.store" not in silent
    done, table = build(make_tree(tmp_path / "tree", silent), "90", "gfx942")
    assert done.returncode == 1
    assert {row["status"] for row in table["kernels"]} == {"unsupported"}
    assert "the compiler left no instruction that writes a result" in done.stdout


def test_entries_that_bind_no_longer_are_listed(tmp_path):
    root = make_tree(tmp_path / "tree")
    old = {"triton": "3.5.0", "kernels": {"_double_kernel": {"source_sha256": "0", "keys": []}}}
    (root / "kernels/tuned").mkdir()
    table = json.dumps({"device": "Fake GPU", "families": {"toy": old}})
    (root / "kernels/tuned/fake.json").write_text(table)
    done, table = build(root, "90")
    assert done.returncode == 0
    [finding] = table["tables"]
    assert (finding["table"], finding["kernel"]) == ("fake.json", "_double_kernel")
    assert finding["state"] == "stale" and finding["reason"].startswith("tuned with triton 3.5.0")
    assert "build toy: fake.json: _double_kernel stale: tuned with triton 3.5.0" in done.stdout


def test_the_choices_of_a_table_are_built_beside_the_defaults(tmp_path):
    root = make_tree(tmp_path / "tree")
    wide = {"BLOCK_N": 1024, "num_warps": 8}
    code = (
        "import json, sys, triton; from kernels import toy;"
        "from kernels._runtime import configs as _tuned;"
        "entry = {'key': {'n': 4096}, 'config': json.loads(sys.argv[1])};"
        "entry |= {'timed': {}, 'failed': {}};"
        "part = {'source_sha256': _tuned.source_sha256(toy._double_kernel), 'keys': [entry] * 2};"
        "record = {'triton': triton.__version__, 'kernels': {'_double_kernel': part}};"
        "print(json.dumps({'device': 'Fake GPU', 'families': {'toy': record}}))"
    )
    call = [sys.executable, "-c", code, json.dumps(wide)]
    made = subprocess.run(call, cwd=root, capture_output=True, text=True, check=True)
    (root / "kernels/tuned").mkdir()
    (root / "kernels/tuned/fake.json").write_text(made.stdout)
    done, table = build(root, "90", "80")
    assert done.returncode == 0, done.stderr
    [chosen] = rows(table, default=False)
    assert (chosen["arch"], chosen["config"]) == ("90", "BLOCK_N=1024 num_warps=8")


def test_a_kernel_of_another_dtype_alone_is_built(tmp_path):
    # As where a loss keeps its gradient for later in float16 only.
    halves = KERNELS.replace("if n < 10:", "if x.dtype == torch.float16:")
    done, table = build(make_tree(tmp_path / "tree", halves), "90")
    assert done.returncode == 0, done.stderr
    assert [row["dtype"] for row in rows(table, kernel="_small_kernel")] == ["float16"]
    assert "_small_kernel" in {row["kernel"] for row in table["ir"]}


def test_a_kernel_that_one_architecture_alone_launches_is_built_there(tmp_path):
    there = "if n < 10 and shared_bytes(x.device) > 200_000:"
    large = KERNELS.replace("if n < 10:", there).replace(
        "from kernels._runtime.configs",
        "from kernels._runtime.device import shared_bytes\nfrom kernels._runtime.configs",
    )
    done, table = build(make_tree(tmp_path / "tree", large), "90", "80")
    assert done.returncode == 0, done.stderr
    assert {row["arch"] for row in rows(table, kernel="_small_kernel")} == {"90"}


def test_a_kernel_that_nobody_launches_is_an_error(tmp_path):
    lonely = OPS.replace("(make_case(N=3),)", "()")
    done, table = build(make_tree(tmp_path / "tree", ops=lonely), "90")
    assert (done.returncode, table) == (2, None)
    assert "no case of any op launches _small_kernel" in done.stderr


@pytest.mark.parametrize(
    ("arch", "file", "message"),
    [
        ("ninety", "toy", "'ninety' is no architecture"),
        (",", "toy", "--archs: names no architecture"),
        ("90", "play", "kernels/play.py: no such"),
        ("90", "../kernels/toy", "kernels/../kernels/toy.py: no such"),
        ("90", "_runtime/configs", "no such file of kernels; name its stem"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arch, file, message):
    done, _ = build(make_tree(tmp_path / "tree"), arch, file=file)
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--keep", "results"], "--keep: needs --same-as"),
        (["--keep", "gone", "--same-as", "results/toy.json"], "gone: no such folder"),
    ],
)
def test_nothing_is_kept_without_an_equal_build_or_a_record(built, words, message):
    root, *_ = built
    done, _ = build(root, "90", *words)
    assert done.returncode == 2
    assert message in done.stderr and len(done.stderr.splitlines()) == 1

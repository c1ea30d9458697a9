"""A change of names keeps what was recorded and tuned, and a change of code does not."""

import json

import pytest

from harness.build import same
from harness.cli import UserError
from tests.support.toy_tree import KERNELS, build, make_tree

RENAMED = KERNELS.replace("_twice", "_doubled").replace("_double_kernel", "double_kernel")
RENAMED = RENAMED.replace("    offs = tl", '    """out = 2 x."""\n    offs = tl')


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = make_tree(tmp_path_factory.mktemp("same"))
    done, old = build(root, "90", "--candidates")
    assert done.returncode == 0, done.stderr
    (root / "old.json").write_text(json.dumps(old))
    return root, old


def rebuilt(root, kernels, *words):
    (root / "kernels/toy.py").write_text(kernels)
    return build(root, "90", "--candidates", "--same-as", "old.json", *words)


def test_new_names_and_docstrings_leave_the_binaries(tree):
    root, old = tree
    report = root / "recorded/verify/double/ours.json"
    other = root / "recorded/verify/triple/ours.json"
    table = root / "kernels/tuned/gpu.json"
    entry = {"key": {"n": 4096}, "config": {"BLOCK_N": 1024}, "timed": {}, "failed": {}}
    tuned = {"source_sha256": old["sources"]["_double_kernel"], "keys": [entry]}
    family = {"triton": old["triton"], "kernels": {"_double_kernel": tuned}}
    for path, content in (
        (report, {"code_sha256": old["code_sha256"]}),
        (other, {"code_sha256": "of another file"}),
        (table, {"device": "GPU", "families": {"toy": family}}),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    done, new = rebuilt(root, RENAMED, "--keep", "recorded")
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads(report.read_text())
    assert kept["code_sha256"] == new["code_sha256"] != old["code_sha256"]
    [note] = kept["carried"]
    assert note["was"] == old["code_sha256"] and note["binaries"] > 0 and note["commit"]
    assert json.loads(other.read_text()) == {"code_sha256": "of another file"}
    kernels = json.loads(table.read_text())["families"]["toy"]["kernels"]
    sources = new["sources"]["double_kernel"]
    assert kernels == {"double_kernel": {"source_sha256": sources, "keys": [entry]}}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("return x * 2\n\n\n@triton.jit\ndef _double", "return x * 3\n\n\n@triton.jit\ndef _double",
         "only here: _double_kernel"),
        ("triton.cdiv(n, config", "1 + triton.cdiv(n, config", "grids or arguments of launches"),
    ],
)  # fmt: skip
def test_changed_code_keeps_no_record_and_no_table(tree, old, new, said):
    root, built = tree
    assert old in KERNELS
    report = root / "recorded/verify/double/ours.json"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps({"code_sha256": built["code_sha256"]}))
    done, _ = rebuilt(root, KERNELS.replace(old, new), "--keep", "recorded")
    assert done.returncode == 1
    assert said in done.stdout and "not the same as old.json" in done.stdout
    assert json.loads(report.read_text()) == {"code_sha256": built["code_sha256"]}


ROW = {"arch": "90", "dtype": "float32", "text_sha256": "a", "kernel": "k", "status": "ok"}
BUILD = {
    "file": "toy", "triton": "3", "code_sha256": "old", "sources": {"k": "1"},
    "launches_sha256": "l", "kernels": [ROW | {"default": True}],
}  # fmt: skip


def test_another_triton_is_a_difference():
    assert same.differences(BUILD, BUILD) == []
    assert same.differences(BUILD | {"triton": "2"}, BUILD) == ["triton 2 there, 3 here"]


def test_builds_without_a_common_architecture_prove_nothing():
    other = BUILD | {"kernels": [ROW | {"arch": "80", "default": True}]}
    with pytest.raises(UserError, match="share no architecture"):
        same.differences(BUILD, other)


def test_a_table_stays_where_a_tuned_binary_is_missing(tmp_path):
    tuned = ROW | {"text_sha256": "b", "default": False}
    entry = {"toy": {"kernels": {"k": {"source_sha256": "1", "keys": []}}}}
    (tmp_path / "gpu.json").write_text(json.dumps({"families": entry}))
    old = BUILD | {"kernels": [*BUILD["kernels"], tuned]}
    new = BUILD | {"sources": {"k": "2"}}
    assert same.differences(old, new) == []
    assert same.keep(old, new, tmp_path, tmp_path, "c") == []
    assert json.loads((tmp_path / "gpu.json").read_text()) == {"families": entry}
    assert same.keep(old, new | {"kernels": old["kernels"]}, tmp_path, tmp_path, "c")
    kept = json.loads((tmp_path / "gpu.json").read_text())["families"]["toy"]["kernels"]["k"]
    assert kept["source_sha256"] == "2"


def test_an_older_report_of_a_build_is_no_evidence(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(json.dumps({"file": "toy", "triton": "3", "kernels": []}))
    with pytest.raises(UserError, match=r"old\.json"):
        same.read(path)

"""Check how a sanitizer's output is read: findings in our kernels, in others, and its end."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.project import fingerprint, registry
from harness.results import columns
from harness.sanitize import __main__ as sanitize
from harness.sanitize import worker
from harness.study import jobs
from harness.summarize import tables
from tests.support.paper_scripts import save, script

OURS = {"_forward_kernel", "_other_kernel"}
CLEAN = "sanitized 12 cases\n========= ERROR SUMMARY: 0 errors\n"
FINDING = """========= Invalid __global__ read of size 4 bytes
=========     at {place}+0x6f0
=========     by thread (31,0,0) in block (0,0,0)
"""
FAKE = """#!{python}
import os, sys
tool = sys.argv[sys.argv.index("--tool") + 1] if "--tool" in sys.argv else "--version"
print({texts!r}.get(tool, ""))
assert tool == "--version" or os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
"""


def test_a_clean_end_is_ok():
    row = sanitize.judge(CLEAN, OURS)
    assert (row["status"], row["cases"], row["findings"]) == ("ok", 12, {})
    text = "sanitized 3 cases\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)\n"
    assert sanitize.judge(text, OURS)["status"] == "ok"


@pytest.mark.parametrize("place", ["_forward_kernel", "_forward_kernel(float *, int)"])
def test_a_finding_in_ours_is_named(place):
    text = FINDING.format(place=place) * 2 + CLEAN.replace("0 errors", "2 errors")
    row = sanitize.judge(text, OURS)
    assert row["status"] == "findings" and row["findings"] == {"_forward_kernel": 2}
    assert row["reason"] == "2 findings: _forward_kernel"


def test_a_finding_in_a_kernel_of_a_library_is_not_ours():
    text = FINDING.format(place="cutlass_fill_kernel") + CLEAN.replace("0 errors", "1 errors")
    row = sanitize.judge(text, OURS)
    assert row["status"] == "ok" and row["elsewhere"] == {"cutlass_fill_kernel": 1}


def test_a_finding_that_names_no_kernel_counts():
    row = sanitize.judge(CLEAN.replace("0 errors", "4 errors"), OURS)
    assert row["status"] == "findings" and row["reason"] == "4 findings: no kernel named"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Segmentation fault",
        "========= ERROR SUMMARY: 0 errors\n",  # the cases never ran
        "sanitized 12 cases\n",  # the tool never ended
    ],
)
def test_an_early_end_is_no_clean_one(text):
    row = sanitize.judge(text, OURS)
    assert row["status"] == "crashed" and row["reason"].startswith("ended before all cases")


def test_the_sanitizer_that_never_ends_is_hung():
    assert sanitize.judge(None, OURS)["status"] == "hung"


def command(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", "harness.sanitize", "--file", *words],
        capture_output=True, text=True, env={"PATH": str(folder), "TILEWRIGHT_GPUS": ""},
    )  # fmt: skip


def test_a_machine_without_the_tool_says_so(tmp_path):
    done = command(tmp_path, "softmax", "--out", str(tmp_path / "s.json"))
    assert done.returncode == 2 and "compute-sanitizer: not found" in done.stderr
    assert not (tmp_path / "s.json").exists()


def test_an_unknown_file_is_refused(tmp_path):
    done = command(tmp_path, "nonsense", "--out", str(tmp_path / "s.json"))
    assert done.returncode == 2 and "kernels/nonsense.py: no such file" in done.stderr


@pytest.mark.parametrize(
    "finding, code", [("", 0), (FINDING.format(place="_forward_row_kernel"), 1)]
)
def test_the_report_holds_each_tool(tmp_path, monkeypatch, finding, code):
    texts = dict.fromkeys(sanitize.TOOLS, finding + CLEAN) | {"--version": "Version 2025.1.0.0"}
    fake = tmp_path / sanitize.SANITIZER
    fake.write_text(FAKE.format(python=sys.executable, texts=texts))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sanitize, "_locked", contextlib.nullcontext)
    out = tmp_path / "softmax.json"
    monkeypatch.setattr(sys, "argv", ["sanitize", "--file", "softmax", "--out", str(out)])
    assert sanitize.main() == code
    report = json.loads(out.read_text())
    assert report["version"] == "2025.1.0.0" and report["ops"] == ["softmax"]
    assert report["code_sha256"] == fingerprint.implementation(Path(), "softmax", "ours")
    assert [tool["tool"] for tool in report["tools"]] == list(sanitize.TOOLS)


def test_reports_of_this_run_go_before_recorded_ones(tmp_path):
    tool = {"tool": "memcheck", "status": "ok", "cases": 9, "findings": {}, "elsewhere": {"k": 2}}
    for folder, files in (("run", ["softmax"]), ("recorded", ["softmax", "matmul"])):
        for file in files:
            path = tmp_path / folder / "sanitize" / f"{file}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"version": folder, "tools": [tool]}))
    families = ["softmax", "matmul", "vector", "softmax"]
    rows = list(tables.sanitizer(tmp_path / "run", tmp_path / "recorded", families))
    found = [(row["file"], row["version"], row["findings"], row["elsewhere"]) for row in rows]
    assert found == [("matmul", "recorded", 0, 2), ("softmax", "run", 0, 2)]


def test_a_report_is_held_against_the_code_that_is_here(tmp_path):
    tool = {"tool": "memcheck", "status": "ok", "cases": 9, "findings": {}, "elsewhere": {}}
    present = fingerprint.implementation(Path(), "softmax", "ours")
    told = {"softmax": {"code_sha256": present}, "vector": {"code_sha256": present}, "matmul": {}}
    (tmp_path / "sanitize").mkdir()
    for file, more in told.items():
        path = tmp_path / "sanitize" / f"{file}.json"
        path.write_text(json.dumps({"version": "1", "tools": [tool]} | more))
    rows = tables.sanitizer(tmp_path, tmp_path / "none", told)
    codes = {row["file"]: row["code"] for row in rows}
    assert codes == {"softmax": "present", "vector": "other", "matmul": ""}


@pytest.mark.parametrize(
    "codes, told",
    [
        (["present", "other", ""], r"reports of \texttt{matmul} do"),
        (["", "", ""], "reports of all files do"),
        (["present"] * 3, ""),
    ],
)
def test_the_table_says_of_which_code_the_reports_are(tmp_path, codes, told):
    row = dict.fromkeys(columns.SANITIZER.header, "")
    row |= {"tool": "memcheck", "cases": 9, "status": "ok"}
    files = zip(("softmax", "vector", "matmul"), codes, strict=True)
    rows = [row | {"file": file, "code": code} for file, code in files]
    save(tmp_path, "sanitizer", rows)
    summary = {"op": "softmax", "family": "softmax", "impl": "ours", "status": "ok", "size_N": 1}
    summary |= dict.fromkeys(("case", "dtype", "pass", "device_us"), "")
    save(tmp_path, "summary", [summary])
    table = Path("paper/tables/sanitizer.py")
    text = script(table, tmp_path, tmp_path / "out.tex").read_text()
    assert r"\texttt{softmax} &" in text and (told in text if told else "reports" not in text)
    assert (r"\texttt{vector}$^\dagger$" in text) == ("other" in codes) == ("changed" in text)


@pytest.mark.parametrize("name", sorted(jobs.ops(Path())))
def test_the_watched_program_runs_both_passes(name, monkeypatch):
    op, found, run = registry.op(name)[0], [], worker.invoke.run

    def kept(*arguments):
        found.append(run(*arguments))
        return found[-1]

    monkeypatch.setattr(worker.invoke, "run", kept)
    case = min(op.edge, key=lambda case: sum(case.sizes.values()))
    worker.call(op, op.reference, case, op.dtypes_of(case)[0], "cpu")
    results = found[-1]
    assert all(tensor.device.type == "cpu" for tensor in results.values())
    assert op.differentiable == any(key.startswith("d") for key in results)


def test_a_librarys_product_goes_where_something_was_written_unless_it_adds_to_that():
    seen = []

    def product(*arguments, out):
        seen.append(out.clone())
        return torch.mm(*arguments[-2:], out=out)

    a, b, out = torch.ones(2, 3), torch.ones(3, 2), torch.zeros(2, 2)
    assert torch.equal(worker._filled(product)(a, b, out=out), a @ b)
    worker._filled(product)(out, a, b, out=out)
    assert seen[0].isnan().all()
    assert torch.equal(seen[1], a @ b)
    assert torch.equal(worker._filled(torch.mm)(a, b), a @ b)

"""Check that the survey finds the kernels of a library by its syntax trees alone."""

import base64
import csv
import hashlib
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from harness import survey
from harness.cli import UserError
from harness.project import libraries

ROOT = Path(__file__).resolve().parents[1]
SOURCE = """
import triton
import triton.language as tl
from triton import jit as compiled
from triton.experimental import gluon


@triton.jit
def plain(x):
    return x


@triton.autotune(configs=[], key=[])
@triton.jit(noinline=True)
def tuned(
    x,
):
    return x


@compiled
def renamed(x): return x


@gluon.jit
def lower(x): return x


@torch.jit
def other(x): return x


def undecorated(x): return x
"""


def found(source, path="library/ops.py"):
    return {row["kernel"]: row for row in survey.kernels([(PurePosixPath(path), source)])}


def test_decorated_functions_are_kernels():
    rows = found(SOURCE)
    assert list(rows) == ["plain", "tuned", "renamed", "lower"]
    assert [row["lines"] for row in rows.values()] == [2, 4, 1, 1]
    assert [name for name, row in rows.items() if row["autotuned"]] == ["tuned"]
    assert [row["language"] for row in rows.values()] == ["triton"] * 3 + ["gluon"]


@pytest.mark.parametrize(
    ("line", "decorator", "language"),
    [
        ("import triton as t", "t.jit", "triton"),
        ("from .compat import triton", "triton.jit", "triton"),
        ("from ..runtime.jit import jit", "jit", "triton"),
        ("from triton.experimental.gluon import jit", "jit", "gluon"),
        ("import cutlass.cute as cute", "cute.kernel", "cute"),
        ("import cutlass.cute as cute", "cute.jit", "cute"),
    ],
)
def test_the_decorator_has_many_names(line, decorator, language):
    rows = found(f"{line}\n@{decorator}\ndef kernel(x): pass\n")
    assert [(row["kernel"], row["language"]) for row in rows.values()] == [("kernel", language)]


def test_inside_gluon_a_relative_import_is_gluons():
    source = "from .._runtime import jit\n@jit\ndef kernel(x): pass\n"
    assert found(source, "triton/experimental/gluon/language/x.py")["kernel"]["language"] == "gluon"


@pytest.mark.parametrize(
    "source",
    [
        "from numba import jit\n@jit\ndef kernel(x): pass\n",
        "import torch\n@torch.jit.script\ndef kernel(x): pass\n",
        "source = '''\n@triton.jit\ndef kernel(x): pass\n'''\n",
        "register(name='cpp', source='{{kernel.def_kernel(x)}}')\n@triton.jit",
        "@triton.jit\ndef broken(:\n",
    ],
)
def test_undecorated_functions_are_no_kernels(source):
    assert found(source) == {}


def test_a_function_that_compiled_code_calls_is_no_kernel():
    used = "import triton\n@triton.jit\ndef stores(p): tl.store(p, 0)\n"
    uses = "import triton\n@triton.jit\ndef launched(p): stores(p)\n"
    uses += "@triton.jit\ndef gives(x): return x\n@cute.jit\ndef host(x): pass\n"
    texts = [(PurePosixPath("library/a.py"), used), (PurePosixPath("library/b.py"), uses)]
    roles = {row["kernel"]: row["role"] for row in survey.kernels(texts)}
    function = dict.fromkeys(("stores", "gives", "host"), "function")
    assert roles == function | {"launched": "kernel"}


def test_methods_are_named_after_their_class():
    source = "class Softmax:\n    @cute.kernel\n    def kernel(self): pass\n"
    assert list(found(source)) == ["Softmax.kernel"]


def test_templates_are_kernels_too():
    text = '{{def_kernel("A", "B")}}\n    pass\n'
    jinja = found(text, "torch/_inductor/kernel/templates/triton_mm.py.jinja")
    assert jinja["triton_mm"]["language"] == "template"
    assert jinja["triton_mm"]["category"] == "matmul"
    written = found(f"x = TritonTemplate(name='conv', grid=g, source=r'''\n{text}''')\n")
    assert [(row["kernel"], row["lines"]) for row in written.values()] == [("conv", 3)]
    assert found("@triton.jit\ndef shared(x): pass\n", "templates/utilities.py.jinja") == {}


@pytest.mark.parametrize(
    ("path", "kernel", "category"),
    [
        ("flash_attn/flash_attn_triton.py", "_fwd_kernel", "attention"),
        ("liger_kernel/ops/rms_norm.py", "_rms_norm_forward_kernel", "norm"),
        ("liger_kernel/ops/fused_linear_cross_entropy.py", "element_mul_kernel", "loss"),
        ("liger_kernel/ops/swiglu.py", "_swiglu_forward_kernel", "activation"),
        ("triton/language/standard.py", "argmax", "search"),
        ("triton/language/random.py", "philox", "random"),
        ("torch/sparse/_triton_ops.py", "_scatter_mm2_kernel", "matmul"),
        ("liger_kernel/ops/softmax.py", "_softmax_single_block_forward_kernel", "softmax"),
        ("quack/rotary.py", "Rotary.kernel", "rotary"),
        ("kernels/vector.py", "_dot_partial_kernel", "vector"),
        ("triton/language/standard.py", "operand", "other"),
    ],
)
def test_categories(path, kernel, category):
    assert survey.category(PurePosixPath(path), kernel) == category


def test_kernels_among_tests_are_marked():
    source = "@triton.jit\ndef add_kernel(x): pass\n"
    assert found(source, "torch/testing/_internal/utils.py")["add_kernel"]["role"] == "test"


def test_libraries_are_those_of_the_baselines(tmp_path):
    folder = tmp_path / "baselines"
    folder.mkdir()
    (folder / "one.py").write_text('import absent\nLIBRARY = "some-library"\n')
    (folder / "two.py").write_text('LIBRARY = "some-library"\n')
    (folder / "_shared.py").write_text('LIBRARY = "hidden"\n')
    assert libraries.every(tmp_path) == ["some-library", "torch", "triton"]


def test_an_absent_library_has_no_rows():
    assert survey.survey("a-library-that-is-not-here") == []


def test_a_file_that_another_distribution_replaced_is_not_counted(tmp_path, monkeypatch):
    (tmp_path / "peer").mkdir()
    right = "@triton.jit\ndef kept(x): pass\n"
    (tmp_path / "peer" / "right.py").write_text(right)
    (tmp_path / "peer" / "other.py").write_text("@triton.jit\ndef replaced(x): pass\n")
    meta = tmp_path / "peer-1.0.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: peer\nVersion: 1.0\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(right.encode()).digest()).rstrip(b"=").decode()
    names = (f"peer/right.py,sha256={digest},9", f"peer/other.py,sha256={digest},9")
    (meta / "RECORD").write_text("\n".join((*names, "peer/gone.py,,")))
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = survey.survey("peer")
    assert [(row["kernel"], row["version"], row["source"]) for row in rows] == [
        ("kept", "1.0", "installed")
    ]


def write(path, *rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, survey.COLUMNS)
        writer.writeheader()
        writer.writerows(dict.fromkeys(survey.COLUMNS, "1") | row for row in rows)


def test_the_snapshot_stands_in_for_what_is_not_installed(tmp_path, monkeypatch, capsys):
    snapshot, out = tmp_path / "snapshot.csv", tmp_path / "survey.csv"
    old = {"source": "installed", "date": "2001-02-03", "kernel": "old"}
    write(snapshot, *({"library": name} | old for name in ("absent", "triton", "ours", "unnamed")))
    monkeypatch.setattr(libraries, "every", lambda root: ["absent", "triton"])
    monkeypatch.setattr("sys.argv", ["survey", "--out", str(out), "--snapshot", str(snapshot)])
    survey.main()
    rows = list(csv.DictReader(out.open()))
    assert {(row["library"], row["source"]) for row in rows} == {
        ("absent", "snapshot"),
        ("triton", "installed"),
        ("ours", "here"),
    }
    assert [row["date"] for row in rows if row["kernel"] == "old"] == ["2001-02-03"]
    assert "of 3 libraries" in capsys.readouterr().out


def test_a_snapshot_of_other_columns_is_refused(tmp_path):
    path = tmp_path / "snapshot.csv"
    path.write_text("library,version\n")
    with pytest.raises(UserError, match="its columns are not those of survey"):
        survey.read_snapshot(path)


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        (b"liger,1,a.p", "row 3 has not the fields"),
        (b"liger,1,a.py,k,kernel,triton,1,False,norm,installed,2026-1", "is truncated"),
        (b"liger,1,a.py,k,kernel,triton,1,False,norm,installed,2026-11-21,x\n", "row 3 has not"),
        (b"\xff\n", "not UTF-8 text"),
        (b'"liger\n', "not CSV"),
    ],
)
def test_a_broken_snapshot_is_refused(tmp_path, end, problem):
    path = tmp_path / "snapshot.csv"
    row = b"quack,1,a.py,k,kernel,triton,1,False,norm,installed,2026-11-21\n"
    path.write_bytes(",".join(survey.COLUMNS).encode() + b"\n" + row)
    assert list(survey.read_snapshot(path)) == ["quack"]
    path.write_bytes(path.read_bytes() + end)
    with pytest.raises(UserError, match=problem):
        survey.read_snapshot(path)


def test_the_committed_snapshot_holds_every_library_of_the_baselines():
    held = survey.read_snapshot(ROOT / "results" / "recorded" / "survey.csv")
    assert set(libraries.every(ROOT)) <= set(held)


def test_the_command_writes_the_kernels_of_this_environment(tmp_path):
    out = tmp_path / "survey.csv"
    # Fails if a library is imported: torch, by a name that hides it, is none.
    script = "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"
    script += f"sys.argv[1:] = ['--out', {str(out)!r}]\n"
    script += "from harness import survey; survey.main()"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(out.open()))
    assert tuple(rows[0]) == survey.COLUMNS
    names = {row["kernel"] for row in rows if row["library"] == "triton"}
    assert {"softmax", "cdiv", "randn"} <= names
    assert all(int(row["lines"]) > 0 and row["date"] for row in rows)
    assert {row["source"] for row in rows} == {"here", "installed"}


def test_a_library_in_no_package_stands_as_published(tmp_path, monkeypatch):
    out = tmp_path / "survey.csv"
    monkeypatch.setattr(libraries, "every", lambda root: [])
    held = ROOT / "results" / "recorded" / "published.csv"
    monkeypatch.setattr("sys.argv", ["survey", "--out", str(out), "--published", str(held)])
    survey.main()
    rows = [row for row in csv.DictReader(out.open()) if row["library"] == "kernl"]
    assert {row["source"] for row in rows} == {"published"}
    assert {row["lines"] for row in rows} == {""}
    kinds = {row["category"] for row in rows if row["role"] == "kernel"}
    assert {"attention", "matmul", "norm"} <= kinds
    for row in rows:
        assert row["category"] == survey.category(PurePosixPath(row["file"]), row["kernel"])

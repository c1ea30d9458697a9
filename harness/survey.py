"""The kernels that the libraries ship, beside ours: `python -m harness.survey --out F`.

They are read from the syntax trees of the installed files; no library is imported. A kernel is a
function that Triton, Gluon or CuTe compiles, or a text template from which a compiler makes one.
Rows of a library that is not installed come from a snapshot, the output of an earlier survey, and
say so.
"""

import argparse
import ast
import base64
import csv
import datetime
import hashlib
import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

from harness.cli import run
from harness.files import whole_file
from harness.project import libraries
from harness.project.implementations import OURS
from harness.results import csv_rows
from harness.results.columns import SURVEY

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = SURVEY.header
# Decorators that compile, by their usual name, whatever module it was imported from.
USUAL = {
    "triton.jit": "triton",
    "gluon.jit": "gluon",
    "cute.kernel": "cute",
    "cute.jit": "cute",
}
# Inductor's templates, in Triton and in CuTe; those for C++ call a method of this name.
TEMPLATE = re.compile(r"\{\{ *def_kernel\(")
WORTH_PARSING = re.compile(r"@(\w+\.)?jit\b|import .*\bjit\b|@cute\.kernel|\{\{ *def_kernel\(")
TESTS = re.compile(r"(^|/)(testing|tests?)/")
WORDS = (
    "add|mul|dot|copy|scale|sum|prod|cum(sum|prod)|reduce|max|maximum|min|minimum|vector"
    "|elementwise|embedding|index_select_cat"
)
# The first rule that matches "folder/file/kernel" decides.
CATEGORIES = (
    ("attention", r"attention|attn|flash|flex|fmha|_splitk|_bwd_(dkdv|dq|preprocess)|kv_?cache"),
    ("loss", r"cross_entropy|loss|kl_?div|jsd|tvd|grpo|dpo"),
    ("norm", r"norm|layer_?scale|welford|rms_"),
    ("softmax", r"softmax|sparsemax"),
    ("rotary", r"rotary|rope"),
    ("activation", r"gelu|geglu|swiglu|silu|relu|sigmoid|tanh|dyt|activation"),
    ("random", r"(^|[_/])rand|philox|dropout"),
    ("search", r"search|sort|top_?k|arg(min|max)|bucketize|bitonic|compare_and_swap"),
    ("matmul", r"matmul|gemm|_mm|mm_|/mm|addmm|bmm|linear|tl_dot|bsr|sampled|split_k|_proj"),
    ("convolution", r"conv"),
    ("vector", rf"(^|[_/])({WORDS})([_/.]|$)"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.survey", description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="CSV, a row for each kernel")
    parser.add_argument("--snapshot", help="earlier outputs, for what is absent", nargs="*")
    parser.add_argument("--published", help="the same of what is in no package", nargs="*")
    arguments = parser.parse_args()
    earlier = {}
    for path in arguments.snapshot or ():
        earlier |= read_snapshot(Path(path))
    rows = ours(ROOT)
    for library in libraries.every(ROOT):
        rows += survey(library) or earlier.get(library, [])
    for path in arguments.published or ():
        held = read_snapshot(Path(path)).values()
        rows += [row | {"source": "published"} for library in held for row in library]
    with (
        whole_file(arguments.out) as temporary,
        open(temporary, "w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"survey: {len(rows)} kernels of {len({row['library'] for row in rows})} libraries")


def read_snapshot(path: Path) -> dict[str, list[dict]]:
    """The rows of an earlier survey by library, marked as such."""
    found = {}
    for row in csv_rows.read(path, SURVEY, f"make it again, --out {path}"):
        found.setdefault(row["library"], []).append(row | {"source": "snapshot"})
    return found


def ours(root: Path) -> list[dict[str, object]]:
    """The kernels of this project."""
    found = ((path.relative_to(root), path) for path in sorted(root.glob("kernels/**/*.py")))
    texts = ((name, path.read_text(encoding="utf-8")) for name, path in found)
    return _rows({"library": OURS, "version": "", "source": "here"}, texts)


def survey(library: str) -> list[dict[str, object]]:
    """The kernels of one distribution by file and line; none where it is not installed."""
    try:
        distribution = importlib.metadata.distribution(library)
    except importlib.metadata.PackageNotFoundError:
        return []
    paths = (path for path in sorted(distribution.files or []) if path.suffix in (".py", ".jinja"))
    texts = ((path, _source(path)) for path in paths)
    identity = {"library": library, "version": distribution.version, "source": "installed"}
    return _rows(identity, texts)


def _rows(identity: dict, texts: Iterable[tuple[PurePath, str]]) -> list[dict[str, object]]:
    same = identity | {"date": datetime.date.today().isoformat()}
    return [same | row for row in kernels(texts)]


def kernels(texts: Iterable[tuple[PurePath, str]]) -> Iterator[dict[str, object]]:
    """The kernels of a library, whose files are given by path and text, in the order of its lines.

    The role is "kernel", "function" or "test". A "function" is called by compiled code: it returns
    a value, is called so in the library, or is declared as one in CuTe. A "test" lies in a folder
    of tests.
    """
    found = [each for path, text in texts for each in _found(path, text)]
    called = {name for each in found for name in each.calls}
    for each in found:
        role = "function" if each.helper or each.name.rpartition(".")[2] in called else "kernel"
        yield {
            "file": each.path.as_posix(),
            "kernel": each.name,
            "role": "test" if TESTS.search(each.path.as_posix()) else role,
            "language": each.language,
            "lines": each.lines,
            "autotuned": each.autotuned,
            "category": category(each.path, each.name),
        }


class Found(NamedTuple):
    """A compiled function or a template; `calls` are the names that its body calls."""

    path: PurePath
    name: str
    language: str
    lines: int
    helper: bool = False
    autotuned: bool = False
    calls: frozenset[str] = frozenset()


def _found(path: PurePath, text: str) -> Iterator[Found]:
    if not WORTH_PARSING.search(text):
        return
    if path.suffix == ".jinja":
        if TEMPLATE.search(text):
            yield Found(path, path.name.split(".")[0], "template", text.count("\n"))
        return
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    names = _jit_names(tree, path)
    for name, node in _named(tree):
        if isinstance(node, ast.Call):
            if template := _template(node):
                yield Found(path, name, "template", template.count("\n"))
            continue
        decorators = [_dotted(decorator) for decorator in node.decorator_list]
        if language := next((names[each] for each in decorators if each in names), None):
            lines = node.end_lineno - node.lineno + 1
            helper = _returns(node) or "cute.jit" in decorators
            tuned = any(each.endswith("autotune") for each in decorators)
            calls = {_dotted(each) for each in ast.walk(node) if isinstance(each, ast.Call)}
            yield Found(path, name, language, lines, helper, tuned, frozenset(calls))


def category(path: PurePath, kernel: str) -> str:
    """Return the use of a kernel by the names of its folder, file and function, or "other"."""
    text = "/".join((*path.parts[-2:-1], path.name.split(".")[0], kernel)).lower()
    return next((name for name, rule in CATEGORIES if re.search(rule, text)), "other")


def _source(path: importlib.metadata.PackagePath) -> str:
    """The text of an installed file; "" where it is gone or another distribution replaced it."""
    try:
        data = Path(path.locate()).read_bytes()
        if path.hash and path.hash.mode == "sha256":
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if digest != path.hash.value:
                return ""
        return data.decode()
    except (OSError, UnicodeDecodeError):
        return ""


def _jit_names(tree: ast.Module, path: PurePath) -> dict[str, str]:
    """How this file may spell a decorator, and its language: the usual ways, and its imports."""
    names = dict(USUAL)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases = (alias for alias in node.names if alias.asname)
            names |= {f"{a.asname}.jit": "triton" for a in aliases if a.name.startswith("triton")}
        elif isinstance(node, ast.ImportFrom):
            # Inside Triton itself the import is relative: `from ..runtime.jit import jit`.
            module = node.module or ""
            if node.level or module.split(".")[0] == "triton":
                place = path.parts if node.level else module.split(".")
                language = "gluon" if "gluon" in place else "triton"
                names |= {a.asname or a.name: language for a in node.names if a.name == "jit"}
    return names


def _named(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.AST]]:
    """The functions and calls of a tree: a method after its class, a call by its `name=`."""
    for node in ast.iter_child_nodes(tree):
        inner = within
        if isinstance(node, ast.FunctionDef):
            yield within + node.name, node
        elif isinstance(node, ast.Call):
            given = {word.arg: word.value for word in node.keywords}
            if isinstance(given.get("name"), ast.Constant):
                yield str(given["name"].value), node
        elif isinstance(node, ast.ClassDef):
            inner = f"{within}{node.name}."
        yield from _named(node, inner)


def _template(call: ast.Call) -> str:
    """The text of a template that is written out in the call that registers it."""
    texts = (
        node.value
        for word in call.keywords
        if word.arg == "source"
        for node in ast.walk(word.value)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return next(filter(TEMPLATE.search, texts), "")


def _returns(function: ast.FunctionDef) -> bool:
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Return))
    return any(node.value is not None for node in nodes)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    run(main)

"""The Triton kernels that the installed libraries ship: `python -m harness.survey --out F`.

Read from the syntax trees of the installed files; no library is imported. Kernels that a compiler
generates from text templates are not counted.
"""

import argparse
import ast
import csv
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path, PurePath

from harness.command import run, whole_file

BASELINES = Path(__file__).resolve().parents[1] / "baselines"
COLUMNS = ("library", "version", "file", "kernel", "lines", "autotuned", "category")
# What is compiled by name, whatever module the name was imported from.
USUAL = {"triton.jit", "gluon.jit"}
TESTS = re.compile(r"(^|/)(testing|tests?)/")
# The first rule that matches "folder/file/kernel" decides.
CATEGORIES = (
    ("attention", r"attention|attn|flash|fmha|splitk_reduce|_bwd_(dkdv|dq|preprocess)|kv_?cache"),
    ("loss", r"cross_entropy|loss|kl_?div|jsd|tvd|grpo|dpo"),
    ("norm", r"norm|layer_?scale|welford"),
    ("activation", r"gelu|geglu|swiglu|silu|relu|sigmoid|softmax|tanh|sparsemax|dyt|activation"),
    ("random", r"(^|[_/])rand|philox|dropout"),
    ("search", r"search|sort|top_?k|arg(min|max)|bucketize|bitonic|compare_and_swap"),
    ("matmul", r"matmul|gemm|_mm|mm_|addmm|bmm|linear|_dot|scaled_mm|bsr|sampled"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="harness.survey", description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="CSV, a row for each kernel")
    arguments = parser.parse_args()
    rows = [row for library in libraries(BASELINES) for row in survey(library)]
    with (
        whole_file(arguments.out) as temporary,
        open(temporary, "w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"survey: {len(rows)} kernels in {len({row['library'] for row in rows})} libraries")


def libraries(folder: Path) -> list[str]:
    """Triton, and the distributions that the baselines in `folder` name as their LIBRARY."""
    names = {"triton"}
    for path in folder.glob("[!_]*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(_bare(t) == "LIBRARY" for t in node.targets):
                names.add(ast.literal_eval(node.value))
    return sorted(names)


def survey(library: str) -> list[dict[str, object]]:
    """The kernels of one distribution by file and line; none where it is not installed."""
    try:
        distribution = importlib.metadata.distribution(library)
    except importlib.metadata.PackageNotFoundError:
        return []
    identity = {"library": library, "version": distribution.version}
    return [
        identity | {"file": path.as_posix()} | row
        for path in sorted(distribution.files or [])
        if path.suffix == ".py"
        for row in kernels(_source(path), path)
    ]


def kernels(source: str, path: PurePath) -> Iterator[dict[str, object]]:
    """The functions of a file that Triton or Gluon compiles."""
    if "jit" not in source:
        return
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    names = _jit_names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = {_dotted(decorator) for decorator in node.decorator_list}
        if decorators & names:
            yield {
                "kernel": node.name,
                "lines": node.end_lineno - node.lineno + 1,
                "autotuned": any(name.endswith("autotune") for name in decorators),
                "category": category(path, node.name),
            }


def category(path: PurePath, kernel: str) -> str:
    """What a kernel is for, by the name of its folder, its file and itself; "other" if unknown,
    "test" where the library's own tests use it.
    """
    if TESTS.search(path.as_posix()):
        return "test"
    text = "/".join((*path.parts[-2:-1], path.stem, kernel)).lower()
    return next((name for name, rule in CATEGORIES if re.search(rule, text)), "other")


def _source(path: importlib.metadata.PackagePath) -> str:
    try:
        return Path(path.locate()).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _jit_names(tree: ast.Module) -> set[str]:
    """How this file may spell the decorator: the usual ways, and those its imports give."""
    names = set(USUAL)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases = (alias for alias in node.names if alias.asname)
            names |= {f"{a.asname}.jit" for a in aliases if a.name.startswith("triton")}
        elif isinstance(node, ast.ImportFrom):
            # Inside Triton itself the import is relative: `from ..runtime.jit import jit`.
            triton = node.level or (node.module or "").split(".")[0] == "triton"
            names |= {a.asname or a.name for a in node.names if triton and a.name == "jit"}
    return names


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return _bare(node)


def _bare(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    run(main)

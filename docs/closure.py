"""Counts the files and lines behind softmax: `python docs/closure.py [ROOT]` prints the rows.

The first count is the import closure of a kernel file: all files of this project that it needs to
run. The second count is the part that a reader of one kernel needs: the kernel itself, and the
device functions and constants that it calls or names, directly or not. Comments, docstrings
and the breaking of lines do not count.
"""

import argparse
import ast
import copy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from harness.project import source_tree  # noqa: E402

FAMILY, KERNEL = "kernels/softmax.py", "_forward_row_kernel"


def code_lines(tree: ast.AST) -> int:
    """Return how many lines a syntax tree has, written anew without docstrings and comments."""
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]
    return sum(bool(line.strip()) for line in ast.unparse(tree).splitlines())


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def closure(root: Path, path: str) -> tuple[int, int]:
    """Return the numbers of files and of their lines of code that a file needs, with its own."""
    files = source_tree.sources(root, path)
    return len(files), sum(code_lines(source_tree.parsed(root, file)) for file in files)


def definitions(root: Path, path: str) -> dict[str, tuple[str, ast.stmt]]:
    """Return where each name of a file is defined: (file, statement), imports included."""
    found: dict[str, tuple[str, ast.stmt]] = {}
    folder = Path(path).parent
    for node in source_tree.parsed(root, path).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = path, node
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found |= dict.fromkeys(names, (path, node))
        elif isinstance(node, ast.ImportFrom):
            above = folder.parts[: len(folder.parts) - node.level + 1] if node.level else ()
            file = Path(*above, *(node.module or "").split(".")).with_suffix(".py")
            if (root / file).is_file():
                there = definitions(root, file.as_posix())
                for alias in node.names:
                    if alias.name in there:
                        found[alias.asname or alias.name] = there[alias.name]
    return found


def device_code(root: Path, path: str, kernel: str) -> tuple[int, int, int]:
    """Return the numbers of files, of definitions and of their lines of code behind a kernel.

    The kernel itself is one of the definitions.
    """
    seen: dict[tuple[str, int], ast.stmt] = {}
    queue = [definitions(root, path)[kernel]]
    while queue:
        file, statement = queue.pop()
        if (file, statement.lineno) in seen:
            continue
        seen[file, statement.lineno] = statement
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        queue += [place for name, place in definitions(root, file).items() if name in names]
    files = {file for file, _ in seen}
    return len(files), len(seen), sum(code_lines(statement) for statement in seen.values())


def rows(root: Path) -> dict[str, tuple[int, ...]]:
    """Return the counts of a tree by the row of the table in docs/kernel-guide.md."""
    return {"run": closure(root, FAMILY), "read": device_code(root, FAMILY, KERNEL)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a tree of this project")
    given = parser.parse_args().root
    if not (given / FAMILY).is_file():
        parser.error(f"{given / FAMILY}: no such file; name the folder of a tree")
    for name, counts in rows(given).items():
        print(name, *counts)

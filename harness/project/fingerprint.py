"""Code and data in one word: SHA-256 digests that tell whether a result is of what is here now."""

import ast
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from harness.project import libraries
from harness.project.implementations import is_ours
from harness.project.source_tree import NETWORK, rests_on, sources, stack_files

# The command that takes the times.
CLOCK = "harness/measure/__main__.py"
# Statements whose first expression may be a docstring.
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def of(value: object) -> str:
    """Return the SHA-256 of a value that JSON can represent."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def contents(files: Mapping[str, Path]) -> dict[str, str]:
    """Those of files by name; what is no file is left out."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
        if path.is_file()
    }


# One process judges many implementations, which share most of their files.
@functools.lru_cache(maxsize=1000)
def syntax(text: str) -> str:
    """SHA-256 of what Python source does: its syntax tree without comments, docstrings and layout.

    The same for every version of Python that parses it alike. Raises SyntaxError.
    """
    words = []
    _spell(ast.parse(text), words)
    return hashlib.sha256("".join(f"{len(word)}:{word}" for word in words).encode()).hexdigest()


def _spell(node: object, words: list[str]) -> None:
    """Append a syntax tree in prefix order, so that different trees give different words.

    `ast.dump` and `ast.unparse` differ between versions of Python. Fields that are empty are left
    out because newer versions add some.
    """
    if isinstance(node, ast.AST):
        words.append(type(node).__name__)
        for name, value in ast.iter_fields(node):
            if name == "body" and isinstance(node, DOCUMENTED):
                value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
            if value is not None and value != [] and name not in ("kind", "ctx"):
                words.append(name)
                _spell(value, words)
        words.append("end")
    elif isinstance(node, list):
        words.append(f"list {len(node)}")
        for item in node:
            _spell(item, words)
    else:
        words.append(repr(node))


def harness(root: Path) -> str:
    """The digest of the code that holds the clock: of `harness.measure`, its workers, and what they
    import from this project."""
    return of(_trees(root, CLOCK))


def implementation(root: Path, family: str, impl: str) -> str:
    """The digest of all that a verification of `impl` holds for; "" where it has no file.

    These are the syntax of its file, of that which declares the op, and of what the two import from
    this project, and the version of its library. So a comment or a docstring moves no digest, and
    an operator does. family: the stem of the file that declares the op.
    """
    if (root / f"{NETWORK}/{family}.py").is_file():
        stack = "ours" if is_ours(impl) else impl
        files = [f"{NETWORK}/{family}.py", "network/calls.py", *stack_files(root, stack)]
        if not all((root / name).is_file() for name in files):
            return ""
        version = libraries.version(rests_on(root, stack))
        return of({"files": _trees(root, *files), "version": version})
    ours = is_ours(impl)
    path = f"kernels/{family}.py" if ours else f"baselines/{impl}.py"
    problem = f"ops/{family}.py"
    if not ((root / path).is_file() and (root / problem).is_file()):
        return ""
    library = "triton" if ours else libraries.distribution(root / path)
    return of({"files": _trees(root, path, problem), "version": libraries.version(library)})


def _trees(root: Path, *starts: str) -> dict[str, str]:
    """The syntax of these files and of what they import from this project, by name."""
    names = sources(root, *starts)
    return {name: syntax((root / name).read_text(encoding="utf-8")) for name in names}

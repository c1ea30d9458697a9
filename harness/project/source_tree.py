"""Declarations and imports in the files of this project, from names and syntax trees."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.cli import UserError

PACKAGES = ("harness", "network", "ops", "kernels", "baselines")
# The room of the ops of a whole network, whose implementations are the stacks.
NETWORK, STACKS = "network/ops", "network/stacks"
# The word that AUTOTUNES has in place of the names of all ops.
EVERY = "all"
# Between a stack and the one part of ours in it, as `network.stack` has it.
WITH = "_with_"
# The stacks into which ours is put one part at a time, and the parts that are not put in, beside
# those that join others. The ops drop nothing, and a step decodes nothing.
ONE_PART_OVER = ("torch_eager", "torch_compile")
NOT_APART = ("dropout", "decode_attention")
# With the name of what is in it, as workers are named.
MODULE_NAME = re.compile(rf"((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?::\w[\w.]*)?")


def stems(root: Path, folder: str) -> list[str]:
    """The public files of a folder, by stem, sorted; `_*.py` is shared code."""
    found = (path.stem for path in (root / folder).glob("*.py"))
    return sorted(stem for stem in found if not stem.startswith("_"))


def ops(root: Path) -> dict[str, str]:
    """The family (stem of its file) of each op: the literal first argument of each `Op(…)` call."""
    family = {}
    for stem in stems(root, "ops"):
        for name in declared_ops(root, f"ops/{stem}.py"):
            if name in family:
                other = family[name]
                raise UserError(f"ops/{stem}.py: op {name!r} is also in {other}.py; rename one")
            family[name] = stem
    return family


def network_ops(root: Path) -> dict[str, str]:
    """The family of each op of a whole network, as `ops`; none where there is no such room."""
    return {
        name: stem
        for stem in stems(root, NETWORK)
        for name in declared_ops(root, f"{NETWORK}/{stem}.py")
    }


def every_op(root: Path) -> dict[str, str]:
    """The family of each op, of kernels and of a whole network."""
    return ops(root) | network_ops(root)


def stacks(root: Path, op: str) -> list[str]:
    """The stacks that implement an op of a whole network, sorted.

    These are the files of the stacks. An op that `PART_BY_PART` names also has PyTorch's two stacks
    with one part of ours: `torch_eager_with_rms_norm`.
    """
    found = stems(root, STACKS)
    path = f"{NETWORK}/{network_ops(root)[op]}.py"
    if op in literal(root, path, "PART_BY_PART", ()):
        ours = f"{STACKS}/ours.py"
        left_out = {*NOT_APART, *literal(root, "network/parts.py", "JOINED", {})}
        parts = [name for name in keys(root, ours, "PARTS") if name not in left_out]
        parts += ["optimizer"] * ("OPTIMIZER" in public_names(root, ours))
        bases = [base for base in ONE_PART_OVER if base in found]
        found += [f"{base}{WITH}{part}" for base in bases for part in parts]
    return sorted(found)


def stack_files(root: Path, impl: str) -> list[str]:
    """The files that a stack comes from: its own, and those whose parts it takes."""
    base, _, part = impl.partition(WITH)
    names = {"torch_eager", base} | ({"ours"} if part else set())
    return sorted(f"{STACKS}/{name}.py" for name in names)


def is_stack(root: Path, impl: str) -> bool:
    """Whether an implementation is a stack of a network, whole or with one part of ours."""
    return all((root / path).is_file() for path in stack_files(root, impl))


def rests_on(root: Path, impl: str) -> str:
    """The distribution behind an implementation: that of a baseline's file, else Triton."""
    path = f"baselines/{impl}.py"
    return library(root, path) if (root / path).is_file() else "triton"


def keys(root: Path, path: str, name: str) -> list[str]:
    """The keys of the dictionary that a file assigns to a name; UserError if there is none."""
    for node in parsed(root, path).body:
        named = isinstance(node, ast.Assign) and [_name(target) for target in node.targets]
        if named == [name] and isinstance(node.value, ast.Dict):
            return [ast.literal_eval(key) for key in node.value.keys]
    raise UserError(f"{path}: has no {name} = {{...}} at module level; write one")


def declared_ops(root: Path, path: str) -> list[str]:
    """The names of the ops that a file declares; UserError where one cannot be read.

    It is a literal, since nothing is imported, and a name of Python, since a function has it.
    Inside functions nothing is looked for.
    """
    return list(_declared(parsed(root, path), path))


def public_names(root: Path, path: str) -> set[str]:
    """The names that a file defines at module level, by `def` or by assignment."""
    names = set()
    for node in parsed(root, path).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def sources(root: Path, *starts: str) -> list[str]:
    """The files of this project that the given files import, themselves included, sorted.

    Late imports count, and so do strings that are module names: commands start their workers by
    name. The caller adds modules that are named at run time only, such as a kernel or a baseline.
    """
    found, queue = set(), list(starts)
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.add(path)
        if (root / path).is_file():  # Snakemake names a missing one better
            queue += _imported(root, path)
    return sorted(found)


def parsed(root: Path, path: str) -> ast.Module:
    """The syntax tree of a file, which other callers share; UserError where it has none."""
    try:
        return _tree((root / path).read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise UserError(f"{path}:{error.lineno}: {error.msg}; mend the file") from None


def self_tuned(root: Path, op: str, impls: Iterable[str]) -> list[str]:
    """The baselines of an op whose library tunes itself for it, as their files declare.

    AUTOTUNES holds the names of ops, or is EVERY of a library that does so for all that it offers.
    """
    if op in network_ops(root):
        return []
    found = []
    for impl in impls:
        path = f"baselines/{impl}.py"
        named = literal(root, path, "AUTOTUNES", ()) if (root / path).is_file() else ()
        if isinstance(named, str) and named != EVERY:
            raise UserError(f"{path}: AUTOTUNES is {named!r}; make it a tuple, or {EVERY!r}")
        if named == EVERY or op in named:
            found.append(impl)
    return found


def library(root: Path, path: str) -> str:
    """The distribution that a baseline file names; UserError where it names none."""
    found = literal(root, path, "LIBRARY", None)
    if isinstance(found, str) and found:
        return found
    raise UserError(f"{path}: has no LIBRARY; name the distribution in it")


def literal(root: Path, path: str, name: str, default: object) -> object:
    """The value that a file assigns to a name at module level; `default` where it does not.

    UserError where it is no literal: nothing is imported to compute it.
    """
    for node in parsed(root, path).body:
        if isinstance(node, ast.Assign) and [_name(target) for target in node.targets] == [name]:
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                where = f"{path}:{node.lineno}"
                raise UserError(f"{where}: {name} is computed; write it as a literal") from None
    return default


# By the text, so that an edited file is parsed again: a Snakefile asks for the same few files in
# hundreds of jobs. Trees of all files would slow down the collection of garbage.
@functools.lru_cache(maxsize=100)
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


# A tree that is asked for again is the same object as before.
@functools.lru_cache(maxsize=100)
def _declared(tree: ast.Module, path: str) -> tuple[str, ...]:
    """The names of the ops that a tree declares; path: as messages name its file."""
    names, queue = [], [tree]
    while queue:
        node = queue.pop()
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            queue += ast.iter_child_nodes(node)
        if isinstance(node, ast.Call) and _name(node.func) == "Op":
            named = [word.value for word in node.keywords if word.arg == "name"]
            first = (node.args or named or [None])[0]
            value = first.value if isinstance(first, ast.Constant) else None
            if not (isinstance(value, str) and value.isidentifier()):
                what = ast.unparse(first) if first is not None else "nothing"
                raise UserError(
                    f"{path}:{node.lineno}: the name of an Op is {what}; write a literal that is"
                    " the name of the function, such as 'softmax'"
                )
            names.append(value)
    return tuple(names)


@functools.cache
def _imported(root: Path, path: str) -> frozenset[str]:
    """The files of this project that a file names."""
    modules = set(_named_modules(parsed(root, path), Path(path).parent.parts))
    named = {file for module in modules for file in _files(root, path, module)}
    return frozenset(file for file in named if (root / file).is_file())


def _named_modules(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """package: the names of the folders in which the file lies, for its relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            within = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*within, *filter(None, [node.module])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (named[1] for named in [MODULE_NAME.fullmatch(node.value)] if named)


def _files(root: Path, importer: str, module: str) -> Iterator[str]:
    """Yield the paths of a module: packages start at the root, scripts see the folders above."""
    name = module.replace(".", "/") + ".py"
    if module.split(".")[0] in PACKAGES:
        yield name
    elif importer.split("/")[0] not in PACKAGES:
        folders = (parent.as_posix() for parent in Path(importer).parents)
        yield from (f"{folder}/{name}" for folder in folders if folder != ".")


def _name(node: ast.expr) -> str:
    return getattr(node, "id", None) or getattr(node, "attr", "")

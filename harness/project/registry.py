"""Ops, kernels and baselines by name, imported late: an absent library is a status, no crash."""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import pkgutil
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import baselines
import ops
from harness import status
from harness.cli import UserError
from harness.project import source_tree
from harness.project.implementations import OURS, is_ours
from harness.project.prepared import prepared
from harness.project.source_tree import NETWORK
from ops._spec import Op

FOLDER = Path(baselines.__path__[0])
ROOT = FOLDER.parent


class Unavailable(Exception):
    """The library behind a baseline cannot be imported here; the message says why.

    It may be absent, miss a driver or a GPU, or not fit another library in its version.
    """


def op(name: str) -> tuple[Op, str]:
    """The declaration of an op and its family, the stem of its file.

    The syntax trees tell which file that is, so a broken file costs no op of another. Raises
    UserError where no file declares the op, or where its file cannot be imported.
    """
    families = _families(tuple(ops.__path__))
    if name in families:
        return _declared(name, families[name]), families[name]
    networks = _network_ops()
    if name in networks:
        return _declared(name, networks[name], NETWORK), networks[name]
    # One that a function makes has its name in no tree.
    for module in pkgutil.iter_modules(ops.__path__):
        with contextlib.suppress(UserError):
            return _declared(name, module.name), module.name
    raise UserError(f"ops/: no file declares an op {name!r}; write Op({name!r}, …) in one")


def of_network(name: str) -> bool:
    """Whether an op is one of a whole network, whose implementations are the stacks."""
    return name in _network_ops()


def _declared(name: str, stem: str, room: str = "ops") -> Op:
    for value in vars(_imported(room, stem)).values() if not stem.startswith("_") else ():
        if isinstance(value, Op) and value.name == name:
            return value
    raise UserError(f"{room}/{stem}.py: has no Op({name!r}, …) at module level; write one")


def declared(stem: str) -> list[Op]:
    """The ops of a family in the order of their file; UserError as `op` raises it."""
    return [value for value in vars(_imported("ops", stem)).values() if isinstance(value, Op)]


def kernel(stem: str) -> ModuleType:
    """The module of a kernel file; UserError names the file and why it cannot be imported."""
    return _imported("kernels", stem)


def _imported(folder: str, stem: str) -> ModuleType:
    name = f"{folder.replace('/', '.')}.{stem}"
    if importlib.util.find_spec(name) is None:
        other = "ops" if folder == "kernels" else "kernels"
        raise UserError(f"{folder}/{stem}.py: no such file; write it beside {other}/{stem}.py")
    try:
        return importlib.import_module(name)
    except Exception as error:
        traceback.print_exception(error)
        raise UserError(
            f"{folder}/{stem}.py: {status.reason(error)}; mend the file, or leave its ops out of"
            " `ops`"
        ) from error


@functools.cache
def _network_ops() -> dict[str, str]:
    return source_tree.network_ops(ROOT)


@functools.cache
def _families(folders: tuple[str, ...]) -> dict[str, str]:
    """The stem of the file of each op that the files of these folders declare."""
    found = {}
    for folder in map(Path, folders):
        for stem in source_tree.stems(folder.parent, folder.name):
            # The jobs of a file that has no syntax tree report it.
            with contextlib.suppress(UserError):
                names = source_tree.declared_ops(folder.parent, f"{folder.name}/{stem}.py")
                found |= dict.fromkeys(names, stem)
    return found


def function(op_name: str, impl: str) -> Callable:
    """The callable of `impl` ("ours", "ours_twin" or a baseline's stem) for one op.

    Raises Unavailable where the baseline's library is absent, UserError where it lacks the op.
    """
    if of_network(op_name):
        return _stack(op_name, impl)
    declared_op, family = op(op_name)
    module = kernel(family) if is_ours(impl) else _baseline(impl)
    try:
        found = getattr(module, op_name)
    except AttributeError:
        raise UserError(f"{module.__name__}: has no function {op_name}; write it") from None
    if declared_op.prepared:
        found = prepared(found, _makers(module, declared_op))
    return declared_op.adapted(found) if declared_op.adapted else found


def _makers(module: ModuleType, declared_op: Op) -> dict[str, Callable]:
    """The makers of an implementation, by input, for the inputs that the op lets it prepare.

    A file with such an op has `PREPARES`: by op the name of a function for each of these inputs. It
    takes the arguments of a call and returns what the function is called with in place of the
    input. UserError where it prepares an input that the op does not name.
    """
    named = getattr(module, "PREPARES", {}).get(declared_op.name, {})
    if others := sorted(set(named) - set(declared_op.prepared)):
        raise UserError(
            f"{module.__name__}: prepares {others} of {declared_op.name}, whose op lets it prepare"
            f" {list(declared_op.prepared)}"
        )
    return {name: getattr(module, maker) for name, maker in named.items()}


def _stack(op_name: str, impl: str) -> Callable:
    stack = OURS if is_ours(impl) else impl
    if stack not in source_tree.stacks(ROOT, op_name):
        there = source_tree.stacks(ROOT, op_name)
        raise UserError(f"network/stacks/{stack}.py: no such file; stacks are {there}")
    # Late and by name: the parents import this module, and no torch.

    return importlib.import_module("network.calls").function(op_name, stack)


def accumulates(op_name: str, impl: str) -> str | None:
    """The dtype in which an implementation sums, as its file declares it; None where it does not.

    A file that knows has `ACCUMULATES`, a dtype for each op by name, with its source beside it.
    """
    if of_network(op_name):
        return None
    stem = f"kernels.{op(op_name)[1]}" if is_ours(impl) else f"baselines.{impl}"
    return getattr(importlib.import_module(stem), "ACCUMULATES", {}).get(op_name)


def in_place(op_name: str, impl: str) -> bool:
    """Whether calls may write over what they are given, as a baseline's file declares it.

    A file with such an op has `IN_PLACE`, their names; of ours that is an op whose users ask for
    nothing else, such as an optimizer.
    """
    if of_network(op_name):
        module = _imported(NETWORK, op(op_name)[1])
        return op_name in getattr(module, "IN_PLACE", ())
    module = kernel(op(op_name)[1]) if is_ours(impl) else _baseline(impl)
    return op_name in getattr(module, "IN_PLACE", ())


def wide(op_name: str, impl: str) -> tuple[str, ...]:
    """The tensors that a library has in float32, as a baseline's file declares them.

    A file with such an op has `WIDE`, by op the names of inputs, or "out" for what it returns. Ours
    has every tensor in the dtype of the call.
    """
    if is_ours(impl) or of_network(op_name):
        return ()
    return tuple(getattr(_baseline(impl), "WIDE", {}).get(op_name, ()))


def settings(op_name: str, impl: str) -> str:
    """How a baseline departs from the library's default call of an op; "" where it does not.

    A file with such an op has `SETTINGS`, a sentence for each by name.
    """
    if of_network(op_name):
        return "a part that a stack has not is PyTorch's"
    if is_ours(impl):
        return ""
    return getattr(_baseline(impl), "SETTINGS", {}).get(op_name, "")


def version(impl: str) -> str:
    """The version of the library behind an implementation; "" where it is absent."""
    if is_ours(impl) or (impl not in stems() and source_tree.is_stack(ROOT, impl)):
        return _distribution("triton")
    try:
        return _distribution(_baseline(impl).LIBRARY)
    except Unavailable:
        return ""


def stems() -> list[str]:
    """The stems of all baseline files, sorted."""
    found = (module.name for module in pkgutil.iter_modules(baselines.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def _baseline(impl: str):
    if impl not in stems():
        raise UserError(f"baselines/{impl}.py: no such file; implementations are {stems()}")
    try:
        return importlib.import_module(f"baselines.{impl}")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        if isinstance(error, SyntaxError):
            place = error.filename or place
        # A fault of our own file is no absence; a missing name that it imports may be one.
        if Path(place).parent == FOLDER and not isinstance(error, ImportError):
            raise
        raise Unavailable(f"{type(error).__name__}: {error}".splitlines()[0]) from error


def _distribution(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""

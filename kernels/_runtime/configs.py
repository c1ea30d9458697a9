"""The tile configurations of a kernel as data, and the one in force: tuned if it was, else chosen.

A table holds what `python -m harness.tune` measured on one kind of GPU: for each kernel and key,
the arguments of its rule, the fastest configuration. The format is that of docs/formats.md.
TILEWRIGHT_TUNED, read at the first look-up, says which tables bind: those of kernels/tuned/ where
it is unset, none where it is empty, else those of the folder that it names.
"""

import ast
import functools
import hashlib
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton

MODE = "TILEWRIGHT_TUNED"
COMMITTED = Path(__file__).parents[1] / "tuned"
# A size may be part of a key; a program that asks for ever new ones starts anew.
MOST_KNOWN = 4096
REMEDY = f"tune again (python -m harness.tune), remove the file, or set {MODE}= for no table"

Config = Mapping[str, int]
Table = Mapping[tuple[tuple[str, object], ...], Config]


@dataclass(frozen=True, eq=False)
class Configs:
    """The tile configurations of one `@triton.jit` kernel, as data.

    - kernel: the jit function.
    - candidates: meta-parameters, num_warps and num_stages of each configuration the tuner times.
    - choose: (**key) -> one configuration; the rule if no table names the key.
    - suits: (candidate, **key) -> whether it is worth a try for the key (default: all).
    - family: the kernel file whose part of a table binds; "": the file that defines the kernel.
    """

    kernel: object
    candidates: tuple[Config, ...]
    choose: Callable[..., Config]
    suits: Callable[..., bool] = lambda candidate, **key: True
    family: str = ""
    # A traced graph cannot look into a kernel, so its names stand beside it.
    module: str = field(init=False)
    name: str = field(init=False)
    _tables: dict = field(default_factory=dict, init=False, repr=False, compare=False)
    _known: dict = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self):
        object.__setattr__(self, "module", self.kernel.fn.__module__)
        object.__setattr__(self, "name", self.kernel.fn.__name__)
        if not self.family:
            object.__setattr__(self, "family", self.module.rpartition(".")[2])

    def pick(self, device: torch.device, **key: int | str | bool) -> Config:
        """The configuration to launch with on `device`: that of a table, else `choose(**key)`.

        The key is all that the best tile depends on; without a GPU no table binds. ValueError
        where a table cannot be read.
        """
        if torch.compiler.is_dynamo_compiling():
            for known, config in _traced(self.module, self.name, self.family, device):
                if _equal(known, tuple(key.items())):
                    return dict(config)
            return self.choose(**key)
        # The rule is part of it, since a build may put another in its place.
        known = self._known.get((device, self.choose, *key, *key.values()))
        return self._decided(device, key) if known is None else known

    def _decided(self, device: torch.device, key: Mapping[str, object]) -> Config:
        """Return the configuration of a key at its first use; `pick` remembers it."""
        table = self._tables.get(device)
        if table is None:
            table = self._tables[device] = table_of(self.kernel, self.family, device)
        config = table.get(tuple(key.items()))
        if config is None:
            config = self.choose(**key)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[device, self.choose, *key, *key.values()] = config
        return config


def _equal(one: tuple, other: tuple) -> bool:
    """Whether two keys are equal, in words that a graph of torch 2.11 can trace.

    A size that is symbolic equals none: asking for its value would make it a constant in the midst
    of an autograd function, which may not lose its inputs.
    """
    # Late: it brings SymPy along, which nobody needs who does not compile.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if len(one) != len(other):
        return False
    for (name, value), (other_name, other_value) in zip(one, other, strict=True):
        if name != other_name or not statically_known_true(value == other_value):
            return False
    return True


@torch.compiler.assume_constant_result
def _traced(module: str, name: str, family: str, device: torch.device) -> list:
    """The table of a kernel as a constant of the traced graph, which can read no file.

    Configurations are pairs: torch 2.11 finds no words for a guard on a dict that is a constant.
    """
    table = table_of(vars(sys.modules[module])[name], family, device)
    return [(key, tuple(config.items())) for key, config in table.items()]


def table_of(kernel: object, family: str, device: torch.device) -> Table:
    """The tuned configurations of a kernel on a device, by key; empty where none are in force.

    family: the part of the table to look in.
    """
    chosen = folder()
    if device.type != "cuda" or chosen is None:
        return {}
    record = families(chosen, torch.cuda.get_device_name(device)).get(family, {})
    tuned = record.get("kernels", {}).get(kernel.fn.__name__)
    if tuned is None or stale(kernel, tuned, record):
        return {}
    return {tuple(entry["key"].items()): entry["config"] for entry in tuned["keys"]}


def folder() -> Path | None:
    """The folder whose tables bind; None where none do."""
    named = os.environ.get(MODE)
    if named is None:
        return COMMITTED if COMMITTED.is_dir() else None
    if named and not Path(named).is_dir():
        raise ValueError(f"{MODE}={named}: no such folder; {REMEDY}")
    return Path(named) if named else None


@functools.cache
def families(folder: Path, device: str) -> dict[str, dict]:
    """The records of all tables for a GPU, by family; ValueError where a table is broken."""
    found, origin = {}, {}
    for path in sorted(folder.glob("*.json")):
        table = read(path)
        if table["device"] == device:
            if double := min(found.keys() & table["families"].keys(), default=None):
                raise ValueError(f"{path}: {double} is also in {origin[double]}; remove one")
            found |= table["families"]
            origin |= dict.fromkeys(table["families"], path)
    return found


def read(path: Path) -> dict:
    """The table in a file; ValueError says what is wrong with it and what to do."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        str(table["device"])
        for record in table["families"].values():
            str(record["triton"])
            for tuned in record["kernels"].values():
                str(tuned["source_sha256"])
                for entry in tuned["keys"]:
                    values = list(entry["config"].values())
                    if not (entry["key"].items() and values) or {*map(type, values)} != {int}:
                        raise ValueError(f"entry {entry['key']} holds no configuration")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"{path}: no table of tuned configurations ({why}); {REMEDY}") from None
    return table


def stale(kernel: object, tuned: Mapping, record: Mapping) -> str:
    """Why the entries of a kernel bind no longer; "" where they do.

    tuned: the kernel's part of a table. record: that of its family.
    """
    if record["triton"] != triton.__version__:
        return f"tuned with triton {record['triton']}, this is {triton.__version__}"
    if tuned["source_sha256"] != source_sha256(kernel):
        return "the kernel has changed since"
    return ""


def source_sha256(kernel: object) -> str:
    """The digest of a kernel and of all it calls or names, without comments, docstrings and layout.

    Unlike the compiler's key it does not depend on where in its file the kernel stands.
    """
    parts, queue, seen = [], [kernel], set()
    while queue:
        fn = queue.pop().fn
        if fn in seen:
            continue
        seen.add(fn)
        parts.append(_code(inspect.getsource(fn)))
        for name in sorted(set(fn.__code__.co_names)):
            value = fn.__globals__.get(name)
            if hasattr(value, "fn") and hasattr(value, "arg_names"):
                queue.append(value)
            elif isinstance(value, triton.language.constexpr):
                parts.append(f"{name} = {value.value!r}")
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def _code(source: str) -> str:
    """The source of a function as its syntax tree has it, without its docstring."""
    tree = ast.parse(textwrap.dedent(source))
    function = tree.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        function.body = function.body[1:] or [ast.Pass()]
    return ast.unparse(tree)

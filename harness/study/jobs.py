"""Which jobs exist, from file names and syntax trees: imports neither torch, Triton nor a baseline.

A file's presence is its registration. Everything here is read by the Snakefile while it parses.
"""

import functools
import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from harness import cli
from harness.cli import UserError
from harness.files import read_json
from harness.machine.nvml import gpus
from harness.project import libraries
from harness.project.implementations import OURS
from harness.project.source_tree import (
    NETWORK,
    PACKAGES,
    STACKS,
    library,
    network_ops,
    ops,
    public_names,
    rests_on,
    self_tuned,
    sources,
    stack_files,
    stacks,
    stems,
)
from harness.results import columns, measured, parts
from harness.study import config as settings
from harness.study import placement
from harness.study.gpus import Gpus

# Every error is judged by that of PyTorch in the same dtype.
REFERENCE_IMPL = "baselines/torch_eager.py"
TABLES = "kernels/tuned"
# Processes that verify side by side an implementation that compiles each of its cells.
COMPILERS = 8
# Share of the cells that were not reached in time, from which on a library is verified by several.
SLOW = 0.05
# As `harness.results.manifest` has it, which reads more than file names.
MANIFEST = "manifest.json"
# How each mode of `tuning` tells the kernels, which know nothing of a configuration.
TUNED = {
    "replay": "unset TILEWRIGHT_TUNED",
    "heuristic": "export TILEWRIGHT_TUNED=",
    "tune": "export TILEWRIGHT_TUNED={run}/tuned",
}


def committed_tables(root: Path) -> dict[str, str]:
    """By family the digest of what the tables of kernels/tuned/ hold for it."""
    records: dict[str, list] = {}
    for path in sorted((root / TABLES).glob("*.json")):
        place = path.relative_to(root)
        table = read_json(path, f"tune again, or remove {place}").get("families")
        if not isinstance(table, dict):
            raise UserError(f"{place}: holds no families; tune again, or remove it")
        for family, record in table.items():
            records.setdefault(family, []).append([path.name, record])
    return {
        family: hashlib.sha256(json.dumps(found).encode()).hexdigest()
        for family, found in records.items()
    }


def family_files(family: str) -> tuple[str, str]:
    """The files of a family: its problem and our kernels."""
    return f"ops/{family}.py", f"kernels/{family}.py"


def tree(root: Path) -> str:
    """The commit, with a "+" where measured code differs from it; "" without history."""

    def git(*words: str) -> str:
        call = ["git", "-C", str(root), *words]
        return subprocess.run(call, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", *PACKAGES)
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TILEWRIGHT_COMMIT", "")


def check_kernels(root: Path, families: Mapping[str, str]) -> None:
    """Raises UserError where an op has no function of ours; families: the stem of its file by op.

    An op whose kernel is still to be written can be verified and timed by the commands alone.
    """
    names = {
        stem: public_names(root, f"kernels/{stem}.py")
        for stem in set(families.values())
        if (root / f"kernels/{stem}.py").is_file()
    }
    for op, stem in families.items():
        if op not in names.get(stem, ()):
            lack = f"has no function {op}" if stem in names else "no such file"
            raise UserError(
                f"kernels/{stem}.py: {lack}; write {op}, which ops/{stem}.py declares, or leave it"
                " out of `ops`"
            )


@functools.cache
def _unreached(report: Path) -> float:
    """Return the share of the cells that a report of verification did not reach in time.

    Those of another part do not count.
    """
    try:
        cells = read_json(report, "").get("cells", [])
    except UserError:
        # The command that shows a broken one says so.
        return 0.0
    late = [each for each in cells if each["status"] == "unreached"]
    elsewhere = sum(each.get("reason") == parts.ELSEWHERE for each in late)
    return (len(late) - elsewhere) / max(1, len(cells) - elsewhere)


@dataclass(frozen=True)
class Study:
    """The jobs of one configuration; methods that take `wildcards` are Snakemake input functions.

    - ops: the family of each selected op.
    - rivals: the baselines that offer it, sorted; of an op of a whole network the stacks besides
      ours.
    - digests: of the committed tables of tuned configurations, by family.
    - networks: the selected ops of a whole network.
    - boards: the UUIDs of the GPUs over which the jobs that time are spread.
    - spread: whether they are spread here. If not, a batch system gives each job its GPU.
    """

    root: Path
    config: Mapping
    ops: Mapping[str, str]
    rivals: Mapping[str, list[str]]
    digests: Mapping[str, str]
    networks: frozenset[str] = frozenset()
    boards: tuple[str, ...] = ()
    spread: bool = True

    @classmethod
    def load(cls, root: Path, config: Mapping, files: list[str], spread: bool = True) -> "Study":
        """The study that `config`, merged from `files`, describes; UserError where it is wrong.

        spread: whether its jobs are spread over the GPUs that are visible here. They are not if the
        amount of GPUs is given by hand or by a profile: a batch system hands out its own.
        """
        settings.check(root, config, files)
        for folder in ("ops", "kernels", "baselines"):
            for stem in stems(root, folder):
                if not stem.isidentifier():
                    raise UserError(
                        f"{folder}/{stem}.py: no module can have this name; rename the file to"
                        " letters, digits and underscores"
                    )
        try:
            cli.part(config["part"] or "1/1")
        except ValueError:
            problem = f"{config['part']!r} is no part; the first number is at most the second"
            settings.refuse(["part"], problem, config, files)
        networks = network_ops(root)
        known = ops(root) | networks
        stacked = {op: [name for name in stacks(root, op) if name != OURS] for op in networks}
        every_rival = {*stems(root, "baselines"), *(name for op in stacked for name in stacked[op])}
        chosen = settings.select("ops", sorted(known), config, files)
        libraries = settings.select("baselines", sorted(every_rival), config, files)
        for stem in (stem for stem in libraries if stem in stems(root, "baselines")):
            library(root, f"baselines/{stem}.py")
        settings.exist(["timing", "energy_impls"], [OURS, *sorted(every_rival)], config, files)
        offers = {
            stem: public_names(root, f"baselines/{stem}.py")
            for stem in stems(root, "baselines")
            if stem in libraries
        }
        rivals = {
            op: [name for name in stacked[op] if name in libraries]
            if op in networks
            else [stem for stem in sorted(offers) if op in offers[stem]]
            for op in chosen
        }
        families = {op: known[op] for op in chosen}
        check_kernels(root, {op: stem for op, stem in families.items() if op not in networks})
        whole = frozenset(networks).intersection(chosen)
        study = cls(root, config, families, rivals, committed_tables(root), whole)
        measured.refuse_deletion(root / study.run, sys.argv)
        if study.measures and not config["narrower"]:
            study.check_wider()
        if not study.measures:
            why = "no GPU is visible: a replay" if config["measure"] == "auto" else "a replay"
            measured.refuse(root / study.run, why)
            study.check_recorded(files)
        if study.measures or config["tuning"] == "tune":
            boards = placement.usable() if spread else [gpu.uuid for gpu in gpus()][:1]
            return replace(study, boards=tuple(boards), spread=spread)
        return study

    def check_wider(self) -> None:
        """Raises UserError where the run holds measured times that this configuration leaves out,
        be it that a baseline is no longer installed.
        """
        names = {impl for impls in self.rivals.values() for impl in impls}
        about = {impl: rests_on(self.root, impl) for impl in names}
        here = {OURS, *(name for name in names if libraries.version(about[name]))}
        raw = self.root / self.run / "raw"
        csvs = [(raw / f"{op}.csv", here.intersection(self.impls(op))) for op in self.ops]
        wanted = {key: self.config[key] for key in ("dtypes", "passes", "max_cases")}
        wanted["part"] = cli.part(self.config["part"]) if self.config["part"] else None
        measured.refuse_narrower(csvs, **wanted)

    def check_recorded(self, files: list[str]) -> None:
        """Raises UserError where `recorded` names no recorded run."""
        folder = self.config["recorded"]
        if not (self.root / folder / MANIFEST).is_file():
            runs = self.root.glob(f"results/recorded/*/{MANIFEST}")
            known = ", ".join(sorted(f"results/recorded/{path.parent.name}" for path in runs))
            problem = f"{folder!r} is no recorded run, it has no {MANIFEST}; there are: {known}"
            settings.refuse(["recorded"], problem, self.config, files)

    @property
    def run(self) -> str:
        return f"results/{self.config['run']}"

    @property
    def families(self) -> list[str]:
        """The kernel files; a network has none of its own."""
        return sorted({stem for op, stem in self.ops.items() if op not in self.networks})

    @property
    def measures(self) -> bool:
        """Whether this run times its ops; otherwise it replays the recorded run."""
        wish = self.config["measure"]
        return bool(gpus()) if wish == "auto" else wish

    @property
    def shown(self) -> list[str]:
        """The ops whose times this run has: of a replay those that the recorded run holds.

        If it holds none, and for ops that are asked for by name, each replay says what it misses.
        """
        if self.measures or self.config["ops"] != "all":
            return list(self.ops)
        return [op for op in self.ops if self._recorded(f"raw/{op}.csv")] or list(self.ops)

    @property
    def untimed(self) -> list[str]:
        """The ops that are built and verified, and of which this run has no times."""
        return [op for op in self.ops if op not in self.shown]

    @property
    def summaries(self) -> list[str]:
        """The names of the CSV files that `harness.summarize` writes."""
        return [table.name for table in columns.SUMMARIES]

    @property
    def config_sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()

    @property
    def tree(self) -> str:
        return tree(self.root)

    @property
    def limit(self) -> str:
        """The option that keeps the first cases of each sweep; empty where all are wanted."""
        cases = self.config["max_cases"]
        return "" if cases is None else f"--max-cases {cases}"

    def judged(self, wildcards) -> str:
        """The options that choose the cases that are verified; of ours all are, in each part."""
        ours = wildcards.impl == OURS
        return self.limit if ours or not self.measures else self.shapes

    @property
    def shapes(self) -> str:
        """The options that choose the shapes that are timed; empty where all are."""
        part = self.config["part"]
        return f"{self.limit} --part {part}".strip() if part else self.limit

    @property
    def draws(self) -> list[str]:
        """The file of the drawn shapes, which all jobs of a run share that measures; else none."""
        return [f"{self.run}/drawn.json"] if self.measures else []

    @property
    def drawing(self) -> str:
        """The option that names it; empty where nothing is timed."""
        return " ".join(f"--drawn {path}" for path in self.draws)

    def library(self, wildcards) -> str:
        """The library that an implementation rests on, with the version that is here."""
        if wildcards.impl == OURS:
            return f"triton {libraries.version('triton')}"
        name = rests_on(self.root, wildcards.impl)
        return f"{name} {libraries.version(name)}"

    def verify_budget(self, wildcards) -> str:
        """The options that limit the verification of a baseline; empty for ours and no limit."""
        limits = self.config["verify"] if wildcards.impl != OURS else {}
        given = {key: value for key, value in limits.items() if value is not None}
        return " ".join(f"--{key.replace('_', '-')} {value:g}" for key, value in given.items())

    def verify_threads(self, wildcards) -> int:
        """Return how many processes verify an implementation: several, if each compiles for a GPU.

        So do ours, a library that tunes itself, and one that has run out of time for an op of the
        recorded run. Whole networks do not fit in memory side by side.
        """
        op, impl = wildcards.op, wildcards.impl
        if not self.measures or op in self.networks:
            return 1
        recorded = (self.root / self.config["recorded"] / "verify").glob(f"*/{impl}.json")
        slow = any(_unreached(path) >= SLOW for path in recorded)
        compiles = impl == OURS or slow or self_tuned(self.root, op, [impl])
        return COMPILERS if compiles else 1

    def verify_priority(self, wildcards) -> float:
        """Which verifications begin first: of the recorded run the share that ran out of time.

        The longest, begun last, would run alone at the end.
        """
        path = self.root / self.config["recorded"] / "verify" / wildcards.op
        return _unreached(path / f"{wildcards.impl}.json")

    @property
    def timing(self) -> str:
        """The keys of `timing` as options of `harness.measure`."""
        timing = self.config["timing"]
        timing = timing | {"energy_impls": ",".join(timing["energy_impls"])}
        options = ((f"--{key.replace('_', '-')}", str(value)) for key, value in timing.items())
        return shlex.join(word for option in options for word in option)

    def impls(self, op: str) -> list[str]:
        return [OURS, *self.rivals[op]]

    def impls_of(self, wildcards) -> list[str]:
        return self.impls(wildcards.op)

    def stems(self, folder: str) -> list[str]:
        return stems(self.root, folder)

    @property
    def drawn(self) -> list[str]:
        """The families that have a figure of their own."""
        families = {*self.stems("ops"), *self.stems(NETWORK)}
        return [name for name in self.stems("paper/figures") if name in families]

    def sources(self, *starts: str) -> list[str]:
        return sources(self.root, *starts)

    def glob(self, *patterns: str) -> list[str]:
        """Files of the tree that match, relative to its root; names that start with `_` do not."""
        found = (path for pattern in patterns for path in self.root.glob(pattern))
        return sorted(
            path.relative_to(self.root).as_posix() for path in found if path.name[0] not in "._"
        )

    def build_inputs(self, wildcards) -> list[str]:
        return self.sources("harness/build/__main__.py", *family_files(wildcards.family))

    def verify_inputs(self, wildcards) -> list[str]:
        op, impl = wildcards.op, wildcards.impl
        if op in self.networks:
            judges = ("harness/verify/__main__.py", f"{NETWORK}/{self.ops[op]}.py")
            stack = self.sources(*judges, "network/calls.py", *stack_files(self.root, impl))
            tables = self.tables(wildcards) if self._has_our_kernels(wildcards) else []
            return [*stack, *tables, *self.draws]
        judges = ("harness/verify/__main__.py", f"ops/{self.ops[op]}.py", REFERENCE_IMPL)
        if impl == OURS:
            ours = self.sources(*judges, *family_files(self.ops[op]))
            built = f"{self.run}/build/{self.ops[op]}.json"
            return [*ours, built, *self.tables(wildcards), *self.draws]
        tuned = [path for path in self.autotuned(wildcards) if Path(path).stem == impl]
        # Choices made alone, so that what is timed is what was judged.
        rival = self.sources(*judges, f"baselines/{impl}.py")
        return [*rival, *self.draws, *(tuned if self.measures else ())]

    def compile_inputs(self, wildcards) -> list[str]:
        op, impl = wildcards.op, wildcards.impl
        return [
            *self.sources(
                "harness/measure/autotune.py", f"ops/{self.ops[op]}.py", f"baselines/{impl}.py"
            ),
            *self.draws,
        ]

    def autotune_inputs(self, wildcards) -> list[str]:
        compiled = f"{self.run}/autotune/{wildcards.op}/{wildcards.impl}.compiled.json"
        return [*self.compile_inputs(wildcards), compiled]

    def sanitize_inputs(self, wildcards) -> list[str]:
        kernels = self.sources("harness/sanitize/__main__.py", *family_files(wildcards.family))
        return [*kernels, *self.tables(wildcards)]

    @property
    def variables(self) -> str:
        """The shell commands that set, for all jobs, what is read from the environment."""
        tuned = TUNED[self.config["tuning"]].format(run=self.run)
        config = f"export TILEWRIGHT_CONFIG_SHA256={self.config_sha256}"
        # The commands run with the Python that runs Snakemake, be its environment activated or not.
        path = f"PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"
        commands = f"unset PYTHONDONTWRITEBYTECODE; {config}; {tuned}; {path}; "
        # Snakemake formats what it is given.
        return commands.replace("{", "{{").replace("}", "}}")

    def tune_inputs(self, wildcards) -> list[str]:
        return self.sources("harness/tune/__main__.py", *family_files(wildcards.family))

    def tables(self, wildcards) -> list[str]:
        """The table that this run tunes for the op or the kernel file; none in other modes."""
        if self.config["tuning"] != "tune":
            return []
        if wildcards.get("op") in self.networks:
            return self.tables_of_all
        family = wildcards.get("family") or self.ops[wildcards.op]
        return [f"{self.run}/tuned/{family}.json"]

    @property
    def tables_in_force(self) -> list[str]:
        """The files of the tables that bind in this study: committed, of the run, or none."""
        if self.config["tuning"] == "tune":
            return [f"{self.run}/tuned/{family}.json" for family in self.families]
        replays = self.config["tuning"] == "replay"
        paths = sorted((self.root / TABLES).glob("*.json")) if replays else []
        return [str(path.relative_to(self.root)) for path in paths]

    def tuning(self, wildcards) -> str:
        """The inputs that change if other configurations of ours bind: the mode and the files."""
        if not self._has_our_kernels(wildcards):
            return ""
        mode = self.config["tuning"]
        return f"{mode} {self.committed_tables(wildcards)}" if mode == "replay" else mode

    def _has_our_kernels(self, wildcards) -> bool:
        """Whether the implementation, or one of those timed together, is of our kernels."""
        impl = wildcards.get("impl", OURS)
        stacked = wildcards.get("op") in self.networks and rests_on(self.root, impl) == "triton"
        return impl == OURS or stacked

    def committed_tables(self, wildcards) -> str:
        """The digest of what the committed tables hold for the op or the kernel file."""
        if wildcards.get("op") in self.networks or wildcards.get("subject"):
            return " ".join(self.digests[family] for family in sorted(self.digests))
        return self.digests.get(wildcards.get("family") or self.ops[wildcards.op], "")

    def reports(self, op: str) -> list[str]:
        """The reports that this run makes of an op: of all whose times it takes.

        If the times are replayed, only ours and the reference implementation are verified. The code
        that the rivals run on a GPU was verified there, and its reports are recorded. Without one
        they run other code or none.
        """
        impls = self.impls(op)
        if not self.measures:
            impls = [impl for impl in impls if impl in (OURS, Path(REFERENCE_IMPL).stem)]
        return [f"{self.run}/verify/{op}/{impl}.json" for impl in impls]

    @property
    def dissections(self) -> list[str]:
        """The questions that this run asks of a training step, if it times a network, and of the
        forms of a kernel, if it times its op."""
        wanted = self.config["dissect"] if self.measures else {}
        about = {name: self._laddered(name) for name, options in wanted.items() if options}
        return [
            name
            for name, op in about.items()
            if (bool(self.networks) if op is None else op in self.ops)
        ]

    def _laddered(self, subject: str) -> str | None:
        """Return the op whose forms a question is about, None if it is about a step."""
        about = {table.name for table in columns.LADDERS}
        return subject.removesuffix(columns.LADDER) if subject in about else None

    def dissected(self, wildcards) -> list[str]:
        """The files that answer them, each of this run or else as recorded."""
        asked = [f"{self.run}/dissect/{subject}.csv" for subject in self.dissections]
        others = [s for s in self.config["dissect"] if s not in self.dissections]
        return asked + self._recorded(*(f"dissect/{subject}.csv" for subject in others))

    def dissect_inputs(self, wildcards) -> list[str]:
        command = "harness/measure/dissect/__main__.py"
        if op := self._laddered(wildcards.subject):
            # Only a form that is right is timed, and the shipped one judges the others.
            judged = f"{self.run}/verify/{op}/{OURS}.json"
            code = self.sources(command, *family_files(self.ops[op]))
            return [*code, judged, *self.tables_of_all]
        code = self.sources(command, "network/calls.py", *self.glob(f"{STACKS}/*.py"))
        return [*code, *self.tables_of_all]

    def dissect_options(self, wildcards) -> str:
        """The options of the command for a question."""
        return shlex.join(self.config["dissect"][wildcards.subject].split())

    @property
    def tables_of_all(self) -> list[str]:
        """The tables that this run tunes, of all kernel files; none in other modes."""
        tunes = self.config["tuning"] == "tune"
        return [f"{self.run}/tuned/{family}.json" for family in self.families if tunes]

    def failed(self, wildcards) -> str:
        """When the measurement of an op last failed, "" if never.

        Snakemake puts the former times back after a failure, and takes them for the new ones.
        """
        path = self.root / self.failure(wildcards)
        return path.read_text(encoding="utf-8").strip() if path.is_file() else ""

    def failure(self, wildcards) -> str:
        """The file that holds the time of the last failure."""
        return f"{self.run}/raw/.{wildcards.op}.failed"

    def gate(self, wildcards) -> list[str]:
        """No time without a verification report: those of all implementations of the op."""
        return self.reports(wildcards.op)

    def choices(self, wildcards) -> str:
        """The option that names what a library that tunes itself has chosen; empty for others."""
        impls = [impl for impl in [wildcards.impl] if self.measures and impl != OURS]
        tuned = self_tuned(self.root, wildcards.op, impls)
        return "".join(f"--choices {self.run}/autotune/{wildcards.op}/{impl}" for impl in tuned)

    @functools.cached_property
    def gpus(self) -> Gpus:
        """Which GPU and how many cores each job has."""
        # One that this study does not have would keep an op away from an idle GPU.
        tuned = self.families if self.config["tuning"] == "tune" else []
        return Gpus(
            self.boards,
            self.spread,
            folder=self.root / self.run,
            recorded=self.root / self.config["recorded"],
            tuned_by={op: self._tuning_impls(op) for op in self.ops},
            others={"family": tuned, "subject": self.dissections},
        )

    def autotuned(self, wildcards) -> list[str]:
        """The reports of the libraries that tune themselves for the op."""
        op = wildcards.op
        return [f"{self.run}/autotune/{op}/{impl}.json" for impl in self._tuning_impls(op)]

    def _tuning_impls(self, op: str) -> list[str]:
        """The baselines that tune themselves for an op."""
        return self_tuned(self.root, op, self.rivals[op])

    def recorded_inputs(self, wildcards) -> list[str]:
        return self._recorded(f"raw/{wildcards.op}.csv", f"raw/{wildcards.op}.json")

    def recorded_reports(self, wildcards) -> list[str]:
        return self._recorded(
            *(f"verify/{op}/{impl}.json" for op in self.ops for impl in self.impls(op))
        )

    def sanitized(self, wildcards) -> list[str]:
        """The sanitizer's reports on the kernel files, of this run and as recorded."""
        paths = (f"sanitize/{family}.json" for family in self.families)
        here = (f"{self.run}/{path}" for path in paths)
        return [p for p in here if (self.root / p).is_file()] + self._recorded(
            *(f"sanitize/{family}.json" for family in self.families)
        )

    def _recorded(self, *names: str) -> list[str]:
        """Files of the recorded run, as far as they exist: the commands name a missing one."""
        paths = (f"{self.config['recorded']}/{name}" for name in names)
        return [path for path in paths if (self.root / path).is_file()]

    def script_inputs(self, folder: str) -> Callable:
        """The input function of the scripts `paper/<folder>/<name>.py`."""
        return lambda wildcards: self.sources(f"paper/{folder}/{wildcards.name}.py")

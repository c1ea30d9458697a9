"""Change the code in small ways and run the tests on it: `make mutants`.

mutmut (pyproject.toml, tool.mutmut) makes a mutant of each operator, number, name and argument, and
runs the tests that reach it. A mutant that no test kills must have its reason in
tests/equivalent_mutants.toml; docs/mutants.md shows all that live. Exit code 1: one has no reason,
or a reason has no mutant. `make mutants ONLY='harness.stats.*'` runs those mutants; the others
count with what their last run found.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REASONS = ROOT / "tests/equivalent_mutants.toml"
PAGE = ROOT / "docs/mutants.md"
# The functions to mutate: all of these files, and of ops/ only what says an op's cost.
NAMES = ("harness.*", "paper.*", "ops.*_cost*")
# mutmut's exit codes of a test run. A failing test kills the mutant. So does a test that never
# ends, or that the system ends for an access beyond its memory.
KILLED, UNRUN = {1, 3, 24, 36, 152, 255, -11, -24}, {None}
HEAD = """# Mutants

Written by `make mutants`: how many small changes of the code the tests notice. A mutant lives if
all tests pass with it. The reason why each of these may live is kept in
`tests/equivalent_mutants.toml`; the command fails if one has none."""


def main() -> int:
    mutmut = [sys.executable, "-m", "mutmut"]
    subprocess.run([*mutmut, "run", *(sys.argv[1:] or NAMES)], cwd=ROOT, check=True)
    counts, alive = results(ROOT / "mutants")
    changes = {name: change(shown(mutmut, name)) for name in alive}
    reasons = {(e["function"], e["change"].strip()): e["reason"] for e in declared()}
    found = {name: (function(name), text) for name, text in changes.items()}
    PAGE.write_text(page(counts, found, reasons), encoding="utf-8")
    unknown = {name: key for name, key in found.items() if key not in reasons}
    for name, (_, text) in unknown.items():
        print(f"{name} lives:\n{text}\n")
    idle = reasons.keys() - set(found.values())
    for place, text in sorted(idle):
        print(f"{REASONS.name}: no mutant of {place} that lives is\n{text}\n")
    print(f"{sum(counts.values())} mutants, {len(alive)} alive, {len(unknown)} without a reason")
    return int(bool(unknown or idle))


def results(folder: Path) -> tuple[Counter, list[str]]:
    """Return how many mutants of each module were run, and the names of those that live."""
    counts, alive = Counter(), []
    for path in sorted(folder.rglob("*.meta")):
        for name, code in json.loads(path.read_text())["exit_code_by_key"].items():
            if code not in UNRUN:
                counts[module(name)] += 1
                alive += [] if code in KILLED else [name]
    return counts, alive


def shown(mutmut: list[str], name: str) -> str:
    call = [*mutmut, "show", name]
    return subprocess.run(call, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def change(diff: str) -> str:
    """Return the lines that a mutant removes and inserts, without their indentation."""
    lines = [line for line in diff.splitlines() if re.match(r"[-+](?![-+])", line)]
    return "\n".join(f"{line[0]} {line[1:].strip()}" for line in lines)


def declared() -> list[dict[str, str]]:
    return tomllib.loads(REASONS.read_text(encoding="utf-8")).get("mutant", [])


def module(name: str) -> str:
    """Return the module of a mutant: `harness.stats` for `harness.stats.xǁEǁf__mutmut_3`."""
    return name.rpartition(".")[0]


def function(name: str) -> str:
    """Return the function of a mutant: `harness.stats.Estimate.plus`."""
    inner = name.rpartition(".")[2].rpartition("__mutmut_")[0]
    plain = inner.removeprefix("x").removeprefix("ǁ").removeprefix("_")
    if "ǁ" in inner:
        plain = inner.removeprefix("xǁ").replace("ǁ", ".")
    return f"{module(name)}.{plain}"


def page(counts: Counter, alive: dict[str, tuple[str, str]], reasons: dict) -> str:
    living = Counter(module(name) for name in alive)
    lines = ["| module | mutants | killed | alive |", "| --- | ---: | ---: | ---: |"]
    for name, count in sorted(counts.items()):
        lines.append(f"| `{name}` | {count} | {count - living[name]} | {living[name]} |")
    total, left = sum(counts.values()), sum(living.values())
    lines.append(f"| all | {total} | {total - left} | {left} |")
    parts = [HEAD, "\n".join(lines), "## Alive" if alive else "None lives."]
    for place, text in sorted(set(alive.values())):
        reason = reasons.get((place, text), "no reason is given")
        parts.append(f"`{place}`: {reason}\n\n```diff\n{text}\n```")
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())

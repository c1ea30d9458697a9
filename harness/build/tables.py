"""The committed tables of tuned configurations: what is in them, and what is amiss there."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from harness.build import recorder
from harness.cli import UserError
from kernels._runtime import configs as _tuned


def tunable(stem: str) -> dict[str, _tuned.Configs]:
    """Return the `Configs` of a kernel file and of the folder beside it, by the kernel's name."""
    return {each.name: each for each in recorder.declared(stem)}


def sources(stem: str) -> dict[str, str]:
    """The digest of each kernel of a file that can be tuned, by name: that of its table entries."""
    return {name: _tuned.source_sha256(each.kernel) for name, each in tunable(stem).items()}


def findings(stem: str, folder: Path = _tuned.COMMITTED) -> list[dict[str, str]]:
    """Return faults of the tables for a kernel file: `table`, `kernel`, `state`, `reason`.

    state: "stale" entries bind no longer, "incomplete" ones bind but have not met every candidate.
    Raises UserError for a broken table.
    """
    return [
        {"table": path.name, "kernel": kernel, "state": state, "reason": reason}
        for path, kernel, tuned, family in _records(stem, folder)
        for state, reason in _amiss(stem, kernel, tuned, family)
    ]


def chosen(stem: str, folder: Path = _tuned.COMMITTED) -> dict[str, list[_tuned.Config]]:
    """By kernel the configurations that entries in force choose, each once.

    Raises UserError for a broken table.
    """
    found, bound = {}, tunable(stem)
    for _, kernel, tuned, family in _records(stem, folder):
        if kernel in bound and not _tuned.stale(bound[kernel].kernel, tuned, family):
            configs = found.setdefault(kernel, [])
            for entry in tuned["keys"]:
                if entry["config"] not in configs:
                    configs.append(entry["config"])
    return found


def _records(stem: str, folder: Path) -> Iterator[tuple[Path, str, Mapping, Mapping]]:
    """The parts of the tables for a kernel file: the table, the kernel, its part, its family's."""
    for path in sorted(folder.glob("*.json")):
        family = read(path)["families"].get(stem, {"kernels": {}})
        for kernel, tuned in family["kernels"].items():
            yield path, kernel, tuned, family


def _amiss(stem: str, kernel: str, tuned: Mapping, family: Mapping) -> Iterator[tuple[str, str]]:
    pass

    bound = tunable(stem)
    if kernel not in bound:
        yield "stale", "the file has no such kernel"
    elif why := _tuned.stale(bound[kernel].kernel, tuned, family):
        yield "stale", why
    else:
        configs, untried = bound[kernel], set()
        for entry in tuned["keys"]:
            suited = {text(c) for c in configs.candidates if configs.suits(c, **entry["key"])}
            untried |= suited - entry["timed"].keys() - entry["failed"].keys()
        if untried:
            yield "incomplete", f"never tried: {', '.join(sorted(untried))}"


def read(path: Path) -> dict:
    try:
        return _tuned.read(path)
    except ValueError as error:
        raise UserError(str(error)) from None


def text(config: Mapping[str, object]) -> str:
    """A configuration or a key on one line: "BLOCK_M=128 num_warps=8"."""
    return " ".join(f"{name}={value}" for name, value in config.items())

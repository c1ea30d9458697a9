"""List the files of a recorded run: `manifest.json`, the SHA-256 digest of each of its files.

A file that was edited, lost or added since the run was recorded is named before anything is read
from it.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from harness.cli import UserError
from harness.files import write_json
from harness.results import schema
from harness.results.raw import sha256

NAME = "manifest.json"


def write(
    recorded: Path,
    ops: Iterable[str] = (),
    families: Iterable[str] = (),
    others: Iterable[str] = (),
    anew: bool = False,
) -> None:
    """Lists the files of these ops and kernel files, and others by name, as they lie there.

    Other entries stay as they are, unless the list begins `anew`.
    """
    path = recorded / NAME
    there = path.exists() and not anew
    files = dict(_listed(recorded, "remove it and record again")) if there else {}
    raw = {f"raw/{op}.{end}" for op in ops for end in ("csv", "json")}
    folders = tuple(f"verify/{op}/" for op in ops)
    ours = raw | {f"sanitize/{family}.json" for family in families} | set(others)
    kept = {
        name: digest
        for name, digest in files.items()
        if name not in ours and not name.startswith(folders)
    }
    ours |= {name for folder in folders for name in _present(recorded, folder)}
    fresh = {name: sha256((recorded / name).read_bytes()) for name in ours}
    write_json(path, {"files": dict(sorted((kept | fresh).items()))})


def seal(recorded: Path) -> list[str]:
    """Lists all files of a recorded run as they lie there; returns its ops."""
    ops = sorted(path.stem for path in (recorded / "raw").glob("*.csv"))
    if not ops:
        raise UserError(f"{recorded}/raw: holds no measurement; name the folder of a recorded run")
    sanitized = [path.stem for path in (recorded / "sanitize").glob("*.json")]
    dissected = [f"dissect/{path.name}" for path in (recorded / "dissect").glob("*.csv")]
    write(recorded, ops, sanitized, dissected, anew=True)
    return ops


def rewrite(recorded: Path, path: Path, value: object) -> None:
    """Writes JSON in the place of a recorded file and lists its new digest.

    Raises UserError where the file is not as it was recorded; a folder without a manifest has none
    to keep.
    """
    if not (recorded / NAME).exists():
        write_json(path, value)
        return
    name = path.relative_to(recorded).as_posix()
    remedy = f"git checkout {recorded}"
    listed = _listed(recorded, remedy)
    _same(recorded, name, listed, remedy)
    write_json(path, value)
    files = dict(listed) | {name: sha256(path.read_bytes())}
    write_json(recorded / NAME, {"files": files})


def check(recorded: Path, ops: Iterable[str], families: Iterable[str] = ()) -> None:
    """Raises UserError where a file of these ops or kernel files is not as it was recorded.

    ops: those whose times and reports are read. families: those whose `sanitize/` report is read,
    which a recorded run may lack.
    """
    remedy = f"git checkout {recorded}, or record the run again"
    listed = _listed(recorded, remedy)
    places = [place for op in ops for place in (f"raw/{op}.csv", f"raw/{op}.json")]
    for op in ops:
        raw = f"raw/{op}.csv"
        if raw not in listed and not (recorded / raw).exists():
            raise UserError(
                f"{recorded}: has no times of {op}; measure and record it on a machine with a GPU,"
                f" or take {op} out of ops"
            )
    if unknown := [place for place in places if place not in listed]:
        raise UserError(f"{recorded / unknown[0]}: {NAME} does not list it; {remedy}")
    folders = [f"verify/{op}" for op in ops]
    for folder in folders:
        found = [name for name in listed if name.startswith(f"{folder}/")]
        if not found:
            raise UserError(f"{recorded / folder}: {NAME} lists no report; {remedy}")
        places += {*found, *_present(recorded, folder)}
    sanitized = (f"sanitize/{family}.json" for family in families)
    places += [name for name in sanitized if name in listed or (recorded / name).exists()]
    for name in sorted(places):
        _same(recorded, name, listed, remedy)


def check_file(recorded: Path, name: str) -> None:
    """Raises UserError where a file, by its name in the folder, is not as it was recorded."""
    remedy = f"git checkout {recorded}, or record the run again"
    _same(recorded, name, _listed(recorded, remedy), remedy)


def _same(recorded: Path, name: str, listed: Mapping[str, str], remedy: str) -> None:
    """Raises UserError where a file is not as it is listed."""
    path = recorded / name
    if name not in listed:
        raise UserError(f"{path}: {NAME} does not list it; {remedy}")
    try:
        digest = sha256(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {remedy}") from None
    if digest != listed[name]:
        raise UserError(f"{path}: its SHA-256 is not the one in {NAME}; {remedy}")


def _listed(recorded: Path, remedy: str) -> Mapping[str, str]:
    if recorded.is_dir() and not (recorded / NAME).exists():
        raise UserError(
            f"{recorded}: has no {NAME}, so it is no recorded run; record one:"
            f" python -m harness.results.record --run {recorded} --into results/recorded/<machine>"
        )
    return schema.read(recorded / NAME, "manifest", remedy)["files"]


def _present(recorded: Path, folder: str) -> Iterator[str]:
    """The files of a folder and of those in it, by their names in the manifest."""
    for path in (recorded / folder).rglob("*"):
        if path.is_file() and not path.name.startswith("."):
            yield path.relative_to(recorded).as_posix()

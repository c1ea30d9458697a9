"""Exports a finished run as an RO-Crate: a ZIP archive that says what each of its files is.

`python -m harness.results.crate --run results/study --out study.crate.zip`; `make crate` installs
the packages of requirements/crate.txt, which it needs. The archive holds the documents, the CSV
files, the raw rows with their sidecars, the reports of building and verifying, and the
configuration. An action names the software and the machine from which they came.

Source: RO-Crate Metadata Specification 1.1, Process Run Crate profile 0.5.
"""

import argparse
import contextlib
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from harness import cli, files
from harness.cli import UserError

ROOT = Path(__file__).resolve().parents[2]
REMEDY = "finish the run first: snakemake --cores all"
NEEDED = ("summary.csv", "environment.json", "report.html")
# Messages of a program that runs are no result.
LEFT_OUT = ("logs",)
PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
LICENCE = "https://spdx.org/licenses/MIT"
FORMATS = {
    ".csv": "text/csv",
    ".html": "text/html",
    ".json": "application/json",
    ".pdf": "application/pdf",
    ".svg": "image/svg+xml",
    ".tex": "application/x-tex",
    ".yaml": "application/yaml",
}
SAYS = {
    "paper.pdf": "the paper",
    "report.html": "the report",
    "summary.csv": "medians, intervals and speedups of each cell",
    "environment.json": "the machine and the versions",
    "claims.csv": "each claim with its decision",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a name that ends in .zip")
    options = parser.parse_args()
    if options.out.suffix != ".zip":
        raise UserError(f"{options.out}: give a name that ends in .zip")
    count = export(options.run, options.out)
    print(f"{options.out}: {count} files of {options.run}", file=sys.stderr)


def export(run: Path, out: Path) -> int:
    """Write the crate of `run` to `out`; return the number of files in it.

    Raise UserError if the run is not finished, or if what was written does not read back as it is.
    """
    rocrate = library()
    for name in NEEDED:
        if not (run / name).is_file():
            raise UserError(f"{run}/{name}: missing; {REMEDY}")
    environment = files.read_json(run / "environment.json", REMEDY, ("run_id", "date", "commit"))
    names = list(results(run))
    crate = rocrate.ROCrate()
    describe(crate, environment)
    config = crate.add_file(
        ROOT / "config/config.yaml", "config.yaml", properties=about("config.yaml")
    )
    made = [crate.add_file(run / name, name, properties=about(name)) for name in names]
    action(crate, rocrate, environment, config, made)
    with files.whole_file(out) as temporary:
        # The library puts the suffix to a name that has none.
        archive = temporary.with_name(f"{temporary.name}.zip")
        try:
            crate.write_zip(archive)
            check(rocrate, archive, run, {"config.yaml", *names})
            archive.replace(temporary)
        finally:
            archive.unlink(missing_ok=True)
    return len(names) + 1


def library():
    """Return the module of the library; raise UserError if it is not installed."""
    with contextlib.suppress(ModuleNotFoundError):
        import rocrate.rocrate

        return rocrate.rocrate
    raise UserError("rocrate is not installed; run: make crate")


def results(run: Path) -> Iterator[str]:
    """Yield the files of the run relative to it, in order, without logs and hidden ones."""
    for path in sorted(run.rglob("*")):
        parts = path.relative_to(run).parts
        hidden = any(part.startswith(".") for part in parts)
        if path.is_file() and not hidden and parts[0] not in LEFT_OUT:
            yield "/".join(parts)


def about(name: str) -> dict[str, str]:
    """Return the properties of a file: its name, its format, and what it says if that is known."""
    known = {"name": name, "encodingFormat": FORMATS.get(Path(name).suffix, "text/plain")}
    return known | ({"description": SAYS[name]} if name in SAYS else {})


def describe(crate, environment: dict) -> None:
    """State of the whole crate what, when, by whom and under which licence."""
    machine = (environment.get("gpu") or {}).get("name") or "a machine without a GPU"
    crate.name = f"Tilewright, run {environment['run_id']}"
    crate.description = f"Times and verification of Triton kernels, from {machine}"
    crate.datePublished = environment["date"]
    crate.license = crate.add_jsonld(
        {"@id": LICENCE, "@type": "CreativeWork", "name": "MIT", "description": "MIT licence"}
    )
    crate.root_dataset["conformsTo"] = crate.add_jsonld(
        {"@id": PROFILE, "@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"}
    )


def action(crate, rocrate, environment: dict, config, made: list) -> None:
    """State which software made the files, at which commit, and when."""
    dirty = " with changes that no commit holds" if environment.get("dirty", True) else ""
    software = crate.add_jsonld(
        {
            "@id": "#tilewright",
            "@type": "SoftwareApplication",
            "name": "Tilewright",
            "softwareVersion": f"{environment['commit']}{dirty}",
            "license": {"@id": LICENCE},
        }
    )
    done = crate.add_action(software, object=[config], result=made)
    done["name"] = f"Study {environment['run_id']}"
    done["endTime"] = environment["date"]


def check(rocrate, archive: Path, run: Path, names: set[str]) -> None:
    """Read the archive back; raise UserError unless it holds `names`, each as in `run`."""
    with tempfile.TemporaryDirectory() as folder:
        found = rocrate.ROCrate(archive)
        held = {urllib.parse.unquote(entity.id) for entity in found.data_entities}
        if held != names:
            raise UserError(f"{archive}: lists {sorted(held ^ names)[:3]} wrongly; {REMEDY}")
        found.write(folder)
        for name in names - {"config.yaml"}:
            if (Path(folder) / name).read_bytes() != (run / name).read_bytes():
                raise UserError(f"{archive}: {name} is not as in {run}; is the run still going?")


if __name__ == "__main__":
    cli.run(main)

"""The libraries that kernels and baselines rest on: their distributions, versions and contents."""

import csv
import hashlib
import importlib.metadata
from pathlib import Path, PurePosixPath

from harness.project.source_tree import library

ALWAYS = ("torch", "triton")
INSTALLERS_NOTES = {"INSTALLER", "REQUESTED", "direct_url.json", "RECORD"}


def libraries(root: Path) -> list[str]:
    """Return the LIBRARY of each baseline but torch and Triton, from its syntax tree, sorted."""
    paths = (root / "baselines").glob("[!_]*.py")
    return sorted({distribution(path) for path in sorted(paths)} - set(ALWAYS))


def every(root: Path) -> list[str]:
    """Return torch, Triton and the LIBRARY of each baseline, sorted."""
    return sorted({*ALWAYS, *libraries(root)})


def distribution(path: Path) -> str:
    """The distribution that a baseline file names; UserError where it names none."""
    return library(path.parents[1], f"{path.parent.name}/{path.name}")


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def content_hash(distribution: str) -> str | None:
    """SHA-256 over names and digests of what a wheel installed; None where it is absent.

    It is taken from the RECORD of the installation, less the entries that the installer adds. So
    the same wheel has the same hash on all machines, and two builds of one version differ.
    """
    try:
        record = importlib.metadata.distribution(distribution).read_text("RECORD")
    except importlib.metadata.PackageNotFoundError:
        return None
    rows = csv.reader((record or "").splitlines())
    files = sorted((name, digest) for name, digest, *_ in rows if digest and not _added(name))
    return hashlib.sha256(repr(files).encode()).hexdigest() if files else None


def _added(name: str) -> bool:
    """Whether an installer, not the wheel, put a file there: its notes, scripts and bytecode."""
    path = PurePosixPath(name)
    notes = path.parent.suffix == ".dist-info" and path.name in INSTALLERS_NOTES
    return notes or ".." in path.parts or path.is_absolute() or path.suffix == ".pyc"

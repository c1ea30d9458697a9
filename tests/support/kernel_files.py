"""The modules of the kernels, those in folders included."""

import importlib
import pkgutil
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import kernels

FOLDER = Path(kernels.__path__[0])
# Files of several families share these folders; each other one belongs to a family.
SHARED = ("_runtime", "_triton")


def modules() -> Iterator[ModuleType]:
    """Each module below kernels/, imported."""
    for found in pkgutil.walk_packages(kernels.__path__, "kernels."):
        yield importlib.import_module(found.name)


def copy_shared(into: Path) -> None:
    """Copy what families share into the kernels/ of another tree."""
    for name in SHARED:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(FOLDER / name, into / name, ignore=ignored)

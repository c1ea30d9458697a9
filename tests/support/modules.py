"""Import a file that lies in no package: a script of docs/, or kernels that a test has written."""

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from unittest import mock


def loaded(path: Path) -> ModuleType:
    """Return the module of a file, which is run anew for each call."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interpreted(path: Path) -> ModuleType:
    """Return the module of a file whose Triton kernels run in the interpreter."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        return loaded(path)

"""Code and data in one word: SHA-256 digests that tell whether a result is of what is here now."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from harness import environment
from harness.load import OURS, TWIN
from harness.sources import sources


def of(value: object) -> str:
    """Of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def contents(files: Mapping[str, Path]) -> dict[str, str]:
    """Those of files by name; what is no file is left out."""
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest()
        for name, path in files.items()
        if path.is_file()
    }


def implementation(root: Path, family: str, impl: str) -> str:
    """Of what a verification of `impl` holds for: its file, what of this project that imports, and
    the version of its library. family: the kernel file of the op. "" where there is no such file.
    """
    ours = impl in (OURS, TWIN)
    path = f"kernels/{family}.py" if ours else f"baselines/{impl}.py"
    if not (root / path).is_file():
        return ""
    library = "triton" if ours else environment.distribution(root / path)
    files = contents({name: root / name for name in sources(root, path)})
    return of({"files": files, "version": environment.version(library)})

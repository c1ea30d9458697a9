"""Place the choices of a library that tunes itself: a folder for each op and library.

By default such a library keeps its choices in a folder of the user. There may lie choices that were
made on another board, in another run, or while other programs used the GPU. So each library that
tunes itself gets a folder of its own for each op: `harness.measure.autotune` empties it and fills
it on one board, verification reads a copy of it, and measuring uses it.
"""

import shutil
from pathlib import Path

# Inductor, Triton's autotuner (if KEEP has it keep anything), and QuACK.
FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "QUACK_CACHE_DIR": "quack",
}
# Triton's tuner keeps its choices if it is told to. That of Triton 3.6 keeps nothing of
# configurations with a hook, as those of xFormers.
KEEP = {"TRITON_CACHE_AUTOTUNING": "1"}


def place(autotuned: Path, op: str, impl: str) -> Path:
    """The folder of one op and library below that of the reports."""
    return autotuned / op / impl


def emptied(folder: Path) -> dict[str, str]:
    """As `variables`, of a folder that is made anew."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return variables(folder)


def copied(folder: Path, into: Path) -> dict[str, str]:
    """As `variables`, of a copy: what is chosen from now on is not kept in the folder."""
    shutil.copytree(folder, into, dirs_exist_ok=True)
    return variables(into)


def variables(folder: Path) -> dict[str, str]:
    """The environment variables that have a library keep, and look for, its choices there."""
    return {name: str(folder.resolve() / part) for name, part in FOLDERS.items()}

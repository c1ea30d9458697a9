"""Place the choices of a library that tunes itself: a folder for each op and library.

By default such a library keeps its choices in a folder of the user. There may lie choices that were
made on another board, in another run, or while other programs used the GPU. So each library that
tunes itself gets a folder of its own for each op. `harness.measure.autotune` empties it and fills
it on one board. Verification reads a copy of it, and measuring uses it.
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
# configurations with a hook, as those of xFormers. FlashAttention 4 keeps its compiled kernels.
KEEP = {"TRITON_CACHE_AUTOTUNING": "1", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
# For parallel compilation torch.compile starts processes that import torch, in each worker as many
# as there are cores. Several workers side by side each compile by themselves.
ONE_COMPILER = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
# The files of choices: of the tuners of Triton and QuACK, and of Inductor's for a kernel.
CHOICES = ("*.autotune.json", "*.best_config")
# Inductor's times of candidates for a part of a graph, and the graphs, which hold the choice.
TIMES, GRAPHS = "inductor/cache", ("inductor/fxgraph", "inductor/aotautograd")


def place(autotuned: Path, op: str, impl: str) -> Path:
    """The folder of one op and library below that of the reports."""
    return autotuned / op / impl


def compiled(report: Path) -> Path:
    """The report of the compile phase, beside that of the library's choices.

    So it goes with them if their folder is removed.
    """
    return report.with_suffix(".compiled.json")


def emptied(folder: Path) -> dict[str, str]:
    """As `variables`, of a folder that is made anew."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return variables(folder)


def forget(folder: Path) -> None:
    """Remove the choices in a folder, and leave what is compiled.

    A compiled graph stays unless a candidate for a part of it was chosen by time.
    """
    for pattern in CHOICES:
        for path in list(folder.rglob(pattern)):
            path.unlink()
    if (folder / TIMES).exists():
        for name in (TIMES, *GRAPHS):
            shutil.rmtree(folder / name, ignore_errors=True)


def copied(folder: Path, into: Path) -> dict[str, str]:
    """As `variables`, of a copy: what is chosen from now on is not kept in the folder."""
    shutil.copytree(folder, into, dirs_exist_ok=True)
    return variables(into)


def variables(folder: Path) -> dict[str, str]:
    """The environment variables that have a library keep, and look for, its choices there."""
    return {name: str(folder.resolve() / part) for name, part in FOLDERS.items()}

"""The finished cells of a measurement that has not finished: what an interruption leaves behind.

One JSON line says what is measured; then each finished cell adds one, written whole and flushed to
the disk before the next cell begins. `harness.measure.close` makes the two files from it.
"""

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from harness.cli import UserError, fresh_seed
from harness.project import fingerprint
from harness.project.tuned_tables import VARIABLE

CODE = ("harness/**/*.py", "ops/*.py", "kernels/**/*.py", "kernels/tuned/*", "baselines/*.py")
# Variables that kernels, compilers and libraries look at.
PREFIXES = ("CUBLAS", "CUDA_", "CUDNN", "NVIDIA_", "OMP_", "PYTORCH_", "TORCH", "TRITON_")


class JournalHeldError(UserError):
    """Signals that another job writes a journal."""


class Journal:
    """A context that holds the file locked; leaves it behind unless `remove` was called.

    - digest: of everything that could move a number; the content of a journal with another one is
      discarded.
    - seed: None draws one, or takes over the one that was drawn.
    - about: what the files of the measurement hold beside its cells; that of a journal that is
      taken over stays.
    - cells: the records of the finished cells by name, as `add` got them.
    - resumed: how often a measurement with this digest was taken up again.

    Raises JournalHeldError where another job writes the file.
    """

    def __init__(self, path: Path, digest: str, seed: int | None, about: Mapping | None = None):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open(path)
        self._take_over(digest)
        if self.seed < 0:
            self.seed = fresh_seed() if seed is None else seed
            self.about = dict(about or {})
            self._append("head", {"digest": digest, "seed": self.seed, "about": self.about})

    @classmethod
    def found(cls, path: Path) -> "Journal":
        """The journal that lies at `path`, whatever it was of; it is not resumed.

        Raises UserError where there is none, JournalHeldError where another job writes it.
        """
        journal = cls.__new__(cls)
        try:
            journal._open(path, 0)
        except FileNotFoundError:
            missing = f"{path}: missing; a measurement that has ended leaves none"
            raise UserError(missing) from None
        records, _ = journal._records()
        if not records or records[0][0] != "head":
            os.close(journal._file)
            raise UserError(f"{path}: no journal of a measurement; name raw/.<op>.journal of a run")
        journal._keep(records)
        journal.resumed -= 1
        return journal

    def _open(self, path: Path, create: int = os.O_CREAT) -> None:
        self._path, self._file = path, _locked(path, create)
        self.cells: dict[str, dict] = {}
        self.about: dict[str, object] = {}
        self.resumed, self.seed = 0, -1

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def add(self, name: str, record: Mapping) -> None:
        """Keeps the record of a finished cell; when this returns, it is on the disk."""
        self._append("cell", {"name": name, "record": record})
        self.cells[name] = dict(record)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _take_over(self, digest: str) -> None:
        """Reads what there is, and cuts off what is torn or belongs to something else."""
        records, whole = self._records()
        if records and records[0][1].get("digest") == digest:
            self._keep(records)
        elif os.fstat(self._file).st_size:
            print(f"{self._path}: of another plan, machine or code; discarded", file=sys.stderr)
            whole = 0
        os.ftruncate(self._file, whole)
        os.lseek(self._file, whole, os.SEEK_SET)
        if self.resumed:
            self._append("resumed", {})
            print(f"{self._path}: {len(self.cells)} cells taken over", file=sys.stderr)

    def _records(self) -> tuple[list[tuple[str, dict]], int]:
        """The whole records of the file by kind, and how many bytes they have."""
        size = os.fstat(self._file).st_size
        lines = os.pread(self._file, size, 0).splitlines(keepends=True)
        records, whole = [], 0
        with contextlib.suppress(ValueError, LookupError, TypeError):
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                record = json.loads(line)
                records.append((record["what"], record))
                whole += len(line)
        return records, whole

    def _keep(self, records: list[tuple[str, dict]]) -> None:
        head = records[0][1]
        self.seed, self.about = head["seed"], head.get("about", {})
        self.cells = {each["name"]: each["record"] for what, each in records if what == "cell"}
        self.resumed = 1 + sum(what == "resumed" for what, _ in records)

    def _append(self, what: str, record: Mapping) -> None:
        rest = json.dumps({"what": what, **record}, allow_nan=False).encode() + b"\n"
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except OSError as error:
            error.filename = str(self._path)
            raise


def _locked(path: Path, create: int) -> int:
    """A descriptor that holds the lock of the file which lies at `path`.

    create: the flag that makes one where there is none, or zero.
    """
    while True:
        file = os.open(path, os.O_RDWR | create, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            held = f"{path}: another job is measuring this; wait for its end"
            raise JournalHeldError(held) from None
        # A job that ended between the two calls has taken away what was opened.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file
        os.close(file)


def digest(root: Path, parts: Mapping[str, object]) -> str:
    """The SHA-256 of `parts`, of the code and tables below `root`, and of the environment."""
    files = {path for pattern in CODE for path in root.glob(pattern)}
    if tables := os.environ.get(VARIABLE):
        files |= set(Path(tables).glob("*"))
    variables = {key: value for key, value in os.environ.items() if key.startswith(PREFIXES)}
    whole = {
        "parts": parts,
        "variables": variables | {VARIABLE: os.environ.get(VARIABLE)},
        "files": fingerprint.contents({str(path): path for path in files}),
    }
    return fingerprint.of(whole)

"""Run measurements whose implementations, cells and reports are known."""

import contextlib
import dataclasses
import json
import time
from pathlib import Path

import pytest

from harness.calls.cell import sweep
from harness.measure import __main__ as measure
from harness.measure import checkpoint, scheduler
from harness.measure.gate import Gate
from harness.measure.stopping import Timing
from harness.project.implementations import TWIN
from harness.results import raw
from harness.workers import forkserver, pool
from ops._spec import Cost, Op, Tensor, make_case
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
WORKER = "tests.support.fake_worker:FakeWorker"
BLOCKS = 4
# The implementations that never answer, and how long to wait for them.
HANG = ("hangs", "hangs_at_once", "says_half")
LIMIT_S = 4.0
OP = Op(
    "fake",
    reference=None,
    inputs={"x": Tensor("M")},
    cost=lambda case, pass_, itemsize: Cost(10**6 * case["M"], 10**6, 10**3),
    edge=(),
    sweep=(make_case(M=1), make_case(M=2)),
)
CELLS = list(sweep(OP, ["float32"], ["forward"], None))
BOARD = "GPU-00-fake"
ENVIRONMENT = {"run_id": "r", "date": "d", "commit": "c", "dirty": False}
ENVIRONMENT |= {"gpu": {"name": "H", "uuid": BOARD}}
TIMING = Timing(
    min_blocks=BLOCKS,
    max_blocks=BLOCKS,
    interval=0.01,
    cell_cap_s=PATIENCE_S,
    block_ms=10.0,
    energy_ms=20.0,
    energy_impls=["ours", "slow", "exits_at_last"],
    cell_timeout_s=PATIENCE_S,
    cell_limit_s=2 * PATIENCE_S,
    processes=1,
    short_us=0.0,
)


def code_of(impl):
    """Return the digest of every implementation."""
    return "code"


class FakeMonitor:
    """Imitate the driver: each value of `used` in turn, then the last, and foreign processes."""

    def __init__(self, *used, foreign=()):
        self.used, self.names, self.groups = list(used) or [None], list(foreign), []
        self.board = BOARD

    def used_bytes(self):
        return self.used.pop(0) if len(self.used) > 1 else self.used[0]

    def free_bytes(self):
        return None

    def refuse_vanished(self):
        pass

    def users(self):
        return set()

    def foreign_processes(self, workers):
        self.groups.append(set(workers))
        return self.names


def plan(impls, **changes) -> scheduler.MeasurementPlan:
    timing = {key: changes.pop(key) for key in set(changes) & set(measure.TIMING)}
    settings = {
        "op": OP,
        "family": "family",
        "impls": impls,
        "cells": CELLS,
        "seed": 1,
        "timing": dataclasses.replace(TIMING, **timing),
        "ceilings": {},
        "worker": WORKER,
    }
    return scheduler.MeasurementPlan(**settings | changes)


def run(folder, impls, watch=None, **changes) -> Path:
    """Measure with the reports in `folder`; return the path of the CSV file."""
    out = folder / "raw" / "fake.csv"
    gate, origin = Gate(folder, "fake", impls, code_of), measure.origin_of("fake", ENVIRONMENT, [])
    watch = watch or FakeMonitor()
    measure.measure(plan(impls, **changes), gate, watch, origin, out, time.monotonic())
    return out


def interrupted(folder, impls) -> Path:
    """Measure until the first cell is finished; return the journal that is left."""
    add = checkpoint.Journal.add

    def once(kept, name, record):
        add(kept, name, record)
        raise SystemExit(143)

    for impl in impls:
        path = folder / "fake" / f"{impl}.json"
        if impl != TWIN and not path.exists():
            report(folder, "fake", impl, CELLS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Journal, "add", once)
        with pytest.raises(SystemExit):
            run(folder, impls)
    return folder / "raw/.fake.journal"


def report(folder, op, impl, cells, /, **changes):
    path = folder / op / f"{impl}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"case": c.case.name, "dtype": c.dtype, "pass": c.pass_, "status": "ok", "reason": ""}
        for c in cells
    ]
    content = {"status": "ok", "reason": "", "mode": "gpu", "impl_version": "0.9", "cells": rows}
    content |= {"op": op, "impl": impl, "code_sha256": code_of(impl)}
    path.write_text(json.dumps(content | changes))


@pytest.fixture
def timed(tmp_path, monkeypatch):
    """Run a plan whose implementations are all verified; return the rows as they are read back."""
    answer = pool.WorkerHandle.answer

    def impatient(worker, limit_s, began=None):
        # All of them start, and on a busy machine that takes longer than LIMIT_S.
        hasty = worker.impl in HANG and worker.pid is not None
        return answer(worker, LIMIT_S if hasty else limit_s, began)

    monkeypatch.setattr(pool.WorkerHandle, "answer", impatient)

    def timed(impls, watch=None, **changes) -> list[dict]:
        for impl in impls:
            report(tmp_path, "fake", impl.replace("ours_twin", "ours"), CELLS)
        return raw.read(run(tmp_path, impls, watch, **changes), "")[0]

    return timed


def of(rows, impl, case_name="M1"):
    return [row for row in rows if (row["impl"], row["case"]) == (impl, case_name)]


def children() -> list[int]:
    """Return the workers of this process's fork servers, and the workers that lost theirs."""
    servers = {server.pid for server in forkserver.servers()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if "harness.workers.forkserver" in words and parent in (1, *servers):
                found.append(int(folder.name))
    return found

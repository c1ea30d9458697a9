"""Run the command that measures an op, with a made-up driver."""

import json
import os
import signal
import subprocess
import sys
from unittest import mock

import pytest

from harness.calls.cell import sweep
from harness.machine import ceilings, gpu_lock
from harness.measure import __main__ as measure
from harness.project import fingerprint, registry
from ops._spec import DTYPES
from tests.support.fake_nvml import FAKE
from tests.support.measuring import ENVIRONMENT, ROOT, WORKER, report
from tests.support.patience import PATIENCE_S


@pytest.fixture
def arguments(tmp_path):
    """Return the arguments of `harness.measure` for the first case of scale, all verified."""
    gpu = {"name": "NVIDIA H200"}
    (tmp_path / "environment.json").write_text(json.dumps(ENVIRONMENT | {"gpu": gpu}))
    # A rate that bounds nothing: boards without one would be measured.
    known = [("launch", "us", 4.5, None, "measured", f"GPU-{n}{n}-fake") for n in range(8)]
    ceilings.write(tmp_path / "ceilings.csv", known)
    op, _ = registry.op("scale")
    cells = list(sweep(op, DTYPES, op.passes, None, drawn_seed=17))

    def make(*impls, **changes) -> list[str]:
        for impl in impls:
            code = fingerprint.implementation(ROOT, "vector", impl)
            report(tmp_path / "verify", "scale", impl, cells, code_sha256=code)
        options = {
            "op": "scale",
            "verify": tmp_path / "verify",
            "autotuned": tmp_path / "autotune",
            "environment": tmp_path / "environment.json",
            "ceilings": tmp_path / "ceilings.csv",
            "out": tmp_path / "raw/scale.csv",
            "seed": 3,
            "impls": ",".join(impls),
            "dtypes": "bfloat16",
            "min-blocks": 2,
            "max-blocks": 3,
            "interval": 0.01,
            "cell-cap-s": PATIENCE_S,
            "energy-ms": 5,
            "energy-impls": "ours",
            "block-ms": 1,
            "cell-timeout-s": PATIENCE_S,
            "cell-limit-s": PATIENCE_S,
            "processes": 1,
            "short-us": 0,
            "max-cases": 1,
            "worker": WORKER,
        }
        return [
            word for key, value in (options | changes).items() for word in (f"--{key}", str(value))
        ]

    return make


@pytest.fixture
def command(tmp_path, arguments):
    """Start `python -m harness.measure` with a fake driver and the given implementations."""
    (tmp_path / "pynvml.py").write_text(FAKE)

    def start(*impls, **changes) -> subprocess.Popen:
        environment = os.environ | {gpu_lock.LOCKS: str(tmp_path), "PYTHONPATH": str(tmp_path)}
        environment.setdefault("FAKE_LOG", str(tmp_path / "prepared"))
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        call = [sys.executable, "-m", "harness.measure", *arguments(*impls, **changes)]
        return subprocess.Popen(call, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)

    return start


@pytest.fixture
def measured(driver, tmp_path, arguments, monkeypatch):
    """Do as `command` in this process: a new one would import PyTorch first, to fork its workers.

    A fault is an exception, and not an exit code.
    """

    def run(*impls, **changes) -> None:
        monkeypatch.setattr(sys, "argv", ["measure", *arguments(*impls, **changes)])
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            with mock.patch.dict(os.environ, {"FAKE_LOG": str(tmp_path / "prepared")}):
                measure.main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    return run

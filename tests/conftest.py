"""Run the kernels of this process in Triton's interpreter if there is no GPU.

Triton decides this when it decorates a kernel, so the kernels are imported here, before any test.
Then the variable is removed, because the processes that tests start must not inherit it.

Hypothesis has no deadline, because the time of an example says nothing on a shared machine.

Tests that the machine cannot run are marked (pyproject.toml) and skipped here with a reason.

Under xdist each test process has one thread, as have the processes that it starts. More threads
would wait for each other and slow down the tests that compute with PyTorch.

All that was imported and collected stays to the end, so no collection of garbage looks through it.

Bytecode is kept, also by the processes that tests start, whatever the shell exports. Without it
each of some hundred processes compiles the harness anew, and each run all tests.
"""

import gc
import importlib
import os
import sys

import pytest
import torch
from hypothesis import settings

from harness.calls import interpreter
from harness.machine import nvml
from tests.support import kernel_files
from tests.support.marks import MARKS

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if not nvml.gpus():
    os.environ["TRITON_INTERPRET"] = "1"
    list(kernel_files.modules())
    # The interpreter imports it at its first launch, and must see the variable as well.
    importlib.import_module("triton.experimental.gluon.language")
    del os.environ["TRITON_INTERPRET"]
    interpreter.amend()


def pytest_collection_modifyitems(items):
    for item in items:
        for mark, (possible, reason) in MARKS.items():
            if item.get_closest_marker(mark) and not possible:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()

"""Without a GPU the kernels of this process run in Triton's interpreter.

Triton decides that when it decorates a kernel, so they are imported here, before any test; the
variable is gone again for the processes that tests start.

How long an example takes says nothing on a machine that others use: hypothesis sets no deadline.

Where several processes share the tests, each has one thread, and so have those that it starts: more
would wait for each other, which took most of the time of the tests that compute with PyTorch.
"""

import importlib
import os
import pkgutil

import torch
from hypothesis import settings

import kernels
from harness.calls import interpreter
from harness.machine import nvml

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if not nvml.gpus():
    os.environ["TRITON_INTERPRET"] = "1"
    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"kernels.{module.name}")
    # The interpreter imports it at its first launch, and it must see the variable as well.
    importlib.import_module("triton.experimental.gluon.language")
    del os.environ["TRITON_INTERPRET"]
    interpreter.quicken()

"""Imitate NVML with a driver of made-up GPUs.

Environment variables say what it has, also to processes that a test starts:

- FAKE_GPUS: how many, 1 if it is not set.
- FAKE_NAMES: their models, separated by commas; each an H200 if it is not set.
- FAKE_LOST, FAKE_USED: files with a UUID a line, of those that are gone and of those that another
  program uses.
"""

import sys
import types

import pytest

from harness.machine import gpu_lock

FAKE = """
import os, types

class NVMLError(Exception):
    pass

PROCESSES = {}

def nvmlInit(): pass
def nvmlDeviceGetCount(): return int(os.environ.get("FAKE_GPUS", "1"))
def listed(variable):
    path = os.environ.get(variable, "")
    return open(path).read().split() if os.path.exists(path) else []
def nvmlDeviceGetHandleByIndex(index): return nvmlDeviceGetHandleByUUID(f"GPU-{index}{index}-fake")
def nvmlDeviceGetHandleByUUID(uuid):
    if uuid in listed("FAKE_LOST"): raise NVMLError
    return uuid
def nvmlDeviceGetUUID(handle): return handle
def nvmlDeviceGetName(handle):
    names = os.environ.get("FAKE_NAMES", "NVIDIA H200").split(",")
    return names[int(handle[4]) % len(names)] if handle.startswith("GPU-") else names[0]
def nvmlDeviceGetMemoryInfo(handle): return types.SimpleNamespace(used=2**30, total=2**37)
def nvmlDeviceGetComputeRunningProcesses(handle):
    used = [2**22 + 5] * (handle in listed("FAKE_USED"))
    return [types.SimpleNamespace(pid=pid) for pid in [*PROCESSES.get(handle, ()), *used]]
def nvmlSystemGetProcessName(pid): return "trainer"
def __getattr__(name):
    # All else that a driver can be asked: this one does not tell.
    if name.startswith("NVML_"): return 0
    if not name.startswith("nvml"): raise AttributeError(name)
    def unknown(*_): raise NVMLError
    return unknown
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Imitate a driver with one GPU; FAKE_GPUS sets how many."""
    module = types.ModuleType("pynvml")
    exec(FAKE, vars(module))
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setenv(gpu_lock.LOCKS, str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return module

"""Imitate NVML with a driver of made-up GPUs."""

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
def nvmlDeviceGetHandleByIndex(index): return f"GPU-{index}{index}-fake"
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceGetUUID(handle): return handle
def nvmlDeviceGetName(handle): return "NVIDIA H200"
def nvmlDeviceGetMemoryInfo(handle): return types.SimpleNamespace(used=2**30, total=2**37)
def nvmlDeviceGetComputeRunningProcesses(handle):
    return [types.SimpleNamespace(pid=pid) for pid in PROCESSES.get(handle, ())]
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

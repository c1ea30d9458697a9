"""Imitate a GPU that Triton compiles for and that starts nothing, to test the path to a launch."""

import contextlib
import functools
import types

import torch
from triton.backends.nvidia import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from tests.support import kernel_files


class CudaLauncher(driver.CudaLauncher):
    """Triton's driver, except that it compiles nothing."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, launch):
        self.launch = launch


class GPU:
    """asked: the current device at each launch that Triton was asked for."""

    def __init__(self, monkeypatch):
        self.asked, self.current = [], 0

        def run(kernel, *args, grid, warmup, **kwargs):
            self.asked.append(self.current)
            compiled = CudaLauncher(lambda *handed: None)
            return types.SimpleNamespace(run=compiled, function=None, packed_metadata=None)

        monkeypatch.setattr(JITFunction, "run", run)
        monkeypatch.setattr(torch.cuda, "device", self._entered)
        calls = {"_cuda_getDevice": lambda: self.current}
        calls["_cuda_getCurrentRawStream"] = lambda device: 7
        for name, function in calls.items():
            monkeypatch.setattr(torch._C, name, function, raising=False)

    @contextlib.contextmanager
    def _entered(self, device):
        before = self.current
        self.current = device if isinstance(device, int) else device.index
        try:
            yield
        finally:
            self.current = before


def compiled(monkeypatch):
    """Replace the interpreter's kernels by those of a machine with a GPU."""
    made = {}
    for module in kernel_files.modules():
        for name, value in vars(module).items():
            if isinstance(value, InterpretedFunction):
                made[value] = _to_compile(value)
                monkeypatch.setattr(module, name, made[value])
    return made


# Triton reads the source of each: a fifth of a second for all kernels.
@functools.cache
def _to_compile(kernel: InterpretedFunction) -> JITFunction:
    return JITFunction(kernel.fn, **kernel.kwargs)


def plain(op):
    """Return each plain edge case with a dtype, one of 16 bits if it has any."""
    cases = [case for case in op.edge if not case.layout and not case.values]
    return [(case, op.dtypes_of(case)[-1]) for case in cases if min(case.sizes.values()) > 0]

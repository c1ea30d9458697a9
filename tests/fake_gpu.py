"""A GPU that Triton compiles for and that starts nothing, for what happens before a launch."""

import contextlib
import types

import torch
from triton.backends.nvidia import driver
from triton.runtime.jit import JITFunction

from kernels import _launch


class OnGpu(torch.Tensor):
    """A tensor of the host that says to be one of a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)

    def get_device(self):
        return 0


def on_gpu(*shape):
    return torch.zeros(shape).as_subclass(OnGpu)


class CudaLauncher(driver.CudaLauncher):
    """Triton's own but for what is compiled."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, launch):
        self.launch = launch


class GPU:
    """asked: which device was the current one at each launch that Triton was asked for. begun: what
    was handed to a compiled launcher without Triton."""

    def __init__(self, monkeypatch):
        self.asked, self.begun, self.current = [], [], 0

        def run(kernel, *args, grid, warmup, **kwargs):
            self.asked.append(self.current)
            compiled = CudaLauncher(lambda *handed: self.begun.append(handed))
            return types.SimpleNamespace(run=compiled, function=None, packed_metadata=None)

        monkeypatch.setattr(JITFunction, "run", run)
        monkeypatch.setattr(_launch, "_run", run)
        monkeypatch.setattr(torch.cuda, "device", self._entered)
        calls = {"_cuda_getDevice": lambda: self.current}
        calls["_cuda_getCurrentRawStream"] = lambda device: 7
        for name, function in calls.items():
            monkeypatch.setattr(torch._C, name, function, raising=False)
        monkeypatch.setattr(_launch, "_calls", {})
        monkeypatch.setattr(_launch, "_starters", {})

    @contextlib.contextmanager
    def _entered(self, device):
        before = self.current
        self.current = device if isinstance(device, int) else device.index
        try:
            yield
        finally:
            self.current = before

"""Imitate a GPU on the host: kernels that Triton and plans start are handed addresses."""

import ctypes
import functools
import types

import torch
from triton.runtime.jit import JITFunction

from kernels._runtime import launch_guard as _launch_guard
from kernels._runtime import plan_compiler as _plan_compiler
from kernels._runtime.checks import check_in_memory
from tests.support.fake_gpu import CudaLauncher


# Without a GPU other tests need the interpreter's kernels; these are Triton's own and never run.
@JITFunction
def add_kernel(x_ptr, out_ptr, N, number, SIZE=4):
    pass


seeded_kernel = JITFunction(add_kernel.fn, do_not_specialize=["number"])


class Host:
    """- asked: the kernels that Triton was asked to start.
    - begun: each kernel started by Triton or by a plan, with its grid and arguments.
    - launcher: the class that starts compiled kernels.
    - allocated: the tensors that plans allocated.

    The kernel add_kernel is run; others do nothing.
    """

    def __init__(self, monkeypatch):
        self.asked, self.begun, self.launcher = [], [], CudaLauncher
        self.allocated: list[torch.Tensor] = []

        def run(kernel, *args, grid, warmup, **kwargs):
            self.asked.append(kernel)
            values = {param.name: param.default for param in kernel.params}
            values |= dict(zip(kernel.arg_names, args, strict=False))
            values |= {name: kwargs[name] for name in kwargs.keys() & values.keys()}
            handed = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in values.values()]
            start = functools.partial(self._start, kernel)
            start(*(*grid, 1, 1)[:3], 0, None, False, False, *(None,) * 6, *handed)
            return types.SimpleNamespace(
                run=self.launcher(start), function=None, packed_metadata=(4, 1, 0)
            )

        monkeypatch.setattr(JITFunction, "run", run)
        monkeypatch.setattr(
            _launch_guard,
            "check_in_memory",
            lambda name, tensor, kind: check_in_memory(name, tensor, "cpu"),
        )
        cuda = {"_cuda_getDevice": lambda: -1, "_cuda_getCurrentRawStream": lambda device: 0}
        for name, function in cuda.items():
            monkeypatch.setattr(torch._C, name, function, raising=False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        quick = self._quick
        for name in ("_quick", "_allocate"):
            monkeypatch.setattr(_plan_compiler, name, quick)
        monkeypatch.setattr(_plan_compiler, "_strided", _strided)

    def _quick(self, shape, stride, dtype):
        made = torch._C._dynamo.guards._empty_strided_cpu(shape, stride, dtype)
        self.allocated.append(made)
        return made

    def _start(self, kernel, *handed):
        """handed: the grid, ten values of the launcher's own, and the arguments of the kernel."""
        self.begun.append((kernel, handed[:3], handed[13:]))
        if kernel.fn is add_kernel.fn:
            _add(*handed[13:])


def _add(x_at, out_at, n, number, size):
    out = _floats(out_at, n)
    for index, value in enumerate(_floats(x_at, n)):
        out[index] = value + number


def _floats(address, n):
    return (ctypes.c_float * n).from_address(address)


def _strided(shape, stride, dtype):
    return torch.empty_strided(shape, stride, dtype=dtype)

"""Training steps of several stacks on one set of weights, and the clock for them."""

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import torch

from harness import status
from harness.calls import inputs
from network import calls, stack
from network.flat import bound
from network.ops import model as ops
from network.stack import Stack
from network.train import TrainStep

Row = dict[str, object]


class Steps:
    """A network's weights, moments and tokens, on which steps of any stack run.

    Args:
        preset: the name of one.
        batch, length: sequences, and tokens of each.
        dtype: its name.
        gpu: whether the tensors lie on the GPU, else on the CPU.
    """

    def __init__(self, preset: str, batch: int, length: int, dtype: str, gpu: bool, seed: int = 0):
        self.case, self.dtype, self.gpu = ops.case(preset, B=batch, S=length), dtype, gpu
        device = "cuda" if gpu else "cpu"
        self.about: Row = {"preset": preset, "batch": batch, "length": length, "dtype": dtype}
        self._tensors = inputs.make(ops.TRAIN_STEP, self.case, dtype, seed, device)
        self._arguments = ops.TRAIN_STEP.arguments(self.case)
        self.config = ops.config_of(self.case)

    def fit(self, name: str | Stack) -> Stack:
        """Return the stack that trains this network; errors as `network.calls.fit`."""
        found = name if isinstance(name, Stack) else stack.load(name)
        return calls.fit(found, self.config, True, **self._where())

    def ladder(self, name: str, over: str) -> list[Stack]:
        """Return stacks from `over` to that of a name, part by part; errors as `fit`."""
        foot = self.fit(over).name
        return stack.ladder(stack.load(name), self.config, True, foot, **self._where())

    def _where(self):
        weights = self._tensors["weights"]
        return {"dtype": weights.dtype, "device": weights.device}

    def step(self, used: Stack) -> Callable[[], object]:
        """Return a step of a stack; the weights go on from step to step.

        It is launched by the host. A graph would keep the memory of a step, and a profile of a
        replay knows no part.
        """
        train = calls.Train(used, graph=False)
        return lambda: train(**self._tensors, **self._arguments)

    def update(self, used: Stack) -> Callable[[], None]:
        """Return the end of a step by itself: clipping and the optimizer, on random gradients.

        The optimizer's moments are its own.
        """
        model = bound(self.config, used.parts, self._tensors["weights"].detach())
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        return TrainStep(model, check=False, optimizer=used.optimizer).update


def seconds(call: Callable[[], object], gpu: bool) -> float:
    """Return the wall time of a call until the GPU has done it."""
    _wait(gpu)
    began = time.perf_counter()
    call()
    _wait(gpu)
    return time.perf_counter() - began


def median_us(call: Callable[[], object], gpu: bool, times: int, in_a_row: int = 1) -> float:
    """Return the median wall time of a call in µs, after one that is not timed.

    in_a_row: how many calls are begun before the GPU is waited for. Their mean is one of the times.
    """

    def row() -> None:
        for _ in range(in_a_row):
            call()

    call()
    return 1e6 * statistics.median(seconds(row, gpu) / in_a_row for _ in range(times))


def peak_of(call: Callable[[], object], gpu: bool) -> int | None:
    """Return the peak of the GPU memory in use during a call, None on a CPU."""
    if not gpu:
        call()
        return None
    _wait(gpu)
    torch.cuda.reset_peak_memory_stats()
    call()
    _wait(gpu)
    return torch.cuda.max_memory_allocated()


def attempted(rows: Callable[[], Iterable[Row]], about: Row, gpu: bool) -> list[Row]:
    """Return the rows that a function makes, or one row with the status of its failure.

    Memory that the failed attempt held is given back.
    """
    try:
        return [about | {"status": "ok", "reason": ""} | row for row in rows()]
    except Exception as error:
        kind = status.of(error)
        # A part that cannot do what is asked says so by ValueError or TypeError.
        if isinstance(error, (ValueError, TypeError)):
            kind = "unsupported"
        failed = about | {"status": kind, "reason": status.reason(error)}
    release(gpu)
    return [failed]


def release(gpu: bool) -> None:
    """Give memory back that nothing uses, and what torch.compile learned from shapes.

    After another length it would compile for any length, which nobody asked of it.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()


def _wait(gpu: bool) -> None:
    if gpu:
        torch.cuda.synchronize()

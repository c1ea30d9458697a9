"""Run the measuring worker on the CPU, with a timer that replays by calling again."""

import contextlib
import types

import pytest
import torch

from harness.measure import worker
from harness.measure.messages import Checked
from harness.project import registry
from ops._spec import Cost, Op, Tensor, make_case

SWEEP = (make_case(M=64),)
CELL = {"case": "M64", "dtype": "float32"}


class Timer:
    """Copy a repeated call into the outputs of the first, as the replay of a graph does."""

    stream = None
    l2_bytes = 100

    def capture(self, call):
        first = call()

        def replay():
            for output, again in zip(first, call(), strict=True):
                output.data.copy_(again)

        return replay, first

    def cold(self, calls, count, before=(), host_s=None):
        for index in range(count):
            if before:
                before[index % len(calls)]()
            calls[index % len(calls)]()
        return 1.0, {}

    def eager(self, calls, count):
        return self.cold(calls, count)[0]

    def in_a_row(self, calls, count):
        for index in range(count):
            calls[index % len(calls)]()
        return count * 1e-6

    def energy(self, calls, window_ms):
        self.cold(calls, 3)
        return 2.0 * window_ms, 0.5


@pytest.fixture
def make(monkeypatch):
    """Make the worker of a function on the CPU, as `ours` unless another name is given."""
    memory = {"memory_allocated": 10, "max_memory_allocated": 30, "memory_reserved": 40}
    cuda = {name: lambda value=value: value for name, value in memory.items()}
    cuda |= {name: lambda: None for name in ("synchronize", "empty_cache")}
    cuda["is_initialized"] = lambda: True
    cuda |= {"reset_peak_memory_stats": lambda: None, "current_device": lambda: 0}
    cuda["stream"] = lambda stream: contextlib.nullcontext()
    cuda["get_device_properties"] = lambda device: types.SimpleNamespace(total_memory=2**30)
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(worker, "Timer", Timer)
    original = worker.inputs.make
    monkeypatch.setattr(worker.inputs, "make", lambda *a: original(*a[:-1], "cpu"))
    monkeypatch.setattr(registry, "version", lambda impl: "1.0")

    def build(
        function,
        impl="ours",
        deterministic=True,
        passes=("forward", "backward"),
        in_place=False,
        wide=(),
        properties=None,
        kind=worker.MeasureWorker,
    ):
        op = Op(
            "op",
            reference=None,
            inputs={"x": Tensor("M"), "bias": Tensor("M", when="bias")},
            cost=lambda *_: Cost(1, 1, 1),
            edge=(),
            sweep=SWEEP,
            passes=passes,
            deterministic=deterministic,
            properties=properties,
        )
        monkeypatch.setattr(registry, "op", lambda name: (op, "family"))
        monkeypatch.setattr(registry, "function", lambda name, impl: function)
        monkeypatch.setattr(registry, "in_place", lambda name, impl: in_place)
        monkeypatch.setattr(registry, "wide", lambda name, impl: wide)
        return kind("op", impl, 5)

    return build


def cell(made, pass_="forward", calls=4):
    prepared = made.prepare(**CELL, pass_=pass_)
    made.block(calls)
    assert made.check() == Checked(0)
    return prepared


def noting_square(calls, given):
    """Return a square that notes its passes in `calls`, and its gradients' values in `given`."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            calls.append("forward")
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            calls.append("backward")
            given[gradient.data_ptr()] = gradient.unique().tolist()
            return 2 * gradient * ctx.saved_tensors[0]

    return Square.apply


class Overwriting(torch.autograd.Function):
    """Return a square that writes its gradient over a saved tensor, as Liger's swiglu does.
    A kernel does so unseen by autograd, which notices only the writes of PyTorch."""

    @staticmethod
    def forward(ctx, x):
        rows = x.view(-1, x.shape[-1])
        ctx.save_for_backward(rows)
        return (rows * rows).view(x.shape)

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        rows.data.copy_(2 * rows * dy.view(rows.shape))
        return rows.view(dy.shape)


class Turned(torch.autograd.Function):
    """Double x and the gradient in place, as Liger's rotary embedding does."""

    @staticmethod
    def forward(ctx, x):
        x.detach().mul_(2)
        return x.detach()

    @staticmethod
    def backward(ctx, dy):
        return dy.detach().mul_(2)

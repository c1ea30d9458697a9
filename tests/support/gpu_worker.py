"""Run the real worker over functions that fail on the GPU itself, for tensors of one element."""

import torch
import triton
import triton.language as tl

from harness.measure import worker
from harness.project import registry
from ops._spec import Cost, Op, Tensor, make_case


@triton.jit
def store_far_away(out_ptr):
    tl.store(out_ptr + tl.arange(0, 32).to(tl.int64) * (1 << 40), 1.0)


def plain(x):
    return x + 1


def crashes(x):
    if x.numel() == 1:
        store_far_away[(1,)](x)
        torch.cuda.synchronize()
    return plain(x)


KEPT = []


def leaks(x):
    KEPT.append(x.clone())
    return plain(x)


def fills(x):
    return x.new_empty(2**46) if x.numel() == 1 else plain(x)


FAULTS = {"crashes": crashes, "fills": fills, "leaks": leaks}
OP = Op(
    "fake",
    reference=plain,
    inputs={"x": Tensor("M")},
    cost=lambda *_: Cost(1, 1, 1),
    edge=(),
    sweep=(make_case(M=1), make_case(M=2)),
)


class GpuWorker(worker.MeasureWorker):
    def __init__(self, op, impl, seed):
        registry.op = lambda name: (OP, "family")
        registry.function = lambda name, impl: FAULTS.get(impl, plain)
        registry.in_place = lambda name, impl: False
        registry.wide = lambda name, impl: ()
        registry.version = lambda impl: "1.0"
        super().__init__(op, impl, seed)

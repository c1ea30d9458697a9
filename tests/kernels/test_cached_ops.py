"""Check that every op gives the same result with the launch cache and without it.

Calls whose host time counts must be cached. With a GPU the results are compared. Without one the
launches are: `fake_host` takes the GPU's place, hands addresses to the kernels and does not run
them.
"""

import csv
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from harness.calls import inputs, invoke
from harness.machine import nvml
from harness.project import registry
from harness.project.implementations import OURS
from harness.study import jobs
from kernels import embedding as _embedding
from kernels._runtime import call_cache as _call_cache
from kernels._runtime import call_trace as _call_trace
from kernels._runtime.call_cache import CachedLauncher, uncached
from kernels._runtime.call_trace import asked_again
from kernels._runtime.device import assume_device
from kernels._triton.arrival_counter import MOST_COUNTERS
from kernels.adamw import AdamW
from kernels.attention import attention
from kernels.attention_details import forward_hopper
from kernels.attention_varlen import attention_varlen
from kernels.embedding import embedding
from kernels.linear import linear
from tests.support import kernel_files
from tests.support.fake_gpu import CudaLauncher, compiled, plain
from tests.support.fake_host import Host

ROOT = Path(__file__).parents[2]
OPS = sorted(jobs.ops(ROOT))
DEVICE = "cuda" if nvml.gpus() else "cpu"
CALLS = 4


def counted():
    """Yield the cells whose call time is a target of the paper: op, case, pass."""
    with (ROOT / "paper" / "targets.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["quantity"] == "call_ratio"]
    assert rows
    for name in OPS:
        op = registry.op(name)[0]
        own = [row for row in rows if name in row["op"].split() or row["op"] == "*"]
        for case in op.sweep:
            passes = [row["pass"] for row in own if re.fullmatch(row["case"], case.name)]
            for pass_ in op.passes:
                if pass_ in passes:
                    words = f"{name}-{case.name}-{pass_}"
                    yield pytest.param(op, case, pass_, id=words)


def call_of(op, case, dtype, seed, backward, device=DEVICE):
    """Return the tensors of a case and a call of our function for it."""
    tensors = inputs.make(op, case, dtype, seed, device)
    seeds = None
    if backward:
        shapes = invoke.run(op, op.reference, case, inputs.make(op, case, dtype, seed, "meta"))
        outputs = [torch.empty_like(x, device=device) for x in shapes.values()]
        seeds = inputs.gradients(outputs, seed)
    function = registry.function(op.name, OURS)
    return tensors, lambda: invoke.run(op, function, case, tensors, seeds)


@pytest.fixture
def host(monkeypatch):
    compiled(monkeypatch)
    # A GPU's counter is looked up in each call, so the host's counter must be as well.
    counter = torch.zeros(1, dtype=torch.int32)
    counters = torch.zeros(MOST_COUNTERS, dtype=torch.int32)
    for module in kernel_files.modules():
        if hasattr(module, "arrival_counter"):
            monkeypatch.setattr(module, "arrival_counter", asked_again(lambda device: counter))
        if hasattr(module, "arrival_counters"):
            monkeypatch.setattr(module, "arrival_counters", asked_again(lambda device: counters))
        # The targets of a loss are not checked on a GPU.
        if hasattr(module, "check_targets"):
            monkeypatch.setattr(module, "check_targets", lambda *arguments: None)
    # Nor are the ids of an embedding.
    monkeypatch.setattr(_embedding, "_check", lambda *arguments: None)
    forget()
    yield Host(monkeypatch)
    forget()


def forget():
    """Forget all plans of all ops: plans for the fake host must not serve later tests."""
    for value in itertools.chain(*(vars(module).values() for module in kernel_files.modules())):
        if isinstance(launcher := getattr(value, "launcher", None), CachedLauncher):
            launcher.plans.clear()
            launcher.seen.clear()


class Keeping(TorchDispatchMode):
    """Keep each tensor that is made in the body, so that no address is used twice."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made.append(func(*args, **(kwargs or {})))
        return self.made[-1]


def told_apart(begun, tensors):
    """Return the launches without addresses.
    An address becomes the argument that lies there and the offset into it, or the number of a
    tensor that the call made."""
    known = {
        name: tensor.untyped_storage() for name, tensor in tensors.items() if tensor is not None
    }
    numbers = {}

    def place(address):
        for name, storage in known.items():
            if 0 <= address - storage.data_ptr() < storage.nbytes():
                return name, address - storage.data_ptr()
        return numbers.setdefault(address, len(numbers))

    def told(name, value):
        if isinstance(value, TensorDescriptor):
            sizes = value.shape, value.strides, value.block_shape
            return place(value.base.data_ptr()), [list(size) for size in sizes]
        is_address = isinstance(value, int) and (name.endswith("_ptr") or value > 2**40)
        return place(value) if is_address else value

    return [
        (kernel, grid, [told(*each) for each in zip(kernel.arg_names, handed, strict=True)])
        for kernel, grid, handed in begun
    ]


@pytest.mark.no_gpu
@pytest.mark.parametrize("op, case, pass_", [*counted()])
def test_every_call_whose_time_is_a_target_is_cached(host, op, case, pass_):
    _, call = call_of(op, case, op.dtypes_of(case)[-1], 0, pass_ != "forward")
    for _ in range(2):
        call()
    host.asked.clear()
    call()
    assert not host.asked, "not cached"


def layer(activation):
    """Return a forward and a backward pass of a layer, whose product needs no descriptor."""
    x, weight, bias = (torch.ones(*n, requires_grad=True) for n in ((2, 3, 8), (5, 8), (5,)))
    seed = torch.ones(2, 3, 5)
    return lambda: torch.autograd.grad(linear(x, weight, bias, activation), (x, weight, bias), seed)


def embedded(tokens):
    ids, weight = torch.arange(tokens) % 7, torch.ones(7, 8, requires_grad=True)
    seed = torch.ones(tokens, 8)
    return lambda: torch.autograd.grad(embedding(ids, weight), weight, seed)


def optimizer_step():
    params = [torch.nn.Parameter(torch.ones(n)) for n in (8, 9, 7)]
    for param in params:
        param.grad = torch.ones_like(param)
    return AdamW([{"params": params[:1]}, {"params": params[1:]}], clip=1.0).step


CALLED = {
    "layer": lambda: layer("none"),
    "layer with relu": lambda: layer("relu"),
    "layer with gelu": lambda: layer("gelu"),
    "embedding of few tokens": lambda: embedded(5),
    "embedding of chunks of tokens": lambda: embedded(130),
    "step": optimizer_step,
}


@pytest.mark.no_gpu
@pytest.mark.parametrize("name", CALLED)
def test_all_launches_of_a_training_step_are_cached(host, name):
    call = CALLED[name]()
    for _ in range(2):
        call()
    host.asked.clear()
    host.begun.clear()
    call()
    assert host.begun and not host.asked


@pytest.mark.no_gpu
@pytest.mark.parametrize("name", OPS)
def test_the_same_kernels_start_on_the_same_memory_with_and_without(host, name):
    op = registry.op(name)[0]
    for case, dtype in plain(op):
        for backward in (False, True)[: 1 + op.differentiable]:
            for seed in range(CALLS):
                tensors, call = call_of(op, case, dtype, seed, backward)
                with Keeping():
                    host.begun.clear()
                    with uncached():
                        call()
                    without = told_apart(host.begun, tensors)
                    host.begun.clear()
                    call()
                assert told_apart(host.begun, tensors) == without


@pytest.mark.no_gpu
@pytest.mark.parametrize("order", [(True, False), (False, True)])
def test_packed_boundaries_of_one_tensor_and_of_two_have_plans_of_their_own(
    host, monkeypatch, order
):
    """A plan for one tensor of boundaries would leave out scores that two tensors ask for."""
    names = ("q_desc", "k_desc", "v_desc", "out_desc")
    signature, metadata = dict.fromkeys(names, "tensordesc<bf16>"), [{"elem_size": 2}] * 4
    monkeypatch.setattr(driver, "make_tensordesc_arg", lambda x, _: [x.base.data_ptr()])
    monkeypatch.setattr(forward_hopper, "is_hopper", lambda device: True)
    host.launcher = lambda start: CudaLauncher(
        driver.wrap_handle_tensordesc(start, signature, metadata)
    )
    q, k, v = (torch.ones(600, 1, 64, dtype=torch.bfloat16) for _ in range(3))
    boundaries = [torch.tensor([0, 600], dtype=torch.int32) for _ in range(2)]
    with assume_device(sm_count=4):
        for same in (*order * 3, *order[::-1]):
            cu_q, cu_k = boundaries[0], boundaries[1 - same]
            host.begun.clear()
            attention_varlen(q, k, v, cu_q, cu_k, causal=True)
            ((kernel, _, handed),) = host.begun
            told = dict(zip(kernel.arg_names, handed, strict=True))
            assert kernel.fn.__name__ == "packed_forward_hopper_kernel"
            assert (told["cu_q_ptr"], told["cu_k_ptr"]) == (cu_q.data_ptr(), cu_k.data_ptr())
            assert told["DIAGONAL"] == same
    # Two calls of each kind are Triton's, and the rest are made by plan.
    assert len(host.asked) == 4


@pytest.mark.no_gpu
def test_portable_attention_has_plans_with_and_without_dropout(host):
    """A float that a launcher makes bars its call from a plan: each would be Triton's."""
    q, k, v = (torch.ones(1, 2, 24, 16, dtype=torch.float16, requires_grad=True) for _ in range(3))
    for dropout in (0.0, 0.25, 0.5):
        for call in range(4):
            host.asked.clear()
            host.begun.clear()
            out = attention(q, k, v, dropout=dropout, seed=1)
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
            told = [dict(zip(k.arg_names, handed, strict=True)) for k, _, handed in host.begun]
            assert [each["inverse"] for each in told] == [1 / (1 - dropout)] * 3
            # Two calls are Triton's, and the rest are made by plan.
            assert len(host.asked) == (3 if call < 2 else 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_the_results_have_the_same_bits_with_and_without(name):
    op = registry.op(name)[0]
    for case, dtype in plain(op):
        for backward in (False, True)[: 1 + op.differentiable]:
            for seed in range(CALLS):
                _, call = call_of(op, case, dtype, seed, backward)
                with uncached():
                    without = call()
                for key, result in call().items():
                    other = without[key]
                    assert result.dtype == other.dtype and result.stride() == other.stride(), key
                    assert torch.equal(result.view(torch.uint8), other.view(torch.uint8)), key


def test_a_variable_turns_the_cache_off():
    code = "from kernels._runtime import call_cache, call_trace; print(call_trace.suspensions)"
    for value, expected in (("0", [_call_cache.MODE]), ("1", []), ("", [])):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {_call_cache.MODE: value},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == str(expected)
    assert not _call_trace.suspensions

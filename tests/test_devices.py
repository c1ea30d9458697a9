"""A kernel starts on the device of its tensors, and on no memory but that of a GPU."""

import ast
import importlib
import pkgutil
import types
from pathlib import Path

import pytest
import torch
from fake_gpu import GPU
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

import kernels
from harness import discover, inputs, load
from kernels import _device, _generation, _launch, _linear_loss, _plan, _tuned, linear_cross_entropy

OPS = sorted(discover.ops(Path(__file__).parents[1]))
# PyTorch without CUDA takes no part of a tensor that is said to lie there, as the chunks are.
IN_CHUNKS = "linear_cross_entropy"
ELSEWHERE = 1


def compiled(monkeypatch):
    """Kernels as they are where there is a GPU, in the place of the interpreter's."""
    made = {}
    for each in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"kernels.{each.name}")
        for name, value in vars(module).items():
            if isinstance(value, InterpretedFunction):
                if value not in made:
                    made[value] = JITFunction(value.fn, **value.kwargs)
                monkeypatch.setattr(module, name, made[value])
    return made


@pytest.fixture
def second_gpu(monkeypatch):
    """An H200 beside the current one, whose tensors have no memory."""
    gpu = GPU(monkeypatch)
    compiled(monkeypatch)
    monkeypatch.setenv(_tuned.MODE, "")
    limits = types.SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(_device, "_remembered", lambda device: limits)
    monkeypatch.setattr(_generation, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (_launch, _plan):
        monkeypatch.setattr(module, "placed", lambda name, tensor, kind: None)
    return gpu


def there(tensor):
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=f"cuda:{ELSEWHERE}"
    )


def plain(op):
    """Each plain edge case with a dtype, one of 16 bits if it has any."""
    cases = [case for case in op.edge if not case.layout and not case.values]
    return [(case, op.dtypes_of(case)[-1]) for case in cases if min(case.sizes.values()) > 0]


@pytest.mark.parametrize("name", [name for name in OPS if name != IN_CHUNKS])
def test_each_kernel_starts_on_the_device_of_its_tensors(second_gpu, name):
    op, function = load.op(name)[0], load.function(name, load.OURS)
    for case, dtype in plain(op):
        made = inputs.make(op, case, dtype, 0, "meta")
        with FakeTensorMode():
            given = {key: x if x is None else there(x) for key, x in made.items()}
            function(**given, **op.arguments(case))
    assert second_gpu.asked and set(second_gpu.asked) == {ELSEWHERE}


def test_no_kernel_starts_but_by_what_enters_its_device():
    """The rest of what starts kernels, such as the backward passes, is found in the sources."""
    direct = {}
    for path in sorted(Path(kernels.__path__[0]).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                if "kernel" in name:
                    direct.setdefault(path.stem, set()).add(name)
    # The second is started within `on`, as the test below shows.
    assert direct == {"_launch": {"kernel"}, "_linear_hopper": {"linear_tiles_hopper_kernel"}}


@pytest.mark.parametrize("bias", [False, True])
def test_the_tiles_of_a_loss_start_on_the_device_of_their_tensors(second_gpu, monkeypatch, bias):
    seen = []

    def write_parts(x, weight, config):
        seen.append(second_gpu.current)
        return x.new_empty((2, x.shape[0], weight.shape[0] // 256), dtype=torch.float32)

    monkeypatch.setattr(_linear_loss.hopper, "write_parts", write_parts)
    with FakeTensorMode():
        x, weight, targets, added = map(
            there,
            (
                torch.empty(130, 344, dtype=torch.float16),
                torch.empty(17152, 344, dtype=torch.float16),
                torch.empty(130, dtype=torch.int64),
                torch.empty(17152, dtype=torch.float16),
            ),
        )
        linear_cross_entropy.linear_cross_entropy(x, weight, targets, added if bias else None)
    assert seen == ([] if bias else [ELSEWHERE])
    assert len(second_gpu.asked) == 4 - len(seen) and set(second_gpu.asked) == {ELSEWHERE}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", OPS)
def test_memory_that_no_kernel_can_read_is_refused_by_name(monkeypatch, name, device):
    GPU(monkeypatch)
    compiled(monkeypatch)
    op, function = load.op(name)[0], load.function(name, load.OURS)
    for case, dtype in plain(op):
        made = inputs.make(op, case, dtype, 0, device)
        given = {key: tensor for key, tensor in made.items() if tensor is not None}
        names = "|".join((*given, "out"))
        with pytest.raises(ValueError, match=rf"^({names}): on {device}, expected .* cuda device"):
            function(**given, **op.arguments(case))

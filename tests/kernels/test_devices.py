"""Check that a kernel starts on the device of its tensors, and refuses memory of another kind."""

import ast
import types
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.calls import inputs
from harness.project import registry
from harness.project.implementations import OURS
from harness.study import jobs
from kernels import linear_cross_entropy
from kernels._runtime import address_table as _address_table
from kernels._runtime import configs as _tuned
from kernels._runtime import device as _device
from kernels._runtime import launch_guard as _launch_guard
from kernels.cross_entropy_details import linear_tiles as _linear_loss
from tests.support import kernel_files
from tests.support.fake_gpu import GPU, compiled, plain

OPS = sorted(jobs.ops(Path(__file__).parents[2]))
# Without CUDA, PyTorch cannot slice a fake CUDA tensor, as this op does for its chunks.
IN_CHUNKS = "linear_cross_entropy"
ELSEWHERE = 1


@pytest.fixture
def second_gpu(monkeypatch):
    """Pretend that the tensors lie on a second H200, and have no memory."""
    gpu = GPU(monkeypatch)
    compiled(monkeypatch)
    monkeypatch.setenv(_tuned.MODE, "")
    limits = types.SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    monkeypatch.setattr(_device, "_cached_properties", lambda device: limits)
    monkeypatch.setattr(_device, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_launch_guard, "check_in_memory", lambda name, tensor, kind: None)
    monkeypatch.setattr(_address_table, "on_device", table)
    return gpu


def table(values, dtype, device):
    """Return a table without numbers; nothing can be copied to a GPU that is not there."""
    return torch.empty(len(values), dtype=dtype, device=device)


def there(tensor):
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=f"cuda:{ELSEWHERE}"
    )


@pytest.mark.parametrize("name", [name for name in OPS if name != IN_CHUNKS])
def test_each_kernel_starts_on_the_device_of_its_tensors(second_gpu, name):
    op, function = registry.op(name)[0], registry.function(name, OURS)
    for case, dtype in plain(op):
        made = inputs.make(op, case, dtype, 0, "meta")
        with FakeTensorMode():
            given = {key: x if x is None else there(x) for key, x in made.items()}
            function(**given, **op.arguments(case))
    assert second_gpu.asked and set(second_gpu.asked) == {ELSEWHERE}


def launching(tree):
    """Return the launching functions of a file, its guarded functions, and the names each uses."""
    starts, guards, mentions = set(), set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            inner = mentions[node.name] = set()
            for each in ast.walk(node):
                inner |= {each.id} if isinstance(each, ast.Name) else set()
                inner |= {each.attr} if isinstance(each, ast.Attribute) else set()
                if isinstance(each, ast.Call) and isinstance(each.func, ast.Subscript):
                    starts |= {node.name} if "kernel" in ast.unparse(each.func.value) else set()
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            name, wraps = ast.unparse(node.targets[0]), ast.unparse(node.value)
            if wraps in (f"cached_launch({name})", f"guarded({name})"):
                guards.add(name)
    return starts, guards, mentions


def test_no_kernel_starts_but_within_a_guard():
    """Check in the sources what no call reaches here, such as the backward passes."""
    files = {
        path.relative_to(kernel_files.FOLDER): launching(
            ast.parse(path.read_text(encoding="utf-8"))
        )
        for path in sorted(kernel_files.FOLDER.rglob("*.py"))
    }
    starts = [(stem, name) for stem in files for name in files[stem][0]]
    assert len(starts) > 20
    for stem, name in starts:
        asked, queue = set(), [(stem, name)]
        while queue:
            stem, name = queue.pop()
            if name in files[stem][1] or (stem, name) in asked:
                continue
            asked.add((stem, name))
            callers = [
                (other, caller)
                for other in ([stem] if name.startswith("_") else files)
                for caller, mentioned in files[other][2].items()
                if name in mentioned and (other, caller) != (stem, name)
            ]
            assert callers, f"kernels/{stem}: {name} starts a kernel and nothing guards it"
            queue += callers


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
    op, function = registry.op(name)[0], registry.function(name, OURS)
    for case, dtype in plain(op):
        made = inputs.make(op, case, dtype, 0, device)
        given = {key: tensor for key, tensor in made.items() if tensor is not None}
        names = "|".join((*given, "out"))
        with pytest.raises(ValueError, match=rf"^({names})(\[0\])?: on {device}, expected .* cuda"):
            function(**made, **op.arguments(case))

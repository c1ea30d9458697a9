"""Check that a private part of PyTorch or Triton is not used if it is gone or has changed."""

import pytest
import torch
import torch.nn.functional as F
from triton.backends.nvidia.driver import CudaLauncher

from kernels._runtime import internals
from kernels.cross_entropy import cross_entropy


class Reordered(CudaLauncher):
    def __call__(self, x, y, z, stream, function, *rest):
        self.launch(x, y, z, function, stream, False, False, None, None, *rest)


class Renamed(CudaLauncher):
    def __call__(self, x, y, z, stream, function, *rest):
        self.start(x, y, z, stream, function, *rest)


class Longer(CudaLauncher):
    def __call__(self, *arguments):
        super().__call__(*arguments, None)


def test_tritons_launcher_is_called_as_it_calls_itself():
    assert internals.launches_in_order(CudaLauncher)


@pytest.mark.parametrize("launcher", [Reordered, Renamed, Longer])
def test_a_launcher_of_another_order_is_not_called(launcher):
    assert not internals.launches_in_order(launcher)


def quick(shape, stride, dtype):
    return torch.empty_strided(shape, stride, dtype=dtype)


REPLACED = {
    "fewer arguments": lambda shape, dtype: None,
    "another order": lambda stride, shape, dtype: quick(shape, stride, dtype),
    "another dtype": lambda shape, stride, dtype: quick(shape, stride, torch.float32),
    "another device": lambda shape, stride, dtype: quick(shape, stride, dtype).to("meta"),
}


@pytest.mark.parametrize("how", REPLACED)
def test_a_replaced_allocator_is_not_called_directly(how):
    assert internals.allocates(quick, "cpu")
    assert not internals.allocates(REPLACED[how], "cpu")


def gradients():
    """Use one graph twice, with a factor that would be multiplied in place, as PyTorch does."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets, factor = torch.tensor([0, 7, 49]), torch.tensor(3.0)
    found = []
    for function in (cross_entropy, F.cross_entropy):
        loss = function(logits, targets)
        found.append(
            [
                torch.autograd.grad(loss, logits, factor, retain_graph=keep)[0]
                for keep in (True, False)
            ]
        )
    return found


ANSWERS = {
    "gone": None,
    "always": lambda: True,
    "never": lambda: False,
    "with an argument": lambda graph: False,
    "not here": lambda: 1 / 0,
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_graph_counts_as_kept_where_pytorch_does_not_tell(monkeypatch, answer):
    name = "_get_current_graph_task_keep_graph"
    assert internals._tells_what_is_kept(getattr(torch._C._autograd, name))
    if ANSWERS[answer] is None:
        monkeypatch.delattr(torch._C._autograd, name)
    else:
        monkeypatch.setattr(torch._C._autograd, name, ANSWERS[answer])
    ours, theirs = gradients()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("gone", [True, False])
def test_the_public_functions_stand_for_private_ones(monkeypatch, gone):
    names = {
        "_cuda_getDevice": internals.current_device,
        "_cuda_getCurrentRawStream": internals.raw_stream,
    }
    for name in names:
        if gone:
            monkeypatch.delattr(torch._C, name, raising=False)
        else:
            monkeypatch.setattr(torch._C, name, name, raising=False)
    found = [ask() for ask in names.values()]
    assert found == ([torch.cuda.current_device, internals._public_stream] if gone else [*names])


def test_hooks_count_as_set_where_pytorch_does_not_tell(monkeypatch):
    name = "_top_saved_tensors_default_hooks"
    assert not internals.saved_tensors_are_seen()
    with torch.autograd.graph.save_on_cpu():
        assert internals.saved_tensors_are_seen()
    monkeypatch.delattr(torch._C._autograd, name)
    assert internals.saved_tensors_are_seen()

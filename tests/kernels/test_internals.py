"""Check that a private part of PyTorch or Triton is not used if it is gone or has changed."""

import weakref

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


NUMBERS = torch.zeros(2, 3, dtype=torch.complex64)
# Pairs of tensors that `alike` must tell apart.
DIFFERENT = {
    "dtype": (torch.zeros(3), torch.zeros(3, dtype=torch.int32)),
    "shape": (torch.zeros(2, 3), torch.zeros(6)),
    "strides": (torch.zeros(2, 3), torch.zeros(3, 2).T),
    "device": (torch.zeros(3), torch.zeros(3, device="meta")),
    "sign": (NUMBERS.imag, NUMBERS.conj().imag),
    "gradient": (torch.zeros(3), torch.zeros(3, requires_grad=True)),
    "class": (torch.zeros(3), torch.nn.Parameter(torch.zeros(3), requires_grad=False)),
    "layout": (torch.zeros(3), torch.zeros(3).to_sparse()),
    "no tensor": (torch.zeros(3), 0.0),
}


class Guards:
    """A class in the place of that of PyTorch, which notices nothing."""

    def __init__(self, *tensors, dynamic_dims_sizes, dynamic_dims_strides):
        pass

    def check(self, *tensors):
        return True


@pytest.mark.parametrize("way", ["guards", "public", "replaced"])
@pytest.mark.parametrize("what", DIFFERENT)
def test_tensors_that_differ_in_more_than_their_memory_are_told_apart(monkeypatch, way, what):
    if way == "replaced":
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Guards)
    elif way == "public":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    else:
        assert internals._tells_tensors_apart(torch._C._dynamo.guards.TensorGuards)
    one, other = DIFFERENT[what]
    plain = torch.ones(4)
    is_as = internals.alike((one, plain))
    assert is_as(one, plain) and is_as(one, torch.zeros(4))
    assert not is_as(other, plain)


def test_looking_at_tensors_keeps_none_alive():
    x = torch.zeros(3)
    alive = weakref.ref(x)
    is_as = internals.alike((x,))
    del x
    assert alive() is None and is_as(torch.ones(3))

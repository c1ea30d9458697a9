"""The parts of PyTorch and Triton used here that neither promises to keep.

Each is tried before it is relied on. One that is gone, or does something else, is replaced by the
public way to the same result, which is slower.
"""

import functools
import types
from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad
from triton import knobs

# The number of the active level of forward-mode differentiation, below zero where there is none.
forward_mode = forward_ad
if not isinstance(getattr(forward_ad, "_current_level", None), int):
    forward_mode = types.SimpleNamespace(_current_level=-1)


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor carries a derivative of the active level of forward-mode differentiation."""
    if forward_mode._current_level < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


@functools.cache
def allocates(function: Callable, kind: str) -> bool:
    """Whether function(shape, stride, dtype) makes a tensor on a device of this kind."""
    try:
        made = function((2, 3), (3, 1), torch.float16)
        found = tuple(made.shape), made.stride(), made.dtype, made.device.type
    except Exception:
        return False
    return found == ((2, 3), (3, 1), torch.float16, kind)


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Return a function that tells whether other tensors are as these are, but for their memory.

    It takes as many tensors, one by one, and compares type, dtype, shape, strides, device, a lazy
    sign and `requires_grad`. It keeps no tensor alive. The answer may be no if one
    tensor is there twice, or if one is of a class of its own.
    """
    # The compiler of PyTorch looks so at the inputs of a graph, in a sixth of the time.
    make = getattr(torch._C._dynamo.guards, "TensorGuards", None)
    if make is not None and _tells_tensors_apart(make):
        return _guards(make, tensors).check
    known = [*map(_facts, tensors)]
    return lambda *others: [*map(_facts, others)] == known


def _facts(tensor: torch.Tensor) -> tuple:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        # A fresh object is equal to no other.
        return (object(),)
    layout = tensor.layout, tensor.stride() if tensor.layout == torch.strided else None
    further = tensor.device, tensor.is_neg(), tensor.requires_grad
    return type(tensor), tensor.dtype, tensor.shape, *layout, *further


def _guards(make: Callable, tensors: Sequence[torch.Tensor]) -> object:
    return make(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


@functools.cache
def _tells_tensors_apart(make: Callable) -> bool:
    """Whether guards of PyTorch's compiler notice all that `alike` compares."""
    try:
        with torch.enable_grad():
            x, y = torch.zeros(2, 3, device="cpu"), torch.zeros(2, 3, device="cpu")
            check = _guards(make, (x, y)).check
            numbers = torch.zeros(2, 3, dtype=torch.complex64, device="cpu")
            strided = numbers.imag, numbers.conj().imag
            others = [
                *(x.half(), x.to("meta"), x.view(3, 2), x.T.contiguous().T, x[None], None),
                *(x.clone().requires_grad_(), torch.nn.Parameter(x.clone(), requires_grad=False)),
            ]
            plain = _guards(make, strided[:1]).check
            found = [check(x, y), check(y, x), check(x.clone(), y), plain(strided[0])]
            missed = [*(check(x, other) for other in others), plain(strided[1])]
    except Exception:
        return False
    return found == [True] * len(found) and missed == [False] * len(missed)


def current_device() -> Callable[[], int]:
    """Return a function that gives the index of the current CUDA device."""
    return getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def raw_stream() -> Callable[[int], int]:
    """Return a function that gives the handle of the current stream of a CUDA device."""
    return getattr(torch._C, "_cuda_getCurrentRawStream", _public_stream)


def _public_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


@functools.cache
def launches_in_order(launcher: type) -> bool:
    """Whether a launcher of Triton hands to its compiled part what known calls hand to it."""
    seen = []
    probe = object.__new__(launcher)
    sizes = "num_ctas", "global_scratch_size", "global_scratch_align"
    sizes += "profile_scratch_size", "profile_scratch_align"
    vars(probe).update(dict.fromkeys(sizes, 0))
    vars(probe).update(launch_cooperative_grid="cooperative", launch_pdl="dependent")
    vars(probe).update(launch=lambda *arguments: seen.append(arguments))
    before, after = ("x", "y", "z", "stream", "function"), ("metadata", None, None, None, "first")
    try:
        probe(*before, *after)
    except Exception:
        return False
    return seen == [(*before, "cooperative", "dependent", None, None, *after)]


def described_launch(
    launch: Callable,
) -> tuple[Callable, dict[int, Callable[[object], list]]] | None:
    """Return the compiled part of a launch with tensor descriptors, and how it is handed them.

    By the place of a descriptor among the kernel's arguments: a function that gives the arguments
    in its stead. Triton builds a launch as a function around the compiled part. None if it has
    another form.
    """
    try:
        found = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))
        compiled, places, metadata = (
            found[name].cell_contents
            for name in ("launcher", "tensordesc_indices", "tensordesc_meta")
        )
        expand = launch.__globals__["make_tensordesc_arg"]
        known = zip(sorted(places), metadata, strict=True)
        makers = {place: functools.partial(_expanded, expand, each) for place, each in known}
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    # Without metadata a kernel gets the base itself, in a layout of Triton's own.
    return (compiled, makers) if callable(compiled) and all(metadata) else None


def _expanded(expand: Callable, metadata: object, descriptor: object) -> list:
    return expand(descriptor, metadata)


# Triton keeps these objects and changes them in place. An attribute that somebody sets, such as
# `debug`, lies in the first; hooks that somebody adds, as profilers do, lie in the other two.
_unknown = ({"unknown": True}, [], [])
try:
    changed, entered, left = (
        vars(knobs.runtime),
        knobs.runtime.launch_enter_hook.calls,
        knobs.runtime.launch_exit_hook.calls,
    )
except AttributeError:
    changed, entered, left = _unknown


def watched() -> bool:
    """Whether a launch has to pass through Triton: for a hook, or for another way to compile."""
    return bool(changed or entered or left)


def graph_is_kept() -> bool:
    """Within a backward pass: whether its graph may be used again."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask() if ask is not None and _tells_what_is_kept(ask) else True


@functools.cache
def _tells_what_is_kept(ask: Callable[[], bool]) -> bool:
    answers = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            answers.append(ask())
            return grad

    try:
        with torch.enable_grad():
            x = torch.zeros((), device="cpu", requires_grad=True)
            y = Asking.apply(x)
        for keep in (True, False):
            torch.autograd.grad(y, x, torch.ones((), device="cpu"), retain_graph=keep)
    except Exception:
        return False
    return answers == [True, False]


def saved_tensors_are_seen() -> bool:
    """Whether hooks are set that are handed the tensors a graph saves from now on."""
    try:
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    except (AttributeError, TypeError):
        return True

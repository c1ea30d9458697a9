"""How the launchers start a kernel, and when they need autograd.

Triton looks up the compiled kernel anew in each call: it binds the arguments, specializes each,
reads its settings and hashes the lot, which takes longer than a short kernel runs. Here a call is
known by what its specialization depends on, and a known call goes straight to the launcher that
Triton compiled for it. vLLM's and tritonbench's developers report what such a cache gains. The
function that looks a call up is written for each kernel, as Triton writes its own binding.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping

import torch
from triton.runtime.jit import JITFunction

from kernels import _internals as internals
from kernels._checks import no_tangent, placed
from kernels._plan import ALIGNMENT, loosely, tape

# A size is part of what a call is known by; a program that sees ever new sizes starts anew.
MOST_CALLS = 4096
POINTER, DESCRIPTOR = "_ptr", "_desc"
OPTIONS = ("num_warps", "num_stages")

_run = JITFunction.run
_calls: dict[tuple, tuple] = {}
_starters: dict[int, Callable] = {}

# What begins with "_" is its own, with "__" what a parameter is handed over as.
STARTER = """
def starter(_grid, {parameters}, num_warps=None, num_stages=None):
    _device = {first}.get_device()
    {lines}
    _key = (_kernel, _device, {keys}, num_warps, num_stages)
    _known = _calls.get(_key)
    if _known is None or _device != _current_device():
        _miss(_key, _device, _grid, ({parameters},), num_warps, num_stages)
        return None
    _start, _function, _metadata, _cooperative, _dependent = _known
    _x, _y, _z = (*_grid, 1, 1)[:3]
    _start(
        _x, _y, _z, _stream(_device), _function, _cooperative, _dependent,
        None, None, _metadata, None, None, None, {values},
    )
    return _device, *_known
"""


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a result of these tensors takes part in a backward pass.

    What is no tensor is none here: the launcher refuses it by name.
    """
    try:
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return torch.is_grad_enabled()
    except AttributeError:
        pass
    return False


class _Refusing(torch.autograd.Function):
    """Hands gradients on that hang on further tensors, and refuses to differentiate them."""

    @staticmethod
    def forward(ctx, name, count, *gradients_and_further):
        ctx.name = name
        return tuple(gradient.detach() for gradient in gradients_and_further[:count])

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(
            f"{ctx.name}: its gradient was differentiated again, and no second derivative is "
            "computed; expected a single backward pass"
        )


def once(backward: Callable) -> Callable:
    """A backward pass whose gradients cannot be differentiated again: to do so is an error.

    It counts on the tensors that are saved, an output being enough, and on the gradients that it is
    given: a result depends on the inputs through one of them, or is constant in them. PyTorch's
    `once_differentiable` raises nothing where only some inputs are asked for, since what it returns
    is tied to no input: part of a sum would silently count as a constant.
    """
    name = backward.__qualname__.partition(".")[0].lstrip("_")

    @functools.wraps(backward)
    def differentiated(ctx, *grads):
        # PyTorch refuses second derivatives of a traced graph by itself.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return backward(ctx, *grads)
        with torch.no_grad():
            results = backward(ctx, *grads)
        further = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
        if not further:
            return results
        several = results if isinstance(results, tuple) else (results,)
        found = [x for x in several if x is not None]
        tied = iter(_Refusing.apply(name, len(found), *found, *further))
        several = tuple(None if x is None else next(tied) for x in several)
        return several if isinstance(results, tuple) else several[0]

    return differentiated


def constant(**tensors: torch.Tensor | None) -> None:
    """ValueError names a tensor of which a derivative is wanted, by an op that computes none."""
    for name, tensor in tensors.items():
        if needs_grad(tensor):
            raise ValueError(
                f"{name}: requires a gradient, which this op does not compute; expected a tensor "
                f"without one, such as {name}.detach()"
            )
    no_tangent(**tensors)


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Within the body kernels start on this device, where that is a GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def launch(kernel, grid: tuple[int, ...], **arguments) -> None:
    """Starts a `@triton.jit` kernel on the current stream: kernel[grid](**arguments).

    arguments: all parameters of the kernel, num_warps and num_stages. Tensors, None in the place of
    one, and the first parameter, always a tensor, are named `…_ptr`. A number that is new in each
    call, such as a seed, or a tensor in its place, is for a parameter that the kernel's
    `do_not_specialize` names. TypeError where that does not hold; ValueError for a tensor elsewhere
    than on a GPU, or in the interpreter on a CPU, and for one that has no memory of its own.
    """
    # A graph is traced and an interpreter runs the call as it stands; so does who has put another
    # function in the place of Triton's, or watches launches with a hook of Triton's.
    if torch.compiler.is_dynamo_compiling():
        kernel[grid](**arguments)
        return
    fast, started = type(kernel) is JITFunction and JITFunction.run is _run, None
    first = arguments[kernel.arg_names[0]]
    if fast and first.is_cuda and not internals.watched():
        started = _starter(kernel)(grid, **arguments)
    else:
        _check(kernel, arguments)
        readable(kernel, **arguments)
        with on(first.device):
            kernel[grid](**arguments)
    if (noting := tape()) is not None:
        values = {name: arguments[name] for name in kernel.arg_names}
        noting.launches.append((grid, values, started))


def launch_described(kernel, grid: tuple[int, ...], **arguments) -> None:
    """As `launch`, for a kernel whose first parameters are tensor descriptors, which Triton looks
    up anew in each call. Not to be called in a traced graph."""
    bases = {
        name.removesuffix(DESCRIPTOR): value.base
        for name, value in arguments.items()
        if name.endswith(DESCRIPTOR)
    }
    _check(kernel, arguments)
    readable(kernel, **bases, **arguments)
    with on(next(iter(bases.values())).device):
        kernel[grid](**arguments)


def readable(kernel, **arguments) -> None:
    """ValueError names a tensor of memory that a kernel cannot read."""
    # Who has put another function in the place of Triton's may have tensors of shapes only.
    if JITFunction.run is not _run:
        return
    # The interpreter copies what lies on a GPU.
    kind = "cuda" if isinstance(kernel, JITFunction) else "cpu"
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            placed(name.removesuffix(POINTER), value, kind)


def _starter(kernel: JITFunction) -> Callable:
    # By its identity, for good: its hash is that of its source, digested anew each time.
    found = _starters.get(id(kernel))
    if found is None:
        found = _starters[id(kernel)] = _written(kernel)
    return found


def _written(kernel: JITFunction) -> Callable:
    """The function that starts the known calls of a kernel, and has Triton start the others."""
    names, lines, keys, values = kernel.arg_names, [], [], []
    constants = {param.name for param in kernel.params if param.is_constexpr}
    for name in names:
        if name in kernel.do_not_specialize:
            lines.append(f"__{name}_kind, __{name} = _loosely({name})")
            keys.append(f"__{name}_kind")
        elif name.endswith(POINTER):
            lines.append(f"__{name} = 0 if {name} is None else {name}.data_ptr()")
            keys.append(f"{name} if {name} is None else {name}.dtype")
            # No address is a key of its own, which nothing is remembered by.
            keys.append(f"__{name} % {ALIGNMENT} if __{name} or {name} is None else -1")
        elif name.islower() and not name.startswith("stride") and name not in constants:
            # Of two scalars that are equal one may be no integer. Triton makes one kernel for all
            # floats.
            keys.append(f"None if type({name}) is float else {name}, type({name})")
            values.append(name)
            continue
        else:
            # A size is an integer always.
            keys.append(name)
            values.append(name)
            continue
        values.append(f"__{name}")
    text = STARTER.format(
        parameters=", ".join(names),
        first=names[0],
        lines="\n    ".join(lines),
        keys=", ".join(keys),
        values=", ".join(values),
    )
    space = {
        "_calls": _calls,
        "_current_device": internals.current_device(),
        "_kernel": id(kernel),
        "_loosely": loosely,
        "_miss": functools.partial(_miss, kernel),
        "_stream": internals.raw_stream(),
    }
    exec(text, space)
    return space["starter"]


def _miss(kernel: JITFunction, key: tuple, device: int, grid: tuple, values: tuple, *options):
    """Has Triton start a call that is not known, or is of another device than the current one."""
    arguments = dict(zip(kernel.arg_names, values, strict=True))
    _check(kernel, arguments)
    readable(kernel, **arguments)
    given = zip(OPTIONS, options, strict=True)
    arguments |= {name: value for name, value in given if value is not None}
    with torch.cuda.device(device):
        compiled = kernel[grid](**arguments)
    addresses = (v.data_ptr() for v in values if isinstance(v, torch.Tensor))
    if all(addresses):
        _remember(key, compiled)


def _check(kernel, arguments: Mapping[str, object]) -> None:
    # The interpreter keeps what the decorator was given.
    given = getattr(kernel, "kwargs", vars(kernel))
    loose = given.get("do_not_specialize") or ()
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and not (name.endswith(POINTER) or name in loose):
            raise TypeError(f"{kernel.fn.__name__}: {name} is a tensor, name it {name}{POINTER}")


def _remember(key: tuple, compiled) -> None:
    """Keeps what starts a compiled kernel again; not where each start needs memory of its own, or
    where the backend's launcher is another one."""
    starter = compiled.run
    if type(starter).__name__ != "CudaLauncher" or starter.global_scratch_size:
        return
    if not internals.launches_in_order(type(starter)):
        return
    if starter.profile_scratch_size:
        return
    if len(_calls) >= MOST_CALLS:
        _calls.clear()
    _calls[key] = (
        starter.launch,
        compiled.function,
        compiled.packed_metadata,
        starter.launch_cooperative_grid,
        starter.launch_pdl,
    )

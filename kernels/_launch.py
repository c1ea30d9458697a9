"""How the launchers start a kernel, and when they need autograd.

Triton looks up the compiled kernel anew in each call: it binds the arguments, specializes each,
reads its settings and hashes the lot, which takes longer than a short kernel runs. Here a call is
known by what its specialization depends on, and a known call goes straight to the launcher that
Triton compiled for it. vLLM's and tritonbench's developers report what such a cache gains. The
function that looks a call up is written for each kernel, as Triton writes its own binding.
"""

import functools
from collections.abc import Callable, Mapping

import torch
from triton.runtime.jit import JITFunction

from kernels._plan import ALIGNMENT, loosely, tape

# A size is part of what a call is known by; a program that sees ever new sizes starts anew.
MOST_CALLS = 4096
POINTER = "_ptr"
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
    """Whether a result of these tensors takes part in a backward pass."""
    for tensor in tensors:
        if tensor is not None and tensor.requires_grad:
            return torch.is_grad_enabled()
    return False


def launch(kernel, grid: tuple[int, ...], **arguments) -> None:
    """Starts a `@triton.jit` kernel on the current stream: kernel[grid](**arguments).

    arguments: all parameters of the kernel, num_warps and num_stages. Tensors, None in the place of
    one, and the first parameter, always a tensor, are named `…_ptr`. A number that is new in each
    call, such as a seed, or a tensor in its place, is for a parameter that the kernel's
    `do_not_specialize` names. TypeError where that does not hold; ValueError for a tensor elsewhere
    than on a GPU, or in the interpreter on a CPU.
    """
    # A graph is traced and an interpreter runs the call as it stands; so does who has put another
    # function in the place of Triton's.
    if torch.compiler.is_dynamo_compiling():
        kernel[grid](**arguments)
        return
    fast, started = type(kernel) is JITFunction and JITFunction.run is _run, None
    if fast and arguments[kernel.arg_names[0]].is_cuda:
        started = _starter(kernel)(grid, **arguments)
    else:
        _check(kernel, arguments)
        # Who has put another function in the place of Triton's may have tensors of shapes only.
        if JITFunction.run is _run:
            _check_devices("cuda" if fast else "cpu", arguments)
        kernel[grid](**arguments)
    if (noting := tape()) is not None:
        values = {name: arguments[name] for name in kernel.arg_names}
        noting.launches.append((grid, values, started))


def _starter(kernel: JITFunction) -> Callable:
    # By its identity, for good: its hash is that of its source, digested anew each time.
    found = _starters.get(id(kernel))
    if found is None:
        found = _starters[id(kernel)] = _written(kernel)
    return found


def _written(kernel: JITFunction) -> Callable:
    """The function that starts the known calls of a kernel, and has Triton start the others."""
    names, lines, keys, values = kernel.arg_names, [], [], []
    for name in names:
        if name in kernel.do_not_specialize:
            lines.append(f"__{name}_kind, __{name} = _loosely({name})")
            keys.append(f"__{name}_kind")
        elif name.endswith(POINTER):
            lines.append(f"__{name} = 0 if {name} is None else {name}.data_ptr()")
            keys.append(f"{name} if {name} is None else {name}.dtype")
            keys.append(f"__{name} % {ALIGNMENT}")
        else:
            keys.append(name)
            # A size is an integer always; of two scalars that are equal one may be none.
            if name.islower() and not name.startswith("stride"):
                keys.append(f"type({name})")
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
        "_current_device": torch._C._cuda_getDevice,
        "_kernel": id(kernel),
        "_loosely": loosely,
        "_miss": functools.partial(_miss, kernel),
        "_stream": torch._C._cuda_getCurrentRawStream,
    }
    exec(text, space)
    return space["starter"]


def _miss(kernel: JITFunction, key: tuple, device: int, grid: tuple, values: tuple, *options):
    """Has Triton start a call that is not known, or is of another device than the current one."""
    arguments = dict(zip(kernel.arg_names, values, strict=True))
    _check(kernel, arguments)
    given = zip(OPTIONS, options, strict=True)
    arguments |= {name: value for name, value in given if value is not None}
    with torch.cuda.device(device):
        _remember(key, kernel[grid](**arguments))


def _check(kernel, arguments: Mapping[str, object]) -> None:
    # The interpreter keeps what the decorator was given.
    given = getattr(kernel, "kwargs", vars(kernel))
    loose = given.get("do_not_specialize") or ()
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and not (name.endswith(POINTER) or name in loose):
            raise TypeError(f"{kernel.fn.__name__}: {name} is a tensor, name it {name}{POINTER}")


def _check_devices(kind: str, arguments: Mapping[str, object]) -> None:
    """ValueError for a tensor of memory that a kernel cannot read: "cuda" of one that was compiled;
    the interpreter, "cpu", copies what lies on a GPU."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.device.type not in (kind, "cuda"):
            name = name.removesuffix(POINTER)
            raise ValueError(f"{name}: on {value.device}, expected the memory of a {kind} device")


def _remember(key: tuple, compiled) -> None:
    """Keeps what starts a compiled kernel again; not where each start needs memory of its own, or
    where the backend's launcher is another one."""
    starter = compiled.run
    if type(starter).__name__ != "CudaLauncher" or starter.global_scratch_size:
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

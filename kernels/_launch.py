"""How the launchers start a kernel, and when they need autograd.

Triton looks up the compiled kernel anew in each call: it binds the arguments, specializes each,
reads its settings and hashes the lot, which takes longer than a short kernel runs. Here a call is
known by what its specialization depends on, and a known call goes straight to the launcher that
Triton compiled for it. vLLM's and tritonbench's developers report what such a cache gains.
"""

import torch
from triton.runtime.jit import JITFunction

# A size is part of what a call is known by; a program that sees ever new sizes starts anew.
MOST_CALLS = 4096
ALIGNMENT = 16

_run = JITFunction.run
_calls: dict[tuple, tuple] = {}


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a result of these tensors takes part in a backward pass."""
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def launch(kernel, grid: tuple[int, ...], **arguments) -> None:
    """Starts a `@triton.jit` kernel on the current stream: kernel[grid](**arguments).

    arguments: all parameters of the kernel, in its order, a tensor first, no constant a float and
    no descriptor; then num_warps and the like. TypeError where the order is another. A number
    that is new in each call, such as a seed, is named in the kernel's `do_not_specialize`.
    """
    # A graph is traced and an interpreter runs the call as it stands; so does who has put another
    # function in the place of Triton's.
    if torch.compiler.is_dynamo_compiling():
        kernel[grid](**arguments)
        return
    values = [*arguments.values()]
    device = values[0].device
    if device.type != "cuda" or type(kernel) is not JITFunction or JITFunction.run is not _run:
        _check(kernel, arguments)
        kernel[grid](**arguments)
        return
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, **arguments)
        return
    # The kernel's own hash is that of its source, digested in each call.
    key, loose = [kernel.fn, device.index], kernel.do_not_specialize
    for index, (name, value) in enumerate(arguments.items()):
        if type(value) is int:
            key.append(_width(value) if name in loose else value)
        elif isinstance(value, torch.Tensor):
            address = values[index] = value.data_ptr()
            key += value.dtype, address % ALIGNMENT
        else:
            # Of a float, which is never a constant, the kernel needs no more than that it is one.
            key.append(float if type(value) is float else value)
    key = tuple(key)
    known = _calls.get(key)
    if known is None:
        _check(kernel, arguments)
        _remember(key, kernel[grid](**arguments))
        return
    start, function, metadata, cooperative, dependent, used = known
    start(
        grid[0], grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1,
        torch._C._cuda_getCurrentRawStream(device.index), function, cooperative, dependent,
        None, None, metadata, None, None, None, *values[:used],
    )  # fmt: skip


def _width(value: int) -> int:
    """Which of int32, int64 and uint64 Triton takes for a number."""
    bits = (value if value >= 0 else ~value).bit_length()
    return (bits > 31) + (bits > 63)


def _check(kernel, arguments: dict[str, object]) -> None:
    """The arguments are as `launch` wants them; the interpreter knows no parameters, only names."""
    names = [*arguments]
    used = len(kernel.arg_names)
    if names[:used] != kernel.arg_names:
        raise TypeError(f"{kernel.fn.__name__}: {names}, expected the order {kernel.arg_names}")
    for parameter, value in zip(getattr(kernel, "params", ()), arguments.values(), strict=False):
        if parameter.is_constexpr and isinstance(value, float):
            raise TypeError(f"{kernel.fn.__name__}: the constant {parameter.name} is a float")


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
        len(compiled.src.fn.arg_names),
    )

"""Profiles a call from outside: memory, launches, copies, saved tensors.

PyTorch's profiler and its hooks for saved tensors watch one call; a fact that they cannot see is
None. A dispatch mode would see more of eager code, but it turns compiled code into eager code.
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from harness.calls import inputs, wide
from harness.calls.snapshot import InputSnapshot
from ops._spec import Case, Op

# Distinct kernels that an entry names, and the letters of a name that it keeps.
NAMED, LETTERS = 12, 100
# Operators of PyTorch: to(), contiguous(), clone() and copy_() all end in the first.
COPY, CAST = "aten::copy_", "aten::_to_copy"
Tensors = tuple[torch.Tensor, ...]


def observe(
    op: Op,
    function: Callable,
    case: Case,
    dtype: str,
    pass_: str,
    seed: int,
    device: str,
    in_float32: Sequence[str] = (),
) -> dict[str, object]:
    """One warmed-up call in one pass of the op on a device ("cpu" or "cuda").

    in_float32: the inputs that the library has so, see `harness.calls.wide`.

    Returns, by key:

    - `input_bytes`: the inputs; in a backward pass also the outputs, and their gradients of one.
    - `output_bytes`: the outputs.
    - `saved_bytes`: the tensors that a forward pass keeps for the backward pass besides its inputs
      and outputs; None in a forward pass.
    - `workspace_bytes`: the peak of the caching allocator less all these; None on a CPU.
    - `overwritten_bytes`: inputs that are not as they were.
    - `launches`, `memory_ops`: numbers of launches, and of copies and fills, of the GPU; None
      without one.
    - `copies`, `casts`: numbers among PyTorch's operators; None in Triton's interpreter, which
      copies itself.
    - `kernels`: the most frequent launches by name.
    - `float32_precision`: PyTorch's setting for products.

    Raises as the implementation does.
    """
    gpu = device == "cuda"
    tensors = wide.given(inputs.make(op, case, dtype, seed, device), in_float32)
    given = [tensor for tensor in tensors.values() if tensor is not None]

    def forward() -> Tensors:
        with torch.set_grad_enabled(pass_ != "forward"):
            result = function(**tensors, **op.arguments(case))
        return result if isinstance(result, tuple) else (result,)

    if pass_ == "forward":
        return _watched(forward, given, gpu) | {"saved_bytes": None}
    wanted = [tensors[name].requires_grad_() for name in _differentiated(op, tensors)]
    before = InputSnapshot(given)
    _rooted(forward())
    saved = _Saved()
    with saved:
        outputs = _rooted(forward())
    gradients = [torch.ones_like(output) for output in outputs]
    kept = saved.beside([*given, *outputs])

    def backward() -> Tensors:
        return torch.autograd.grad(outputs, wanted, gradients, retain_graph=True)

    def both() -> Tensors:
        results = _rooted(forward())
        return *results, *torch.autograd.grad(results, wanted, gradients)

    if pass_ == "both":
        del outputs
        before.restore()
        return _watched(both, [*given, *gradients], gpu) | {"saved_bytes": kept}
    return _watched(backward, [*given, *outputs, *gradients], gpu) | {"saved_bytes": kept}


def _rooted(results: Tensors) -> Tensors:
    """The results through which gradients flow."""
    return tuple(result for result in results if result.requires_grad)


class _Saved(saved_tensors_hooks):
    """Notes the memory of all that autograd saves while it is entered."""

    def __init__(self):
        self._sizes: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._sizes |= _storages([tensor])
        return tensor

    def beside(self, others: Iterable[torch.Tensor]) -> int:
        """Bytes of what was saved that is no memory of these tensors, each storage once."""
        return _beside(self._sizes, others)


def _watched(call: Callable[[], Tensors], read: list[torch.Tensor], gpu: bool) -> dict:
    kept = InputSnapshot(read)
    call()
    # Memory that the call has written over may already hold what it writes.
    kept.restore()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    if gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with warnings.catch_warnings(), profile(activities=activities, acc_events=True) as seen:
        warnings.simplefilter("ignore")
        outputs = [tensor for tensor in call() if tensor is not None]
        if gpu:
            torch.cuda.synchronize()
    fresh = _beside(_storages(outputs), read)
    entry = {"input_bytes": sum(_storages(read).values()), "output_bytes": fresh}
    entry["workspace_bytes"] = None
    if gpu:
        peak = torch.cuda.max_memory_allocated() - before
        entry["workspace_bytes"] = max(0, peak - fresh)
    kept.drop_unchanged()
    entry["overwritten_bytes"] = kept.nbytes
    entry["float32_precision"] = torch.get_float32_matmul_precision()
    return entry | counts(seen.events())


def counts(events: Iterable[FunctionEvent]) -> dict:
    """Launches, operations on memory, copies, casts, and the kernels by name, of some events."""
    operators: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    memory = 0
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CUDA:
            operators[event.name] += 1
        elif event.name.startswith(("Memcpy", "Memset")):
            memory += 1
        elif not event.is_user_annotation:
            kernels[event.name[:LETTERS]] += 1
    # If the driver permits no profiling, no launch is seen. A call without launches looks the same.
    seen = bool(kernels) or bool(memory)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return {
        "launches": kernels.total() if seen else None,
        "memory_ops": memory if seen else None,
        "copies": None if interpreted else operators[COPY],
        "casts": None if interpreted else operators[CAST],
        "kernels": dict(kernels.most_common(NAMED)),
    }


def _differentiated(op: Op, tensors: dict[str, torch.Tensor | None]) -> list[str]:
    return [
        name
        for name, tensor in tensors.items()
        if tensor is not None and op.inputs[name].grad and tensor.is_floating_point()
    ]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by address; those that lie in one storage count once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _beside(sizes: dict[int, int], others: Iterable[torch.Tensor]) -> int:
    known = _storages(others)
    return sum(size for address, size in sizes.items() if address not in known)

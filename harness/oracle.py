"""One cell of the verification: run an implementation, hold every tensor against the oracle."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness import inputs, tolerance
from harness.tolerance import Distance
from kernels._contract import Case, Op

# What a poisoned integer holds; floating tensors hold NaN.
SENTINEL = 77
FACTORIES = (
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
)
Named = dict[str, torch.Tensor]


class Wrong(Exception):
    """A result that no error figure describes: the message says what is wrong with it."""


@dataclass(frozen=True)
class Problem:
    """One case in one dtype, with all that a result is judged by.

    seeds: gradients of the outputs, None where the op has no backward pass. expected: tensors
    without data that have the shape and dtype of each result. oracle: the results in float64.
    eager: how far PyTorch eager is from the oracle, by result.
    """

    op: Op
    case: Case
    dtype: str
    tensors: Mapping[str, torch.Tensor | None]
    seeds: Sequence[torch.Tensor] | None
    expected: Named
    oracle: Named
    eager: Mapping[str, Distance]


def problem(op: Op, case: Case, dtype: str, seed: int, device: str, eager: Callable) -> Problem:
    """Draws the inputs, runs the float64 oracle and measures PyTorch eager against it.

    eager: the implementation whose error sets the bound. Where it raises, the reference in the
    cell's dtype takes its place; where that raises too, the floor alone is the bound.
    """
    shapes = inputs.make(op, case, dtype, seed, "meta")
    outputs = run(op, op.reference, case, shapes)
    seeds = inputs.gradients([torch.empty_like(o, device=device) for o in outputs.values()], seed)
    if "backward" not in op.passes:
        seeds = None
    expected = run(op, op.reference, case, shapes, _each(seeds, lambda t: t.to("meta")))
    tensors = inputs.make(op, case, dtype, seed, device)
    wide = {name: None if t is None else _wide(t) for name, t in tensors.items()}
    oracle = run(op, op.reference, case, wide, _each(seeds, _wide))
    del wide
    errors = {}
    for function in (eager, op.reference):
        try:
            result = run(op, function, case, tensors, seeds)
        except Exception:
            continue
        errors = {name: tolerance.distance(t, oracle[name]) for name, t in result.items()}
        break
    return Problem(op, case, dtype, tensors, seeds, expected, oracle, errors)


def run(
    op: Op,
    function: Callable,
    case: Case,
    tensors: Mapping[str, torch.Tensor | None],
    seeds: Sequence[torch.Tensor] | None = None,
) -> Named:
    """The results of one call by name: `out` (or `out0`, `out1`, …); with `seeds`, the gradients
    of the outputs, also `d<input>` for each input that has one.
    """
    wanted = [name for name, t in tensors.items() if t is not None and op.inputs[name].grad]
    leaves = {name: None if t is None else t.detach() for name, t in tensors.items()}
    if seeds is not None:
        for name in wanted:
            leaves[name].requires_grad_()
    with torch.set_grad_enabled(seeds is not None):
        result = function(**leaves, **op.arguments(case))
    outputs = result if isinstance(result, tuple) else (result,)
    for output in outputs:
        if not isinstance(output, torch.Tensor):
            raise Wrong(f"returns {type(output).__name__}, not a tensor")
    names = ["out"] if len(outputs) == 1 else [f"out{i}" for i in range(len(outputs))]
    named = {name: output.detach() for name, output in zip(names, outputs, strict=True)}
    if seeds is not None:
        found = torch.autograd.grad(outputs, [leaves[name] for name in wanted], seeds)
        named |= {f"d{name}": grad for name, grad in zip(wanted, found, strict=True)}
    return named


def check(function: Callable, problem: Problem, direction: str, ours: bool) -> tuple[str, list]:
    """The reason why a result is wrong ("" where it is right) and a report row per tensor.

    ours: memory is poisoned first, and a second call must give the same bits where the op is
    declared deterministic. Whatever the implementation raises passes through.
    """
    seeds = problem.seeds if direction == "backward" else None
    given = [t for t in (*problem.tensors.values(), *(seeds or ())) if t is not None]

    def call() -> Named:
        with poisoned() if ours else contextlib.nullcontext(), unchanged(given):
            return run(problem.op, function, problem.case, problem.tensors, seeds)

    try:
        result = call()
        _shaped(result, problem.expected, backward=seeds is not None)
        _separate(result, problem.tensors)
    except Wrong as wrong:
        return str(wrong), []
    verdicts = {
        name: tolerance.judge(
            tolerance.distance(tensor, problem.oracle[name]),
            problem.eager.get(name),
            tensor.dtype,
        )
        for name, tensor in result.items()
    }
    rows = [verdict.row(name) for name, verdict in verdicts.items()]
    worst = max(verdicts, key=lambda name: verdicts[name].ratio)
    if verdicts[worst].ratio > 1:
        return _explain(worst, verdicts[worst]), rows
    if ours and problem.op.deterministic:
        again = call()
        for name, tensor in result.items():
            if not torch.equal(_memory(tensor.clone()), _memory(again[name].clone())):
                return f"{name} differs between two calls", rows
    return "", rows


@contextlib.contextmanager
def unchanged(given: Sequence[torch.Tensor]) -> Iterator[None]:
    """Raises Wrong if the body changes a tensor, padding included; restores it in any case."""
    before = [_memory(tensor).clone() for tensor in given]
    changed = False
    try:
        yield
    finally:
        for tensor, old in zip(given, before, strict=True):
            if not torch.equal(_memory(tensor), old):
                _memory(tensor).copy_(old)
                changed = True
    if changed:
        raise Wrong("changes its inputs")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills what torch.empty and its kin return, so that an element left unwritten shows."""
    saved = [(owner, name, getattr(owner, name)) for owner, name in FACTORIES]
    for owner, name, factory in saved:
        setattr(owner, name, _poisoning(factory))
    try:
        yield
    finally:
        for owner, name, factory in saved:
            setattr(owner, name, factory)


def _poisoning(factory: Callable) -> Callable:
    def poisoned_factory(*args, **kwargs):
        fresh = factory(*args, **kwargs)
        floats = fresh.is_floating_point() or fresh.is_complex()
        with torch.no_grad():
            return fresh.fill_(math.nan if floats else SENTINEL)

    return poisoned_factory


def _shaped(result: Named, expected: Named, backward: bool) -> None:
    names = [name for name in expected if backward or name.startswith("out")]
    if list(result) != names:
        raise Wrong(f"returns {', '.join(result)}; expected {', '.join(names)}")
    for name, tensor in result.items():
        want = expected[name]
        if tensor.shape != want.shape or tensor.dtype != want.dtype:
            raise Wrong(
                f"{name} is {tuple(tensor.shape)} {tensor.dtype},"
                f" expected {tuple(want.shape)} {want.dtype}"
            )


def _separate(result: Named, tensors: Mapping[str, torch.Tensor | None]) -> None:
    for name, tensor in result.items():
        for other, given in tensors.items():
            if given is not None and tensor.numel() and _start(tensor) == _start(given):
                raise Wrong(f"{name} lies in the memory of the input {other}")


def _explain(name: str, verdict: tolerance.Verdict) -> str:
    if not math.isfinite(verdict.distance.max):
        return f"{name} has inf or NaN where the oracle has none, or none where it has"
    return f"{name} is {verdict.ratio:.3g} times as far from the oracle as the rule allows"


def _each(tensors: Sequence[torch.Tensor] | None, change: Callable) -> list | None:
    return None if tensors is None else [change(tensor) for tensor in tensors]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _start(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage, also those that the tensor does not cover."""
    empty = torch.tensor([], dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())

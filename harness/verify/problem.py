"""Makes the problem of a cell: its inputs, the float64 results, the error of PyTorch eager."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from harness import status
from harness.calls import guards, inputs, tolerance
from harness.calls.invoke import Named, run
from harness.calls.snapshot import InputSnapshot
from harness.calls.tolerance import Distance
from ops._spec import Case, Op

# Draws of rounded inputs from which the oracle's sensitivity is taken, and eager's luck.
ROUNDINGS = 4
# The share by which an input that lies aside differs at most.
FARTHEST = 1 / 16


@dataclass(frozen=True)
class Problem:
    """One case in one dtype, with all that a result is judged by.

    - seeds: gradients of the outputs, None where the op has no backward pass.
    - expected: tensors without data that have the shape and dtype of each result.
    - oracle: the results in float64, on the device of the inputs or on the CPU.
    - eager: the distance of PyTorch eager from the oracle, by result.
    - eager_fallback: the results of eager that are too far from the oracle to be judged by it
      alone, in float64.
    - scale: the size of the inputs, at most one.
    - rival: eager itself, None if it has no result.
    """

    op: Op
    case: Case
    dtype: str
    seed: int
    tensors: Mapping[str, torch.Tensor | None]
    seeds: Sequence[torch.Tensor] | None
    expected: Named
    oracle: Named
    eager: Mapping[str, Distance]
    eager_fallback: Named
    scale: float
    rival: Callable | None = None

    def given(self, pass_: str) -> list[torch.Tensor]:
        """Return the tensors that an implementation reads: inputs, then gradients of outputs."""
        seeds = None if pass_ == "forward" else self.seeds
        return [t for t in (*self.tensors.values(), *(seeds or ())) if t is not None]

    def decoys(self, pass_: str) -> Iterator[torch.Tensor]:
        """Yield tensors as `given`, with other values, each made as it is asked for."""
        seed = self.seed + 1
        for name, tensor in self.tensors.items():
            if tensor is not None:
                device = str(tensor.device)
                made = inputs.make(self.op, self.case, self.dtype, seed, device, only=name)
                yield made[name]
        if pass_ != "forward":
            yield from inputs.gradients(self.seeds, seed, self.case.layout)

    def judge(self, results: Named, strict: bool = True) -> dict[str, tolerance.Verdict]:
        """Judge each result by the rule of `harness.calls.tolerance`.

        strict: False if the oracle's sensitivity counts too, and eager's worst distance at nearby
        inputs. They take further runs of the oracle.
        """
        if strict:
            return self._verdicts(results, self.eager, {})
        found = self._verdicts(results, self.eager_worst_nearby, self.sensitivity)
        if all(verdict.ratio <= 1 for verdict in found.values()):
            return found
        return self._verdicts(results, self.eager_worst_aside, self.sensitivity)

    def _verdicts(
        self, results: Named, eager: Mapping[str, Distance], moved: Mapping[str, Distance]
    ) -> dict[str, tolerance.Verdict]:
        return {
            name: tolerance.judge(
                tolerance.distance(tensor, self.oracle[name], self.scale),
                eager.get(name),
                tensor.dtype,
                moved.get(name),
                self._distance_to_eager(name, tensor),
            )
            for name, tensor in results.items()
        }

    def _distance_to_eager(self, name: str, tensor: torch.Tensor) -> Distance | None:
        eager = self.eager_fallback.get(name)
        return None if eager is None else tolerance.distance(tensor, eager, self.scale)

    def violation(self, results: Named, pass_: str) -> str:
        """Return which of the op's properties random results lack, "" if they have all."""
        given = dict(self.tensors)
        if pass_ != "forward":
            given["dy"] = self.seeds[0]
        return self.op.properties(given, results, **self.op.arguments(self.case))

    @functools.cached_property
    def sensitivity(self) -> dict[str, Distance]:
        """The distance by which the oracle moves if each input that is not narrow is rounded in
        float32, by result."""
        worst = {}
        for draw in range(ROUNDINGS):
            rounded = functools.partial(_rounded, seed=self.seed + draw)
            moved, seeds = _changed(self.op, self.tensors, rounded), _each(self.seeds, rounded)
            for name, tensor in run(self.op, self.op.reference, self.case, moved, seeds).items():
                found = tolerance.distance(tensor, self.oracle[name], self.scale)
                worst[name] = tolerance.elementwise_max(worst.get(name, found), found)
        return worst

    @functools.cached_property
    def eager_worst_nearby(self) -> dict[str, Distance]:
        """The worst distance of eager from the oracle, by result: at these inputs, and at inputs of
        which each entry is the next number of its dtype, up or down.

        The gradients of the outputs are there multiplied by a number from 1 to 2, the same for all
        entries. The pass is linear in them, so its problem stays as ill-conditioned as it is.
        Sums that cancel are rounded otherwise, which one step would not change.
        """
        return self._worst_at(_neighbour, self.eager)

    @functools.cached_property
    def eager_worst_aside(self) -> dict[str, Distance]:
        """The same, also at inputs of which each entry is up to a sixteenth larger or smaller.

        If a function is flat, as tanh far from zero, its results at the next numbers are the same
        number. A gradient from that one is lucky at all of them.
        """
        return self._worst_at(_aside, self.eager_worst_nearby)

    def _worst_at(self, change: Callable, known: Mapping[str, Distance]) -> dict[str, Distance]:
        """The worst of the known distances and of those at some changed inputs."""
        worst = dict(known)
        for draw in range(ROUNDINGS if self.rival else 0):
            beside = {
                name: None if t is None else change(t, self.seed + draw)
                for name, t in self.tensors.items()
            }
            seeds = _each(self.seeds, functools.partial(_scaled, seed=self.seed + draw))
            seeds = _each(seeds, functools.partial(_neighbour, seed=self.seed + draw))
            wide = _changed(self.op, beside, _wide)
            oracle = run(self.op, self.op.reference, self.case, wide, _each(seeds, _wide))
            for name, tensor in run(self.op, self.rival, self.case, beside, seeds).items():
                found = tolerance.distance(tensor, oracle[name], self.scale)
                if math.isfinite(found.max):
                    worst[name] = tolerance.elementwise_max(worst[name], found)
        return worst


def problem(
    op: Op,
    case: Case,
    dtype: str,
    seed: int,
    device: str,
    eager: Callable,
    ones: bool = False,
    in_place: bool = False,
    spare: bool = False,
) -> Problem:
    """Draws the inputs, runs the float64 oracle and measures PyTorch eager against it.

    - eager: the implementation whose error sets the bound. If it raises, the reference in the
      cell's dtype takes its place. If that raises too, the floor alone is the bound. It is none
      if memory ran out, for others may have it for the moment: then this raises.
    - ones: the gradients of the outputs are one, as the pass "both" of a loss is timed.
    - in_place: eager may write over its inputs.
    - spare: keep the results of the oracle in the memory of the host, for the sake of the GPU's.
    """
    shapes = inputs.make(op, case, dtype, seed, "meta")
    outputs = run(op, op.reference, case, shapes)
    seeds = None
    if op.differentiable:
        blank = [torch.ones_like(output, device=device) for output in outputs.values()]
        seeds = blank if ones else inputs.gradients(blank, seed, case.layout)
    expected = run(op, op.reference, case, shapes, _each(seeds, lambda t: t.to("meta")))
    bands = guards.Bands()
    tensors = {
        name: bands.copy(t) if t is not None and t.numel() else t
        for name, t in inputs.make(op, case, dtype, seed, device).items()
    }
    wide = _changed(op, tensors, _wide)
    oracle = run(op, op.reference, case, wide, _each(seeds, _wide))
    del wide
    if spare:
        oracle = {name: tensor.cpu() for name, tensor in oracle.items()}
    kept = InputSnapshot(filter(_present, tensors.values()) if in_place else ())
    # Plain values are around one.
    scale = _scale(tensors.values()) if case.values else 1.0
    errors, eager_fallback, rival, starved = {}, {}, None, ""
    # Eager draws other random numbers than the reference does.
    for function in (op.reference,) if op.properties else (eager, op.reference):
        try:
            result = run(op, function, case, tensors, seeds)
        except Exception as error:
            # The text alone: an exception keeps the memory of its frames.
            starved = starved or (status.reason(error) if status.out_of_memory(error) else "")
            kept.restore()
            continue
        errors = {n: tolerance.distance(t, oracle[n], scale) for n, t in result.items()}
        eager_fallback = {
            n: _wide(t) for n, t in result.items() if tolerance.beyond_cap(errors[n], t)
        }
        kept.restore()
        guards.wipe(result.values(), keep=[*filter(_present, tensors.values()), *(seeds or ())])
        rival = function
        break
    else:
        if starved:
            raise MemoryError(f"neither eager nor the reference: {starved}")
    return Problem(
        op,
        case,
        dtype,
        seed,
        tensors,
        seeds,
        expected,
        oracle,
        errors,
        eager_fallback,
        scale,
        rival,
    )


def _changed(
    op: Op, tensors: Mapping[str, torch.Tensor | None], change: Callable
) -> dict[str, torch.Tensor | None]:
    """Return inputs of the oracle, each changed; one that it takes as it is stays."""
    return {
        name: t if t is None or op.inputs[name].narrow else change(t) for name, t in tensors.items()
    }


def _each(tensors: Sequence[torch.Tensor] | None, change: Callable) -> list | None:
    return None if tensors is None else [change(tensor) for tensor in tensors]


def _present(tensor: torch.Tensor | None) -> bool:
    return tensor is not None


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _rounded(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The tensor in float64, each entry off by up to half an ulp of float32."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(seed)
    noise = torch.rand(tensor.shape, generator=generator, device=tensor.device, dtype=torch.float64)
    return tensor.double() * (1 + (noise - 0.5) * torch.finfo(torch.float32).eps)


def _scaled(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The tensor times a number from 1 to 2 that the seed alone decides."""
    factor = 1 + torch.rand((), generator=torch.Generator().manual_seed(seed)).item()
    return (tensor.double() * factor).to(tensor.dtype)


def _neighbour(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The tensor with each entry one step of its dtype up or down; what has no such step stays.

    The share that goes up is drawn too. With a half of them a sum of many entries would hardly
    move. If eager rounds it without an error by chance, it would do so at each of these inputs.
    """
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(seed)
    share = torch.rand((), generator=generator, device=tensor.device)
    up = torch.rand(tensor.shape, generator=generator, device=tensor.device) < share
    step = torch.where(up, 1.0, -1.0).double() * torch.finfo(tensor.dtype).eps
    return (tensor.double() * (1 + step)).to(tensor.dtype)


def _aside(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """The tensor with each entry larger or smaller by a share from one step of its dtype to a
    sixteenth, whose logarithm is uniform."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator(tensor.device).manual_seed(seed)
    draw = functools.partial(torch.rand, tensor.shape, generator=generator, device=tensor.device)
    sign = torch.where(draw() < 0.5, 1.0, -1.0).double()
    step = torch.finfo(tensor.dtype).eps
    share = step * (FARTHEST / step) ** draw().double()
    return (tensor.double() * (1 + sign * share)).to(tensor.dtype)


def _scale(tensors: Sequence[torch.Tensor | None]) -> float:
    """The largest finite entry of all floating tensors, at most one; one where there is none."""
    largest = [
        t.double().nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        for t in tensors
        if t is not None and t.numel() and t.is_floating_point()
    ]
    return min(1.0, max(largest, default=0.0)) or 1.0

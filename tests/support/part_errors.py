"""How far each part of a stack lies from float64 within a training step, call by call.

The step runs with eager PyTorch's parts. Each call of a part is made again by the stack and by the
oracle in float64, on the same arguments and the same gradients of its results. So no call has the
errors of another one in its arguments, and a fault has the name of its part.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from harness.calls.tolerance import Verdict, distance, judge, same_bits
from network import flat, parts
from network.config import Config
from network.ops import _oracle
from network.parts import Parts
from network.stack import EAGER, Stack, load


@dataclass(frozen=True)
class PartError:
    """tensor: `out0`, `out1` of a result; `d0`, `d1` of the gradient of an argument, by place."""

    part: str
    call: int
    tensor: str
    verdict: Verdict

    def __str__(self) -> str:
        numbers = self.verdict
        return (
            f"{self.part}, call {self.call}, {self.tensor}: {numbers.ratio:.2f} of the bound,"
            f" rms {numbers.distance.rms:.1e} (eager {numbers.eager.rms:.1e}),"
            f" max {numbers.distance.max:.1e} (eager {numbers.eager.max:.1e})"
        )


def compared(stack: Stack, config: Config) -> list[tuple[str, ...]]:
    """Return the parts of a stack's own that training calls, in groups that one step compares.

    A part that holds two others stands by itself: with it the network does not call those.
    """
    own = [name for name in parts.used(config) if name in stack.own]
    fused = [name for name in own if name in parts.JOINED]
    return [tuple(name for name in own if name not in fused), *((name,) for name in fused)]


def part_errors(
    stack: Stack,
    names: tuple[str, ...],
    config: Config,
    weights: torch.Tensor,
    ids: torch.Tensor,
    targets: torch.Tensor,
) -> list[PartError]:
    """Return the errors of the named parts in a step of a network with flat weights [N].

    The worst come first: one of each part and tensor, from the call in which it is worst.
    """
    found: dict[tuple[str, str], PartError] = {}
    eager = _whole(load(EAGER).parts)
    three = {name: [getattr(x, name) for x in (eager, stack.parts, EXACT)] for name in names}
    watched = {name: _Watched(name, *each, found) for name, each in three.items()}
    model = flat.bound(config, load(EAGER).parts.with_parts(**watched), weights.clone())
    model(ids, targets).backward()
    return sorted(found.values(), key=lambda error: -error.verdict.ratio)


def _whole(found: Parts) -> Parts:
    """Return the same parts with joined ones that are made of two."""
    return found.with_parts(
        linear_gelu=lambda x, w, b=None: found.gelu(found.linear(x, w, b)),
        swiglu_mlp=lambda h, gate, up, down: found.linear(
            found.swiglu(found.linear(h, gate, None), found.linear(h, up, None)), down, None
        ),
    )


EXACT = _whole(_oracle.PARTS)


class _Watched:
    """A part of eager PyTorch whose calls are compared."""

    def __init__(self, name, eager, mine, exact, found):
        self.name, self.eager, self.mine, self.exact, self.found = name, eager, mine, exact, found
        self.calls = 0

    def __call__(self, *given):
        self.calls += 1
        results = _Call.apply(self, self.calls, given, *filter(_differentiable, given))
        return results if len(results) > 1 else results[0]

    def compare(self, call, given, results, gradients, seeds):
        """Note the errors of one call; results and gradients are eager PyTorch's."""
        eager = _named(results, gradients)
        exact, dtypes = _named(*_run(self.exact, given, seeds, torch.float64)), {}
        mine = _named(*_run(self.mine, given, seeds))
        for name, truth in exact.items():
            far, eagers = distance(mine[name], truth), distance(eager[name], truth)
            error = PartError(self.name, call, name, judge(far, eagers, mine[name].dtype))
            dtypes[name] = mine[name].dtype
            before = self.found.get((self.name, name))
            if before is None or error.verdict.ratio > before.verdict.ratio:
                self.found[self.name, name] = error
        expected = {name: tensor.dtype for name, tensor in eager.items()}
        if dtypes != expected:
            raise TypeError(f"{self.name}: {dtypes}, expected {expected}")


class _Call(torch.autograd.Function):
    """A call of a watched part, computed by eager PyTorch."""

    @staticmethod
    def forward(ctx, watched, call, given, *_):
        ctx.watched, ctx.call, ctx.given = watched, call, given
        ctx.leaves, ctx.roots = _forward(watched.eager, given)
        return tuple(root.detach().clone() for root in ctx.roots)

    @staticmethod
    def backward(ctx, *seeds):
        gradients = torch.autograd.grad(ctx.roots, ctx.leaves, seeds)
        roots = [root.detach() for root in ctx.roots]
        ctx.watched.compare(ctx.call, ctx.given, roots, gradients, seeds)
        return None, None, None, *gradients


def _differentiable(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _forward(part, given, dtype=None):
    """The floating arguments as leaves, in a dtype if one is given, and the results."""
    arguments = [
        x.detach().to(dtype or x.dtype).requires_grad_() if _differentiable(x) else x for x in given
    ]
    with torch.enable_grad():
        results = part(*arguments)
    return [x for x in arguments if _differentiable(x)], _several(results)


def _run(part, given, seeds, dtype=None):
    """The results, and the gradients of the floating arguments."""
    leaves, results = _forward(part, given, dtype)
    gradients = torch.autograd.grad(
        results, leaves, [seed.to(dtype or seed.dtype) for seed in seeds]
    )
    return [result.detach() for result in results], gradients


def _named(results, gradients):
    named = {f"out{index}": x for index, x in enumerate(results)}
    return named | {f"d{index}": x for index, x in enumerate(gradients)}


def gradients(
    parts_of: Parts | None, config: Config, weights: torch.Tensor, ids, targets
) -> dict[str, torch.Tensor]:
    """Return the gradient of each weight by name; without parts that of the oracle in float64."""
    if parts_of is None:
        model, rows = _oracle.network(config, weights.double()), 1
    else:
        model, rows = flat.bound(config, parts_of, weights.clone()), len(ids)
    # The oracle takes one sequence after the other, for the sake of memory.
    for some, wanted in zip(ids.split(rows), targets.split(rows), strict=True):
        loss = model(some, wanted)
        (loss if len(some) == len(ids) else loss * (len(some) / len(ids))).backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def gradient_error(
    found: dict[str, torch.Tensor], eager: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """Return the error of all gradients over the bound, and the weights that have most of it."""
    whole, eagers, truth = (
        torch.cat([x[name].flatten() for name in exact]) for x in (found, eager, exact)
    )
    ratio = judge(distance(whole, truth), distance(eagers, truth), whole.dtype).ratio
    apart = {
        name: [((x[name].double() - exact[name]).norm() / exact[name].norm()).item() for x in pair]
        for pair in [(found, eager)]
        for name in exact
    }
    worst = sorted(apart, key=lambda name: apart[name][1] / max(apart[name][0], 1e-30))[:5]
    return ratio, "; ".join(
        f"{name} {apart[name][0]:.1e} (eager {apart[name][1]:.1e})" for name in worst
    )


def restless(stack: Stack, call: Callable[[Stack], object]) -> dict[str, int]:
    """Return the parts that gave other bits in a second call on the same arguments, and how often.

    call: runs a network with the parts of the stack that it is given. Its parts are called twice
    each.
    """
    found: dict[str, int] = {}

    def twice(name, part):
        def run(*given):
            first, second = part(*given), part(*given)
            pairs = zip(_several(first), _several(second), strict=True)
            if not all(same_bits(one, other) for one, other in pairs):
                found[name] = found.get(name, 0) + 1
            return first

        return run

    watched = {
        name: twice(name, getattr(stack.parts, name))
        for name in parts.NAMES
        if getattr(stack.parts, name) is not None
    }
    call(dataclasses.replace(stack, parts=stack.parts.with_parts(**watched)))
    return found


def _several(results):
    return results if isinstance(results, tuple) else (results,)

"""A stack by its name: the parts of its file, and PyTorch's for all that the file has not.

The presence of `network/stacks/<name>.py` is its registration. Such a file has `PARTS`, callables
by the names of `network.parts.Parts`, and `COMPILE = True` if torch.compile takes the network. It
may have `OPTIMIZER`, which `network.train.TrainStep` takes in place of PyTorch's AdamW, and
`GRAPH = False` if no CUDA graph holds a training step of it.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import torch

from network import parts as part_names
from network import stacks
from network.config import Config
from network.model import Transformer
from network.parts import Parts
from network.probe import reasons

EAGER = "torch_eager"
# The update of the weights, which a stack may have beside its parts.
OPTIMIZER = "optimizer"
# Between a stack and the one part of ours in it: `torch_compile_with_rms_norm`.
WITH = "_with_"


class Unavailable(Exception):
    """The library of a stack is not installed here, or a part of it cannot do what is asked."""


@dataclass(frozen=True)
class Stack:
    """Parts with a name.

    Fields:
        own: the names of those that are not PyTorch's in eager mode.
        compiled: torch.compile takes the network.
        taken: the names that `with_parts_of` has put in, "optimizer" among them.
        optimizer: what `TrainStep` takes as such; None for PyTorch's AdamW.
        graph: whether a CUDA graph can hold a training step.
    """

    name: str
    parts: Parts
    own: tuple[str, ...]
    compiled: bool = False
    taken: tuple[str, ...] = ()
    optimizer: Callable | None = None
    graph: bool = True

    def with_parts_of(self, other: "Stack", *names: str) -> "Stack":
        """Return this stack with the named parts of another; ValueError if it has none of them.

        The result's name says both: `torch_eager+ours.rms_norm`.
        """
        offered = [*other.own, *([OPTIMIZER] if other.optimizer else [])]
        for name in names:
            if name not in offered:
                raise ValueError(
                    f"stack {other.name}: has no {name} of its own, expected one of {offered}"
                )
        taken = {name: getattr(other.parts, name) for name in names if name != OPTIMIZER}
        for joined, those in part_names.JOINED.items():
            # A joined part of the former stack must not hide a part that is put in.
            if taken.keys() & set(those):
                taken.setdefault(joined, None)
        return dataclasses.replace(
            self,
            name="+".join([self.name, *(f"{other.name}.{name}" for name in names)]),
            parts=self.parts.with_parts(**taken),
            own=tuple(sorted({*self.own, *names} - {OPTIMIZER})),
            optimizer=other.optimizer if OPTIMIZER in names else self.optimizer,
            taken=tuple(sorted({*self.taken, *names})),
            graph=self.graph and other.graph,
        )

    def require(self, config: Config, training: bool, **where: object) -> None:
        """Raise Unavailable, which names the parts that cannot do what the network asks of them.

        training: with gradients, a loss and dropout, else without. where: dtype and device.
        """
        if found := self.lacks(config, training, **where):
            raise Unavailable(
                f"stack {self.name}: "
                + "; ".join(f"{name} cannot ({why})" for name, why in found.items())
            )

    def lacks(self, config: Config, training: bool, **where: object) -> dict[str, str]:
        """Return why parts of this stack's own cannot serve, by part; tried on a few numbers."""
        return reasons(self.parts, self.own, config, training, **where)

    def build(
        self,
        config: Config,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Transformer:
        """Return a network with weights of this seed; torch.compile will take it if it is to."""
        with torch.device(device):
            model = Transformer(config, self.parts, seed).to(dtype)
        if self.compiled:
            # A number that changes, as the tokens in a cache do, becomes a symbol by itself. With
            # `dynamic=False` each decoded token would be a program, and after eight none.
            model.compile()
        return model


def names() -> list[str]:
    """Return the names of all stacks, sorted."""
    found = (module.name for module in pkgutil.iter_modules(stacks.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def load(name: str) -> Stack:
    """Return a stack; `torch_eager_with_rms_norm` is one with that part of ours.

    ValueError if no file has its name, Unavailable if its library is absent.
    """
    if name not in names() and WITH in name:
        over, _, part = name.partition(WITH)
        return one_part(part, over=over)
    if name not in names():
        raise ValueError(f"stack {name!r}: no such file in network/stacks/; there are {names()}")
    try:
        module = importlib.import_module(f"network.stacks.{name}")
    except ImportError as error:
        raise Unavailable(f"stack {name}: {error}; install its library") from error
    eager = importlib.import_module(f"network.stacks.{EAGER}").PARTS
    own = {} if name == EAGER else getattr(module, "PARTS", {})
    if unknown := sorted(set(own) - set(part_names.NAMES)):
        raise ValueError(f"network/stacks/{name}.py: PARTS has {unknown}, which no network calls")
    return Stack(
        name,
        Parts(**eager | own),
        tuple(sorted(own)),
        getattr(module, "COMPILE", False),
        optimizer=getattr(module, "OPTIMIZER", None),
        graph=getattr(module, "GRAPH", True),
    )


def one_part(part: str, stack: str = "ours", over: str = EAGER) -> Stack:
    """Return the stack `over` with one part of another; errors as `load` and ValueError."""
    return load(over).with_parts_of(load(stack), part)


def able(stack: Stack, config: Config, training: bool, **where: object) -> Stack:
    """Return PyTorch's stack with those parts of a stack that can do what the network asks.

    Only parts that the network calls are taken, so the name of the result says which those are.
    """
    lacking = stack.lacks(config, training, **where)
    wanted = part_names.used(config, training)
    taken = [name for name in stack.own if name in wanted and name not in lacking]
    taken += [OPTIMIZER] if training and stack.optimizer else []
    return load(EAGER).with_parts_of(stack, *taken)


def ladder(
    stack: Stack, config: Config, training: bool, over: str = EAGER, **where: object
) -> list[Stack]:
    """Return stacks from `over` to the given one, each with one part more than the one before.

    They are the parts that `able` takes, in the order in which `Parts` names them; the optimizer
    follows. Those that join others come last: what they gain is over parts of the same stack.
    """
    taken, rungs = able(stack, config, training, **where).taken, [load(over)]
    plain = [name for name in part_names.NAMES if name not in part_names.JOINED]
    for name in (*plain, OPTIMIZER, *part_names.JOINED):
        if name in taken:
            rungs.append(rungs[-1].with_parts_of(stack, name))
    return rungs

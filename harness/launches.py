"""Which kernels a kernel file launches, and with what: its launchers run without data."""

import contextlib
import importlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from triton.runtime.jit import JITFunction

from harness import inputs, load, oracle
from harness.command import UserError
from kernels._contract import Case, Configs, Op


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its arguments by name, num_warps and the like among them."""

    kernel: JITFunction
    arguments: Mapping[str, object]
    op: Op
    case: Case
    dtype: str
    default: bool = True

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def config(self) -> str:
        """The constant arguments and the compiler's options: "BLOCK_M=128 num_warps=8"."""
        variable = {param.name for param in self.kernel.params if not param.is_constexpr}
        return " ".join(f"{k}={v}" for k, v in self.arguments.items() if k not in variable)


def of_file(stem: str, dtypes: Sequence[str]) -> list[Launch]:
    """The launches that the ops of a kernel file make, those of default configurations first.

    For each set of flags the first, the middle and the last case of the sweep are run in `dtypes`;
    further cases only where they reach a kernel that these do not. Candidates are launched in the
    case that stands for their kernel. Raises UserError for a kernel that no case launches.
    """
    module = importlib.import_module(f"kernels.{stem}")
    values = list(vars(module).values())
    ops = [value for value in values if isinstance(value, Op)]
    missing = _entries(
        v for v in values if isinstance(v, JITFunction) and v.module == module.__name__
    )
    found = [launch for op in ops for launch in _sampled(op, dtypes)]
    missing -= {launch.name for launch in found}
    for op in ops:
        for case, dtype in itertools.product((*op.sweep, *op.edge), dtypes):
            if missing:
                found += [x for x in launched(op, case, dtype) if x.name in missing]
                missing -= {launch.name for launch in found}
    if missing:
        raise UserError(
            f"kernels/{stem}.py: no case of any op launches {', '.join(sorted(missing))};"
            " add such a case or remove the kernel"
        )
    standing = models(found, dtypes)
    for configs in values:
        if isinstance(configs, Configs):
            found += _candidates(configs, standing[configs.kernel.fn.__name__])
    return found


def launched(op: Op, case: Case, dtype: str) -> list[Launch]:
    """The launches of our implementation for a case, with the backward pass if the op has one."""
    tensors = inputs.make(op, case, dtype, 0, "meta")
    function = load.function(op.name, load.OURS)
    shapes = oracle.run(op, op.reference, case, tensors).values()
    seeds = inputs.gradients(tuple(shapes), 0) if "backward" in op.passes else None
    with recorded() as calls:
        oracle.run(op, function, case, tensors, seeds)
    return [Launch(kernel, arguments, op, case, dtype) for kernel, arguments in calls]


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[JITFunction, dict[str, object]]]]:
    """Lists the launches of the body, which launches nothing."""
    calls = []

    def record(kernel, *args, grid, warmup, **kwargs):
        calls.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | kwargs))

    launch, JITFunction.run = JITFunction.run, record
    try:
        yield calls
    finally:
        JITFunction.run = launch


def _sampled(op: Op, dtypes: Sequence[str]) -> Iterator[Launch]:
    for flags, dtype in itertools.product(dict.fromkeys(c.flags for c in op.sweep), dtypes):
        cases = [c for c in op.sweep if c.flags == flags and dtype in op.dtypes_of(c)]
        for index in sorted({0, len(cases) // 2, len(cases) - 1}) if cases else ():
            yield from launched(op, cases[index], dtype)


def _entries(kernels: Iterator[JITFunction]) -> set[str]:
    """The names of the kernels that no other one calls."""
    kernels = list(kernels)
    called = {name for kernel in kernels for name in kernel.fn.__code__.co_names}
    return {kernel.fn.__name__ for kernel in kernels} - called


def models(found: Sequence[Launch], dtypes: Sequence[str]) -> dict[str, Launch]:
    """By kernel the launch that stands for it: the last default one in the first dtype it has."""
    defaults = [launch for launch in found if launch.default]
    return {x.name: x for dtype in reversed(dtypes) for x in defaults if x.dtype == dtype}


def _candidates(configs: Configs, model: Launch) -> Iterator[Launch]:
    for candidate in configs.candidates:
        # The launcher itself must see the candidate: blocks of tensor descriptors follow from it.
        with _choosing(configs, candidate):
            calls = launched(model.op, model.case, model.dtype)
        for launch in calls:
            if launch.name == model.name:
                arguments = {**launch.arguments, **candidate}
                yield replace(launch, arguments=arguments, default=False)


@contextlib.contextmanager
def _choosing(configs: Configs, candidate: Mapping[str, int]) -> Iterator[None]:
    rule = configs.choose
    # The declaration is frozen for kernel files, not for a build that asks "what if".
    object.__setattr__(configs, "choose", lambda *args, **key: candidate)
    try:
        yield
    finally:
        object.__setattr__(configs, "choose", rule)

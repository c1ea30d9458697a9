"""Which kernels a kernel file launches, and with what: its launchers run without data."""

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from triton.runtime.jit import JITFunction

from harness.calls import inputs, invoke
from harness.cli import UserError
from harness.project import registry
from harness.project.implementations import OURS
from kernels._runtime import device as _device
from kernels._runtime.call_cache import uncached
from kernels._runtime.configs import Config, Configs
from kernels._runtime.launch_guard import shapes_only
from ops._spec import Case, Op


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel: its arguments by name, num_warps and the like among them.

    key: what the launcher asked the kernel's `Configs` with; empty where it has none. grid: how
    many programs there are along each axis.
    """

    kernel: JITFunction
    arguments: Mapping[str, object]
    op: Op
    case: Case
    dtype: str
    default: bool = True
    key: Mapping[str, object] = field(default_factory=dict)
    grid: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def config(self) -> str:
        """The constant arguments and the compiler's options: "BLOCK_M=128 num_warps=8"."""
        variable = {param.name for param in self.kernel.params if not param.is_constexpr}
        return " ".join(f"{k}={v}" for k, v in self.arguments.items() if k not in variable)


def of_file(
    stem: str,
    dtypes: Sequence[str],
    tried: Mapping[str, Sequence[Config]] | None = None,
    every: bool = True,
) -> list[Launch]:
    """The launches that the ops of a kernel file make, those of default configurations first.

    For each set of flags the first, the middle and the last case of the sweep are run in `dtypes`.
    Further cases and dtypes, and a small device, are run only if they reach a kernel that these do
    not.

    - tried: by kernel the configurations to launch beside the default ones, all candidates where it
      is left out, each in the case that stands for its kernel.

    Raises UserError for a kernel that no case launches, unless not `every` one need be, as where an
    architecture has no use for some.
    """
    module = registry.kernel(stem)
    values = list(vars(module).values())
    ops = registry.declared(stem)
    missing = _entries(
        v for v in values if isinstance(v, JITFunction) and v.module == module.__name__
    )
    missing |= {configs.name for configs in declared(stem)}
    found = [launch for op in ops for launch in _sampled(op, dtypes)]
    missing -= {launch.name for launch in found}
    # A device of one multiprocessor lets no programs wait for each other, so it needs the kernels
    # that launchers have for that.
    for limits, op in itertools.product(({}, {"sm_count": 1}), ops):
        cases = (*op.sweep, *op.edge)
        rest = ((case, dtype) for case in cases for dtype in op.dtypes_of(case))
        for case, dtype in (*itertools.product(cases, dtypes), *rest):
            if missing:
                with _device.assume_device(**limits):
                    made = launched(op, case, dtype)
                found += [x for x in made if x.name in missing]
                missing -= {launch.name for launch in found}
    if missing and every:
        raise UserError(
            f"kernels/{stem}.py: no case of any op launches {', '.join(sorted(missing))};"
            " add such a case or remove the kernel"
        )
    for each in declared(stem):
        configs = each.candidates if tried is None else tried.get(each.name, ())
        found += _candidates(each, configs, found, dtypes)
    return found


def declared(stem: str) -> list[Configs]:
    """The `Configs` that a kernel file and the folder beside it declare, in their order."""
    values = list(vars(registry.kernel(stem)).values())
    for name in sorted(sys.modules):
        if name.startswith(f"kernels.{stem}_details."):
            values += vars(sys.modules[name]).values()
    found = [value for value in values if isinstance(value, Configs) and value.family == stem]
    return list(dict.fromkeys(found))


def launched(op: Op, case: Case, dtype: str, backward: bool = True) -> list[Launch]:
    """The launches of our implementation for a case, with the backward pass if the op has one.

    backward: whether that pass is wanted.
    """
    tensors = inputs.make(op, case, dtype, 0, "meta")
    function, seeds = registry.function(op.name, OURS), None
    if backward and op.differentiable:
        shapes = invoke.run(op, op.reference, case, tensors).values()
        seeds = inputs.gradients(tuple(shapes), 0)
    with recorded() as calls, _asked(declared(registry.op(op.name)[1])) as keys:
        invoke.run(op, function, case, tensors, seeds)
    found = [
        Launch(kernel, arguments, op, case, dtype, key=keys.get(kernel.fn.__name__, {}), grid=grid)
        for kernel, arguments, grid in calls
    ]
    if seeds is not None:
        # The forward pass may launch another kernel if no gradient is wanted.
        names = {launch.name for launch in found}
        alone = launched(op, case, dtype, backward=False)
        found += [launch for launch in alone if launch.name not in names]
    return found


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[JITFunction, dict[str, object], tuple[int, ...]]]]:
    """Lists kernel, arguments and grid of each launch of the body, which launches nothing."""
    calls = []

    def record(kernel, *args, grid, warmup, **kwargs):
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        calls.append((kernel, arguments, tuple(grid(arguments) if callable(grid) else grid)))

    launch, JITFunction.run = JITFunction.run, record
    try:
        with uncached(), shapes_only():
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
    """By kernel the launch that stands for it: the last default one in the first dtype it has.

    dtypes: the first ones, others follow.
    """
    defaults = [launch for launch in found if launch.default]
    order = dict.fromkeys((*dtypes, *(launch.dtype for launch in defaults)))
    return {x.name: x for dtype in reversed(order) for x in defaults if x.dtype == dtype}


def _candidates(
    configs: Configs, tried: Sequence[Config], found: Sequence[Launch], dtypes: Sequence[str]
) -> list[Launch]:
    own = [launch for launch in found if launch.name == configs.name]
    launches = []
    for candidate in tried:
        suited = [launch for launch in own if configs.suits(candidate, **launch.key)]
        model = models(suited or own, dtypes)[configs.name]
        for launch in trial(configs, candidate, model.op, model.case, model.dtype):
            arguments = {**launch.arguments, **candidate}
            launches.append(replace(launch, arguments=arguments, default=False))
    return launches


def trial(
    configs: Configs, candidate: Mapping[str, int], op: Op, case: Case, dtype: str
) -> list[Launch]:
    """The launches of one kernel for a case if it is to use a candidate."""
    # The launcher itself must see the candidate: blocks of tensor descriptors follow from it.
    with choosing(configs, lambda **key: candidate):
        return [x for x in launched(op, case, dtype) if x.name == configs.name]


@contextlib.contextmanager
def choosing(configs: Configs, rule: Callable[..., Mapping[str, int]]) -> Iterator[None]:
    """Within the body another rule chooses where no table does; no call is made by plan."""
    before = configs.choose
    # The declaration is frozen for kernel files, not for a build that asks "what if".
    object.__setattr__(configs, "choose", rule)
    try:
        with uncached():
            yield
    finally:
        object.__setattr__(configs, "choose", before)


@contextlib.contextmanager
def picking(configs: Configs, config: Config) -> Iterator[None]:
    """Within the body a kernel has one configuration, whatever its rule and tables say.

    Calls that are made by plan do not ask for it; see `uncached`.
    """
    object.__setattr__(configs, "pick", lambda device, **key: config)
    try:
        yield
    finally:
        object.__delattr__(configs, "pick")


@contextlib.contextmanager
def launches(*kernels: object) -> Iterator[list[Callable]]:
    """List the launches of these kernels in the body, each as a function that repeats it."""
    calls: list[Callable] = []
    plain = {kind: kind.run for kind in set(map(type, kernels))}
    own = {kind for kind in plain if "run" in vars(kind)}

    def watching(launch: Callable) -> Callable:
        def run(kernel, *args, **kwargs):
            if any(kernel is each for each in kernels):
                calls.append(lambda: launch(kernel, *args, **kwargs))
            return launch(kernel, *args, **kwargs)

        return run

    for kind, launch in plain.items():
        kind.run = watching(launch)
    try:
        yield calls
    finally:
        for kind, launch in plain.items():
            if kind in own:
                kind.run = launch
            else:
                # A copy would hide what others put in the place of the inherited one.
                del kind.run


@contextlib.contextmanager
def _asked(every: Sequence[Configs]) -> Iterator[dict[str, dict[str, object]]]:
    """Notes by kernel the key that the body asked a configuration for."""
    keys = {}

    def noting(configs: Configs, rule: Callable) -> Callable:
        def choose(**key):
            keys[configs.name] = key
            return rule(**key)

        return choose

    with contextlib.ExitStack() as stack:
        for configs in every:
            stack.enter_context(choosing(configs, noting(configs, configs.choose)))
        yield keys

"""Finds the keys for which the kernels of a file are tuned, and the candidates that can run.

No GPU takes part. Launchers run on tensors without data, with the limits of the GPU that will time
them. Candidates are compiled ahead of time into the compiler's cache.
"""

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from harness.build import recorder
from harness.build.recorder import Launch
from harness.project import registry
from harness.tune.search import TuningKey
from kernels._runtime import device as _device
from kernels._runtime.configs import Config, Configs
from ops._spec import ITEMSIZE, Op

DIED = "the compiler died"


def keys_in_sweep(
    stem: str, dtypes: Sequence[str], passes: Sequence[str], most: int | None, limits: Mapping
) -> list[TuningKey]:
    """Return the keys that the sweeps of a file's ops reach, in the order of its `Configs`.

    If several cases have one key, the case that moves the most bytes stands for it, in the first of
    `dtypes`. A key without a choice is left out. most: the number of cases of each sweep that
    count, None for all. limits: those of `kernels._runtime.device.assume_device`.
    """
    found: dict[tuple, tuple[float, Launch, str]] = {}
    with _device.assume_device(**limits):
        for op in registry.declared(stem):
            for case, dtype in itertools.product(op.sweep[:most], dtypes):
                if dtype in op.dtypes_of(case):
                    for pass_, launch in _launches(op, case, dtype, passes):
                        cost = op.cost(case, pass_, ITEMSIZE[dtype])
                        size = cost.bytes_read + cost.bytes_written
                        name = launch.name, *launch.key.items()
                        if name not in found or size > found[name][0]:
                            found[name] = size, launch, pass_
        return [
            tuning_key
            for configs in recorder.declared(stem)
            for _, launch, pass_ in found.values()
            if launch.name == configs.name
            if len((tuning_key := _tuning_key(configs, launch, pass_)).candidates) > 1
        ]


def _launches(op: Op, case, dtype: str, passes: Sequence[str]):
    """The launches that ask for a configuration, each with the pass it belongs to."""
    forward = recorder.launched(op, case, dtype, backward=False)
    if "forward" in passes:
        yield from (("forward", launch) for launch in forward if launch.key)
    further = [name for name in op.passes if name in passes and name != "forward"]
    if further:
        names = {launch.name for launch in forward}
        for launch in recorder.launched(op, case, dtype):
            if launch.key and launch.name not in names:
                yield further[0], launch


def _tuning_key(configs: Configs, launch: Launch, pass_: str) -> TuningKey:
    rule = dict(configs.choose(**launch.key))
    candidates = [dict(each) for each in configs.candidates if configs.suits(each, **launch.key)]
    if rule not in candidates:
        candidates.insert(0, rule)
    return TuningKey(
        configs.name,
        launch.key,
        launch.op.name,
        launch.case.name,
        launch.dtype,
        pass_,
        tuple(candidates),
        candidates.index(rule),
    )


def rejected_candidates(
    stem: str, tuning_keys: Sequence[TuningKey], arch: str, limits: Mapping, jobs: int
) -> list[dict[int, str]]:
    """Return for each key the candidates that do not compile or do not fit, with the reason.

    Candidates of several keys that give the same binary are compiled once, in `jobs` processes.
    """
    binaries: dict[tuple, tuple] = {}
    users: dict[tuple, list[tuple[int, int]]] = {}
    reasons: list[dict[int, str]] = [{} for _ in tuning_keys]
    with _device.assume_device(**limits):
        for number, tuning_key in enumerate(tuning_keys):
            for index, candidate in enumerate(tuning_key.candidates):
                try:
                    binary = _binary(_trial(stem, tuning_key, candidate))
                except Exception as error:
                    reasons[number][index] = _reason(error)
                    continue
                binaries.setdefault(binary, (stem, tuning_key, candidate, arch, dict(limits)))
                users.setdefault(binary, []).append((number, index))
    for binary, reason in zip(binaries, _in_processes(list(binaries.values()), jobs), strict=True):
        for number, index in users[binary] if reason else ():
            reasons[number][index] = reason
    return reasons


def _trial(stem: str, tuning_key: TuningKey, candidate: Config) -> Launch:
    op, _ = registry.op(tuning_key.op)
    case = next(each for each in op.sweep if each.name == tuning_key.case)
    [configs] = [x for x in recorder.declared(stem) if x.name == tuning_key.kernel]
    return recorder.trial(configs, candidate, op, case, tuning_key.dtype)[0]


def _binary(launch: Launch) -> tuple:
    """Return the properties of a launch that decide which program the compiler makes of it."""

    def kind(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.dtype
        if isinstance(value, int) and not isinstance(value, bool):
            return value == 1, value % 16 == 0, value.bit_length() > 31
        if hasattr(value, "block_shape"):
            return value.base.dtype, *value.block_shape
        return type(value)

    variable = {param.name for param in launch.kernel.params if not param.is_constexpr}
    kinds = ((k, kind(v)) for k, v in launch.arguments.items() if k in variable)
    return launch.name, launch.config, *sorted(kinds, key=lambda pair: pair[0])


def _in_processes(tasks: Sequence[tuple], jobs: int) -> list[str]:
    """Return the reason of each task; run the tasks of a broken pool alone to find the culprit."""
    context = get_context("spawn")

    def run(some: Sequence[tuple], workers: int) -> list[Future]:
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            return [pool.submit(_compile, *task) for task in some]

    outcomes = run(tasks, min(jobs, len(tasks))) if tasks else []
    reasons = []
    for task, outcome in zip(tasks, outcomes, strict=True):
        if isinstance(outcome.exception(), BrokenProcessPool):
            [outcome] = run([task], 1)
        broken = isinstance(outcome.exception(), BrokenProcessPool)
        reasons.append(DIED if broken else outcome.result())
    return reasons


def _compile(
    stem: str, tuning_key: TuningKey, candidate: Config, arch: str, limits: Mapping
) -> str:
    """Compile one candidate into the cache; return why it cannot be launched, "" if it can."""
    os.environ.pop("TRITON_INTERPRET", None)
    from harness.build import compiler

    try:
        with _device.assume_device(**limits):
            kernel = compiler.compile(_trial(stem, tuning_key, candidate), arch)
    except Exception as error:
        return _reason(error)
    shared, limit = kernel.metadata.shared, limits["shared_bytes"]
    return f"{shared} bytes of shared memory, {limit} fit" if shared > limit else ""


def _reason(error: BaseException) -> str:
    from harness.build import compiler

    return compiler.root(error)

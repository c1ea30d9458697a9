"""Times the candidates of one kernel on the GPU, in a process of its own.

The op runs once with each candidate; its results must be those of the rule's choice. Then the
launches of the one kernel, with the arguments of that run, are captured and timed alone.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping

import torch

from harness import status
from harness.build import recorder
from harness.calls import guards, inputs, invoke, tolerance
from harness.calls.snapshot import InputSnapshot
from harness.machine.timer import Timer
from harness.project import registry
from harness.project.implementations import OURS
from harness.tune import messages
from kernels._runtime import configs as _tuned
from kernels._runtime import device as _device
from kernels._runtime.configs import Configs


class TuneWorker:
    """See the module. op: the stem of a kernel file; impl is not used."""

    requests = messages.REQUESTS
    version = ""

    def __init__(self, op: str, impl: str, seed: int):
        # A table would take the choice out of the tuner's hands.
        os.environ[_tuned.MODE] = ""
        self._configs = {each.name: each for each in recorder.declared(op)}
        self._seed = seed
        self._timer = Timer()
        self._forget()

    def describe(self) -> messages.Device:
        """Describe the GPU."""
        device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        hip = torch.version.hip is not None
        limits = {
            "sm_count": _device.sm_count(device),
            "shared_bytes": _device.shared_bytes(device),
            "hip": hip,
        }
        arch = f"{properties.major}{properties.minor}"
        return messages.Device(
            device=torch.cuda.get_device_name(device),
            arch=properties.gcnArchName.partition(":")[0] if hip else arch,
            limits=limits,
        )

    def prepare(
        self, op: str, case: str, dtype: str, pass_: str, kernel: str, index: int, config: dict
    ) -> None:
        """Run, check and capture one candidate; the first of a key is the rule's choice."""
        wanted = (op, case, dtype, pass_, kernel)
        with torch.cuda.stream(self._timer.stream), _declining():
            if wanted != self._prepared_for:
                self._open(*wanted)
            with _watched(self._configs[kernel], config) as calls, guards.guarded() as bands:
                results = self._run()
                torch.cuda.synchronize()
            if beside := bands.broken():
                raise status.Inaccurate(beside)
            if self._expected is None:
                self._expected = results
            else:
                _compare(results, self._expected)
            del results
            replay, _ = self._timer.capture(lambda: [call() for call in calls])
            # The calls hold the tensors that the graph reads and writes.
            self._replays[index] = replay, calls

    def block(self, index: int, calls: int) -> messages.LaunchTime:
        """Take the median GPU time in µs of `calls` launches on a cold L2."""
        replay, _ = self._replays[index]
        return messages.LaunchTime(self._timer.cold([replay], calls)[0])

    def _open(self, op: str, case: str, dtype: str, pass_: str, kernel: str) -> None:
        self._forget()
        gc.collect()
        torch.cuda.empty_cache()
        declared, _ = registry.op(op)
        timed = next(each for each in declared.sweep if each.name == case)
        function, in_place = registry.function(op, OURS), registry.in_place(op, OURS)
        tensors = inputs.make(declared, timed, dtype, self._seed, "cuda")
        seeds = None
        if pass_ != "forward":
            shapes = inputs.make(declared, timed, dtype, self._seed, "meta")
            outputs = invoke.run(declared, declared.reference, timed, shapes).values()
            empty = [torch.empty_like(output, device="cuda") for output in outputs]
            seeds = inputs.gradients(empty, self._seed)
        kept = InputSnapshot(filter(torch.is_tensor, tensors.values()) if in_place else ())

        def run() -> dict[str, torch.Tensor]:
            kept.restore()
            results = invoke.run(declared, function, timed, tensors, seeds)
            # The next run writes over what this one has returned.
            return {k: t.clone() for k, t in results.items()} if in_place else results

        self._run = run
        self._prepared_for = (op, case, dtype, pass_, kernel)

    def _forget(self) -> None:
        self._prepared_for: tuple | None = None
        self._run: Callable[[], dict] | None = None
        self._expected: dict[str, torch.Tensor] | None = None
        self._replays: dict[int, tuple] = {}


@contextlib.contextmanager
def _watched(configs: Configs, config: Mapping[str, int]) -> Iterator[list[Callable]]:
    """Has the body launch a kernel with this configuration; lists its launches, to be repeated."""
    choosing = recorder.choosing(configs, lambda **key: config)
    with recorder.launches(configs.kernel) as calls, choosing:
        yield calls


@contextlib.contextmanager
def _declining() -> Iterator[None]:
    """Turn an exception into a refusal of the candidate; a fault of the GPU ends the worker."""
    try:
        yield
        torch.cuda.synchronize()
    except status.Inaccurate:
        raise
    except Exception as error:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise error from None
        if status.out_of_memory(error):
            raise
        raise status.Unsupported(status.reason(error)) from error


def _compare(results: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    for name, result in results.items():
        if torch.equal(result, expected[name]):
            continue
        distance = tolerance.distance(result, expected[name])
        ratio = tolerance.judge(distance, None, result.dtype).ratio
        if not ratio <= 1:
            raise status.Inaccurate(
                f"{name} is {ratio:.3g} times as far from that of the rule's choice as it may be"
            )

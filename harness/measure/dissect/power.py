"""How the time of a step, the clock and the energy go on in the first seconds after a rest."""

import functools
import time
from collections.abc import Iterator, Sequence

import torch

from harness.machine import nvml
from harness.measure.dissect.steps import Row, Steps, attempted, release

# Seconds without work, after which a board is faster for a while.
REST_S = 5.0


def step_power(steps: Steps, stacks: Sequence[str], count: int) -> Iterator[Row]:
    """Time so many steps of each stack, one after the other, after a rest."""
    for name in stacks:
        about = steps.about | {"stack": name}
        yield from attempted(functools.partial(_after_rest, steps, name, count), about, steps.gpu)
        release(steps.gpu)


def _after_rest(steps, name, count):
    step, gpu = steps.step(steps.fit(name)), steps.gpu
    # Libraries compile in the first call, and the optimizer makes its state.
    for _ in range(2):
        step()
    _reached(_mark(gpu), gpu)
    time.sleep(REST_S if gpu else 0.0)
    sampler = nvml.NvmlSampler()
    marks, readings, before = [_mark(gpu)], [], sampler.energy_mj()

    def read(mark):
        _reached(mark, gpu)
        readings.append(sampler.sample() | {"energy_mj": sampler.energy_mj()})

    for number in range(count):
        step()
        marks.append(_mark(gpu))
        # The step after it runs meanwhile, for a reading takes milliseconds.
        if number:
            read(marks[number])
    read(marks[count])
    for number, reading in enumerate(readings):
        energy_mj = reading["energy_mj"]
        yield {
            "call": number,
            "us": 1e6 * _seconds(marks[number], marks[number + 1], gpu),
            "at_s": _seconds(marks[0], marks[number + 1], gpu),
            "sm_mhz": reading.get("sm_mhz"),
            "energy_j": None if None in (energy_mj, before) else (energy_mj - before) / 1e3,
        }


def _mark(gpu):
    """Return a place in the stream of the GPU, or a time of the host."""
    if not gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _reached(mark, gpu):
    if gpu:
        mark.synchronize()


def _seconds(begin, end, gpu):
    return begin.elapsed_time(end) / 1e3 if gpu else end - begin

"""Questions to a training step: one function a CSV file, each a generator of its rows."""

import functools
import random
import statistics
from collections.abc import Iterator, Sequence

import torch

from harness.measure.dissect.steps import (
    Row,
    Steps,
    attempted,
    median_us,
    peak_of,
    release,
    seconds,
)
from network import alone, parity, stack, text, trace
from network.config import undropped

EAGER, OURS = "torch_eager", "ours"
# Profiles of a step, and steps in a block of the ladder.
PROFILES, IN_BLOCK = 3, 2
# How many times as long as a step its parts may take in a profile. One GPU runs them in turn, so
# this leaves room for its clock alone.
ROOM = 1.05
# Calls of a part alone that follow one another. In a step the host begins the next call before the
# GPU has done this one. A single call would hold the host's time, which the step does not.
IN_A_ROW = 10
# µs by part and pass.
Shares = dict[tuple[str, str], float]


def step_parts(steps: Steps, stacks: Sequence[str], times: int) -> Iterator[Row]:
    """The time of each part and pass of a step, by a profile."""
    for name in stacks:
        about = steps.about | {"stack": name}
        yield from attempted(functools.partial(_parts, steps, name, times), about, steps.gpu)
        release(steps.gpu)


def _parts(steps, name, times):
    used = steps.fit(name)
    whole = median_us(steps.step(used), steps.gpu, times)
    step = steps.step(trace.named(used))
    step()
    found = typical([trace.shares(step, steps.gpu) for _ in range(PROFILES)])
    if steps.gpu:
        within(found, whole)
    for (part, pass_), us in sorted(found.items()):
        yield {"part": part, "pass": pass_, "us": us, "step_us": whole}


def typical(profiles: Sequence[Shares]) -> Shares:
    """Return the median over profiles: one of them may be disturbed."""
    # A part that a profile lacks took no time in it.
    return {
        key: statistics.median(found.get(key, 0.0) for found in profiles)
        for key in set().union(*profiles)
    }


def within(found: Shares, whole: float) -> None:
    """Raises RuntimeError if the parts take longer than the step: their profile is wrong."""
    if (total := sum(found.values())) > ROOM * whole:
        (part, pass_), us = max(found.items(), key=lambda item: item[1])
        raise RuntimeError(
            f"a profile has {total:.0f} us of parts in a step of {whole:.0f} us, the most in"
            f" {part} {pass_}: {us:.0f} us"
        )


def parts_alone(steps: Steps, times: int, names: Sequence[str] = (EAGER, OURS)) -> Iterator[Row]:
    """The time of each part by itself, forward and backward, over all its calls in a step."""
    watched, uses = alone.watched(steps.fit(EAGER))
    steps.step(watched)()
    del watched
    for name in names:
        used = steps.fit(name)
        for part, found in uses.items():
            about = steps.about | {"stack": name, "part": part}
            if name != EAGER and part not in used.own:
                continue
            each = functools.partial(_alone, getattr(used.parts, part), found, times, steps.gpu)
            yield from attempted(each, about, steps.gpu)
        if name == EAGER or stack.OPTIMIZER in used.taken:
            about = steps.about | {"stack": name, "part": stack.OPTIMIZER}
            each = functools.partial(_updates, steps, used, times)
            yield from attempted(each, about, steps.gpu)
            release(steps.gpu)


def _alone(part, found, times, gpu):
    us = 0.0
    for use in found.values():
        us += use.calls * median_us(alone.step_of(part, use), gpu, times, IN_A_ROW)
    yield {"calls": sum(use.calls for use in found.values()), "us": us}


def _updates(steps, used, times):
    yield {"calls": 1, "us": median_us(steps.update(used), steps.gpu, times, IN_A_ROW)}


def step_ladder(steps: Steps, over: str, blocks: int, seed: int) -> Iterator[Row]:
    """The time of a step as the parts of ours are put in one after the other, in turn."""
    rungs = steps.ladder(OURS, over)
    order, ready = random.Random(seed), {}
    for number, rung in enumerate(rungs):
        about = steps.about | {"over": over, "rung": number, "stack": rung.name}
        about["part"] = rung.name.rpartition(".")[2] if number else ""
        step = steps.step(rung)
        first = attempted(functools.partial(_first, step, steps.gpu), about, steps.gpu)
        if first[0]["status"] == "ok":
            ready[number] = step, first[0]
        else:
            yield first[0]
    for block in range(blocks):
        for number in order.sample(sorted(ready), len(ready)):
            step, about = ready[number]
            step()
            us = sum(seconds(step, steps.gpu) for _ in range(IN_BLOCK)) / IN_BLOCK * 1e6
            yield about | {"block": block, "us": us}


def _first(step, gpu):
    step()
    yield {"peak_mem_bytes": peak_of(step, gpu)}


def step_memory(
    preset: str, lengths: Sequence[int], stacks: Sequence[str], dtype: str, gpu: bool, times: int
) -> Iterator[Row]:
    """Peak memory and time of a step on one sequence, over its length, until memory runs out."""
    for name in stacks:
        for length in lengths:
            about = {"preset": preset, "batch": 1, "length": length, "dtype": dtype, "stack": name}
            one = functools.partial(_memory, preset, length, name, dtype, gpu, times)
            (row,) = attempted(one, about, gpu)
            yield row
            release(gpu)
            if row["status"] != "ok":
                break


def _memory(preset, length, name, dtype, gpu, times):
    steps = Steps(preset, 1, length, dtype, gpu)
    step = steps.step(steps.fit(name))
    step()
    yield {"peak_mem_bytes": peak_of(step, gpu), "us": median_us(step, gpu, times)}


def loss_parity(
    preset: str,
    batch: int,
    length: int,
    count: int,
    stacks: Sequence[str],
    dtype: str,
    gpu: bool,
    seeds: Sequence[int] = (0, 1, 2),
) -> Iterator[Row]:
    """The loss of each step of training: PyTorch from each seed, each stack from the first."""
    words, config = text.english(), undropped(preset)
    tokens = text.as_bytes(words).to("cuda" if gpu else "cpu")
    batches = text.Batches(tokens, batch, length)
    wanted = [(EAGER, seed) for seed in seeds]
    wanted += [(name, seeds[0]) for name in stacks if name != EAGER]
    for name, seed in wanted:
        about = {"preset": preset, "batch": batch, "length": length, "dtype": dtype}
        about |= {"stack": name, "seed": seed, "text_sha256": text.digest(words)}
        run = functools.partial(_losses, name, config, batches, count, seed, dtype)
        yield from attempted(run, about, gpu)
        release(gpu)


def _losses(name, config, batches, count, seed, dtype):
    from network import calls

    kind, device = getattr(torch, dtype), batches.tokens.device
    used = calls.fit(stack.load(name), config, True, kind, device)
    curve = parity.losses(used, config, batches, count, seed, dtype=kind)
    for number, loss in enumerate(curve):
        yield {"step": number, "loss": loss}

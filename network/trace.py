"""The time of a step, part by part: a profile of PyTorch reduced to the parts of the network.

Each part runs under a name. The profiler keeps the name above every operation of the forward pass,
and the number of the autograd node that the operation made. The backward pass of that node has the
same number, so its time goes to the same part. An operation without a part, such as the sum of two
gradients, is `other`. A compiled network has no parts in its profile: all of it is `other`.

Each kernel counts once, for the operation that launched it. The profiler's own sums by operation
can count some twice. It finds the operation by a number, which a call of CUDA may share
(pytorch/pytorch#196282). It also takes a range of kernels under a label for one more kernel.
"""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from network.parts import NAMES
from network.profile_names import PREFIX, operation
from network.stack import Stack

OTHER = "other"
# A call of CUDA's runtime or driver. Its number is no operation's, though both may be the same.
CUDA_CALL = re.compile(r"cu(da)?[A-Z]")


def named(stack: Stack) -> Stack:
    """Return the same stack with each part under its name in a profile."""
    wrapped = {name: _under(name, getattr(stack.parts, name)) for name in NAMES}
    return dataclasses.replace(stack, parts=stack.parts.with_parts(**wrapped))


def _under(name, part):
    if part is None:
        return None

    @functools.wraps(part)
    def run(*given):
        with operation(name):
            return part(*given)

    return run


def shares(step: Callable[[], object], on_gpu: bool) -> dict[tuple[str, str], float]:
    """Run a step once and return µs by part and pass: ("rms_norm", "backward").

    Args:
        step: of a network whose stack is `named`. Run it before, so that nothing is compiled or
            allocated for the first time.
        on_gpu: the times are those of the GPU, else those of the host.
    """
    _set_up(on_gpu)
    with profile(activities=_activities(on_gpu), acc_events=True) as found:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    events = found.events()
    if on_gpu:
        return reduced(events, on_device(found.profiler.kineto_results.events()))
    return reduced(events, {event.id: event.self_cpu_time_total for event in events})


def _activities(on_gpu):
    return [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])


@functools.cache
def _set_up(on_gpu):
    """Profile something once: the first profile of a process holds the set-up of the profiler."""
    with profile(activities=_activities(on_gpu), acc_events=True):
        torch.ones(1, device="cuda" if on_gpu else "cpu").add_(1)
        if on_gpu:
            torch.cuda.synchronize()


def on_device(records: Iterable) -> dict[int, float]:
    """Return µs on the GPU by the number of the operation that launched the work.

    records: those of the profiler, as it got them: kernels, copies, fills, labels and the host's.
    """
    spent: dict[int, float] = collections.defaultdict(float)
    for record in records:
        if record.device_type() == DeviceType.CUDA and not record.is_user_annotation():
            spent[record.linked_correlation_id()] += record.duration_ns() / 1e3
    return spent


def reduced(events: Iterable, spent: dict[int, float]) -> dict[tuple[str, str], float]:
    """Return the time of a profile's events by part and pass, without zeros.

    spent: the time of each operation, by its number. The time of an unknown one is `other`.
    """
    events = [
        event
        for event in events
        if event.device_type == DeviceType.CPU and not CUDA_CALL.match(event.name)
    ]
    owners = {event.id: _part_above(event) for event in events}
    nodes = {event.id: _number_above(event) for event in events}
    made = {}
    # An operation without a node bears the number of the next node, so the last one counts.
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.sequence_nr >= 0 and nodes[event.id] is None:
            made[event.sequence_nr] = owners[event.id]
    sums: dict[tuple[str, str], float] = collections.defaultdict(float)
    for number, us in spent.items():
        if us:
            node = nodes.get(number)
            # A joined part has the names of others within, in both passes.
            part = owners.get(number) or made.get(node)
            sums[part or OTHER, "forward" if node is None else "backward"] += us
    return dict(sums)


def _above(event):
    while event is not None:
        yield event
        event = event.cpu_parent


def _part_above(event):
    found = (each.name for each in _above(event) if each.name.startswith(PREFIX))
    return next(found, "").removeprefix(PREFIX)


def _number_above(event):
    """The number of the autograd node whose backward pass an event is in, or None."""
    engine = "autograd::engine::evaluate_function"
    found = (each.sequence_nr for each in _above(event) if each.name.startswith(engine))
    return next(found, None)

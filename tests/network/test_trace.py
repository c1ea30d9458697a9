"""A profile reduced to parts: forward by name, backward by the number of the autograd node."""

from types import SimpleNamespace

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from network import stack, trace
from network.config import preset
from network.parts import used
from network.profile_names import operation
from network.train import TrainStep
from tests.support.networks import built, plain, tokens


def event(name, spent, start, number=-1, above=None, device=DeviceType.CPU):
    return SimpleNamespace(
        id=start, name=name, spent=spent, sequence_nr=number, cpu_parent=above,
        device_type=device, time_range=SimpleNamespace(start=start),
    )  # fmt: skip


def times(events):
    return {event.id: event.spent for event in events if event.device_type == DeviceType.CPU}


def record(us, linked, device=DeviceType.CUDA, label=False):
    return SimpleNamespace(
        device_type=lambda: device, duration_ns=lambda: 1e3 * us,
        linked_correlation_id=lambda: linked, is_user_annotation=lambda: label,
    )  # fmt: skip


def test_the_backward_pass_of_a_node_belongs_to_the_part_that_made_it():
    gate, norm = event("part.swiglu", 0, 1), event("part.rms_norm", 0, 4)
    engine = "autograd::engine::evaluate_function: "
    of_mul, of_add = (
        event(engine + "MulBackward0", 2, 7, 0),
        event(engine + "AddBackward0", 1, 9, 1),
    )
    events = [
        gate,
        event("aten::mul", 5, 2, 0, gate),
        # It makes no node, and bears the number of the sum outside all parts.
        event("aten::detach", 3, 3, 1, gate),
        norm,
        event("aten::add", 7, 6, 1),
        of_mul,
        event("aten::mul", 11, 8, -1, of_mul),
        of_add,
        event("aten::add", 13, 10, -1, of_add),
        event("a kernel", 99, 11, device=DeviceType.CUDA),
    ]
    assert trace.reduced(events[::-1], times(events)) == {
        ("swiglu", "forward"): 8,
        ("swiglu", "backward"): 13,
        ("other", "forward"): 7,
        ("other", "backward"): 14,
    }


def test_names_within_a_joined_part_count_in_both_passes():
    outer = event("part.swiglu_mlp", 0, 1)
    made = event("_SwigluMLP", 0, 2, 5, above=outer)
    node = event("autograd::engine::evaluate_function: _SwigluMLPBackward", 0, 9, 5)
    events = [outer, made, node]
    for start, above in ((3, made), (10, node)):
        inner = event("part.swiglu", 0, start, above=above)
        events += [inner, event("a kernel", start, start + 1, above=inner)]
        events.append(event("a copy", 1, start + 2, above=above))
    assert trace.reduced(events, times(events)) == {
        ("swiglu", "forward"): 3,
        ("swiglu", "backward"): 10,
        ("swiglu_mlp", "forward"): 1,
        ("swiglu_mlp", "backward"): 1,
    }


def test_each_kernel_counts_once_for_the_operation_that_launched_it():
    gate = event("part.swiglu", 0, 1)
    # A call of CUDA after the part may have the number of an operation within.
    call = event("cudaDeviceSynchronize", 0, 2)
    events = [gate, event("aten::mul", 0, 2, above=gate), call]
    label, host = record(50, 2, label=True), record(60, 2, DeviceType.CPU)
    found = trace.on_device([record(5, 2), label, record(7, 2), record(3, 1), record(4, 0), host])
    assert found == {2: 12, 1: 3, 0: 4}
    assert trace.reduced(events, found) == {("swiglu", "forward"): 15, ("other", "forward"): 4}


def test_the_records_of_a_profile_answer_what_is_asked_of_them():
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        torch.ones(2)
    records = found.profiler.kineto_results.events()
    assert records and trace.on_device(records) == {}
    assert {found.linked_correlation_id() for found in records} == {0}
    assert all(found.duration_ns() > 0 for found in records)


def test_each_part_of_a_step_has_its_share():
    config, eager = preset("tiny"), stack.load("torch_eager")
    model = built(config, trace.named(eager))
    step, (ids, targets) = TrainStep(model), tokens()
    step(ids, targets)
    found = trace.shares(lambda: step(ids, targets), on_gpu=False)
    called = {name for name in used(config) if getattr(eager.parts, name) is not None}
    assert {part for part, _ in found} == called | {"optimizer", "clip", "other"}
    both = {part for part, direction in found if direction == "backward"}
    assert both == called | {"other"}
    assert all(spent > 0 for spent in found.values())


def test_a_name_changes_no_number():
    ids, _ = tokens()
    eager = stack.load("torch_eager")
    with torch.no_grad():
        for kind in ("tiny", "tiny-gpt2"):
            expected = built(plain(kind), eager)(ids)
            assert torch.equal(built(plain(kind), trace.named(eager))(ids), expected)


def test_a_name_is_an_operation_to_which_the_profiler_gives_kernels():
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found, operation("a"):
        torch.ones(2)
    (event,) = (event for event in found.events() if event.name == "part.a")
    # Not that of a user's label, which gets none.
    assert event.activity_type == "cpu_op"


def test_a_compiled_function_has_no_break_at_a_name():
    def doubled(x):
        with operation("a"):
            return 2 * x

    compiled = torch.compile(doubled, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2, 2]

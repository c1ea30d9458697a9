"""Check the ledger: the probe on calls whose contents are known, and the rows that it makes."""

from types import SimpleNamespace

import pytest
import torch

from harness.project import registry
from harness.results import columns
from harness.summarize.ledger import rows as ledger_rows
from harness.verify import call_profile, ledger
from harness.verify.messages import CallProfiles
from harness.workers.messages import Failure
from ops._spec import Cost, Op, Tensor, make_case

CASE = make_case(M=64, N=32)
OP = Op(
    "fake",
    lambda x: x,
    {"x": Tensor("M N")},
    lambda *a: Cost(0, 0, 0),
    (),
    (CASE,),
    passes=("forward", "backward", "both"),
)
BYTES = 64 * 32 * 2
GPU, CPU = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU


def seen(function, pass_):
    return call_profile.observe(OP, function, CASE, "float16", pass_, 1, "cpu")


class _Squared(torch.autograd.Function):
    """Keep a copy in float32 for the backward pass."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.float(), x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        wide = gradient.float() * ctx.saved_tensors[0]
        return (wide + wide).half()


def squared(x):
    # Not each PyTorch that runs these tests takes named arguments here.
    return _Squared.apply(x)


def test_a_plain_call_copies_nothing():
    entry = seen(lambda x: x + x, "forward")
    assert (entry["input_bytes"], entry["output_bytes"]) == (BYTES, BYTES)
    assert (entry["copies"], entry["casts"], entry["saved_bytes"]) == (0, 0, None)
    assert entry["launches"] is entry["memory_ops"] is entry["workspace_bytes"] is None
    assert entry["float32_precision"] == torch.get_float32_matmul_precision()


def test_a_change_of_layout_is_a_copy_and_one_of_dtype_also_a_cast():
    turned = seen(lambda x: x.t().contiguous(), "forward")
    assert (turned["copies"], turned["casts"]) == (1, 0)
    wide = seen(lambda x: x.float().half(), "forward")
    assert (wide["copies"], wide["casts"]) == (2, 2)


def test_saved_tensors_count_beside_inputs_and_outputs():
    assert seen(squared, "backward")["saved_bytes"] == 2 * BYTES
    # A softmax keeps its output, which the caller has anyway.
    assert seen(lambda x: x.softmax(-1), "backward")["saved_bytes"] == 0


def test_the_backward_pass_alone_is_watched():
    entry = seen(squared, "backward")
    # The forward pass casts as well, and is not counted.
    assert (entry["casts"], entry["output_bytes"]) == (2, BYTES)
    assert seen(squared, "both")["casts"] == 3


def test_a_result_that_is_a_view_of_an_input_takes_no_memory():
    assert seen(lambda x: x.t(), "forward")["output_bytes"] == 0


def test_the_interpreter_copies_on_its_own_account(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert seen(lambda x: x.t().contiguous(), "forward")["copies"] is None


def event(name, device=GPU, annotation=False):
    return SimpleNamespace(name=name, device_type=device, is_user_annotation=annotation)


def test_launches_are_counted_apart_from_copies_and_fills():
    events = [
        event("k"),
        event("k"),
        event("other"),
        event("Memcpy DtoD"),
        event("Memset (Device)"),
    ]
    events += [event("range", annotation=True), event("aten::copy_", CPU), event("aten::mul", CPU)]
    found = call_profile.counts(events)
    assert (found["launches"], found["memory_ops"]) == (3, 2)
    assert (found["copies"], found["casts"]) == (1, 0)
    assert found["kernels"] == {"k": 2, "other": 1}


def cell(name, dtype="float16", kind="edge", status="ok", pass_="forward", **more):
    return {"case": name, "dtype": dtype, "kind": kind, "status": status, "pass": pass_} | more


def test_the_first_timed_case_is_looked_at_and_without_one_the_largest_edge_case():
    units = {
        0: [cell("M1-N1")],
        1: [cell("M64-N32")],
        2: [cell("M640-N320-padded")],
        3: [cell("M640-N320", status="inaccurate")],
        4: [cell("M0-N900")],
        5: [cell("M4-N4", "float32")],
        6: [cell("M8-N8", "float32", "sweep")],
        7: [cell("M9-N9", "float32", "sweep")],
    }
    assert ledger.chosen(units) == [1, 6]
    assert ledger.chosen(dict(reversed(units.items()))) == [1, 6]


def test_a_worker_that_is_lost_is_asked_no_more():
    asked = []

    def ask(request):
        asked.append(request.unit)
        return Failure("hung", "no answer within 1 s")

    units = {0: [cell("M1", "float16")], 1: [cell("M1", "float32")]}
    (entry,) = ledger.take(units, {"accumulates": "float32", "settings": "plain"}, ask)
    assert asked == [0]
    assert (entry["status"], entry["reason"]) == ("hung", "no answer within 1 s")
    assert (entry["accumulates"], entry["settings"]) == ("float32", "plain")


def test_an_entry_holds_what_its_pass_showed():
    units = {0: [cell("M1"), cell("M1", pass_="backward")]}
    answer = CallProfiles({"forward": {"copies": 1}, "backward": {"copies": 2}})
    entries = ledger.take(units, {}, lambda request: answer)
    assert [(one["pass"], one["copies"], one["reason"]) for one in entries] == [
        ("forward", 1, ""),
        ("backward", 2, ""),
    ]


def report(**more):
    cells = [
        cell("M1", deterministic=True),
        cell("M2", deterministic=False),
        cell("M3", status="oom"),
    ]
    same = {"op": "fake", "impl": "lib", "impl_version": "1", "mode": "gpu", "cells": cells}
    return same | more


def raw(reason, block=0):
    row = {"op": "fake", "impl": "lib", "pass": "forward", "dtype": "float16", "device_us": 1.0}
    return row | {"reason": reason, "block": block}


def test_a_row_joins_the_entry_the_cells_and_the_times():
    entry = {"pass": "forward", "dtype": "float16", "launches": 3, "kernels": {"k": 2, "j": 1}}
    (row,) = ledger_rows([report(ledger=[entry])], {"fake": "toy"}, {"fake": [raw("")]})
    assert (row["launches"], row["kernels"]) == (3, "2 x k; 1 x j")
    assert (row["deterministic"], row["timed_by"], row["family"]) == (False, "graph", "toy")
    assert set(row) <= set(columns.LEDGER.header)


def test_a_report_from_before_the_ledger_says_what_it_can():
    measured = {"fake": [raw("events: no"), raw("")]}
    (row,) = ledger_rows([report()], {}, measured)
    assert row["timed_by"] == "events and graph"
    assert "launches" not in row


def test_the_dtype_of_sums_is_what_the_file_declares(monkeypatch):
    module = __import__("baselines.torch_eager", fromlist=["x"])
    monkeypatch.setattr(module, "ACCUMULATES", {"dot": "float32"}, raising=False)
    assert registry.accumulates("dot", "torch_eager") == "float32"
    monkeypatch.setattr(module, "ACCUMULATES", {})
    assert registry.accumulates("dot", "torch_eager") is None


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_an_exception_of_an_implementation_passes_through(pass_):
    def declines(x):
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        seen(declines, pass_)


@pytest.mark.gpu
def test_on_a_gpu_launches_and_workspace_are_seen():
    def sums_twice(x):
        wide = x.float()
        return (wide + wide).half()

    entry = call_profile.observe(OP, sums_twice, CASE, "float16", "forward", 1, "cuda")
    assert (entry["launches"], entry["copies"], entry["casts"]) == (3, 2, 2)
    # Both intermediate tensors are of float32, and the first is still there beside the second.
    assert entry["workspace_bytes"] >= 2 * BYTES
    assert sum(entry["kernels"].values()) == 3

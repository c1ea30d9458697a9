"""A training step taken apart on the CPU: each question gives rows of its table."""

import importlib
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from harness.machine import environment, gpu_lock
from harness.measure.dissect import __main__ as command
from harness.measure.dissect import steps as clock
from harness.measure.dissect import subjects
from harness.measure.dissect.steps import Steps, attempted, median_us
from network import alone, stack
from network.parts import JOINED, used
from tests.support.dissected import written

ROOT = Path(__file__).parents[2]
EAGER = ("torch_eager",)


@pytest.fixture
def steps():
    return Steps("tiny", 2, 12, "float32", gpu=False)


def test_a_profile_holds_every_part(steps, tmp_path):
    found = written(tmp_path, "step_parts", subjects.step_parts(steps, EAGER, 1))
    # PyTorch joins none.
    called = set(used(steps.config)) - JOINED.keys()
    assert set(found["part"]) >= called | {"optimizer", "clip"}
    assert (found["us"] > 0).all() and found["step_us"].nunique() == 1


def test_a_disturbed_profile_does_not_count():
    rest, loss = ("rotary", "forward"), ("loss", "backward")
    profiles = [{rest: 3.0, loss: 1.0}, {rest: 90.0}, {rest: 4.0, loss: 2.0}]
    assert subjects.typical(profiles) == {rest: 4.0, loss: 1.0}


def test_parts_that_take_longer_than_their_step_are_an_error():
    found = {("rotary", "forward"): 60.0, ("loss", "backward"): 44.0}
    subjects.within(found, 100.0)
    with pytest.raises(RuntimeError, match=r"104 us .* of 90 us.* rotary forward: 60 us"):
        subjects.within(found, 90.0)


def test_calls_in_a_row_are_begun_before_the_gpu_is_waited_for(monkeypatch):
    seen = []
    monkeypatch.setattr(clock, "_wait", lambda gpu: seen.append("wait"))
    median_us(lambda: seen.append("call"), True, 2, in_a_row=3)
    row = ["wait", "call", "call", "call", "wait"]
    assert seen == ["call", *row, *row]


def test_the_time_of_a_call_in_a_row_is_the_mean(monkeypatch):
    monkeypatch.setattr(clock, "seconds", lambda call, gpu: 6.0)
    assert median_us(lambda: None, False, 3, in_a_row=4) == 1.5e6


def test_the_optimizer_alone_clips_and_moves_the_weights(steps):
    update, weights = steps.update(steps.fit("torch_eager")), steps._tensors["weights"]
    before = weights.clone()
    update()
    assert ((weights - before).abs() > 0).all()


def test_parts_alone_run_as_often_as_in_a_step(steps, tmp_path):
    rows = subjects.parts_alone(steps, 1, EAGER)
    found = written(tmp_path, "parts_alone", rows).set_index("part")
    # Two layers with two norms each, and the last one; seven products a layer.
    assert found.loc["rms_norm", "calls"] == 5 and found.loc["linear", "calls"] == 14
    assert found.loc["optimizer", "calls"] == 1
    assert (found["us"] > 0).all() and (found["status"] == "ok").all()


def test_a_part_alone_gets_the_arguments_and_gradients_of_the_step(steps):
    watched, uses = alone.watched(steps.fit("torch_eager"))
    steps.step(watched)()
    (use,) = uses["swiglu"].values()
    gate, up = use.given
    assert gate.shape == (2, 12, 96) and gate.requires_grad and gate.is_leaf and use.calls == 2
    gradients = alone.step_of(watched.parts.swiglu, use)()
    assert [x.shape for x in gradients] == [gate.shape, up.shape]
    # Rows of different weights are uses of their own.
    shapes = {use.given[1].shape for use in uses["linear"].values()}
    assert shapes == {(64, 64), (32, 64), (96, 64), (64, 96)}


def test_each_rung_of_the_ladder_takes_its_turn(steps, tmp_path, monkeypatch):
    eager = stack.load("torch_eager")
    mine = stack.Stack("mine", eager.parts, ("rms_norm", "swiglu"))
    plain = stack.load
    monkeypatch.setattr(subjects, "OURS", "mine")
    monkeypatch.setattr(stack, "load", lambda name: mine if name == "mine" else plain(name))
    rows = subjects.step_ladder(steps, "torch_eager", 3, seed=0)
    found = written(tmp_path, "step_ladder", rows)
    assert found.groupby("rung")["block"].apply(list).tolist() == [[0, 1, 2]] * 3
    parts = found.drop_duplicates("rung").sort_values("rung")["part"].fillna("")
    assert parts.tolist() == ["", "rms_norm", "swiglu"]


def test_torch_compile_forgets_the_shapes_of_each_length(monkeypatch):
    """Else the code of the second length would be for all lengths, and take another memory."""
    forgotten = []
    importlib.import_module("torch._dynamo")
    monkeypatch.setattr(torch.compiler, "reset", lambda: forgotten.append(1))
    assert len(list(subjects.step_memory("tiny", (8, 16), EAGER, "float32", False, 1))) == 2
    assert len(forgotten) == 2


def test_memory_ends_where_it_runs_out(tmp_path, monkeypatch):
    plain = subjects._memory

    def short(preset, length, *more):
        if length > 16:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return plain(preset, length, *more)

    monkeypatch.setattr(subjects, "_memory", short)
    rows = subjects.step_memory("tiny", (8, 16, 32, 64), EAGER, "float32", False, 1)
    found = written(tmp_path, "step_memory", rows)
    assert found["status"].tolist() == ["ok", "ok", "oom"]
    assert found["us"].isna().tolist() == [False, False, True]


def test_losses_of_all_seeds_and_of_a_stack_that_is_absent(tmp_path):
    names = ("torch_eager", "flash_attn_2")
    rows = subjects.loss_parity("tiny", 2, 12, 4, names, "float32", False, seeds=(0, 1))
    found = written(tmp_path, "loss_parity", rows)
    ok = found[found["status"] == "ok"]
    assert ok.groupby("seed")["step"].apply(list).tolist() == [[0, 1, 2, 3]] * 2
    assert (ok["loss"] > 4).all() and ok["loss"].nunique() == 8
    assert found.loc[found["stack"] == "flash_attn_2", "status"].isin(["ok", "unavailable"]).all()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (ValueError("stack xformers: attention cannot"), "unsupported"),
        (stack.Unavailable("stack liger: no module"), "unavailable"),
        (RuntimeError("an illegal access"), "crashed"),
    ],
)
def test_a_failure_is_a_row(error, expected):
    def rows():
        yield {"us": 1.0}
        raise error

    (row,) = attempted(rows, {"stack": "a"}, gpu=False)
    assert row["status"] == expected and "us" not in row and row["reason"]


@pytest.mark.no_gpu
def test_the_command_runs_ours_through_the_interpreter(tmp_path):
    out = tmp_path / "losses.csv"
    words = ["loss_parity", "--preset", "tiny", "--batch", "1", "--length", "8", "--steps", "2"]
    words += ["--dtype", "float32", "--stacks", "ours", "--out", str(out)]
    call = [sys.executable, "-m", "harness.measure.dissect", *words]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = pd.read_csv(out)
    assert (found["status"] == "ok").all()
    commit, dirty = environment.revision(ROOT)
    assert set(found["commit"]) == {commit + "-dirty" * dirty}
    assert found[["gpu", "board"]].isna().all(axis=None)
    losses = found[found["seed"] == 0].pivot(index="step", columns="stack", values="loss")
    assert losses["ours"].tolist() == pytest.approx(losses["torch_eager"].tolist(), rel=1e-4)


def test_rows_of_a_gpu_name_it_and_its_board(driver, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "_rows", lambda options, gpu: [{"op": "matmul", "status": "ok"}])
    out = tmp_path / "ladder.csv"
    words = ["dissect", "matmul_ladder", "--cells", "M1-N1-K1.forward", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    command.main()
    (gpu,) = gpu_lock.gpus()
    row = pd.read_csv(out).iloc[0]
    assert (row["op"], row["gpu"], row["board"]) == ("matmul", gpu.name, gpu.uuid)


def test_the_log_tells_what_is_done_before_the_next_begins(capsys):
    def rows():
        for stack_name, length in (("liger", 8), ("liger", 16), ("ours", 8)):
            for _ in range(2):
                yield {"stack": stack_name, "length": length, "status": "ok"}
            assert f"stack {stack_name} length {length}: ok" in capsys.readouterr().out

    assert len(list(command._told("step_memory", rows()))) == 6


def test_the_log_tells_a_group_of_rows_once(capsys):
    rows = [{"stack": "ours", "rung": rung, "status": "oom"} for rung in (0, 1, 0, 1, 0)]
    assert list(command._told("step_ladder", iter(rows))) == rows
    assert capsys.readouterr().out.count("\n") == 2

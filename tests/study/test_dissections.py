"""Check which questions a study asks of a training step and of the forms of a kernel."""

import types

import pytest
import yaml

from harness.study.jobs import Study
from tests.support.workflows import ROOT

CONFIG = yaml.safe_load((ROOT / "config/config.yaml").read_text())
STEPS = ["step_parts", "parts_alone", "step_ladder", "step_memory", "step_power", "loss_parity"]


@pytest.fixture
def study(tmp_path):
    """Return a study that measures, in the tree, with its results in a folder of the test."""

    def made(*ops, networks=(), measure=True, **changes):
        config = CONFIG | {"measure": measure, "recorded": str(tmp_path / "recorded")}
        config["dissect"] = CONFIG["dissect"] | changes
        known = {op: op for op in ops} | dict.fromkeys(networks, "model")
        return Study(ROOT, config, known, {op: [] for op in known}, {}, frozenset(networks))

    return made


def test_the_forms_of_a_kernel_are_a_question_of_its_op(study):
    assert study("matmul").dissections == ["matmul_ladder"]
    assert study("add", networks=("model_decode",)).dissections == STEPS
    both = study("matmul", networks=("model_decode",)).dissections
    assert both == [*STEPS, "matmul_ladder"]
    assert study("add").dissections == study("matmul", measure=False).dissections == []


def test_a_question_without_options_is_not_asked(study):
    assert study("matmul", matmul_ladder=None).dissections == []


def test_the_forms_wait_for_the_verdict_on_ours_and_for_the_code(study):
    wanted = study("matmul").dissect_inputs(types.SimpleNamespace(subject="matmul_ladder"))
    assert "results/study/verify/matmul/ours.json" in wanted
    assert {"kernels/matmul.py", "harness/measure/dissect/rungs.py"} <= set(wanted)
    workers = {"harness/measure/dissect/form_worker.py", "harness/measure/worker.py"}
    assert workers <= set(wanted)
    assert not [path for path in wanted if path.startswith("network/stacks/")]


def test_an_answer_that_is_not_asked_for_is_taken_from_the_record(study, tmp_path):
    for name in ("step_parts", "matmul_ladder"):
        path = tmp_path / f"recorded/dissect/{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    recorded = f"{tmp_path}/recorded/dissect/step_parts.csv"
    assert study("matmul").dissected(None) == ["results/study/dissect/matmul_ladder.csv", recorded]

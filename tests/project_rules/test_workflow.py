"""Check the workflow as a user meets it: dry runs, one file more, one file changed, mistakes.

A dry run names each job by its message ("Verify softmax of ours"); these tests compare the sets.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from harness.cli import UserError
from harness.project import source_tree
from harness.results.parts import ELSEWHERE
from harness.study import jobs as discover
from tests.support.fake_nvml import FAKE
from tests.support.workflows import MEASURE, RECORDED, REPLAY, ROOT, copied, edit, jobs, snakemake

REPLAYED = {"measure": False}
CONFIG = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
TIMING, VERIFY = CONFIG["timing"], CONFIG["verify"]

PROBLEM = """
from ops._spec import Op, make_case

SHIFT = Op("shift", None, {}, None, (make_case(M=1),), (make_case(M=1),))
"""
KERNEL = """
def shift(x):
    return x
"""
BASELINE = """
import shiny

LIBRARY = "shiny"
softmax = shiny.softmax


def add(x, y):
    return shiny.add(x, y)


def helper(x):
    return x
"""
BLOCKER = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton"):
            raise ModuleNotFoundError(name)


sys.meta_path.insert(0, Blocker())
"""


@pytest.mark.parametrize("config", ["config/config.yaml", "config/smoke.yaml"])
def test_every_op_reaches_the_paper(whole_tree, config):
    found = jobs(whole_tree, "--configfile", config, *MEASURE)
    run = yaml.safe_load((ROOT / config).read_text())["run"]
    assert f"Typeset results/{run}/paper.pdf" in found
    for op in source_tree.every_op(ROOT):
        assert {f"Verify {op} of ours", f"Measure {op}"} <= found
    built = {job for job in found if job.startswith("Build ")}
    assert built == {f"Build {family}" for family in source_tree.ops(ROOT).values()}


def test_without_a_gpu_the_recorded_run_is_replayed(whole_tree):
    found = jobs(whole_tree)
    assert not any(
        message.startswith("Measure ") and "ceilings" not in message for message in found
    )
    assert {
        f"Replay {op} from results/recorded/hopper" for op in source_tree.every_op(ROOT)
    } <= found


def test_ours_and_the_reference_impl_are_verified_if_times_are_replayed(whole_tree):
    found = {job for job in jobs(whole_tree, *REPLAY) if job.startswith("Verify")}
    ops = set(source_tree.every_op(ROOT))
    eager = ops & source_tree.public_names(ROOT, "baselines/torch_eager.py")
    eager |= set(source_tree.network_ops(ROOT))
    reference_impl = {f"Verify {op} of torch_eager" for op in eager}
    assert eager and found == {f"Verify {op} of ours" for op in ops} | reference_impl
    # Any other baseline is verified if it is asked for.
    one = "results/study/verify/softmax/torch_compile.json"
    assert "Verify softmax of torch_compile" in jobs(whole_tree, one, *REPLAY)


def add_shift(tree):
    (tree / "ops" / "shift.py").write_text(PROBLEM)
    (tree / "kernels" / "shift.py").write_text(KERNEL)


def test_a_family_adds_its_own_jobs(finished):
    add_shift(finished)
    assert upstream(finished) == {"Build shift", "Verify shift of ours", "Measure shift"}


def test_a_family_adds_its_own_jobs_where_times_are_replayed(tree):
    (tree / "results/recorded/hopper/raw").mkdir()
    (tree / "results/recorded/hopper/raw/softmax.csv").touch()
    before = jobs(tree, *REPLAY)
    assert {job for job in before if job.startswith("Replay")} == {
        "Replay softmax from results/recorded/hopper"
    }
    add_shift(tree)
    # The new op has no record yet, and the others are shown without it.
    assert jobs(tree, *REPLAY) - before == {"Build shift", "Verify shift of ours"}
    named = jobs(tree, "--config", "measure=False", "ops=[shift]")
    assert "Replay shift from results/recorded/hopper" in named


def test_a_baseline_file_adds_its_own_jobs_and_times_its_rivals_with_it(finished):
    (finished / "baselines" / "shiny.py").write_text(BASELINE)
    verified = {"Verify softmax of shiny", "Verify add of shiny"}
    assert upstream(finished) == verified | {"Measure softmax", "Measure add"}


def test_a_library_that_tunes_itself_does_so_before_it_is_verified_and_timed(finished):
    (finished / "baselines" / "shiny.py").write_text(f'{BASELINE}\nAUTOTUNES = ("softmax",)\n')
    verified = {"Verify softmax of shiny", "Verify add of shiny"}
    timed = {"Measure softmax", "Measure add"}
    tuned = {"Compile softmax of shiny", "Autotune softmax of shiny"}
    assert upstream(finished) == tuned | verified | timed


def reports_of_choices(tree, op):
    """Return the reports of the libraries that tuned themselves for an op."""
    paths = tree.glob(f"results/study/autotune/{op}/*.json")
    return {path for path in paths if path.suffixes == [".json"]}


def test_a_study_that_was_interrupted_as_a_library_chose_compiles_nothing_again(finished):
    run = finished / "results/study"
    for name in ("autotune/matmul/quack.json", "verify/matmul/quack.json", "raw/matmul.csv"):
        (run / name).unlink()
    chosen = {"Autotune matmul of quack", "Verify matmul of quack", "Measure matmul"}
    assert jobs(finished, "results/study/raw/matmul.csv", *MEASURE) == chosen
    (run / "autotune/matmul/quack.compiled.json").unlink()
    again = jobs(finished, "results/study/raw/matmul.csv", *MEASURE)
    assert again == chosen | {"Compile matmul of quack"}


def test_a_library_that_is_edited_compiles_and_chooses_again(finished):
    edit(finished / "baselines/quack.py")
    again = upstream(finished)
    stages = {f"{stage} matmul of quack" for stage in ("Compile", "Autotune", "Verify")}
    assert stages | {"Measure matmul"} <= again
    assert all(job.endswith(" of quack") for job in again if not job.startswith("Measure"))


def test_a_library_that_has_chosen_anew_is_verified_anew(finished):
    chosen = reports_of_choices(finished, "matmul")
    assert chosen
    for path in chosen:
        edit(path)
    again = {f"Verify matmul of {path.stem}" for path in chosen}
    assert upstream(finished) == again | {"Measure matmul"}


def test_choices_hold_for_the_board_on_which_they_were_made(finished, tmp_path):
    """On another board a library chooses again, except for an op that was measured on the first."""
    library = tmp_path / "driver"
    library.mkdir()
    (library / "pynvml.py").write_text(FAKE)
    sidecar = {"mode": "measured", "environment": {"gpu": {"uuid": ""}}}
    raw = finished / "results/study/raw"
    for path in raw.glob("*.json"):
        if path.stem != "softmax":
            path.write_text(json.dumps(sidecar))
            os.utime(path, (0, 0))
    here = {"PYTHONPATH": str(library), "CUDA_VISIBLE_DEVICES": "0"}
    again = jobs(finished, *MEASURE, **here)
    chosen = {path.stem for path in reports_of_choices(finished, "softmax")}
    assert "torch_compile_max" in chosen
    assert {job for job in again if job.startswith("Autotune")} == {
        f"Autotune softmax of {impl}" for impl in chosen
    }
    assert {job for job in again if job.startswith("Measure")} == {"Measure softmax"}
    # Programs are for the model.
    assert not {job for job in again if job.startswith("Compile")}


def test_the_board_of_choices_is_that_of_the_times_or_the_one_here(tmp_path):
    mine = dataclasses.replace(study(tmp_path), root=tmp_path)
    gpus = mine.gpus
    softmax, other = (types.SimpleNamespace(op=op) for op in ("softmax", "add"))
    sidecar = tmp_path / mine.run / "raw/softmax.json"
    sidecar.parent.mkdir(parents=True)
    told = {"mode": "measured", "environment": {"gpu": {"uuid": "GPU-then"}}}
    sidecar.write_text(json.dumps(told))
    assert (gpus.board(softmax), gpus.board(other)) == ("GPU-then", "")
    gpus = dataclasses.replace(gpus, boards=("GPU-now",))
    assert (gpus.board(softmax), gpus.board(other)) == ("GPU-then", "GPU-now")
    for text in (json.dumps(told | {"mode": "replayed"}), '{"mode'):
        sidecar.write_text(text)
        assert gpus.board(softmax) == "GPU-now"


def test_the_choice_of_a_library_is_verified_where_times_are_taken(tmp_path):
    rival = types.SimpleNamespace(op="matmul", impl="quack")
    ours = types.SimpleNamespace(op="matmul", impl="ours")
    plain = types.SimpleNamespace(op="matmul", impl="torch_eager")
    taken, replayed = (study(tmp_path, measure=measure) for measure in (True, False))
    assert taken.choices(rival) == "--choices results/study/autotune/matmul/quack"
    assert {taken.choices(ours), taken.choices(plain), replayed.choices(rival)} == {""}


def test_a_finished_study_has_nothing_to_do(finished):
    assert jobs(finished, *MEASURE) == set()


def test_an_edited_figure_reruns_itself_and_the_documents(finished):
    name = discover.stems(ROOT, "paper/figures")[0]
    edit(finished / "paper" / "figures" / f"{name}.py")
    assert jobs(finished, *MEASURE) == {
        f"Draw figure {name}",
        "Typeset results/study/paper.pdf",
        "Write results/study/report.html",
    }


def test_the_code_of_all_figures_and_the_template_of_the_report_are_inputs(finished):
    report = {"Write results/study/report.html"}
    edit(finished / "paper" / "templates" / "report.html.j2", "")
    assert jobs(finished, *MEASURE) == report
    edit(finished / "paper" / "tilewright.mplstyle", "")
    drawn = {f"Draw figure {name}" for name in discover.stems(ROOT, "paper/figures")}
    documents = {"Typeset results/study/paper.pdf"} | report
    assert jobs(finished, *MEASURE) == drawn | documents


def test_an_edited_baseline_reruns_its_own_and_times_its_rivals_with_it(finished):
    edit(finished / "baselines" / "sdpa_flash.py")
    ops = ("attention", "decode_attention")
    verified = {f"Verify {op} of sdpa_flash" for op in ops}
    assert upstream(finished) == verified | {f"Measure {op}" for op in ops}


def test_an_op_without_a_function_of_ours_is_named(tree):
    (tree / "ops" / "shift.py").write_text(PROBLEM)
    for text, lack in ((None, "no such file"), ("shifted = 1\n", "has no function shift")):
        if text is not None:
            (tree / "kernels" / "shift.py").write_text(text)
        done = snakemake(tree, "-n", *REPLAY)
        said = f"tilewright: kernels/shift.py: {lack}; write shift, which ops/shift.py declares, or"
        assert done.returncode == 1 and f"{said} leave it out of `ops`" in done.stderr
        assert snakemake(tree, "-n", *REPLAY, "ops=[add]").returncode == 0


def test_an_edited_problem_reruns_all_that_is_judged_by_it(finished):
    edit(finished / "ops" / "attention.py")
    rivals = {path.stem for path in (finished / "baselines").glob("[!_]*.py")}
    verified = {f"Verify attention of {impl}" for impl in ("ours", *rivals)}
    again = upstream(finished)
    assert {"Build attention", "Measure attention"} < again
    assert {job for job in again if job.startswith("Verify")} <= verified
    assert {"Verify attention of ours", "Verify attention of sdpa_flash"} <= again


def test_shared_code_of_kernels_is_a_source(finished):
    edit(finished / "kernels" / "softmax.py", "import kernels._late")
    (finished / "kernels" / "_late.py").write_text("")
    assert "kernels/_late.py" in discover.sources(finished, "kernels/softmax.py")
    rerun = upstream(finished)
    assert {"Build softmax", "Verify softmax of ours", "Measure softmax"} <= rerun
    assert not {job for job in rerun if "softmax" not in job}


SUMMARY = """
import sys
from pathlib import Path

from harness.results import columns

run = Path(sys.argv[sys.argv.index("--run") + 1])
(run / "columns.json").touch()
for table in columns.SUMMARIES:
    (run / f"{table.name}.csv").touch()
print("measuring took 100 s, overhead 20 %")
"""


def test_a_study_prints_what_measuring_took(finished):
    # The file must not get a later time, as from `edit`: this job's output must be newer.
    (finished / "harness/summarize/__main__.py").write_text(SUMMARY)
    done = snakemake(finished, "results/study/overhead.csv", *MEASURE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "measuring took 100 s, overhead 20 %\n"


def test_a_new_description_of_the_machine_measures_nothing_again(finished):
    edit(finished / "results" / "study" / "environment.json")
    assert "Summarize" in jobs(finished, *MEASURE)
    assert upstream(finished) == set()


def upstream(tree):
    """Return the jobs of a dry run up to the raw times."""
    stages = ("Build", "Verify", "Compile", "Autotune", "Measure")
    return {message for message in jobs(tree, *MEASURE) if message.startswith(stages)}


def test_a_new_commit_describes_the_machine_anew(tree):
    command = tree / "harness/machine/environment.py"
    command.write_text("import sys\nopen(sys.argv[2], 'w').close()\n")
    assert snakemake(tree, "environment", TILEWRIGHT_COMMIT="1a2b3c4").returncode == 0
    assert jobs(tree, "environment", TILEWRIGHT_COMMIT="1a2b3c4") == set()
    assert jobs(tree, "environment", TILEWRIGHT_COMMIT="2b3c4d5") == {"Describe this machine"}


def test_a_new_commit_hides_no_edit_of_the_harness(finished):
    edit(finished / "harness/measure/scheduler.py")
    rerun = jobs(finished, *MEASURE, TILEWRIGHT_COMMIT="1a2b3c4")
    assert {"Describe this machine", "Measure softmax"} <= rerun


def test_the_workflow_parses_without_torch(tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("blocker")
    (folder / "sitecustomize.py").write_text(BLOCKER)
    environment = {"PYTHONPATH": str(folder)}
    torch = [sys.executable, "-c", "import torch"]
    assert subprocess.run(torch, env=os.environ | environment, capture_output=True).returncode
    assert "Verify softmax of ours" in jobs(tree, **environment)


def study(folder, **changes):
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text()) | changes
    mine = folder / "mine.yaml"
    mine.write_text(yaml.safe_dump(changes))
    return discover.Study.load(ROOT, config, [str(ROOT / "config" / "config.yaml"), str(mine)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"measure": "false"}, "measure: 'false' does not fit; expected auto .*True or False"),
        ({"measure": 1}, "measure: 1 does not fit"),
        ({"sed": 1}, "unknown key sed; did you mean 'seed'"),
        ({"seed": "x"}, "seed: 'x' does not fit; expected fresh"),
        ({"ops": ["sofmax"]}, "ops: 'sofmax' does not exist; did you mean 'softmax'"),
        ({"ops": []}, "ops: .* expected all, or a list"),
        ({"part": "2"}, "part: '2' does not fit; expected null, or K/N as in 1/2"),
        ({"part": "3/2"}, "part: '3/2' is no part; the first number is at most the second"),
        ({"baselines": ["torch_eagre"]}, "baselines: .* did you mean 'torch_eager'"),
        ({"dtypes": ["float8"]}, "dtypes: 'float8' does not fit"),
        ({"run": "recorded"}, "run: 'recorded' does not fit; expected a folder name"),
        ({"run": "../up"}, "run: '../up' does not fit"),
        ({"build": {"archs": [70]}}, "build.archs: 70 does not fit"),
        ({"timing": {"min_blocks": 2, "block_ms": 1}}, "timing.max_blocks is missing"),
        (
            {"verify": VERIFY | {"hostile_s": -1}},
            "verify.hostile_s: -1 does not fit; expected null",
        ),
        ({"timing": {"blocks": 2}}, "unknown key timing.blocks; did you mean"),
        ({"seed": 1.0}, "seed: 1.0 does not fit; expected fresh"),
        ({"run": "a\n"}, r"run: 'a\\n' does not fit"),
        ({"run": "x" * 300}, "run: 'x+' does not fit; expected a folder name of up to 100"),
        ({"recorded": "results/{x}"}, "recorded: 'results/{x}' does not fit; .* without braces"),
        (REPLAYED | {"recorded": "nowhere"}, "recorded: 'nowhere' is no recorded run, .*/hopper"),
        (REPLAYED | {"recorded": "config"}, "recorded: 'config' is no recorded run"),
        ({"verify": VERIFY | {"sweep_s": float("nan")}}, "verify.sweep_s: nan does not"),
        ({"verify": VERIFY | {"sweep_s": float("inf")}}, "verify.sweep_s: inf does not"),
        ({"ops": ["softmax", "softmax"]}, "ops: 'softmax' is given twice; leave one out"),
        ({"dtypes": ["float32", "float32"]}, "dtypes: 'float32' is given twice"),
        (
            {"timing": TIMING | {"energy_impls": ["ours", "$(touch pwned)"]}},
            r"timing.energy_impls: '\$\(touch pwned\)' does not exist; there are",
        ),
        ({"timing": TIMING | {"energy_impls": ["torch_egaer"]}}, "did you mean 'torch_eager'"),
        ({"timing": TIMING | {"interval": float("nan")}}, "timing.interval: nan does not fit"),
    ],
)
def test_a_mistake_in_the_configuration_is_named(tmp_path, changes, message):
    with pytest.raises(UserError, match=message) as caught:
        study(tmp_path, **changes)
    assert str(caught.value).partition(": ")[0].endswith(".yaml")
    assert len(str(caught.value).splitlines()) == 1


def test_a_part_becomes_an_option_of_what_times_shapes(tmp_path):
    assert study(tmp_path).shapes == ""
    assert study(tmp_path, part="2/3").shapes == "--part 2/3"
    assert study(tmp_path, part="2/3", max_cases=4).shapes == "--max-cases 4 --part 2/3"


def test_a_part_becomes_an_option_of_the_verification_of_baselines(tmp_path):
    ours, rival = (types.SimpleNamespace(impl=name) for name in ("ours", "liger"))
    parted = {"part": "2/3", "max_cases": 4}
    timed = study(tmp_path, measure=True, **parted)
    assert timed.judged(rival) == "--max-cases 4 --part 2/3"
    assert timed.judged(ours) == "--max-cases 4"
    assert study(tmp_path, measure=False, **parted).judged(rival) == "--max-cases 4"


def test_the_keys_of_the_clock_and_of_the_gate_become_options(tmp_path):
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    timing, rival = config["timing"], types.SimpleNamespace(impl="torch_compile")
    options = study(tmp_path, timing=timing | {"energy_impls": ["ours", "liger"]}).timing
    assert f"--energy-impls ours,liger --cell-timeout-s {timing['cell_timeout_s']}" in options
    assert f"--min-blocks {timing['min_blocks']} " in options
    assert "--energy-impls ''" in study(tmp_path, timing=timing | {"energy_impls": []}).timing
    limits = {"sweep_s": 60, "ordinary_s": None, "hostile_s": 7.5, "cell_timeout_s": 90}
    limited = study(tmp_path, verify=limits)
    assert limited.verify_budget(rival) == "--sweep-s 60 --hostile-s 7.5 --cell-timeout-s 90"
    assert limited.verify_budget(types.SimpleNamespace(impl="ours")) == ""
    unlimited = study(tmp_path, verify=dict.fromkeys(limited.config["verify"]))
    assert unlimited.verify_budget(rival) == ""


def test_shapes_are_drawn_once_for_all_jobs_that_verify_tune_and_time_them(tmp_path):
    timed, replayed = (study(tmp_path, measure=measure) for measure in (True, False))
    ours = types.SimpleNamespace(op="softmax", impl="ours", get=lambda *_: None)
    rival = types.SimpleNamespace(op="matmul", impl="quack", get=lambda *_: None)
    for wildcards in (ours, rival):
        assert "results/study/drawn.json" in timed.verify_inputs(wildcards)
        assert "results/study/drawn.json" not in replayed.verify_inputs(wildcards)
    assert "results/study/drawn.json" in timed.autotune_inputs(rival)
    assert timed.drawing == "--drawn results/study/drawn.json"
    assert replayed.drawing == "" and replayed.draws == []


def test_the_jobs_that_need_the_drawn_shapes_are_told_of_them(tree):
    dry = snakemake(tree, "results/study/raw/matmul.csv", "--dry-run", "--printshellcmds", *MEASURE)
    calls = [line for line in dry.stdout.splitlines() if "python -m harness." in line]
    for command in ("verify", "measure.autotune", "measure"):
        told = [line for line in calls if f"harness.{command} " in line]
        assert told and all("--drawn results/study/drawn.json" in line for line in told)
    assert sum("harness.calls.drawn --seed fresh" in line for line in calls) == 1


def test_verifications_that_ran_out_of_time_begin_first(tmp_path):
    reports = tmp_path / "recorded" / "verify" / "softmax"
    reports.mkdir(parents=True)
    cells = [{"status": status} for status in ("ok", "unreached", "unreached", "inaccurate")]
    (reports / "slow.json").write_text(json.dumps({"cells": cells}))
    (reports / "absent.json").write_text('{"cells": []}')
    (reports / "broken.json").write_text('{"cells')
    mine = dataclasses.replace(study(tmp_path), root=tmp_path, config={"recorded": "recorded"})

    def priority(impl):
        return mine.verify_priority(types.SimpleNamespace(op="softmax", impl=impl))

    assert priority("slow") == 0.5
    rules = (ROOT / "workflow/rules/autotune.smk").read_text()
    # No share is above one, so what needs all cores never waits among verifications.
    assert (tuned := int(re.search(r"rule autotune:.*?priority: (\d+)", rules, re.DOTALL)[1])) > 1
    draw = (ROOT / "workflow/rules/drawn.smk").read_text()
    assert "threads: workflow.cores" in draw
    assert (drawn := int(re.search(r"priority: (\d+)", draw)[1])) > tuned
    # Measuring the machine needs all cores too, and every measurement waits for it.
    machine = (ROOT / "workflow/rules/environment.smk").read_text()
    machine = re.search(r"rule ceilings:.*", machine, re.DOTALL)[0]
    assert "threads: workflow.cores" in machine
    assert int(re.search(r"priority: (\d+)", machine)[1]) > drawn
    assert 'ancient("<run>/ceilings.csv")' in draw
    assert [priority(impl) for impl in ("absent", "broken", "new")] == [0.0] * 3


@pytest.mark.parametrize(
    ("op", "impl", "measures", "count"),
    [
        ("softmax", "ours", True, discover.COMPILERS),
        ("softmax", "ours", False, 1),
        ("softmax", "torch_compile_max", True, discover.COMPILERS),
        ("softmax", "torch_compile_max", False, 1),
        # It ran out of time for another op.
        ("softmax", "slow", True, discover.COMPILERS),
        ("softmax", "quick", True, 1),
        ("softmax", "hardly_slow", True, 1),
        # Another part verifies half of its cells.
        ("softmax", "parted", True, 1),
        # Those of its own part that it did not reach are a twentieth.
        ("softmax", "slow_part", True, discover.COMPILERS),
        ("model_forward", "ours", True, 1),
        ("model_forward", "slow", True, 1),
    ],
)
def test_libraries_that_compile_long_have_several_processes(tmp_path, op, impl, measures, count):
    reports = tmp_path / "recorded/verify/dot"
    reports.mkdir(parents=True)
    for name, status, others in (
        ("slow", "unreached", 1),
        ("quick", "ok", 1),
        ("hardly_slow", "unreached", 20),
    ):
        cells = [{"status": status, "reason": ""}, *[{"status": "ok", "reason": ""}] * others]
        (reports / f"{name}.json").write_text(json.dumps({"cells": cells}))
    cells = [{"status": "unreached", "reason": ELSEWHERE}, {"status": "ok", "reason": ""}]
    (reports / "parted.json").write_text(json.dumps({"cells": cells}))
    late = {"status": "unreached", "reason": "time limit of 45 s"}
    cells = [late, *[cells[0]] * 20, *[cells[1]] * 19]
    (reports / "slow_part.json").write_text(json.dumps({"cells": cells}))
    config = {"recorded": str(tmp_path / "recorded"), "measure": measures}
    mine = dataclasses.replace(study(tmp_path), config=config)
    assert mine.verify_threads(types.SimpleNamespace(op=op, impl=impl)) == count


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('measure: "false"', "tilewright: config/mine.yaml: measure: 'false' does not fit"),
        ("ops: [sofmax]", "tilewright: config/mine.yaml: ops: 'sofmax' does not exist"),
    ],
)
def test_a_mistake_ends_the_command_without_a_traceback(tree, line, message):
    (tree / "config" / "mine.yaml").write_text(line + "\n")
    done = snakemake(tree, "--dry-run", "--configfile", "config/mine.yaml")
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 4


def test_snakemake_finds_nothing_to_improve(whole_tree):
    # Some of its rules look at inputs that exist only if a run is recorded.
    shutil.copytree(ROOT / RECORDED, whole_tree / RECORDED, dirs_exist_ok=True)
    done = snakemake(whole_tree, "--lint")
    assert done.returncode == 0, done.stderr


def test_a_mistake_on_the_command_line_is_named(tree):
    done = snakemake(tree, "--dry-run", "--config", "measure=false")
    assert done.returncode != 0
    assert "tilewright: --config: measure: 'false' does not fit; expected auto" in done.stderr


def test_the_message_of_a_failed_command_stands_at_the_end(tree):
    raw = "results/study/raw/dot.csv"
    done = snakemake(tree, raw, *REPLAY)
    assert done.returncode != 0
    assert f"\ntilewright: {RECORDED}: has no times of dot; measure and record it" in "\n".join(
        done.stderr.splitlines()[-6:]
    )
    assert "grep:" not in done.stderr
    assert not (tree / raw).exists()


def test_set_up_names_what_it_lacks(tmp_path):
    call = [str(ROOT / "requirements" / "setup.sh"), "python", str(tmp_path / "venv")]
    done = subprocess.run(
        call, env=os.environ | {"PYTHON": "no-such-python"}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tilewright: no-such-python is missing or not Python 3.11")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(("version", "named", "lines"), [("3.9", 1, 1), ("3.9", 0, 0), ("", 1, 0)])
def test_an_environment_of_another_python_than_named_is_told(tmp_path, version, named, lines):
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    here = ".".join(map(str, sys.version_info[:2]))
    python.write_text(f"#!/bin/sh\necho {version or here}\n")
    python.chmod(0o755)
    call = [str(ROOT / "requirements" / "setup.sh"), "check", str(tmp_path)]
    wanted = os.environ | {"PYTHON": sys.executable if named else ""}
    done = subprocess.run(call, env=wanted, capture_output=True, text=True)
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == lines
    assert (
        not lines or f"{tmp_path} is of Python 3.9 and stays; for {here} run: rm -rf" in done.stderr
    )


def test_caches_have_a_place_where_the_home_folder_is_not_writable(tmp_path):
    call = ["make", "-s", "-C", str(ROOT), "--eval", "where: ; @echo $$HOME", "where"]
    for home, found in (("/nowhere/at/all", ROOT / ".home"), (str(tmp_path), tmp_path)):
        said = subprocess.run(call, env=os.environ | {"HOME": home}, capture_output=True, text=True)
        assert f"{found}" in said.stdout.splitlines(), said


def test_a_broken_file_of_ops_is_named(tree):
    (tree / "ops" / "broken.py").write_text("def broken(:\n")
    with pytest.raises(UserError, match=r"ops/broken.py:1: "):
        discover.ops(tree)


def test_an_op_has_one_file(tree):
    shutil.copy(tree / "ops" / "softmax.py", tree / "ops" / "softmax_again.py")
    with pytest.raises(UserError, match="'softmax' is also in softmax"):
        discover.ops(tree)


def test_a_folder_that_is_no_record_is_named_before_any_job(tree):
    before = {path for path in tree.rglob("*") if "__pycache__" not in path.parts}
    for record in ("nowhere", "; touch pwned; true"):
        done = snakemake(tree, "--config", f"recorded={record}", "measure=False")
        assert done.returncode != 0
        [line] = [line for line in done.stderr.splitlines() if line.startswith("tilewright: ")]
        assert f"--config: recorded: {record!r} is no recorded run" in line
        assert len(done.stderr.splitlines()) <= 4
    left = {path for path in tree.rglob("*") if "__pycache__" not in path.parts} - before
    assert not {path for path in left if ".snakemake" not in path.parts}


@pytest.mark.parametrize("name", ["my rec", "a;touch pwned;", "it's"])
def test_the_name_of_a_record_is_one_word_to_the_shell(tree, name):
    shutil.move(tree / RECORDED, tree / name)
    done = snakemake(tree, "results/study/raw/dot.csv", *REPLAY, f"recorded={name}")
    assert f"tilewright: {name}: has no times of dot; measure and record it" in done.stderr
    assert not (tree / "pwned").exists()


def test_the_name_of_a_folder_means_nothing_to_the_shell_or_to_snakemake(tmp_path):
    tree = copied(tmp_path / 'it\'s {b} "it"')
    place = tree / "bin"
    place.mkdir()
    (place / "python").symlink_to(sys.executable)
    code = "import sys; sys.executable = sys.argv.pop(1); from snakemake.cli import main; main()"
    command = [sys.executable, "-c", code, str(place / "python"), "results/study/raw/dot.csv"]
    done = subprocess.run(
        [*command, *REPLAY],
        cwd=tree,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert "has no times of dot" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def softmax(x):\n    return x\n", "baselines/odd.py: has no LIBRARY; name"),
        ('LIBRARY = "a" + "b"\n', "baselines/odd.py:1: LIBRARY is computed; write it as a literal"),
        ("LIBRARY = 3\n", "baselines/odd.py: has no LIBRARY"),
    ],
)
def test_a_baseline_without_a_library_is_named_before_any_job(tmp_path, text, problem):
    for name in ("workflow", "config", "ops", "kernels", "baselines"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "baselines" / "odd.py").write_text(text)
    file = str(ROOT / "config" / "config.yaml")
    config = yaml.safe_load(Path(file).read_text()) | {"measure": True}
    with pytest.raises(UserError, match=problem):
        discover.Study.load(tmp_path, config, [file])
    (tmp_path / "baselines" / "odd.py").rename(tmp_path / "baselines" / "odd-one.py")
    with pytest.raises(UserError, match=r"baselines/odd-one\.py: no module can have this name"):
        discover.Study.load(tmp_path, config, [file])

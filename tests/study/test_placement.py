"""Check which GPU each job has, and that a study on several outlives the loss of one."""

import dataclasses
import itertools
import json
import re
import types

import pytest
import yaml

from harness.machine import gpu_lock
from harness.study import jobs, placement
from tests.support.fake_nvml import FAKE
from tests.support.patience import PATIENCE_S
from tests.support.workflows import ROOT, small, snakemake

COUNTS = [1, 2, 4, 8]


def uuids(count):
    return [f"GPU-{n}{n}-fake" for n in range(count)]


@pytest.mark.parametrize("count", COUNTS)
def test_the_jobs_are_spread_by_their_length(count):
    lengths = {f"op{n:02}": 10.0 + n * n for n in range(40)}
    boards = uuids(count)
    found = placement.plan(sorted(lengths), lengths, boards)
    assert set(found) == set(lengths)
    load = dict.fromkeys(boards, 0.0)
    for job, board in found.items():
        load[board] += lengths[job]
    # Graham's bound; with so many jobs the loads are far nearer to each other.
    mean = sum(lengths.values()) / count
    assert max(load.values()) <= mean * 4 / 3
    assert max(load.values()) - min(load.values()) <= min(lengths.values()) + 50


def test_the_plan_depends_on_neither_order_nor_time():
    lengths = {"a": 5.0, "b": 3.0, "c": 3.0, "d": 1.0}
    plans = [placement.plan(some, lengths, uuids(2)) for some in itertools.permutations("abcde")]
    assert all(plan == plans[0] for plan in plans)
    # The longest first, and one of unknown length is as long.
    first, second = uuids(2)
    assert plans[0] == {"a": first, "e": second, "b": first, "c": second, "d": first}


def test_without_a_board_nothing_is_planned():
    assert placement.plan(["a"], {}, []) == {}
    assert placement.plan(["a", "b"], {}, uuids(2)) == {"a": uuids(2)[0], "b": uuids(2)[1]}


@pytest.fixture
def driver(driver, monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_USED", str(tmp_path / "used"))
    monkeypatch.setattr(gpu_lock.strangers, "__defaults__", (0.0,))
    return driver


@pytest.mark.parametrize("count", COUNTS)
def test_a_gpu_in_use_by_another_program_is_left_out_and_named(
    driver, monkeypatch, tmp_path, capsys, count
):
    monkeypatch.setenv("FAKE_GPUS", str(count))
    used = tmp_path / "used"
    assert (placement.usable(), capsys.readouterr().err) == (uuids(count), "")
    used.write_text(uuids(count)[0])
    # The only GPU stays: its job names the program.
    assert placement.usable() == (uuids(count)[1:] or uuids(1))
    said = capsys.readouterr().err
    who = (
        "tilewright: GPU 0 (NVIDIA H200) is left out, because process 4194309 (trainer) is using it"
    )
    assert said == (f"{who}\n" if count > 1 else "")
    used.write_text("\n".join(uuids(count)))
    assert placement.usable() == uuids(count)


def test_gpus_of_another_model_are_left_out_and_named(driver, monkeypatch, capsys):
    monkeypatch.setenv("FAKE_GPUS", "3")
    monkeypatch.setenv("FAKE_NAMES", "NVIDIA H200,NVIDIA A100,NVIDIA H200")
    assert placement.usable() == ["GPU-00-fake", "GPU-22-fake"]
    said = capsys.readouterr().err
    assert said == (
        "tilewright: GPU 1 (NVIDIA A100) is left out, because GPU 0 (NVIDIA H200) is of another"
        " model\n"
    )


@pytest.fixture
def study(tmp_path):
    """Make a study of some ops on so many GPUs, whose runs lie in a folder of the test."""

    def make(count, **changes):
        config = yaml.safe_load((ROOT / "config/config.yaml").read_text())
        families = {"add": "vector", "mul": "vector", "softmax": "softmax", "train": "llama"}
        rivals = {op: ["torch_compile", "torch_compile_max"] for op in families}
        made = jobs.Study(ROOT, config | {"measure": True} | changes, families, rivals, {})
        return dataclasses.replace(
            made, root=tmp_path, networks=frozenset({"train"}), boards=tuple(uuids(count))
        )

    return make


def wildcards(**names):
    return types.SimpleNamespace(**names, get=names.get)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def tuned_by(study, *libraries):
    """Return the GPUs of a study whose ops all have these libraries that tune themselves."""
    return dataclasses.replace(study.gpus, tuned_by=dict.fromkeys(study.ops, libraries))


@pytest.mark.parametrize("count", COUNTS)
def test_no_two_jobs_of_a_board_run_at_once_and_all_boards_do(study, count):
    mine = study(count, tuning="tune")
    gpus = tuned_by(mine, "torch_compile", "torch_compile_max")
    there = gpus.at_once
    several = count > 1
    # Eight libraries tune themselves, two for each op. Four compile at a time on a GPU at most.
    most = {1: 4, 2: 4, 4: 2, 8: 2}[count]
    places = {name: there.pop(name) for name in list(there) if name.startswith("trial")}
    assert places == {f"trial{n}" if several else "trial": most for n in range(count)}
    assert there["gpu"] == count and sum(there.values()) == count + several * count
    rules = {"op": [*mine.ops], "family": mine.families, "subject": mine.dissections}
    taken = []
    for wildcard, names in rules.items():
        assert names
        for name in names:
            about = wildcards(**{wildcard: name})
            asked = gpus.one_gpu(wildcard)
            assert asked.pop("gpu") == 1
            board = asked.pop("board")(about)
            lanes = [n for n in asked if asked[n](about)]
            assert asked.keys() == there.keys() - {"gpu"}
            assert count == 1 or lanes == [f"board{uuids(count).index(board)}"]
            taken.append(board)
    assert len(taken) >= 8 and set(taken) == set(uuids(count) if count > 1 else ["any"])
    assert gpus.threads(64) == 64 // count and gpus.threads(1) == 1 and gpus.threads(None) is None
    # If the trials of libraries took all cores, nothing could be verified beside them.
    cores = gpus.autotune_threads(64)
    assert cores * most * count == 32
    assert gpus.autotune_threads(1) == 1 and gpus.autotune_threads(None) is None


def test_the_libraries_of_one_op_have_the_cores_of_others(study):
    """As seen on one GPU: thirteen cells of AdamW took 15 minutes with a quarter of the trials."""
    alone = dataclasses.replace(study(1).gpus, tuned_by={"add": ["torch_compile", "liger"]})
    assert alone.at_once["trial"] == 2 and alone.autotune_threads(16) == 4
    assert tuned_by(study(1), "torch_compile").autotune_threads(16) == 2
    assert tuned_by(study(1)).autotune_threads(16) == 8


def taken(resources, op):
    """Return the resources that a job of an op has some of, by their amount."""
    values = {key: value(op) if callable(value) else value for key, value in resources.items()}
    return {key: value for key, value in values.items() if isinstance(value, int) and value}


@pytest.mark.parametrize("count", COUNTS)
def test_a_library_that_compiles_takes_no_gpu_from_other_jobs(study, count):
    """As seen on four GPUs: it compiled for eight minutes, and all of its GPU's ops waited."""
    gpus = tuned_by(study(count), "torch_compile")
    for op in map(lambda op: wildcards(op=op), gpus.tuned_by):
        asked = gpus.compiling
        assert asked.pop("compilers")(op, threads=4) == 16
        board = asked["board"](op)
        assert board == gpus.compile_board(op)
        lane = f"trial{uuids(count).index(board)}" if count > 1 else "trial"
        assert taken(asked, op) == {lane: 1}


@pytest.mark.parametrize("count", COUNTS)
def test_no_library_compiles_on_a_gpu_beside_one_that_chooses_there(study, count):
    """As seen on a GPU: of seven the last began to compile when the longest of the first was done.

    The one that waited to have the GPU alone kept them from it.
    """
    gpus = tuned_by(
        study(count), "torch_compile", "torch_compile_max", "liger", "quack", "xformers"
    )
    for op in map(lambda op: wildcards(op=op), gpus.tuned_by):
        asked = taken(gpus.choosing, op)
        places = {name: n for name, n in asked.items() if name.startswith("trial")}
        board = gpus.board(op)
        (lane,) = places
        assert lane == (f"trial{uuids(count).index(board)}" if count > 1 else "trial")
        # All that there are.
        assert places[lane] == gpus.at_once[lane] == 4
        assert asked.keys() - places.keys() == taken(gpus.one_gpu("op"), op).keys()
    rules = (ROOT / "workflow/rules/autotune.smk").read_text()
    compile_rule, autotune_rule = re.split("rule autotune:", rules.partition("rule compile:")[2])
    assert "**study.gpus.compiling" in compile_rule and "**study.gpus.choosing" in autotune_rule
    first, second = (
        int(re.search(r"priority: (\d+)", rule)[1]) for rule in (compile_rule, autotune_rule)
    )
    # All that is to compile there begins before.
    assert first > second


def test_a_library_has_the_gpu_that_a_batch_system_gives_it(study):
    gpus = dataclasses.replace(study(1).gpus, spread=False)
    asked = gpus.compiling
    assert asked.pop("compilers")(wildcards(op="add"), threads=4) == 4
    alone = gpus.one_gpu("op").keys()
    assert asked.keys() == gpus.choosing.keys() == alone and asked["gpu"] == 1
    assert gpus.at_once == {"gpu": 1} and gpus.autotune_threads(64) == 64


@pytest.mark.parametrize("count", COUNTS)
def test_an_op_is_verified_rather_on_the_gpu_that_measures_it(study, count):
    """On another it would keep the jobs of another op from having that one alone."""
    mine = study(count)
    gpus = mine.gpus
    placed = {op: gpus.verify_board(wildcards(op=op)) for op in mine.ops}
    # If there are more GPUs than ops, some would be idle.
    own = 1 < count <= len(mine.ops) == 4
    assert placed == {op: gpus.board(wildcards(op=op)) if own else "any" for op in mine.ops}
    rule = (ROOT / "workflow/rules/verify.smk").read_text()
    # A parameter would make verifications run again with another plan.
    board = rule.index("board=study.gpus.verify_board")
    assert rule.index("resources:") < board < rule.index("params:")
    assert "--board {resources.board}" in rule


@pytest.mark.parametrize("count", (0, *COUNTS))
def test_libraries_compile_on_a_gpu_that_is_no_ops(study, count):
    """As seen on two GPUs: the trials of two libraries waited for the compile phase of a third."""
    mine = study(count)
    gpus = mine.gpus
    found = {op: gpus.compile_board(wildcards(op=op)) for op in mine.ops}
    own = {op: gpus.board(wildcards(op=op)) for op in mine.ops}
    spare = set(mine.boards) - set(own.values())
    assert bool(spare) == (count > len(mine.ops) == 4)
    if spare:
        assert set(found.values()) == spare
    else:
        # The places that they have are those of the GPU on which they compile.
        assert found == (own if count > 1 else dict.fromkeys(mine.ops, "any"))
    rule = (ROOT / "workflow/rules/autotune.smk").read_text()
    assert "--compile-board {resources.board}" in rule


@pytest.mark.parametrize("tuning", ["replay", "heuristic"])
def test_jobs_that_a_study_does_not_have_keep_no_op_away_from_an_idle_gpu(study, tuning):
    # As seen on four GPUs: a kernel file that nothing tunes took the place of the fourth op.
    mine = study(4, dissect={}, tuning=tuning)
    gpus = mine.gpus
    assert len(mine.ops) == 4 and mine.families
    assert {gpus.board(wildcards(op=op)) for op in mine.ops} == set(uuids(4))


def test_jobs_that_a_run_may_not_ask_for_keep_no_op_away_from_an_idle_gpu(study):
    """As seen on four GPUs: the ladder of a product had one of three, and two norms shared one."""
    boards = uuids(3)
    found = placement.plan("abc", {"a": 3.0, "b": 1.0}, boards, later=["d", "e"])
    assert sorted(found[op] for op in "abc") == boards
    # They fill up what is left.
    assert found["d"] == found["b"] and found["e"] != found["d"]
    mine = study(4)
    gpus = mine.gpus
    assert len(mine.ops) == 4 and mine.dissections
    assert {gpus.board(wildcards(op=op)) for op in mine.ops} == set(uuids(4))


def test_without_a_visible_gpu_a_job_takes_any(study):
    # As on the node of a cluster that submits jobs.
    gpus = study(0).gpus
    asked = gpus.one_gpu("op")
    assert list(asked) == ["gpu", "board"] and asked["board"](wildcards(op="add")) == "any"
    assert gpus.at_once == {"gpu": 1} and gpus.threads(64) == 64


def test_a_batch_system_hands_out_its_gpus_itself(driver, monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_GPUS", "4")
    path = ROOT / "config/config.yaml"
    config = yaml.safe_load(path.read_text()) | {"run": "none-of-this-name", "ops": ["add"]}
    both = [jobs.Study.load(ROOT, config, [str(path)], spread) for spread in (True, False)]
    assert [each.boards for each in both] == [tuple(uuids(4)), tuple(uuids(1))]
    assert both[1].gpus.one_gpu("op")["board"](wildcards(op="add")) == "any"
    assert both[1].gpus.board(wildcards(op="add")) == uuids(1)[0]
    profile = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())
    assert profile["resources"] == {"gpu": 1}
    assert "resources" not in yaml.safe_load((ROOT / "profiles/default/config.yaml").read_text())


def test_an_op_stays_on_the_board_where_it_began(study, tmp_path):
    baseline = tmp_path / "baselines/torch_compile_max.py"
    baseline.parent.mkdir()
    baseline.write_text('AUTOTUNES = "all"\n')
    gpus = study(4).gpus
    op = wildcards(op="add")
    planned = gpus.board(op)
    other, third = [uuid for uuid in uuids(4) if uuid != planned][:2]
    folder = tmp_path / "results/study"
    # A library has tuned itself there.
    report = folder / "autotune/add/torch_compile_max.json"
    write(report, {"gpu": {"uuid": other}})
    assert gpus.board(op) == other
    # That board has vanished: the op is begun anew.
    left = tuple(uuid for uuid in uuids(4) if uuid != other)
    assert dataclasses.replace(gpus, boards=left).board(op) in left
    # The board that measured it counts most, also if it is gone.
    write(
        folder / "raw/add.json",
        {"mode": "measured", "environment": {"gpu": {"uuid": third}}},
    )
    assert gpus.board(op) == dataclasses.replace(gpus, boards=()).board(op) == third


def test_recorded_times_tell_the_lengths(study, tmp_path):
    mine = study(2, recorded="recorded", dissect={})
    gpus = mine.gpus
    for op, seconds in (("add", 100.0), ("mul", 30.0), ("softmax", 40.0)):
        # In two parts, whose seconds add up; the last part of the longest op is the shortest.
        before = 99.0 if op == "add" else 1.0
        earlier, last = ({"overhead": {"total_s": each}} for each in (before, seconds - before))
        write(tmp_path / f"recorded/raw/{op}.json", last | {"earlier": [earlier]})
    boards = {op: gpus.board(wildcards(op=op)) for op in mine.ops}
    first, second = uuids(2)
    # A network that no record has is taken to be as long as the longest op.
    assert boards == {"add": first, "train": second, "softmax": first, "mul": second} or boards == {
        "add": first, "train": second, "softmax": second, "mul": first,
    }  # fmt: skip


AUTOTUNE = """
import argparse, os, time
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("--phase", "--op", "--impl", "--out"):
    parser.add_argument(name)
given, _ = parser.parse_known_args()

def note(word):
    with open(os.environ["NOTES"], "a") as file:
        print(given.phase, given.op, given.impl, word, file=file)

note("begins")
# Long enough that jobs which may run side by side do.
time.sleep(0.3)
note("ends")
out = Path(given.out)
(out.with_suffix(".compiled.json") if given.phase == "compile" else out).write_text("{}")
"""


@pytest.mark.slow
def test_each_library_of_a_gpu_is_compiled_before_one_chooses_there(tmp_path):
    """And each chooses while no other does, without a wait for the lock of the GPU."""
    tree, library, notes = small(tmp_path / "tree"), tmp_path / "driver", tmp_path / "notes"
    library.mkdir()
    (library / "pynvml.py").write_text(FAKE)
    (tree / "harness/measure/autotune.py").write_text(AUTOTUNE)
    run = tree / "results/study"
    run.mkdir(parents=True)
    for name in ("drawn.json", "ceilings.csv"):
        (run / name).touch()
    ops, libraries = ("matmul", "softmax", "add"), ("torch_compile", "torch_compile_max")
    wanted = [f"results/study/autotune/{op}/{impl}.json" for op in ops for impl in libraries]
    words = [*wanted, "--cores", "8", "--allowed-rules", "compile", "autotune", "--config"]
    words += [f"ops=[{', '.join(ops)}]", f"baselines=[{', '.join(libraries)}]"]
    variables = {"PYTHONPATH": str(library), "CUDA_VISIBLE_DEVICES": "0", "NOTES": str(notes)}
    done = snakemake(tree, *words, **variables, **{gpu_lock.LOCKS: str(tmp_path)})
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in notes.read_text().splitlines()]
    halves = lines[: 2 * len(wanted)], lines[2 * len(wanted) :]
    assert [{line[0] for line in half} for half in halves] == [{"compile"}, {"tune"}]
    compiling, most = 0, 0
    for *_, word in halves[0]:
        compiling += 1 if word == "begins" else -1
        most = max(most, compiling)
    assert most <= 4
    assert [line[-1] for line in halves[1]] == ["begins", "ends"] * len(wanted)


MEASURE = """
import argparse, os, signal, time
from pathlib import Path
from harness import cli
from harness.machine import gpu_lock

def main():
    parser = argparse.ArgumentParser()
    for name in ("--op", "--out"):
        parser.add_argument(name)
    parser.add_argument("--board", type=gpu_lock.named)
    given, _ = parser.parse_known_args()
    notes = Path(os.environ["NOTES"])
    with gpu_lock.hold(exclusive=True, uuid=given.board) as gpu:
        began, fault = time.time(), notes / f"{given.op}.fault"
        (notes / f"{given.op}.began").touch()
        while len(list(notes.glob("*.began"))) < int(os.environ["AT_ONCE"]):
            assert time.time() < began + PATIENCE_S, "no other job began meanwhile"
            time.sleep(0.02)
        if fault.exists():
            fault.unlink()
            if fault.name == "add.fault":
                os.kill(os.getpid(), signal.SIGKILL)
            with open(os.environ["FAKE_LOST"], "a") as file:
                print(gpu.uuid, file=file)
        time.sleep(0.1)
    with (notes / "done").open("a") as file:
        print(given.op, gpu.uuid, began, time.time(), file=file)
    Path(given.out).write_text(gpu.uuid)
    Path(given.out).with_suffix(".json").write_text("{}")

cli.run(main)
"""
OPS = ("add", "dot", "maximum", "minimum", "mul", "scale")


@pytest.mark.slow
def test_a_study_goes_on_with_the_gpus_that_are_left(tmp_path):
    """A job dies, a GPU vanishes during another, and a program uses a third GPU of four."""
    tree, notes = small(tmp_path / "tree"), tmp_path / "notes"
    library = tmp_path / "driver"
    for folder in (notes, library):
        folder.mkdir()
    (library / "pynvml.py").write_text(FAKE)
    stub = MEASURE.replace("PATIENCE_S", str(PATIENCE_S))
    (tree / "harness/measure/__main__.py").write_text(stub)
    run = tree / "results/study"
    for name in ("drawn.json", "ceilings.csv", *(f"verify/{op}/ours.json" for op in OPS)):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    for op in ("add", "dot"):
        (notes / f"{op}.fault").touch()
    lost, used = tmp_path / "lost", tmp_path / "used"
    used.write_text(uuids(4)[3])
    variables = {
        "PYTHONPATH": str(library),
        "CUDA_VISIBLE_DEVICES": "0,1,2,3",
        "FAKE_GPUS": "4",
        "FAKE_LOST": str(lost),
        "FAKE_USED": str(used),
        gpu_lock.LOCKS: str(tmp_path),
        "NOTES": str(notes),
        "AT_ONCE": "3",
    }
    words = ["measured", "--cores", "8", "--allowed-rules", "measure", "measured", "--config"]
    words += ["baselines=[]", f"ops=[{', '.join(OPS)}]"]

    def finished():
        return {op: path.read_text() for op in OPS if (path := run / f"raw/{op}.csv").exists()}

    first = snakemake(tree, *words, **variables)
    assert first.returncode == 1, first.stderr
    assert "process 4194309 (trainer) is using it" in first.stderr
    gone = lost.read_text().strip()
    assert f"board {gone}: gone from the driver while this job used it" in first.stderr
    early = finished()
    assert not {"add", "dot"} & set(early) and len(early) >= 3
    second = snakemake(tree, *words, **variables)
    assert second.returncode == 0, second.stderr
    assert finished().keys() == set(OPS) and early.items() <= finished().items()
    lines = [line.split() for line in (notes / "done").read_text().splitlines()]
    # No op was measured twice, each on the GPU that its file names, and none on that in use.
    assert {op: board for op, board, *_ in lines} == finished() and len(lines) == len(OPS)
    assert uuids(4)[3] not in finished().values()
    for board in uuids(4):
        spans = sorted((float(a), float(b)) for _, one, a, b in lines if one == board)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))

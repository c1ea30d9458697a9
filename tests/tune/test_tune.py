"""Check tuning without a GPU: candidates with known times and faults, and a study's three modes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.build import tables
from harness.cli import UserError
from harness.project import source_tree
from harness.study import jobs as discover
from harness.tune import __main__ as tune_command
from harness.tune import candidates, merge, search
from harness.tune.messages import Device
from harness.tune.search import Tuner, TuningKey, entry
from harness.workers.gpu_memory import Memory
from harness.workers.pool import WorkerHandle
from tests.support.fake_tune_worker import FAULTS
from tests.support.measuring import FakeMonitor
from tests.support.toy_tree import make_tree
from tests.support.workflows import MEASURE, jobs, small, snakemake

ROOT = Path(__file__).parents[2]
WORKER = "tests.support.fake_tune_worker:FakeTuneWorker"


def lent(exclusive):
    return contextlib.nullcontext(FakeMonitor())


def tuning_key(*candidates, rule=0):
    return TuningKey("_k", {"n": 64}, "op", "N64", "float32", "forward", candidates, rule)


def us(value, **more):
    return {"us": value, **more}


def fault(name, value=1, **more):
    return us(value, fault=FAULTS.index(name), **more)


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    return lambda: (tmp_path / "log").read_text().splitlines()


@pytest.fixture
def tune(log):
    memory = Memory(lambda: None, set)
    with Tuner(lambda: WorkerHandle("toy", "ours", 0, WORKER), 0, memory) as made:
        yield lambda key, rejected=None: made.tune(key, rejected or {})


def test_the_fastest_wins_and_the_next_is_told(tune, log):
    found = tune(tuning_key(us(120), us(100), us(110), us(300)))
    assert found["config"] == us(100)
    assert found["runner_up"] == {
        "config": "us=110", "us": 110, "gap": 0.1, "gap_lo": 0.1, "gap_hi": 0.1, "tie": False
    }  # fmt: skip
    assert found["timed"] == {"us=120": 120, "us=100": 100, "us=110": 110, "us=300": 300}
    assert (found["rule"], found["failed"], found["key"]) == ("us=120", {}, {"n": 64})
    counts = {index: log().count(f"block {index}") for index in range(4)}
    # A candidate far behind is dropped after the short round; the rule's choice never is.
    assert counts[3] == search.ROUGH_BLOCKS
    assert counts[0] == counts[1] == counts[2] == search.ROUGH_BLOCKS + search.FINE_BLOCKS


def test_the_order_changes_from_block_to_block(tune, log):
    tune(tuning_key(us(100), us(101), us(102)))
    blocks = [line for line in log() if line.startswith("block")]
    rounds = {tuple(blocks[i : i + 3]) for i in range(0, len(blocks), 3)}
    assert len(rounds) > 1 and all(len(set(each)) == 3 for each in rounds)


@pytest.mark.parametrize(("rule", "winner"), [(2, 2), (3, 0)])
def test_a_tie_goes_to_the_rule_then_to_the_order(tune, rule, winner):
    found = tune(tuning_key(us(100.4), us(100), us(100.6), us(150), rule=rule))
    assert found["config"] == us([100.4, 100, 100.6, 150][winner])
    assert found["runner_up"]["tie"] is True
    assert -0.01 < found["runner_up"]["gap"] < 0


def test_a_gap_within_the_noise_is_a_tie(tune):
    found = tune(tuning_key(us(103, sway=5), us(100, sway=5)))
    assert found["config"] == us(103, sway=5)
    second = found["runner_up"]
    assert second["tie"] is True and second["gap_lo"] < second["gap_hi"]


def test_equal_times_give_equal_tables():
    key = tuning_key(us(100), us(100.2), us(99.9), rule=1)
    times = {0: [100.0] * 10, 1: [100.2] * 10, 2: [99.9] * 10}
    first = entry(key, {}, times, {})
    assert first == entry(key, {}, dict(reversed(times.items())), {})
    assert first["config"] == us(100.2)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("declines", "out of resources"),
        ("wrong", "out is 7 times as far"),
        ("memory", "out of memory"),
        ("segfault", "died by SIGSEGV"),
        ("kill", "died by SIGKILL"),
    ],
)
@pytest.mark.parametrize("late", [0, 1])
def test_a_candidate_that_fails_leaves_its_reason_and_the_others_their_times(
    tune, name, reason, late
):
    found = tune(tuning_key(us(100), fault(name, late=late), us(50)))
    assert found["config"] == us(50)
    [(failed, why)] = found["failed"].items()
    assert f"fault={FAULTS.index(name)}" in failed and reason in why
    assert found["timed"] == {"us=100": 100, "us=50": 50}


@pytest.mark.parametrize("late", [0, 1])
def test_a_candidate_that_hangs_is_given_up(tune, monkeypatch, late):
    monkeypatch.setattr(search, "ANSWER_S", 4.0)
    found = tune(tuning_key(us(100), fault("hang", late=late), us(50)))
    assert found["config"] == us(50)
    assert list(found["failed"].values()) == ["no answer within 4 s"]


def test_the_memory_of_a_dead_worker_is_back_before_the_next_one_starts(log, tmp_path):
    # Readings: one before the first worker; after its death too much twice, then as before.
    used, seen = iter([2**30, 5 * 2**30, 5 * 2**30, 2**30, 2**30]), []

    def read():
        seen.append((next(used), log().count("start")))
        return seen[-1][0]

    (tmp_path / "log").touch()
    memory = Memory(read, set)
    with Tuner(lambda: WorkerHandle("toy", "ours", 0, WORKER), 0, memory) as made:
        assert made.tune(tuning_key(us(100), fault("segfault"), us(50)), {})["config"] == us(50)
    # The last reading is that before the second worker.
    assert [starts for _, starts in seen] == [0, 1, 1, 1, 1] and log().count("start") == 2


def test_the_gpu_is_ours_alone_for_the_timing_only(monkeypatch):
    said = []

    @contextlib.contextmanager
    def locked(exclusive):
        said.append("alone" if exclusive else "shared")
        yield FakeMonitor()
        said.append("free")

    monkeypatch.setattr(
        candidates, "keys_in_sweep", lambda *_: said.append("reached") or [tuning_key(us(9))]
    )
    monkeypatch.setattr(
        candidates, "rejected_candidates", lambda *_: said.append("compiled") or [{}]
    )
    monkeypatch.setattr(tables, "findings", lambda stem: [])
    monkeypatch.setattr(merge, "record", lambda stem, entries: said.append("timed") or entries)
    wanted = ("toy", ["float32"], ["forward"], None, 1)
    tune_command.table(*wanted, worker=WORKER, locked=locked)
    assert said == ["shared", "free", "reached", "compiled", "alone", "free", "timed"]
    devices = iter([Device("A", "90", {}), Device("B", "90", {})])
    monkeypatch.setattr(Tuner, "device", lambda self: next(devices))
    with pytest.raises(UserError, match="compiled for A, and B is what is free"):
        tune_command.table(*wanted, worker=WORKER, locked=locked)


def test_a_new_worker_starts_only_for_a_dead_one(tune, log):
    tune(tuning_key(us(100), fault("declines"), fault("wrong")))
    tune(tuning_key(us(100), us(50)))
    assert log().count("start") == 1
    tune(tuning_key(us(100), fault("segfault")))
    assert log().count("start") == 2


def test_a_candidate_that_cannot_be_launched_is_never_tried(tune, log):
    reason = "300000 bytes of shared memory, 232448 fit"
    found = tune(tuning_key(us(100), us(1), us(50)), {1: reason})
    assert found["config"] == us(50)
    assert found["failed"] == {"us=1": reason}
    assert "prepare 1" not in log()


def test_one_survivor_has_no_runner_up(tune):
    assert tune(tuning_key(us(100), fault("declines")))["runner_up"] is None


@pytest.mark.parametrize("late", [0, 1])
def test_if_the_rules_own_choice_fails_nothing_is_known(tune, late):
    with pytest.raises(search.Lost, match="died by SIGSEGV"):
        tune(tuning_key(us(50), fault("segfault", late=late), rule=1))


TABLE = """
import json
import contextlib
import types

from harness.tune import __main__ as tune

watch = types.SimpleNamespace(used_bytes=lambda: None, users=set)


def lent(exclusive):
    return contextlib.nullcontext(watch)


if __name__ == "__main__":
    wanted = ("toy", ("bfloat16", "float32"), ("forward", "backward"), None, 2)
    print(json.dumps(tune.table(*wanted, worker="fake_tune_worker:FakeTuneWorker", locked=lent)))
"""


@pytest.fixture(scope="module")
def tuned_once(tmp_path_factory):
    """Make the table of test_build's toy kernel file, timed by the fake worker."""
    root = make_tree(tmp_path_factory.mktemp("tree"))
    shutil.copy(ROOT / "tests/support/fake_tune_worker.py", root)
    (root / "table.py").write_text(TABLE)
    environment = os.environ | {"TRITON_CACHE_DIR": str(root / "cache")}
    environment |= {"TILEWRIGHT_COMMIT": "1a2b3c4d", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "table.py"], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return root, json.loads(done.stdout), done.stderr


def test_every_key_of_the_sweep_is_tuned(tuned_once):
    _, table, said = tuned_once
    assert table["device"] == "Fake GPU"
    record = table["families"]["toy"]
    assert (record["commit"], record["dirty"], record["driver"]) == ("1a2b3c4d", False, None)
    assert record["run_id"].endswith("-1a2b3c4-nogpu")
    # The backward pass reaches no kernel that the forward pass does not.
    [(kernel, tuned)] = record["kernels"].items()
    assert kernel == "_double_kernel" and len(tuned["source_sha256"]) == 64
    assert [entry["key"] for entry in tuned["keys"]] == [{"n": 4096}, {"n": 10000}]
    for found in tuned["keys"]:
        assert found["config"] == {"BLOCK_N": 512, "num_warps": 4}
        assert found["runner_up"]["config"] == "BLOCK_N=1024 num_warps=8"
        [(config, reason)] = found["failed"].items()
        assert config == "BLOCK_N=1000 num_warps=4" and "power of 2" in reason
        assert (found["op"], found["dtype"], found["pass"]) == ("double", "bfloat16", "forward")
    assert "tune toy: 2 keys in" in said


@pytest.mark.slow
def test_a_candidate_that_kills_the_compiler_is_told(tmp_path):
    root = make_tree(tmp_path / "tree")
    (root / "dies.py").write_text(
        """
import os
from harness.tune import candidates
from fake_tune_worker import LIMITS

WANTED = ("toy", ("float32",), ("forward",), 1, LIMITS)
def compile(*task):
    if task[2]["BLOCK_N"] == 1024:
        os.abort()
    return ""
candidates._compile = compile

if __name__ == "__main__":
    found = candidates.keys_in_sweep(*WANTED)
    print(candidates.rejected_candidates("toy", found, "90", LIMITS, 2))
"""
    )
    shutil.copy(ROOT / "tests/support/fake_tune_worker.py", root)
    done = subprocess.run([sys.executable, "dies.py"], cwd=root, capture_output=True, text=True)
    assert done.stdout == "[{1: 'the compiler died'}]\n", done.stderr


def test_a_rule_whose_own_choice_fails_costs_its_key_alone(monkeypatch, capsys):
    keys_found = [tuning_key(fault("kill")), tuning_key(us(100), us(90))]
    monkeypatch.setattr(candidates, "keys_in_sweep", lambda *_: keys_found)
    monkeypatch.setattr(candidates, "rejected_candidates", lambda *_: [{}, {}])
    monkeypatch.setattr(tables, "findings", lambda stem: [])
    monkeypatch.setattr(merge, "record", lambda stem, entries: entries)
    wanted = ("toy", ["float32"], ["forward"], None, 1)
    table = tune_command.table(*wanted, worker=WORKER, locked=lent)
    assert [entry["config"] for entry in table["families"]["toy"]["_k"]] == [us(90)]
    assert "the rule's own choice fails: died by SIGKILL" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"tune toy: the worker does not start: .*no_such_worker"):
        tune_command.table(*wanted, worker="tests.support.no_such_worker:Worker", locked=lent)


def test_without_a_gpu_tuning_says_so(tmp_path):
    call = [sys.executable, "-m", "harness.tune", "--file", "softmax"]
    call += ["--out", str(tmp_path / "softmax.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("tilewright: tuning needs a GPU and none is visible; set tuning")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def tuning(mode):
    return (*MEASURE, f"tuning={mode}")


@pytest.mark.slow
def test_only_a_study_that_tunes_has_jobs_for_it(tmp_path):
    tree = small(tmp_path / "tree")
    every = {mode: jobs(tree, *tuning(mode)) for mode in ("replay", "heuristic", "tune")}
    assert every["replay"] == every["heuristic"]
    families = set(discover.ops(tree).values())
    assert every["tune"] - every["replay"] == {f"Tune {family}" for family in families}


# A network holds many kernels, so it is judged and timed again with any of them.
NETWORKS = source_tree.network_ops(ROOT)
STACKS_AGAIN = {
    f"Verify {op} of {stack}"
    for op in NETWORKS
    for stack in source_tree.stacks(ROOT, op)
    if source_tree.rests_on(ROOT, stack) == "triton"
}


def all_again(tree):
    """Return the jobs that run again if other configurations of all our kernels bind."""
    ours = {f"Verify {op} of ours" for op in discover.ops(tree)}
    return ours | STACKS_AGAIN | {f"Measure {op}" for op in source_tree.every_op(tree)}


def again(tree, mode):
    stages = ("Build", "Tune", "Verify", "Measure")
    return {message for message in jobs(tree, *tuning(mode)) if message.startswith(stages)}


@pytest.mark.slow
def test_another_mode_reruns_ours_and_its_times(finished):
    assert again(finished, "replay") == set()
    assert again(finished, "heuristic") == all_again(finished)
    tuned = {f"Tune {family}" for family in discover.ops(finished).values()}
    assert again(finished, "tune") == all_again(finished) | tuned


def test_a_new_table_reruns_what_it_holds(finished):
    folder = finished / "kernels" / "tuned"
    folder.mkdir(exist_ok=True)
    table = {"device": "Fake GPU", "families": {"softmax": {"triton": "1", "kernels": {}}}}
    (folder / "fake-gpu.json").write_text(json.dumps(table))
    touched = {"Build softmax", "Verify softmax of ours", "Measure softmax"} | STACKS_AGAIN
    touched |= {f"Measure {op}" for op in NETWORKS}
    assert again(finished, "replay") == touched
    # The build still lists stale entries; the other jobs use no table.
    assert again(finished, "heuristic") == {"Build softmax"} | all_again(finished)
    (folder / "fake-gpu.json").write_text("{")
    done = snakemake(finished, "--dry-run", *MEASURE)
    assert done.returncode != 0 and "fake-gpu.json: not readable as JSON" in done.stderr
    assert "Traceback" not in done.stderr


STUB = """
import os
import sys


def version(name):
    return "1"


def library(path):
    return "fake"


if __name__ == "__main__":
    out = sys.argv[sys.argv.index("--out") + 1]
    print(os.environ.get("TILEWRIGHT_TUNED", "unset"), file=open(out, "w"))
    for extra in sys.argv[1:]:
        if extra.endswith("raw/softmax.csv"):
            open(extra.replace(".csv", ".json"), "w").close()
    if "--ir" in sys.argv:
        os.makedirs(sys.argv[sys.argv.index("--ir") + 1])
"""


@pytest.mark.parametrize(
    ("mode", "told"),
    [("replay", "unset"), ("heuristic", ""), ("tune", "results/study/tuned")],
)
def test_verify_and_measure_use_the_same_table(tmp_path, mode, told):
    tree = small(tmp_path / "a tree")
    for name in ("machine/environment", "machine/ceilings"):
        (tree / f"harness/{name}.py").write_text(STUB)
    for room in ("build", "tune", "verify", "measure"):
        (tree / f"harness/{room}/__main__.py").write_text(STUB)
    run = tree / "results" / "study"
    words = ["results/study/raw/softmax.csv", *tuning(mode), "baselines=[]"]
    done = snakemake(tree, *words, TILEWRIGHT_TUNED="elsewhere")
    assert done.returncode == 0, done.stderr
    assert (run / "verify/softmax/ours.json").read_text() == f"{told}\n"
    assert (run / "raw/softmax.csv").read_text() == f"{told}\n"
    assert (run / "tuned/softmax.json").exists() == (mode == "tune")

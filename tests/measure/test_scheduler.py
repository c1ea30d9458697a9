"""Check the scheduler: blocks, energy, memory, foreign processes and a lost fork server."""

import json
import os
import re
import signal
import types
from collections import Counter

import pytest

from harness.cli import UserError
from harness.measure import scheduler
from harness.measure.messages import Check, Prepare, TimeBlock
from harness.measure.stopping import REASONS
from harness.workers import forkserver, gpu_memory, pool
from harness.workers.messages import Failure
from tests.support.fake_worker import SLOWLY_S
from tests.support.measuring import BLOCKS, CELLS, FakeMonitor, children, of
from tests.support.patience import PATIENCE_S


def test_a_killed_forkserver_is_no_fault_of_an_implementation(timed, capsys):
    # The second worker is a fresh one, which behaves in the same way.
    rows = timed(["ours", "kills_the_forkserver"])
    assert "lost with the forkserver; once more" in capsys.readouterr().err
    first = of(rows, "kills_the_forkserver")
    assert (first[-1]["status"], first[-1]["reason"]) == ("crashed", pool.POOL_DIED)
    for impl in ("ours", "kills_the_forkserver"):
        assert [row["status"] for row in of(rows, impl, "M2")] == ["ok"] * BLOCKS


def test_a_forkserver_that_others_kill_costs_no_cell(timed, monkeypatch):
    start, calls = pool.WorkerPool.ask, []

    def ask(workers, impls, limit_s, request):
        calls.append(type(request))
        if calls.count(TimeBlock) == 5 and calls[-1] is TimeBlock:
            os.kill(forkserver.current().pid, signal.SIGKILL)
        return start(workers, impls, limit_s, request)

    monkeypatch.setattr(pool.WorkerPool, "ask", ask)
    rows = timed(["ours", "slow"])
    assert [row["status"] for row in rows] == ["ok"] * 2 * BLOCKS * len(CELLS)


def test_a_block_has_the_same_turn_for_all_implementations(timed, monkeypatch):
    ask, turns = pool.WorkerPool.ask, {}

    def noting(workers, impls, limit_s, request):
        if isinstance(request, TimeBlock):
            turns.setdefault(*impls, []).append(request.turn)
        return ask(workers, impls, limit_s, request)

    monkeypatch.setattr(pool.WorkerPool, "ask", noting)
    timed(["ours", "slow"])
    # The first block of each cell is warm-up.
    assert turns == dict.fromkeys(["ours", "slow"], [0, *range(BLOCKS)] * len(CELLS))


def test_the_energy_of_a_call_stands_in_the_row_of_its_last_block(timed):
    for row in timed(["ours", "slow"]):
        last = row["block"] == BLOCKS - 1
        assert (row["energy_uj"], row["energy_pm_uj"]) == ((200.0, 0.5) if last else (None, None))
    assert {row["energy_uj"] for row in timed(["ours"], energy_ms=0)} == {None}
    assert {row["energy_uj"] for row in timed(["ours"], energy_impls=["slow"])} == {None}
    assert {row["energy_uj"] for row in timed(["ours"], energy_impls=[])} == {None}
    # A loop without flushes does not fetch data again that the L2 holds.
    assert {row["energy_uj"] for row in timed(["large_l2"], energy_impls=["large_l2"])} == {None}
    twin = of(timed(["ours", "ours_twin"]), "ours_twin")
    assert len(twin) == BLOCKS and {row["energy_uj"] for row in twin} == {None}


def test_blocks_are_added_until_the_interval_is_narrow(timed, tmp_path):
    rows = timed(["ours", "ours_twin", "noisy"], max_blocks=9)
    assert max(row["block"] for row in rows) == 8
    schedule = json.loads((tmp_path / "raw/fake.json").read_text())["schedule"]
    assert schedule["stopped"] == dict.fromkeys(REASONS, 0) | {"blocks": len(CELLS)}
    rows = timed(["ours", "slow", "noisy"], max_blocks=9)
    assert max(row["block"] for row in rows) == BLOCKS - 1


def test_an_implementation_that_is_slow_in_each_block_is_given_up_for_the_cell(timed, monkeypatch):
    ask, clock = pool.WorkerPool.ask, types.SimpleNamespace(seconds=0.0, case="")

    def slowly(workers, impls, limit_s, request):
        """On this clock a block of "dawdles" takes 0.4 s in the first case, all else no time."""
        clock.case = getattr(request, "case", clock.case)
        answers = ask(workers, impls, PATIENCE_S, request)
        if isinstance(request, TimeBlock) and "dawdles" in answers and clock.case == "M1":
            clock.seconds += min(0.4, limit_s)
            if limit_s < 0.4:
                answers["dawdles"] = Failure("hung", "no answer in time")
        return answers

    monkeypatch.setattr(pool.WorkerPool, "ask", slowly)
    hands = types.SimpleNamespace(monotonic=lambda: clock.seconds)
    monkeypatch.setattr(scheduler, "time", hands)
    rows = timed(["ours", "dawdles"], cell_limit_s=1.0)
    # Each answer comes in time. The warm-up, a block and part of the next fill the second.
    taken = of(rows, "dawdles")
    assert [row["status"] for row in taken] == ["ok", "hung"]
    assert taken[-1]["reason"] == "more than 1 s for its blocks in this cell"
    for impl, name in (("ours", "M1"), ("ours", "M2"), ("dawdles", "M2")):
        assert [row["status"] for row in of(rows, impl, name)] == ["ok"] * BLOCKS
    slow = of(timed(["ours", "dawdles"], cell_limit_s=30.0), "dawdles")
    assert [row["status"] for row in slow] == ["ok"] * BLOCKS


def test_times_beside_another_program_are_marked(timed):
    watch = FakeMonitor(foreign=["process 7 (trainer)", "process 8 (game)"])
    rows = timed(["ours", "hot"], watch)
    assert {(row["status"], row["reason"]) for row in of(rows, "ours")} == {
        ("throttled", "shared with process 7 (trainer)")
    }
    assert {row["reason"] for row in of(rows, "hot")} == {"thermal slowdown"}
    assert {row["device_us"] for row in rows} == {100.0}
    # The driver was asked while both workers were alive.
    assert [len(groups) for groups in watch.groups] == [2] * len(CELLS)


def test_memory_of_the_dead_that_stays_away_ends_the_job(timed, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_memory, "LIMIT_S", 0.1)
    # Readings: idle, all ready, and from then on. One of three workers that hold a GiB each is
    # killed.
    watch = FakeMonitor(2**30, 4 * 2**30)
    with pytest.raises(UserError, match=r"^is_killed: ended, but 256 MiB"):
        timed(["ours", "slow", "is_killed"], watch)
    assert [path.name for path in (tmp_path / "raw").iterdir()] == [".fake.journal"]
    assert not children()


def test_memory_of_the_dead_that_comes_back_is_waited_for(timed):
    watch = FakeMonitor(2**30, *[4 * 2**30] * 4, 3 * 2**30)
    rows = timed(["ours", "slow", "is_killed"], watch)
    assert [row["status"] for row in of(rows, "ours")] == ["ok"] * BLOCKS
    assert watch.used == [3 * 2**30]


def test_memory_of_the_dead_is_back_before_anything_else_is_timed(timed, monkeypatch):
    watch, ask, waiting = FakeMonitor(2**30, 5 * 2**30), pool.WorkerPool.ask, []

    def watched(workers, impls, limit_s, request):
        if isinstance(request, TimeBlock):
            waiting.append(len(watch.used) > 1)
        answers = ask(workers, impls, limit_s, request)
        if any(isinstance(answer, Failure) for answer in answers.values()):
            watch.used = [6 * 2**30] * 3 + [4 * 2**30]
        return answers

    monkeypatch.setattr(pool.WorkerPool, "ask", watched)
    rows = timed(["ours", "slow", "is_killed", "other"], watch)
    died = of(rows, "is_killed")[-1]
    # Other implementations followed in the block in which it died.
    assert (died["status"], died["order"]) == ("crashed", 0)
    assert len(watch.used) == 1 and not any(waiting)


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Return how many processes each implementation has had."""
    log = tmp_path / "prepared"
    monkeypatch.setenv("FAKE_LOG", str(log))

    def processes() -> Counter:
        lines = (line.split() for line in log.read_text().splitlines())
        return Counter(impl for _, impl in {(pid, impl) for pid, _, impl, *_ in lines})

    return processes


@pytest.mark.parametrize("impl", ["slow", "segfaults_at_once"])
def test_a_library_that_tunes_itself_has_its_first_call_after_the_others(
    timed, tmp_path, monkeypatch, impl
):
    log = tmp_path / "prepared"
    monkeypatch.setenv("FAKE_LOG", str(log))
    timed(["ours", impl, "prepares_slowly"], self_tuning={impl: {}}, cells=CELLS[:1])
    began = {line.split()[2]: float(line.split()[1]) for line in log.read_text().splitlines()}
    assert began[impl] - began["prepares_slowly"] >= SLOWLY_S


@pytest.mark.parametrize(
    ("impl", "later"), [("starves_beside_others", True), ("exhausts_memory_at_once", False)]
)
def test_without_memory_beside_others_alone_the_next_cell_is_prepared_after_theirs(
    timed, tmp_path, monkeypatch, impl, later
):
    log = tmp_path / "prepared"
    monkeypatch.setenv("FAKE_LOG", str(log))
    timed(["ours", impl, "prepares_slowly"])
    lines = [line.split() for line in log.read_text().splitlines()]
    late = {}
    for case in ("M1", "M2"):
        began = {name: float(at) for _, at, name, *cell in reversed(lines) if cell[0] == case}
        late[case] = began[impl] - began["prepares_slowly"] >= SLOWLY_S
    assert late == {"M1": False, "M2": later}


def test_a_plan_may_have_one_prepare_and_check_at_a_time(timed, monkeypatch):
    """Networks do not fit side by side; their blocks and releases need no such care."""
    ask, asked = pool.WorkerPool.ask, {}

    def noting(workers, names, limit_s, request):
        names = list(names)
        asked.setdefault(type(request), set()).add(len(names))
        return ask(workers, names, limit_s, request)

    monkeypatch.setattr(pool.WorkerPool, "ask", noting)
    for singly, most in ((False, 3), (True, 1)):
        asked.clear()
        rows = timed(["ours", "ours_twin", "slow"], singly=singly)
        assert {row["status"] for row in rows} == {"ok"}
        assert {max(asked[kind]) for kind in (Prepare, Check)} == {most}


@pytest.mark.parametrize("singly", [True, False])
def test_those_that_cannot_prepare_give_memory_back_before_others_need_it(
    timed, monkeypatch, singly
):
    """If all prepare together, one that found no memory is tried again alone."""
    ask, stop, events = pool.WorkerPool.ask, pool.WorkerPool.stop, []

    def asking(workers, names, limit_s, request):
        names = list(names)
        events.extend((request.do, name) for name in names)
        answers = ask(workers, names, limit_s, request)
        if isinstance(request, Prepare) and len(names) > 1:
            answers["ours"] = Failure("oom", "CUDA out of memory")
        return answers

    def stopping(workers, name):
        events.append(("stop", name))
        return stop(workers, name)

    monkeypatch.setattr(pool.WorkerPool, "ask", asking)
    monkeypatch.setattr(pool.WorkerPool, "stop", stopping)
    failing = ["declines_at_once", "raises_at_once"]
    rows = timed([*failing, "ours"], singly=singly, cells=CELLS[:1])
    assert [row["status"] for row in rows] == ["unsupported", "crashed"] + ["ok"] * BLOCKS
    before = events[: max(n for n, event in enumerate(events) if event == ("prepare", "ours"))]
    assert ("release", failing[0]) in before and ("stop", failing[1]) in before
    assert events.count(("release", failing[0])) == 1


def test_the_memory_of_a_network_that_failed_is_back_before_the_next_one_is_checked(
    timed, monkeypatch
):
    watch, ask, waiting = FakeMonitor(2**30, 5 * 2**30), pool.WorkerPool.ask, []

    def watched(workers, impls, limit_s, request):
        if not isinstance(request, Check):
            return ask(workers, impls, limit_s, request)
        waiting.append(len(watch.used) > 1)
        if len(waiting) > 1:
            return ask(workers, impls, limit_s, request)
        watch.used = [6 * 2**30] * 3 + [4 * 2**30]
        return {impl: Failure("oom", "CUDA out of memory") for impl in impls}

    monkeypatch.setattr(pool.WorkerPool, "ask", watched)
    rows = timed(["torch_eager", "ours", "slow"], watch, singly=True, cells=CELLS[:1])
    assert of(rows, "torch_eager")[-1]["status"] == "oom"
    assert waiting == [False] * 3


def test_a_worker_that_leaks_is_replaced_before_the_next_cell(timed, processes):
    rows = timed(["ours", "leaks"])
    assert {row["status"] for row in rows} == {"ok"}
    assert processes() == {"ours": 1, "leaks": 2}


def test_a_worker_that_crashed_is_replaced_and_one_that_declines_is_not(timed, processes):
    timed(["ours", "raises", "exhausts_memory", "hangs", "declines_at_once", "wrong_later"])
    lost = {"raises": 2, "exhausts_memory": 2, "hangs": 2}
    assert processes() == lost | {"ours": 1, "declines_at_once": 1, "wrong_later": 1}


def test_each_cell_says_where_its_time_went(timed, capsys):
    timed(["ours", "torch_eager"])
    lines = [line for line in capsys.readouterr().err.splitlines() if "prepare" in line]
    stages = r" s: start .*, prepare .*\), block \S+, energy \S+, check .*\), release .*\), rest"
    assert len(lines) == len(CELLS) and all(re.search(stages, line) for line in lines)

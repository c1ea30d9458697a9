"""Check cells with short calls, which several processes of each implementation time."""

import dataclasses

import pytest

from harness.cli import UserError
from harness.measure import scheduler
from harness.measure.messages import Prepare
from harness.workers import gpu_memory, pool
from harness.workers.messages import Failure
from ops._spec import Tensor
from tests.support.fake_worker import GIB
from tests.support.measuring import BLOCKS, CELLS, OP, FakeMonitor, children, of
from tests.support.patience import wait_until

# The calls of fake_bench take 100 us, and those of "fast" 1 us.
SHORT = {"processes": 3, "short_us": 100.1}


def processes(rows, impl, case="M1"):
    return [row["process"] for row in of(rows, impl, case)]


def test_a_short_call_is_timed_in_several_processes_of_each(timed):
    rows = timed(["ours", "ours_twin", "slow"], **SHORT)
    for impl in ("ours", "ours_twin", "slow"):
        for case in ("M1", "M2"):
            assert sorted(processes(rows, impl, case)) == sorted([0, 1, 2] * BLOCKS)
    for block in range(BLOCKS):
        orders = [row["order"] for row in rows if (row["case"], row["block"]) == ("M1", block)]
        assert orders == list(range(9))
    # Energy is measured in one process only.
    used = [row for row in of(rows, "ours") if row["energy_uj"] is not None]
    assert [(row["process"], row["block"]) for row in used] == [(0, BLOCKS - 1)]


@pytest.mark.parametrize(
    ("impls", "changes", "count"),
    [
        (["ours", "slow"], {"processes": 3, "short_us": 100.0}, 1),
        (["ours", "slow"], {"processes": 1, "short_us": 1e9}, 1),
        (["ours", "slow", "fast"], {"processes": 2, "short_us": 100.0}, 2),
    ],
)
def test_the_shortest_call_of_a_cell_decides(timed, impls, changes, count):
    rows = timed(impls, **changes)
    assert {processes(rows, impl).count(0) for impl in impls} == {BLOCKS}
    assert {max(processes(rows, impl)) for impl in impls} == {count - 1}


@pytest.mark.parametrize(("ascending", "count"), [(True, 3), (False, 1)])
def test_an_op_that_searches_a_table_runs_in_several_processes_however_long(
    timed, ascending, count
):
    """The place of the table in memory decides its time, and differs from process to process."""
    inputs = {"x": Tensor("M"), "table": Tensor("M", ascending=ascending)}
    op = dataclasses.replace(OP, inputs=inputs)
    rows = timed(["ours", "slow"], op=op, processes=3, short_us=0.0)
    assert {max(processes(rows, impl)) for impl in ("ours", "slow")} == {count - 1}


class TwoGibEach(FakeMonitor):
    """A driver that counts two GiB for each process: one from its start on, and one of its cell."""

    def used_bytes(self):
        return len(children()) * 2 * GIB


class Small(TwoGibEach):
    """The same driver, of a GPU with so many GiB."""

    def __init__(self, gib):
        super().__init__()
        self.gib = gib

    def free_bytes(self):
        return self.gib * GIB - self.used_bytes()


class Roomy(Small):
    """The same driver, of a large GPU."""

    def __init__(self):
        super().__init__(1000)


# With these a call of the fake op takes at least 2 us.
CEILINGS = {"read": 1000.0, "write": 1000.0}
FURTHER = ["ours#1", "slow#1", "ours#2", "slow#2"]


@pytest.fixture
def exact_memory(monkeypatch):
    """The memory of a lost process comes back soon and to the byte, or the measurement ends."""
    monkeypatch.setattr(gpu_memory, "LIMIT_S", 0.1)
    monkeypatch.setattr(gpu_memory, "TOLERANCE_BYTES", 0)


@pytest.fixture
def events(monkeypatch):
    """Return what the pool does, in order: launch, start and ask (to prepare) with new names."""
    events = []

    def noting(what, call):
        def noted(workers, names, *rest):
            names = list(names)
            seen = {name for kind, earlier in events if kind == what for name in earlier}
            fresh = [name for name in names if name not in seen]
            if fresh and (not rest or isinstance(rest[1], Prepare)):
                events.append((what, fresh))
            return call(workers, names, *rest)

        return noted

    for what in ("launch", "start", "ask"):
        monkeypatch.setattr(pool.WorkerPool, what, noting(what, getattr(pool.WorkerPool, what)))
    return events


def test_further_processes_start_while_the_first_ones_prepare(timed, events):
    rows = timed(["ours", "slow"], Roomy(), ceilings=CEILINGS, **SHORT)
    order = [events.index(each) for each in (("launch", FURTHER), ("start", FURTHER))]
    assert order[0] < events.index(("ask", ["ours", "slow"])) < order[1]
    assert [names for what, names in events if what == "launch"] == [["ours", "slow"], FURTHER]
    assert {row["status"] for row in rows} == {"ok"}
    for impl in ("ours", "slow"):
        assert sorted(processes(rows, impl)) == sorted([0, 1, 2] * BLOCKS)


def test_a_library_that_tunes_itself_does_so_when_all_processes_have_started(
    timed, events, tmp_path
):
    chosen = {"torch_compile": {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "chosen")}}
    impls = ["ours", "torch_compile"]
    timed(impls, Roomy(), ceilings=CEILINGS, self_tuning=chosen, **SHORT)
    started = events.index(("start", [name.replace("slow", impls[1]) for name in FURTHER]))
    assert events.index(("ask", ["ours"])) < started
    assert started < events.index(("ask", ["torch_compile"]))


@pytest.mark.parametrize(
    "changes",
    [
        {"ceilings": {}},
        {"ceilings": CEILINGS, "short_us": 1.9},
        {"ceilings": CEILINGS, "processes": 1},
        {"ceilings": CEILINGS, "watch": "small"},
    ],
)
def test_none_starts_early_if_it_may_not_be_wanted_or_has_no_room(timed, events, changes):
    watch = Small(15) if changes.pop("watch", "") else Roomy()
    timed(["ours", "slow"], watch, **SHORT | changes)
    prepared = events.index(("ask", ["ours", "slow"]))
    assert [names for what, names in events[:prepared] if what == "launch"] == [["ours", "slow"]]


@pytest.mark.parametrize("impl", ["exits_at_once", "exhausts_memory_at_once"])
def test_the_memory_of_a_failed_first_process_comes_back_beside_early_ones(
    timed, impl, exact_memory
):
    rows = timed(["ours", impl], Roomy(), ceilings=CEILINGS, **SHORT)
    assert [row["status"] for row in of(rows, impl)] == [
        {"exits_at_once": "crashed", "exhausts_memory_at_once": "oom"}[impl]
    ]
    for case in ("M1", "M2"):
        assert sorted(processes(rows, "ours", case)) == sorted([0, 1, 2] * BLOCKS)


def test_the_memory_of_a_first_process_is_back_before_further_ones_start(timed, exact_memory):
    """Its warm-up ends it. The others take as much when they start, and nothing would come back."""
    rows = timed(["ours", "exits_to_warm_up"], TwoGibEach(), **SHORT)
    assert [row["status"] for row in of(rows, "exits_to_warm_up")] == ["crashed"]
    assert sorted(processes(rows, "ours")) == sorted([0, 1, 2] * BLOCKS)


def test_processes_are_launched_early_once(timed, monkeypatch):
    """In the first cell a process fails, and so they end; the second cell starts its own."""
    launch, early = scheduler.Scheduler._launch_early, []

    def noting(runner, *about):
        early.append(launch(runner, *about))
        return early[-1]

    monkeypatch.setattr(scheduler.Scheduler, "_launch_early", noting)
    rows = timed(["ours", "exits_at_once"], Roomy(), ceilings=CEILINGS, **SHORT)
    assert [len(names) for names in early] == [4, 0]
    assert sorted(processes(rows, "exits_at_once", "M2")) == sorted([0, 1, 2] * BLOCKS)


class NeverLess(Roomy):
    """The same driver, with memory that no end of a process gives back."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def used_bytes(self):
        self.most = max(self.most, super().used_bytes())
        return self.most

    def users(self):
        self.used_bytes()
        return super().users()


def test_memory_that_stays_away_is_seen_beside_early_processes(timed, exact_memory):
    with pytest.raises(UserError, match="have not come back"):
        timed(["ours", "exits_at_once"], NeverLess(), ceilings=CEILINGS, **SHORT)


def test_memory_is_that_of_the_early_processes_too_when_one_fails_later(timed, exact_memory):
    """A library that tunes itself prepares when they have started, and fails."""
    alone = {"exits_at_once": {}}
    rows = timed(["ours", *alone], Roomy(), ceilings=CEILINGS, self_tuning=alone, **SHORT)
    assert [row["status"] for row in of(rows, "exits_at_once")] == ["crashed"]
    assert sorted(processes(rows, "ours")) == sorted([0, 1, 2] * BLOCKS)


def test_an_early_process_that_does_not_start_costs_no_time(
    timed, monkeypatch, capsys, exact_memory
):
    start = pool.WorkerPool.start

    def fails_once(workers, names):
        answers = start(workers, names)
        if "slow#1" in answers and not lost:
            lost.append("slow#1")
            workers._workers["slow#1"].kill()
            answers["slow#1"] = Failure("crashed", "died by SIGKILL")
        return answers

    lost = []
    monkeypatch.setattr(pool.WorkerPool, "start", fails_once)
    rows = timed(["ours", "slow"], Roomy(), ceilings=CEILINGS, **SHORT)
    assert lost and {row["status"] for row in rows} == {"ok"}
    for impl in ("ours", "slow"):
        assert sorted(processes(rows, impl)) == sorted([0, 1, 2] * BLOCKS)


def test_memory_that_early_processes_held_is_no_result_of_the_first_one(timed, monkeypatch):
    """It is the only implementation, and finds memory when they have ended."""
    launch = scheduler.Scheduler._launch_early

    def waiting(runner, *about):
        names = launch(runner, *about)
        wait_until(lambda: len(children()) >= 1 + len(names))
        return names

    monkeypatch.setattr(scheduler.Scheduler, "_launch_early", waiting)
    rows = timed(["crowded_in_other_cells"], Roomy(), ceilings=CEILINGS, **SHORT)
    assert {row["status"] for row in rows} == {"ok"}


def test_an_implementation_has_a_time_without_the_processes_that_cannot_prepare(
    timed, capsys, exact_memory
):
    """In "room_for_one" the first process has all of the GPU's memory.

    The memory that further processes hold without a cell is not that of the ones left out.
    """
    rows = timed(["ours", "room_for_one"], TwoGibEach(), **SHORT)
    assert processes(rows, "room_for_one") == [0] * BLOCKS
    assert {row["status"] for row in rows} == {"ok"}
    assert sorted(processes(rows, "ours")) == sorted([0, 1, 2] * BLOCKS)
    assert "room_for_one#2: left out: oom: OutOfMemoryError" in capsys.readouterr().err


def test_a_further_process_that_does_not_start_is_left_out(
    timed, monkeypatch, capsys, exact_memory
):
    """A GPU takes only so many processes. The others have taken memory as they started."""
    start = pool.WorkerPool.start

    def refuses_one(workers, names):
        answers = start(workers, names)
        if "slow#2" in answers:
            workers._workers["slow#2"].kill()
            answers["slow#2"] = Failure("oom", "CUDA error: out of memory")
        return answers

    monkeypatch.setattr(pool.WorkerPool, "start", refuses_one)
    rows = timed(["ours", "slow"], TwoGibEach(), **SHORT)
    assert {row["status"] for row in rows} == {"ok"}
    assert sorted(processes(rows, "ours")) == sorted([0, 1, 2] * BLOCKS)
    assert sorted(processes(rows, "slow")) == sorted([0, 1] * BLOCKS)
    assert "slow#2: left out: oom: CUDA error" in capsys.readouterr().err


def test_the_memory_of_processes_that_start_late_is_not_that_of_a_lost_one(
    timed, monkeypatch, exact_memory
):
    """Three do not start at first. Two of them have the cell then, and the last finds no memory."""
    start, last = pool.WorkerPool.start, "exhausts_memory_at_once"
    refused = {"slow", "fast", last}

    def refuses_first(workers, names):
        answers = start(workers, names)
        for name in refused.intersection(answers):
            refused.remove(name)
            workers._workers[name].kill()
            answers[name] = Failure("oom", "CUDA error: out of memory")
        return answers

    monkeypatch.setattr(pool.WorkerPool, "start", refuses_first)
    rows = timed(["ours", "slow", "fast", last], TwoGibEach(), cells=CELLS[:1])
    assert [row["status"] for row in of(rows, last)] == ["oom"]
    for impl in ("ours", "slow", "fast"):
        assert [row["status"] for row in of(rows, impl)] == ["ok"] * BLOCKS


@pytest.mark.parametrize(("most", "count"), [(6, 3), (5, 2), (4, 2), (3, 1), (1, 1)])
@pytest.mark.parametrize("early", [True, False])
def test_no_more_processes_are_started_than_a_gpu_takes(
    timed, events, monkeypatch, most, count, early
):
    monkeypatch.setattr(scheduler, "MOST_PROCESSES", most)
    rows = timed(["ours", "slow"], Roomy(), ceilings=CEILINGS if early else {}, **SHORT)
    assert sum(len(names) for what, names in events if what == "launch") == 2 * count
    for impl in ("ours", "slow"):
        assert sorted(processes(rows, impl)) == sorted([*range(count)] * BLOCKS)


@pytest.mark.parametrize(("gib", "count"), [(12, 3), (11, 2), (7, 1)])
def test_no_more_processes_are_started_than_memory_holds(timed, capsys, gib, count):
    """Two GiB each: the first ones take four, and each further one of both implementations four."""
    rows = timed(["ours", "slow"], Small(gib), cells=CELLS[:1], **SHORT)
    for impl in ("ours", "slow"):
        assert sorted(processes(rows, impl)) == sorted([*range(count)] * BLOCKS)
    said = capsys.readouterr().err
    assert "left out" not in said
    assert (f"memory for {count - 1} of 2 further processes each" in said) == (count < 3)


@pytest.mark.parametrize("impl", ["crowded", "crowded_at_start", "crowded_in_a_block"])
def test_processes_that_wait_make_room_for_a_cell_without_memory(timed, impl):
    """The second cell finds no memory beside more than one other process."""
    rows = timed(["ours", impl], **SHORT)
    assert {row["status"] for row in rows} == {"ok"}
    assert sorted(processes(rows, impl, "M1")) == sorted([0, 1, 2] * BLOCKS)
    assert processes(rows, impl, "M2") == [0] * BLOCKS
    assert sorted(processes(rows, "ours", "M2")) == sorted([0, 1, 2] * BLOCKS)


def test_processes_that_wait_make_room_for_one_that_is_replaced(timed):
    impl = "crowded_at_the_next_start"
    rows = timed(["ours", impl], **SHORT)
    assert "crashed" in {row["status"] for row in of(rows, impl, "M1")}
    assert {row["status"] for row in of(rows, impl, "M2")} == {"ok"}


def test_a_process_that_fails_ends_its_implementation_and_no_other(timed):
    rows = timed(["ours", "exits"], **SHORT)
    failed = [row for row in of(rows, "exits") if row["status"] != "ok"]
    assert [(row["block"], row["reason"]) for row in failed] == [(1, "exited with code 3")]
    assert max(row["block"] for row in of(rows, "exits")) == 1
    assert sorted(processes(rows, "ours")) == sorted([0, 1, 2] * BLOCKS)
    # In the next cell all processes run again.
    assert sorted(processes(rows, "exits", "M2")) == sorted([0, 1, 2] * BLOCKS)


def test_wrong_results_of_several_processes_are_one_reason(timed):
    rows = of(timed(["ours", "wrong_later"], **SHORT), "wrong_later")
    assert {(row["status"], row["reason"]) for row in rows} == {("inaccurate", "output 0 changed")}


def test_a_choice_made_before_is_found_by_each_process(timed, tmp_path, monkeypatch):
    """A library that tunes itself prepares after the others, one process at a time."""
    log = tmp_path / "log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    chosen = {"torch_compile": {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "chosen")}}
    timed(["ours", "torch_compile"], self_tuning=chosen, **SHORT)
    words = [line.split()[2] for line in log.read_text().splitlines()]
    assert words.count("chose") == 2 and words.count("found") == 4

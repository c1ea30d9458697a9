"""Check that self-tuning libraries tune alone, and that nothing is measured before they have."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.calls.cell import Cell
from harness.cli import UserError
from harness.machine import gpu_lock
from harness.measure import autotune
from harness.measure.messages import Compiled
from harness.project import fingerprint, registry, source_tree
from harness.project.source_tree import self_tuned
from harness.results import choices, raw
from harness.workers.messages import Failure
from tests.support.fake_nvml import FAKE
from tests.support.fake_worker import CANDIDATES, LAST_CASE
from tests.support.measuring import ROOT, WORKER
from tests.support.patience import PATIENCE_S

OP, FAMILY = "scale", "vector"
PASSES = list(registry.op(OP)[0].passes)
UUID = "GPU-00-fake"


def words(out, impl):
    """Return the options that tune `impl` for two cells of scale."""
    found = ["--op", OP, "--impl", impl, "--out", str(out), "--worker", WORKER]
    found += ["--dtypes", "bfloat16", "--max-cases", "1", "--cell-timeout-s", str(PATIENCE_S)]
    return found


@pytest.fixture
def command(driver, monkeypatch, tmp_path):
    """Do as `python -m harness.measure.autotune` for two cells of scale; return its report.

    In this process, since a new one would import PyTorch first, to fork its workers.
    """
    (tmp_path / "pynvml.py").write_text(FAKE)

    def run(impl, *more) -> dict:
        out = tmp_path / "autotune" / OP / f"{impl}.json"
        monkeypatch.setattr(sys, "argv", ["autotune", *words(out, impl), *more])
        with mock.patch.dict(os.environ, {"FAKE_LOG": str(tmp_path / "prepared")}):
            for name in (*choices.KEEP, *choices.FOLDERS):
                os.environ.pop(name, None)
            autotune.main()
        return json.loads(out.read_text())

    return run


def test_the_command_is_a_process_of_its_own(tmp_path):
    (tmp_path / "pynvml.py").write_text(FAKE)
    environment = os.environ | {gpu_lock.LOCKS: str(tmp_path), "PYTHONPATH": str(tmp_path)}
    environment["FAKE_LOG"] = str(tmp_path / "prepared")
    for name in ("CUDA_VISIBLE_DEVICES", *choices.KEEP, *choices.FOLDERS):
        environment.pop(name, None)
    out = tmp_path / "says_how_it_tunes.json"
    call = [sys.executable, "-m", "harness.measure.autotune", *words(out, out.stem)]
    subprocess.run(call, cwd=ROOT, env=environment, check=True)
    assert {cell["reason"] for cell in json.loads(out.read_text())["cells"]} == {"kept"}


def test_a_library_meets_each_cell_told_to_keep_what_it_chooses(command):
    found = command("says_how_it_tunes")
    assert found["gpu"] == {"name": "NVIDIA H200", "uuid": UUID}
    assert found["code_sha256"] == fingerprint.implementation(ROOT, FAMILY, found["impl"])
    assert [cell["cell"].split()[-1] for cell in found["cells"]] == PASSES
    assert {cell["reason"] for cell in found["cells"]} == {"kept"}


def test_the_log_tells_how_far_each_phase_is(command, capsys):
    cells = [each["cell"] for each in command("fast")["cells"]]
    told = [line.split(": ") for line in capsys.readouterr().err.splitlines()]
    found = [line for line in told if line[0] == f"compile {OP} fast"]
    assert {(cell.split(",")[0], status.split(", ")[0]) for _, cell, status in found} == {
        (cell, "ok") for cell in cells
    }
    found = [line for line in told if line[0] == f"tune {OP} fast"]
    assert [line[1:3] for line in found] == [
        [f"{number} of {len(cells)}", cell] for number, cell in enumerate(cells, 1)
    ]
    assert all(re.fullmatch(r"ok, \d+\.\d+ s", line[3]) for line in found)


def noted(tmp_path):
    """Return what torch_compile has noted since the last call: "chose" or "found" for each cell."""
    log = tmp_path / "prepared"
    words = [line.split()[-1] for line in log.read_text().splitlines()] if log.exists() else []
    log.unlink(missing_ok=True)
    return [word for word in words if word in ("chose", "found")]


def compiled(impl, cells, processes=2, limit_s=PATIENCE_S):
    """Compile cells in fake workers; return those that hung."""
    return autotune.compile_beforehand(OP, impl, cells, WORKER, limit_s, {}, processes)


def prepared(log):
    """Return the words of a log's lines for each cell."""
    lines = [line.split() for line in log.read_text().splitlines()]
    return [words for words in lines if words[2] != "compiles"]


# Once side by side and once alone.
TWICE = 2 * len(PASSES)


def test_a_choice_made_alone_is_found_by_the_clock_and_not_made_again(command, measure, tmp_path):
    command("torch_compile")
    assert noted(tmp_path) == ["chose"] * TWICE
    assert measure().returncode == 0
    assert noted(tmp_path) == ["found"] * len(PASSES)
    _, sidecar = raw.read(tmp_path / "raw/scale.csv", "")
    assert sidecar["autotuned"]["torch_compile"]["gpu"] == UUID
    command("torch_compile")
    assert noted(tmp_path) == ["chose"] * TWICE


def test_all_is_compiled_by_other_processes_before_one_chooses(command, tmp_path):
    command("torch_compile")
    cells = [line.split() for line in (tmp_path / "prepared").read_text().splitlines()]
    cells = [words for words in cells if words[-1] == "chose"]
    beside, alone = cells[: len(PASSES)], cells[len(PASSES) :]
    assert len({words[0] for words in alone}) == 1
    assert not {words[0] for words in beside} & {words[0] for words in alone}
    kept = tmp_path / "autotune" / OP / "torch_compile" / "inductor"
    assert len(list(kept.glob("*.cubin"))) == len(list(kept.glob("*.best_config"))) == len(PASSES)


def test_others_use_the_gpu_while_it_compiles_and_nobody_while_it_chooses(
    driver, monkeypatch, tmp_path
):
    def is_free(exclusive):
        try:
            with gpu_lock.hold(exclusive, wait_s=0):
                return True
        except UserError:
            return False

    found = {}

    def at(name):
        def run(op, impl, cells, *_):
            found[name] = is_free(exclusive=False), is_free(exclusive=True)
            return {}

        return run

    monkeypatch.setattr(autotune, "compile_beforehand", at("compiling"))
    monkeypatch.setattr(autotune, "tuned", at("choosing"))
    monkeypatch.setattr(autotune.forkserver, "current", lambda: None)
    out = tmp_path / "torch_compile.json"
    words = ["autotune", "--op", OP, "--impl", "torch_compile", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    autotune.main()
    assert found == {"compiling": (True, False), "choosing": (False, False)}
    assert json.loads(out.read_text())["gpu"]["uuid"] == UUID


def phase(command, name, impl, *more):
    """Do as the command of one phase; return its error, None if it has none."""
    with contextlib.suppress(FileNotFoundError):
        try:
            command(impl, "--phase", name, *more)
        except UserError as error:
            return str(error)
    return None


def test_a_part_tunes_for_its_shapes_alone(command):
    every = command("says_how_it_tunes", "--max-cases", "3")["cells"]
    found = [
        command("says_how_it_tunes", "--max-cases", "3", "--part", f"{number}/2")["cells"]
        for number in (1, 2)
    ]
    names = [[each["cell"] for each in cells] for cells in found]
    assert all(names) and not set(names[0]) & set(names[1])
    assert sorted(names[0] + names[1]) == sorted(each["cell"] for each in every)


def test_the_phases_are_two_jobs_and_the_second_may_be_repeated(command, tmp_path):
    folder = tmp_path / "autotune" / OP
    report, compiled = folder / "torch_compile.json", folder / "torch_compile.compiled.json"
    (folder / "torch_compile").mkdir(parents=True)
    stale = folder / "torch_compile/older.cubin"
    stale.touch()
    report.touch()
    assert phase(command, "compile", "torch_compile") is None
    assert compiled.exists() and not report.exists() and not stale.exists()
    programs = set(folder.rglob("*.cubin"))
    assert len(programs) == len(PASSES) == len(noted(tmp_path))
    for _ in range(2):
        report.unlink(missing_ok=True)
        assert phase(command, "tune", "torch_compile") is None
        # It finds no choice, and has compiled nothing anew in the folder.
        assert noted(tmp_path) == ["chose"] * len(PASSES)
        assert set(folder.rglob("*.cubin")) == programs and report.exists()
    assert phase(command, "compile", "torch_compile") is None
    assert not report.exists() and compiled.exists()


def test_a_library_chooses_only_among_programs_of_its_code_and_gpu(command, tmp_path):
    folder = tmp_path / "autotune" / OP
    compiled = folder / "fast.compiled.json"
    again = "compile again with --phase compile"
    assert phase(command, "tune", "fast") == f"{compiled}: missing; {again}"
    assert phase(command, "compile", "fast") is None
    whole = json.loads(compiled.read_text())
    spoilt = {
        "is of other code or another version; " + again: {"code_sha256": "older"},
        f"is of another GPU, A100; {again}, or remove it": {"gpu": {"name": "A100", "uuid": "A"}},
    }
    for words, changes in spoilt.items():
        compiled.write_text(json.dumps(whole | changes))
        assert phase(command, "tune", "fast") == f"{compiled}: {words}"
    # Another board of that model has the same programs.
    compiled.write_text(json.dumps(whole | {"gpu": whole["gpu"] | {"uuid": "GPU-else"}}))
    assert phase(command, "tune", "fast") is None
    assert (folder / "fast.json").exists()


def test_a_cell_that_hung_is_named_by_the_first_phase_and_left_out_by_the_second(
    command, monkeypatch, tmp_path
):
    hung = {}

    def beforehand(op, impl, cells, *_):
        hung[str(cells[0])] = 720.0
        return hung

    monkeypatch.setattr(autotune, "compile_beforehand", beforehand)
    assert phase(command, "compile", "fast") is None
    (first, *others) = command("fast", "--phase", "tune")["cells"]
    assert first == {
        "cell": next(iter(hung)), "status": "hung", "reason": "compiling took longer than 720 s",
        "s": 0.0,
    }  # fmt: skip
    assert [each["status"] for each in others] == ["ok"] * (len(PASSES) - 1)


def test_the_others_are_compiled_while_one_cell_takes_its_time(monkeypatch, tmp_path):
    """The first of two workers ends when the second has been asked for all other cells."""
    log, others = tmp_path / "prepared", 4
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("FAKE_OTHERS", str(others))
    names = ["M1", *[LAST_CASE] * others]
    cells = [Cell(SimpleNamespace(name=name), "bfloat16", "forward") for name in names]
    compiled("waits_for_others", cells)
    asked = prepared(log)
    (slow,) = {words[0] for words in asked if "M1" in words}
    assert len({words[0] for words in asked if LAST_CASE in words} - {slow}) == 1
    assert len(asked) == len(cells)


def test_the_passes_of_a_case_are_compiled_one_after_another(monkeypatch, tmp_path):
    """They share kernels, which passes side by side would each compile."""
    log = tmp_path / "prepared"
    monkeypatch.setenv("FAKE_LOG", str(log))
    cases = [SimpleNamespace(name=name) for name in ("M1", LAST_CASE)]
    cells = [Cell(case, "bfloat16", pass_) for case in cases for pass_ in PASSES]
    compiled("fast", cells, processes=1)
    asked = [words[-1] for words in prepared(log)]
    assert asked == [pass_ for pass_ in PASSES for _ in cases]


def test_the_largest_shapes_are_compiled_first():
    """As seen on a GPU: the longest call began when the other processes had nothing left to do."""
    cells = [Cell(SimpleNamespace(name=f"M{n}"), "bfloat16", "forward") for n in range(3)]
    turns = autotune.Turns(cells)
    assert [turns.take()[0] for _ in cells] == cells[::-1]


def test_compiling_does_not_give_way_to_a_job_that_waits_for_the_gpu_alone(
    command, monkeypatch, tmp_path
):
    """It compiles all cells on the GPU on which it has begun, and the mark goes with it."""
    monkeypatch.setenv("FAKE_GPUS", "2")
    (gpu, _), log, begun = gpu_lock.gpus(), tmp_path / "prepared", []
    compile_beforehand = autotune.compile_beforehand

    def beforehand(op, impl, cells, *about):
        *about, _ = about
        begun.append(os.environ["CUDA_VISIBLE_DEVICES"])
        with contextlib.ExitStack() as announced:
            gpu_lock._mark(gpu, gpu_lock.AWAITED, announced)
            assert not gpu_lock.is_awaited(gpu)
            found = compile_beforehand(op, impl, cells, *about, 1)
        assert [words[-1] for words in prepared(log)] == PASSES
        log.unlink()
        return found

    monkeypatch.setattr(autotune, "compile_beforehand", beforehand)
    assert [cell["status"] for cell in command("fast")["cells"]] == ["ok"] * len(PASSES)
    assert begun == [UUID]
    assert not gpu_lock._is_marked(gpu, gpu_lock.COMPILING)


def test_a_cell_that_hangs_while_it_is_compiled_is_named_and_no_other(monkeypatch, tmp_path):
    """The crashed one may have been unlucky with its neighbours."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "prepared"))
    stuck, fine = (Cell(SimpleNamespace(name=name), "bfloat16", "forward") for name in ("M1", "M2"))
    assert compiled("hangs_at_once", [stuck, fine], limit_s=5.0).keys() == {str(stuck)}
    assert compiled("segfaults_at_once", [stuck, fine]) == {}


def limits(monkeypatch, tmp_path, cells, processes):
    """Return what each wait for a call allowed it, in seconds, where calls of M1 hang."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "prepared"))
    clock = SimpleNamespace(now=0.0)
    found = []

    def first_answers(pool, began, limit_s):
        found.append((len(began), limit_s))
        # Ten seconds pass before any answer, and the calls that hang have theirs last.
        clock.now += 10.0
        fine = [name for name, each in asked.items() if each.case != "M1" and name in began]
        names = fine or list(began)
        return {n: Compiled(1) if n in fine else Failure("hung", "") for n in names[:1]}

    asked = {}

    def send(pool, name, request):
        asked[name] = request

    answers = {"start": lambda pool, names: {}, "ask": lambda pool, names, *_: {}}
    answers |= {"first_answers": first_answers, "send": send, "stop": lambda pool, name: None}
    for name, answer in answers.items():
        monkeypatch.setattr(autotune.WorkerPool, name, answer)
    monkeypatch.setattr(autotune, "time", SimpleNamespace(monotonic=lambda: clock.now))
    hung = compiled("fast", cells, processes, limit_s=20.0)
    return found, hung


@pytest.mark.parametrize(("others", "last_s"), [(0, 20.0), (1, 30.0), (5, 70.0), (9, 80.0)])
def test_the_last_call_has_the_plain_limit_from_when_it_is_the_last(
    monkeypatch, tmp_path, others, last_s
):
    """It never has more than beside others: COMPILING times the limit."""
    stuck = Cell(SimpleNamespace(name="M1"), "bfloat16", "forward")
    cells = [Cell(SimpleNamespace(name=f"N{n}"), "bfloat16", "forward") for n in range(others)]
    found, hung = limits(monkeypatch, tmp_path, [*cells, stuck], processes=2)
    most_s = autotune.COMPILING * 20.0
    assert found == [(2, most_s)] * others + [(1, last_s)] and hung == {str(stuck): last_s}


def test_a_call_beside_which_others_wait_for_their_turn_keeps_its_limit(monkeypatch, tmp_path):
    cells = [Cell(SimpleNamespace(name=name), "bfloat16", "forward") for name in ("N1", "M1")]
    found, _ = limits(monkeypatch, tmp_path, cells, processes=1)
    assert found == [(1, autotune.COMPILING * 20.0), (1, 20.0)]


def test_a_cell_that_hung_while_it_was_compiled_is_not_tried_again(command, monkeypatch, tmp_path):
    """As seen on a GPU: it cost 180 s more, while nothing else could use the GPU."""
    compile_beforehand, noted = autotune.compile_beforehand, []

    def beforehand(op, impl, cells, worker, limit_s, *about):
        found = compile_beforehand(op, impl, cells, worker, 1.0, *about)
        noted.append((tmp_path / "prepared").read_text())
        return found

    monkeypatch.setattr(autotune, "compile_beforehand", beforehand)
    (found,) = command("hangs_at_once", "--passes", "forward")["cells"]
    assert found["status"] == "hung" and found["cell"].endswith("forward")
    assert re.fullmatch(r"compiling took longer than \d+ s", found["reason"])
    assert (tmp_path / "prepared").read_text() == noted[0]


def test_nothing_is_compiled_if_no_worker_starts(monkeypatch, tmp_path):
    log = tmp_path / "prepared"
    monkeypatch.setenv("FAKE_LOG", str(log))
    compiled("absent", [Cell(SimpleNamespace(name="M1"), "bfloat16", "forward")])
    assert not log.exists()


def test_no_worker_starts_if_there_is_nothing_to_compile(monkeypatch):
    started = []
    start = autotune.WorkerPool.start

    def starting(pool, names):
        started.extend(names)
        return start(pool, names)

    monkeypatch.setattr(autotune.WorkerPool, "start", starting)
    compiled("fast", [])
    assert not started


def test_each_candidate_is_compiled_in_a_call_of_its_own(monkeypatch, tmp_path):
    """The first call compiles the last one, and the next pass begins when all are compiled."""
    log = tmp_path / "prepared"
    monkeypatch.setenv("FAKE_LOG", str(log))
    passes = ("forward", "both")
    cells = [Cell(SimpleNamespace(name="M1"), "bfloat16", pass_) for pass_ in passes]
    compiled("has_candidates", cells)
    lines = [line.split() for line in log.read_text().splitlines()]
    for pass_ in passes:
        (first, *others), lines = lines[: 2 * CANDIDATES], lines[2 * CANDIDATES :]
        assert first[2:] == ["compiles", "None"]
        named = [words[3] for words in others if words[2] == "compiles"]
        assert sorted(named) == [str(n) for n in range(CANDIDATES - 1)]
        assert {words[-1] for words in others if words[2] != "compiles"} == {pass_}
    assert not lines


def test_the_candidates_of_one_cell_are_compiled_by_several_processes(monkeypatch, tmp_path):
    log = tmp_path / "prepared"
    monkeypatch.setenv("FAKE_LOG", str(log))
    cell = Cell(SimpleNamespace(name="M1"), "bfloat16", "forward")
    compiled("has_candidates", [cell], processes=4)
    assert len({words[0] for words in prepared(log)[1:]}) == CANDIDATES - 1


def test_a_backward_pass_begins_when_the_forward_pass_has_one_candidate():
    """As seen on a GPU: some candidates of norms of flash-attn compile for four minutes."""
    cells = [Cell(SimpleNamespace(name="M1"), "bfloat16", pass_) for pass_ in PASSES]
    forward, backward, both = cells
    turns = autotune.Turns(cells)
    assert turns.take() == (forward, None) and not turns
    turns.done(forward, None, Compiled(3))
    assert [turns.take() for _ in range(3)] == [(forward, 0), (forward, 1), (backward, None)]
    turns.done(backward, None, Compiled(2))
    turns.done(forward, 0, Compiled(3))
    assert turns.take() == (backward, 0) and not turns
    turns.done(backward, 0, Compiled(2))
    # Calls of both passes would compile what the forward pass is still at.
    assert not turns
    turns.done(forward, 1, Compiled(3))
    assert turns.take() == (both, None) and not turns


@given(st.lists(st.tuples(st.sampled_from("ABC"), st.sampled_from(PASSES)), unique=True), st.data())
def test_each_cell_has_a_turn_for_each_candidate_and_passes_follow_each_other(pairs, data):
    cells = [Cell(SimpleNamespace(name=name), "bfloat16", pass_) for name, pass_ in pairs]
    turns, at_work, taken = autotune.Turns(cells), [], []
    counts = {str(each): data.draw(st.integers(1, 4)) for each in cells}
    while turns or at_work:
        if turns and (not at_work or data.draw(st.booleans())):
            cell, candidate = turns.take()
            others = [each for each in at_work if each[0].case is cell.case]
            passes = {each.pass_ for each, _ in others} | {cell.pass_}
            assert len(passes) == 1 or passes == {"forward", "backward"}
            # The first call of a forward pass has its case alone.
            assert ("forward", None) not in {(each.pass_, number) for each, number in others}
            at_work.append((cell, candidate))
            taken.append((str(cell), candidate))
        else:
            cell, candidate = at_work.pop(data.draw(st.integers(0, len(at_work) - 1)))
            failed = data.draw(st.booleans()) and candidate is None and counts[str(cell)] == 1
            said = Failure("crashed", "") if failed else Compiled(counts[str(cell)])
            turns.done(cell, candidate, said)
    wanted = [(n, each) for n, c in counts.items() for each in (None, *range(c - 1))]
    assert sorted(taken, key=str) == sorted(wanted, key=str)


@pytest.mark.parametrize("chosen_in_a_graph", [False, True])
def test_compiled_kernels_stay_and_choices_go(tmp_path, chosen_in_a_graph):
    compiled = ["inductor/ab/kernel.py", "triton/x/kernel.cubin", "quack/y/kernel.o"]
    graphs = ["inductor/fxgraph/f", "inductor/aotautograd/a"]
    choice = ["inductor/ab/k.best_config", "triton/z/f.autotune.json", "quack/w/f.autotune.json"]
    choice += ["inductor/cache/times"] if chosen_in_a_graph else []
    for name in (*compiled, *graphs, *choice):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    choices.forget(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {*compiled, *(() if chosen_in_a_graph else graphs)}


def test_choices_of_another_board_are_refused_in_one_line(command, measure, tmp_path):
    command("torch_compile")
    path = tmp_path / "autotune" / OP / "torch_compile.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps(report | {"gpu": {"name": "NVIDIA H200", "uuid": "GPU-else"}}))
    done = measure()
    assert done.returncode == 2 and not (tmp_path / "raw/scale.csv").exists()
    assert done.stderr == (
        f"tilewright: {path.parent}: libraries tuned themselves on another board, GPU-else; remove"
        " it and start again\n"
    )


def test_all_libraries_choose_on_the_first_board(command, monkeypatch):
    monkeypatch.setenv("FAKE_GPUS", "2")
    assert {command("torch_compile")["gpu"]["uuid"] for _ in range(3)} == {UUID}


@pytest.mark.parametrize(("asked", "compiles_on"), [("GPU-11-fake", "GPU-11-fake"), ("any", UUID)])
def test_a_library_compiles_on_the_board_that_is_named_for_it(
    command, monkeypatch, asked, compiles_on
):
    monkeypatch.setenv("FAKE_GPUS", "2")
    held, plain = [], gpu_lock.hold

    @contextlib.contextmanager
    def hold(exclusive, **more):
        with plain(exclusive, **more) as gpu:
            held.append((exclusive, gpu.uuid))
            yield gpu

    monkeypatch.setattr(gpu_lock, "hold", hold)
    found = command("torch_compile", "--compile-board", asked)
    assert held == [(False, compiles_on), (True, UUID)] and found["gpu"]["uuid"] == UUID


def test_a_library_that_falls_while_it_tunes_meets_the_next_cell_nevertheless(command):
    found = command("segfaults_at_once")
    assert [cell["status"] for cell in found["cells"]] == ["crashed"] * len(PASSES)
    assert {cell["reason"] for cell in found["cells"]} == {"died by SIGSEGV"}


@pytest.mark.parametrize(("impl", "workers"), [("slow", 1), ("keeps_memory", len(PASSES))])
def test_a_worker_that_cannot_give_memory_back_is_replaced(command, tmp_path, impl, workers):
    assert [cell["status"] for cell in command(impl)["cells"]] == ["ok"] * len(PASSES)
    prepared = (tmp_path / "prepared").read_text().splitlines()[-len(PASSES) :]
    assert len({line.split()[0] for line in prepared}) == workers


def test_a_library_that_is_not_here_has_nothing_to_tune(command):
    assert [cell["status"] for cell in command("absent")["cells"]] == ["unavailable"]


@pytest.fixture
def measure(tmp_path, arguments):
    """Run `python -m harness.measure` for ours and torch_compile, as `command` does."""

    def run() -> subprocess.CompletedProcess:
        environment = os.environ | {gpu_lock.LOCKS: str(tmp_path), "PYTHONPATH": str(tmp_path)}
        environment["FAKE_LOG"] = str(tmp_path / "prepared")
        for name in ("CUDA_VISIBLE_DEVICES", *choices.FOLDERS):
            environment.pop(name, None)
        call = [sys.executable, "-m", "harness.measure", *arguments("ours", "torch_compile")]
        return subprocess.run(call, cwd=ROOT, env=environment, capture_output=True, text=True)

    return run


@pytest.fixture
def tree(tmp_path):
    """Make a tree with one baseline that tunes itself for one op, and its report."""
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines/tunes.py").write_text('AUTOTUNES = ("matmul",)\n')
    (tmp_path / "baselines/plain.py").write_text("LIBRARY = 'plain'\n")
    (tmp_path / "matmul").mkdir()
    gpu = {"name": "NVIDIA H200", "uuid": UUID}
    content = {"op": "matmul", "impl": "tunes", "code_sha256": "tunes", "gpu": gpu, "cells": []}
    content |= {"date": "2026-11-22T00:00:00Z"}
    (tmp_path / "matmul/tunes.json").write_text(json.dumps(content))
    (tmp_path / "matmul/tunes").mkdir()
    return tmp_path


def required(tree, op="matmul"):
    impls = ["ours", "ours_twin", "plain", "tunes"]
    return autotune.required(tree, tree, op, impls, lambda impl: impl)


def test_the_choices_of_a_library_are_named_with_their_board(tree):
    assert required(tree) == {"tunes": {"date": "2026-11-22T00:00:00Z", "gpu": UUID}}
    assert required(tree, op="softmax") == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code_sha256": "older"}, "is of other code or another version; make it with"),
        (
            {"date": None},
            "has no 'date'; make it with python -m harness.measure.autotune --op matmul",
        ),
    ],
)
def test_a_report_that_does_not_fit_is_named(tree, changes, message):
    path = tree / "matmul/tunes.json"
    content = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(json.dumps(kept))
    with pytest.raises(UserError, match=rf"{re.escape(str(path))}: {message}"):
        required(tree)


def test_a_report_that_is_missing_is_named(tree):
    (tree / "matmul/tunes.json").unlink()
    with pytest.raises(UserError, match=r"tunes.json: missing; make it with .* --impl tunes"):
        required(tree)


def test_choices_that_are_gone_are_named(tree):
    (tree / "matmul/tunes").rmdir()
    with pytest.raises(UserError, match=r"tunes.json: what the library chose is gone; make it"):
        required(tree)


def test_libraries_that_chose_on_two_boards_are_named(tree):
    shutil.copy(tree / "baselines/tunes.py", tree / "baselines/ours.py")
    report = json.loads((tree / "matmul/tunes.json").read_text())
    report |= {"code_sha256": "ours", "gpu": {"name": "NVIDIA H200", "uuid": "GPU-else"}}
    (tree / "matmul/ours.json").write_text(json.dumps(report))
    (tree / "matmul/ours").mkdir()
    with pytest.raises(UserError, match=r"matmul: .* on 2 boards, GPU-00-fake, GPU-else; remove"):
        required(tree)


def test_a_copy_of_choices_leaves_them_as_they_are(tmp_path):
    kept = choices.emptied(tmp_path / "kept")
    inductor = Path(kept["TORCHINDUCTOR_CACHE_DIR"])
    inductor.mkdir()
    (inductor / "chosen").write_text("a")
    own = choices.copied(tmp_path / "kept", tmp_path / "own")
    assert set(own) == set(kept) == set(choices.FOLDERS)
    (Path(own["TORCHINDUCTOR_CACHE_DIR"]) / "chosen").write_text("b")
    assert (inductor / "chosen").read_text() == "a"
    assert choices.emptied(tmp_path / "kept") == kept and not inductor.exists()


def test_whatever_pytorch_compiles_tunes_itself():
    compiled = [s for s in source_tree.stems(ROOT, "baselines") if compiles(s)]
    assert {"torch_compile", "torch_compile_max", "flex_attention"} <= set(compiled)
    assert self_tuned(ROOT, "softmax", compiled) == compiled


def compiles(stem):
    return "baselines/_torch_compiler.py" in source_tree.sources(ROOT, f"baselines/{stem}.py")


def test_a_word_in_place_of_the_names_of_ops_is_refused(tmp_path):
    (tmp_path / "baselines").mkdir()
    (tmp_path / "baselines/tunes.py").write_text('AUTOTUNES = "matmul"\n')
    with pytest.raises(UserError, match=r"tunes.py: AUTOTUNES is 'matmul'; make it a tuple, or"):
        self_tuned(tmp_path, "matmul", ["tunes"])


def test_the_declarations_of_files_are_found():
    baselines = ["flash_attn_2", "quack", "torch_eager", "xformers"]
    assert self_tuned(ROOT, "matmul", baselines) == ["quack", "xformers"]
    assert self_tuned(ROOT, "rms_norm", baselines) == ["flash_attn_2"]
    assert self_tuned(ROOT, "softmax", baselines) == []

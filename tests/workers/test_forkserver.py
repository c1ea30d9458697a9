"""Check that workers are forked fast, see the current environment, and die with their parent."""

import os
import signal
import threading
from pathlib import Path

import pytest

from harness.machine import affinity
from harness.project import registry
from harness.workers import forkserver
from harness.workers.messages import Done, Failure, Hello
from harness.workers.pool import POOL_DIED, WorkerHandle
from tests.support.patience import PATIENCE_S, wait_until
from tests.support.probe_worker import AskImports, AskVariable, Print, SayLong, StartChild

WORKER = "tests.support.probe_worker:ProbeWorker"


@pytest.fixture
def workers():
    """Start workers that answer questions about themselves."""
    started = []

    def start() -> WorkerHandle:
        worker = WorkerHandle("scale", "ours", 1, WORKER)
        started.append(worker)
        assert worker.answer(PATIENCE_S) == Hello("1.0")
        return worker

    yield start
    for worker in started:
        worker.kill()


def ask(worker, request):
    worker.send(request)
    return worker.answer(PATIENCE_S)


def state(pid):
    """Return the state letter of a process, T if stopped and Z if dead, or "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


def gone(pid):
    return state(pid) in ("", "Z")


def test_a_worker_runs_on_the_cores_that_the_parent_has_now(workers):
    # The server that forks it may have begun with all cores.
    forkserver.current()
    before = os.sched_getaffinity(0)
    with affinity.on({max(before)}):
        worker = workers()
    assert os.sched_getaffinity(worker.pid) == {max(before)}
    assert os.sched_getaffinity(workers().pid) == os.sched_getaffinity(0) == before


def test_a_further_worker_is_forked_from_a_server_that_has_imported_for_it(workers):
    """A forked worker starts in milliseconds on an idle machine, because the imports are done."""
    server = forkserver.current()
    assert {ask(workers(), AskImports([])).server for _ in range(3)} == {server.pid}
    mapped = Path(f"/proc/{server.pid}/maps").read_text()
    assert "libtorch_cpu" in mapped and "libtriton" in mapped


def test_the_preload_touches_no_gpu_and_no_rival(workers):
    rivals = [f"baselines.{stem}" for stem in registry.stems()]
    found = ask(workers(), AskImports([*rivals, "torch._dynamo", "torch._inductor"]))
    assert found.cuda is False
    assert found.rivals == []


def test_a_worker_sees_the_environment_of_its_start(workers, monkeypatch):
    first = workers()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-11-fake")
    second = workers()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert ask(second, AskVariable("CUDA_VISIBLE_DEVICES")).value == "GPU-11-fake"
    assert ask(first, AskVariable("CUDA_VISIBLE_DEVICES")).value != "GPU-11-fake"
    servers = [ask(each, AskImports([])).server for each in (first, second)]
    assert servers[0] == servers[1]


def test_an_environment_larger_than_a_socket_takes_no_time_and_arrives(workers, monkeypatch):
    workers()
    server = forkserver.current()
    for index in range(20):
        monkeypatch.setenv(f"LARGE_{index}", "x" * 100_000)
    os.kill(server.pid, signal.SIGSTOP)
    wait_until(lambda: state(server.pid) == "T")
    # A parent that waited for the server would find it running again.
    late = threading.Timer(PATIENCE_S / 10, os.kill, (server.pid, signal.SIGCONT))
    late.start()
    try:
        worker = WorkerHandle("scale", "ours", 1, WORKER)
        assert state(server.pid) == "T"
    finally:
        late.cancel()
        os.kill(server.pid, signal.SIGCONT)
    assert worker.answer(PATIENCE_S) == Hello("1.0")
    assert ask(worker, AskVariable("LARGE_19")).value == "x" * 100_000
    worker.kill()


def test_triton_is_imported_as_the_worker_needs_it(workers, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    compiled = workers()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    interpreted = workers()
    answers = [ask(each, AskVariable("PATH")) for each in (compiled, interpreted)]
    assert [answer.interpreted for answer in answers] == [False, True]
    # Functions of Triton's own library are decorated while it is imported.
    assert [answer.kind for answer in answers] == ["JITFunction", "InterpretedFunction"]
    # Neither server replaced the other.
    assert ask(workers(), AskVariable("PATH")).interpreted
    assert ask(compiled, Print()) == Done()


def test_the_output_of_a_worker_is_kept_apart_however_much(workers):
    worker = workers()
    assert ask(worker, Print()) == Done()
    assert len(ask(worker, SayLong()).text) == 5 << 20
    assert worker.log_tail().endswith("xthe end")


def test_a_killed_worker_takes_along_what_it_started(workers):
    worker = workers()
    child = ask(worker, StartChild()).child
    assert not gone(child)
    worker.kill()
    wait_until(lambda: gone(child))
    assert gone(worker.pid)


def test_a_killed_forkserver_takes_its_workers_along_and_is_replaced(workers):
    worker = workers()
    server = forkserver.current()
    os.kill(server.pid, signal.SIGKILL)
    # A worker outlives it for an instant, in which the worker might answer.
    wait_until(lambda: gone(worker.pid))
    worker.send(Print())
    assert worker.answer(PATIENCE_S) == Failure("crashed", POOL_DIED)
    assert ask(workers(), AskImports([])).server not in (server.pid, os.getpid())


def test_a_forkserver_that_cannot_import_is_no_endless_wait(workers, monkeypatch, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "triton.py").write_text("raise SystemExit(7)")
    monkeypatch.setattr(forkserver, "_servers", {})
    monkeypatch.setenv("PYTHONPATH", str(broken), prepend=os.pathsep)
    worker = WorkerHandle("scale", "ours", 1, WORKER)
    assert worker.answer(PATIENCE_S) == Failure("crashed", POOL_DIED)


def test_a_worker_that_is_killed_before_it_was_forked_never_works(workers):
    workers()
    server = forkserver.current()
    before = len(living(server.pid))
    os.kill(server.pid, signal.SIGSTOP)
    try:
        worker = WorkerHandle("scale", "ours", 1, WORKER)
        worker.kill()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    workers()
    wait_until(lambda: len(living(server.pid)) == before + 1)


def living(parent):
    words = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(word) for word in words if not gone(int(word))]

"""Check that jobs share the GPUs of a host: one to each, on cores of its own, whatever one does."""

import collections
import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest

from harness.cli import UserError
from harness.machine import affinity, ceilings, environment, gpu_lock, nvml
from tests.support.patience import PATIENCE_S, wait_until

COUNTS = [1, 2, 4, 8]
LAST = -1
NOWHERE = frozenset()


def uuids(count):
    return [f"GPU-{n}{n}-fake" for n in range(count)]


@pytest.fixture
def gpus(driver, monkeypatch, tmp_path):
    """Imitate a driver of so many GPUs; return files that say which are lost and which are used."""
    lost, used = tmp_path / "lost", tmp_path / "used"
    monkeypatch.setenv("FAKE_LOST", str(lost))
    monkeypatch.setenv("FAKE_USED", str(used))
    monkeypatch.setattr(gpu_lock, "SETTLE_S", 0.1)

    def make(count):
        monkeypatch.setenv("FAKE_GPUS", str(count))
        return lost, used

    return make


@contextlib.contextmanager
def everywhere():
    """Hold a GPU while all are visible to the next holder, as another process would."""
    with gpu_lock.hold(exclusive=True, wait_s=0.2) as gpu:
        own = os.environ.pop("CUDA_VISIBLE_DEVICES")
        yield gpu.uuid
        os.environ["CUDA_VISIBLE_DEVICES"] = own


@pytest.mark.parametrize("count", COUNTS)
def test_each_of_several_jobs_has_a_gpu_of_its_own(gpus, count):
    gpus(count)
    with contextlib.ExitStack() as held:
        assert [held.enter_context(everywhere()) for _ in range(count)] == uuids(count)
        with pytest.raises(UserError, match="still held"), everywhere():
            pass


@pytest.mark.parametrize("count", COUNTS)
def test_verifications_spread_over_all_gpus(gpus, count):
    gpus(count)
    found = collections.Counter()
    for _ in range(30 * count):
        with gpu_lock.hold(exclusive=False) as gpu:
            found[gpu.uuid] += 1
    # A GPU that none of them takes has a chance below 1e-12.
    assert set(found) == set(uuids(count))


@pytest.mark.parametrize("count", COUNTS[1:])
def test_a_gpu_that_is_asked_for_rather_is_taken_if_it_is_free(gpus, count):
    gpus(count)
    first, last = gpu_lock.gpus()[0], gpu_lock.gpus()[LAST]

    def taken(exclusive=False, rather=last.uuid):
        with gpu_lock.hold(exclusive, wait_s=0.2, rather=rather) as gpu:
            return gpu

    assert {taken() for _ in range(20)} == {last}
    assert taken(exclusive=True) == last
    with gpu_lock.hold(exclusive=True, uuid=last.uuid):
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        assert last not in {taken() for _ in range(20)}
    # One that is not there is none to wait for.
    assert taken(exclusive=True, rather="GPU-gone") == first


@pytest.mark.parametrize("count", COUNTS[1:])
def test_a_job_that_waits_for_any_gpu_alone_keeps_verifications_from_one(gpus, count):
    # As seen on four GPUs: one whose memory had run out waited, and none began anywhere.
    gpus(count)
    mine = gpu_lock.gpus()
    shared = [gpu_lock._acquire(False, 0.2, gpu.uuid)[0] for gpu in mine]
    alone = []
    waiting = threading.Thread(target=lambda: alone.append(gpu_lock._acquire(True, 10.0, None)))
    waiting.start()
    wait_until(lambda: any(map(gpu_lock.is_awaited, mine)))
    # A second one joins the first, or several would close all GPUs.
    second = threading.Thread(target=lambda: alone.append(gpu_lock._acquire(True, 10.0, None)))
    second.start()
    time.sleep(3 * gpu_lock.PAUSE_S[1])
    free = [gpu for gpu in mine if not gpu_lock.is_awaited(gpu)]
    lock, found = gpu_lock._acquire(False, 5.0, None)
    assert len(free) == count - 1 and found in free and not alone
    for each in (lock, *shared):
        os.close(each)
    waiting.join(10.0)
    second.join(10.0)
    (lock, _), (other, _) = alone
    for each in (lock, other):
        os.close(each)
    assert not any(map(gpu_lock.is_awaited, mine))


@contextlib.contextmanager
def compiling(gpu):
    """Compile on a GPU while all are visible to the next holder, as another process would."""
    with gpu_lock.hold(exclusive=False, uuid=gpu.uuid, compiles=True):
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        yield


def announced(found):
    return [gpu for gpu in found if gpu_lock._is_announced(gpu)]


def test_jobs_for_any_gpu_wait_for_the_same_one_while_libraries_compile_on_all(gpus):
    gpus(8)
    mine, alone = gpu_lock.gpus(), []
    with contextlib.ExitStack() as held:
        for gpu in mine:
            held.enter_context(compiling(gpu))

        def wait():
            alone.append(gpu_lock._acquire(True, PATIENCE_S, None))

        waiting = [threading.Thread(target=wait) for _ in range(3)]
        for each in waiting:
            each.start()
            wait_until(lambda: announced(mine))
        time.sleep(3 * gpu_lock.PAUSE_S[1])
        assert len(announced(mine)) == 1 and not alone
    for each in waiting:
        each.join(PATIENCE_S)
    for lock, _ in alone:
        os.close(lock)
    assert len(alone) == 3 and not announced(mine)


def test_a_job_for_any_gpu_waits_for_one_on_which_no_library_compiles(gpus):
    gpus(8)
    *others, last = gpu_lock.gpus()
    alone = []
    with contextlib.ExitStack() as held:
        for gpu in others:
            held.enter_context(compiling(gpu))
        shared, _ = gpu_lock._acquire(False, PATIENCE_S, last.uuid)
        waiting = threading.Thread(
            target=lambda: alone.append(gpu_lock._acquire(True, PATIENCE_S, None))
        )
        waiting.start()
        wait_until(lambda: announced([*others, last]))
        assert announced([*others, last]) == [last]
        os.close(shared)
        waiting.join(PATIENCE_S)
    ((lock, gpu),) = alone
    assert gpu == last
    os.close(lock)


def test_a_job_for_any_gpu_waits_for_one_that_is_shared_and_not_for_a_measurement(gpus):
    gpus(2)
    first, second = gpu_lock.gpus()
    found = []

    def wait(uuid):
        found.append(gpu_lock._acquire(True, PATIENCE_S, uuid))

    measured, _ = gpu_lock._acquire(True, PATIENCE_S, first.uuid)
    shared, _ = gpu_lock._acquire(False, PATIENCE_S, second.uuid)
    bound, anywhere = (threading.Thread(target=wait, args=[each]) for each in (first.uuid, None))
    bound.start()
    wait_until(lambda: gpu_lock.is_awaited(first))
    anywhere.start()
    wait_until(lambda: gpu_lock.is_awaited(second))
    os.close(shared)
    anywhere.join(PATIENCE_S)
    assert [gpu for _, gpu in found] == [second]
    os.close(measured)
    bound.join(PATIENCE_S)
    for lock, _ in found:
        os.close(lock)


@pytest.mark.parametrize("count", COUNTS)
def test_a_gpu_that_is_gone_is_left_out(gpus, count):
    lost, _ = gpus(count)
    lost.write_text(uuids(count)[LAST])
    assert [gpu.uuid for gpu in gpu_lock.gpus()] == uuids(count)[:LAST]
    message = f"board {uuids(count)[LAST]} is not visible.* start the study again"
    with (
        pytest.raises(UserError, match=message if count > 1 else "no GPU is visible"),
        gpu_lock.hold(exclusive=True, uuid=uuids(count)[LAST]),
    ):
        pass


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("count", COUNTS)
def test_a_job_keeps_nothing_that_it_found_on_a_gpu_that_vanished(gpus, count, exclusive):
    lost, _ = gpus(count)
    with (
        pytest.raises(UserError, match="gone from the driver while this job used it"),
        gpu_lock.hold(exclusive, uuid=uuids(count)[LAST]),
    ):
        lost.write_text(uuids(count)[LAST])
    # An error of the job itself is not covered up.
    lost.unlink()
    with pytest.raises(ZeroDivisionError), gpu_lock.hold(exclusive, uuid=uuids(count)[LAST]):
        lost.write_text(uuids(count)[LAST])
        _ = 1 / 0


def test_a_gpu_that_vanishes_while_it_is_waited_for_is_waited_for_no_longer(gpus):
    lost, _ = gpus(2)
    with everywhere(), everywhere():
        later = threading.Timer(0.3, lost.write_text, ["\n".join(uuids(2))])
        later.start()
        with pytest.raises(UserError, match="no GPU is visible"), gpu_lock.hold(exclusive=True):
            pass
        later.join()
        lost.unlink()


@pytest.mark.parametrize("count", COUNTS[1:])
def test_a_gpu_in_use_by_another_program_is_left_to_it(gpus, count):
    _, used = gpus(count)
    used.write_text("\n".join(uuids(count)[:LAST]))
    with everywhere() as uuid:
        assert uuid == uuids(count)[LAST]
        free = [gpu.uuid for gpu in gpu_lock.gpus() if not gpu_lock.strangers(gpu, 0.1)]
        # Programs on a GPU that a job of the project holds are taken to be of the project.
        assert free == [uuid]
        used.write_text("\n".join(uuids(count)))
        assert [gpu for gpu in gpu_lock.gpus() if not gpu_lock.strangers(gpu, 0.1)]


def test_a_program_that_is_about_to_end_is_no_stranger(gpus):
    _, used = gpus(2)
    used.write_text(uuids(2)[0])
    ending = threading.Timer(0.2, used.unlink)
    ending.start()
    assert gpu_lock.strangers(gpu_lock.gpus()[0], 30.0) == []
    ending.join()


def test_gpus_of_another_model_are_not_mixed_in(gpus, monkeypatch):
    gpus(4)
    monkeypatch.setenv("FAKE_NAMES", "NVIDIA A100,NVIDIA H200,NVIDIA A100,NVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,3")
    assert [gpu.uuid for gpu in nvml.boards(gpu_lock.gpus())] == ["GPU-11-fake", "GPU-33-fake"]
    found = set()
    for _ in range(60):
        with gpu_lock.hold(exclusive=False) as gpu:
            found.add(gpu.uuid)
    assert found == {"GPU-11-fake", "GPU-33-fake"}


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        ("1,3", ["GPU-11-fake", "GPU-33-fake"]),
        ("GPU-33-fake,GPU-11", ["GPU-33-fake", "GPU-11-fake"]),
        ("2,2", ["GPU-22-fake"]),
        ("", []),
    ],
)
def test_a_choice_of_the_user_or_of_a_batch_system_holds(gpus, monkeypatch, wish, found):
    gpus(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wish)
    assert [gpu.uuid for gpu in nvml.boards(gpu_lock.gpus())] == found


def test_one_slice_of_a_board_times(driver, monkeypatch):
    driver.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = lambda handle: f"GPU-{handle[-1]}"
    driver.nvmlDeviceGetIndex = lambda handle: int(handle[-1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a0,MIG-b0,MIG-c1")
    visible = gpu_lock.gpus()
    assert [gpu.uuid for gpu in visible] == ["MIG-a0", "MIG-b0", "MIG-c1"]
    assert [gpu.uuid for gpu in nvml.boards(visible)] == ["MIG-a0", "MIG-c1"]


@pytest.fixture
def cores(monkeypatch, tmp_path):
    """Imitate a host of so many cores, of which two with numbers half apart are threads of one."""

    def make(count, threads=2):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))
        for core in range(count):
            (tmp_path / str(core)).write_text(str(core % (count // threads)))
        monkeypatch.setattr(affinity, "TOPOLOGY", str(tmp_path / "{}"))

    return make


@pytest.mark.parametrize("count", COUNTS)
def test_each_board_has_an_equal_part_of_the_cores(cores, count):
    cores(32)
    near = dict.fromkeys(uuids(count), NOWHERE)
    shares = [affinity.share(uuid, near) for uuid in near]
    assert {len(share) for share in shares} == {32 // count}
    assert set().union(*shares) == set(range(32))
    # The second thread of a core goes where the first goes.
    assert all({(core + 16) % 32 for core in share} == share for share in shares)


def test_a_board_has_the_cores_that_are_near_it(cores):
    cores(16)
    far, close = {*range(4), *range(8, 12)}, {*range(4, 8), *range(12, 16)}
    near = dict(zip(uuids(4), [close, far, far, close], strict=True))
    shares = {uuid: affinity.share(uuid, near) for uuid in near}
    assert all(shares[uuid] <= near[uuid] for uuid in near)
    assert set().union(*shares.values()) == set(range(16))


def test_a_board_that_is_alone_or_has_no_core_left_has_all(cores):
    cores(4)
    assert affinity.share("GPU-other", dict.fromkeys(uuids(2), NOWHERE)) == set(range(4))
    assert affinity.share(uuids(8)[0], dict.fromkeys(uuids(8), NOWHERE)) == set(range(4))
    assert affinity.share(uuids(1)[0], {}) == set(range(4))


def test_the_driver_tells_which_cores_are_near(gpus, driver, monkeypatch):
    gpus(2)
    words = {"GPU-00-fake": [0b101, 0], "GPU-11-fake": [0, 0b10]}
    driver.nvmlDeviceGetCpuAffinity = lambda handle, size: words[handle]
    assert nvml.near(gpu_lock.gpus()) == {"GPU-00-fake": {0, 2}, "GPU-11-fake": {65}}
    monkeypatch.delattr(driver, "nvmlDeviceGetCpuAffinity")
    assert nvml.near(gpu_lock.gpus()) == dict.fromkeys(uuids(2), NOWHERE)


def test_a_job_and_its_processes_run_on_the_cores_of_its_gpu(gpus, monkeypatch):
    gpus(1)
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(affinity, "share", lambda uuid, near: {min(before)})
    with gpu_lock.hold(exclusive=True):
        assert os.sched_getaffinity(0) == {min(before)}
        said = subprocess.run(["nproc"], capture_output=True, text=True).stdout
        assert int(said) == 1
    assert os.sched_getaffinity(0) == before


@pytest.fixture
def described(gpus, monkeypatch, tmp_path):
    """Describe a machine of so many GPUs in the same file; return the description."""
    monkeypatch.setattr(environment.libraries, "libraries", lambda root: [])
    monkeypatch.setattr(environment.libraries, "content_hash", lambda name: "h")

    def make(count):
        gpus(count)
        return environment.ensure(tmp_path / "environment.json", tmp_path, "c0ffee")

    return make


def test_a_description_has_all_gpus_and_a_measurement_keeps_its_own(described):
    found = described(4)
    assert [gpu["uuid"] for gpu in found["gpus"]] == uuids(4)
    assert found["gpu"] == found["gpus"][0]
    own = environment.on_board(found, uuids(4)[2])
    assert own["gpu"]["uuid"] == uuids(4)[2] and "gpus" not in own
    former = {key: value for key, value in found.items() if key != "gpus"}
    assert environment.on_board(former, uuids(4)[0]) == former


def test_a_description_holds_for_the_gpus_that_are_left(described, monkeypatch):
    found = described(4) | {"date": "then"}
    monkeypatch.setattr(environment.files, "read_json", lambda *_: found)
    assert described(2)["date"] == described(4)["date"] == "then"
    # A GPU that it does not know is described.
    assert described(8)["date"] != "then"
    # A machine without a GPU is another one.
    assert described(0)["date"] != "then"
    found["gpus"][0]["driver"] = "older"
    assert described(1)["date"] != "then"


ROW = ("read", "GB/s", 4380.5, 1755, "measured")


def probing(code="", *, status=0):
    """Return a stand-in for `ceilings._started`: a process that runs the code and writes ROW."""

    def started(out, *options):
        calls.append(options)
        board = options[-1] if "--board" in options else "GPU-1"
        ceilings.write(out, [(*ROW, board)])
        return subprocess.Popen([sys.executable, "-c", f"{code}\nraise SystemExit({status})"])

    calls = started.calls = []
    return started


def test_a_measurement_on_another_gpu_adds_its_ceilings(tmp_path, monkeypatch):
    path = tmp_path / "ceilings.csv"
    ceilings.write(path, [(*ROW, "GPU-0")])
    monkeypatch.setattr(ceilings, "_started", probe := probing())
    known = dict(zip(ceilings.HEADER[:-1], ROW, strict=True))
    assert ceilings.ensure(path, "GPU-0") == [known] and not probe.calls
    for _ in range(2):
        assert ceilings.ensure(path, "GPU-1") == [known]
    assert probe.calls == [("--held",)]
    assert [row["board"] for row in ceilings.read(path)] == ["GPU-0", "GPU-1"]
    monkeypatch.setattr(ceilings, "_started", probing(status=1))
    with pytest.raises(UserError, match="board GPU-2 could not be measured"):
        ceilings.ensure(path, "GPU-2")


@pytest.mark.parametrize("count", COUNTS[1:])
def test_the_ceilings_of_all_gpus_are_measured_side_by_side(gpus, monkeypatch, tmp_path, count):
    gpus(count)
    # Each of them goes on only when all have begun.
    code = (
        "import pathlib, time, uuid\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "(folder / f'begun{uuid.uuid4()}').touch()\n"
        f"while len([*folder.glob('begun*')]) < {count}: time.sleep(0.01)"
    )
    monkeypatch.setattr(ceilings, "_started", probe := probing(code))
    monkeypatch.setattr(sys, "argv", ["ceilings", "--out", str(tmp_path / "ceilings.csv")])
    ceilings.main()
    assert [options[-1] for options in probe.calls] == uuids(count)
    assert [row["board"] for row in ceilings.read(tmp_path / "ceilings.csv")] == uuids(count)


def test_a_gpu_that_is_not_free_or_fails_has_no_ceilings_yet(monkeypatch, capfd):
    """Neither keeps those of the others from being written."""
    waiting, failing, good = probing("import time; time.sleep(600)"), probing(status=1), probing()
    each = {"GPU-0": waiting, "GPU-1": failing, "GPU-2": good}
    monkeypatch.setattr(ceilings, "LONGER_S", 0.2)
    monkeypatch.setattr(ceilings, "_started", lambda *words: each[words[-1]](*words))
    assert [row[-1] for row in ceilings.side_by_side([*each])] == ["GPU-2"]
    said = capfd.readouterr().err
    assert "board GPU-0 has no ceilings yet" in said and "board GPU-1 has no ceilings yet" in said
    assert "GPU-2" not in said


@pytest.mark.parametrize("words", [["--board", uuids(4)[2]], ["--held"]])
def test_the_ceilings_of_one_gpu_are_measured_by_the_process_itself(
    gpus, monkeypatch, tmp_path, words
):
    gpus(4)
    if "--held" in words:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuids(4)[2])
    monkeypatch.setattr(ceilings, "_started", probe := probing())
    monkeypatch.setattr(ceilings, "measure", lambda gpu: [(*ROW, gpu.uuid)])
    out = tmp_path / "ceilings.csv"
    monkeypatch.setattr(sys, "argv", ["ceilings", "--out", str(out), *words])
    ceilings.main()
    assert [row["board"] for row in ceilings.read(out)] == [uuids(4)[2]] and not probe.calls


@pytest.mark.parametrize("what", ["side_by_side", "ensure"])
def test_no_probe_outlives_the_one_that_asked(monkeypatch, tmp_path, what):
    """It would use a GPU that nobody holds."""
    jobs = []

    def started(out, *options):
        jobs.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return jobs[-1]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(ceilings, "_started", started)
    monkeypatch.setattr(ceilings.time, "sleep", interrupted)
    ceilings.write(tmp_path / "ceilings.csv", [])
    if what == "ensure":
        monkeypatch.setattr(subprocess.Popen, "wait", interrupted_once(interrupted))
    with pytest.raises(KeyboardInterrupt):
        if what == "ensure":
            ceilings.ensure(tmp_path / "ceilings.csv", "GPU-1")
        else:
            ceilings.side_by_side(["GPU-1", "GPU-2"])
    assert jobs and all(job.poll() is not None for job in jobs)


def interrupted_once(interrupted):
    """Return a `Popen.wait` that is interrupted the first time."""
    wait, calls = subprocess.Popen.wait, []

    def waiting(job, *arguments, **options):
        calls.append(job)
        return interrupted() if len(calls) == 1 else wait(job, *arguments, **options)

    return waiting


def test_without_the_ceilings_of_any_gpu_the_command_fails(monkeypatch):
    monkeypatch.setattr(ceilings, "_started", probing(status=1))
    with pytest.raises(UserError, match="the ceilings of no GPU could be measured"):
        ceilings.side_by_side(["GPU-0", "GPU-1"])

"""Check that one timing job at a time has a GPU, whatever other jobs and programs do."""

import contextlib
import fcntl
import itertools
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
from pathlib import Path

import pytest

from harness.cli import UserError
from harness.machine import gpu_lock, nvml
from tests.support.fake_nvml import FAKE
from tests.support.patience import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]


def test_no_driver_means_no_gpu(driver, monkeypatch):
    def fail():
        raise driver.NVMLError

    monkeypatch.setattr(driver, "nvmlInit", fail)
    assert gpu_lock.gpus() == []
    with pytest.raises(UserError, match="no GPU is visible"), gpu_lock.hold(exclusive=True):
        pass


def test_no_library_means_no_gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_lock.gpus() == []


@pytest.mark.parametrize(
    ("wish", "found"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-11", [1]),
        ("", []),
        ("-1", []),
        ("7", []),
        (None, [0, 1, 2]),
    ],
)
def test_visible_devices_choose(driver, monkeypatch, wish, found):
    monkeypatch.setenv("FAKE_GPUS", "3")
    if wish is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wish)
    assert [gpu.index for gpu in gpu_lock.gpus()] == found


def test_a_slice_of_a_gpu_is_known_by_its_name(driver, monkeypatch):
    monkeypatch.setattr(driver, "nvmlDeviceGetName", lambda handle: "NVIDIA H200 MIG")
    driver.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = lambda handle: "GPU-00-fake"
    driver.nvmlDeviceGetIndex = lambda handle: 5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aa")
    with gpu_lock.hold(exclusive=True) as gpu:
        assert (gpu.index, gpu.uuid, gpu.name) == (5, "MIG-aa", "NVIDIA H200 MIG")
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "MIG-aa"
        # Another slice of the same GPU is another lock.
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aa,MIG-bb")
        with gpu_lock.hold(exclusive=True, wait_s=0) as other:
            assert other.uuid == "MIG-bb"


def test_a_board_may_be_asked_for_by_name(driver, monkeypatch):
    monkeypatch.setenv("FAKE_GPUS", "2")
    with gpu_lock.hold(exclusive=True, uuid="GPU-11-fake") as gpu:
        assert gpu.uuid == "GPU-11-fake"
    with (
        pytest.raises(UserError, match="board GPU-22-fake is not visible"),
        gpu_lock.hold(exclusive=True, uuid="GPU-22-fake"),
    ):
        pass


def test_a_slice_that_does_not_exist_is_no_gpu(driver, monkeypatch):
    def fail(uuid):
        raise driver.NVMLError

    monkeypatch.setattr(driver, "nvmlDeviceGetHandleByUUID", fail)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-zz")
    assert gpu_lock.gpus() == []


def test_a_stranger_is_a_process_other_than_ours_and_the_workers(driver):
    gpu = gpu_lock.gpus()[0]
    with (
        subprocess.Popen(["sleep", "60"], process_group=0) as worker,
        subprocess.Popen(["sleep", "60"], process_group=worker.pid) as child,
    ):
        watch, users = gpu_lock.GpuMonitor(gpu), [os.getpid(), worker.pid, child.pid]
        driver.PROCESSES[gpu.uuid] = users
        assert watch.foreign_processes({worker.pid}) == []
        driver.PROCESSES[gpu.uuid] = [*users, 2**22 + 5]
        assert watch.foreign_processes({worker.pid}) == [f"process {2**22 + 5} (trainer)"]
        # A driver that does not list the worker numbers processes in another namespace.
        driver.PROCESSES[gpu.uuid] = [2**22 + 5]
        assert watch.foreign_processes({worker.pid}) == []
        child.kill()
        worker.kill()


def test_the_memory_in_use_is_the_drivers(driver, monkeypatch):
    watch = gpu_lock.GpuMonitor(gpu_lock.gpus()[0])
    assert (watch.used_bytes(), watch.free_bytes()) == (2**30, 2**37 - 2**30)

    def fail(handle):
        raise driver.NVMLError

    monkeypatch.setattr(driver, "nvmlDeviceGetMemoryInfo", fail)
    assert watch.used_bytes() is None and watch.free_bytes() is None


def test_hidden_gpus_are_named_in_the_error(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES='7'"), gpu_lock.hold(exclusive=False):
        pass


def test_processes_started_meanwhile_see_the_locked_gpu_alone(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with gpu_lock.hold(exclusive=True) as gpu:
        assert (gpu.index, gpu.uuid, gpu.name) == (0, "GPU-00-fake", "NVIDIA H200")
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-00-fake"
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert "CUDA_DEVICE_ORDER" not in os.environ


def test_the_lock_does_not_move_with_the_folder_for_temporary_files(driver, monkeypatch):
    (gpu,) = gpu_lock.gpus()
    monkeypatch.delenv(gpu_lock.LOCKS)
    before = gpu_lock._path(gpu)
    monkeypatch.setenv("TMPDIR", "/var/job-7")
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert gpu_lock._path(gpu) == before


def test_a_failing_job_gives_the_gpu_back(driver):
    with pytest.raises(ZeroDivisionError), gpu_lock.hold(exclusive=True):
        _ = 1 / 0
    with gpu_lock.hold(exclusive=True, wait_s=0):
        pass


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [(True, True, False), (True, False, False), (False, True, False), (False, False, True)],
)
def test_shared_and_exclusive_leases_exclude_each_other(driver, first, second, together):
    with gpu_lock.hold(exclusive=first):
        if together:
            with gpu_lock.hold(exclusive=second, wait_s=0.1):
                return
        with pytest.raises(UserError), gpu_lock.hold(exclusive=second, wait_s=0.1):
            pass


def test_no_job_that_shares_begins_while_another_waits_to_have_the_gpu_alone(driver):
    """Or verifications that follow one another would keep a measurement waiting to their end."""
    begun, alone = threading.Event(), []

    def measure():
        begun.set()
        with gpu_lock.hold(exclusive=True):
            alone.append(True)

    with gpu_lock.hold(exclusive=False) as gpu:
        waiting = threading.Thread(target=measure)
        waiting.start()
        begun.wait()
        wait_until(lambda: gpu_lock.is_awaited(gpu))
        with pytest.raises(UserError, match="still held"), gpu_lock.hold(False, wait_s=0.3):
            pass
        assert not alone
    waiting.join(PATIENCE_S)
    assert alone
    with gpu_lock.hold(exclusive=False, wait_s=PATIENCE_S):
        pass


@contextlib.contextmanager
def awaited(gpu):
    """Have a job wait for the GPU alone within the body; at the end nothing may hold the GPU."""
    taken = []

    def wait():
        taken.append(gpu_lock._acquire(True, PATIENCE_S, gpu.uuid))

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        wait_until(lambda: gpu_lock._is_announced(gpu))
        yield taken
    finally:
        waiting.join(PATIENCE_S)
        for lock, _ in taken:
            os.close(lock)


def compiles(gpu):
    """Return whether a compile phase is in progress on a GPU."""
    return gpu_lock._is_marked(gpu, gpu_lock.COMPILING)


def test_jobs_go_on_and_begin_while_a_compile_phase_keeps_a_gpu_from_one_that_waits(driver):
    """As seen on GPUs: while one call compiled for minutes, nothing else ran."""
    (gpu,) = gpu_lock.gpus()
    with contextlib.ExitStack() as waits, gpu_lock.hold(exclusive=False):
        with gpu_lock.hold(exclusive=False, compiles=True):
            alone = waits.enter_context(awaited(gpu))
            assert not gpu_lock.is_awaited(gpu)
            with gpu_lock.hold(exclusive=False, wait_s=0):
                pass
        assert gpu_lock.is_awaited(gpu)
        with pytest.raises(UserError, match="still held"), gpu_lock.hold(False, wait_s=0.3):
            pass
        assert not alone


@pytest.mark.parametrize("beside", [False, True])
def test_no_compile_phase_begins_on_a_gpu_that_a_job_waits_for(driver, beside):
    """Or phases that overlap would keep the job waiting to the end of the last."""
    (gpu,) = gpu_lock.gpus()
    with contextlib.ExitStack() as waits, gpu_lock.hold(exclusive=False, compiles=beside):
        alone = waits.enter_context(awaited(gpu))
        with (
            pytest.raises(UserError, match="still held"),
            gpu_lock.hold(exclusive=False, wait_s=0.3, compiles=True),
        ):
            pass
        assert not alone


def test_a_compile_phase_takes_another_gpu_than_one_that_is_awaited(driver, monkeypatch):
    monkeypatch.setenv("FAKE_GPUS", "2")
    first, second = gpu_lock.gpus()
    with contextlib.ExitStack() as held:
        lock, _ = gpu_lock._acquire(False, PATIENCE_S, first.uuid)
        held.enter_context(awaited(first))
        held.callback(os.close, lock)
        with gpu_lock.hold(False, PATIENCE_S, rather=first.uuid, compiles=True) as gpu:
            assert gpu == second and compiles(second) and not compiles(first)


@pytest.mark.parametrize("ends", ["well", "by an error", "without its GPU"])
def test_the_mark_of_a_compile_phase_is_gone_at_its_end(driver, monkeypatch, tmp_path, ends):
    (gpu,) = gpu_lock.gpus()
    lost = tmp_path / "lost"
    monkeypatch.setenv("FAKE_LOST", str(lost))
    errors = {"well": (), "by an error": ZeroDivisionError, "without its GPU": UserError}
    with contextlib.suppress(errors[ends]), gpu_lock.hold(exclusive=False, compiles=True):
        assert compiles(gpu)
        with gpu_lock.hold(exclusive=False, compiles=True):
            pass
        # That of another one is still there.
        assert compiles(gpu)
        if ends == "without its GPU":
            lost.write_text(gpu.uuid)
        _ = 1 / (ends != "by an error")
    lost.unlink(missing_ok=True)
    assert not compiles(gpu)
    with gpu_lock.hold(exclusive=True, wait_s=0):
        pass


def test_a_compile_phase_has_a_gpu_beside_no_job_that_has_it_alone(driver):
    (gpu,) = gpu_lock.gpus()
    with gpu_lock.hold(exclusive=False, compiles=True):
        with pytest.raises(UserError), gpu_lock.hold(exclusive=True, wait_s=0):
            pass
        assert compiles(gpu)
    with gpu_lock.hold(exclusive=True):
        with pytest.raises(UserError), gpu_lock.hold(exclusive=False, wait_s=0, compiles=True):
            pass
        assert not compiles(gpu)


def test_the_mark_of_a_compile_phase_lies_within_its_lock(driver, monkeypatch):
    """Between the two, no job may have the GPU alone."""
    (gpu,) = gpu_lock.gpus()
    close, free = os.close, []

    def closing(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        close(descriptor)
        if name.suffix == gpu_lock.COMPILING:
            free.append(gpu_lock._try_lock(gpu, exclusive=True))

    monkeypatch.setattr(os, "close", closing)
    with gpu_lock.hold(exclusive=False, compiles=True):
        pass
    assert free == [None]


@pytest.mark.parametrize("suffix", [gpu_lock.AWAITED, gpu_lock.COMPILING])
def test_one_that_asks_for_a_mark_is_not_taken_for_a_mark(driver, monkeypatch, suffix):
    (gpu,) = gpu_lock.gpus()
    with contextlib.ExitStack() as asking:
        other = gpu_lock._open(gpu_lock._path(gpu).with_suffix(suffix))
        asking.callback(os.close, other)
        fcntl.flock(other, fcntl.LOCK_EX)
        # It has its answer while this one pauses.
        monkeypatch.setattr(gpu_lock.time, "sleep", lambda _: asking.close())
        assert not gpu_lock._is_marked(gpu, suffix)


def test_the_holder_is_named_when_waiting_was_in_vain(driver, capsys):
    with (
        gpu_lock.hold(exclusive=True),
        pytest.raises(UserError, match=rf"GPU 0 \(NVIDIA H200\).*process {os.getpid()}\b"),
        gpu_lock.hold(exclusive=True, wait_s=0.1),
    ):
        pass
    assert f"held by process {os.getpid()}" in capsys.readouterr().err


def test_an_exclusive_lease_takes_the_free_one_of_two(driver, monkeypatch):
    monkeypatch.setenv("FAKE_GPUS", "2")
    with gpu_lock.hold(exclusive=True) as first:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        with gpu_lock.hold(exclusive=True, wait_s=0) as second:
            assert first.index != second.index


def test_another_program_is_named(driver, monkeypatch):
    monkeypatch.setattr(gpu_lock, "SETTLE_S", 0.1)
    driver.PROCESSES["GPU-00-fake"] = [2**22 + 5]
    with pytest.raises(UserError) as error, gpu_lock.hold(exclusive=True):
        pass
    message = str(error.value)
    assert "GPU 0 (NVIDIA H200)" in message
    assert f"process {2**22 + 5} (trainer)" in message
    assert "CUDA_VISIBLE_DEVICES" in message


def test_a_running_program_is_named_by_its_command(driver, monkeypatch):
    monkeypatch.setattr(gpu_lock, "SETTLE_S", 0.1)
    with subprocess.Popen(["sleep", "60"]) as other:
        driver.PROCESSES["GPU-00-fake"] = [other.pid]
        try:
            with pytest.raises(UserError, match=r"\(sleep\)"), gpu_lock.hold(exclusive=True):
                pass
        finally:
            other.kill()


def test_verifying_shares_with_other_programs(driver):
    driver.PROCESSES["GPU-00-fake"] = [2**22 + 5]
    with gpu_lock.hold(exclusive=False, wait_s=0):
        pass


def test_a_turn_is_one_at_a_time_and_leaves_the_lease_alone(driver):
    (gpu, *_) = gpu_lock.gpus()
    with gpu_lock.turn(gpu) as mine:
        with gpu_lock.turn(gpu) as other:
            assert mine and not other
        with gpu_lock.hold(exclusive=True, wait_s=0):
            pass
    with gpu_lock.turn(gpu) as other:
        assert other


def test_this_process_is_no_stranger(driver):
    driver.PROCESSES["GPU-00-fake"] = [os.getpid()]
    with gpu_lock.hold(exclusive=True, wait_s=0):
        pass


def test_a_program_on_one_gpu_leaves_the_other(driver, monkeypatch):
    monkeypatch.setenv("FAKE_GPUS", "2")
    driver.PROCESSES["GPU-00-fake"] = [2**22 + 5]
    with gpu_lock.hold(exclusive=True) as gpu:
        assert gpu.index == 1


def test_a_program_that_just_ended_is_waited_for(driver, monkeypatch):
    left = iter([[7], [7], []])
    monkeypatch.setattr(
        driver,
        "nvmlDeviceGetComputeRunningProcesses",
        lambda handle: [types.SimpleNamespace(pid=pid) for pid in next(left)],
    )
    with gpu_lock.hold(exclusive=True):
        pass


def test_a_driver_that_lists_no_processes_is_no_obstacle(driver, monkeypatch):
    def fail(handle):
        raise driver.NVMLError

    monkeypatch.setattr(driver, "nvmlDeviceGetComputeRunningProcesses", fail)
    with gpu_lock.hold(exclusive=True, wait_s=0):
        pass


def test_a_lock_file_of_another_user_still_locks(driver, tmp_path):
    path = tmp_path / "tilewright-GPU-00-fake.lock"
    path.touch()
    path.chmod(0o444)
    with gpu_lock.hold(exclusive=True), path.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_link_in_place_of_the_lock_is_refused(driver, tmp_path):
    target = tmp_path / "victim"
    target.write_text("precious")
    (tmp_path / "tilewright-GPU-00-fake.lock").symlink_to(target)
    with pytest.raises(OSError), gpu_lock.hold(exclusive=True):
        pass
    assert target.read_text() == "precious"


JOB = """
    import sys, time
    from pathlib import Path
    from harness.machine import gpu_lock
    compiles = "compiles" in sys.argv
    with gpu_lock.hold(exclusive=not compiles, compiles=compiles) as gpu:
        log = Path(sys.argv[1]) / f"gpu{gpu.index}"
        with log.open("a") as file:
            file.write(f"{time.monotonic()} ")
            file.flush()
            time.sleep(float(sys.argv[2]))
            file.write(f"{time.monotonic()}\\n")
"""


def _job(folder: Path, seconds: float, gpus: int, *words: str) -> subprocess.Popen:
    # A job that has just started may be reading it.
    if not (fake := folder / "pynvml.py").exists():
        fake.write_text(FAKE)
    environment = os.environ | {
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        gpu_lock.LOCKS: str(folder),
        "FAKE_GPUS": str(gpus),
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    call = [sys.executable, "-c", textwrap.dedent(JOB), str(folder), str(seconds), *words]
    return subprocess.Popen(call, env=environment, stderr=subprocess.PIPE, text=True)


def test_jobs_spread_over_gpus_and_never_overlap(tmp_path):
    jobs = [_job(tmp_path, 0.1, gpus=2) for _ in range(8)]
    for job in jobs:
        _, words = job.communicate(timeout=PATIENCE_S)
        assert job.returncode == 0, words
    spans = {path.name: path.read_text().splitlines() for path in tmp_path.glob("gpu*")}
    assert sum(map(len, spans.values())) == 8
    for lines in spans.values():
        times = [tuple(map(float, line.split())) for line in lines]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))


def test_a_killed_holder_frees_its_gpu(tmp_path):
    holder = _job(tmp_path, 2 * PATIENCE_S, gpus=1)
    wait_until((tmp_path / "gpu0").exists)
    waiter = _job(tmp_path, 0, gpus=1)
    assert f"held by process {holder.pid}" in waiter.stderr.readline()
    assert waiter.poll() is None
    holder.kill()
    holder.communicate()
    _, words = waiter.communicate(timeout=PATIENCE_S)
    assert waiter.returncode == 0, words


def test_the_mark_of_a_killed_compile_phase_is_gone(driver, tmp_path):
    (gpu,) = gpu_lock.gpus()
    holder = _job(tmp_path, 2 * PATIENCE_S, 1, "compiles")
    wait_until((tmp_path / "gpu0").exists)
    assert compiles(gpu)
    holder.kill()
    holder.communicate()
    assert not compiles(gpu)


def test_readings_follow_the_driver(driver, monkeypatch):
    for bit, name in enumerate(nvml.EVENTS):
        setattr(driver, name, 1 << bit)
    driver.NVML_CLOCK_SM = driver.NVML_TEMPERATURE_GPU = 0
    driver.nvmlDeviceGetPowerUsage = lambda device: 512_300
    driver.nvmlDeviceGetClockInfo = lambda device, kind: 1755
    driver.nvmlDeviceGetTemperature = lambda device, kind: 61
    driver.nvmlDeviceGetTotalEnergyConsumption = lambda device: 77
    reasons = driver.nvmlClocksEventReasonSwPowerCap | driver.nvmlClocksEventReasonHwThermalSlowdown
    driver.nvmlDeviceGetCurrentClocksEventReasons = lambda device: reasons
    probe = nvml.NvmlSampler()
    reading = probe.sample()
    assert reading == {
        "sm_mhz": 1755,
        "temp_c": 61,
        "power_w": 512.3,
        "throttle": "power cap; hardware thermal slowdown",
    }
    assert probe.energy_mj() == 77
    assert nvml.slowed(reading["throttle"])
    assert not nvml.slowed("power cap")


def test_a_probe_without_a_driver_reads_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    probe = nvml.NvmlSampler()
    assert probe.sample() == {}
    assert probe.energy_mj() is None

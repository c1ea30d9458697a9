"""Check what needs a real GPU: the clock, an illegal access and running out of memory."""

import statistics
import time

import pytest
import torch

from harness.machine import gpu_lock, nvml
from harness.measure import __main__ as measure
from harness.measure.gate import Gate
from harness.project import registry
from harness.results import raw
from tests.support.measuring import CELLS, ENVIRONMENT, code_of, of, plan, report

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def timer():
    from harness.machine.timer import Timer

    with gpu_lock.hold(exclusive=False):
        yield Timer()


def capture(timer, call):
    with torch.cuda.stream(timer.stream):
        call()
        return timer.capture(call)


def test_a_copy_takes_what_its_bytes_take(timer):
    x = torch.randn(2**28, device="cuda")
    replay, _ = capture(timer, lambda: x * 2)
    graph_us, reading = timer.cold([replay], 20)
    eager_us = timer.eager([lambda: x * 2], 20)
    assert graph_us == pytest.approx(eager_us, rel=0.1)
    assert reading["sm_mhz"] > 0 and reading["temp_c"] > 0


def test_the_host_does_not_count_in_the_time_of_the_gpu(timer):
    x = torch.randn(64, device="cuda")

    def slow_host():
        time.sleep(1e-3)
        return x + 1

    replay, _ = capture(timer, slow_host)
    assert timer.cold([replay], 50)[0] < 20
    assert timer.eager([slow_host], 50) > 1000
    # The host's time is left out as well if no graph was captured.
    assert timer.cold([slow_host], 20)[0] < 50


class Idle:
    @staticmethod
    def zero_():
        torch.cuda._sleep(100_000)


def test_the_cache_is_cold(timer, monkeypatch):
    x = torch.randn(timer.l2_bytes // 16, device="cuda")
    replay, _ = capture(timer, lambda: x.sum())
    timer.cold([replay], 5)
    cold_us, _ = timer.cold([replay], 50)
    # It takes as long as a flush, so the host runs as far ahead of the GPU, but touches no memory.
    monkeypatch.setattr(timer, "_flush", Idle)
    warm_us, _ = timer.cold([replay], 50)
    assert cold_us > warm_us


def test_a_capture_that_fails_leaves_the_clock_usable(timer):
    x = torch.randn(2**24, device="cuda")
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    with pytest.raises(RuntimeError):
        capture(timer, lambda: (x * 2).sum().item())
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < held + x.nbytes
    replay, result = capture(timer, lambda: x + 1)
    replay()
    torch.cuda.synchronize()
    assert torch.equal(result, x + 1)


@pytest.mark.parametrize("kind", ["copy", "product"])
def test_energy_is_power_times_time(timer, kind):
    if kind == "copy":
        x = torch.randn(2**26, device="cuda")
        replay, _ = capture(timer, lambda: x * 2)
    else:
        a = torch.randn(4096, 4096, device="cuda").bfloat16()
        replay, _ = capture(timer, lambda: a @ a)
    energy_uj, half_width = timer.energy([replay], 500)
    powers, times = [], []
    probe = nvml.NvmlSampler()
    # A reading of the power is the mean of a second.
    ended = time.perf_counter() + 2
    while time.perf_counter() < ended:
        times.append(timer.eager([replay], 200))
        powers.append(probe.sample()["power_w"])
    by_power = powers[-1] * statistics.median(times)
    assert energy_uj == pytest.approx(by_power, rel=0.3)
    assert 0 < half_width < 0.3 * energy_uj


def test_ceilings_have_a_clock_and_float8_is_faster(timer):
    from harness.machine import peaks

    found = {row.quantity: row for row in peaks.measure()}
    assert all(row.sm_mhz > 0 and row.value > 0 for row in found.values())
    assert found["bfloat16"].value > found["float32"].value
    if torch.cuda.get_device_capability() >= (9, 0):
        assert found["float8_e4m3fn"].value > found["bfloat16"].value


@pytest.fixture
def make_worker(timer, monkeypatch):
    """Makes the worker of an implementation of gpu_worker in this process."""
    from tests.support import gpu_worker

    for name in ("op", "function", "version"):
        monkeypatch.setattr(registry, name, getattr(registry, name))
    return lambda impl: gpu_worker.GpuWorker("fake", impl, 1)


def test_memory_is_held_until_release(make_worker):
    made = make_worker("ours")
    held = made.prepare("M2", "float32", "forward").held_bytes
    made.block(10)
    assert made.energy(100).energy_uj > 0
    assert made.check().leaked_bytes == 0
    assert made.release().held_bytes < held


def test_a_leak_is_noticed(make_worker):
    made = make_worker("leaks")
    made.prepare("M2", "float32", "forward")
    for _ in range(5):
        made.block(10)
    assert made.check().leaked_bytes >= 4 * 10 * 512


@pytest.mark.parametrize(("impl", "status"), [("crashes", "crashed"), ("fills", "oom")])
def test_the_others_keep_their_numbers(tmp_path, impl, status):
    impls = ["ours", impl, "ours_twin"]
    for name in impls:
        report(tmp_path, "fake", name, CELLS)
    out = tmp_path / "raw/fake.csv"
    with gpu_lock.hold(exclusive=False) as gpu:
        environment = ENVIRONMENT | {"gpu": ENVIRONMENT["gpu"] | {"uuid": gpu.uuid}}
        gate = Gate(tmp_path, "fake", impls, code_of)
        origin = measure.origin_of("fake", environment, [])
        a_plan = plan(impls, worker="tests.support.gpu_worker:GpuWorker", cell_timeout_s=120.0)
        watch = gpu_lock.GpuMonitor(gpu)
        # This process has used the GPU in other tests, so the measurement would report it as a
        # stranger.
        watch.foreign_processes = lambda workers: []
        measure.measure(a_plan, gate, watch, origin, out, time.monotonic())
    rows, _ = raw.read(out, "")
    assert [row["status"] for row in of(rows, impl)] == [status]
    for name in ("ours", "ours_twin"):
        assert {row["status"] for row in of(rows, name)} == {"ok"}
    assert {row["status"] for row in rows if row["case"] == "M2"} == {"ok"}

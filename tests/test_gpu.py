"""What only a GPU can show: the clock itself, a real illegal access and a real lack of memory."""

import time

import pytest
from test_measure import CELLS, ENVIRONMENT, of, plan, report

from harness import lease, measure, raw
from harness.gate import Gate

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not lease.gpus() or not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def timer():
    from harness.timing import Timer

    with lease.hold(exclusive=False):
        yield Timer()


def capture(timer, call):
    with torch.cuda.stream(timer.stream):
        call()
        return timer.capture(call)


def test_a_copy_takes_what_its_bytes_take(timer):
    x = torch.randn(2**28, device="cuda")
    replay, _ = capture(timer, lambda: x * 2)
    graph_us, reading = timer.cold([replay], 20)
    eager_us, _ = timer.eager([lambda: x * 2], 20)
    assert graph_us == pytest.approx(eager_us, rel=0.1)
    assert reading["sm_mhz"] > 0 and reading["temp_c"] > 0


def test_the_host_does_not_count_in_the_time_of_the_gpu(timer):
    x = torch.randn(64, device="cuda")

    def slow_host():
        time.sleep(1e-3)
        return x + 1

    replay, _ = capture(timer, slow_host)
    assert timer.cold([replay], 50)[0] < 20
    assert timer.eager([slow_host], 50)[0] > 1000


def test_the_cache_is_cold(timer):
    x = torch.randn(timer.l2_bytes // 16, device="cuda")
    replay, _ = capture(timer, lambda: x.sum())
    timer.cold([replay], 5)
    cold_us, _ = timer.cold([replay], 50)
    timer._flush, kept = timer._flush[:1], timer._flush
    warm_us, _ = timer.cold([replay], 50)
    timer._flush = kept
    assert cold_us > warm_us


def test_a_capture_that_fails_leaves_the_clock_usable(timer):
    x = torch.randn(64, device="cuda")
    with pytest.raises(RuntimeError):
        capture(timer, lambda: x.sum().item())
    replay, result = capture(timer, lambda: x + 1)
    replay()
    torch.cuda.synchronize()
    assert torch.equal(result, x + 1)


@pytest.mark.parametrize(("impl", "status"), [("crashes", "crashed"), ("fills", "oom")])
def test_the_others_keep_their_numbers(tmp_path, impl, status):
    impls = ["ours", impl, "ours_twin"]
    for name in impls:
        report(tmp_path, "fake", name, CELLS)
    out = tmp_path / "raw/fake.csv"
    with lease.hold(exclusive=False):
        gate = Gate(tmp_path, "fake", impls)
        a_plan = plan(impls, bench="tests.gpu_bench", timeout_s=120.0)
        measure.measure(a_plan, gate, ENVIRONMENT, [], out, time.monotonic())
    rows, _ = raw.read(out, "")
    assert [row["status"] for row in of(rows, impl)] == [status]
    for name in ("ours", "ours_twin"):
        assert {row["status"] for row in of(rows, name)} == {"ok"}
    assert {row["status"] for row in rows if row["case"] == "M2"} == {"ok"}

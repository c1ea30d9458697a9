"""Check which programs may wait for others: counts of multiprocessors, and counters of streams."""

import ctypes

import pytest
import torch

from kernels._runtime import call_trace as _call_trace
from kernels._runtime import multiprocessors as _multiprocessors
from kernels._runtime.device import assume_device
from kernels._triton import arrival_counter as _arrivals
from kernels._triton import exchange as _exchange

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Driver:
    """Answer like libcuda: about the current context and about the context of a stream."""

    def __init__(self, context=132, stream=None, error=0):
        self._counts, self._error = {7: context, 9: stream}, error

    def cuCtxGetCurrent(self, into):
        return self._give(into, 7)

    def cuStreamGetGreenCtx(self, stream, into):
        return self._give(into, 0 if self._counts[9] is None else 9)

    def cuCtxGetDevResource(self, whose, answer, kind):
        # CUdevResource: the kind, 92 bytes of padding, and the number of multiprocessors.
        assert kind == 1 and ctypes.sizeof(answer) >= 144
        ctypes.c_uint.from_buffer(answer, 96).value = self._counts[whose.value]
        return self._error

    cuGreenCtxGetDevResource = cuCtxGetDevResource

    @staticmethod
    def _give(into, value):
        ctypes.cast(into, ctypes.POINTER(ctypes.c_void_p))[0] = value
        return 0


@pytest.fixture
def gpu(monkeypatch):
    """Pretend a device of 132 multiprocessors; the returned function sets the driver's answers."""
    monkeypatch.setattr(_multiprocessors, "sm_count", lambda device: 132)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode(False))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 5, raising=False)

    def put(driver):
        monkeypatch.setattr(_multiprocessors, "_driver", lambda: driver)

    return put


@pytest.mark.parametrize(
    "driver, expected",
    [
        (None, 132),
        (Driver(), 132),
        # A green context is current, or the stream belongs to one, or the driver knows neither.
        (Driver(context=16), 16),
        (Driver(stream=24), 24),
        (Driver(context=16, stream=24), 16),
        (Driver(context=16, error=1), 132),
        (Driver(context=0), 132),
        # A context never has more than the device reports: MPS may have taken some away.
        (Driver(context=148), 132),
    ],
)
def test_available_multiprocessors(gpu, driver, expected):
    gpu(driver)
    assert _multiprocessors.available(CUDA) == expected


def test_without_a_gpu_the_plan_counts(monkeypatch):
    with assume_device(sm_count=16):
        assert _multiprocessors.available(CPU) == 16


def test_a_driver_without_green_contexts_is_none(monkeypatch):
    class Old:
        cuCtxGetCurrent = cuCtxGetDevResource = type("Function", (), {})

    for library in (lambda name: Old(), lambda name: (_ for _ in ()).throw(OSError(name))):
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert _multiprocessors._driver.__wrapped__() is None


@pytest.mark.parametrize("count", [132, 33, 32, 16])
def test_programs_may_wait_where_sharers_of_them_find_room(gpu, monkeypatch, count):
    gpu(Driver(stream=count))
    monkeypatch.setattr(_exchange, "has_ptx", lambda device: True)
    for programs in (2, 4, 8, 16, 32, 64):
        assert _exchange.may_wait(CUDA, programs) == (4 * programs <= count)
        assert _exchange.may_wait(CUDA, programs, per_sm=4) == (programs <= count)


def test_nobody_waits_in_the_interpreter_or_a_traced_graph(monkeypatch):
    assert not _exchange.may_wait(CPU, 2)
    with _exchange.taking_turns():
        assert _exchange.may_wait(CPU, 2)
        monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
        assert not _exchange.may_wait(CPU, 2)


def test_slots_are_new_in_each_call_and_no_part_of_a_plan():
    """A plan does not ask again whether its programs may wait, so such a call has none."""
    traces = []

    def slots():
        traces.append(_call_trace.current_trace())
        return [_exchange.empty_slots(3, 4, CPU) for _ in range(2)]

    (first, second), trace = _call_trace.traced(slots, ())
    assert traces == [trace] and not trace.whole
    assert first.data_ptr() != second.data_ptr()
    assert first.shape == (3, 4, 2) and (first == _exchange.NOT_READY).all()


@pytest.fixture
def counters(monkeypatch):
    monkeypatch.setattr(_arrivals, "_free", {})
    monkeypatch.setattr(_arrivals, "_of_stream", {})


@pytest.mark.parametrize("default", ["cpu", "meta"])
def test_counters_are_zeros_of_the_host_whatever_the_default_device_is(counters, default):
    torch.set_default_device(default)
    try:
        slot = _arrivals._allocate(CPU)
    finally:
        # The device that was read before would stay as a mode, through which each call passes.
        torch.set_default_device(None)
    assert slot.device == CPU and slot.tolist() == [0]
    with torch.device("meta"):
        assert _arrivals._allocate(CPU).tolist() == [0]
        assert _arrivals._allocate(CPU, 3).tolist() == [0, 0, 0]


def test_a_stream_has_a_counter_for_good_and_a_captured_launch_one_of_its_own(
    counters, monkeypatch
):
    now = {"stream": 1, "captured": False}
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: now["stream"], raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["captured"])

    def slot(**given):
        now.update(given)
        return _arrivals._slot(CPU, CPU.index).data_ptr()

    one, other = slot(stream=1), slot(stream=2)
    assert slot(stream=1) == one and slot(stream=2) == other != one
    captured = [slot(captured=True) for _ in range(3)]
    assert len({one, other, *captured}) == 5
    assert slot(captured=False) == other


def test_a_graph_that_finds_no_spare_counter_makes_its_own(counters, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first, second = (_arrivals._slot(CPU, None) for _ in range(2))
    assert first.data_ptr() != second.data_ptr() and first.item() == second.item() == 0

"""A call that is made by plan does what the launcher does, and is not made where that is not known.

A launcher of these tests starts a kernel that runs at once on the host: it is handed addresses, as
a compiled one is, and adds a number to what lies there.
"""

import ctypes
import threading
import types

import pytest
import torch
from triton.runtime.jit import JITFunction

from harness import nvml, poison
from kernels import _plan
from kernels._plan import empty, planned, tape
from kernels.activation import tanh
from kernels.vector import add, dot, scale

gpu = pytest.mark.skipif(not nvml.gpus(), reason="needs a GPU")


def floats(address, n):
    return (ctypes.c_float * n).from_address(address)


def start(x, y, z, stream, *head_and_values):
    x_at, out_at, n, number = head_and_values[-4:]
    for index, value in enumerate(floats(x_at, n)):
        floats(out_at, n)[index] = value + number


@pytest.fixture
def host(monkeypatch):
    """A host in the place of a GPU."""
    cuda = {"_cuda_getDevice": lambda: -1, "_cuda_getCurrentRawStream": lambda device: 0}
    for name, function in cuda.items():
        monkeypatch.setattr(torch._C, name, function, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    on_host = {"_quick": torch._C._dynamo.guards._empty_strided_cpu, "_strided": _on_host}
    for name, function in on_host.items():
        monkeypatch.setattr(_plan, name, function)


def _on_host(shape, stride, dtype):
    return torch.empty_strided(shape, stride, dtype=dtype)


def launched(x, out, number):
    """Launches, and notes what `kernels._launch` notes of a launch that it knows."""
    values = {"x_ptr": x, "out_ptr": out, "N": x.numel(), "number": number}
    start(1, 1, 1, 0, x.data_ptr(), out.data_ptr(), x.numel(), number)
    if (noting := tape()) is not None:
        noting.launches.append(((1,), values, (-1, start, 0, (4, 1, 0), False, False)))


class Launcher:
    """A planned launcher that counts the calls of its body."""

    def __init__(self, body):
        self.bodies = 0

        @planned
        def call(
            x: torch.Tensor, number: float = 1.0, other: torch.Tensor | None = None
        ) -> torch.Tensor:
            self.bodies += 1
            return body(x, number, other)

        self.call = call


def plus(x, number, other):
    out = empty(x)
    launched(x, out, number)
    return out


def test_a_known_call_is_made_without_the_launcher(host):
    launcher = Launcher(plus)
    for first in (0.0, 1.0, 5.0):
        x = torch.arange(4.0) + first
        assert torch.equal(launcher.call(x, 2.0), x + 2.0)
    assert launcher.bodies == 1


@pytest.mark.parametrize(
    "again",
    [
        lambda x: (x[:6], 1.0),
        lambda x: (x.view(2, 4), 1.0),
        lambda x: (x.double(), 1.0),
        lambda x: (torch.zeros(9)[1:], 1.0),
        lambda x: (torch.zeros(16)[::2], 1.0),
        lambda x: (x, 2.0),
        lambda x: (x, 1.0, x.clone()),
    ],
    ids=["length", "shape", "dtype", "alignment", "strides", "number", "presence"],
)
def test_what_decides_a_call_is_part_of_its_key(host, monkeypatch, again):
    launcher = Launcher(plus)
    x = torch.arange(8.0)
    launcher.call(x)
    launcher.call(x)
    assert launcher.bodies == 1
    unknown = []
    monkeypatch.setattr(_plan, "_noted", lambda launcher, key, *rest: unknown.append(key))
    launcher.call(*again(x))
    assert len(unknown) == 1


def test_zeros_of_either_sign_are_told_apart(host):
    launcher = Launcher(plus)
    for zero in (0.0, -0.0, 0.0, -0.0):
        result = launcher.call(torch.full((2,), -0.0), zero)
        assert torch.signbit(result).all() == (str(zero) == "-0.0")
    assert launcher.bodies == 2


def test_a_seed_is_handed_over_and_needs_no_plan_of_its_own(host):
    bodies = []

    @planned
    def seeded(x: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
        bodies.append(number)
        out = empty(x)
        launched(x, out, number)
        return out

    for seed in (4, 7, 2**31 - 1, 2**31, 2**40):
        assert torch.equal(seeded(torch.zeros(4), seed), torch.full((4,), float(seed)))
    assert bodies == [4, 2**31]


def test_a_view_of_an_argument_lies_as_far_in(host):
    def second_half(x, number, other):
        out = empty(x, (2,))
        launched(x[2:], out, number)
        return out

    launcher = Launcher(second_half)
    for first in (0.0, 7.0):
        x = torch.arange(4.0) + first
        assert torch.equal(launcher.call(x), x[2:] + 1.0)
    assert launcher.bodies == 1


def test_a_view_of_what_is_made_lies_as_far_in(host):
    def both_halves(x, number, other):
        out = empty(x, (2 * x.numel(),))
        for half in out.chunk(2):
            launched(x, half, number)
        return out

    launcher = Launcher(both_halves)
    for first in (0.0, 7.0):
        x = torch.arange(4.0) + first
        assert torch.equal(launcher.call(x), torch.cat([x, x]) + 1.0)
    assert launcher.bodies == 1


def test_results_may_be_several_and_given_ones(host):
    def several(x, number, other):
        out = empty(x)
        launched(x, out, number)
        return out, None, x

    launcher = Launcher(several)
    x = torch.arange(4.0)
    for _ in range(2):
        out, nothing, same = launcher.call(x)
        assert torch.equal(out, x + 1.0) and nothing is None and same is x
    assert launcher.bodies == 1


def test_what_is_shared_is_asked_for_anew(host):
    rooms = iter(torch.zeros(3, 4))

    def to_shared(x, number, other):
        room = next(rooms)
        if (noting := tape()) is not None:
            noting.shared.append((room, lambda: next(rooms)))
        out = empty(x)
        launched(x, room, number)
        launched(room, out, number)
        return out

    launcher = Launcher(to_shared)
    for _ in range(3):
        assert torch.equal(launcher.call(torch.ones(4)), torch.full((4,), 3.0))
    assert launcher.bodies == 1 and next(rooms, None) is None


def _copied(x, number, other):
    out = empty(x)
    launched(x.clone(), out, number)
    return out


def _written(x, number, other):
    out = empty(x)
    launched(x, out, number)
    return out.add_(0.0)


def _input_written(x, number, other):
    out = empty(x)
    launched(x, out, number)
    x.add_(0.0)
    return out


def _elsewhere(x, number, other):
    out = torch.empty_like(x)
    launched(x, out, number)
    return out


def _computed(x, number, other):
    out = empty(x)
    launched(x, out, number)
    return out + 0.0


def _no_launch(x, number, other):
    return empty(x).copy_(x + number)


def _unknown(x, number, other):
    out = empty(x)
    launched(x, out, number)
    if (noting := tape()) is not None:
        noting.launches[-1] = (*noting.launches[-1][:2], None)
    return out


@pytest.mark.parametrize(
    "body",
    [_copied, _written, _input_written, _elsewhere, _computed, _no_launch, _unknown],
    ids=lambda body: body.__name__[1:],
)
def test_a_call_that_is_not_all_written_down_has_no_plan(host, body):
    launcher = Launcher(body)
    for count in (1, 2, 3):
        x = torch.arange(4.0) + count
        assert torch.equal(launcher.call(x), x + 1.0) and launcher.bodies == count


def test_arguments_in_one_place_have_no_plan(host):
    def both(x, number, other):
        out = empty(x)
        launched(x, out, number)
        launched(other, out, number)
        return out

    launcher = Launcher(both)
    x, other = torch.arange(4.0), torch.ones(4)
    for _ in range(2):
        launcher.call(x, 1.0, x)
    for _ in range(3):
        assert torch.equal(launcher.call(x, 1.0, other), other + 1.0)
    assert torch.equal(launcher.call(x, 1.0, x), x + 1.0) and launcher.bodies == 3


def test_another_rule_or_another_function_in_tritons_place_is_asked(host, monkeypatch):
    chooser = types.SimpleNamespace(choose=lambda: 0)

    def choosing(x, number, other):
        if (noting := tape()) is not None:
            noting.choices.append((chooser, chooser.choose))
        return plus(x, number, other)

    launcher = Launcher(choosing)
    x = torch.arange(4.0)
    launcher.call(x)
    launcher.call(x)
    before = chooser.choose
    chooser.choose = lambda: 1
    launcher.call(x)
    assert launcher.bodies == 2
    chooser.choose = before
    launcher.call(x)
    assert launcher.bodies == 2
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: None)
    launcher.call(x)
    assert launcher.bodies == 3


def test_a_launcher_in_a_launcher_is_part_of_it(host):
    inner = Launcher(plus)

    def outer_body(x, number, other):
        return inner.call(inner.call(x, number), number)

    outer = Launcher(outer_body)
    x = torch.arange(4.0)
    inner.call(x)
    for _ in range(3):
        assert torch.equal(outer.call(x), x + 2.0)
    assert outer.bodies == 1


def test_a_thread_notes_its_own_launches_only(host):
    other = Launcher(plus)
    x = torch.arange(4.0)

    def with_another_thread(x, number, unused):
        thread = threading.Thread(target=lambda: other.call(torch.ones(4)))
        thread.start()
        thread.join()
        return plus(x, number, unused)

    launcher = Launcher(with_another_thread)
    for _ in range(2):
        assert torch.equal(launcher.call(x), x + 1.0)
    assert launcher.bodies == 1


def test_what_pytorch_writes_is_seen_in_inference_too(host):
    launcher = Launcher(_written)
    for count in (1, 2, 3):
        with torch.inference_mode():
            x = torch.arange(4.0) + count
            assert torch.equal(launcher.call(x), x + 1.0) and launcher.bodies == count


def test_an_error_leaves_no_tape(host):
    def raising(x, number, other):
        raise ValueError("x: refused")

    launcher = Launcher(raising)
    for _ in range(2):
        with pytest.raises(ValueError, match="x: refused"):
            launcher.call(torch.ones(4))
    assert not _plan._tapes


def test_ever_new_shapes_do_not_fill_the_memory(host, monkeypatch):
    monkeypatch.setattr(_plan, "MOST_PLANS", 4)
    launcher = Launcher(plus)
    for n in range(1, 10):
        launcher.call(torch.ones(n))
    cells = dict(zip(launcher.call.__code__.co_freevars, launcher.call.__closure__, strict=True))
    assert 1 <= len(cells["_plans"].cell_contents) <= 4


def test_memory_that_is_watched_is_watched_in_a_plan_too(host):
    launcher, x = Launcher(plus), torch.ones(4)
    launcher.call(x)
    with poison.guarded() as bands:
        launcher.call(x)
        assert len(bands._held) == 1 and not bands.broken()
    assert launcher.bodies == 1


def test_a_traced_graph_sees_the_launcher():
    calls = Launcher(lambda x, number, other: x + number)
    compiled = torch.compile(calls.call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0))


@gpu
def test_a_plan_on_a_gpu_follows_stream_and_capture():
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    for _ in range(3):
        expected = torch.tanh(x), x + y, torch.dot(x, y)
        for found, wanted in zip((tanh(x), add(x, y), dot(x, y)), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        z = torch.randn(1000, device="cuda")
        found = scale(tanh(z), 2.0)
        torch.testing.assert_close(found, 2.0 * torch.tanh(z))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tanh(x), dot(x, y)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(captured[0], torch.tanh(x))
    torch.testing.assert_close(captured[1], torch.dot(x, y))


@gpu
def test_a_plan_on_a_gpu_knows_modes_of_gradients():
    x = torch.randn(1000, device="cuda")
    tanh(x)
    for _ in range(3):
        tanh(x)
        with torch.inference_mode():
            assert tanh(x).is_inference()
        assert not tanh(x).is_inference()
        leaf = x.clone().requires_grad_()
        assert tanh(leaf).requires_grad
        with torch.no_grad():
            assert not tanh(leaf).requires_grad

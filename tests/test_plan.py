"""A call that is made by plan does what the launcher does, and is not made where that is not known.

A launcher of these tests starts a kernel that runs at once on the host: it is handed addresses, as
a compiled one is, and adds a number to what lies there.
"""

import ctypes
import math
import sys
import threading
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from triton import knobs
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
        lambda x: (x, -1.0),
        lambda x: (x, 1e-40),
        lambda x: (x, math.nan),
        lambda x: (x, 1.0, x.clone()),
    ],
    ids=[
        *("length", "shape", "dtype", "alignment", "strides"),
        *("sign", "small", "no number", "presence"),
    ],
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


@pytest.mark.parametrize("kind", [(0.5, 1, 3.0, 1e30), (-1.0, -2.5), (math.nan, math.nan)])
def test_floats_of_one_kind_share_a_plan_that_is_handed_them(host, kind):
    launcher, x = Launcher(plus), torch.arange(4.0)
    for number in kind:
        torch.testing.assert_close(launcher.call(x, number), x + number, equal_nan=True)
    assert launcher.bodies == 1


def test_what_is_made_of_a_float_has_no_plan(host):
    launcher = Launcher(lambda x, number, other: plus(x, 2 * number, other))
    for number in (1.0, 2.0, 3.0):
        assert torch.equal(launcher.call(torch.zeros(4), number), torch.full((4,), 2 * number))
    assert launcher.bodies == 3


def test_a_bool_is_no_seed_and_no_number_of_its_value(host):
    assert _plan.loosely(True)[0] != _plan.loosely(1)[0] == _plan.loosely(5)[0]


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


with FakeTensorMode():
    FAKE = torch.empty(4)
REFUSED = {
    "number": (3.0, TypeError, r"x: 3.0, expected a tensor"),
    "nothing": (None, TypeError, r"x: None, expected a tensor"),
    "list": ([1.0, 2.0], TypeError, r"x: \[1.0, 2.0\], expected a tensor"),
    "no address": (
        FAKE,
        ValueError,
        r"x: on cpu without an address \(FakeTensor\), expected a plain tensor",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_no_kernel_can_take_is_refused_each_time(host, wrong):
    launcher = Launcher(plus)
    launcher.call(torch.ones(4))
    value, error, words = REFUSED[wrong]
    for _ in range(2):
        with pytest.raises(error, match=words):
            launcher.call(value)
    with pytest.raises(TypeError, match=r"other: 'y', expected a tensor"):
        launcher.call(torch.ones(4), 1.0, "y")
    assert launcher.bodies == 1


def test_what_is_empty_needs_no_address(host):
    launcher = Launcher(lambda x, number, other: empty(x))
    for _ in range(2):
        assert launcher.call(torch.ones(0)).shape == (0,)
    assert launcher.bodies == 2


def test_a_tangent_is_refused_and_not_lost(host):
    launcher, x = Launcher(plus), torch.ones(4)
    launcher.call(x)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(4))
        with pytest.raises(ValueError, match=r"x: has a tangent of .* expected"):
            launcher.call(dual)
        assert torch.equal(launcher.call(x), x + 1.0)
    assert torch.equal(launcher.call(x), x + 1.0) and launcher.bodies == 2


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1,), ()])
def test_a_view_to_be_read_with_the_other_sign_is_read_so(host, shape):
    def kept(x, number, other):
        out = empty(x)
        launched(x.contiguous(), out, number)
        return out

    launcher = Launcher(kept)
    z = torch.complex(torch.zeros(shape), torch.arange(6.0)[: math.prod(shape)].view(shape) + 1)
    for _ in range(3):
        assert torch.equal(launcher.call(z.imag), z.imag + 1.0)
        assert z.conj().imag.is_neg()
        assert torch.equal(launcher.call(z.conj().imag), 1.0 - z.imag)


def test_the_other_sign_is_part_of_a_key(host, monkeypatch):
    launcher, z = Launcher(plus), torch.zeros(6, dtype=torch.complex64)
    launcher.call(z.imag)
    unknown = []
    monkeypatch.setattr(_plan, "_noted", lambda launcher, key, *rest: unknown.append(key))
    launcher.call(z.imag)
    assert not unknown
    launcher.call(z.conj().imag)
    assert len(unknown) == 1


@pytest.mark.parametrize("place", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_of_triton_sees_each_launch(host, place):
    launcher, x = Launcher(plus), torch.arange(4.0)
    launcher.call(x)
    hook = getattr(knobs.runtime, place)
    hook.add(print)
    try:
        for count in (2, 3):
            launcher.call(x)
            assert launcher.bodies == count
    finally:
        hook.remove(print)
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        launcher.call(x)
        assert launcher.bodies == 4
    launcher.call(x)
    assert launcher.bodies == 4


class Stepping:
    """Traces a thread instruction by instruction in one function, and what it calls of its file,
    and acts before the n-th."""

    def __init__(self, function, number, act):
        self.code, self.number, self.act, self.seen = function.__code__, number, act, 0

    def __call__(self, frame, event, argument):
        within = frame.f_code is self.code or (
            frame.f_back is not None and frame.f_back.f_code is self.code
        )
        if not within or frame.f_code.co_filename != self.code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen == self.number:
                self.act()
        return self


def raced(number):
    """Has a thread end its first call before the n-th instruction of this thread's `tape`; how
    many instructions there were, and the results of this thread's calls."""
    began, ends = threading.Event(), threading.Event()

    def waiting(x, scale, other):
        began.set()
        assert ends.wait(60)
        return plus(x, scale, other)

    def twice(x, scale, other):
        middle = empty(x)
        launched(x, middle, scale)
        out = empty(x)
        launched(middle, out, scale)
        return out

    def end_the_other():
        ends.set()
        thread.join()

    slow, launcher = Launcher(waiting), Launcher(twice)
    thread = threading.Thread(target=lambda: slow.call(torch.ones(4)))
    thread.start()
    assert began.wait(60)
    before, step = sys.gettrace(), Stepping(tape, number, end_the_other)
    sys.settrace(step)
    try:
        first = launcher.call(torch.zeros(4))
    finally:
        sys.settrace(before)
        end_the_other()
    return step.seen, (first, launcher.call(torch.zeros(4)), launcher.call(torch.zeros(4)))


def test_a_tape_misses_nothing_wherever_another_thread_ends_its_own(host):
    number, instructions = 0, 1
    while number < instructions:
        number += 1
        instructions, results = raced(number)
        for result in results:
            assert torch.equal(result, torch.full((4,), 2.0)), f"{number=}"
    assert number > 10


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

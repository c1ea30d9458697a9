"""Check that a plan repeats what the launcher does, and that an unknown call has no plan.

The second call with a key is traced, so the third call is the first that uses a plan. The kernels
of `fake_host` add a number to each element on the host.
"""

import math
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from harness.build import recorder
from harness.calls import guards
from kernels._runtime import call_cache as _call_cache
from kernels._runtime import call_trace as _call_trace
from kernels._runtime import internals
from kernels._runtime import plan_compiler as _plan_compiler
from kernels._runtime.call_cache import cached_launch, uncached, unspecialized_key, width
from kernels._runtime.call_trace import asked_again
from kernels.activation import tanh
from kernels.vector import add, dot, scale
from tests.support import fake_host
from tests.support.fake_gpu import CudaLauncher
from tests.support.fake_host import Host, add_kernel, seeded_kernel


@pytest.fixture
def host(monkeypatch):
    return Host(monkeypatch)


def start(x, out, number=1.0, kernel=add_kernel):
    kernel[(1,)](x, out, x.numel(), number)
    return out


class Cached:
    """A cached launcher that counts the calls of its body."""

    def __init__(self, body):
        self.bodies = 0

        def launcher(
            x: torch.Tensor, number: float = 1.0, other: torch.Tensor | None = None
        ) -> torch.Tensor:
            self.bodies += 1
            return body(x, number, other)

        self.call = cached_launch(launcher)

    @property
    def plans(self):
        return self.call.launcher.plans


def plus(x, number, other):
    return start(x, torch.empty_like(x), number)


def known(body, *arguments):
    """A cached launcher that has a plan for a call."""
    launcher = Cached(body)
    for _ in range(2):
        launcher.call(*arguments)
    assert launcher.plans and launcher.bodies == 2
    return launcher


def test_from_the_third_call_on_a_known_one_is_made_without_launcher_and_triton(host):
    launcher = Cached(plus)
    for first in (0.0, 1.0, 5.0, 7.0):
        x = torch.arange(4.0) + first
        assert torch.equal(launcher.call(x, 2.0), x + 2.0)
    assert launcher.bodies == 2 and len(host.asked) == 2 and len(host.begun) == 4


def test_a_plan_hands_over_what_triton_does(host):
    launcher = known(plus, torch.ones(4), 2.0)
    launcher.call(torch.ones(4), 2.0)
    by_triton, by_plan = ((kernel, grid, rest[2:]) for kernel, grid, rest in host.begun[-2:])
    # The last argument is the default of a parameter that the launch does not name.
    assert by_plan == by_triton == (add_kernel, (1, 1, 1), (4, 2.0, 4))


@pytest.fixture
def described(host, monkeypatch):
    """A host whose compiled kernel takes descriptors; the addresses that were described."""
    made = []

    def make(descriptor, metadata):
        address = descriptor.base.data_ptr()
        made.append(address)
        return [(metadata["elem_size"], address), *descriptor.shape, *descriptor.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    signature = {"x_ptr": "tensordesc<fp32[4]>", "out_ptr": "tensordesc<fp32[4]>", "N": "i32"}
    metadata = [{"elem_size": 4}, {"elem_size": 2}]
    host.launcher = lambda start: CudaLauncher(
        driver.wrap_handle_tensordesc(start, signature, metadata)
    )
    monkeypatch.setattr(fake_host, "_add", lambda *arguments: None)
    return made


def test_a_plan_describes_a_tensor_once_for_each_address(host, described):
    def body(x, number, other):
        out = torch.empty_like(x)
        views = (TensorDescriptor.from_tensor(each, [2]) for each in (x[4:], out))
        add_kernel[(1,)](*views, x.numel(), number)
        return out

    x, y = torch.ones(8), torch.zeros(8)
    launcher = known(body, x)
    described.clear()
    for each in (x, y, x, y):
        out = launcher.call(each)
        given = host.begun[-1][2]
        begin = each.data_ptr() + 16
        assert given[:6] == ((4, begin), 4, 1, (2, out.data_ptr()), 8, 1)
        assert given[6:] == (8, 1.0, 4)
    assert launcher.bodies == 2
    # The address of a result may come again; those of x and y are described once.
    assert sorted(set(described)) == sorted(described)


def test_a_launch_with_descriptors_of_another_form_has_no_plan(host, described, monkeypatch):
    monkeypatch.setattr(internals, "described_launch", lambda launch: None)

    def body(x, number, other):
        add_kernel[(1,)](TensorDescriptor.from_tensor(x, [2]), x, x.numel(), number)
        return x

    launcher = Cached(body)
    for _ in range(4):
        launcher.call(torch.ones(8))
    assert launcher.bodies == 4 and not launcher.plans
    assert internals.described_launch(lambda *given: None) is None


def test_descriptors_of_ever_new_addresses_are_forgotten():
    given = TensorDescriptor.from_tensor(torch.ones(8), [2])
    made = _plan_compiler.Descriptors(given, lambda described: [described.base.data_ptr()])
    for address in range(3 * made.MOST):
        assert made[address] == [address] and len(made) <= made.MOST


AGAIN = {
    "length": lambda x: (x[:6], 1.0),
    "shape": lambda x: (x.view(2, 4), 1.0),
    "dtype": lambda x: (x.double(), 1.0),
    "alignment": lambda x: (torch.zeros(9)[1:], 1.0),
    "strides": lambda x: (torch.zeros(16)[::2], 1.0),
    "sign": lambda x: (x, -1.0),
    "small": lambda x: (x, 1e-40),
    "no number": lambda x: (x, math.nan),
    "presence": lambda x: (x, 1.0, x.clone()),
}


@pytest.fixture
def unknown(monkeypatch):
    """The keys of calls that have no plan."""
    keys = []

    def record(launcher, key, *arguments):
        keys.append(key)

    return lambda: monkeypatch.setattr(_call_cache, "_record", record) or keys


@pytest.mark.parametrize("again", AGAIN)
def test_each_property_that_decides_a_call_is_part_of_its_key(host, unknown, again):
    x = torch.arange(8.0)
    launcher, keys = known(plus, x), unknown()
    launcher.call(x)
    assert not keys
    launcher.call(*AGAIN[again](x))
    assert len(keys) == 1


def test_zeros_of_either_sign_are_told_apart(host):
    launcher = Cached(plus)
    for zero in (0.0, -0.0) * 3:
        result = launcher.call(torch.full((2,), -0.0), zero)
        assert torch.signbit(result).all() == (str(zero) == "-0.0")
    assert launcher.bodies == 4


@pytest.mark.parametrize(
    "kind", [(0.5, 1, 3.0, 1e30), (-1.0, -2.5, -7.0), (math.nan, math.nan, math.nan)]
)
def test_floats_of_one_kind_share_a_plan_that_is_handed_them(host, kind):
    launcher, x = Cached(plus), torch.arange(4.0)
    for number in kind:
        torch.testing.assert_close(launcher.call(x, number), x + number, equal_nan=True)
    assert launcher.bodies == 2


def test_a_number_computed_from_a_float_has_no_plan(host):
    launcher = Cached(lambda x, number, other: plus(x, 2 * number, other))
    for number in (1.0, 2.0, 3.0, 4.0):
        assert torch.equal(launcher.call(torch.zeros(4), number), torch.full((4,), 2 * number))
    assert launcher.bodies == 4


def test_a_bool_is_no_seed_and_no_number_of_its_value():
    assert unspecialized_key(True)[0] != unspecialized_key(1)[0] == unspecialized_key(5)[0]


@pytest.mark.parametrize("factor, planned", [(1, [4, 7, 2**31, 2**33]), (2, None)])
def test_a_seed_is_handed_over_and_needs_no_plan_of_its_own(host, factor, planned):
    bodies = []

    def seeded(x: torch.Tensor, number: int | torch.Tensor) -> torch.Tensor:
        bodies.append(number)
        handed = number if factor == 1 else factor * number
        return start(x, torch.empty_like(x), handed, seeded_kernel)

    call, seeds = cached_launch(seeded), (4, 7, 9, 2**31 - 1, 2**31, 2**33, 2**40)
    for seed in seeds:
        assert torch.equal(call(torch.zeros(4), seed), torch.full((4,), float(factor * seed)))
    assert bodies == (planned or [*seeds])


@given(st.integers(-(2**63), 2**64 - 1))
def test_the_width_of_a_number_is_what_triton_takes_it_for(value):
    names = {"i32": 0, "i64": 1, "u64": 2}
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    found = native_specialize_impl(BaseBackend, value, False, False, False)
    assert names[found[0]] == width(value)


def test_a_view_of_an_argument_lies_as_far_in(host):
    launcher = Cached(lambda x, number, other: start(x[2:], x.new_empty(2), number))
    for first in (0.0, 7.0, 9.0):
        x = torch.arange(4.0) + first
        assert torch.equal(launcher.call(x), x[2:] + 1.0)
    assert launcher.bodies == 2


def test_a_view_of_what_is_made_lies_as_far_in(host):
    def both_halves(x, number, other):
        out = torch.empty(2 * x.numel(), dtype=x.dtype, device=x.device)
        for half in out.chunk(2):
            start(x, half, number)
        return out

    launcher = Cached(both_halves)
    for first in (0.0, 7.0, 9.0):
        x = torch.arange(4.0) + first
        assert torch.equal(launcher.call(x), torch.cat([x, x]) + 1.0)
    assert launcher.bodies == 2


def views(x):
    return x.detach().view(2, 3).mT.mT.reshape(-1)[None][0]


def test_views_of_every_kind_are_no_computation(host):
    def turned(x, number, other):
        out = torch.empty_strided((2, 3), (1, 2), dtype=x.dtype, device=x.device)
        start(x.T.reshape(-1).view(2, 3).mT.detach().contiguous(), out, number)
        return out

    launcher = Cached(lambda x, number, other: turned(x.view(1, 6), number, other))
    for inference in (False, False, True, False):
        x = torch.arange(6.0)
        with torch.inference_mode(inference):
            assert launcher.call(x).stride() == (1, 2)
    # `contiguous` copies in this case.
    assert launcher.bodies == 4
    launcher = Cached(lambda x, number, other: plus(views(x), number, x))
    for _ in range(4):
        assert torch.equal(launcher.call(x), x + 1.0)
    assert launcher.bodies == 2


def test_results_may_be_several_and_given_ones(host):
    def several(x, number, other):
        return plus(x, number, other), None, x

    launcher = Cached(several)
    x = torch.arange(4.0)
    for _ in range(3):
        out, nothing, same = launcher.call(x)
        assert torch.equal(out, x + 1.0) and nothing is None and same is x
    assert launcher.bodies == 2


def test_a_shared_tensor_is_asked_for_anew_in_each_call(host):
    rooms = iter(torch.zeros(4, 4))
    room = asked_again(lambda length: next(rooms)[:length].add_(0.0))

    def by_way_of_it(x, number, other):
        return plus(start(x, room(4), number), number, other)

    launcher = Cached(by_way_of_it)
    for _ in range(4):
        assert torch.equal(launcher.call(torch.ones(4)), torch.full((4,), 3.0))
    assert launcher.bodies == 2 and next(rooms, None) is None


def _copied(x, number, other):
    return start(x.clone(), torch.empty_like(x), number)


def _written(x, number, other):
    return plus(x, number, other).add_(0.0)


def _input_written(x, number, other):
    x.add_(0.0)
    return plus(x, number, other)


def _computed(x, number, other):
    return plus(x, number, other) + 0.0


def _looked_at(x, number, other):
    return plus(x, 1.0 if x[0].item() < 100 else 2.0, other)


def _compared(x, number, other):
    return plus(x, 1.0 if torch.equal(x, x) else 2.0, other)


def _no_launch(x, number, other):
    return torch.empty_like(x).copy_(x + number)


def _part_of_the_result(x, number, other):
    out = x.new_empty(5)
    start(x, out[1:], number)
    return out[1:]


def _remembered(x, number, other):
    return start(x, REMEMBERED, number)


REMEMBERED = torch.empty(4)
UNPLANNED = [
    *(_copied, _written, _input_written, _computed, _looked_at, _compared, _no_launch),
    *(_part_of_the_result, _remembered),
]


@pytest.mark.parametrize("body", UNPLANNED, ids=lambda body: body.__name__[1:])
def test_a_call_that_is_not_all_known_has_no_plan(host, body):
    launcher = Cached(body)
    for inference in (False, True):
        for count in range(1, 4):
            with torch.inference_mode(inference):
                x = torch.arange(4.0) + count
                assert torch.equal(launcher.call(x), x + 1.0)
    assert launcher.bodies == 6 and not launcher.plans


def test_a_key_without_a_plan_is_traced_three_times_and_no_more(host, monkeypatch):
    traces, traced = [], _call_cache.traced
    monkeypatch.setattr(_call_cache, "traced", lambda *call: traces.append(call) or traced(*call))
    launcher = Cached(_computed)
    for count in range(1, 8):
        launcher.call(torch.ones(4))
        assert len(traces) == min(count - 1, _call_cache.MOST_TRACES)


def test_the_set_up_of_a_first_call_does_not_keep_later_ones_from_a_plan(host):
    remembered = []

    def setting_up(x, number, other):
        if len(remembered) < 2:
            remembered.append(torch.ones(3).sum())
        return plus(x, number, other)

    launcher = Cached(setting_up)
    for _ in range(5):
        launcher.call(torch.ones(4))
    assert launcher.bodies == 3


def test_a_spoiled_trace_keeps_no_memory(host):
    alive = []

    def freeing(x, number, other):
        plus(x, number, other)
        x.clone()
        alive.append(_call_trace.current_trace())
        return plus(x, number, other)

    launcher = Cached(freeing)
    for _ in range(2):
        launcher.call(torch.ones(4))
    assert alive[0] is None and not (alive[1].allocations or alive[1].launches)


@pytest.mark.parametrize(
    "hinder", ["another order", "memory of its own", "profiled", "not of a GPU", "before a run"]
)
def test_a_kernel_that_triton_must_start_has_no_plan(host, monkeypatch, hinder):
    launcher = Cached(plus)
    if hinder == "another order":
        monkeypatch.setattr(internals, "launches_in_order", lambda launcher: False)
    elif hinder == "memory of its own":
        monkeypatch.setattr(host.launcher, "global_scratch_size", 16)
    elif hinder == "profiled":
        monkeypatch.setattr(host.launcher, "profile_scratch_size", 16)
    elif hinder == "not of a GPU":
        host.launcher = type("OtherLauncher", (host.launcher,), {})
    else:
        monkeypatch.setattr(add_kernel, "pre_run_hooks", [lambda *args, **kwargs: None])
    for count in (1, 2, 3):
        launcher.call(torch.ones(4))
        assert launcher.bodies == len(host.asked) == count


def test_arguments_in_one_place_have_no_plan(host):
    def both(x, number, other):
        out = torch.empty_like(x)
        start(x, out, number)
        return start(other, out, number)

    launcher = Cached(both)
    x, other = torch.arange(4.0), torch.ones(4)
    for _ in range(2):
        launcher.call(x, 1.0, x)
    for _ in range(3):
        assert torch.equal(launcher.call(x, 1.0, other), other + 1.0)
    assert torch.equal(launcher.call(x, 1.0, x), x + 1.0) and launcher.bodies == 4


def test_uncached_calls_run_the_launcher_and_are_not_traced(host):
    launcher, x = known(plus, torch.ones(4)), torch.ones(4)
    with uncached(), uncached():
        launcher.call(x)
        launcher.call(x, -1.0)
        launcher.call(x, -1.0)
    with uncached():
        launcher.call(x, -1.0)
    assert launcher.bodies == 6 and len(launcher.plans) == 1
    launcher.call(x)
    assert launcher.bodies == 6


def test_a_recorder_sees_a_launch_that_has_a_plan(host):
    launcher, x = known(plus, torch.ones(4)), torch.ones(4)
    with recorder.recorded() as calls:
        launcher.call(x)
        launcher.call(torch.ones(4, device="meta"))
    assert [(kernel, grid) for kernel, _, grid in calls] == [(add_kernel, (1,))] * 2


def test_a_launcher_in_a_launcher_is_part_of_it(host):
    inner = Cached(plus)

    def outer_body(x, number, other):
        return inner.call(inner.call(x, number), number)

    outer = Cached(outer_body)
    x = torch.arange(4.0)
    inner.call(x)
    for _ in range(4):
        assert torch.equal(outer.call(x), x + 2.0)
    assert outer.bodies == 2


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
    "no memory": (torch.ones(4, device="meta"), ValueError, r"x: on meta, expected the memory of"),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_tensor_that_no_kernel_can_take_is_refused_each_time(host, wrong):
    launcher = known(plus, torch.ones(4))
    value, error, words = REFUSED[wrong]
    for _ in range(2):
        with pytest.raises(error, match=words):
            launcher.call(value)
    with pytest.raises(TypeError, match=r"other: 'y', expected a tensor"):
        launcher.call(torch.ones(4), 1.0, "y")
    assert launcher.bodies == 2


def test_an_empty_tensor_needs_no_address(host):
    launcher = Cached(lambda x, number, other: torch.empty_like(x))
    for count in (1, 2, 3):
        assert launcher.call(torch.ones(0)).shape == (0,) and launcher.bodies == count


def test_a_tangent_is_refused_and_not_lost(host):
    launcher, x = known(plus, torch.ones(4)), torch.ones(4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(4))
        with pytest.raises(ValueError, match=r"x: has a tangent of .* expected"):
            launcher.call(dual)
        assert torch.equal(launcher.call(x), x + 1.0)
    assert torch.equal(launcher.call(x), x + 1.0) and launcher.bodies == 3


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1,), ()])
def test_a_view_to_be_read_with_the_other_sign_is_read_so(host, shape):
    launcher = Cached(lambda x, number, other: plus(x.contiguous(), number, other))
    z = torch.complex(torch.zeros(shape), torch.arange(6.0)[: math.prod(shape)].view(shape) + 1)
    for _ in range(4):
        assert torch.equal(launcher.call(z.imag), z.imag + 1.0)
        assert z.conj().imag.is_neg()
        assert torch.equal(launcher.call(z.conj().imag), 1.0 - z.imag)


def test_the_other_sign_is_part_of_a_key(host, unknown):
    z = torch.zeros(6, dtype=torch.complex64)
    launcher = known(lambda x, number, other: start(x, x.new_empty(6), number), z.imag)
    keys = unknown()
    launcher.call(z.imag)
    assert not keys
    launcher.call(z.conj().imag)
    assert len(keys) == 1


@pytest.mark.parametrize("place", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_of_triton_sees_each_launch(host, place):
    launcher, x = known(plus, torch.ones(4)), torch.arange(4.0)
    hook = getattr(knobs.runtime, place)
    hook.add(print)
    try:
        for count in (3, 4):
            launcher.call(x)
            assert launcher.bodies == count
    finally:
        hook.remove(print)
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        launcher.call(x)
        assert launcher.bodies == 5
    launcher.call(x)
    assert launcher.bodies == 5


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_trace_notes_the_launches_of_its_thread_only(host):
    other = Cached(plus)

    def with_another_thread(x, number, unused):
        in_a_thread(lambda: other.call(torch.ones(4)) + plus(torch.ones(4), 1.0, None))
        return plus(x, number, unused)

    launcher = Cached(with_another_thread)
    x = torch.arange(4.0)
    for _ in range(3):
        assert torch.equal(launcher.call(x), x + 1.0)
    assert launcher.bodies == 2 and other.bodies == 2


def test_a_thread_meanwhile_makes_its_calls_and_is_traced_at_the_next(host):
    slow, other = Cached(plus), Cached(plus)
    began, ends = threading.Event(), threading.Event()

    def waiting(x, number, unused):
        if _call_trace.current_trace() is not None:
            began.set()
            assert ends.wait(60)
        return plus(x, number, unused)

    slow, results = Cached(waiting), []
    thread = threading.Thread(target=lambda: [slow.call(torch.ones(4)) for _ in range(2)])
    thread.start()
    assert began.wait(60)
    for _ in range(3):
        results.append(other.call(torch.zeros(4)))
    assert not other.plans
    ends.set()
    thread.join(60)
    for _ in range(3):
        results.append(other.call(torch.zeros(4)))
    assert other.bodies == 5 and len(other.plans) == len(slow.plans) == 1
    assert all(torch.equal(result, torch.ones(4)) for result in results)


def test_nothing_of_triton_stays_replaced(host):
    before = JITFunction.run
    known(plus, torch.ones(4))
    assert JITFunction.run is before and not _call_trace.suspensions


def test_a_function_of_triton_replaced_meanwhile_stays_replaced(host, monkeypatch):
    seen = []

    def replacing(x, number, other):
        if _call_trace.current_trace() is not None:
            run = JITFunction.run
            monkeypatch.setattr(
                JITFunction, "run", lambda *a, **k: seen.append(a[0]) or run(*a, **k)
            )
        return plus(x, number, other)

    launcher = known(replacing, torch.ones(4))
    launcher.call(torch.ones(4))
    assert seen == [add_kernel]
    launcher.call(torch.ones(5))
    assert seen == [add_kernel] * 2


def test_an_error_leaves_no_trace(host):
    def raising(x, number, other):
        raise ValueError("x: refused")

    launcher, before = Cached(raising), JITFunction.run
    for _ in range(3):
        with pytest.raises(ValueError, match="x: refused"):
            launcher.call(torch.ones(4))
    assert not _call_trace.suspensions and JITFunction.run is before
    assert _call_trace.current_trace() is None
    assert known(plus, torch.ones(4))


def test_ever_new_shapes_do_not_fill_the_memory(host, monkeypatch):
    monkeypatch.setattr(_call_cache, "MOST_PLANS", 4)
    launcher = Cached(plus)
    for n in range(2, 10):
        for _ in range(2):
            launcher.call(torch.ones(n))
    for known_keys in (launcher.plans, launcher.call.launcher.seen):
        assert 1 <= len(known_keys) <= 4


@pytest.mark.parametrize("before", [0, 1, 2])
def test_memory_that_is_watched_is_watched_in_a_plan_too(host, before):
    launcher, x = Cached(plus), torch.ones(4)
    for _ in range(before):
        launcher.call(x)
    for count in range(before, 4):
        with guards.guarded() as bands:
            assert torch.equal(launcher.call(x), x + 1.0)
            assert len(bands._held) == 1 and not bands.broken()
        assert launcher.bodies == min(count + 1, 2)
    launcher.call(x)
    assert launcher.bodies == 2 and _plan_compiler._allocate is _plan_compiler._quick


def test_a_traced_graph_sees_the_launcher():
    calls = Cached(lambda x, number, other: x + number)
    compiled = torch.compile(calls.call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 2.0))


@pytest.mark.gpu
def test_a_plan_on_a_gpu_follows_stream_and_capture():
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    for _ in range(4):
        expected = torch.tanh(x), x + y, torch.dot(x, y)
        for found, wanted in zip((tanh(x), add(x, y), dot(x, y)), expected, strict=True):
            torch.testing.assert_close(found, wanted)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        z = torch.randn(1000, device="cuda")
        for _ in range(3):
            found = scale(tanh(z), 2.0)
            torch.testing.assert_close(found, 2.0 * torch.tanh(z))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = tanh(x), dot(x, y)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(captured[0], torch.tanh(x))
    torch.testing.assert_close(captured[1], torch.dot(x, y))


@pytest.mark.gpu
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

"""Check programs that take turns in the interpreter: orders, deadlocks, visible stores."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels._triton import exchange as _exchange
from kernels.softmax_details import split_rows as _split_rows
from tests.support import ptx
from tests.support.interleaved import ORDERS, Deadlock, Schedule, interleaved, schedules
from tests.support.modules import interpreted

pytestmark = pytest.mark.no_gpu
every_order = pytest.mark.parametrize("order", ORDERS)
KERNELS = """
import triton
import triton.language as tl

from kernels._triton.exchange import exchange_partials


@triton.jit
def group_sums(x_ptr, out_ptr, slots_ptr, PROGRAMS: tl.constexpr):
    program = tl.program_id(0) % PROGRAMS
    group = tl.program_id(0) // PROGRAMS
    x = tl.load(x_ptr + tl.program_id(0))
    firsts, seconds = exchange_partials(
        slots_ptr + group * (2 * PROGRAMS), program, x, 2 * x, PROGRAMS
    )
    tl.store(out_ptr + tl.program_id(0), tl.sum(firsts, 0) + tl.sum(seconds, 0))


@triton.jit
def last_adds(x_ptr, parts_ptr, ticket_ptr, out_ptr, SEM: tl.constexpr):
    program = tl.program_id(0)
    tl.store(parts_ptr + program, tl.load(x_ptr + program))
    if tl.atomic_add(ticket_ptr, 1, sem=SEM) == tl.num_programs(0) - 1:
        total = tl.sum(tl.load(parts_ptr + tl.arange(0, 4), volatile=True), 0)
        tl.store(out_ptr, total)
        tl.store(ticket_ptr, 0)


@triton.jit
def polls(flag_ptr):
    if tl.program_id(0) == 0:
        while tl.load(flag_ptr, volatile=True) == 0:
            pass


@triton.jit
def races(out_ptr):
    found = tl.load(out_ptr, volatile=True)
    tl.atomic_xchg(out_ptr, found + 1, sem="relaxed")
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "turns.py"
    path.write_text(KERNELS)
    return interpreted(path)


def group_sums(kernels, groups=3, programs=4):
    """Return the difference between the sum that each program found and the right one."""
    x = torch.arange(1.0, groups * programs + 1)
    out = torch.zeros_like(x)
    slots = _exchange.empty_slots(groups, programs, x.device)
    kernels.group_sums[(groups * programs,)](x, out, slots, PROGRAMS=programs)
    return out - 3 * x.view(groups, programs).sum(1).repeat_interleave(programs)


@settings(max_examples=40, derandomize=True)
@given(schedule=schedules())
def test_a_group_sums_in_any_order(kernels, schedule):
    with interleaved(schedule) as runs:
        assert not group_sums(kernels).any()
    assert [run.kernel for run in runs] == ["group_sums"] and runs[0].turns >= 12


@settings(max_examples=40, derandomize=True)
@given(schedule=schedules(resident=4))
def test_a_device_that_holds_one_group_is_enough_where_programs_start_in_order(kernels, schedule):
    with interleaved(schedule):
        assert not group_sums(kernels).any()


@settings(max_examples=20, derandomize=True)
@given(schedule=schedules(resident=3, started=("in order", "reversed", "random")))
def test_a_device_that_holds_less_than_a_group_is_a_deadlock(kernels, schedule):
    with interleaved(schedule), pytest.raises(Deadlock, match=r"group_sums, grid \(12, 1, 1\)"):
        group_sums(kernels)


def test_the_order_in_which_programs_start_counts(kernels):
    """Check the assumption of `_triton/exchange.py` on the start order.
    In another order, a device that holds one group fills up with parts of several groups."""
    ends = set()
    for seed in range(10):
        with interleaved(Schedule("in order", seed, started="random", resident=4)):
            try:
                group_sums(kernels)
                ends.add("ended")
            except Deadlock:
                ends.add("stuck")
    assert "stuck" in ends


# The room for all groups of this many launches if each group lacks one program.
SHORT = _exchange.SHARERS * 3


@settings(max_examples=30, derandomize=True)
@given(schedule=schedules(SHORT + 1, ("in turn", "random"), _exchange.SHARERS))
def test_as_many_launches_as_may_share_a_device_cannot_stop_each_other(kernels, schedule):
    with interleaved(schedule):
        assert not group_sums(kernels, groups=2 * _exchange.SHARERS, programs=4).any()


def test_launches_that_lack_one_program_each_stop_each_other(kernels):
    schedule = Schedule(started="in turn", resident=SHORT, launches=_exchange.SHARERS)
    rest = 8 * _exchange.SHARERS - SHORT
    with interleaved(schedule), pytest.raises(Deadlock, match=f"{rest} have not started"):
        group_sums(kernels, groups=2 * _exchange.SHARERS, programs=4)


def test_a_wait_in_triton_is_found_too(kernels):
    with interleaved(Schedule()), pytest.raises(Deadlock, match="programs 0 wait"):
        kernels.polls[(2,)](torch.zeros(1, dtype=torch.int32))


@every_order
def test_the_last_program_sees_what_the_others_released(kernels, order):
    for seed in range(5):
        out, ticket = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
        x = torch.tensor([1.0, 2.0, 4.0, 8.0])
        with interleaved(Schedule(order, seed)):
            kernels.last_adds[(4,)](x, torch.zeros(4), ticket, out, SEM="acq_rel")
        assert out.item() == 15.0 and ticket.item() == 0


def test_a_store_without_a_release_is_not_seen(kernels):
    out, ticket = torch.zeros(1), torch.zeros(1, dtype=torch.int32)
    with interleaved(Schedule("in turn", seed=1)):
        kernels.last_adds[(4,)](torch.ones(4), torch.zeros(4), ticket, out, SEM="relaxed")
    assert out.item() == 1.0


def test_programs_do_come_in_between(kernels):
    """An update of two steps loses some increments; programs without turns would lose none."""
    found = set()
    for order in ORDERS:
        out = torch.zeros(1, dtype=torch.int32)
        with interleaved(Schedule(order, 1)):
            kernels.races[(6,)](out)
        found.add(out.item())
    assert min(found) < 6


def test_a_seed_gives_the_same_run_again(kernels):
    def turns(seed):
        with interleaved(Schedule("random", seed)) as runs:
            group_sums(kernels)
        return runs[0].turns

    assert [turns(seed) for seed in range(8)] == [turns(seed) for seed in range(8)]
    assert len({turns(seed) for seed in range(8)}) > 1


def test_the_interpreter_is_as_before_afterwards(kernels):
    with interleaved(Schedule()), pytest.raises(Deadlock):
        kernels.polls[(1,)](torch.zeros(1, dtype=torch.int32))
    assert not _exchange.supports_spin_wait(torch.device("cpu"))
    out = torch.zeros(1, dtype=torch.int32)
    kernels.races[(6,)](out)
    assert out.item() == 6


def executed(text, *inputs, outputs=1, memory=None):
    def load(addresses, lanes, strong):
        return np.vectorize(memory.__getitem__)(addresses)

    def turned(lanes):
        raise RuntimeError("waits")

    inputs = [np.array(each, np.uint64) for each in inputs]
    return [each.tolist() for each in ptx.execute(text, inputs, outputs, load, turned)]


@given(st.lists(st.tuples(*[st.floats(0, 1, width=32)] * 2), min_size=1))
def test_packing_rounds_to_nine_bits_of_mantissa(pairs):
    """Compare the instructions of `split_rows.py` with the rounding that the file states."""
    values = np.array(pairs, np.float32).ravel()
    bits = values.view(np.uint32)
    (packed,) = executed(_split_rows.PACK.value, bits[0::2], bits[1::2])
    low, high = executed(_split_rows.UNPACK.value, packed, outputs=2)
    found = np.stack([low, high], 1).ravel().astype(np.uint32).view(np.float32).astype(np.float64)
    exact = values.astype(np.float64)
    least = 2.0**-126
    assert (np.abs(found - exact) <= np.maximum(exact * 2.0**-10, least)).all()


def test_lanes_branch_apart():
    text = (
        "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p bra zero; shl.b32 $0, $1, 1; bra end; "
        "zero: and.b32 $0, 7, 5; end: }"
    )
    assert executed(text, [0, 3, 0, 8]) == [[5, 6, 5, 16]]


def test_a_wait_reads_both_words_and_waits_for_each():
    wait = _exchange.WAIT.value
    said = {64: 7, 68: 9, 72: 1, 76: 2}
    assert executed(wait, [64, 72], outputs=2, memory=said) == [[7, 1], [9, 2]]
    for address in said:
        with pytest.raises(RuntimeError, match="waits"):
            executed(wait, [64, 72], outputs=2, memory=said | {address: 2**32 - 1})


def test_an_instruction_that_is_not_known_is_named():
    with pytest.raises(NotImplementedError, match=r"xor\.b32"):
        executed("{ xor.b32 $0, $1, $1; }", [1])

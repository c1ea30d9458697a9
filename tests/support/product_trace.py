"""Record the steps of each group of warps of the product on Hopper with barriers and slots.

The kernel's functions run as Python, as those of the fused loss do in `hopper_trace.py`.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

from kernels.matmul_details import hopper, hopper_consumers, hopper_producer
from tests.support.hopper_trace import Step

GROUPS, SLOTS = hopper.GROUPS.value, 4
# Arrivals that complete a phase of a barrier: each multiplying group lets a slot go.
NEEDED = {"x free": GROUPS}


class _Anything:
    """Stands for accumulators, layouts, pointers and offsets."""

    shape = (64, 64)

    def _itself(self, *others, **named):
        return self

    __add__ = __radd__ = __mul__ = __rmul__ = __lt__ = __call__ = _itself

    def __getattr__(self, name):
        return self


class _Bars:
    def __init__(self, name):
        self.name = name

    def index(self, number):
        return self.name, int(number)


class _Ring:
    """Slots; `each` blocks of the ring are one slot."""

    def __init__(self, each, slots):
        self.each, self.shape = each, (each * slots, 64, 64)

    def index(self, number):
        return _Slot(("x", int(number) // self.each))


class _Slot(tuple):
    shape = (64, 64)

    def permute(self, order):
        return self


def traced(
    tiles: int, steps_k: int, programs: int, residual: bool, slots: int = SLOTS
) -> list[list[Step]]:
    """Return the steps of the three groups of program 0, with a ring of `slots`."""
    return [_group(which, tiles, steps_k, programs, residual, slots) for which in range(GROUPS + 1)]


def _group(which, tiles, steps_k, programs, residual, slots):
    done, told, filled, products = [], [], [], []
    each = steps_k + GROUPS * residual

    def copy(desc, slot, full, *place):
        # The copies of a step complete one phase together; the first stands for all.
        assert told and told[-1] == full and full == ("x full", slot[1])
        if len(filled) < len(told):
            filled.append(full)
            contents = (("step", len(told) - 1),)
            done.append(Step("copy", full, slots=(tuple(slot),), contents=contents))

    def multiply(a, b, acc, use_acc, is_async):
        assert a == b and is_async
        tile, inner = divmod(len(products), steps_k)
        products.append(a)
        assert use_acc == (inner > 0)
        content = ("step", tile * each + inner)
        done.append(Step("multiply", slots=(tuple(a),), contents=(content,)))
        return _Anything()

    def settle(left, accumulators):
        done.append(Step("settle", left=left))
        return accumulators[0]

    def finish(x, y, *rest):
        if residual:
            tile = len(products) // steps_k - 1
            first = next(value for value in rest if isinstance(value, int) and value is not True)
            slot = ("x", first // 4)
            content = ("step", tile * each + steps_k + which - 1)
            # A read of slots by loads ends before the group lets them go.
            done.append(Step("multiply", slots=(slot,), contents=(content,)))
            done.append(Step("settle", left=0))

    def arrive(barrier, count):
        # The warps of a group meet before one of them arrives; the binary shows it.
        done.append(Step("meet"))
        done.append(Step("arrive", barrier))

    language = mock.MagicMock(
        static_range=range, program_id=lambda axis: 0, num_programs=lambda axis: programs,
        thread_barrier=lambda: done.append(Step("meet")), zeros=lambda *_: _Anything(),
        arange=lambda *_: _Anything(), load=lambda *_, **__: _Anything(),
    )  # fmt: skip
    barrier = mock.Mock(
        wait=lambda bar, parity: done.append(Step("wait", bar, int(parity))),
        expect=lambda bar, nbytes: told.append(bar), arrive=arrive,
    )  # fmt: skip
    block = SimpleNamespace(
        block_type=SimpleNamespace(nbytes=1, shape=[64, 64]),
        dtype=SimpleNamespace(primitive_bitwidth=16),
    )
    descs = block, block, None, block if residual else None, block, None, None
    rings = [_Ring(each, slots) for each in (GROUPS, 1, 4, 1, 1)]
    bars = _Bars("x full"), _Bars("x free")
    epilogue = None, None, 1.0, None, None, 128, 256, (0,) * 6
    sizes = tiles, 1, steps_k, 1, tiles
    meta = (
        128, 256, 64, slots, 8, False, (False, True), (0, 0, 0), False, "none", False, False, False,
        (False, False),
    )  # fmt: skip
    stands = {
        "gl": language, "mbarrier": barrier, "tma": mock.Mock(), "warpgroup_mma": multiply,
        "warpgroup_mma_wait": settle, "_copy": copy, "finish": finish, "GROUPS": GROUPS,
        "as_matrix": lambda slot: slot,
        "batched_tile_coords": lambda number, *_: (0, 0, number, 0),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module in (hopper_producer, hopper_consumers):
            made = {name: value.fn for name, value in vars(module).items() if hasattr(value, "fn")}
            here = {name: value for name, value in stands.items() if name in vars(module)}
            for name, value in (made | here).items():
                stack.enter_context(mock.patch.object(module, name, value))
        if which == 0:
            hopper_producer.copy_loop(descs, rings, bars, epilogue, sizes, meta)
        else:
            hopper_consumers.multiply_loop(descs, rings, bars, epilogue, sizes, meta, which - 1)
    return done

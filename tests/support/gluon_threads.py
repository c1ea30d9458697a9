"""Run a warp-specialised Gluon kernel on the CPU: its own Python, with a thread for each group.

The kernel's functions are Python until Gluon compiles them. Here they run as Python, and objects of
this file stand for Gluon: blocks of shared memory, barriers, copies and products. A copy to shared
memory happens at once, or when somebody waits for it. A product, and a copy from shared memory,
happens as late as it may: when its group waits for it. So a slot that is released before it has
been read is found, if another group or the copies come in between.
"""

import contextlib
import functools
import math
import operator
import random
import re
import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

# A group that waits longer than this, in seconds, waits for ever.
PATIENCE = 30.0


class StuckError(AssertionError):
    """Signals that a group waits for something that never comes."""


class Value(torch.Tensor):
    """A tensor that has a layout, which nothing here reads."""

    type = SimpleNamespace(layout=None)


def _value(x) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


def _alike(x, y) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors; a number takes the other's dtype, as in Gluon."""
    x, y = (
        torch.as_tensor(
            one, dtype=None if isinstance(one, torch.Tensor) else getattr(other, "dtype", None)
        )
        for one, other in ((x, y), (y, x))
    )
    return x, y


class Shared:
    """A block of shared memory."""

    def __init__(self, data: torch.Tensor):
        self.data = data

    @property
    def shape(self):
        return list(self.data.shape)

    @property
    def dtype(self):
        return self.data.dtype

    def index(self, number):
        return Shared(self.data[int(number)])

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def load(self, layout):
        return _value(self.data.clone())

    def store(self, value):
        assert value.dtype == self.data.dtype
        self.data.copy_(value)


class Descriptor:
    """A tensor that is copied in blocks. Past its ends, zeros are read and nothing is written.

    shape, strides: those that TMA gets, in items. An address has 64 bits, as there.
    """

    layout = None

    def __init__(
        self, tensor: torch.Tensor, shape: list[int], strides: list[int], block: list[int]
    ):
        self.tensor, self.dtype = tensor, tensor.dtype
        self.shape, self.strides = shape, strides
        self.item = tensor.element_size()
        assert len(shape) == len(strides) == len(block) <= 5 and strides[-1] == 1
        assert all(0 < size <= 2**32 for size in shape)
        assert all(0 <= s * self.item < 2**40 and s * self.item % 16 == 0 for s in strides[:-1])
        self.block_type = SimpleNamespace(shape=block, nbytes=math.prod(block) * self.item)

    def _ends(self, at, block):
        assert list(block.shape) == self.block_type.shape
        starts, sizes, address = [*map(int, at)], [], 0
        for start, size, most, step in zip(
            starts, block.shape, self.shape, self.strides, strict=True
        ):
            # A coordinate has 32 bits with a sign.
            assert 0 <= start < 2**31
            # The numbers of rows have no end that a block may pass.
            assert len(self.shape) > 1 or start + size <= most
            sizes.append(max(0, min(size, most - start)))
            address += start * step * self.item
        part = block[tuple(slice(0, size) for size in sizes)]
        if not part.numel():
            return torch.empty_like(part), part
        address = (address + 2**63) % 2**64 - 2**63
        offset = self.tensor.storage_offset() + address // self.item
        steps = [step if size > 1 else 0 for step, size in zip(self.strides, sizes, strict=True)]
        # Outside the memory of the tensor this raises.
        return self.tensor.as_strided(sizes, steps, offset), part

    def read(self, at, block):
        block.zero_()
        mine, part = self._ends(at, block)
        part.copy_(mine)

    def write(self, at, block, add=False):
        mine, part = self._ends(at, block)
        mine.copy_(mine + part if add else part)


class _Barrier:
    """A barrier of Hopper: a phase ends when all have arrived and all bytes have come."""

    def __init__(self, run, waited):
        self.run, self.waited = run, waited
        self.count, self.left, self.bytes, self.phase = 0, 0, 0, 0
        self.copies = []

    def init(self, count):
        self.count = self.left = count

    def change(self, arrivals, nbytes):
        with self.run.changed:
            self.left, self.bytes = self.left - arrivals, self.bytes + nbytes
            assert self.left >= 0
            if self.left == 0 and self.bytes == 0:
                self.phase, self.left = self.phase + 1, self.count
            self.run.changed.notify_all()

    def wait(self, parity):
        def over():
            while self.copies:
                self.copies.pop(0)()
            # A parity tells a phase only from the one before and the one after it.
            return self.phase % 2 != int(parity)

        if self.waited:
            self.run.until(over)


class _Barriers:
    def __init__(self, run, count):
        waited = run.allocated != run.unwaited
        run.allocated += 1
        self.all = [_Barrier(run, waited) for _ in range(count)]

    def index(self, number):
        return self.all[int(number)]


class _Run:
    """One program of a kernel."""

    def __init__(self, program: int, programs: int, unwaited: int | None, patience: float):
        self.program, self.programs = program, programs
        self.unwaited, self.patience, self.allocated = unwaited, patience, 0
        self.changed = threading.Condition()
        self.own = threading.local()
        self.named: dict[int, list[int]] = {}
        self.failed: list[BaseException] = []

    def until(self, ready):
        with self.changed:
            done = self.changed.wait_for(lambda: ready() or self.failed, self.patience)
            if self.failed or not done:
                raise StuckError(f"program {self.program}: {threading.current_thread().name}")

    def pause(self):
        """Let other groups run first, now and then."""
        if self.own.chance.random() < 0.2:
            threading.Event().wait(0.0005)

    def start(self, functions, warps, registers):
        # The first group has the warps that the launch asks for.
        assert len(warps) == len(registers) == len(functions) - 1

        def body(number, function, arguments):
            self.own.pending, self.own.leaving = [], []
            self.own.chance = random.Random(8 * self.program + number)
            try:
                # A thread does not know that its launcher records no gradients.
                with torch.no_grad():
                    function(*arguments)
                assert not self.own.pending
                assert not self.own.leaving, "copies to memory still read shared memory"
            except BaseException as error:
                with self.changed:
                    self.failed.append(error)
                    self.changed.notify_all()

        threads = [
            threading.Thread(target=body, args=(i, *each), name=f"group {i}", daemon=True)
            for i, each in enumerate(functions)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4 * self.patience)
        if self.failed:
            raise self.failed[0]

    def copy_out(self, descriptor, at, block, add=False):
        """A copy to memory reads its block as late as it may: when its group waits for it."""
        # Nor have sums.
        ends = (int(a) + size for a, size in zip(at, block.data.shape, strict=True))
        assert not add or all(map(operator.le, ends, descriptor.shape))
        self.own.leaving.append(lambda: descriptor.write(at, block.data, add))

    def await_copies(self, left):
        assert left == 0
        self.pause()
        while self.own.leaving:
            self.own.leaving.pop(0)()

    def multiply(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        result = _value(torch.full_like(acc, float("nan")))
        # Factors in registers are read as late as those in shared memory.
        self.own.pending.append((a, b, acc, use_acc, result))
        self.pause()
        return result

    def settle(self, left, values):
        self.pause()
        while len(self.own.pending) > left:
            a, b, acc, use_acc, result = self.own.pending.pop(0)
            a, b = (x.data if isinstance(x, Shared) else torch.Tensor(x) for x in (a, b))
            product = a.float() @ b.float()
            result.copy_(product + acc if use_acc else product)
        return values[0] if len(values) == 1 else values

    def copy_in(self, descriptor, at, barrier, block):
        def copy():
            descriptor.read(at, block.data)
            barrier.change(0, -descriptor.block_type.nbytes)

        # A copy is there at once, or no sooner than somebody waits for it.
        if self.own.chance.random() < 0.5:
            copy()
        else:
            with self.changed:
                barrier.copies.append(copy)
                self.changed.notify_all()

    def assembly(self, text, constraints, values, dtype, is_pure, pack):
        if "bar.warp.sync" in text:
            return values[0]
        how, number, threads = re.match(r"bar\.(sync|arrive) (\d+), (\d+);", text).groups()
        assert threads == "256"
        with self.changed:
            state = self.named.setdefault(int(number), [0, 0])
            state[0] += 1
            mine = state[1]
            if state[0] == 2:
                state[:] = [0, mine + 1]
            self.changed.notify_all()
        if how == "sync":
            self.until(lambda: state[1] > mine)

    def store(self, target, value, mask=None):
        if isinstance(target, Pointer):
            target.tensor.fill_(value)
            return
        tensor, places = target
        value = torch.as_tensor(value).to(tensor.dtype).broadcast_to(places.shape)
        keep = torch.as_tensor(True if mask is None else mask).broadcast_to(places.shape)
        assert (places[keep] >= 0).all()
        _flat(tensor)[torch.Tensor.long(places[keep])] = value[keep].as_subclass(torch.Tensor)

    def load(self, target, mask=True, other=0):
        tensor, places = target
        places = torch.as_tensor(places)
        keep = torch.as_tensor(mask).broadcast_to(places.shape)
        found = torch.full_like(places, other, dtype=tensor.dtype)
        assert (places[keep] >= 0).all()
        found[keep] = _flat(tensor)[places[keep].long()]
        return _value(found)

    def add(self, pointer, value, sem):
        assert pointer.tensor.numel() == 1
        before = pointer.tensor.clone()
        pointer.tensor += value
        return before[0]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's address on."""
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    return tensor.as_strided((held,), (1,))


class Pointer:
    """The address of a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __add__(self, places):
        return self.tensor, places


def _language(run: _Run) -> SimpleNamespace:
    def allocate(dtype, shape, layout):
        if layout == "barriers":
            return _Barriers(run, shape[0])
        # Memory that was never written holds no number that a kernel may use.
        return Shared(
            torch.full(shape, float("nan") if dtype.is_floating_point else -(2**30), dtype=dtype)
        )

    return SimpleNamespace(
        constexpr=lambda x: x, static_range=range, float32=torch.float32, int32=torch.int32,
        int64=torch.int64, program_id=lambda axis: torch.tensor(run.program),
        num_programs=lambda axis: torch.tensor(run.programs),
        cdiv=lambda a, b: (a + b - 1) // b, allocate_shared_memory=allocate,
        zeros=lambda shape, dtype, layout: _value(torch.zeros(shape, dtype=dtype)),
        full=lambda shape, x, dtype, layout: _value(torch.full(shape, x, dtype=dtype)),
        arange=lambda a, b, layout=None: _value(torch.arange(a, b, dtype=torch.int32)),
        where=lambda c, x, y: _value(torch.where(torch.as_tensor(c), x, y)),
        minimum=lambda x, y: _value(torch.minimum(*_alike(x, y))),
        maximum=lambda x, y: _value(torch.maximum(*_alike(x, y))),
        cast=lambda x, dtype: _value(torch.as_tensor(x).to(dtype)), exp2=torch.exp2,
        log2=torch.log2, max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
        join=lambda x, y: torch.stack((x, y), -1), reshape=lambda x, shape: x.reshape(shape),
        permute=lambda x, order: x.permute(order),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        SliceLayout=lambda *_: None, NVMMADistributedLayout=lambda *_: None,
        DotOperandLayout=lambda *_: None, inline_asm_elementwise=run.assembly,
        warp_specialize=run.start, store=run.store, BlockedLayout=lambda *_: None,
        SwizzledSharedLayout=lambda *_: None, atomic_add=run.add, load=run.load,
        thread_barrier=lambda: None,
    )  # fmt: skip


@contextlib.contextmanager
def on_threads(
    module: ModuleType, unwaited: int | None = None, patience: float = PATIENCE
) -> Iterator[None]:
    """Within the body, kernels of a Gluon module run on threads when they are launched.

    unwaited: the number of a set of barriers that no group waits for. They count in the order in
    which the kernel makes them. After `patience` seconds a wait is one for ever.
    """
    modules = _modules(module)
    kernels = _jitted(module)

    class Kernel:
        def __init__(self, jitted):
            self.jitted = jitted

        def __getitem__(self, grid):
            def launch(*arguments, num_warps, **options):
                for program in range(grid[0]):
                    run = _Run(program, grid[0], unwaited, patience)
                    _one(modules, self.jitted.fn, run, arguments, options)

            return launch

    with contextlib.ExitStack() as stack:
        for name, kernel in kernels.items():
            if name.endswith("_hopper_kernel"):
                stack.enter_context(mock.patch.object(module, name, Kernel(kernel)))
        for each in modules:
            if hasattr(each, "TensorDescriptor"):
                stack.enter_context(mock.patch.object(each, "TensorDescriptor", _described))
        yield


def _jitted(module: ModuleType) -> dict[str, object]:
    """The functions of a module that Gluon compiles, those that it imports too."""
    return {name: each for name, each in vars(module).items() if hasattr(each, "fn")}


def _modules(module: ModuleType) -> set[ModuleType]:
    """The module and all of ours whose functions it imports, by Gluon or for its launchers."""
    found, queue = set(), [module]
    while queue:
        one = queue.pop()
        if one not in found:
            found.add(one)
            jitted = (each.fn for each in _jitted(one).values())
            names = {each.__module__ for each in jitted if "hopper" in each.__module__}
            if hasattr(one, "described"):
                names.add(one.described.__module__)
            queue += [sys.modules[name] for name in names]
    return found


def _described(x, shape, strides, block, layout):
    return Descriptor(x, shape, strides, block)


def _one(modules, function, run, arguments, options):
    def arrive(barrier, count):
        barrier.change(count, 0)

    stands = {
        "gl": _language(run),
        "mbarrier": SimpleNamespace(
            init=lambda barrier, count: barrier.init(count),
            wait=lambda barrier, parity: barrier.wait(parity),
            expect=lambda barrier, nbytes: barrier.change(1, nbytes),
            arrive=arrive,
            MBarrierLayout=lambda: "barriers",
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=run.copy_in,
            async_copy_shared_to_global=run.copy_out,
            store_wait=run.await_copies,
        ),
        "fence_async_shared": lambda: None,
        "warpgroup_mma": run.multiply,
        "warpgroup_mma_wait": run.settle,
    }
    stands["add_to_global"] = functools.partial(run.copy_out, add=True)
    with contextlib.ExitStack() as stack:
        for module in modules:
            constants = {
                name: each.value
                for name, each in vars(module).items()
                if type(each).__name__ == "constexpr"
            }
            bodies = {name: each.fn for name, each in _jitted(module).items()}
            here = {name: stand for name, stand in stands.items() if hasattr(module, name)}
            for name, value in (bodies | constants | here).items():
                stack.enter_context(mock.patch.object(module, name, value))

        # Numbers of the launch are values, tensors are addresses.
        def handed(x):
            return Pointer(x) if isinstance(x, torch.Tensor) else x

        function(*map(handed, arguments), **{name: handed(x) for name, x in options.items()})

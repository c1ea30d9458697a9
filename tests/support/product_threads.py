"""Run the Hopper form of the product on the CPU: its own Python, with a thread for each group.

`gluon_threads.py` has the groups, the barriers, the late copies and the late products. This adds
the parts of the product. Shared memory is bytes in the order of TMA's swizzle panels, so a view of
other blocks over the same bytes shows what it shows on a GPU. A bulk store reads its slot as late
as it may: when its group waits for it. So a slot that is written too early is found. Memory that
was written and not fenced may not be stored.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

from kernels._triton import math as formulas
from kernels.matmul_details import (
    epilogue,
    hopper,
    hopper_consumers,
    hopper_epilogue,
    hopper_producer,
    hopper_tiles,
)
from tests.support import gluon_threads
from tests.support.gluon_threads import Shared

# The files that the kernel consists of.
PARTS = (hopper, hopper_tiles, hopper_producer, hopper_consumers, hopper_epilogue)
# Bytes of a row in a panel of swizzled shared memory.
PANEL = 128


class Blocks(Shared):
    """A ring of blocks, or one block of it, as bytes. turned: whether the block is read so."""

    def __init__(self, run, raw, dtype, shape, turned=False):
        self.run, self.raw, self.kind, self.blocks = run, raw, dtype, list(shape)
        self.turned = turned

    @property
    def shape(self):
        return self.blocks[::-1] if self.turned else self.blocks

    @property
    def dtype(self):
        return self.kind

    def index(self, number):
        size = self.raw.numel() // self.blocks[0]
        assert 0 <= int(number) < self.blocks[0]
        begin = int(number) * size
        return Blocks(self.run, self.raw[begin : begin + size], self.kind, self.blocks[1:])

    def _reinterpret(self, dtype, shape, layout):
        assert torch.Size(shape).numel() * dtype.itemsize <= self.raw.numel()
        size = torch.Size(shape).numel() * dtype.itemsize
        return Blocks(self.run, self.raw[:size], dtype, shape)

    def permute(self, order):
        return Blocks(self.run, self.raw, self.kind, self.blocks, not self.turned)

    def reshape(self, shape):
        return Blocks(self.run, self.raw, self.kind, shape)

    def _panels(self):
        *_, rows, columns = self.blocks
        wide = min(columns, PANEL // self.kind.itemsize)
        return self.raw.view(self.kind).view(columns // wide, rows, wide).permute(1, 0, 2)

    @property
    def data(self):
        found = self._panels().reshape(self.blocks)
        return found.mT if self.turned else found

    def load(self, layout):
        return gluon_threads._value(self.data.clone())

    def put(self, data):
        panels = self._panels()
        panels.copy_(data.reshape(panels.shape))

    def store(self, value):
        assert value.dtype == self.kind
        self.run.own.fenced = False
        self.put(value.as_subclass(torch.Tensor))


class Places(tuple):
    """A tensor's memory and offsets into it."""

    def __add__(self, more):
        return Places((self[0], self[1] + more))


class Pointer(gluon_threads.Pointer):
    def __add__(self, places):
        return Places((self.tensor, places))


class Run(gluon_threads._Run):
    """One program. Its groups' bulk stores read shared memory when they are waited for."""

    def _mine(self):
        if not hasattr(self.own, "stores"):
            self.own.stores, self.own.fenced = [], True
        return self.own.stores

    def copy_in(self, descriptor, at, barrier, block):
        data = torch.empty(block.shape, dtype=block.dtype)
        into = SimpleNamespace(data=data)

        def put():
            descriptor.read(at, data)
            block.put(data)

        late = SimpleNamespace(
            read=lambda at, data: put(), block_type=descriptor.block_type, tensor=descriptor.tensor
        )
        super().copy_in(late, at, barrier, into)

    def store_bulk(self, descriptor, at, block, add=False):
        self._mine().append((descriptor, [int(each) for each in at], block, add))
        assert self.own.fenced

    def store_wait(self, left):
        stores = self._mine()
        while len(stores) > left:
            descriptor, at, block, add = stores.pop(0)
            with self.changed:
                descriptor.write(at, block.data, add)

    def fence(self):
        self._mine()
        self.own.fenced = True

    def start(self, functions, warps, registers):
        def ended(function):
            def body(*arguments):
                self._mine()
                function(*arguments)
                assert not self.own.stores

            return body

        super().start([(ended(f), arguments) for f, arguments in functions], warps, registers)


def _described(x, shape, strides, block, layout):
    return gluon_threads.Descriptor(x, list(shape), list(strides), list(block))


def _load(pointer, mask=None, other=0.0):
    tensor, places = pointer if isinstance(pointer, Places) else (pointer.tensor, 0)
    places = torch.as_tensor(places)
    memory = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    kept = torch.where(mask, places, 0) if mask is not None else places
    found = memory[kept.as_subclass(torch.Tensor) + tensor.storage_offset()]
    return gluon_threads._value(found if mask is None else torch.where(mask, found, other))


def _split(x):
    return x[..., 0], x[..., 1]


def _triton() -> SimpleNamespace:
    """Stand for `triton.language` in the epilogue."""
    return SimpleNamespace(
        float32=torch.float32, int64=torch.int64, load=_load, exp2=torch.exp2, where=torch.where,
        abs=torch.abs, rsqrt=torch.rsqrt, erf=torch.erf,
        maximum=lambda x, y, propagate_nan: torch.maximum(x, torch.as_tensor(y)),
        minimum=lambda x, y, propagate_nan: torch.minimum(x, torch.as_tensor(y)),
        PropagateNan=SimpleNamespace(ALL=None),
    )  # fmt: skip


def _bodies(module: ModuleType) -> dict[str, object]:
    """The Python of a module's device functions, and the numbers of its constants."""
    found = {}
    for name, each in vars(module).items():
        if type(each).__name__ == "constexpr":
            found[name] = each.value
        elif hasattr(each, "fn"):
            found[name] = each.fn
    return found


@contextlib.contextmanager
def in_torch(*modules: ModuleType) -> Iterator[None]:
    """Within the body device functions of modules are Python that computes with PyTorch."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, value in (_bodies(module) | {"tl": _triton()}).items():
                stack.enter_context(mock.patch.object(module, name, value))
        yield


class _Kernel:
    """Stand for the kernel: a launch runs its programs, one after the other."""

    def __init__(self, fn, broken):
        self.fn, self.broken, self.launches = fn, broken, []

    def __getitem__(self, grid):
        def launch(num_warps, **arguments):
            self.launches.append(1)
            for program in range(grid[0]):
                run = Run(program, grid[0], None, gluon_threads.PATIENCE)
                _one(run, arguments, self.broken)

        return launch


def _one(run: Run, arguments: dict[str, object], broken: Callable | None) -> None:
    language = gluon_threads._language(run)

    def allocate(dtype, shape, layout):
        if layout == "barriers":
            return gluon_threads._Barriers(run, shape[0])
        # Memory that was never written holds no number that a kernel may use.
        raw = torch.full((torch.Size(shape).numel() * dtype.itemsize,), 255, dtype=torch.uint8)
        return Blocks(run, raw, dtype, shape)

    language.allocate_shared_memory = allocate
    language.split, language.permute = _split, lambda x, order: x.permute(order)
    # A group is one thread.
    language.load, language.thread_barrier = _load, lambda: None
    language.bfloat16 = torch.bfloat16
    language.NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *_: None)
    barrier = SimpleNamespace(
        init=lambda bar, count: bar.init(count), wait=lambda bar, parity: bar.wait(parity),
        expect=lambda bar, nbytes: bar.change(1, nbytes),
        arrive=lambda bar, count: bar.change(count, 0), MBarrierLayout=lambda: "barriers",
    )  # fmt: skip
    missing = broken(run) if broken else {}
    bulk = SimpleNamespace(
        async_copy_global_to_shared=run.copy_in, async_copy_shared_to_global=run.store_bulk,
        store_wait=missing.pop("store_wait", run.store_wait),
    )  # fmt: skip
    stands = {
        "gl": language, "mbarrier": barrier, "tma": bulk, "warpgroup_mma": run.multiply,
        "warpgroup_mma_wait": run.settle, "fence_async_shared": run.fence,
        "_add_to_global": lambda *of: run.store_bulk(*of, add=True),
    } | missing  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_torch(formulas, epilogue))
        for part in PARTS:
            here = {name: value for name, value in stands.items() if name in vars(part)}
            for name, value in (_bodies(part) | here).items():
                stack.enter_context(mock.patch.object(part, name, value))

        def handed(x):
            return Pointer(x) if isinstance(x, torch.Tensor) else x

        body = hopper.matmul_hopper_kernel
        body(**{name: handed(x) for name, x in arguments.items()})


@contextlib.contextmanager
def product_on_threads(broken: Callable | None = None) -> Iterator[list[int]]:
    """Within the body `hopper.launch_product` runs on threads; yields a list of its launches.

    broken: given a program's run, returns functions that stand for parts of Gluon by their names.
    """
    kernel = _Kernel(hopper.matmul_hopper_kernel.fn, broken)
    with (
        mock.patch.object(hopper, "matmul_hopper_kernel", kernel),
        mock.patch.object(hopper, "TensorDescriptor", _described),
    ):
        yield kernel.launches

"""Run the programs of an interpreted launch in turns, as a GPU interleaves them.

The interpreter runs one program after the other, so a program that waits for a later one would wait
for ever. Here each program has a thread, and one thread runs at a time. A program may lose its turn
at each atomic operation, each volatile load and each load of inline assembly. In random orders it
may lose its turn at any access to memory. A seed decides, so each failure can be repeated.

Other programs see a store only after its program has ended or released it by an atomic operation,
so a missing release shows. Inline assembly is executed as it stands (`ptx.py`). If all programs of
a launch wait, it fails at once with `Deadlock`; no clock is involved. Barriers between the threads
of one program do nothing here, because the interpreter computes whole tiles.
"""

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
from hypothesis import strategies as st
from triton._C.libtriton import ir
from triton.runtime import interpreter

from kernels._triton import exchange as _exchange
from tests.support import ptx

ORDERS = ("in order", "reversed", "random", "successor first", "in turn")
RELEASES = (ir.MEM_SEMANTIC.RELEASE, ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
# The most loads of one program without a store of any other; more is a wait outside of assembly.
PATIENCE = 10_000


class Deadlock(AssertionError):
    """All running programs wait for data that none of them will write."""


@dataclass(frozen=True)
class Schedule:
    """The order in which programs start, and the order in which they run.

    - order: one of ORDERS, for programs that have started.
    - started: the order in which programs start: "in order", "reversed" or "random".
    - resident: how many programs run at a time, or None for all. Another starts when one has ended.
    - launches: with more than one, equal parts of the grid stand for concurrent launches. They
      start "in turn" or at random, each in its own order.
    """

    order: str = "in order"
    seed: int = 0
    started: str = "in order"
    resident: int | None = None
    launches: int = 1


@dataclass
class Run:
    """A launch that has ended.
    - turns: how often another program got the turn.
    - looks: how often inline assembly loaded data that another program writes."""

    kernel: str
    grid: tuple[int, int, int]
    turns: int = 0
    looks: int = 0


def schedules(
    resident: int | None = None, started: tuple[str, ...] = ("in order",), launches: int = 1
):
    """Return a hypothesis strategy of schedules."""
    return st.builds(
        Schedule,
        st.sampled_from(ORDERS),
        st.integers(0, 2**16),
        st.sampled_from(started),
        st.just(resident),
        st.just(launches),
    )


@contextlib.contextmanager
def interleaved(schedule: Schedule = Schedule()) -> Iterator[list[Run]]:
    """Let the programs of each interpreted launch in the body take turns.
    Launchers may make programs wait for each other there. Yields the list of launches."""
    runs: list[Run] = []

    class Executor(interpreter.GridExecutor):
        def __init__(self, fn, *arguments):
            self._turns = _Turns(fn, schedule)
            super().__init__(self._turns, *arguments)

        def __call__(self, *arguments, **named):
            try:
                super().__call__(*arguments, **named)
            except interpreter.InterpreterError:
                if self._turns.deadlock is not None:
                    raise self._turns.deadlock from None
                raise
            runs.append(self._turns.run)

    with mock.patch.object(interpreter, "GridExecutor", Executor), _exchange.taking_turns():
        yield runs


class _Abandoned(BaseException):
    """Ends the thread of a program after another has failed; the interpreter does not catch it."""


@dataclass
class _Program:
    """State of one program.
    - place: its index in the grid.
    - stored: its stores since its last release: addresses, mask, former and own values.
    - waits: the number of stores there had been when it last found nothing, or None if it has not
      looked since."""

    place: tuple[int, int, int]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None
    ended: bool = False
    turns: int = 0
    stored: list = field(default_factory=list)
    seen: int = 0
    waits: int | None = None
    idle: int = 0


class _Turns:
    """Replaces a kernel: collects its programs, and runs all when the last has come."""

    def __init__(self, fn, schedule: Schedule):
        self._fn, self._schedule = fn, schedule
        self._random = random.Random(schedule.seed)
        self._programs: list[_Program] = []
        self._back = threading.Semaphore(0)
        self._current: _Program | None = None
        self._stores, self._failure, self._over = 0, None, False
        self.deadlock: Deadlock | None = None
        self.run: Run | None = None
        # The interpreter reads these attributes of a function.
        self.__name__, self.__globals__ = fn.__name__, fn.__globals__
        self.__annotations__ = fn.__annotations__
        self.__signature__ = interpreter.inspect.signature(fn)

    def __call__(self, **arguments):
        builder = interpreter.interpreter_builder
        self._programs.append(_Program(builder.grid_idx))
        if len(self._programs) == np.prod(builder.grid_dim):
            self.run = Run(self.__name__, builder.grid_dim)
            with contextlib.ExitStack() as stack:
                for name in (
                    "masked_load", "masked_store", "atomic_rmw", "atomic_cas", "inline_asm",
                ):  # fmt: skip
                    name = f"create_{name}"
                    plain = getattr(builder, name)
                    own = getattr(self, f"_{name}")
                    # `partial` hands each the interpreter's own operation.
                    patched = interpreter.partial(own, plain)
                    stack.enter_context(mock.patch.object(builder, name, patched))
                self._all(builder, arguments)

    def _all(self, builder, arguments: dict) -> None:
        queue = self._queue()
        room = self._schedule.resident or len(queue)
        running, last = [], -1
        try:
            while queue or running:
                while queue and len(running) < room:
                    running.append(queue.pop(0))
                ready = [i for i in running if self._programs[i].waits != self._stores]
                if not ready:
                    raise self._stuck(running, queue)
                here = self._next(sorted(ready), last)
                self.run.turns += here != last
                last, program = here, self._programs[here]
                self._resume(builder, program, arguments)
                if self._failure is not None:
                    raise self._failure
                if program.ended:
                    running.remove(here)
        finally:
            self._over = True
            for program in self._programs:
                if program.thread is not None:
                    program.turn.release()
                    program.thread.join()

    def _queue(self) -> list[int]:
        """Return all programs in the order in which they start."""
        programs, launches = len(self._programs), self._schedule.launches
        queue = list(range(programs))
        if launches > 1:
            each = programs // launches
            # The launch of each next program; programs of one launch stay in their order.
            turns = [i % launches for i in range(programs)]
            if self._schedule.started == "random":
                self._random.shuffle(turns)
            starts = [iter(queue[i * each : (i + 1) * each]) for i in range(launches)]
            return [next(starts[launch]) for launch in turns]
        if self._schedule.started == "reversed":
            queue.reverse()
        elif self._schedule.started == "random":
            self._random.shuffle(queue)
        return queue

    def _stuck(self, running: list[int], queue: list[int]) -> Deadlock:
        names = ", ".join(map(str, sorted(running)))
        self.deadlock = Deadlock(
            f"{self.__name__}, grid {self.run.grid}: programs {names} wait for what none of them "
            f"will write; {len(queue)} have not started; {self._schedule}"
        )
        return self.deadlock

    def _next(self, ready: list[int], last: int) -> int:
        match self._schedule.order:
            case "in order":
                return ready[0]
            case "reversed":
                return ready[-1]
            case "random":
                return self._random.choice(ready)
            case "successor first":
                # The program before, which others wait for, gets its turn as late as possible.
                return next((i for i in ready if i > last), ready[-1])
            case "in turn":
                # First all get some turns; then the last runs alone as long as it can. So when it
                # draws the last number, the others stand right behind theirs.
                turns = {i: self._programs[i].turns for i in ready}
                behind = [i for i in ready if turns[i] < 1 + self._schedule.seed % 6]
                if behind:
                    return min(behind, key=lambda i: (turns[i], i))
                return last if last in turns else ready[-1]
        raise ValueError(f"order: {self._schedule.order}, expected one of {ORDERS}")

    def _resume(self, builder, program: _Program, arguments: dict) -> None:
        """Give a program its turn; return when it gives the turn back."""
        self._current = program
        program.turns += 1
        builder.set_grid_idx(*program.place)
        _shown(program.stored)
        if program.thread is None:
            program.thread = threading.Thread(target=self._body, args=(program, arguments))
            program.thread.start()
        else:
            program.turn.release()
        self._back.acquire()
        if program.ended:
            program.stored.clear()
        else:
            _hidden(program.stored)

    def _body(self, program: _Program, arguments: dict) -> None:
        try:
            self._fn(**arguments)
        except _Abandoned:
            return
        except BaseException as error:
            self._failure = error
        program.ended = True
        # From now on all programs see its stores.
        self._stores += bool(program.stored)
        self._back.release()

    def _pause(self) -> None:
        """Give the turn back; return when this program has it again."""
        program = self._current
        self._back.release()
        program.turn.acquire()
        if self._over:
            raise _Abandoned

    def _point(self, strong: bool) -> None:
        """Let others run before an access to memory: always if strong, at times in random
        orders."""
        if strong or (self._schedule.order == "random" and self._random.random() < 0.125):
            self._pause()

    def _looked(self) -> None:
        """Count a strong load after it."""
        program = self._current
        program.idle = 0 if program.seen != self._stores else program.idle + 1
        program.seen = self._stores
        if program.idle > PATIENCE:
            self._found_nothing(self._stores)

    def _found_nothing(self, when: int) -> None:
        """Pause a program whose wait found nothing, until another program has stored something."""
        self._current.waits = when
        self._pause()

    def _create_masked_load(self, plain, ptrs, mask, other, cache, policy, volatile):
        self._point(volatile)
        loaded = plain(ptrs, mask, other, cache, policy, volatile)
        if volatile:
            self._looked()
        return loaded

    def _create_masked_store(self, plain, ptrs, value, mask, *hints):
        self._point(False)
        if not np.any(mask.data):
            return plain(ptrs, value, mask, *hints)
        size = np.broadcast_to(value.data, ptrs.data.shape)
        before = interpreter._interpreter.load(
            ptrs.data, mask.data, np.zeros_like(size), size.dtype
        )
        self._current.stored.append((ptrs.data, mask.data, before, size))
        return plain(ptrs, value, mask, *hints)

    def _create_atomic_rmw(self, plain, operation, ptr, value, mask, sem, scope):
        self._released(sem)
        found = plain(operation, ptr, value, mask, sem, scope)
        self._pause()
        return found

    def _create_atomic_cas(self, plain, ptr, compared, value, sem, scope):
        self._released(sem)
        found = plain(ptr, compared, value, sem, scope)
        self._pause()
        return found

    def _released(self, sem) -> None:
        """Release the stores of a program before an atomic operation."""
        self._pause()
        if sem in RELEASES:
            self._current.stored.clear()
        self._stores += 1

    def _create_inline_asm(self, plain, text, constraints, handles, types, is_pure, pack):
        shape = handles[0].data.shape
        inputs = []
        for handle in handles:
            bits = handle.data.reshape(-1, pack)
            words = max(1, pack * bits.itemsize * 8 // 32) if bits.itemsize < 8 else pack
            kind = np.uint64 if bits.itemsize == 8 else np.uint32
            inputs.extend(np.ascontiguousarray(bits).view(kind).reshape(-1, words).T)
        stale: dict[int, int] = {}
        # The time of each lane's last look: lanes of a program may look at different times.
        looked = np.zeros(len(inputs[0]), np.int64)

        def load(addresses, lanes, strong):
            self._point(strong)
            looked[lanes] = self._stores
            self.run.looks += strong
            found = interpreter._interpreter.load(
                addresses, np.ones(addresses.shape, bool),
                np.zeros(addresses.shape, np.uint32), np.dtype(np.uint32),
            )  # fmt: skip
            if strong:
                self._looked()
                return found
            # A weak load may never see what another program stores.
            pairs = zip(addresses.flat, found.flat, strict=True)
            known = [stale.setdefault(*each) for each in pairs]
            return np.array(known, np.uint32).reshape(found.shape)

        def turned(lanes):
            self._found_nothing(looked[lanes].min())

        outputs = constraints.count("=")
        registers = ptx.execute(text, inputs, outputs, load, turned)
        results, at = [], 0
        for type_ in types:
            dtype = interpreter._get_np_dtype(type_)
            words = pack * dtype.itemsize // 4
            taken = np.stack(registers[at : at + words], 1).astype(np.uint32)
            at += words
            data = np.ascontiguousarray(taken).view(dtype).reshape(shape)
            results.append(interpreter.TensorHandle(data, type_.scalar))
        return mock.Mock(get_result=results.__getitem__)


def _shown(stored: list) -> None:
    """Put the stores of a program back into memory; keep the values that they replace."""
    for index, (addresses, mask, _, own) in enumerate(stored):
        before = interpreter._interpreter.load(addresses, mask, np.zeros_like(own), own.dtype)
        stored[index] = addresses, mask, before, own
        interpreter._interpreter.store(addresses, own, mask)


def _hidden(stored: list) -> None:
    """Take the stores of a program out of memory again."""
    for addresses, mask, before, _ in reversed(stored):
        interpreter._interpreter.store(addresses, before, mask)

"""The plan of a step of AdamW, which holds as long as the tensors stay as they are.

The launches of a step read addresses and lengths from tables on the device. Those follow from the
lists of tensors, as do the dtypes and the chunks. A step with known lists compares addresses and
layouts, in a few passes without a line of Python for each tensor. A plan knows tensors by these
alone and holds none of them, so it does not matter which tensor has an address.

Gradients may move from step to step: then their table alone is written anew. A step that is
captured in a CUDA graph has a plan of its own, because the graph fills its tables at each replay.
They end with the graph; those of a plan from before would have to be kept for good.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .._runtime import internals
from .._runtime.address_table import (
    address_table,
    capturing,
    chunk_table,
    set_aside,
    stream_of,
)
from .._runtime.layout import ACCESS_BYTES
from .lists import Lists, as_laid_out

# Elements of a chunk: many of them from LARGE elements on, where each multiprocessor has enough.
LARGE, LONG_CHUNK, SHORT_CHUNK = 2**25, 2**15, 2**12

_ADDRESS = torch.Tensor.data_ptr


@dataclass(frozen=True)
class Part:
    """One launch over tensors of one dtype, of the update or of the sums of squares.

    - table: int64 `[kinds + 1, tensors]`; None for the sums, which read that of the gradients.
    - chunks: int32 `[2, chunks]`.
    - first: the place of the first gradient among those of its dtype, or of the first sum.
    - moment: the dtype of the moments.
    - aligned: whether all tensors that the table names begin at multiples of 16 bytes.
    """

    dtype: torch.dtype
    tensors: int
    first: int
    chunk: int
    chunks: torch.Tensor
    table: torch.Tensor | None = None
    moment: torch.dtype | None = None
    has_masters: bool = False
    aligned: bool = True


@dataclass(frozen=True)
class Gradients:
    """The tables of the gradients of a step, by dtype: int64 `[2, tensors]`, addresses and lengths.

    aligned: whether all of a dtype begin at multiples of 16 bytes. held: copies of gradients that
    lay in another order than their parameters; the launches read them.
    """

    addresses: list[int]
    tables: dict[torch.dtype, torch.Tensor]
    aligned: dict[torch.dtype, bool]
    held: list[torch.Tensor]


class StepPlan:
    """The parts of a step over groups of lists, and how the lists are known again.

    updates: the update of each group, None for one without elements. squares: the sums of squares
    for each dtype of gradients, `sums` of them in all.
    """

    def __init__(self, groups: Sequence[Lists]):
        """groups: lists that are checked, all on one device."""
        self._device = groups[0].params[0].device
        self._stream = stream_of(self._device)
        self._is_captured = capturing(self._device)
        written, grads = _flat(groups)
        self._written = [_address_of(x) for x in written]
        params = [p for lists in groups for p in lists.params]
        pairs = zip(grads, params, strict=True)
        # By place the parameters whose gradients must be copied into their order.
        self._copied = [k for k, (g, p) in enumerate(pairs) if as_laid_out(g, p) is not g]
        self._places: dict[torch.dtype, list[int]] = {}
        for place, grad in enumerate(grads):
            self._places.setdefault(grad.dtype, []).append(place)
        self._lengths = [p.numel() for p in params]
        self.updates = tuple(self._updates(groups))
        self.squares = tuple(self._squares())
        self.sums = sum(part.chunks.shape[1] for part in self.squares)
        self._is_grad_enabled = torch.is_grad_enabled()
        # The lengths of all tables of addresses.
        self._numbers = [part.table.numel() for part in self.updates if part is not None]
        self._numbers += [2 * len(places) for places in self._places.values()]
        self._gradients: Gradients | None = None
        self._alike = None
        # A tensor without memory, as in a build, is known by nothing.
        if not self._is_captured and all(_ADDRESS(x) for x in (*written, *grads) if x.numel() > 0):
            self._alike = internals.alike((*written, *grads))

    @property
    def lasts(self) -> bool:
        """Whether the plan can serve further steps."""
        return self._alike is not None

    def serves(self, groups: Sequence[Lists]) -> bool:
        """Return whether the lists are as those of the plan, but for the place of the gradients.

        groups: lists of the lengths of those of the plan, of whatever.
        """
        if (
            internals.forward_mode._current_level >= 0
            or torch.is_grad_enabled() != self._is_grad_enabled
            or capturing(self._device)
        ):
            return False
        written, grads = _flat(groups)
        try:
            found = [*map(_ADDRESS, written)]
        except (TypeError, RuntimeError):
            return False
        return (
            found == self._written
            and self._alike(*written, *grads)
            and stream_of(self._device) == self._stream
        )

    def gradients(self, groups: Sequence[Lists]) -> Gradients:
        """Return the tables of the gradients where these lie now; the groups are served.

        A call outside of a capture also makes ready what the plan of a captured step needs.
        """
        _, grads = _flat(groups)
        held = []
        if self._copied:
            params = [p for lists in groups for p in lists.params]
            for place in self._copied:
                grads[place] = as_laid_out(grads[place], params[place])
                held.append(grads[place])
        addresses, known = [_address_of(g) for g in grads], self._gradients
        if not self._is_captured:
            set_aside(self._numbers, torch.int64, self._device)
        if known is not None and addresses == known.addresses:
            return known
        tables, aligned = {}, {}
        for dtype, places in self._places.items():
            own = [addresses[place] for place in places]
            lengths = [self._lengths[place] for place in places]
            tables[dtype] = address_table(own, lengths, self._device)
            aligned[dtype] = _is_aligned(own)
        made = Gradients(addresses, tables, aligned, held)
        # Copies would be kept in memory, to no use: the next ones lie elsewhere.
        if not self._is_captured and not held:
            self._gradients = made
        return made

    def _updates(self, groups: Sequence[Lists]) -> Iterator[Part | None]:
        firsts = dict.fromkeys(self._places, 0)
        for lists in groups:
            dtype, first = lists.params[0].dtype, firsts[lists.params[0].dtype]
            firsts[dtype] += len(lists.params)
            lengths = [p.numel() for p in lists.params]
            if not any(lengths):
                yield None
                continue
            addresses = [_address_of(x) for each in lists.written for x in each]
            chunk = _chunk_of(lengths)
            yield Part(
                dtype, len(lengths), first, chunk, chunk_table(lengths, chunk, self._device),
                table=address_table(addresses, lengths, self._device),
                moment=lists.exp_avgs[0].dtype, has_masters=bool(lists.masters),
                aligned=_is_aligned(addresses),
            )  # fmt: skip

    def _squares(self) -> Iterator[Part]:
        first, chunk = 0, _chunk_of(self._lengths)
        for dtype, places in self._places.items():
            lengths = [self._lengths[place] for place in places]
            if any(lengths):
                chunks = chunk_table(lengths, chunk, self._device)
                yield Part(dtype, len(places), first, chunk, chunks)
                first += chunks.shape[1]


class Plans:
    """The plans of steps, a few of them."""

    # A program that has ever new lists starts anew.
    MOST = 64

    def __init__(self):
        self._known: dict[tuple, StepPlan] = {}

    def find(self, groups: Sequence[Lists]) -> StepPlan | None:
        """Return a plan that serves these lists, of whatever; None if there is none."""
        try:
            plan = self._known.get(_key(groups))
        except (TypeError, RuntimeError, IndexError):
            return None
        return plan if plan is not None and plan.serves(groups) else None

    def add(self, groups: Sequence[Lists], plan: StepPlan) -> None:
        """Keep a plan of these lists, if it lasts."""
        if not plan.lasts:
            return
        if len(self._known) >= self.MOST:
            self._known.clear()
        self._known[_key(groups)] = plan


def _key(groups):
    """Return the first address, and the lengths of all lists; TypeError if one is no list."""
    if not all(isinstance(each, (list, tuple)) for lists in groups for each in lists):
        raise TypeError
    sizes = [tuple(map(len, lists)) for lists in groups]
    return _ADDRESS(groups[0].params[0]), *sizes


def _flat(groups):
    """Return the tensors that a step writes, and the gradients."""
    written = [each for lists in groups for each in lists.written]
    grads = [lists.grads for lists in groups]
    return [*itertools.chain.from_iterable(written)], [*itertools.chain.from_iterable(grads)]


def _address_of(x):
    # A tensor of a build has no memory, but it may begin past an aligned address.
    return x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()


def _is_aligned(addresses):
    return not any(address % ACCESS_BYTES for address in addresses)


def _chunk_of(lengths):
    """Return the elements of a chunk for a list of tensors."""
    return LONG_CHUNK if sum(lengths) >= LARGE else SHORT_CHUNK

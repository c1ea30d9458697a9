"""Check that a step of AdamW does with known lists what it does with new ones, and nothing stale.

Launches are recorded and not made. The tables that they are handed must name the tensors of the
step, whatever happened to these since the last one. Results are checked in test_adamw.py.
"""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad

from kernels import adamw as family
from kernels._runtime import address_table, internals
from kernels.adamw import AdamW, adamw
from kernels.adamw_details import launches
from kernels.adamw_details.step_plan import Plans

SHAPES = [(5, 8), (6, 7), (9,), (3, 4)]
FLOATS = [torch.float32] * 4


class Watch:
    """- begun: the launches since the last look, by name, each with its arguments by position.
    - tables: the tables made since then. checked: the lists checked one tensor after the other.
    """

    def __init__(self, monkeypatch):
        self.begun, self.tables, self.checked = [], [], []
        for name in ("squares_fwd", "scalars_fwd", "update_fwd"):
            monkeypatch.setattr(launches, name, self._noting(name))
        check, make = family.check_lists, address_table.on_device
        monkeypatch.setattr(
            family, "check_lists", lambda *given, **more: self._checked(check, *given, **more)
        )
        monkeypatch.setattr(address_table, "on_device", lambda *given: self._made(make, *given))

    def _noting(self, name):
        def note(*given):
            self.begun.append((name, given))
            return torch.zeros(()), torch.zeros(4)

        return note

    def _checked(self, check, *given, **more):
        self.checked.append(given)
        return check(*given, **more)

    def _made(self, make, *given):
        self.tables.append(make(*given))
        return self.tables[-1]

    def look(self, step):
        """Take a step; return its launches, and how many tables and precise checks it made."""
        for noted in (self.begun, self.tables, self.checked):
            noted.clear()
        step()
        return list(self.begun), len(self.tables), len(self.checked)


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(family, "PLANS", Plans())
    monkeypatch.setattr(address_table, "_chunks", {})
    return Watch(monkeypatch)


@pytest.fixture(params=["guards", "public"])
def way(request, monkeypatch):
    """Layouts are compared by PyTorch's guards, or by what it promises to keep."""
    if request.param == "public":
        monkeypatch.setattr(internals, "_tells_tensors_apart", lambda make: False)


def parameters(dtypes=FLOATS):
    params = [
        torch.nn.Parameter(torch.ones(s, dtype=d)) for s, d in zip(SHAPES, dtypes, strict=True)
    ]
    for param in params:
        param.grad = torch.ones_like(param)
    return params


def optimizer_of(params, **options):
    groups = [{"params": params[:2], "weight_decay": 0.5}, {"params": params[2:], "lr": 0.25}]
    return AdamW(groups, **{"clip": 1.0} | options)


def addresses(tensors):
    return [x.data_ptr() for x in tensors]


def holds(begun, optimizer):
    """Assert that the launches are those of a step of this optimizer as it is now."""
    updates = iter(each for name, each in begun if name == "update_fwd")
    squares = {each[6]: each for name, each in begun if name == "squares_fwd"}
    (counter,) = (each[1] for name, each in begun if name == "scalars_fwd")
    expected = {}
    for group in optimizer.param_groups:
        for dtype in dict.fromkeys(p.dtype for p in group["params"] if p.grad is not None):
            params = [p for p in group["params"] if p.grad is not None and p.dtype == dtype]
            states = [optimizer.state[p] for p in params]
            assert all(state["step"] is counter for state in states)
            has_masters = optimizer.masters and dtype != torch.float32
            names = ["exp_avg", "exp_avg_sq", *(["master"] if has_masters else [])]
            rows = [addresses(params), *(addresses(s[n] for s in states) for n in names)]
            table, grads, chunks, _, lr_tensor, lr, decay, *_ = update = next(updates)
            assert table.tolist() == [*rows, [p.numel() for p in params]]
            tensors, first, chunk, kind, moment, masters, aligned = update[12:]
            assert (tensors, kind, masters) == (len(params), dtype, has_masters)
            assert moment == states[0]["exp_avg"].dtype
            found = grads[0, first : first + tensors].tolist()
            assert found == addresses(p.grad for p in params)
            assert aligned == (not any(x % 16 for row in (*rows, grads[0].tolist()) for x in row))
            rate = group["lr"]
            assert lr_tensor is rate if isinstance(rate, torch.Tensor) else lr == rate
            assert decay == group["weight_decay"]
            assert chunks.tolist() == chunked([p.numel() for p in params], chunk)
            expected[dtype] = expected.get(dtype, []) + params
    assert next(updates, None) is None
    if optimizer.clip is not None:
        assert squares.keys() == expected.keys()
        for dtype, params in expected.items():
            table, chunks, _, _, tensors, chunk, *_ = squares[dtype]
            lengths = [p.numel() for p in params]
            assert table.tolist() == [addresses(p.grad for p in params), lengths]
            assert chunks.tolist() == chunked(lengths, chunk) and tensors == len(params)


def chunked(lengths, chunk):
    places = [(k, n) for k, length in enumerate(lengths) for n in range(-(-length // chunk))]
    return [[owner for owner, _ in places], [number for _, number in places]]


@pytest.mark.parametrize("masters", [False, True])
def test_a_known_step_makes_no_table_and_checks_no_tensor_by_itself(watch, way, masters):
    params = parameters([torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16])
    optimizer = optimizer_of(params, masters=masters)
    begun, tables, checked = watch.look(optimizer.step)
    holds(begun, optimizer)
    assert tables and checked == 3
    for _ in range(3):
        begun, *counts = watch.look(optimizer.step)
        assert counts == [0, 0]
        holds(begun, optimizer)


def test_new_gradients_cost_one_table_for_each_dtype(watch, way):
    params = parameters([torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16])
    optimizer = optimizer_of(params)
    optimizer.step()
    before = [p.grad for p in params]
    for _ in range(2):
        before += [p.grad for p in params]
        optimizer.zero_grad(set_to_none=True)
        for param in params:
            param.grad = torch.ones_like(param)
        begun, *counts = watch.look(optimizer.step)
        assert counts == [2, 0]
        holds(begun, optimizer)
    params[2].grad = before[2]
    begun, *counts = watch.look(optimizer.step)
    assert counts == [2, 0]
    holds(begun, optimizer)


def moved(optimizer, params):
    params[1].data = params[1].detach().clone()


def turned(optimizer, params):
    """All of a parameter keep their addresses."""
    params[3].grad = None
    params[3].data = params[3].data.t()
    for moment in ("exp_avg", "exp_avg_sq"):
        optimizer.state[params[3]][moment].t_()
    params[3].grad = torch.ones(3, 4).t()


def unaligned(optimizer, params):
    params[0].grad = torch.ones(41)[1:].view(5, 8)


def loaded(optimizer, params):
    other = optimizer_of(parameters())
    other.step()
    optimizer.load_state_dict(other.state_dict())


def replaced(optimizer, params):
    optimizer.state[params[0]]["exp_avg_sq"] = torch.zeros_like(params[0])


def forgotten(optimizer, params):
    optimizer.state.pop(params[0])


def forgotten_moment(optimizer, params):
    optimizer.state[params[0]].pop("exp_avg")


def recounted(optimizer, params):
    optimizer.state[params[1]]["step"] = torch.zeros(())


def added(optimizer, params):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer.add_param_group({"params": [param], "lr": 0.125})


def regrouped(optimizer, params):
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())


def without_one(optimizer, params):
    params[2].grad = None


def without_first_group(optimizer, params):
    params[0].grad = params[1].grad = None


def other_rates(optimizer, params):
    optimizer.param_groups[0] |= {"lr": 0.125, "weight_decay": 0.0}


def rate_on_device(optimizer, params):
    optimizer.param_groups[0]["lr"] = torch.tensor(0.5)


def unclipped(optimizer, params):
    optimizer.clip = None


EVENTS = [
    *(moved, turned, unaligned, loaded, replaced, forgotten, forgotten_moment, recounted),
    *(added, regrouped, without_one, without_first_group, other_rates, rate_on_device, unclipped),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_nothing_stale_is_used(watch, way, event):
    params = parameters()
    optimizer = optimizer_of(params)
    optimizer.step()
    optimizer.step()
    event(optimizer, params)
    for _ in range(2):
        begun, *_ = watch.look(optimizer.step)
        holds(begun, optimizer)
        assert any(name == "squares_fwd" for name, _ in begun) == (event is not unclipped)


def test_a_gradient_in_another_order_is_copied_in_each_step():
    ours, plain = parameters(), parameters()
    optimizers = optimizer_of(ours), optimizer_of(plain)
    for _ in range(3):
        gradient = torch.randn(5, 8)
        ours[0].grad, plain[0].grad = gradient.t().contiguous().t(), gradient
        for optimizer in optimizers:
            optimizer.step()
        assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("number", range(3))
def test_the_norm_is_that_of_gradients_with_gaps(number):
    """Their entries are no run of memory, which a kernel would read."""
    gradient = (torch.arange(18.0)[::2], torch.ones(1).expand(9), torch.arange(18.0).view(2, 9)[1])
    lists = [[torch.ones(9)], [gradient[number]], [torch.zeros(9)], [torch.zeros(9)]]
    *_, norm = adamw(*lists, torch.zeros(()), max_norm=1.0)
    torch.testing.assert_close(norm, gradient[number].norm())


def lists_of(dtype=torch.float32, requires_grad=False):
    lists = [[torch.ones(s, dtype=dtype) for s in SHAPES] for _ in range(5)]
    for param in lists[0]:
        param.requires_grad_(requires_grad)
    return [*lists[:4], torch.zeros(()), [x.float() for x in lists[4]]]


def call(lists, **options):
    adamw(*lists[:5], lists[5] if lists[0][0].dtype != torch.float32 else None, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_known_call_makes_no_table(watch, way, dtype):
    lists = lists_of(dtype)
    watch.look(lambda: call(lists))
    for kind in (list, tuple):
        given = [x if isinstance(x, torch.Tensor) else kind(x) for x in lists]
        assert watch.look(lambda given=given: call(given))[1:] == (0, 0)
    lists[1] = [torch.ones_like(x) for x in lists[1]]
    begun, *counts = watch.look(lambda: call(lists, max_norm=1.0))
    assert counts == [1, 0] and begun[0][1][0].tolist()[0] == addresses(lists[1])


def shrunk(lists):
    lists[2][3].resize_(3, 3)


def turned_moment(lists):
    lists[3][3].t_()


def retyped(lists):
    lists[1][2].data = lists[1][2].view(torch.int32)


def too_few(lists):
    """The same tensors in the same order, in other lists."""
    lists[3].insert(0, lists[2].pop())


def no_tensor(lists):
    lists[2][1] = 3.0


def twice(lists):
    lists[0][0].data = lists[0][1].data.view(-1)[:40].view(5, 8)


FAULTS = {
    shrunk: r"exp_avgs\[3\]: shape \(3, 3\), expected",
    turned_moment: r"exp_avg_sqs\[3\]: shape \(4, 3\), expected",
    retyped: r"grads\[2\]: torch.int32, expected torch.float32",
    too_few: "exp_avgs: 3 tensors, expected 4",
    no_tensor: "exp_avgs: .*expected a tensor or a list",
    twice: "expected no tensor twice",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_after_a_known_call(watch, way, fault):
    lists = lists_of()
    call(lists)
    call(lists)
    fault(lists)
    with pytest.raises((TypeError, ValueError), match=FAULTS[fault]):
        call(lists)


def test_masters_that_are_an_empty_list_are_refused(watch):
    lists = lists_of()
    call(lists)
    with pytest.raises(ValueError, match="masters: 0 tensors, expected 4"):
        adamw(*lists[:5], [])


def test_a_gradient_that_is_wanted_is_refused_after_a_call_without(watch, way):
    lists = lists_of(requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            call(lists)
    with pytest.raises(ValueError, match=r"params\[0\]: requires a gradient"):
        call(lists)


def test_a_tangent_is_refused_after_a_known_call(watch, way):
    lists = lists_of()
    call(lists)
    with forward_ad.dual_level():
        lists[1][0] = forward_ad.make_dual(lists[1][0], torch.ones(5, 8))
        with pytest.raises(ValueError, match=r"grads\[0\]: has a tangent"):
            call(lists)


def test_ever_new_lists_do_not_fill_the_memory(watch, monkeypatch):
    monkeypatch.setattr(Plans, "MOST", 3)
    kept = [lists_of() for _ in range(7)]
    for lists in kept:
        call(lists)
    assert 1 <= len(family.PLANS._known) <= 3


class Gpu:
    """The host part of a GPU: streams, captures and pinned memory; its tensors lie on the CPU."""

    def __init__(self, monkeypatch):
        self.stream, self.is_capturing = 7, False
        self.pinned = set()
        monkeypatch.setattr(address_table, "_on_gpu", lambda device: True)
        monkeypatch.setattr(address_table, "_pinned", self._pinned)
        monkeypatch.setattr(address_table, "_spare", {})
        monkeypatch.setattr(address_table, "_captured", {})
        monkeypatch.setattr(internals, "raw_stream", lambda: lambda index: self.stream)
        monkeypatch.setattr(internals, "current_device", lambda: lambda: -1)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)

    def _pinned(self, size):
        assert not self.is_capturing, "a capture may not pin memory"
        made = torch.empty(size, dtype=torch.uint8)
        self.pinned.add(made.untyped_storage().data_ptr())
        return made

    @contextlib.contextmanager
    def captured(self, stream=8):
        """Within the body this stream is the current one, and is captured."""
        before, self.stream, self.is_capturing = self.stream, stream, True
        yield
        self.stream, self.is_capturing = before, False

    @property
    def copies(self):
        """The numbers in pinned memory that graphs copy from."""
        kept = address_table._captured.values()
        return [x for x in kept if x.untyped_storage().data_ptr() in self.pinned]

    def keeps(self, table):
        """Whether a replay finds these numbers: the table is kept, or what it is copied from."""
        place = table.untyped_storage().data_ptr()
        kept = address_table._captured.values()
        return any(x.untyped_storage().data_ptr() == place for x in kept) or any(
            torch.equal(x.view(table.dtype), table.flatten()) for x in self.copies
        )


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def tables_of(begun):
    """Return the tables that launches are handed."""
    updates = [each for name, each in begun if name == "update_fwd"]
    squares = [each for name, each in begun if name == "squares_fwd"]
    return [x for each in updates for x in each[:3]] + [x for each in squares for x in each[:2]]


def test_another_stream_gets_tables_of_its_own(watch, gpu):
    optimizer = optimizer_of(parameters())
    first = tables_of(watch.look(optimizer.step)[0])
    assert [x is y for x, y in zip(tables_of(watch.look(optimizer.step)[0]), first, strict=True)]
    gpu.stream = 9
    begun, *_ = watch.look(optimizer.step)
    holds(begun, optimizer)
    known = set(addresses(first))
    assert not known & set(addresses(tables_of(begun)))


def test_a_graph_fills_the_tables_of_known_lists_anew(watch, gpu):
    params = parameters()
    optimizer = optimizer_of(params)
    optimizer.step()
    known = set(addresses(tables_of(watch.look(optimizer.step)[0])))
    with gpu.captured():
        begun, *_ = watch.look(optimizer.step)
    shared = known & set(addresses(tables_of(begun)))
    chunks = [x for name, each in begun for x in each if getattr(x, "dtype", 0) == torch.int32]
    assert shared <= {x.data_ptr() for x in chunks}
    holds(begun, optimizer)
    assert all(map(gpu.keeps, tables_of(begun)))
    words = [x.tolist() for x in tables_of(begun)]
    for param in params:
        param.grad, param.data = torch.ones_like(param), param.detach().clone()
    optimizer.step()
    assert [x.tolist() for x in tables_of(begun)] == words


def test_a_graph_copies_the_addresses_of_its_own_gradients(watch, gpu):
    params = parameters()
    optimizer = optimizer_of(params)
    optimizer.step()
    before = [p.grad for p in params]
    with gpu.captured():
        for param in params:
            param.grad = torch.ones_like(param)
        begun, *_ = watch.look(optimizer.step)
    holds(begun, optimizer)
    assert all(map(gpu.keeps, tables_of(begun)))
    # A table that the graph fills serves no other call.
    captured = begun[0][1][0].data_ptr()
    again, *_ = watch.look(optimizer.step)
    holds(again, optimizer)
    assert captured not in addresses(tables_of(again))
    for param, grad in zip(params, before, strict=True):
        param.grad = grad
    holds(watch.look(optimizer.step)[0], optimizer)


def test_lists_that_a_graph_sees_first_are_known_to_that_graph_alone(watch, gpu):
    other, optimizer = optimizer_of(parameters()), optimizer_of(parameters())
    with gpu.captured(), pytest.raises(RuntimeError, match="first seen while a CUDA graph"):
        optimizer.step()
    other.step()
    address_table._chunks.clear()
    with gpu.captured(gpu.stream):
        begun, *_ = watch.look(optimizer.step)
    holds(begun, optimizer)
    assert all(map(gpu.keeps, tables_of(begun)))
    again, *_ = watch.look(optimizer.step)
    holds(again, optimizer)
    assert not set(addresses(tables_of(again))) & set(addresses(tables_of(begun)))


def captured_with_other_gradients(watch, gpu, params, optimizer):
    with gpu.captured():
        for param in params:
            param.grad = torch.ones_like(param)
        holds(watch.look(optimizer.step)[0], optimizer)


def test_blocks_of_pinned_memory_last_for_several_captures(watch, gpu):
    params = parameters()
    optimizer = optimizer_of(params)
    optimizer.step()
    for _ in range(address_table.SPARE):
        captured_with_other_gradients(watch, gpu, params, optimizer)


def test_a_step_with_known_addresses_sets_blocks_aside_for_the_next_capture(watch, gpu):
    params = parameters()
    optimizer = optimizer_of(params)
    optimizer.step()
    own = [p.grad for p in params]
    for _ in range(2 * address_table.SPARE):
        captured_with_other_gradients(watch, gpu, params, optimizer)
        for param, grad in zip(params, own, strict=True):
            param.grad = grad
        optimizer.step()


def test_a_table_that_a_graph_fills_ends_with_its_launches(watch, gpu):
    """A graph has memory of its own; what was kept there would outlast the graph."""
    params = parameters()
    optimizer = optimizer_of(params)
    optimizer.step()
    before = dict(address_table._captured)
    captured_with_other_gradients(watch, gpu, params, optimizer)
    new = [x for key, x in address_table._captured.items() if key not in before]
    in_graph = [x for x in new if x.untyped_storage().data_ptr() not in gpu.pinned]
    known = {x.data_ptr() for x in tables_of(watch.look(optimizer.step)[0])}
    assert all(x.data_ptr() in known for x in in_graph) and len(new) > len(in_graph)

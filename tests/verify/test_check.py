"""Check one cell: implementations whose fault is known are rejected, right ones accepted."""

import ctypes
import dataclasses
import json
import math

import pytest
import torch

from harness.verify import check
from harness.verify import problem as oracle
from ops._spec import DTYPES, Cost, Op, Tensor, make_case


def weighted_softmax(x, weight):
    return torch.softmax(x, dim=-1) * weight


def no_cost(case, pass_, itemsize):
    return Cost(0, 0, 0)


OP = Op(
    "weighted_softmax",
    weighted_softmax,
    {"x": Tensor("M N"), "weight": Tensor("N")},
    no_cost,
    edge=(),
    sweep=(),
    passes=("forward", "backward"),
)
CASE = make_case(M=17, N=129)


def judged(function, pass_="forward", dtype="float32", case=CASE, op=OP):
    """Return the reason for which a function is rejected, or ""."""
    problem = oracle.problem(op, case, dtype, 0, "cpu", op.reference)
    return found(function, problem, pass_).reason


def found(function, problem, pass_="forward", ours=True):
    finding = check.check(function, problem, pass_, ours)
    json.dumps(finding.tensors, allow_nan=False)
    return finding


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 1.03


def by_rows(x, weight):
    return torch.stack([torch.softmax(row, dim=-1) * weight for row in x])


def in_float32(x, weight):
    return weighted_softmax(x.float(), weight.float()).to(x.dtype)


def zeros(x, weight):
    return torch.zeros_like(x)


def not_a_number(x, weight):
    return torch.full_like(x, math.nan)


def unwritten_tail(x, weight):
    out = torch.empty_like(x)
    out[:-1] = weighted_softmax(x[:-1], weight)
    return out


def shuffled_rows(x, weight):
    return weighted_softmax(x, weight).flip(0)


def three_percent_wrong(x, weight):
    return weighted_softmax(x, weight) * 1.03


def one_entry_wrong(x, weight):
    out = weighted_softmax(x, weight)
    out[0, 0] += 0.1 * out.abs().max()
    return out


def wrong_gradient(x, weight):
    return weighted_softmax(WrongGradient.apply(x), weight)


def changes_an_input(x, weight):
    out = weighted_softmax(x, weight)
    with torch.no_grad():
        x[0, 0] += 1
    return out


def wrong_dtype(x, weight):
    return weighted_softmax(x, weight).double()


def wrong_shape(x, weight):
    return weighted_softmax(x, weight).T


def nothing(x, weight):
    return None


def two_tensors(x, weight):
    return weighted_softmax(x, weight), x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pass_", OP.passes)
@pytest.mark.parametrize("function", [weighted_softmax, by_rows, in_float32])
def test_right_implementations_pass(function, pass_, dtype):
    assert judged(function, pass_, dtype) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (zeros, "times as far"),
        (not_a_number, "inf or NaN"),
        (unwritten_tail, "inf or NaN"),
        (shuffled_rows, "times as far"),
        (three_percent_wrong, "times as far"),
        (one_entry_wrong, "times as far"),
        (changes_an_input, "changes its inputs"),
        (wrong_dtype, "torch.float64, expected"),
        (wrong_shape, "(129, 17) torch."),
        (nothing, "NoneType"),
        (two_tensors, "returns out0, out1; expected out"),
    ],
)
def test_wrong_implementations_do_not_pass(function, reason, dtype):
    assert reason in judged(function, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gradient_can_be_the_only_fault(dtype):
    assert judged(wrong_gradient, "forward", dtype) == ""
    assert judged(wrong_gradient, "backward", dtype).startswith("dx is")


def test_inputs_are_restored_after_a_change():
    problem = oracle.problem(OP, CASE, "float32", 0, "cpu", OP.reference)
    assert found(changes_an_input, problem).reason
    assert found(weighted_softmax, problem).reason == ""


def test_a_write_between_the_rows_is_a_change():
    def spills(x, weight):
        out = weighted_softmax(x, weight)
        x.as_strided((1,), (1,), x.storage_offset() + x.shape[1]).zero_()
        return out

    padded = make_case(M=3, N=20, layout="padded")
    assert judged(spills, case=padded) == "changes its inputs"
    assert judged(weighted_softmax, case=padded) == ""


def test_an_output_must_have_memory_of_its_own():
    same = Op("same", lambda x: x * 1, {"x": Tensor("N")}, no_cost, edge=(), sweep=())
    assert (
        judged(lambda x: x, case=make_case(N=9), op=same) == "out lies in the memory of the input x"
    )
    assert judged(torch.clone, case=make_case(N=9), op=same) == ""


@pytest.mark.parametrize("deterministic", [True, False])
def test_two_calls_must_agree_where_declared(deterministic):
    calls = []

    def drifts(x, weight):
        calls.append(0)
        out = weighted_softmax(x, weight)
        return out * (1 + len(calls) * torch.finfo(x.dtype).eps)

    op = Op(
        "drifts",
        weighted_softmax,
        OP.inputs,
        no_cost,
        edge=(),
        sweep=(),
        deterministic=deterministic,
    )
    expected = "out differs between two calls" if deterministic else ""
    assert judged(drifts, op=op) == expected


def one_step_outside(tensor, by):
    """Write one element beside a tensor, as a kernel with a wrong mask does."""
    address = tensor.data_ptr() + by * tensor.element_size()
    ctypes.memset(address, 0, tensor.element_size())


def one_too_far(x, weight):
    out = torch.empty_like(x)
    one_step_outside(out, out.numel())
    return out.copy_(weighted_softmax(x, weight))


def one_too_early(x, weight):
    out = torch.empty_like(x)
    one_step_outside(out, -1)
    return out.copy_(weighted_softmax(x, weight))


def workspace_too_small(x, weight):
    workspace = x.new_empty(17)
    one_step_outside(workspace, 17)
    return weighted_softmax(x, weight)


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize(
    ("function", "where", "elements"),
    [
        (one_too_far, "past the end", 17 * 129),
        (one_too_early, "before the start", 17 * 129),
        (workspace_too_small, "past the end", 17),
    ],
)
def test_a_write_of_one_element_too_far_is_found(function, where, elements, ours):
    problem = oracle.problem(OP, CASE, "float16", 0, "cpu", OP.reference)
    finding = found(function, problem, ours=ours)
    size = 2 * elements
    assert finding.reason == f"writes {where} of an output or a workspace of {size} bytes"


def test_zeroed_memory_has_bands_too():
    def on_zeros(x, weight):
        out = torch.zeros_like(x)
        one_step_outside(out, out.numel())
        return out.add_(weighted_softmax(x, weight))

    size = 4 * 17 * 129
    assert judged(on_zeros) == f"writes past the end of an output or a workspace of {size} bytes"


def kept_by(key):
    """Return an implementation that computes only what it has not seen by this key."""
    seen = {}

    def stale(x, weight):
        if key(x) not in seen:
            seen[key(x)] = weighted_softmax(x, weight)
        return seen[key(x)].clone()

    return stale


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("key", [torch.Tensor.size, torch.Tensor.data_ptr])
def test_a_result_kept_from_an_earlier_call_is_wrong(key, ours):
    problem = oracle.problem(OP, CASE, "float32", 0, "cpu", OP.reference)
    assert "times as far" in found(kept_by(key), problem, ours=ours).reason


def wrong_from(call, factor):
    calls = []

    def degrades(x, weight):
        calls.append(0)
        return weighted_softmax(x, weight) * (1.0 if len(calls) < call else factor)

    return degrades


def test_a_result_right_in_the_first_calls_and_wrong_later_is_found():
    problem = oracle.problem(OP, CASE, "float32", 0, "cpu", OP.reference)
    ours = found(wrong_from(4, 1.03), problem)
    assert ours.reason == "out differs between two calls" and ours.deterministic is False
    theirs = found(wrong_from(4, 1.03), problem, ours=False)
    assert theirs.reason.startswith("in a later call out is")
    # A library may add in another order each time and is still right.
    slack = found(wrong_from(4, 1 + 2**-22), problem, ours=False)
    assert (slack.reason, slack.deterministic) == ("", False)
    assert found(weighted_softmax, problem, ours=False).deterministic is True


def test_state_kept_from_the_call_before_shows():
    sums = [0.0]

    def accumulates(x, weight):
        out = weighted_softmax(x, weight) + 1e-3 * sums[0]
        sums[0] = x.sum().item()
        return out

    assert "times as far" in judged(accumulates)


def test_a_repeat_is_bitwise_only_where_the_op_says_so():
    varies = "out differs between two calls"
    for passes, reason in ((True, varies), (("forward",), varies), (("both",), ""), (False, "")):
        op = dataclasses.replace(OP, deterministic=passes)
        assert judged(wrong_from(4, 1 + 2**-22), op=op) == reason


def test_zeros_are_wrong_where_an_absolute_tolerance_would_let_them_pass():
    """The outputs are small: 1e-2 is more than the largest of them."""
    tiny = Op("tiny", lambda x: x * 1e-3, {"x": Tensor("N")}, no_cost, edge=(), sweep=())
    assert "times as far" in judged(torch.zeros_like, case=make_case(N=500), op=tiny)
    assert judged(lambda x: x * 1e-3, case=make_case(N=500), op=tiny) == ""


def test_every_output_counts_not_only_the_last():
    def both(x):
        return x * 2, x + 1

    pair = Op("pair", both, {"x": Tensor("N")}, no_cost, edge=(), sweep=())
    assert judged(both, case=make_case(N=50), op=pair) == ""
    last = judged(lambda x: (x * 3, x + 1), case=make_case(N=50), op=pair)
    assert last.startswith("out0 is")
    assert judged(lambda x: (x * 2, x), case=make_case(N=50), op=pair).startswith("out1 lies in")


def test_a_causal_mask_over_the_wrong_triangle():
    """The last row sees no key at all and is NaN."""

    def causal(x, hidden):
        return torch.softmax(x.masked_fill(hidden, -math.inf), dim=-1)

    def later(x):
        return torch.ones_like(x, dtype=torch.bool).triu(1)

    square = Op(
        "square", lambda x: causal(x, later(x)), {"x": Tensor("M N")}, no_cost, edge=(), sweep=()
    )
    case = make_case(M=20, N=20)
    assert judged(lambda x: causal(x, later(x)), case=case, op=square) == ""
    assert "inf or NaN" in judged(lambda x: causal(x, ~later(x)), case=case, op=square)


def test_memory_that_is_handed_out_again_holds_no_right_answer():
    kept = []

    def eager(x, weight):
        kept.append(weighted_softmax(x, weight))
        return kept[-1]

    problem = oracle.problem(OP, CASE, "float32", 0, "cpu", eager)
    assert found(eager, problem, ours=False).reason == ""
    assert len(kept) == 5 and all(result.isnan().all() for result in kept)
    with pytest.MonkeyPatch.context() as patch:
        # The allocator hands out the memory of the right answer.
        patch.setattr(torch, "empty_like", lambda x: kept[0].copy_(problem.oracle["out"]))
        assert torch.empty_like(kept[0]).isfinite().all()
        assert "inf or NaN" in found(lambda x, weight: torch.empty_like(x), problem).reason


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_traced_code_sees_no_replaced_function(backend):
    def filled(x, weight):
        mask = torch.ones(x.shape[-1], dtype=torch.bool, device=x.device)
        return torch.zeros_like(x) + weighted_softmax(x, weight).masked_fill(~mask, 0.0)

    compiled = torch.compile(filled, backend=backend, fullgraph=True)
    problem = oracle.problem(OP, CASE, "float32", 0, "cpu", OP.reference)
    for pass_ in OP.passes:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        assert found(compiled, problem, pass_, ours=False).reason == ""
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        # Nothing is compiled beforehand, as for ours.
        torch.compiler.reset()
        assert found(compiled, problem, pass_).reason == ""

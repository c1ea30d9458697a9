"""Check AdamW against a formula in float64 and PyTorch's optimizer, over lists of any tensors."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.machine import nvml
from kernels.adamw import AdamW, adamw
from kernels.adamw_details import step_plan
from tests.support.examples import many
from tests.support.values import randn

DEVICE = "cuda" if nvml.gpus() else "cpu"
NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def made(shapes, dtype=torch.float32, moments=torch.float32):
    """Return parameters, gradients and moments of these shapes."""
    kinds = (dtype, dtype, moments, moments)
    lists = [
        [
            randn(*(shape or (1,)), seed=7 * place + kind).view(shape).to(DEVICE, dtype)
            for place, shape in enumerate(shapes)
        ]
        for kind, dtype in enumerate(kinds)
    ]
    for v in lists[3]:
        v.abs_()
    return lists


def counter(steps=0.0):
    return torch.tensor(float(steps), device=DEVICE)


def formula(params, grads, exp_avgs, exp_avg_sqs, steps, max_norm=None, **numbers):
    """Return the updated lists and the norm, in float64."""
    lr, beta1, beta2 = numbers["lr"], numbers["beta1"], numbers["beta2"]
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
    factor = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
    t, results = steps + 1, ([], [], [])
    for p, g, m, v in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
        g = g.double() * factor
        m = beta1 * m.double() + (1 - beta1) * g
        v = beta2 * v.double() + (1 - beta2) * g * g
        root = (v / (1 - beta2**t)).sqrt() + numbers["eps"]
        p = (1 - lr * numbers["weight_decay"]) * p.double() - lr * m / (1 - beta1**t) / root
        for each, tensor in zip(results, (p, m, v), strict=True):
            each.append(tensor)
    return results, norm


def agrees(lists, steps, max_norm=None, rtol=1e-5, atol=1e-6, **numbers):
    """Hold a step against the formula; the numbers are around one, and rounded in float32."""
    numbers = NUMBERS | numbers
    expected, norm = formula(*lists, steps, max_norm, **numbers)
    step = counter(steps)
    results = adamw(*lists, step, max_norm=max_norm, **numbers)
    assert step.item() == steps + 1
    if max_norm is not None:
        assert results[3].item() == pytest.approx(norm, rel=1e-6)
    for found, given_list, wanted in zip(results, (lists[0], *lists[2:]), expected, strict=False):
        assert found is given_list
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol)


shapes = st.lists(st.lists(st.integers(0, 40), max_size=3).map(tuple), min_size=1, max_size=7)


@many
@given(shapes, st.sampled_from([0, 1, 10, 10**6]), st.sampled_from([None, 0.0, 0.5, 1e6]))
def test_as_the_formula_for_any_tensors(several, steps, max_norm):
    agrees(made(several), steps, max_norm)


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.99])
@pytest.mark.parametrize("beta2", [0.0, 0.9, 0.9999999])
@pytest.mark.parametrize("steps", [0, 3])
def test_corrections_of_the_moments_have_all_their_digits(beta1, beta2, steps):
    """1 - beta2**t is 1e-7 at the first step: a difference in float32 would have no digit left."""
    lists = made([(70,)])
    for moment in lists[2:]:
        moment[0].zero_()
    agrees(lists, steps, beta1=beta1, beta2=beta2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [4095, 4096, 4097, 3 * 4096 + 5])
def test_tensors_of_several_chunks(size):
    agrees(made([(size,), (3,), (size,)]), 2, 1.0)


def test_long_chunks(monkeypatch):
    monkeypatch.setattr(step_plan, "LARGE", 1000)
    agrees(made([(40000,), (3, 5)]), 2, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("narrow", [False, True])
def test_parameters_of_16_bits(dtype, narrow):
    lists = made([(100,), (7, 9)], dtype, dtype if narrow else torch.float32)
    eps = torch.finfo(dtype).eps
    agrees(lists, 3, 1.0, rtol=eps, atol=eps * 1e-2)


def test_masters_keep_what_16_bits_would_lose():
    params, grads, exp_avgs, exp_avg_sqs = made([(64,)], torch.float16)
    masters = [p.float() for p in params]
    expected = [p.double() for p in params], None
    step = counter()
    for steps in range(20):
        (new, exp_avgs, exp_avg_sqs), _ = formula(
            expected[0], grads, exp_avgs, exp_avg_sqs, steps, **NUMBERS | {"lr": 1e-4}
        )
        expected = new, None
    state = made([(64,)], torch.float16)[2:]
    for _ in range(20):
        results = adamw(params, grads, *state, step, masters, **NUMBERS | {"lr": 1e-4})
    assert results[3] is masters
    torch.testing.assert_close(masters[0].double(), expected[0][0], rtol=1e-5, atol=1e-6)
    assert torch.equal(params[0], masters[0].half())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_changes_nothing(bad):
    lists, step = made([(9,), (5000,)]), counter(4)
    lists[1][1][4321] = bad
    before = copy.deepcopy(lists)
    *_, norm = adamw(*lists, step, max_norm=1.0)
    assert not norm.isfinite().item() and step.item() == 4
    for found, kept in zip(lists, before, strict=True):
        for one, other in zip(found, kept, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_without_clipping_a_gradient_that_is_not_finite_enters():
    lists, step = made([(9,)]), counter()
    lists[1][0][3] = math.inf
    params, *_ = adamw(*lists, step)
    assert params[0].isfinite().sum().item() == 8 and step.item() == 1


def test_a_learning_rate_on_the_device():
    lists, others = made([(50,)]), made([(50,)])
    adamw(*lists, counter(), lr=torch.tensor(0.25, device=DEVICE))
    adamw(*others, counter(), lr=0.25)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(lists, others, strict=True))


def test_gradients_in_another_layout_than_their_parameters():
    lists = made([(6, 8), (5,)])
    lists[1][0] = lists[1][0].T.contiguous().T
    agrees(lists, 1, 1.0)


def test_parameters_by_columns():
    lists = made([(6, 8), (5,)])
    lists = [[x.T.contiguous().T for x in each] for each in lists]
    agrees(lists, 1, 1.0)


@pytest.mark.parametrize("number", range(3))
def test_a_parameter_that_autograd_has_saved_is_noticed(number):
    params = [torch.ones(4, device=DEVICE) for _ in range(2)]
    factor = torch.ones(4, device=DEVICE, requires_grad=True)
    others = [[torch.ones_like(p) for p in params] for _ in range(3)]
    for _ in range(number):
        adamw(params, *others, counter())
    out = params[1] * factor
    adamw(params, *others, counter())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tensors_of_inference_mode_are_updated():
    with torch.inference_mode():
        agrees(made([(5,), (3, 4)]), 2, 1.0)


def test_the_step_repeats_bit_for_bit():
    results = []
    for _ in range(100 if DEVICE == "cuda" else 3):
        lists = made([(9000,), (70, 3)], torch.float16)
        *_, norm = adamw(*lists, counter(), max_norm=0.1)
        results.append([norm, *(x for each in lists for x in each)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


FAULTS = {
    "twice": (lambda p, g, m, v: ([p[0], p[0]], g, m, v), ValueError, "no tensor twice"),
    "fewer": (lambda p, g, m, v: (p, g[:1], m, v), ValueError, "grads: 1 tensors, expected 2"),
    "none": (lambda p, g, m, v: ([], [], [], []), ValueError, r"params: \[\], expected at least"),
    "gaps": (
        lambda p, g, m, v: ([torch.stack([x, x], -1)[..., 0] for x in p], g, m, v),
        ValueError,
        r"params\[0\]: strides .*expected no gaps",
    ),
    "moments of two dtypes": (
        lambda p, g, m, v: (p, g, m, [x.half() for x in v]),
        TypeError,
        r"exp_avg_sqs\[0\]: torch.float16, expected torch.float32",
    ),
    "first moments of two dtypes": (
        lambda p, g, m, v: ([x.half() for x in p], [x.half() for x in g], [m[0], m[1].half()], v),
        TypeError,
        r"exp_avgs\[1\]: torch.float16, expected torch.float32 as exp_avgs has",
    ),
    "another shape": (
        lambda p, g, m, v: (p, [g[0], g[1][:2]], m, v),
        ValueError,
        r"grads\[1\]: shape \(2,\), expected \(4,\)",
    ),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_lists_that_do_not_fit_are_refused(kind):
    change, error, words = FAULTS[kind]
    with pytest.raises(error, match=words):
        adamw(*change(*made([(4,), (4,)])), counter())


@pytest.mark.parametrize(
    "name, value", [("beta1", 1.0), ("beta2", -0.1), ("lr", -1.0), ("eps", -1)]
)
def test_a_number_out_of_its_range_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}: {float(value)}, expected"):
        adamw(*made([(4,)]), counter(), **{name: value})


def parameters(dtype=torch.float32):
    return [
        torch.nn.Parameter(randn(*shape, seed=seed).to(DEVICE, dtype))
        for seed, shape in enumerate([(30, 7), (7,), (11,)])
    ]


def groups(params):
    return [{"params": params[:1], "weight_decay": 0.3}, {"params": params[1:], "lr": 0.02}]


def descend(optimizer, params, steps, clip=None):
    for number in range(steps):
        for seed, param in enumerate(params):
            param.grad = randn(*param.shape, seed=10 * number + seed).to(DEVICE, param.dtype)
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()


def test_the_optimizer_is_pytorchs():
    ours, theirs = parameters(), parameters()
    optimizer = AdamW(groups(ours), lr=0.01, clip=2.0)
    descend(optimizer, ours, 5)
    descend(torch.optim.AdamW(groups(theirs), lr=0.01), theirs, 5, clip=2.0)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    last = torch.stack([p.grad.norm() for p in ours]).norm()
    torch.testing.assert_close(optimizer.norm, last)


def test_parameters_of_several_dtypes_share_a_norm():
    mixed = [*parameters(torch.float16), *parameters()]
    optimizer = AdamW(mixed, clip=1.0, moments=torch.float32, masters=True)
    descend(optimizer, mixed, 2)
    last = torch.stack([p.grad.double().norm() for p in mixed]).norm()
    assert optimizer.norm.item() == pytest.approx(last.item(), rel=1e-6)
    state = optimizer.state[mixed[0]]
    assert state["exp_avg"].dtype == state["master"].dtype == torch.float32
    assert torch.equal(mixed[0], state["master"].half())
    assert "master" not in optimizer.state[mixed[-1]]


def test_a_parameter_without_a_gradient_stays():
    params = parameters()
    before = params[1].detach().clone()
    optimizer = AdamW(params)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert torch.equal(params[1], before) and len(optimizer.state) == 1


def test_a_saved_optimizer_goes_on_where_it_was():
    options = {"clip": 1.0, "moments": torch.float32, "masters": True}
    through, first, second = (parameters(torch.bfloat16) for _ in range(3))
    descend(AdamW(through, **options), through, 3)
    optimizer = AdamW(first, **options)
    descend(optimizer, first, 2)
    with torch.no_grad():
        for one, other in zip(second, first, strict=True):
            one.copy_(other)
    loaded = AdamW(second, **options)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert loaded.state[second[0]]["exp_avg"].dtype == torch.float32
    for seed, param in enumerate(second):
        param.grad = randn(*param.shape, seed=20 + seed).to(DEVICE, param.dtype)
    loaded.step()
    assert loaded.state[second[0]]["step"].item() == 3
    assert all(map(torch.equal, second, through))


@pytest.mark.parametrize("new", [0, 1])
def test_a_new_parameter_beside_a_loaded_state_goes_on_with_its_counter(new):
    params = [torch.nn.Parameter(torch.ones(4, device=DEVICE)) for _ in range(2)]
    optimizer = AdamW(params)
    params[1 - new].grad = torch.ones(4, device=DEVICE)
    for _ in range(3):
        optimizer.step()
    loaded = AdamW(params)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    params[new].grad = torch.ones(4, device=DEVICE)
    loaded.step()
    assert [loaded.state[param]["step"].item() for param in params] == [4, 4]


@pytest.mark.parametrize(
    ("value", "error"), [(-1.0, ValueError), ("0.1", TypeError), (None, TypeError)]
)
def test_the_decay_of_a_group_is_checked(value, error):
    (param, *_) = parameters()
    param.grad = torch.ones_like(param)
    with pytest.raises(error, match=f"^weight_decay: {value!r}, expected"):
        AdamW([{"params": [param], "weight_decay": value}]).step()


@pytest.mark.parametrize("way", ["copied", "pickled"])
def test_a_copy_of_an_optimizer_goes_on_by_itself(way):
    params = parameters(torch.bfloat16)
    optimizer = AdamW(groups(params), clip=1.0, moments=torch.float32, masters=True)
    descend(optimizer, params, 2)
    both = params, optimizer
    others, other = copy.deepcopy(both) if way == "copied" else pickle.loads(pickle.dumps(both))
    descend(optimizer, params, 2)
    descend(other, others, 2)
    assert all(map(torch.equal, params, others)) and torch.equal(optimizer.norm, other.norm)
    assert other.state[others[0]]["step"].item() == 4


@pytest.mark.gpu
def test_a_graph_holds_whole_steps():
    """Replays count steps and read the learning rate anew, as calls do."""
    params, others = parameters(), parameters()
    rate = torch.tensor(0.01, device="cuda")
    graphed, plain = AdamW(params, lr=rate, clip=1.0), AdamW(others, lr=rate, clip=1.0)
    for param, other in zip(params, others, strict=True):
        param.grad = torch.ones_like(param)
        other.grad = torch.ones_like(other)
    graphed.step()
    plain.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for factor in (1.0, 0.5, 0.25):
        rate.fill_(0.01 * factor)
        graph.replay()
        plain.step()
        assert all(map(torch.equal, params, others))

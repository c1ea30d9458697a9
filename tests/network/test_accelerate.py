"""`accelerate` on plain PyTorch: what it swaps, what it leaves and why, and the way back."""

import copy
import io
from collections import OrderedDict

import pytest
import torch
from torch import nn

from network.accelerate import accelerate
from tests.support.networks import apart

# Swapped modules may be twice as far from float64 as PyTorch's float32, and this.
SLACK = 2e-6


def rows(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def replaced(report):
    return [(line.path, line.said) for line in report.replaced]


def block():
    """A network of all known plain modules; its weights are off their fresh values."""
    torch.manual_seed(0)
    model = nn.Sequential(
        OrderedDict(
            first=nn.LayerNorm(24),
            up=nn.Linear(24, 40),
            act=nn.GELU(),
            second=nn.RMSNorm(40),
            down=nn.Linear(40, 16, bias=False),
            other=nn.GELU(approximate="tanh"),
        )
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def outputs(model, x):
    """The result and, if weights want them, the gradients of the weights."""
    model.zero_grad()
    out = model(x)
    if out.requires_grad:
        (out * torch.arange(out.shape[-1], dtype=out.dtype)).sum().backward()
    return [out.detach(), *(weight.grad for weight in model.parameters() if out.requires_grad)]


def test_known_modules_are_swapped_and_compute_the_same():
    model, x = block(), rows(3, 5, 24)
    exact, near = outputs(block().double(), x.double()), outputs(model, x)
    report = accelerate(model)
    assert replaced(report) == [
        ("first", "layer_norm"),
        ("act", "gelu"),
        ("second", "rms_norm"),
        ("other", "gelu"),
    ]
    assert [line.path for line in report.left] == ["", "up", "down"]
    assert "requires a gradient" in report.left[0].said
    for found, plain, truth in zip(outputs(model, x), near, exact, strict=True):
        assert apart(found, truth) <= 2 * apart(plain, truth) + SLACK


def test_without_gradients_a_product_takes_its_activation_along():
    model, x = block(), rows(3, 5, 24)
    exact = block().double()(x.double())
    near = model(x)
    report = accelerate(model, training=False)
    assert replaced(report) == [("", "matmul"), ("first", "layer_norm"), ("second", "rms_norm")]
    assert [line.path for line in report.left] == []
    with torch.no_grad():
        found = model(x)
    assert apart(found, exact) <= 2 * apart(near, exact) + SLACK
    with pytest.raises(ValueError, match="requires a gradient, which this op does not compute"):
        model(x)


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU(), nn.LeakyReLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.Tanh()],
    ids=str,
)
@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (8,)])
def test_each_fused_activation_is_the_right_one(activation, shape):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 12), copy.copy(activation)), 2 * rows(*shape)
    expected = model(x).detach()
    assert replaced(accelerate(model, training=False)) == [("", "matmul")]
    with torch.no_grad():
        assert apart(model(x), expected) < 1e-6
        told = pytest.warns(UserWarning, match="Linear runs as before: autocast is on")
        with told, torch.autocast("cpu", dtype=torch.bfloat16):
            assert apart(model(x), expected) < 0.02


@pytest.mark.parametrize(
    "within", [torch.inference_mode(), torch.device("meta")], ids=["inference", "device"]
)
def test_kernels_are_tried_alike_whatever_the_mode_and_the_default_device(within):
    expected = accelerate(block())
    model = block()
    with within:
        report = accelerate(model)
    assert (report.replaced, report.left) == (expected.replaced, expected.left)


def test_weights_names_hooks_and_optimizers_stay():
    model = block()
    names, weights = list(model.state_dict()), list(model.parameters())
    seen = []
    model.first.register_forward_hook(lambda module, given, out: seen.append(type(module)))
    accelerate(model)
    model(rows(2, 24))
    assert list(model.state_dict()) == names and seen == [nn.LayerNorm]
    assert all(a is b for a, b in zip(model.parameters(), weights, strict=True))
    model.load_state_dict(block().state_dict())


def test_undo_makes_the_model_as_it_was():
    model, x = block(), rows(2, 24)
    before, names = model(x), [dict(vars(module)) for module in model.modules()]
    report = accelerate(model)
    assert any("forward" in vars(module) for module in model.modules())
    report.undo()
    report.undo()
    assert [dict(vars(module)) for module in model.modules()] == names
    assert torch.equal(before, model(x))


def test_a_copy_uses_its_own_weights():
    model, x = block(), rows(2, 24)
    accelerate(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.first.weight.zero_()
        other.first.bias.zero_()
    assert other.first(x).abs().max() == 0 < model.first(x).abs().max()


@pytest.mark.parametrize(
    ("training", "swapped"),
    [(True, ["first", "act", "second", "other"]), (False, ["", "first", "second"])],
)
def test_a_second_time_changes_nothing(training, swapped):
    model = block()
    accelerate(model, training=training)
    forwards = [vars(module).get("forward") for module in model.modules()]
    report = accelerate(model, training=training)
    assert report.replaced == ()
    assert [line.path for line in report.left if "already" in line.said] == swapped
    assert [vars(module).get("forward") for module in model.modules()] == forwards


class Own(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


def test_an_unknown_module_changes_nothing_and_is_named():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(Own(8), nn.Embedding(5, 8)))
    before = [dict(vars(module)) for module in model.modules()]
    report = accelerate(model)
    assert report.replaced == ()
    assert [(line.path, line.kind) for line in report.left] == [
        ("0", "Conv2d"),
        ("1.0", "Own"),
        ("1.1", "Embedding"),
    ]
    assert {line.said for line in report.left} == {"no kernel for this kind of module"}
    assert [dict(vars(module)) for module in model.modules()] == before
    assert str(report).startswith("replaced nothing\nleft\n  1 Conv2d: no kernel for this kind")


def test_the_report_counts_modules_of_a_kind():
    model = nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8))
    assert str(accelerate(model)) == (
        "replaced\n  2 LayerNorm: layer_norm\n  1 GELU: gelu\n"
        "left\n  1 Linear: a product alone stays PyTorch's"
    )


def test_an_object_that_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"model: a function, expected an nn\.Module"):
        accelerate(lambda x: x)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (nn.LayerNorm((4, 8)), "it normalizes 2 dimensions, and the kernel the last one"),
        (nn.LayerNorm(8).double(), "torch.float64, expected float32, float16 or bfloat16"),
        (nn.CrossEntropyLoss(weight=torch.ones(4)), "its classes have weights"),
    ],
)
def test_a_known_module_that_no_kernel_serves_says_why(module, why):
    report = accelerate(module)
    assert report.replaced == () and why in report.left[0].said


def test_a_layer_in_several_places_is_not_fused():
    shared = nn.GELU()
    model = nn.Sequential(nn.Linear(8, 8), shared, nn.LayerNorm(8), shared)
    report = accelerate(model, training=False)
    assert "stands in several places" in report.left[0].said
    assert ("1", "gelu") in replaced(report)


@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_rms_norm_without_an_eps_has_pytorchs(eps, dtype):
    module, x = nn.RMSNorm(8, eps=eps, dtype=dtype), (1e-3 * rows(4, 8)).to(dtype)
    expected = module(x).detach()
    assert replaced(accelerate(module)) == [("", "rms_norm")]
    assert apart(module(x), expected) < (1e-6 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize(
    "settings",
    [{}, {"label_smoothing": 0.2}, {"reduction": "sum"}, {"ignore_index": 2}],
    ids=str,
)
def test_cross_entropy_is_pytorchs(settings):
    loss, targets = nn.CrossEntropyLoss(**settings), torch.arange(6) % 5
    logits = [rows(6, 5).requires_grad_() for _ in range(2)]
    expected = loss(logits[0], targets)
    assert replaced(accelerate(loss, training=True)) == [("", "cross_entropy")]
    found = loss(logits[1], targets)
    found.backward()
    expected.backward()
    assert apart(found, expected) < 1e-6 and apart(logits[1].grad, logits[0].grad) < 1e-6
    with pytest.warns(UserWarning, match="CrossEntropyLoss runs as before: its input is"):
        assert loss(rows(2, 5, 3), torch.zeros(2, 3, dtype=torch.int64)).isfinite()


def test_a_call_that_a_kernel_does_not_serve_runs_as_before():
    module, x = nn.LayerNorm(8), rows(4, 8)
    accelerate(module)
    told = pytest.warns(UserWarning, match="LayerNorm runs as before: autocast is on")
    with told, torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(module(x.bfloat16()), nn.LayerNorm(8)(x.bfloat16()))
    with pytest.warns(UserWarning, match=r"its input is torch.float16 and a weight torch.float32"):
        assert torch.equal(module(x.half()), nn.LayerNorm(8)(x.half()))
    gelu = nn.GELU()
    accelerate(gelu)
    with pytest.warns(UserWarning, match=r"GELU runs as before: its input is torch.float64"):
        assert torch.equal(gelu(x.double()), nn.GELU()(x.double()))


def test_a_nested_tensor_runs_as_before():
    model, x = nn.Sequential(nn.LayerNorm(8), nn.GELU()), rows(5, 8)
    expected = model(x).detach()
    accelerate(model)
    nested = torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged)
    told = pytest.warns(UserWarning, match="LayerNorm runs as before: its input is a nested tensor")
    with told, torch.no_grad():
        assert apart(model(nested).values(), expected) < 1e-6


def test_a_transform_of_torch_func_runs_as_before():
    model, x = block(), rows(3, 24)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights, x):
        out = torch.func.functional_call(model, weights, x)
        return nn.functional.cross_entropy(out, torch.arange(3))

    expected = torch.func.grad(loss)(weights, x)
    accelerate(model)
    with pytest.warns(UserWarning, match=r"GELU runs as before: a transform of torch\.func"):
        found = torch.func.grad(loss)(weights, x)
    assert all(torch.equal(found[name], expected[name]) for name in weights)
    criterion, logits = nn.CrossEntropyLoss(), rows(3, 5)
    accelerate(criterion, training=True)
    with pytest.warns(UserWarning, match="CrossEntropyLoss runs as before: a transform"):
        torch.func.grad(criterion)(logits, torch.arange(3))


def test_nothing_is_swapped_if_no_kernel_runs():
    with torch.device("meta"):
        model = nn.Sequential(nn.LayerNorm(8), nn.GELU())
    report = accelerate(model)
    assert report.replaced == ()
    assert {line.said.split(",")[0] for line in report.left} == {"x: on meta"}


def test_an_activation_that_another_model_uses_serves_both():
    shared, x = nn.GELU(), rows(3, 8)
    models = [nn.Sequential(nn.Linear(8, 8), shared) for _ in range(2)]
    expected = [model(x).detach() for model in models]
    for model in models:
        assert replaced(accelerate(model, training=False)) == [("", "matmul")]
    with torch.no_grad():
        assert all(apart(m(x), wanted) < 1e-6 for m, wanted in zip(models, expected, strict=True))


def shifted(module, given, out):
    return out - 1


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("later", [False, True])
def test_a_hook_of_a_linear_layer_or_its_activation_gets_what_it_got(place, later):
    model, x = nn.Sequential(nn.Linear(8, 12), nn.ReLU()), rows(3, 8)
    if later:
        assert replaced(accelerate(model, training=False)) == [("", "matmul")]
    model[place].register_forward_hook(shifted)
    expected = nn.Sequential(*model)(x)
    if not later:
        report = accelerate(model, training=False)
        assert report.replaced == () and "has hooks" in report.left[0].said
    assert torch.equal(model(x), expected)


def test_a_slice_of_a_fused_sequence_ends_where_it_did():
    model, x = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)), rows(3, 8)
    expected = [model[:end](x).detach() for end in (1, 2, 3)]
    assert replaced(accelerate(model, training=False)) == [("", "matmul")]
    with torch.no_grad():
        assert all(apart(model[: i + 1](x), wanted) < 1e-6 for i, wanted in enumerate(expected))
        model[1] = nn.Tanh()
        model.append(nn.Sigmoid())
        assert apart(model(x), nn.Sequential(*model)(x)) < 1e-6


@pytest.mark.parametrize("training", [True, False])
def test_a_pickled_model_is_as_before_and_is_swapped_again(training):
    model, x, file = block(), rows(2, 24), io.BytesIO()
    expected, first = model(x).detach(), accelerate(model, training=training)
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert torch.equal(other(x), expected)
    again = accelerate(other, training=training)
    assert (again.replaced, again.left) == (first.replaced, first.left)
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    again.undo()
    assert torch.equal(other(x), expected)


def test_a_norm_takes_its_argument_by_name():
    model, x = block(), rows(2, 24)
    expected = model.first(input=x), model.second(x=rows(2, 40))
    accelerate(model)
    found = model.first(input=x), model.second(x=rows(2, 40))
    assert all(apart(a, b) < 1e-6 for a, b in zip(found, expected, strict=True))


def test_a_target_of_bytes_stays_with_pytorch():
    loss, logits, targets = nn.CrossEntropyLoss(), rows(6, 5), torch.arange(6).byte() % 5
    expected = loss(logits, targets)
    accelerate(loss)
    with pytest.warns(UserWarning, match=r"CrossEntropyLoss runs as before: .* torch.uint8"):
        assert torch.equal(loss(logits, targets), expected)

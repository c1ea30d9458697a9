"""`accelerate` on small random models of Hugging Face: the same losses, gradients and tokens."""

import copy
import io
from collections import Counter

import pytest
import torch

from network.accelerate import accelerate
from network.accelerate.rules import attention as rule_of_attention
from network.accelerate.rules import gated as rule_of_mlps
from tests.support.networks import apart, tokens

transformers = pytest.importorskip(
    "transformers", reason="needs the libraries of requirements/network.txt"
)

SMALL = {"vocab_size": 96, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
GPT2_SIZES = {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 64}
OFF = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "Llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, SIZES),
    "Mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, SIZES),
    "Qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, SIZES),
    "GPT2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, GPT2_SIZES | OFF),
}
models = pytest.mark.parametrize("name", MODELS)
gated = pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2"])
SLACK = 2e-6


def made(name, **changes):
    kind, config, sizes = MODELS[name]
    torch.manual_seed(3)
    model = kind(config(**SMALL | sizes | changes))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def said(report):
    return {(line.kind, line.said) for line in report.replaced}


def results(model):
    """Loss, logits, and the gradient of each weight."""
    ids, _ = tokens(length=6, vocabulary=96)
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return [out.loss.detach(), out.logits.detach(), *(w.grad for w in model.parameters())]


@models
def test_a_model_that_trains_has_the_same_gradients(name):
    model = made(name)
    exact, near = results(copy.deepcopy(model).double()), results(model)
    report = accelerate(model)
    kernels = {kernel for _, by in said(report) for kernel in by.split(", ")}
    wanted = {"rms_norm", "swiglu", "rotary"} if name != "GPT2" else {"layer_norm", "gelu"}
    assert wanted | {"cross_entropy"} <= kernels
    found = results(model)
    assert not torch.equal(found[1], near[1])
    for ours, theirs, truth in zip(found, near, exact, strict=True):
        assert apart(ours, truth) <= 2 * apart(theirs, truth) + SLACK
    report.undo()
    assert all(torch.equal(a, b) for a, b in zip(results(model), near, strict=True))


@models
def test_each_part_is_named_once(name):
    report = accelerate(made(name))
    both = [line for line in (*report.replaced, *report.left)]
    paths = [line.path for line in both if "Attention" not in line.kind and "MLP" not in line.kind]
    assert len(paths) == len(set(paths))
    counts = Counter(by for line in report.replaced for by in line.said.split(", "))
    norms = {"layer_norm": 5, "gelu": 2} if name == "GPT2" else {"rms_norm": 5, "swiglu": 2}
    assert counts.items() >= ({"cross_entropy": 1} | norms).items()


@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_a_model_that_trains_has_the_losses_of_pytorch(name):
    def curve(model):
        ids, _ = tokens(batch=1, length=6, vocabulary=96)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(3):
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    model = made(name)
    other = copy.deepcopy(model)
    accelerate(model)
    found, expected = curve(model), curve(other)
    assert found == pytest.approx(expected, rel=1e-4) and expected[-1] < expected[0] - 0.5


@models
def test_generated_tokens_are_the_same(name):
    model = made(name).eval()
    ids, _ = tokens(batch=1, length=6, vocabulary=96)
    settings = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    report = accelerate(model, training=False)
    assert torch.equal(
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings), expected
    )
    if name == "GPT2":
        assert {("GPT2MLP", "matmul"), ("GPT2Attention", "attention")} <= said(report)


@pytest.mark.filterwarnings("ignore:accelerate")
@models
def test_a_padded_batch_runs_as_before(name):
    model = made(name).eval()
    ids, _ = tokens(batch=2, length=6, vocabulary=96)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[:, -1]
        accelerate(model, training=False)
        assert apart(model(ids, attention_mask=mask).logits[:, -1], expected) < 1e-5


@gated
def test_positions_of_each_sequence_run_as_before(name):
    model = made(name).eval()
    ids, _ = tokens(batch=2, length=6, vocabulary=96)
    positions = torch.stack((torch.arange(6), torch.arange(6) + 9))
    expected = model(ids, position_ids=positions).logits
    accelerate(model)
    with pytest.warns(UserWarning, match="rotary embedding runs as before: each sequence has"):
        assert apart(model(ids, position_ids=positions).logits, expected) < 1e-5


@models
def test_a_transform_of_torch_func_runs_as_before(name):
    model = made(name)
    ids, _ = tokens(length=6, vocabulary=96)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}

    def loss(weights):
        given = {"labels": ids, "use_cache": False}
        return torch.func.functional_call(model, weights, (ids,), given).loss

    expected = torch.func.grad(loss)(weights)
    accelerate(model)
    with pytest.warns(
        UserWarning, match="loss runs as before: a transform of torch.func is active"
    ):
        found = torch.func.grad(loss)(weights)
    assert all(apart(found[name], expected[name]) < 1e-5 for name in weights)


@gated
def test_positions_of_each_sequence_under_autocast_run_as_before(name):
    model, other = made(name), made(name)
    ids, _ = tokens(batch=2, length=6, vocabulary=96)
    positions = torch.arange(6).expand(2, -1)
    assert any("attention" in by for _, by in said(accelerate(model)))

    def loss(model):
        with torch.autocast("cpu", torch.float16):
            return model(ids, labels=ids, position_ids=positions, use_cache=False).loss

    with pytest.warns(UserWarning, match="its queries are torch.float32 and its values torch.fl"):
        assert apart(loss(model), loss(other)) < 2e-3


@models
def test_tokens_after_others_in_a_cache_run_as_before_without_a_mask(name):
    model, other = made(name).eval(), made(name).eval()
    accelerate(model)
    x = torch.randn(1, 5, 48, generator=torch.Generator().manual_seed(0))
    cos = torch.ones(1, 5, 16)
    given = {} if name == "GPT2" else {"position_embeddings": (cos, torch.zeros_like(cos))}

    def read_twice(model):
        first = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
        cache = transformers.DynamicCache()
        with torch.no_grad():
            first(x, past_key_values=cache, attention_mask=None, **given)
            return first(x, past_key_values=cache, attention_mask=None, **given)[0]

    with pytest.warns(UserWarning, match="Attention runs as before: it has keys of former tokens"):
        found = read_twice(model)
    assert apart(found, read_twice(other)) < 1e-6


@gated
def test_the_rotary_kernel_is_called_and_only_by_this_model(name, monkeypatch):
    model, other = made(name), made(name)
    calls, kernel = [], rule_of_attention.rotary
    accelerate(model)

    def counted(*given):
        calls.append(len(given))
        return kernel(*given)

    monkeypatch.setattr(rule_of_attention, "rotary", counted)
    ids, _ = tokens(length=5, vocabulary=96)
    model(ids)
    assert calls == [4, 4]
    other(ids)
    assert calls == [4, 4]


def test_an_implementation_other_than_sdpa_is_left_with_its_name():
    model = made("GPT2", attn_implementation="eager")
    why = {line.said for line in accelerate(model).left if line.kind == "GPT2Attention"}
    assert why == {"attention: its implementation is eager, and sdpa is known"}


def test_an_activation_without_a_gated_kernel_is_left_with_its_name():
    report = accelerate(made("Llama", hidden_act="relu"))
    assert ("LlamaMLP", "no gated kernel has its activation, ReLU") in {
        (line.kind, line.said) for line in report.left
    }


@pytest.mark.parametrize("form", ["gelu", "gelu_pytorch_tanh", "gelu_new"])
def test_each_form_of_a_gelu_has_its_gated_kernel(form):
    mlp = made("Llama", hidden_act=form).model.layers[0].mlp
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    expected = mlp(x)
    assert said(accelerate(mlp)) == {("LlamaMLP", "geglu")}
    assert apart(mlp(x), expected) < 1e-6


def test_an_activation_with_hooks_is_called_as_before():
    model, seen = made("Llama"), []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *given: seen.append(1))
    report = accelerate(model)
    assert [line.path for line in report.replaced if line.said == "swiglu"] == [
        "model.layers.1.mlp"
    ]
    model(tokens(length=4, vocabulary=96)[0])
    assert seen == [1]


@gated
def test_an_mlp_of_halves_is_one_part_in_training(name):
    model = made(name).half()
    exact, near = results(copy.deepcopy(model).double()), results(model)
    report = accelerate(model)
    assert (f"{name}MLP", "swiglu_mlp") in said(report)
    # Its projections are part of it; four of a layer's attention and the head are not.
    assert sum(line.kind == "Linear" for line in report.left) == 9
    for ours, theirs, truth in zip(results(model), near, exact, strict=True):
        assert apart(ours, truth) <= 2 * apart(theirs, truth) + SLACK


@pytest.mark.parametrize(
    ("dtype", "changes", "training"),
    [
        # PyTorch may compute its products in TF32.
        (torch.float32, {}, True),
        # It saves memory for gradients alone.
        (torch.float16, {}, False),
        (torch.float16, {"mlp_bias": True}, True),
        (torch.float16, {"hidden_act": "gelu"}, True),
    ],
)
def test_an_mlp_keeps_its_products_apart(dtype, changes, training):
    mlp = made("Llama", **changes).model.layers[0].mlp.to(dtype)
    by = "geglu" if changes.get("hidden_act") else "swiglu"
    assert said(accelerate(mlp, training=training)) == {("LlamaMLP", by)}


def hooked(mlp, seen):
    mlp.up_proj.register_forward_hook(lambda *given: seen.append(1))


def adapted(mlp, seen):
    plain = mlp.down_proj
    mlp.down_proj = torch.nn.Sequential(plain, torch.nn.Identity())
    mlp.down_proj[1].register_forward_hook(lambda *given: seen.append(1))


def patched(mlp, seen):
    plain = mlp.gate_proj.forward
    mlp.gate_proj.forward = lambda x: (seen.append(1), plain(x))[1]


@pytest.mark.parametrize("change", [hooked, adapted, patched])
def test_a_projection_that_is_changed_later_is_called(change):
    mlp, seen = made("Llama").model.layers[0].mlp.half(), []
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0)).half()
    assert said(accelerate(mlp)) == {("LlamaMLP", "swiglu_mlp")}
    expected = mlp(x)
    change(mlp, seen)
    assert apart(mlp(x), expected) < 2e-3 and seen == [1]


@pytest.mark.parametrize("form", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_activation_that_is_changed_later_is_called(form, dtype):
    mlp = made("Llama", hidden_act=form).model.layers[0].mlp.to(dtype)
    x, seen = torch.randn(3, 48, generator=torch.Generator().manual_seed(0)).to(dtype), []
    assert len(said(accelerate(mlp))) == 1
    hook = mlp.act_fn.register_forward_hook(lambda *given: seen.append(1))
    assert torch.equal(mlp(x), type(mlp).forward(mlp, x)) and seen == [1, 1]
    hook.remove()
    assert mlp(x).isfinite().all() and seen == [1, 1]
    mlp.act_fn = torch.nn.ReLU()
    assert torch.equal(mlp(x), type(mlp).forward(mlp, x))


def test_an_mlp_without_gradients_keeps_its_products_apart(monkeypatch):
    mlp = made("Llama").model.layers[0].mlp.half()
    accelerate(mlp)
    calls = []
    monkeypatch.setattr(rule_of_mlps, "swiglu_mlp", lambda x, *weights: calls.append(1) or x)
    mlp(torch.zeros(3, 48, dtype=torch.float16))
    with torch.no_grad():
        mlp(torch.zeros(3, 48, dtype=torch.float16))
    assert calls == [1]


def test_an_mlp_under_autocast_has_the_dtype_of_pytorchs_products():
    mlp = made("Llama").model.layers[0].mlp.half()
    accelerate(mlp)
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(torch.zeros(3, 48, dtype=torch.float16)).dtype is torch.bfloat16


def test_a_projection_with_hooks_is_called():
    mlp, seen = made("Llama").model.layers[0].mlp.half(), []
    hooked(mlp, seen)
    assert said(accelerate(mlp)) == {("LlamaMLP", "swiglu")}
    mlp(torch.zeros(3, 48, dtype=torch.float16))
    assert seen == [1]


def test_a_batch_of_an_mlp_without_tokens_is_empty():
    mlp = made("Llama").model.layers[0].mlp.half()
    accelerate(mlp)
    found = mlp(torch.zeros(2, 0, 48, dtype=torch.float16))
    found.sum().backward()
    assert found.shape == (2, 0, 48) and not mlp.gate_proj.weight.grad.any()


def test_a_class_of_ones_own_is_left():
    class Own(transformers.models.llama.modeling_llama.LlamaMLP):
        def forward(self, x):
            return super().forward(x) * 2

    model = made("Llama")
    model.model.layers[0].mlp.__class__ = Own
    report = accelerate(model)
    assert [line.path for line in report.replaced if line.said == "swiglu"] == [
        "model.layers.1.mlp"
    ]


def test_a_loss_over_several_batches_is_divided_by_their_items():
    model = made("Llama")
    ids, _ = tokens(length=8, vocabulary=96)
    expected = model(ids, labels=ids, num_items_in_batch=50).loss.item()
    accelerate(model)
    for items in (50, torch.tensor(50)):
        found = model(ids, labels=ids, num_items_in_batch=items).loss.item()
        assert found == pytest.approx(expected, rel=1e-5)


@models
@pytest.mark.parametrize("changes", [{}, {"hidden_act": "gelu"}], ids=str)
def test_a_second_time_changes_nothing(name, changes):
    model = made(name, **changes if name != "GPT2" else {})
    before = [set(vars(module)) for module in model.modules()]
    first = accelerate(model)
    second = accelerate(model)
    assert second.replaced == ()
    assert ("", "its loss is replaced already") in [(line.path, line.said) for line in second.left]
    first.undo()
    second.undo()
    assert [set(vars(module)) for module in model.modules()] == before


@models
def test_a_pickled_model_is_as_before_and_a_copy_is_swapped(name):
    model, file = made(name), io.BytesIO()
    near = results(model)
    report = accelerate(model)
    torch.save(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    assert all(torch.equal(a, b) for a, b in zip(results(other), near, strict=True))
    assert accelerate(other).replaced == report.replaced
    found = results(model)
    for swapped in (other, copy.deepcopy(model)):
        assert all(torch.equal(a, b) for a, b in zip(results(swapped), found, strict=True))


class Doubled(transformers.pytorch_utils.Conv1D):
    def forward(self, x):
        return 2 * super().forward(x)


def test_an_mlp_of_gpt2_with_a_layer_of_ones_own_is_left():
    mlp = made("GPT2").transformer.h[0].mlp.eval()
    mlp.c_fc.__class__ = Doubled
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    expected = mlp(x)
    report = accelerate(mlp, training=False)
    assert said(report) == {("NewGELUActivation", "gelu")}
    assert ("c_fc", "no kernel for this kind of module") in {
        (line.path, line.said) for line in report.left
    }
    with torch.no_grad():
        assert apart(mlp(x), expected) < 1e-6


def test_an_mlp_of_gpt2_calls_an_adapter_that_is_put_in_later():
    mlp = made("GPT2").transformer.h[0].mlp.eval()
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    assert said(accelerate(mlp, training=False)) == {("GPT2MLP", "matmul")}
    mlp.c_fc.__class__ = Doubled
    expected = type(mlp).forward(mlp, x)
    assert torch.equal(mlp(x), expected)

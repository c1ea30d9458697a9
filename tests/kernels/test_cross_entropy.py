"""Check both cross entropies against the formula and PyTorch: options, ignored rows, graphs."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from harness.machine import nvml
from kernels import cross_entropy as plain
from kernels import linear_cross_entropy as linear
from kernels.cross_entropy import cross_entropy
from kernels.cross_entropy_details import linear_chunks as chunks
from kernels.cross_entropy_details import linear_tiles as tiled
from kernels.cross_entropy_details.arguments import REDUCTIONS
from kernels.linear_cross_entropy import linear_cross_entropy
from ops.cross_entropy import cross_entropy_reference
from ops.linear_cross_entropy import linear_cross_entropy_reference
from tests.support.examples import many

DEVICE = "cuda" if nvml.gpus() else "cpu"
IGNORED = -100
BOUND = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def classes(m, v, dtype=torch.int64, seed=1, ignored=True):
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, v, (m,), generator=generator)
    if ignored:
        targets[torch.rand(m, generator=generator) < 0.25] = IGNORED
    return targets.to(dtype).to(DEVICE)


def close(ours, exact, bound, least=1e-2):
    """Assert closeness relative to the largest entry.
    least: the size of the terms if their difference is nearly zero. A loss of one class is a
    difference of logits near one."""
    assert torch.equal(ours.isnan(), exact.isnan())
    scale = max(exact.nan_to_num().abs().max().item(), least) if exact.numel() else 1.0
    assert torch.allclose(ours.double(), exact, rtol=0, atol=bound * scale, equal_nan=True)


def agree(function, reference, tensors, targets, **options):
    """Assert that the loss and all its gradients, for a random upstream one, match the formula."""
    ours = [t.detach().clone().requires_grad_() for t in tensors]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    bound = BOUND[tensors[0].dtype]
    order = ours[:-1] if len(ours) == 3 else ours
    bias = ours[2:] if len(ours) == 3 else []
    loss = function(*order, targets, *bias, **options)
    order = exact[:-1] if len(ours) == 3 else exact
    bias = exact[2:] if len(ours) == 3 else []
    expected = reference(*order, targets, *bias, **options)
    assert loss.dtype == tensors[0].dtype
    close(loss, expected, bound)
    seed = randn(*loss.shape, dtype=loss.dtype, seed=5)
    found = torch.autograd.grad(loss, ours, seed)
    wanted = torch.autograd.grad(expected, exact, seed.double())
    # The terms are a softmax and the one of its target, which the mean divides by the rows.
    least = seed.abs().max().item() / len(targets) if len(targets) else 1.0
    for gradient, exactly in zip(found, wanted, strict=True):
        # The formula gives NaN if no row counts; ours gives zero.
        close(gradient, exactly.nan_to_num(), bound, least)
    for tensor, given_one in zip(ours, tensors, strict=True):
        assert torch.equal(tensor, given_one)


options = st.fixed_dictionaries(
    {
        "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
        "z_loss": st.sampled_from([0.0, 1e-2]),
        "ignore_index": st.sampled_from([IGNORED, 0]),
        "softcap": st.sampled_from([None, None, 3.0]),
    }
)
dtypes = st.sampled_from(list(BOUND))


@many
@given(
    st.integers(0, 6),
    st.integers(1, 5000),
    dtypes,
    st.sampled_from([torch.int64, torch.int32]),
    st.sampled_from(REDUCTIONS),
    options,
)
def test_random_shapes_and_options(m, v, dtype, index, reduction, chosen):
    targets = classes(m, v, index)
    targets[targets == IGNORED] = chosen["ignore_index"]
    logits = randn(m, v, dtype=dtype)
    agree(cross_entropy, cross_entropy_reference, [logits], targets, reduction=reduction, **chosen)


@many
@given(
    st.integers(0, 6),
    st.integers(1, 40),
    st.integers(1, 600),
    dtypes,
    st.booleans(),
    st.sampled_from(REDUCTIONS),
    options,
)
def test_random_shapes_and_options_of_the_linear_form(m, h, v, dtype, bias, reduction, chosen):
    targets = classes(m, v)
    targets[targets == IGNORED] = chosen["ignore_index"]
    tensors = [randn(m, h), randn(v, h, seed=2), *([randn(v, seed=3)] if bias else [])]
    tensors = [tensor.to(dtype) for tensor in tensors]
    both = linear_cross_entropy, linear_cross_entropy_reference
    agree(*both, tensors, targets, reduction=reduction, **chosen)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_loss_is_that_of_pytorch(smoothing, reduction):
    logits, targets = randn(7, 90) * 4, classes(7, 90)
    named = {"label_smoothing": smoothing, "reduction": reduction}
    torch.testing.assert_close(
        cross_entropy(logits, targets, **named), F.cross_entropy(logits, targets, **named)
    )


@pytest.mark.parametrize("chosen", [{}, {"label_smoothing": 0.3, "z_loss": 0.1}])
def test_the_formulas_have_the_gradients_of_their_differences(chosen):
    logits = randn(4, 6).double().requires_grad_()
    targets = classes(4, 6)
    for reduction in REDUCTIONS:
        torch.autograd.gradcheck(
            lambda x, r=reduction: cross_entropy_reference(x, targets, reduction=r, **chosen),
            logits,
        )
    x, weight, bias = (randn(*s).double().requires_grad_() for s in ((4, 3), (6, 3), (6,)))
    torch.autograd.gradcheck(
        lambda x, w, b: linear_cross_entropy_reference(x, w, targets, b, **chosen),
        (x, weight, bias),
    )


def test_a_large_gradient_of_a_mean_in_float16_is_no_infinity():
    # 400 rows of about 200 add up to more than float16 holds; their mean is 200.
    m, v = 400, 64
    x = (200 + randn(m, 16)).half()
    targets = torch.zeros(m, dtype=torch.int64, device=DEVICE)
    ours = (randn(v, 16, seed=2) * 0.001).half().requires_grad_()
    exact = ours.detach().double().requires_grad_()
    losses = (
        linear_cross_entropy(x, ours, targets),
        F.cross_entropy(x.double() @ exact.T, targets),
    )
    for scale in (1.0, 1e-3, 64.0):
        found, expected = (
            torch.autograd.grad(loss * scale, weight, retain_graph=True)[0]
            for loss, weight in zip(losses, (ours, exact), strict=True)
        )
        assert found.dtype == torch.float16
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3 * scale)


def test_the_mean_of_another_dtype_keeps_its_gradients_in_it():
    for dtype, reduction in ((torch.bfloat16, "mean"), (torch.float16, "sum")):
        x, weight = randn(5, 8, dtype=dtype), randn(40, 8, dtype=dtype).requires_grad_()
        loss = linear_cross_entropy(x, weight, classes(5, 40), reduction=reduction)
        assert loss.grad_fn.saved_tensors[1].dtype == dtype


@pytest.mark.parametrize("tile", tiled.TILE_CONFIGS[::4])
def test_the_losses_of_sure_tokens_are_zero_and_none_is_negative(tile, monkeypatch):
    monkeypatch.setattr(tiled, "sm_count", lambda device: 1)
    monkeypatch.setitem(tiled.TILES.__dict__, "choose", lambda **key: tile)
    m, h, v = 130, 72, 300
    x = randn(m, h, dtype=torch.float16)
    targets = classes(m, v, ignored=False)
    weight = 0.01 * randn(v, h, seed=2)
    # The logit of the target is the square of a row, about 72 times 9.
    weight[targets] = 9 * x.float()
    weight = weight.half()
    assert tiled.suited(x, weight)
    losses = torch.full((m,), float("nan"), device=DEVICE)
    tiled.write_losses(losses, x, weight, targets, None, IGNORED, 0.0, 0.0)
    exact = F.cross_entropy(x.double() @ weight.double().T, targets, reduction="none")
    assert (losses >= 0).all() and not losses[exact < 1e-9].any()
    assert (exact < 1e-9).sum() > m // 2
    # Without the kernel's own logits, `joined` computes each target's logit in another order.
    parts = tiled._write_parts(torch.empty_like(losses), x, weight, targets, None, False)
    tiled.joined(losses, parts, None, x, weight, targets, IGNORED, 0.0, 0.0)
    assert (losses >= 0).all()
    close(losses, exact, 1e-3, 640)


def test_with_no_hidden_columns_all_classes_are_equal():
    for dtype in BOUND:
        x, weight = randn(5, 0, dtype=dtype), randn(40, 0, dtype=dtype)
        expected = F.cross_entropy(torch.zeros(5, 40), classes(5, 40, ignored=False))
        loss = linear_cross_entropy(x, weight.requires_grad_(), classes(5, 40, ignored=False))
        close(loss, expected.double(), BOUND[dtype])
        loss.backward()
        assert weight.grad.shape == (40, 0)


class Seen:
    """Record each saved tensor as it was, besides the tensor itself."""

    def __init__(self):
        self.pairs = []

    def pack(self, tensor):
        self.pairs.append((tensor, tensor.clone()))
        return tensor


@pytest.mark.parametrize("function", [cross_entropy, linear_cross_entropy])
def test_a_backward_pass_changes_no_tensor_that_hooks_have_seen(function):
    seen, given = Seen(), [randn(5, 40), randn(30, 40, seed=2)]
    given = [tensor.requires_grad_() for tensor in given[: 1 + (function is linear_cross_entropy)]]
    with torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda packed: packed):
        loss = function(*given, classes(5, 30))
    (loss * 3).backward()
    assert seen.pairs
    for tensor, before in seen.pairs:
        assert torch.equal(tensor, before)


def test_a_sum_in_float16_overflows_as_pytorchs_does():
    logits = torch.tensor([[10000.0, 0.0]], dtype=torch.float16, device=DEVICE).expand(7, 2)
    targets = torch.ones(7, dtype=torch.int64, device=DEVICE)
    for rows in (6, 7):
        ours = cross_entropy(logits[:rows], targets[:rows], reduction="sum")
        theirs = F.cross_entropy(logits[:rows], targets[:rows], reduction="sum")
        # PyTorch adds in float16 on a CPU.
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)
        assert ours.isinf() == (rows == 7)


@pytest.mark.parametrize("v", [300, 40000, 270000])
def test_a_graph_that_is_kept_gives_its_gradient_again(v):
    logits, targets = randn(2, v).requires_grad_(), classes(2, v, ignored=False)
    loss = cross_entropy(logits, targets)
    wanted = F.cross_entropy(logits, targets)
    for factor, keep in ((3.0, True), (0.5, True), (-2.0, False)):
        seed = torch.tensor(factor, device=DEVICE)
        found = torch.autograd.grad(loss, logits, seed, retain_graph=keep)
        expected = torch.autograd.grad(wanted, logits, seed, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_a_gradient_of_one_costs_no_further_tensor():
    logits, targets = randn(3, 200).requires_grad_(), classes(3, 200)
    loss, kept = cross_entropy(logits, targets), []
    loss.grad_fn.register_hook(lambda inputs, _: kept.append(inputs[0].data_ptr()))
    saved = loss.grad_fn.saved_tensors[0].data_ptr()
    loss.backward()
    assert kept == [saved]


def test_no_gradient_is_written_where_none_is_wanted(monkeypatch):
    monkeypatch.setattr(plain, "cross_entropy_fwd_bwd", None)
    logits, targets = randn(3, 200), classes(3, 200)
    cross_entropy(logits, targets)
    with torch.no_grad():
        cross_entropy(logits.requires_grad_(), targets)


@pytest.mark.parametrize("dtype", BOUND)
def test_without_rows_that_count_the_mean_is_nan_and_its_gradient_zero(dtype):
    logits = randn(3, 50, dtype=dtype).requires_grad_()
    loss = cross_entropy(logits, torch.full((3,), IGNORED, device=DEVICE))
    loss.backward()
    assert loss.isnan() and not logits.grad.any()


def test_a_loss_scale_brings_back_what_float16_cannot_hold():
    m, v = 64, 16
    logits = (randn(m, v) * 3).half().requires_grad_()
    targets, factor = classes(m, v, ignored=False), torch.tensor(1024.0, device=DEVICE)
    wide = logits.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(cross_entropy(logits, targets), logits, factor.half())
    (exact,) = torch.autograd.grad(F.cross_entropy(wide, targets), wide, factor.double())
    # Divided by the count before the factor, float16 would lose two digits of the smallest entries.
    seen = exact.abs() > 2e-5 * factor.item() / m
    assert (exact[seen].abs() / factor.item()).min().item() < 5e-7
    assert ((found - exact)[seen] / exact[seen]).abs().max().item() < 5e-3


def test_chunks_add_up_to_the_whole(monkeypatch):
    monkeypatch.setattr(chunks, "LEAST_ROWS", 2)
    monkeypatch.setattr(chunks, "BUFFER_BYTES", 200)
    monkeypatch.setattr(chunks, "ROW_STEP", 2)
    monkeypatch.setattr(chunks, "MOST_CHUNKS", 4)
    assert chunks.rows_of_chunk(11, 120) == 4
    tensors = [randn(11, 5), randn(30, 5, seed=2), randn(30, seed=3)]
    agree(linear_cross_entropy, linear_cross_entropy_reference, tensors, classes(11, 30))


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that PyTorch makes or fills."""

    most = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        result = function(*arguments, **(named or {}))
        if isinstance(result, torch.Tensor):
            self.most = max(self.most, result.nbytes)
        return result


def test_the_logits_are_never_in_memory_as_a_whole(monkeypatch):
    m, h, v = 64, 5, 320
    for name, value in (("LEAST_ROWS", 2), ("BUFFER_BYTES", 200), ("ROW_STEP", 2)):
        monkeypatch.setattr(chunks, name, value)
    x, weight = randn(m, h).requires_grad_(), randn(v, h, seed=2).requires_grad_()
    with Largest() as seen:
        linear_cross_entropy(x, weight, classes(m, v)).backward()
    assert seen.most == 4 * m * v // chunks.MOST_CHUNKS
    with Largest() as seen:
        F.cross_entropy(x @ weight.T, classes(m, v)).backward()
    assert seen.most == 4 * m * v


@pytest.mark.no_gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_matmul_are_those_of_pytorch(biased, autocast, monkeypatch):
    """Several chunks, so that dw is written first and added to later, in both of its dtypes."""
    m, h, v = 70, 24, 53
    for name, value in (("LEAST_ROWS", 2), ("BUFFER_BYTES", 200), ("ROW_STEP", 2)):
        monkeypatch.setattr(chunks, name, value)
    dtype = torch.float32 if autocast else torch.float16
    given = [randn(m, h, dtype=dtype), randn(v, h, dtype=dtype, seed=2)]
    given += [randn(v, dtype=dtype, seed=3)] if biased else []
    targets = classes(m, v)

    def gradients(dtype=None):
        leaves = [x.to(dtype or x.dtype).requires_grad_() for x in given]
        with torch.autocast("cpu", torch.float16, enabled=autocast and dtype is None):
            function = linear_cross_entropy if dtype is None else exact_loss
            loss = function(*leaves[:2], targets, *leaves[2:])
        return torch.autograd.grad(loss, leaves)

    def exact_loss(x, weight, targets, bias=None):
        return F.cross_entropy(F.linear(x, weight, bias), targets)

    truths, calls = gradients(torch.float64), []
    monkeypatch.setattr(linear, "_multiplies", lambda a: calls.append(a.dtype) or True)
    for found, truth in zip(gradients(), truths, strict=True):
        assert (found.double() - truth).norm() <= 3e-3 * truth.norm()
    assert set(calls) == {torch.float16} and len(calls) > 3 * 3


@pytest.mark.parametrize("row_bytes", [2, 64000, 256512, 1 << 20])
@pytest.mark.parametrize("m", [0, 1, 100, 1024, 4096, 5000, 1 << 20])
def test_a_chunk_has_rows_enough_and_there_are_few(m, row_bytes):
    rows = chunks.rows_of_chunk(m, row_bytes)
    assert rows % chunks.ROW_STEP == 0
    assert -(-m // rows) <= chunks.MOST_CHUNKS
    most = max(chunks.LEAST_ROWS, chunks.BUFFER_BYTES // row_bytes, -(-m // chunks.MOST_CHUNKS))
    assert rows < most + chunks.ROW_STEP
    assert rows >= m or 2 * rows > most


@pytest.mark.parametrize("tile", tiled.TILE_CONFIGS[::4])
@pytest.mark.parametrize(
    "chosen", [{}, {"label_smoothing": 0.2, "z_loss": 0.1}, {"softcap": 4.0, "z_loss": 0.1}]
)
@pytest.mark.parametrize(("m", "h", "v"), [(1, 8, 1), (130, 72, 300), (257, 64, 512)])
def test_losses_of_tiles_are_those_of_the_logits(m, h, v, chosen, tile, monkeypatch):
    monkeypatch.setattr(tiled, "sm_count", lambda device: 1)
    monkeypatch.setitem(tiled.TILES.__dict__, "choose", lambda **key: tile)
    x, weight = randn(m, h, dtype=torch.float16), randn(v, h, dtype=torch.float16, seed=2)
    bias, targets = randn(v, dtype=torch.float16, seed=3), classes(m, v, ignored=m > 1)
    assert tiled.suited(x, weight) and not tiled.suited(x[:, 1:], weight[:, 1:])
    for added in (None, bias):
        loss = linear_cross_entropy(x, weight, targets, added, **chosen)
        wide = None if added is None else added.double()
        exact = linear_cross_entropy_reference(x.double(), weight.double(), targets, wide, **chosen)
        close(loss, exact, 1e-3)


@pytest.mark.parametrize("chosen", [{"softcap": 4.0}, {"label_smoothing": 0.2}])
def test_tiles_of_groups_of_warps_have_no_such_option(chosen, monkeypatch):
    monkeypatch.setattr(tiled, "sm_count", lambda device: 1)
    monkeypatch.setattr(tiled, "is_hopper", lambda device: True)
    x, weight = randn(130, 384, dtype=torch.float16), randn(512, 384, dtype=torch.float16, seed=2)
    targets, taken = classes(130, 512), []
    assert tiled.suited(x, weight) and tiled.hopper.suits(512, 384)
    monkeypatch.setattr(
        tiled.hopper, "write_parts", lambda *given: taken.append(True) or torch.zeros(2, 130, 2)
    )
    linear_cross_entropy(x, weight, targets)
    assert taken == [True]
    loss = linear_cross_entropy(x, weight, targets, **chosen)
    assert taken == [True]
    close(
        loss, linear_cross_entropy_reference(x.double(), weight.double(), targets, **chosen), 1e-3
    )


@pytest.mark.hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("m", "h", "v"), [(1, 384, 33792), (200, 328, 17152), (1030, 520, 33024), (4096, 1000, 12800)]
)
def test_losses_of_groups_of_warps_are_those_of_the_logits(m, h, v, dtype):
    x, weight = randn(m, h, dtype=dtype), randn(v, h, dtype=dtype, seed=2) / h**0.5
    targets = classes(m, v, ignored=False)
    assert tiled.suited(x, weight) and tiled.hopper.suits(v, h)
    loss = torch.full((m,), float("nan"), device=DEVICE)
    tiled.write_losses(loss, x, weight, targets, None, IGNORED, 0.0, 0.0)
    exact = F.cross_entropy(x.double() @ weight.double().T, targets, reduction="none")
    # The products are exact and the sums in float32; the largest error seen is 5e-6.
    close(loss, exact, 1e-5)


@pytest.mark.hopper
@many
@given(
    st.integers(1, 1500),
    st.integers(41, 160),
    st.integers(0, 40),
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 1e-2]),
    st.booleans(),
)
def test_random_shapes_of_groups_of_warps(m, steps, more, dtype, z_loss, padded):
    h, v = 8 * steps, 256 * (-(-132 // -(-m // 128)) + more)
    generator = torch.Generator(DEVICE).manual_seed(m)
    x, weight = (
        torch.randn(rows, h + 8 * padded, generator=generator, device=DEVICE) for rows in (m, v)
    )
    x, weight = x.to(dtype)[:, :h], (weight / h**0.5).to(dtype)[:, :h]
    targets = classes(m, v)
    assert tiled.suited(x, weight) and tiled.hopper.suits(v, h)
    loss = torch.full((m,), float("nan"), device=DEVICE)
    tiled.write_losses(loss, x, weight, targets, None, IGNORED, 0.0, z_loss)
    logits = x.double() @ weight.double().T
    exact = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)
    exact += z_loss * logits.logsumexp(1) ** 2 * (targets != IGNORED)
    close(loss, exact, 1e-5)


def test_only_what_needs_a_gradient_gets_one():
    x, weight, targets = randn(5, 8), randn(40, 8).requires_grad_(), classes(5, 40)
    loss = linear_cross_entropy(x, weight, targets)
    assert [t is None for t in loss.grad_fn.saved_tensors[:3]] == [True, False, True]
    (found,) = torch.autograd.grad(loss, weight)
    (expected,) = torch.autograd.grad(F.cross_entropy(x @ weight.T, targets), weight)
    torch.testing.assert_close(found, expected)


def test_targets_out_of_range_are_named_or_make_their_row_nan(monkeypatch):
    logits = randn(3, 20).requires_grad_()
    for target in (20, -1, 1 << 40):
        targets = torch.tensor([3, target, IGNORED], device=DEVICE)
        if DEVICE == "cpu":
            with pytest.raises(ValueError, match=rf"targets: {target}, expected 0 to 19"):
                cross_entropy(logits, targets)
            with pytest.raises(ValueError, match=rf"targets: {target}, expected 0 to 19"):
                linear_cross_entropy(randn(3, 4), randn(20, 4), targets)
        # On a GPU the targets are not checked.
        with monkeypatch.context() as patch:
            patch.setattr(plain, "check_targets", lambda *arguments: None)
            options = IGNORED, 0.0, 0.0, 0.0, "none", torch.float32, False
            losses, gradient, _ = plain.cross_entropy_fwd_bwd(logits.detach(), targets, *options)
        assert losses.isnan().tolist() == [False, True, False]
        assert gradient.isnan().all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(3, 11, 4), (2, 7, 3, 2), (0, 5, 2), (2, 1, 3)])
def test_logits_of_more_dimensions_are_those_of_pytorch(shape, reduction):
    """PyTorch's layout [N, V, d1, ...], and the same with the classes last."""
    n, v, *others = shape
    theirs = randn(*shape).requires_grad_()
    ours = theirs.detach().clone().requires_grad_()
    targets = classes(n * torch.Size(others).numel(), v, ignored=False).view(n, *others)
    wanted = F.cross_entropy(theirs, targets, reduction=reduction)
    last = ours.movedim(1, -1)
    for loss in (
        cross_entropy(ours, targets, dim=1, reduction=reduction),
        cross_entropy(last, targets, dim=-1, reduction=reduction),
        cross_entropy(last.contiguous(), targets, dim=last.dim() - 1, reduction=reduction),
    ):
        torch.testing.assert_close(loss, wanted, equal_nan=True)
        seed = randn(*loss.shape, seed=5)
        (found,) = torch.autograd.grad(loss, ours, seed)
        (expected,) = torch.autograd.grad(wanted, theirs, seed, retain_graph=True)
        torch.testing.assert_close(found, expected)


def test_a_single_row_has_a_target_without_dimensions():
    logits, target = randn(9), torch.tensor(4, device=DEVICE)
    for reduction in REDUCTIONS:
        loss = cross_entropy(logits, target, reduction=reduction)
        torch.testing.assert_close(loss, F.cross_entropy(logits, target, reduction=reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_factors_of_more_dimensions_are_rows(reduction):
    x, weight = randn(2, 3, 8).requires_grad_(), randn(40, 8, seed=2).requires_grad_()
    targets = classes(6, 40).view(2, 3)
    loss = linear_cross_entropy(x, weight, targets, reduction=reduction)
    logits = (x @ weight.T).movedim(-1, 1)
    wanted = F.cross_entropy(logits, targets, reduction=reduction)
    torch.testing.assert_close(loss, wanted)
    seed = randn(*loss.shape, seed=5)
    for found, expected in zip(
        *(torch.autograd.grad(y, (x, weight), seed) for y in (loss, wanted)), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_the_losses_of_rows_have_gradients_chunk_by_chunk(monkeypatch):
    for name, value in (("LEAST_ROWS", 2), ("BUFFER_BYTES", 200), ("ROW_STEP", 2)):
        monkeypatch.setattr(chunks, name, value)
    tensors = [randn(11, 5), randn(30, 5, seed=2), randn(30, seed=3)]
    both = linear_cross_entropy, linear_cross_entropy_reference
    chosen = {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0}
    agree(*both, tensors, classes(11, 30), reduction="none", **chosen)
    x, weight = randn(5, 8), randn(40, 8).requires_grad_()
    losses = linear_cross_entropy(x, weight, classes(5, 40), reduction="none")
    (found,) = torch.autograd.grad(losses.sum(), weight)
    (expected,) = torch.autograd.grad(
        linear_cross_entropy(x, weight, classes(5, 40), reduction="sum"), weight
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("linear_form", [False, True])
def test_a_gradient_that_is_not_finite_does_not_enter_by_an_ignored_row(linear_form, dtype):
    """The logarithm of a loss of zero has an infinite slope, or NaN behind `torch.where`."""
    targets = torch.tensor([1, IGNORED, 0, 4, IGNORED, 6], device=DEVICE)
    tensors = [randn(6, 10, dtype=dtype)]
    if linear_form:
        tensors = [randn(6, 4), randn(10, 4, seed=2), randn(10, seed=3)]
        tensors = [each.to(dtype) for each in tensors]

    def gradients(function, tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        losses = function(*leaves[:2], targets, *leaves[2:], reduction="none")
        kept = torch.where(targets == IGNORED, 0.0, losses.log())
        return torch.autograd.grad(kept.sum(), leaves)

    def reference(logits, *others, reduction):
        if linear_form:
            weight, _, bias = others
            logits = F.linear(logits, weight, bias)
        return F.cross_entropy(logits, targets, reduction=reduction)

    function = linear_cross_entropy if linear_form else cross_entropy
    found = gradients(function, tensors)
    for one, other in zip(found, gradients(reference, [t.double() for t in tensors]), strict=True):
        close(one, other, 3 * BOUND[dtype])


@pytest.mark.parametrize("index", [-(2**31) - 1, 2**31, 2**32, 2**63 - 1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("wanted", [False, True])
def test_narrow_targets_with_any_ignored_index(index, wanted):
    """An index beyond 32 bits equals no target of int32, also if its lower half does."""
    x, weight = randn(6, 4).requires_grad_(wanted), randn(10, 4, seed=2)
    targets = torch.tensor([1, 2, 0, 4, 5, 6], dtype=torch.int32, device=DEVICE)
    logits = x @ weight.T
    expected = F.cross_entropy(logits, targets.long())
    torch.testing.assert_close(cross_entropy(logits, targets, ignore_index=index), expected)
    found = linear_cross_entropy(x, weight, targets, ignore_index=index)
    torch.testing.assert_close(found, expected)


def test_a_softcap_bounds_logits_that_are_far_or_infinite():
    row = [3e38, -3e38, float("inf"), -float("inf"), 1.0, 0.0, -0.0]
    logits = torch.tensor([row], device=DEVICE)
    targets = torch.tensor([2], device=DEVICE)
    exact = logits.double().requires_grad_()
    ours = logits.clone().requires_grad_()
    loss = cross_entropy(ours, targets, softcap=30.0)
    wanted = F.cross_entropy(30 * torch.tanh(exact / 30), targets)
    torch.testing.assert_close(loss.double(), wanted)
    (found,) = torch.autograd.grad(loss, ours)
    (expected,) = torch.autograd.grad(wanted, exact)
    assert not found[0, :4].any()
    torch.testing.assert_close(found.double(), expected.nan_to_num())


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_z_loss_comes_by_itself_and_has_no_gradient(reduction, dtype):
    m, v, h = 7, 50, 12
    targets = classes(m, v)
    x, weight = randn(m, h, dtype=dtype), randn(v, h, dtype=dtype, seed=2)
    logits = randn(m, v, dtype=dtype)
    chosen = {"z_loss": 0.3, "softcap": 5.0, "reduction": reduction}
    kept = targets != IGNORED
    for function, factors, rows in (
        (cross_entropy, (logits,), logits.double()),
        (linear_cross_entropy, (x, weight), x.double() @ weight.double().T),
    ):
        exact = 0.3 * torch.logsumexp(5 * torch.tanh(rows / 5), -1) ** 2 * kept
        exact = {"none": exact, "sum": exact.sum(), "mean": exact.sum() / kept.sum()}[reduction]
        for wanted in (False, True):
            leaves = [t.clone().requires_grad_(wanted) for t in factors]
            plain_loss = function(*leaves, targets, **chosen)
            loss, penalty = function(*leaves, targets, return_z_loss=True, **chosen)
            assert torch.equal(loss, plain_loss) and loss.requires_grad == wanted
            assert penalty.dtype == loss.dtype and not penalty.requires_grad
            close(penalty, exact, BOUND[dtype])
            if wanted:
                seed = randn(*loss.shape, dtype=loss.dtype, seed=5)
                both = (torch.autograd.grad(y, leaves, seed) for y in (loss, plain_loss))
                assert all(torch.equal(*pair) for pair in zip(*both, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_float32_loss_keeps_the_digits_that_16_bits_lose(reduction, dtype):
    m, v, h = 9, 50, 12
    targets, logits = classes(m, v), randn(m, v, dtype=dtype)
    wide = {"reduction": reduction, "loss_dtype": torch.float32}
    leaf = logits.clone().requires_grad_()
    exact = F.cross_entropy(logits.double(), targets, reduction=reduction)
    for each in (logits, leaf):
        loss = cross_entropy(each, targets, **wide)
        assert loss.dtype == torch.float32
        close(loss, exact, 1e-6)
    seed = torch.ones_like(loss)
    (found,) = torch.autograd.grad(loss, leaf, seed)
    narrow = cross_entropy(leaf, targets, reduction=reduction)
    assert narrow.dtype == dtype and found.dtype == dtype
    assert torch.equal(found, torch.autograd.grad(narrow, leaf, seed.to(dtype))[0])
    x, weight = (randn(n, h, dtype=dtype, seed=n).requires_grad_() for n in (m, v))
    loss = linear_cross_entropy(x, weight, targets, **wide)
    assert loss.dtype == torch.float32
    found = torch.autograd.grad(loss, (x, weight), torch.ones_like(loss))
    assert [grad.dtype for grad in found] == [dtype, dtype]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("narrow", [True, False])
def test_under_autocast_a_float32_weight_has_its_gradient_in_float32(reduction, narrow):
    m, h, v, half = 40, 16, 30, torch.float16
    targets = classes(m, v)
    x = randn(m, h, dtype=half if narrow else torch.float32).requires_grad_()
    weight, bias = randn(v, h, seed=2).requires_grad_(), randn(v, seed=3).requires_grad_()
    leaves = x, weight, bias
    exact = [leaf.detach().to(half).double().requires_grad_() for leaf in leaves]
    truth = F.cross_entropy(exact[0] @ exact[1].T + exact[2], targets, reduction=reduction)
    with torch.autocast(DEVICE, dtype=half):
        loss = linear_cross_entropy(x, weight, targets, bias, reduction=reduction)
        theirs = F.cross_entropy(F.linear(*leaves), targets, reduction=reduction)
        assert cross_entropy(randn(3, 4, dtype=half), classes(3, 4)).dtype == torch.float32
    # PyTorch's loss is float32 under autocast too.
    assert loss.dtype == theirs.dtype == torch.float32
    close(loss, truth, 4e-3)
    seed = torch.ones_like(loss)
    found = torch.autograd.grad(loss, leaves, seed)
    wanted = torch.autograd.grad(truth, exact, seed.double())
    for leaf, grad, expected in zip(leaves, found, wanted, strict=True):
        assert grad.dtype == leaf.dtype
        close(grad, expected, 4e-3)
    # No entry was rounded to 16 bits on its way.
    assert not torch.equal(found[1], found[1].half().float())
    with pytest.raises(TypeError, match=r"weight: torch.float32, expected torch.float16"):
        linear_cross_entropy(x.half(), weight, targets)


REFUSED = [
    ({"logits": randn(2, 3, 4)}, ValueError, r"logits: shape \(2, 3, 4\) .*expected one or two"),
    ({"softcap": 0.0}, ValueError, "softcap: 0.0, expected a positive number"),
    ({"softcap": float("inf")}, ValueError, "softcap: inf, expected a positive number"),
    ({"loss_dtype": torch.float16}, TypeError, "loss_dtype: torch.float16, expected torch.float32"),
    ({"dim": 2}, ValueError, "dim: 2, expected 1 or less"),
    ({"dim": 0}, ValueError, r"targets: shape \(2,\), expected \(4,\)"),
    ({"logits": randn(2, 0)}, ValueError, "logits: 0 classes, expected at least one"),
    ({"logits": classes(2, 4)[:, None]}, TypeError, "logits: torch.int64, expected float32"),
    ({"targets": randn(2)}, TypeError, "targets: torch.float32, expected int64 or int32"),
    ({"targets": classes(3, 4)}, ValueError, r"targets: shape \(3,\), expected \(2,\)"),
    ({"label_smoothing": 1.5}, ValueError, "label_smoothing: 1.5, expected 0 to 1"),
    ({"reduction": "max"}, ValueError, "reduction: 'max', expected one of"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), REFUSED, ids=[r[2] for r in REFUSED])
def test_bad_arguments_are_named(wrong, error, words):
    with pytest.raises(error, match=words):
        cross_entropy(**{"logits": randn(2, 4), "targets": classes(2, 4)} | wrong)


REFUSED_BY_LINEAR = [
    ({"x": randn(2, 3, 4)}, ValueError, r"targets: shape \(2,\), expected \(2, 3\)"),
    ({"weight": randn(5, 3)}, ValueError, r"weight: shape \(5, 3\), expected \(V, 4\)"),
    ({"weight": randn(5, 4, dtype=torch.float16)}, TypeError, "weight: torch.float16, expected"),
    ({"bias": randn(4)}, ValueError, r"bias: shape \(4,\), expected \(5,\)"),
    ({"bias": randn(5, dtype=torch.float16)}, TypeError, "bias: torch.float16, expected"),
    ({"weight": torch.empty(5, 4, device="meta")}, ValueError, "weight: on meta, expected"),
    ({"reduction": "all"}, ValueError, "reduction: 'all', expected one of"),
]


@pytest.mark.parametrize(("wrong", "error", "words"), REFUSED_BY_LINEAR, ids=lambda x: str(x)[:30])
def test_bad_arguments_of_the_linear_form_are_named(wrong, error, words):
    good = {"x": randn(2, 4), "weight": randn(5, 4), "targets": classes(2, 5)}
    with pytest.raises(error, match=words):
        linear_cross_entropy(**good | wrong)

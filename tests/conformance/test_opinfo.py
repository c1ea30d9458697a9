"""Run PyTorch's own sample inputs (OpInfo, torch.testing._internal) for every op that we share."""

import math

import pytest
import torch
from conformance import Declined, is_tensor, representable
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import UnaryUfuncInfo

from harness.machine import nvml
from kernels import (
    activation,
    attention,
    cross_entropy,
    layer_norm,
    linear_cross_entropy,
    matmul,
    rms_norm,
    search,
    softmax,
    transpose,
    vector,
)
from kernels import random as random_numbers

DEVICE = "cuda" if nvml.gpus() else "cpu"
MOST_ELEMENTS = 2**12
DTYPES = (torch.float32, torch.float16)


def tensors_only(*operands):
    if not all(map(is_tensor, operands)):
        raise Declined("a number in place of a tensor")
    if len({x.shape for x in operands}) > 1:
        raise Declined("broadcasting")


def add(x, y, *, alpha=1):
    tensors_only(x, y)
    if alpha != 1:
        raise Declined("add: alpha")
    return vector.add(x, y)


def binary(function):
    def call(x, y):
        tensors_only(x, y)
        return function(x, y)

    return call


def leaky_relu(x, negative_slope=0.01, inplace=False):
    if inplace:
        raise Declined("in place")
    return activation.leaky_relu(x, negative_slope)


def unary(function):
    def call(x, **options):
        if options.pop("inplace", False):
            raise Declined("in place")
        return function(x, **options)

    return call


def rowwise_softmax(x, dim, dtype=None):
    if dtype is not None:
        raise Declined("softmax: a dtype")
    if x.dim() == 0 or dim % x.dim() != x.dim() - 1:
        raise Declined("softmax: another dimension than the last")
    return softmax.softmax(x)


def rows(x, shape, *parameters):
    """Views in which the normalized dimensions are one."""
    n = math.prod(shape)
    folded = [None if p is None else p.reshape(n) for p in parameters]
    return x.reshape(*x.shape[: x.dim() - len(shape)], n), *folded


def norm_over_rows(x, shape, weight=None, bias=None, eps=1e-5):
    folded, weight, bias = rows(x, shape, weight, bias)
    return layer_norm.layer_norm(folded, weight, bias, eps=eps).reshape(x.shape)


def rms_over_rows(x, shape, weight=None, eps=None):
    folded, weight = rows(x, shape, weight)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return rms_norm.rms_norm(folded, weight, eps=eps).reshape(x.shape)


def entropy(x, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    if weight is not None:
        raise Declined("cross_entropy: weights of classes")
    if target.is_floating_point():
        raise Declined("cross_entropy: probabilities as targets")
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    options |= {"dim": 1} if x.dim() > 2 else {}
    return cross_entropy.cross_entropy(x, target, reduction=reduction, **options)


def linear_entropy(
    x, matrix, target, *, linear_bias=None, weight=None, reduction="mean", ignore_index=None,
    label_smoothing=0.0, options=None,
):  # fmt: skip
    if weight is not None:
        raise Declined("cross_entropy: weights of classes")
    if target.is_floating_point():
        raise Declined("cross_entropy: probabilities as targets")
    if matrix.dim() != 2:
        raise Declined("linear_cross_entropy: classes in several dimensions")
    return linear_cross_entropy.linear_cross_entropy(
        x, matrix, target, bias=linear_bias, reduction=reduction, label_smoothing=label_smoothing,
        ignore_index=-100 if ignore_index is None else ignore_index,
    )  # fmt: skip


def product(a, b):
    if a.dim() != 2 or b.dim() != 2:
        raise Declined("matmul: other than two matrices")
    return matmul.matmul(a, b)


def linear(x, weight, bias=None):
    if x.dim() != 2 or weight.dim() != 2:
        raise Declined("matmul: other than two matrices")
    return matmul.matmul(x, weight.mT, bias=bias)


def addmm(added, a, b, *, alpha=1, beta=1):
    if alpha != 1 or beta != 1:
        raise Declined("addmm: alpha, beta")
    if added.dim() != 1:
        raise Declined("addmm: a bias of other than one dimension")
    return matmul.matmul(a, b, bias=added)


def dot_product_attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    for name, given in (("mask", attn_mask is not None), ("dropout", dropout_p), ("scale", scale)):
        if given:
            raise Declined(f"attention: {name}")
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape:
        raise Declined("attention: q, k, v of several shapes, or not of four dimensions")
    return attention.attention(q, k, v, causal=is_causal)


def swapped(x, dim0=0, dim1=1):
    if x.dim() != 2:
        raise Declined("transpose: other than two dimensions")
    return transpose.transpose(x) if dim0 % 2 != dim1 % 2 else x.clone()


def bucketize(x, boundaries, *, right=False, out_int32=False):
    if not is_tensor(x):
        raise Declined("a number in place of a tensor")
    return search.bucketize(x, boundaries, right=right, out_int32=out_int32)


# By OpInfo name: our form of the call, and whether our function gives gradients.
SHARED = {
    "add": (add, True),
    "mul": (binary(vector.mul), True),
    "maximum": (binary(vector.maximum), True),
    "minimum": (binary(vector.minimum), True),
    "dot": (binary(vector.dot), True),
    "nn.functional.relu": (unary(activation.relu), True),
    "nn.functional.leaky_relu": (leaky_relu, True),
    "nn.functional.gelu": (unary(activation.gelu), True),
    "tanh": (unary(activation.tanh), True),
    "cosh": (unary(activation.cosh), True),
    "softmax": (rowwise_softmax, True),
    "nn.functional.layer_norm": (norm_over_rows, True),
    "nn.functional.rms_norm": (rms_over_rows, True),
    "nn.functional.cross_entropy": (entropy, True),
    "nn.functional.linear_cross_entropy": (linear_entropy, True),
    "matmul": (product, False),
    "mm": (product, False),
    "addmm": (addmm, False),
    "nn.functional.linear": (linear, False),
    "nn.functional.scaled_dot_product_attention": (dot_product_attention, False),
    "transpose_copy": (swapped, True),
    "t_copy": (swapped, True),
    "bucketize": (bucketize, False),
}  # fmt: skip


def samples(info, dtype, gradients):
    """Return PyTorch's samples and, for functions of one tensor, its small reference inputs.
    Reference inputs have more values and layouts; large ones take the interpreter too long.
    """
    yield from info.sample_inputs(DEVICE, dtype, requires_grad=gradients)
    if not isinstance(info, UnaryUfuncInfo):
        return
    for sample in info.reference_inputs(DEVICE, dtype, requires_grad=gradients):
        if sample.input.numel() <= MOST_ELEMENTS:
            yield sample


def flattened(info, sample):
    """The arguments of a sample as one flat list of tensors, and a function that puts them back."""
    flat = [sample.input, *sample.args, *sample.kwargs.values()]
    names = list(sample.kwargs)

    def bound(function):
        def call(*values):
            count = 1 + len(sample.args)
            options = dict(zip(names, values[count:], strict=True))
            return function(values[0], *values[1:count], **options)

        return call

    return flat, bound


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", SHARED)
def test_samples_of_pytorch(name, dtype, tally):
    ours, gradients = SHARED[name]
    infos = [info for info in op_db if info.name == name]
    if not infos:
        # linear_cross_entropy is younger than the oldest PyTorch that the study supports.
        pytest.skip(f"the installed PyTorch has no sample inputs (OpInfo) of {name}")
    if name == "nn.functional.scaled_dot_product_attention":
        tally.none = "all samples have heads of eight entries"
    for info in infos:
        if dtype not in info.supported_dtypes(DEVICE):
            tally.none = f"PyTorch: {name} has no {dtype} on this device"
            continue
        for number, sample in enumerate(samples(info, dtype, gradients)):
            flat, bound = flattened(info, sample)
            label = f"{info.full_name} {number} {[getattr(x, 'shape', x) for x in flat]}"
            tally.call(label, bound(ours), bound(info.op), flat)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_samples_of_dropout(dtype, tally):
    """Compare exactly if nothing is random; otherwise each entry is zero or scaled."""
    [info] = [info for info in op_db if info.name == "nn.functional.dropout"]
    for number, sample in enumerate(info.sample_inputs(DEVICE, dtype, requires_grad=True)):
        p, training = sample.kwargs.get("p", 0.5), sample.kwargs.get("training", True)
        label = f"dropout {number} {tuple(sample.input.shape)} {sample.kwargs}"
        x = sample.input

        def ours(x, p=p, training=training):
            return random_numbers.dropout(x, p, 7, training=training)

        if not training or p in (0.0, 1.0):
            tally.call(label, ours, lambda x, p=p, t=training: torch.dropout(x, p, t), [x])
            continue
        kept = (ours(x) != 0) | (x == 0)

        def theirs(x, kept=kept, p=p):
            p = representable(p)
            return torch.where(kept, x / (1 - p), torch.zeros_like(x))

        tally.call(label, ours, theirs, [x])


def test_samples_of_randint(tally):
    [info] = [info for info in op_db if info.name == "randint"]
    for sample in info.sample_inputs(DEVICE, torch.int64):
        low, high, *size = [sample.input, *sample.args]
        low, high, size = (low, high, *size) if size else (0, low, high)
        dtype = sample.kwargs.get("dtype", torch.int64)
        if dtype not in (torch.int32, torch.int64):
            tally.declined[f"randint: {dtype}"] += 1
            continue
        out = random_numbers.randint(low, high, tuple(size), 3, dtype=dtype)
        inside = out.shape == size and out.dtype == dtype and ((low <= out) & (out < high)).all()
        if inside:
            tally.passed += 1
        else:
            tally.wrong.append(f"randint {low} {high} {tuple(size)}: {out}")

"""A step of AdamW on several tensors: the gradients clipped by their global norm, the moments, the
parameters.

    g' = g min(1, max_norm / (norm + 1e-6)),  t = step + 1
    m = beta1 m + (1 - beta1) g',  v = beta2 v + (1 - beta2) g'²
    p = (1 - lr weight_decay) p - lr m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps)

All tensors of a kind lie in one vector of N elements, which P tensors make up; every
implementation is given them as a list. With masters the moments are float32, and p is a rounding of
the master. The norm is that of the gradients together, and it is a result too.

Bytes: parameters or masters, gradients and moments are read; all but the gradients are written. A
second read of the gradients, after their norm is known, is not counted. FLOPs: 14 an element.
Cases: the parameters of GPT-2, and as many as an H200 holds of all rivals at once.
"""

import functools

import torch

from ops._drawn import log_uniform
from ops._spec import Cost, Op, Tensor, make_case

# Decayed weights, and the moments that steps on them have. Neighbours differ fourfold in length.
SCALE, RATIO = 0.02, 4


def adamw_reference(
    params, grads, exp_avgs, exp_avg_sqs, step, masters=None, *, lengths,
    lr, beta1, beta2, eps, weight_decay, max_norm=None,
):  # fmt: skip
    p, g, m, v = (_wide(x) for x in (params if masters is None else masters, grads, exp_avgs,
                                     exp_avg_sqs))  # fmt: skip
    t = step + 1
    norm = g.square().sum().sqrt()
    if max_norm is not None:
        g = g * (max_norm / (norm + 1e-6)).clamp(max=1.0)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    unbiased = m / (1 - beta1**t), v / (1 - beta2**t)
    p = (1 - lr * weight_decay) * p - lr * unbiased[0] / (unbiased[1].sqrt() + eps)
    results = [p.to(params.dtype), m.to(exp_avgs.dtype), v.to(exp_avg_sqs.dtype)]
    results += [] if masters is None else [p]
    return (*results, *([] if max_norm is None else [norm]))


def _wide(x):
    return x.double() if x.dtype == torch.float64 else x.float()


def _in_lists(function):
    """Return an implementation as the harness calls it: with vectors, and the lengths of parts."""

    @functools.wraps(function)
    def call(*, lengths, **given):
        lists, vectors = {}, {}
        for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters"):
            vector = given.get(name)
            if len(lengths) > 1 and isinstance(vector, torch.Tensor):
                lists[name] = list(vector.split(lengths))
                vectors[name] = vector
        results = function(**given | lists)
        # An implementation may return what it was given, after the update.
        return tuple(_joined(x, lists, vectors) for x in results)

    return call


def _joined(result, lists, vectors):
    for name, parts in lists.items():
        # A traced graph compares tensors, and no lists.
        if isinstance(result, list) and result[0] is parts[0]:
            return vectors[name]
    return torch.cat(result) if isinstance(result, list) else result


def _lengths(case):
    """Return the lengths of the P tensors, as unlike as those of a network; together they are N."""
    n, count = case["N"], case["P"]
    weights = [RATIO ** (place % 5) for place in range(count)]
    # Tensors of a network begin at whole accesses; those of small cases do not.
    unit = 64 if n >= 2**20 else 1
    lengths = [n * weight // sum(weights) // unit * unit for weight in weights]
    lengths[-1] += n - sum(lengths)
    return lengths


def _cost(case, pass_, itemsize):
    moments = 4 if "masters" in case.flags else itemsize
    kept = 2 * moments + (4 if "masters" in case.flags else itemsize)
    written = kept + (itemsize if "masters" in case.flags else 0)
    n = case["N"]
    return Cost(n * (kept + itemsize) + 4, n * written + (4 if _clips(case) else 0) + 4, 14 * n)


def _clips(case):
    return "unclipped" not in case.flags


def _max_norm(case):
    """Return half of the norm that unit gradients have, so that they are clipped."""
    return 0.5 * max(1, case["N"]) ** 0.5


def _drawn(generator):
    """Draw any number of tensors and elements."""
    return make_case(P=log_uniform(generator, 1, 400), N=log_uniform(generator, 2**20, 2**27, 64))


def _some_steps(case, start):
    return torch.tensor(float(start % 1000), dtype=torch.float64)


MOMENT = Tensor("N", grad=False, wide="masters", scale=0.5)
ADAMW = Op(
    "adamw",
    adamw_reference,
    {
        "params": Tensor("N", grad=False, scale=SCALE),
        "grads": Tensor("N", grad=False),
        "exp_avgs": MOMENT,
        "exp_avg_sqs": Tensor(
            "N", grad=False, wide="masters", finish=lambda case, values: values.abs()
        ),
        "step": Tensor("", dtype="float32", grad=False, table=_some_steps),
        "masters": Tensor("N", grad=False, when="masters", wide="masters", scale=SCALE),
    },
    _cost,
    edge=(
        make_case(P=1, N=1),
        make_case(P=1, N=127),
        make_case(P=3, N=1000),
        make_case(P=9, N=20000),
        make_case("unclipped", P=3, N=5000),
        make_case("masters", P=1, N=130),
        make_case("masters", P=4, N=9000),
        make_case("masters", "unclipped", P=4, N=300),
        make_case(P=2, N=3),
        make_case(P=3, N=5000, layout="offset"),
        make_case(P=1, N=8192, layout="offset8", dtypes=("float16",)),
        make_case(P=3, N=5000, values="large", dtypes=("float32", "bfloat16")),
        make_case(P=3, N=5000, values="spike", dtypes=("float32", "bfloat16")),
    ),
    sweep=(
        make_case(P=148, N=124439808, dtypes=("bfloat16", "float32")),  # GPT-2
        make_case("unclipped", P=148, N=124439808, dtypes=("bfloat16",)),
        make_case("masters", P=148, N=124439808, dtypes=("bfloat16", "float16")),
        make_case(P=146, N=2**28, dtypes=("bfloat16",)),
        make_case("masters", P=146, N=2**28, dtypes=("bfloat16",)),
        make_case(P=64, N=2**22, dtypes=("bfloat16", "float32")),
    ),
    drawn=_drawn,
    params={
        "lengths": _lengths,
        "lr": 1e-3,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "max_norm": _max_norm,
    },
    flags={"masters": {}, "unclipped": {"max_norm": None}},
    adapted=_in_lists,
)

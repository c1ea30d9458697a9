"""A whole network in one call: its logits, a training step, and tokens read with a cache.

- `model_forward`: the logits of all tokens.
- `model_train_step`: loss, backward pass, clipping by the global norm, AdamW with weight decay.
  Weights and moments are overwritten. The loss, the weights and the first moment are judged. The
  first moment holds a tenth of the clipped gradients.
- `model_decode`: the prompt is read, then T tokens one by one with a cache of keys and values. The
  tokens are given: near ties would send two right implementations on different ways. The logits
  after the prompt and after the last token are judged.

A flag names the preset. Nothing is dropped, as no two libraries drop alike. N is the number of
weights and V the vocabulary. Bytes: the weights are read once for a call and once for each decoded
token, with the keys and values before it; a step reads and writes weights and moments. FLOPs: those
of `network.cost`.
"""

import torch

from network import cost
from network.config import undropped
from network.flat import size, views
from network.ops import _oracle
from network.ops._tensors import config_of, first_moment, second_moment, weights
from network.train import BETAS, CLIP, DECAY, EPS, RATE
from ops._spec import Case, Cost, Op, Tensor, make_case

# The ops in which a stack is also taken one part at a time.
PART_BY_PART = ("model_train_step",)
# The ops whose calls write over their arguments.
IN_PLACE = ("model_train_step",)
# AdamW's count of steps, this one included. In the first step it would divide by the gradient.
STEP = 10
# Sequences that the oracle of decoding reads at a time, for the sake of memory.
SEQUENCES = 8


def model_forward_reference(ids, weights, preset_name):
    model = _oracle.network(undropped(preset_name), weights)
    with torch.no_grad():
        return model(ids)


def model_train_step_reference(ids, targets, weights, m, v, preset_name):
    model = _oracle.network(undropped(preset_name), weights)
    with torch.enable_grad():
        # One sequence after the other, for the sake of memory.
        total = 0
        for row in range(len(ids)):
            loss = model(ids[row : row + 1], targets[row : row + 1]) / len(ids)
            loss.backward()
            total = total + loss.detach()
    gradients = [weight.grad for weight in model.parameters()]
    norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    scale = torch.clamp(CLIP / (norm + 1e-6), max=1.0)
    b1, b2 = BETAS
    # Made after the backward pass, whose inner results need the memory.
    new, first = weights.clone(), m.to(weights.dtype, copy=True)
    olds, means, squares = (views(model, each) for each in (new, first, v))
    for old, mean, square, gradient in zip(olds, means, squares, gradients, strict=True):
        g = gradient.mul_(scale)
        mean.mul_(b1).add_((1 - b1) * g)
        second = b2 * square.to(g.dtype) + (1 - b2) * g * g
        if old.dim() > 1:
            old.mul_(1 - RATE * DECAY)
        step = (mean / (1 - b1**STEP)) / ((second / (1 - b2**STEP)).sqrt() + EPS)
        old.sub_(RATE * step)
    return total, new, first


def model_decode_reference(ids, follow, weights, preset_name):
    model = _oracle.network(undropped(preset_name), weights)
    with torch.no_grad():
        told = torch.cat((ids, follow), 1).split(SEQUENCES)
        h = torch.cat([model.hidden(some)[:, [ids.shape[1] - 1, -1]] for some in told])
        head = model.roles["head"].matrix
        return h[:, 0] @ head.T, h[:, 1] @ head.T


def _forward_cost(case, pass_, itemsize):
    b, s, v, n = (case[letter] for letter in "BSVN")
    flops = cost.forward_flops(config_of(case), b, s)
    return Cost(itemsize * n + 8 * b * s, itemsize * b * s * v, flops)


def _train_cost(case, pass_, itemsize):
    b, s, n = (case[letter] for letter in "BSN")
    flops = cost.train_flops(config_of(case), b, s)
    return Cost(3 * itemsize * n + 16 * b * s, 3 * itemsize * n + itemsize, flops)


def _decode_cost(case, pass_, itemsize):
    b, s, t, v, n = (case[letter] for letter in "BSTVN")
    config = config_of(case)
    read = itemsize * n + 8 * b * (s + t)
    read += sum(cost.decode_bytes(config, b, s + i, itemsize) for i in range(t))
    flops = cost.forward_flops(config, b, s + t)
    # The head serves the last token of the prompt and each token after it.
    flops -= 2 * b * (s - 1) * config.vocabulary * config.width
    return Cost(read, 2 * itemsize * b * v, flops)


def case(name: str, dtypes=(), **sizes: int) -> Case:
    """The case of a preset with its vocabulary and its number of weights."""
    config = undropped(name)
    more = {"V": config.vocabulary, "N": size(config)}
    return make_case(name.replace("-", "_"), **sizes, **more, dtypes=dtypes)


def _flags(*names: str) -> dict[str, dict[str, str]]:
    return {name.replace("-", "_"): {"preset_name": name} for name in names}


PRESETS = ("tiny", "tiny-gpt2", "gpt2-124m", "llama-1b")
BF16 = ("bfloat16",)
DTYPES = ("bfloat16", "float32")
IDS = Tensor("B S", dtype="int64", grad=False, below="V")
WEIGHTS = weights()
FORWARD = Op(
    "model_forward",
    model_forward_reference,
    {"ids": IDS, "weights": WEIGHTS},
    _forward_cost,
    edge=(case("tiny", B=2, S=12), case("tiny-gpt2", B=1, S=10)),
    sweep=(
        case("tiny", BF16, B=4, S=64),
        case("gpt2-124m", BF16, B=16, S=1024),
        case("llama-1b", BF16, B=4, S=4096),
        case("llama-1b", BF16, B=1, S=16384),
    ),
    dtypes=DTYPES,
    flags=_flags(*PRESETS),
)
TRAIN_STEP = Op(
    "model_train_step",
    model_train_step_reference,
    {
        "ids": IDS,
        "targets": IDS,
        "weights": WEIGHTS,
        "m": first_moment(),
        "v": second_moment(),
    },
    _train_cost,
    edge=FORWARD.edge,
    sweep=FORWARD.sweep,
    dtypes=DTYPES,
    flags=FORWARD.flags,
    # Hopper's backward pass of attention adds dq in memory, in any order.
    deterministic=False,
)
DECODE = Op(
    "model_decode",
    model_decode_reference,
    {
        "ids": IDS,
        "follow": Tensor("B T", dtype="int64", grad=False, below="V"),
        "weights": WEIGHTS,
    },
    _decode_cost,
    edge=(case("tiny", B=2, S=7, T=3), case("tiny-gpt2", B=1, S=5, T=3)),
    sweep=(
        case("tiny", BF16, B=4, S=32, T=32),
        case("gpt2-124m", BF16, B=16, S=512, T=128),
        case("llama-1b", BF16, B=1, S=1024, T=128),
        case("llama-1b", BF16, B=64, S=1024, T=128),
    ),
    dtypes=DTYPES,
    flags=FORWARD.flags,
)

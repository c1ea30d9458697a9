"""Whether parts can do what a network asks of them, tried on a few numbers.

A part may lack a gradient, grouped heads, dropout, a dtype or a device. It then raises, or returns
a result without a gradient. A try before a run says so by name. Within a step the same refusal
would come from the middle of a layer. A lost gradient would not show at all.
"""

from collections.abc import Callable

import torch

from network.cache import Keys
from network.config import Config
from network.parts import Parts, used

BATCH, TOKENS, WIDTH, CACHED = 2, 4, 32, 8


def reasons(
    parts: Parts,
    names: tuple[str, ...],
    config: Config,
    training: bool,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> dict[str, str]:
    """Return by name why parts cannot serve a network of this configuration; "" is never a reason.

    names: the parts to try; those that the network does not call are passed over. training: each
    floating input wants a gradient, and each result must have one.
    """
    found = {}
    for name in used(config, training):
        part = getattr(parts, name)
        if name in names and part is not None:
            why = refusal(part, _given(name, config, training, dtype, device), training)
            if why:
                found[name] = why
    return found


def refusal(part: Callable, given: tuple, training: bool) -> str:
    """Return why a callable refuses these arguments, in a line; "" if it does not.

    training: each result must have a gradient, and each tensor that requires one must get it.
    """
    try:
        with torch.set_grad_enabled(training):
            _try(part, given)
    except Exception as error:
        return f"{error}".splitlines()[0] if f"{error}" else type(error).__name__
    return ""


def _try(part, given):
    results = part(*given)
    results = results if isinstance(results, tuple) else (results,)
    wanted = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    if not (wanted and torch.is_grad_enabled()):
        return
    lost = [result for result in results if not result.requires_grad]
    if lost:
        raise ValueError("returns a result without a gradient")
    total = sum(result.float().sum() for result in results)
    if any(grad is None for grad in torch.autograd.grad(total, wanted, allow_unused=True)):
        raise ValueError("returns no gradient of an input")


def _given(name, config, training, dtype, device):
    """Arguments of a part as the model hands them over."""
    b, s, c, h, k, d = BATCH, TOKENS, WIDTH, config.heads, config.kv_heads, config.head_dim

    def rand(*shape, scale=1.0, grad=True):
        # The generator's device, whatever the default one is.
        generator = torch.Generator("cpu").manual_seed(len(shape))
        drawn = torch.randn(*shape, generator=generator, device="cpu")
        return (scale * drawn).to(device, dtype).requires_grad_(grad and training)

    def weight(out, into):
        made = rand(into, out) if config.family.transposed else rand(out, into)
        return made.T if config.family.transposed else made

    def integers(*shape):
        return torch.arange(WIDTH, device=device)[: torch.Size(shape).numel()].view(shape)

    def keys_of(queries):
        return Keys(torch.full((b,), s, device=device), queries, CACHED)

    # Heads lie behind positions, as projections give them.
    q, keys, values = (rand(b, s, n, d).transpose(1, 2) for n in (h, k, k))
    bias = rand(c) if config.family.bias else None
    seed = torch.tensor(1, device=device) if training and config.dropout else None
    return {
        "embedding": lambda: (integers(b, s), rand(c, c)),
        "rms_norm": lambda: (rand(b, s, c), rand(c), config.eps, rand(b, s, c)),
        "layer_norm": lambda: (rand(b, s, c), rand(c), rand(c), config.eps, rand(b, s, c)),
        "rotary": lambda: (
            q.transpose(1, 2),
            keys.transpose(1, 2),
            rand(s, d // 2, grad=False),
            rand(s, d // 2, grad=False),
        ),
        "attention": lambda: (q, keys, values, config.dropout if seed is not None else 0.0, seed),
        "decode_attention": lambda: (
            q[:, :, :1],
            rand(b, k, CACHED, d),
            rand(b, k, CACHED, d),
            keys_of(1),
        ),
        "swiglu": lambda: (rand(b, s, c), rand(b, s, c)),
        "gelu": lambda: (rand(b, s, c),),
        "linear": lambda: (rand(b, s, c), weight(c, c), bias),
        "linear_gelu": lambda: (rand(b, s, c), weight(c, c), bias),
        "swiglu_mlp": lambda: (rand(b, s, c), weight(c, c), weight(c, c), weight(c, c)),
        "linears": lambda: (rand(b, s, c), [weight(c, c)] * 3, [bias] * 3),
        "decode_token": lambda: (
            *(x[:, :, :1] for x in (q, keys, values)),
            rand(b, k, CACHED, d),
            rand(b, k, CACHED, d),
            keys_of(1),
            *(rand(CACHED, d // 2, grad=False) if config.family.rotary else None for _ in range(2)),
        ),
        "dropout": lambda: (rand(b, s, c), config.dropout, seed),
        "loss": lambda: (rand(b * s, c), rand(c, c), integers(b * s)),
    }[name]()

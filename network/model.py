"""A decoder-only transformer; its parts are handed in, so one code serves all stacks.

Each layer adds attention and an MLP, of normed inputs, to a residual stream. The sum and the norm
that follows it are one part, so a layer hands on what it has yet to add (`x`) beside the stream
(`residual`). Weights lie under Hugging Face's names and in its layouts, so its checkpoints load.
"""

from dataclasses import dataclass

import torch
from torch import nn

from network.angles import table
from network.cache import Cache, Keys
from network.config import Config
from network.parts import Parts

DEVIATION = 0.02  # of fresh weights, as in GPT-2


class Weights(nn.Module):
    """The weight and the bias of one layer, without a computation.

    Args:
        shape: of the weight, [out, in]; it is stored as [in, out] if `transposed` is true.
        bias: whether there is one, of zeros, [out].
        filled: the value of a fresh weight; without one it is drawn later.
    """

    def __init__(self, *shape: int, bias=False, transposed=False, filled: float | None = None):
        super().__init__()
        stored = shape[::-1] if transposed else shape
        self.weight = nn.Parameter(
            torch.empty(stored) if filled is None else torch.full(stored, filled)
        )
        self.bias = nn.Parameter(torch.zeros(shape[0])) if bias else None
        self.transposed, self.filled = transposed, filled

    @property
    def matrix(self) -> torch.Tensor:
        """The weight as [out, in], a view."""
        return self.weight.T if self.transposed else self.weight


def _put(root: nn.Module, path: str, weights: Weights) -> Weights:
    """Register weights under a dotted path, with plain modules as its folders."""
    *folders, name = path.split(".")
    for folder in folders:
        if not hasattr(root, folder):
            root.add_module(folder, nn.Module())
        root = getattr(root, folder)
    root.add_module(name, weights)
    return weights


@dataclass
class Context:
    """The tensors that all layers of one call share.

    Fields:
        cos, sin: of the angles of the positions, [S, D/2], or None; of all if by_token.
        positions: int64 [S]; None without a cache, and if nobody asks.
        cache, count: None without a cache. fresh: it held nothing before.
        by_token: each sequence has one token more, which the part `decode_token` takes.
        seeds: one int64 scalar for each dropout site, or None if nothing is dropped.
    """

    cos: torch.Tensor | None
    sin: torch.Tensor | None
    positions: torch.Tensor | None
    cache: Cache | None
    count: Keys | None
    fresh: bool
    by_token: bool
    seeds: tuple[torch.Tensor, ...] | None


class Layer:
    """One layer: its weights by role, and how they are used. The model owns the weights."""

    def __init__(self, model: "Transformer", number: int):
        self.config, self.parts, self.number = model.config, model.parts, number
        c, family = model.config, model.config.family
        prefix = f"{family.names.layer}.{number}."

        def linear(name, out, into):
            made = Weights(out, into, bias=family.bias, transposed=family.transposed)
            return _put(model, prefix + name, made)

        def norm(name):
            made = Weights(c.width, bias=family.norm == "layer_norm", filled=1.0)
            return _put(model, prefix + name, made)

        names, sizes = family.names, c.qkv_sizes
        self.norm1 = norm(names.norm1)
        sizes = sizes if len(names.qkv) == len(sizes) else (sum(sizes),)
        self.qkv = [linear(n, size, c.width) for n, size in zip(names.qkv, sizes, strict=True)]
        self.out = linear(names.out, c.width, c.heads * c.head_dim)
        self.norm2 = norm(names.norm2)
        self.up = [linear(name, c.mlp, c.width) for name in names.up]
        self.down = linear(names.down, c.width, c.mlp)

    def __call__(self, x, residual, context: Context):
        """Return what this layer adds to the stream, and the stream before that, [B, S, C] each.

        x, residual: the same two of the layer before; the residual of the first layer is None.
        """
        h, residual = normed(self.config, self.parts, self.norm1, x, residual)
        x = self._dropped(self._linear(self._attended(h, context), self.out), context, 2)
        h, residual = normed(self.config, self.parts, self.norm2, x, residual)
        return self._dropped(self._mlp(h), context, 3), residual

    def _attended(self, h, context):
        c, parts, (b, s, _) = self.config, self.parts, h.shape
        flat, cache = self._projected(h), context.cache
        q, k, v = (x.unflatten(-1, (-1, c.head_dim)) for x in flat)  # [B, S, H or K, D]
        if context.cos is not None and not context.by_token:
            q, k = parts.rotary(q, k, context.cos, context.sin)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if cache is not None and not context.by_token:
            cache.write(self.number, k, v, context.positions)
        if cache is None or context.fresh:
            seed = context.seeds and context.seeds[3 * self.number + 1]
            out = parts.attention(q, k, v, c.dropout if context.seeds else 0.0, seed)
        else:
            keys, values = cache.keys[self.number], cache.values[self.number]
            if context.by_token:
                angles = context.cos, context.sin
                out = parts.decode_token(q, k, v, keys, values, context.count, *angles)
            else:
                out = parts.decode_attention(q, keys, values, context.count)
        return out.transpose(1, 2).reshape(b, s, -1)

    def _projected(self, h):
        """Queries, keys and values, [B, S, heads * D] each."""
        c, parts = self.config, self.parts
        if len(self.qkv) == 1:
            return self._linear(h, self.qkv[0]).split(c.qkv_sizes, dim=-1)
        if parts.linears is None or torch.is_grad_enabled():
            return [self._linear(h, weights) for weights in self.qkv]
        return parts.linears(h, *zip(*((w.matrix, w.bias) for w in self.qkv), strict=True))

    def _mlp(self, h):
        parts, down = self.parts, self.down
        if len(self.up) == 2:
            if parts.swiglu_mlp is not None:
                return parts.swiglu_mlp(h, *(each.matrix for each in (*self.up, down)))
            return self._linear(parts.swiglu(*(self._linear(h, each) for each in self.up)), down)
        (up,) = self.up
        if parts.linear_gelu is not None:
            return self._linear(parts.linear_gelu(h, up.matrix, up.bias), down)
        return self._linear(parts.gelu(self._linear(h, up)), down)

    def _linear(self, x, weights):
        return self.parts.linear(x, weights.matrix, weights.bias)

    def _dropped(self, x, context, site):
        if context.seeds is None:
            return x
        return self.parts.dropout(x, self.config.dropout, context.seeds[3 * self.number + site])


def normed(config, parts, weights, x, residual):
    """The norm of x + residual and that sum; of x and x if residual is None."""
    if config.family.norm == "rms_norm":
        return parts.rms_norm(x, weights.weight, config.eps, residual)
    return parts.layer_norm(x, weights.weight, weights.bias, config.eps, residual)


class Transformer(nn.Module):
    """A network of a configuration, computed by the given parts, with weights drawn from a seed.

    The same configuration, seed, dtype and device give the same weights whatever the parts are.
    `dropout_seed` is an int64 scalar on the device: a training step changes it, and parts that
    take a seed draw from it.
    """

    def __init__(self, config: Config, parts: Parts, seed: int = 0):
        super().__init__()
        self.config, self.parts = config, parts
        names, norm = config.family.names, config.family.norm
        # By role, in a plain dictionary: as attributes they would have a second name each.
        self.roles = {"tokens": _put(self, names.tokens, Weights(config.vocabulary, config.width))}
        if not config.family.rotary:
            made = Weights(config.length, config.width)
            self.roles["positions"] = _put(self, names.positions, made)
        self.layers = [Layer(self, number) for number in range(config.layers)]
        made = Weights(config.width, bias=norm == "layer_norm", filled=1.0)
        self.roles["norm"] = _put(self, names.norm, made)
        head = _put(self, names.head, Weights(config.vocabulary, config.width))
        if config.tied:
            head.weight = self.roles["tokens"].weight
        self.roles["head"] = head
        self.make_buffers()
        self.draw(seed)

    def make_buffers(self) -> None:
        """Make the angles and the seed anew, in the dtype and on the device of the weights."""
        for name, angles in zip(("cos", "sin"), self._angles(), strict=True):
            angles = angles if angles is None else angles.to(self.device, self.dtype)
            self.register_buffer(name, angles, persistent=False)
        start = torch.zeros((), dtype=torch.int64, device=self.device)
        self.register_buffer("dropout_seed", start, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.roles["head"].weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.roles["head"].weight.dtype

    def _angles(self):
        config = self.config
        if not config.family.rotary:
            return None, None
        if self.device.type == "meta":
            return torch.empty(2, config.length, config.head_dim // 2, device="meta")
        return table(config, config.length)

    @torch.no_grad()
    def draw(self, seed: int) -> None:
        """Fill the weights anew: normal, smaller where a layer adds to the stream (GPT-2)."""
        if self.device.type == "meta":
            return
        generator = torch.Generator(self.device).manual_seed(seed)
        adding = {id(weights) for layer in self.layers for weights in (layer.out, layer.down)}
        for weights in self.modules():
            if isinstance(weights, Weights) and weights.filled is None:
                share = (2 * self.config.layers) ** -0.5 if id(weights) in adding else 1.0
                weights.weight.normal_(0, DEVIATION * share, generator=generator)

    def forward(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Return logits [B, S, V]; with targets the mean loss; with a cache logits [B, V].

        Args:
            ids: int64 [B, S].
            targets: int64 [B, S], the token after each; -100 does not count.
            cache: keys and values that were read before. Those of ids are added, and the logits
                are those after the last token. Nothing is dropped with a cache.

        Raises ValueError if there are more tokens than the model or the cache has positions.
        """
        h, head = self.hidden(ids, cache), self.roles["head"].matrix
        if targets is None:
            return self.parts.linear(h, head, None)
        return self.parts.loss(h.flatten(0, 1), head, targets.flatten())

    def hidden(self, ids: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        """Return what the head is multiplied with: [B, S, C]; with a cache [B, C]."""
        context = self._context(ids, cache)
        embedded = self.parts.embedding(ids, self.roles["tokens"].weight)
        if "positions" in self.roles:
            weight, positions = self.roles["positions"].weight, context.positions
            # Without a cache they begin at zero: a view, whose gradient needs no scattered sum.
            first = weight[: ids.shape[1]] if positions is None else weight[positions]
            embedded = embedded + first
        if context.seeds is not None:
            embedded = self.parts.dropout(embedded, self.config.dropout, context.seeds[0])
        x, residual = embedded, None
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        if cache is not None:
            cache.advance(ids.shape[1])
            x, residual = x[:, -1], residual[:, -1]
        h, _ = normed(self.config, self.parts, self.roles["norm"], x, residual)
        return h

    def _context(self, ids, cache):
        config, (b, s) = self.config, ids.shape
        start = 0 if cache is None else cache.used
        if cache is not None:
            cache.require_room(b, s)
        if start + s > config.length:
            raise ValueError(
                f"ids: {s} tokens after {start}, and the model has {config.length} positions;"
                " shorten the text"
            )
        positions, count, cos, sin = None, None, self.cos, self.sin
        by_token = start > 0 and s == 1 and self.parts.decode_token is not None
        if cache is not None:
            count = Keys((cache.position + s).expand(b), s, cache.length)
        if cache is not None and not (by_token and config.family.rotary):
            positions = cache.position + torch.arange(s, device=ids.device)
        if cos is not None and not by_token:
            cos, sin = (x[:s] if cache is None else x[positions] for x in (cos, sin))
        seeds = None
        if self.training and config.dropout and cache is None:
            sites = 3 * config.layers + 1
            seeds = self.dropout_seed * sites + torch.arange(sites, device=ids.device)
            seeds = seeds.unbind()
        return Context(cos, sin, positions, cache, count, start == 0, by_token, seeds)

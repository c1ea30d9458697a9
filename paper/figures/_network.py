"""Names of stacks and parts, their colours and widths, for all figures on a network."""

import re

import _figure

# The order in which a step calls its parts; the others follow by name.
PARTS = (
    "embedding", "rms_norm", "layer_norm", "linear", "linear_gelu", "rotary", "attention",
    "swiglu", "swiglu_mlp", "gelu", "loss", "clip", "optimizer", "other",
)  # fmt: skip
# PyTorch's stacks with one part of ours.
ONE_PART = re.compile(r"_with_")
# One colour a part: matplotlib's tab20 has enough, and neighbours differ in lightness.
COLOURS = _figure.plt.get_cmap("tab20").colors


def whole(names):
    """The stacks that are no other one with a part of ours, ours first."""
    return _figure.in_order(name for name in names if not ONE_PART.search(name))


def parts_in_order(names):
    """Parts in the order of a step."""
    return sorted(set(names), key=lambda name: (PARTS.index(name) if name in PARTS else 99, name))


def colour(part):
    """The colour of a part, in every figure the same."""
    return COLOURS[PARTS.index(part) % len(COLOURS)] if part in PARTS else _figure.DARK


def about(rows):
    """The network of some rows in words: llama-1b, 4 x 4096 tokens, bfloat16."""
    first = rows.iloc[0]
    return f"{first['preset']}, {first['batch']} x {first['length']} tokens, {first['dtype']}"


def about_times(rows):
    """As `about`, with the GPU whose times they are."""
    gpus = [name for name in rows["gpu"].unique() if isinstance(name, str)]
    return ", ".join([about(rows), *gpus])

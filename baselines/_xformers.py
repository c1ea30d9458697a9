"""Layout, mask and reason of a refusal, shared by the files of xFormers' operators."""

import re

from xformers.ops import LowerTriangularMask, memory_efficient_attention


def attention(q, k, v, causal, op):
    """op: (forward, backward) operators of `xformers.ops.fmha`; None leaves the choice to it."""
    # The library wants [batch, position, head, dimension]: views, nothing is copied.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = LowerTriangularMask() if causal else None
    try:
        out = memory_efficient_attention(q, k, v, attn_bias=mask, op=op)
    except (NotImplementedError, ValueError) as error:
        raise type(error)(_why(str(error))) from error
    return out.transpose(1, 2)


def _why(message):
    """A refusal as one line: what the library says of each operator, without the inputs."""
    found = re.findall(r"`(\S+)` is not supported because:\n((?:    .*(?:\n|$))+)", message)
    said = (f"{name}: {', '.join(map(str.strip, text.splitlines()))}" for name, text in found)
    return "; ".join(said) or message

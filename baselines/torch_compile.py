"""PyTorch, torch.compile with static shapes in its default mode."""

import functools

from baselines import _torch_formulas as formulas
from baselines._torch_compiler import compiled

LIBRARY = "torch"
IN_PLACE = ("adamw",)
# A user expands the mask of blocks once.
PREPARES = {"block_sparse_attention": {"block_mask": "_seen_pairs"}}
# The compiler times candidates of element-wise kernels and of some reductions at the first call
# with a shape (torch/_inductor/runtime/triton_heuristics.py). Inductor's cache keeps the choices.
AUTOTUNES = "all"

scale = compiled(formulas.scale)
add = compiled(formulas.add)
mul = compiled(formulas.mul)
maximum = compiled(formulas.maximum)
minimum = compiled(formulas.minimum)
dot = compiled(formulas.dot)
relu = compiled(formulas.relu)
leaky_relu = compiled(formulas.leaky_relu)
gelu = compiled(formulas.gelu)
tanh = compiled(formulas.tanh)
cosh = compiled(formulas.cosh)
softmax = compiled(formulas.softmax)
layer_norm = compiled(formulas.layer_norm)
rms_norm = compiled(formulas.rms_norm)
matmul = compiled(formulas.matmul)
attention = compiled(formulas.attention)
# A program for each length would take hours to compile.
attention_varlen = functools.partial(
    formulas.attention_varlen, attend=compiled(formulas.attention, dynamic=True)
)
decode_attention = compiled(formulas.decode_attention)
swiglu = compiled(formulas.swiglu)
geglu = compiled(formulas.geglu)
rotary = compiled(formulas.rotary)
cross_entropy = compiled(formulas.cross_entropy)
linear_cross_entropy = compiled(formulas.linear_cross_entropy)
transpose = compiled(formulas.transpose)
randint = compiled(formulas.randint)
dropout = compiled(formulas.dropout)
bucketize = compiled(formulas.bucketize)
embedding = compiled(formulas.embedding)
linear = compiled(formulas.linear)
adamw = compiled(formulas.adamw)
_seen_pairs = formulas.seen_pairs
_attend_seen = compiled(formulas.block_sparse_attention)


def block_sparse_attention(q, k, v, block_mask, block_size, causal=False):
    return _attend_seen(q, k, v, block_mask)

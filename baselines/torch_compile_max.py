"""PyTorch, torch.compile with static shapes, told to try what it has and keep the fastest.

The mode without CUDA graphs: the harness captures the graphs of all implementations itself.
"""

import torch

from baselines import _torch_formulas as formulas
from baselines._torch_compiler import compiled

LIBRARY = "torch"
IN_PLACE = ("adamw",)
MODE = "max-autotune-no-cudagraphs"
# The compiler times candidates at the first call with a shape (torch/_inductor/select_algorithm.py
# and runtime/triton_heuristics.py). Inductor's cache keeps the choices.
AUTOTUNES = "all"
# A step of a list has kernels that take all of its tensors. With the 148 of GPT-2 the candidates of
# each kernel compiled for over nine minutes a shape (docs/lab/adamw.md).
MOST_TENSORS = 16

if not torch.cuda.is_available():
    raise ImportError("max-autotune times kernels on a GPU to choose among them, and there is none")

scale = compiled(formulas.scale, MODE)
add = compiled(formulas.add, MODE)
mul = compiled(formulas.mul, MODE)
maximum = compiled(formulas.maximum, MODE)
minimum = compiled(formulas.minimum, MODE)
dot = compiled(formulas.dot, MODE)
relu = compiled(formulas.relu, MODE)
leaky_relu = compiled(formulas.leaky_relu, MODE)
gelu = compiled(formulas.gelu, MODE)
tanh = compiled(formulas.tanh, MODE)
cosh = compiled(formulas.cosh, MODE)
softmax = compiled(formulas.softmax, MODE)
layer_norm = compiled(formulas.layer_norm, MODE)
rms_norm = compiled(formulas.rms_norm, MODE)
matmul = compiled(formulas.matmul, MODE)
decode_attention = compiled(formulas.decode_attention, MODE)
swiglu = compiled(formulas.swiglu, MODE)
geglu = compiled(formulas.geglu, MODE)
rotary = compiled(formulas.rotary, MODE)
cross_entropy = compiled(formulas.cross_entropy, MODE)
linear_cross_entropy = compiled(formulas.linear_cross_entropy, MODE)
transpose = compiled(formulas.transpose, MODE)
randint = compiled(formulas.randint, MODE)
dropout = compiled(formulas.dropout, MODE)
bucketize = compiled(formulas.bucketize, MODE)
embedding = compiled(formulas.embedding, MODE)
linear = compiled(formulas.linear, MODE)
_adamw = compiled(formulas.adamw, MODE)
_attention = compiled(formulas.attention, MODE)


def adamw(params, **given):
    if isinstance(params, list) and len(params) > MOST_TENSORS:
        raise NotImplementedError(f"{len(params)} tensors compile for many minutes in this mode")
    return _adamw(params=params, **given)


def attention(q, k, v, **options):
    # Without a mask the compiler finds PyTorch's attention in the formula. Otherwise the scores lie
    # in memory, and the products around them are tried for each shape. On an H200 the trials of
    # half a sweep had not ended after eight minutes, for 4 to 16 times the best rival's time
    # (docs/lab/attention.md).
    if any(value is not None and value is not False for value in options.values()):
        raise NotImplementedError("scores in memory are tuned for many minutes in this mode")
    return _attention(q=q, k=k, v=v)


def attention_varlen(*given, **options):
    # As above. One program serves all lengths, and yet its products are tried anew for each kind of
    # mask: they had not ended after 390 s.
    raise NotImplementedError("packed sequences are tuned for many minutes in this mode")


def block_sparse_attention(*given, **options):
    # As above. Its trials took up to 59 s a cell, 11 minutes for the sweep
    # (docs/lab/block_sparse_attention.md), and then each edge case is compiled too.
    raise NotImplementedError("masks of blocks are tuned for many minutes in this mode")

"""PyTorch, eager mode."""

from baselines import _torch_formulas as formulas

LIBRARY = "torch"
IN_PLACE = ("adamw",)
# A user expands the mask of blocks once.
PREPARES = {"block_sparse_attention": {"block_mask": "_seen_pairs"}}
# aten/src/ATen/AccumulateType.h; of products, the notes on numerical accuracy in its documentation.
ACCUMULATES = {
    "softmax": "float32",
    "layer_norm": "float32",
    "rms_norm": "float32",
    "cross_entropy": "float32",
    "matmul": "float32, split sums in the dtype",
    "linear": "float32, split sums in the dtype",
}

scale = formulas.scale
add = formulas.add
mul = formulas.mul
maximum = formulas.maximum
minimum = formulas.minimum
dot = formulas.dot
relu = formulas.relu
leaky_relu = formulas.leaky_relu
gelu = formulas.gelu
tanh = formulas.tanh
cosh = formulas.cosh
softmax = formulas.softmax
layer_norm = formulas.layer_norm
rms_norm = formulas.rms_norm
matmul = formulas.matmul
attention = formulas.attention
attention_varlen = formulas.attention_varlen
decode_attention = formulas.decode_attention
swiglu = formulas.swiglu
geglu = formulas.geglu
rotary = formulas.rotary
cross_entropy = formulas.cross_entropy
linear_cross_entropy = formulas.linear_cross_entropy
transpose = formulas.transpose
randint = formulas.randint
dropout = formulas.dropout
bucketize = formulas.bucketize
embedding = formulas.embedding
linear = formulas.linear
adamw = formulas.adamw
_seen_pairs = formulas.seen_pairs


def block_sparse_attention(q, k, v, block_mask, block_size, causal=False):
    return formulas.block_sparse_attention(q, k, v, block_mask)

"""PyTorch, eager mode."""

from baselines import _torch_formulas as formulas

LIBRARY = "torch"

scale = formulas.scale
add = formulas.add
mul = formulas.mul
maximum = formulas.maximum
minimum = formulas.minimum
dot = formulas.dot
softmax = formulas.softmax
layer_norm = formulas.layer_norm
matmul = formulas.matmul
attention = formulas.attention

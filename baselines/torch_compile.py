"""PyTorch, torch.compile with static shapes in its default mode."""

from baselines import _torch_formulas as formulas
from baselines._torch_compiler import compiled

LIBRARY = "torch"

scale = compiled(formulas.scale)
add = compiled(formulas.add)
mul = compiled(formulas.mul)
maximum = compiled(formulas.maximum)
minimum = compiled(formulas.minimum)
dot = compiled(formulas.dot)
softmax = compiled(formulas.softmax)
layer_norm = compiled(formulas.layer_norm)
matmul = compiled(formulas.matmul)
attention = compiled(formulas.attention)

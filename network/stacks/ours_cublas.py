"""The kernels of this project, with PyTorch's products (cuBLAS) in place of its own."""

from network.stacks import ours

PRODUCTS = ("linear", "linear_gelu", "swiglu_mlp")
OPTIMIZER = ours.OPTIMIZER
PARTS = {name: part for name, part in ours.PARTS.items() if name not in PRODUCTS}

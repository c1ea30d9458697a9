"""The kernels of this project, with PyTorch's products (cuBLAS) in place of its own."""

from network.parts import JOINED
from network.stacks import ours

PRODUCTS = ("linear", *(name for name, those in JOINED.items() if "linear" in those))
OPTIMIZER = ours.OPTIMIZER
PARTS = {name: part for name, part in ours.PARTS.items() if name not in PRODUCTS}

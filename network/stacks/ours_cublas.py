"""The kernels of this project, with PyTorch's products (cuBLAS) in place of its own."""

from network.parts import JOINED
from network.stacks import ours, torch_eager
from network.stacks._linears import with_product

PRODUCTS = ("linear", *(name for name, those in JOINED.items() if "linear" in those))
OPTIMIZER = ours.OPTIMIZER
PARTS = {name: part for name, part in ours.PARTS.items() if name not in PRODUCTS}
PARTS |= {"linears": with_product(torch_eager.linear)}

"""PyTorch's parts, and the whole network compiled by torch.compile for its shapes."""

COMPILE = True

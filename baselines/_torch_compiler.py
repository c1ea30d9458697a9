"""torch.compile as the study uses it: a program for each shape, and whole functions or none."""

import torch
import torch._functorch.config

# Past these numbers of shapes a function would run eager or, told to be whole, fail.
torch._dynamo.config.recompile_limit = 1 << 16
torch._dynamo.config.accumulated_recompile_limit = 1 << 16
# Donated buffers are freed by a backward pass, which then could not be timed a second time.
torch._functorch.config.donated_buffer = False


def compiled(function, mode=None):
    return torch.compile(function, dynamic=False, fullgraph=True, mode=mode)

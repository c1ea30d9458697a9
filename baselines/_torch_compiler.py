"""torch.compile as the study uses it: whole functions or none, a program for each shape."""

import torch
import torch._functorch.config

# Past these numbers of shapes a function would run eager or, told to be whole, fail.
torch._dynamo.config.recompile_limit = 1 << 16
torch._dynamo.config.accumulated_recompile_limit = 1 << 16
# Donated buffers are freed by a backward pass, which then could not be timed a second time.
torch._functorch.config.donated_buffer = False


def compiled(function, mode=None, dynamic=False):
    """dynamic: one program for all shapes, where a call has parts of many lengths."""
    return torch.compile(function, dynamic=dynamic, fullgraph=True, mode=mode)

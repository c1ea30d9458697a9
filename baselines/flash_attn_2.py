"""flash-attn 2 (Dao, 2024): its CUDA attention, and the Triton kernels that the package carries."""

from flash_attn import flash_attn_func

LIBRARY = "flash-attn"


def attention(q, k, v, causal=False):
    # The library wants [batch, position, head, dimension]: views, nothing is copied.
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, causal=causal).transpose(1, 2)


# The modules of the Triton kernels are imported late: one asks for the GPU, the other for parts
# of Triton that Triton 3 has not, and neither should take the attention along.
def layer_norm(x, weight, bias, eps):
    from flash_attn.ops.triton.layer_norm import layer_norm_fn

    return layer_norm_fn(x, weight, bias, eps=eps)


def matmul(a, b, bias=None, activation="none"):
    from flash_attn.ops.triton.linear import triton_linear_act

    # It takes the weight as a linear layer stores it, and calls no activation "id".
    return triton_linear_act(a, b.T, bias, "id" if activation == "none" else activation)

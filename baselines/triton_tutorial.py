"""First kernels in Triton, written by us as its tutorials teach them: what a beginner reaches.

The ideas are those of Triton's tutorials 01 to 04: vector addition, fused softmax, matrix
multiplication, low-memory dropout. The naive dot product takes two launches. Nothing is tuned, no
epilogue is fused, and one program computes a whole row of any length.
"""

import torch
import triton
import triton.language as tl

LIBRARY = "triton"
ACCUMULATES = {"dot": "float32", "softmax": "float32", "matmul": "float32"}
BLOCK = 1024
ROW_WARPS = 8


@triton.jit
def _add_kernel(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)
    y = tl.load(y_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x + y, mask=mask)


def add(x, y):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    _add_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), BLOCK=BLOCK)
    return out


@triton.jit
def _mul_kernel(x_ptr, y_ptr, out_ptr, N, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)
    y = tl.load(y_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x * y, mask=mask)


@triton.jit
def _scale_kernel(x_ptr, out_ptr, N, alpha, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask)
    tl.store(out_ptr + offs, x * alpha, mask=mask)


class _Mul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return _product(x, y)

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        return _product(dy, y), _product(dy, x)


def _product(x, y):
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    _mul_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), BLOCK=BLOCK)
    return out


def mul(x, y):
    return _Mul.apply(x, y)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return _scaled(x, alpha)

    @staticmethod
    def backward(ctx, dy):
        return _scaled(dy, ctx.alpha), None


def _scaled(x, alpha):
    x = x.contiguous()
    out = torch.empty_like(x)
    _scale_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), alpha, BLOCK=BLOCK)
    return out


def scale(x, alpha):
    return _Scale.apply(x, alpha)


@triton.jit
def _partial_dot_kernel(x_ptr, y_ptr, partial_ptr, N, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    offs = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(partial_ptr + program, tl.sum(x * y, 0))


@triton.jit
def _sum_kernel(partial_ptr, out_ptr, N, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + offs, mask=offs < N, other=0.0)
    tl.store(out_ptr, tl.sum(total, 0))


def dot(x, y):
    x, y = x.contiguous(), y.contiguous()
    programs = triton.cdiv(x.numel(), BLOCK)
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    out = torch.empty((), dtype=x.dtype, device=x.device)
    _partial_dot_kernel[(programs,)](x, y, partial, x.numel(), BLOCK=BLOCK)
    _sum_kernel[(1,)](partial, out, programs, BLOCK=BLOCK)
    return out


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + start + offs, mask=offs < N, other=-float("inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + start + offs, weights / tl.sum(weights, 0), mask=offs < N)


@triton.jit
def _softmax_backward_kernel(y_ptr, dy_ptr, dx_ptr, N, BLOCK_N: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK_N)
    y = tl.load(y_ptr + start + offs, mask=offs < N, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + start + offs, mask=offs < N, other=0.0).to(tl.float32)
    tl.store(dx_ptr + start + offs, y * (dy - tl.sum(y * dy, 0)), mask=offs < N)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        m, n = x.shape
        y = torch.empty((m, n), dtype=x.dtype, device=x.device)
        block = triton.next_power_of_2(n)
        if y.numel():
            _softmax_kernel[(m,)](x, y, n, BLOCK_N=block, num_warps=ROW_WARPS)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        m, n = y.shape
        dx = torch.empty_like(y)
        block = triton.next_power_of_2(n)
        if dx.numel():
            _softmax_backward_kernel[(m,)](
                y, dy.contiguous(), dx, n, BLOCK_N=block, num_warps=ROW_WARPS
            )
        return dx


def softmax(x, scale=1.0, causal=False, mask=None):
    if scale != 1.0 or causal or mask is not None:
        raise ValueError("the tutorial form has no scale, no diagonal and no mask")
    return _Softmax.apply(x)


@triton.jit
def _matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None].to(tl.int64) * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None].to(tl.int64) * stride_bk + offs_n[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        left = K - start
        a = tl.load(a_ptrs, mask=(offs_m[:, None] < M) & (offs_k[None, :] < left), other=0.0)
        b = tl.load(b_ptrs, mask=(offs_k[:, None] < left) & (offs_n[None, :] < N), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + offs_m[:, None].to(tl.int64) * stride_cm + offs_n[None, :]
    tl.store(c_ptrs, total, mask=(offs_m[:, None] < M) & (offs_n[None, :] < N))


def matmul(a, b, bias=None, activation="none", residual=None, up=None, **others):
    if a.dim() > 2 or residual is not None or up is not None or others:
        raise ValueError(
            "the tutorial form has no batches, residual, scale, gate and pre-activation"
        )
    if bias is not None or activation != "none":
        raise ValueError("the tutorial form has no bias and no activation")
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(m, 64), triton.cdiv(n, 64))
    _matmul_kernel[grid](
        a, b, c, m, n, k, *a.stride(), *b.stride(), c.stride(0),
        BLOCK_M=64, BLOCK_N=64, BLOCK_K=32,
    )  # fmt: skip
    return c


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    x = tl.load(x_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :], mask=mask)
    # The elements are written where they belong, not in the order of memory.
    tl.store(out_ptr + offs_n[None, :].to(tl.int64) * M + offs_m[:, None], x, mask=mask)


def transpose(x):
    x = x.contiguous()
    m, n = x.shape
    out = torch.empty((n, m), dtype=x.dtype, device=x.device)
    if out.numel():
        grid = (triton.cdiv(m, 32), triton.cdiv(n, 32))
        _transpose_kernel[grid](x, out, m, n, BLOCK_M=32, BLOCK_N=32)
    return out


@triton.jit
def _dropout_kernel(x_ptr, out_ptr, N, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < N).to(tl.float32)
    keep = tl.rand(seed, offs) > p
    tl.store(out_ptr + offs, tl.where(keep, x / (1 - p), 0.0), mask=offs < N)


def _seeded_dropout(x, p, seed):
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _dropout_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), p, seed, BLOCK=BLOCK)
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p, seed):
        ctx.p, ctx.seed = p, seed
        return _seeded_dropout(x, p, seed)

    @staticmethod
    def backward(ctx, dy):
        return _seeded_dropout(dy, ctx.p, ctx.seed), None, None


def dropout(x, p, seed):
    return _Dropout.apply(x, p, seed)

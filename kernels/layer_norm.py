"""Layer normalization over the last dimension, forward and backward.

forward: y = w (x - mean) r + b with r = 1 / sqrt(var + eps). backward, with h = (x - mean) r and
g = w dy: dx = r (g - mean g - h mean(g h)), dw = sum of dy h over the rows, db = sum of dy.

Bytes: forward reads x and writes y; backward reads x and dy and writes dx; the weights are small
beside them. FLOPs: about 8 and 12 an element, so memory decides. The forward pass keeps a row in
registers; longer rows are walked in blocks whose means and squares run along lane by lane by the
rule of Welford (1962) and meet by that of Chan, Golub and LeVeque (1979). In the backward pass a
fixed number of programs stride over the rows, read x and dy once and keep their share of dw and
db in registers; a second kernel adds the shares in a fixed order, so the result is the same in
each run. The two-stage sum follows the layer norm tutorial of Triton, without its locks. Rows too
long for that take two passes: dx row by row, then dw and db column by column.
"""

import torch
import triton
import triton.language as tl

from kernels._cases import ROW_EDGE, ROW_SWEEP
from kernels._checks import require, shaped
from kernels._contract import Cost, Op, Tensor, case
from kernels._device import sm_count
from kernels._layout import rows_of
from kernels._rows import LOOP_CONFIGS, ROW_CONFIGS, suits_row
from kernels._tile import load_f32, load_f32_hinted, store_as
from kernels._tuned import Configs


def layer_norm_reference(x, weight, bias, eps):
    centred = x - x.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    return centred / torch.sqrt(variance + eps) * weight + bias


def _cost(a_case, direction, itemsize):
    elements, n = a_case["M"] * a_case["N"], a_case["N"]
    if direction == "forward":
        return Cost((elements + 2 * n) * itemsize, elements * itemsize, 8 * elements)
    return Cost((2 * elements + n) * itemsize, (elements + 2 * n) * itemsize, 12 * elements)


LAYER_NORM = Op(
    "layer_norm",
    layer_norm_reference,
    {"x": Tensor("M N"), "weight": Tensor("N", tame=True), "bias": Tensor("N", tame=True)},
    _cost,
    edge=(
        *ROW_EDGE,
        case(M=300, N=64),
        # Longer than a row in registers, forward and backward.
        case(M=2, N=16500, dtypes=("float32",)),
        case(M=2, N=8300, dtypes=("float16", "bfloat16")),
    ),
    sweep=ROW_SWEEP,
    passes=("forward", "backward"),
    params={"eps": 1e-5},
)

# Longest row, in elements, that one program keeps in its registers; forward by itemsize: a longer
# row of 16-bit items is faster in blocks, since its weights are as many bytes as the row itself.
FORWARD_ROW_LIMIT = {2: 8192, 4: 16384}
BACKWARD_ROW_LIMIT = 8192
# (longest row, rows of a program, warps)
FORWARD_TILES = (
    (128, 8, 4),
    (256, 4, 4),
    (512, 2, 4),
    (1024, 1, 2),
    (8192, 1, 4),
    (16384, 1, 16),
)
BACKWARD_TILES = ((256, 8, 4), (512, 4, 4), (1024, 2, 4), (4096, 1, 4), (BACKWARD_ROW_LIMIT, 1, 8))


def _choose_forward_row(n, itemsize):
    rows, warps = next((rows, warps) for limit, rows, warps in FORWARD_TILES if n <= limit)
    return {"BLOCK_M": rows, "num_warps": warps}


def _choose_backward_row(n, itemsize):
    rows, warps = next((rows, warps) for limit, rows, warps in BACKWARD_TILES if n <= limit)
    return {"BLOCK_M": rows, "num_warps": warps}


def _choose_forward_loop(n, itemsize):
    block = 2048 if n < 16384 else 4096 if n < 32768 else 8192
    return {"BLOCK_N": block, "num_warps": block // 512}


def _choose_dx(n, itemsize):
    return {"BLOCK_N": 4096 if n <= 16384 else 16384, "num_warps": 16}


def _choose_columns(n, itemsize):
    return {"BLOCK_M": 32, "BLOCK_N": 128, "num_warps": 4}


def _choose_sum(n, itemsize):
    return {"BLOCK_P": 32, "BLOCK_N": 32, "num_warps": 4}


COLUMN_CONFIGS = tuple(
    {"BLOCK_M": rows, "BLOCK_N": columns, "num_warps": warps}
    for rows in (16, 32)
    for columns in (128, 256)
    for warps in (4, 8)
)


@triton.jit
def _forward_row_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    stride_xm, stride_ym, M, N, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    rows = offs_m[:, None].to(tl.int64)
    mask_n = offs_n < N
    mask = (offs_m[:, None] < M) & mask_n[None, :]
    x = load_f32(x_ptr + rows * stride_xm + offs_n[None, :], mask)
    weight = load_f32_hinted(weight_ptr + offs_n, mask_n, "evict_last")
    bias = load_f32_hinted(bias_ptr + offs_n, mask_n, "evict_last")
    mean = tl.sum(x, 1) / N
    centred = tl.where(mask, x - mean[:, None], 0.0)
    # What rounding took from the mean would be a deviation in a row that hardly varies.
    lost = tl.sum(centred, 1) / N
    variance = tl.sum(centred * centred, 1) / N - lost * lost
    rstd = tl.rsqrt(variance + tl.cast(eps, tl.float32))
    y = (centred - lost[:, None]) * rstd[:, None] * weight[None, :] + bias[None, :]
    store_as(y_ptr + rows * stride_ym + offs_n[None, :], y, mask)
    tl.store(mean_ptr + offs_m, mean + lost, mask=offs_m < M)
    tl.store(rstd_ptr + offs_m, rstd, mask=offs_m < M)


@triton.jit
def _forward_loop_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    stride_xm, stride_ym, N, eps,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    y_ptr += row * stride_ym
    offs_n = tl.arange(0, BLOCK_N)
    # A mean and a sum of squares for each lane; the lanes meet once, after the walk.
    lane_mean = tl.zeros((BLOCK_N,), tl.float32)
    lane_squares = tl.zeros((BLOCK_N,), tl.float32)
    count = 0.0
    for start in range(0, N, BLOCK_N):
        mask = start + offs_n < N
        x = load_f32_hinted(x_ptr + start + offs_n, mask, "evict_last")
        count += 1.0
        delta = tl.where(mask, x - lane_mean, 0.0)
        lane_mean += delta / count
        lane_squares += delta * (x - lane_mean)
    lane_count = (N - offs_n + BLOCK_N - 1) // BLOCK_N
    mean = tl.sum(lane_mean * lane_count, 0) / N
    mean += tl.sum((lane_mean - mean) * lane_count, 0) / N
    apart = lane_mean - mean
    squares = tl.sum(lane_squares + apart * apart * lane_count, 0)
    rstd = tl.rsqrt(squares / N + tl.cast(eps, tl.float32))
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        mask = offs < N
        x = load_f32_hinted(x_ptr + offs, mask, "evict_first")
        weight = load_f32(weight_ptr + offs, mask)
        bias = load_f32(bias_ptr + offs, mask)
        y = (x - mean) * rstd * weight + bias
        store_as(y_ptr + offs, y, mask)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward_row_kernel(
    x_ptr, weight_ptr, dy_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_part_ptr, db_part_ptr,
    stride_xm, stride_dym, stride_dxm, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    weight = load_f32(weight_ptr + offs_n, mask_n)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(pid * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        rows = offs_m[:, None].to(tl.int64)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_n[None, :]
        x = load_f32_hinted(x_ptr + rows * stride_xm + offs_n[None, :], mask, "evict_first")
        dy = load_f32_hinted(dy_ptr + rows * stride_dym + offs_n[None, :], mask, "evict_first")
        mean = tl.load(mean_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        hat = tl.where(mask, (x - mean) * rstd, 0.0)
        g = weight * dy
        along = tl.sum(g * hat, 1)[:, None] / N
        level = tl.sum(g, 1)[:, None] / N
        dx = rstd * (g - level - hat * along)
        tl.store(dx_ptr + rows * stride_dxm + offs_n[None, :], dx, mask)
        dw += dy * hat
        db += dy
    tl.store(dw_part_ptr + pid * N + offs_n, tl.sum(dw, 0), mask=mask_n)
    tl.store(db_part_ptr + pid * N + offs_n, tl.sum(db, 0), mask=mask_n)


@triton.jit
def _backward_dx_kernel(
    x_ptr, weight_ptr, dy_ptr, mean_ptr, rstd_ptr, dx_ptr,
    stride_xm, stride_dym, stride_dxm, N,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    dy_ptr += row * stride_dym
    dx_ptr += row * stride_dxm
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    offs_n = tl.arange(0, BLOCK_N)
    along = tl.zeros((BLOCK_N,), tl.float32)
    level = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        mask = offs < N
        x = load_f32_hinted(x_ptr + offs, mask, "evict_last")
        dy = load_f32_hinted(dy_ptr + offs, mask, "evict_last")
        weight = load_f32(weight_ptr + offs, mask)
        g = weight * dy
        along += g * (x - mean) * rstd
        level += g
    row_along = tl.sum(along, 0) / N
    row_level = tl.sum(level, 0) / N
    for start in range(0, N, BLOCK_N):
        offs = start + offs_n
        mask = offs < N
        x = load_f32_hinted(x_ptr + offs, mask, "evict_first")
        dy = load_f32_hinted(dy_ptr + offs, mask, "evict_first")
        weight = load_f32(weight_ptr + offs, mask)
        hat = (x - mean) * rstd
        dx = rstd * (weight * dy - row_level - hat * row_along)
        store_as(dx_ptr + offs, dx, mask)


@triton.jit
def _backward_columns_kernel(
    x_ptr, dy_ptr, mean_ptr, rstd_ptr, dw_part_ptr, db_part_ptr,
    stride_xm, stride_dym, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(part * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        offs_m = start + tl.arange(0, BLOCK_M)
        rows = offs_m[:, None].to(tl.int64)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_n[None, :]
        x = load_f32(x_ptr + rows * stride_xm + offs_n[None, :], mask)
        dy = load_f32(dy_ptr + rows * stride_dym + offs_n[None, :], mask)
        mean = tl.load(mean_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        dw += dy * (x - mean) * rstd
        db += dy
    tl.store(dw_part_ptr + part * N + offs_n, tl.sum(dw, 0), mask=mask_n)
    tl.store(db_part_ptr + part * N + offs_n, tl.sum(db, 0), mask=mask_n)


@triton.jit
def _sum_parts_kernel(
    dw_part_ptr, db_part_ptr, dw_ptr, db_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    dw = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, P, BLOCK_P):
        offs_p = start + tl.arange(0, BLOCK_P)
        mask = (offs_p[:, None] < P) & mask_n[None, :]
        offs = offs_p[:, None] * N + offs_n[None, :]
        dw += tl.load(dw_part_ptr + offs, mask=mask, other=0.0)
        db += tl.load(db_part_ptr + offs, mask=mask, other=0.0)
    store_as(dw_ptr + offs_n, tl.sum(dw, 0), mask_n)
    store_as(db_ptr + offs_n, tl.sum(db, 0), mask_n)


FORWARD_ROW = Configs(_forward_row_kernel, ROW_CONFIGS, _choose_forward_row, suits_row(64))
FORWARD_LOOP = Configs(_forward_loop_kernel, LOOP_CONFIGS, _choose_forward_loop)
BACKWARD_ROW = Configs(_backward_row_kernel, ROW_CONFIGS, _choose_backward_row, suits_row(32))
BACKWARD_DX = Configs(_backward_dx_kernel, LOOP_CONFIGS, _choose_dx)
BACKWARD_COLUMNS = Configs(_backward_columns_kernel, COLUMN_CONFIGS, _choose_columns)
SUM_PARTS = Configs(_sum_parts_kernel, (_choose_sum(0, 4),), _choose_sum)


def layer_norm_fwd(x, weight, bias, eps):
    """x: [M, N], contiguous in N. Returns y, contiguous, and mean, rstd: [M] float32."""
    m, n = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    mean = torch.empty(m, dtype=torch.float32, device=x.device)
    rstd = torch.empty(m, dtype=torch.float32, device=x.device)
    if y.numel() == 0:
        return y, mean, rstd
    arguments = {
        "x_ptr": x,
        "weight_ptr": weight,
        "bias_ptr": bias,
        "y_ptr": y,
        "mean_ptr": mean,
        "rstd_ptr": rstd,
        "stride_xm": x.stride(0),
        "stride_ym": y.stride(0),
        "N": n,
        "eps": eps,
    }
    key = {"n": n, "itemsize": x.element_size()}
    if n > FORWARD_ROW_LIMIT[x.element_size()]:
        config = FORWARD_LOOP.pick(x.device, **key)
        _forward_loop_kernel[(m,)](**arguments, **config)
    else:
        config = FORWARD_ROW.pick(x.device, **key)
        _forward_row_kernel[(triton.cdiv(m, config["BLOCK_M"]),)](
            **arguments, M=m, BLOCK_N=triton.next_power_of_2(n), **config
        )
    return y, mean, rstd


def layer_norm_bwd(x, weight, mean, rstd, dy):
    """x, dy: [M, N], contiguous in N; mean, rstd: [M]. Returns dx [M, N], dw [N], db [N]."""
    m, n = x.shape
    dx = torch.empty((m, n), dtype=x.dtype, device=x.device)
    dw, db = torch.empty_like(weight), torch.empty_like(weight)
    if dx.numel() == 0:
        return dx, dw.zero_(), db.zero_()
    tensors = {"x_ptr": x, "dy_ptr": dy, "mean_ptr": mean, "rstd_ptr": rstd}
    strides = {"stride_xm": x.stride(0), "stride_dym": dy.stride(0)}
    by_rows = n <= BACKWARD_ROW_LIMIT
    key = {"n": n, "itemsize": x.element_size()}
    config = (BACKWARD_ROW if by_rows else BACKWARD_COLUMNS).pick(x.device, **key)
    tiles = triton.cdiv(m, config["BLOCK_M"])
    parts = min(tiles, 2 * sm_count(x.device) if by_rows else 16)
    dw_part, db_part = torch.empty((2, parts, n), dtype=torch.float32, device=x.device)
    shares = {"dw_part_ptr": dw_part, "db_part_ptr": db_part}
    rows = {"weight_ptr": weight, "dx_ptr": dx, "stride_dxm": dx.stride(0)}
    if by_rows:
        _backward_row_kernel[(parts,)](
            **tensors, **strides, **shares, **rows, M=m, N=n,
            BLOCK_N=triton.next_power_of_2(n), **config,
        )  # fmt: skip
    else:
        dx_config = BACKWARD_DX.pick(x.device, **key)
        _backward_dx_kernel[(m,)](**tensors, **strides, **rows, N=n, **dx_config)
        _backward_columns_kernel[(triton.cdiv(n, config["BLOCK_N"]), parts)](
            **tensors, **strides, **shares, M=m, N=n, **config
        )
    config = SUM_PARTS.pick(x.device, **key)
    _sum_parts_kernel[(triton.cdiv(n, config["BLOCK_N"]),)](
        **shares, dw_ptr=dw, db_ptr=db, P=parts, N=n, **config
    )
    return dx, dw, db


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, mean, rstd = layer_norm_fwd(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        return *layer_norm_bwd(x, weight, mean, rstd, rows_of(dy)), None


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """Layer normalization over the last dimension, statistics in float32.

    x: [..., N]; weight, bias: [N], else ValueError; float32, float16 or bfloat16. Returns the
    shape and dtype of x. Differentiable in x, weight and bias.
    """
    require(x.dim() > 0, "x: has no dimension to normalize over")
    shaped("weight", weight, x.shape[-1:])
    shaped("bias", bias, x.shape[-1:])
    return _LayerNorm.apply(rows_of(x), weight.contiguous(), bias.contiguous(), eps).view(x.shape)

"""Training-mode batch norm fused with the operations after it, in two passes forward and two backward, as Triton kernels.

`joined` ends a block of the local encoder, `pooled` a stage of the global one. Features are rows of channels; a pass works on
blocks of rows, and sums over rows are completed from the partial sums of each program, always in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

PROGRAMS = 528  # programs of a summing pass: four per multiprocessor of a large GPU
BLOCK = 2048  # numbers per program at a time
PART = 8  # channels per program when partial sums are added


def joined(
    through: Tensor, rest: Tensor, norm: nn.BatchNorm2d, rest_norm: nn.BatchNorm2d, bias: Tensor, dropout: float
) -> Tensor:
    """dropout(relu(norm(through) + rest_norm(rest + bias))), all (subject, channel, time, roi) with channels last in memory."""
    parameters = (norm.weight, norm.bias, rest_norm.weight, rest_norm.bias, bias)
    result: Tensor = _Joined.apply(_rows(through), _rows(rest), *parameters, norm, rest_norm, dropout)
    return result.permute(0, 3, 1, 2)


def pooled(features: Tensor, norm: nn.BatchNorm2d, bias: Tensor, dropout: float, rois_first: bool = False) -> Tensor:
    """dropout(max over two time steps of gelu(norm(features + bias))); the number of time steps must be even.

    With `rois_first` the result lies in memory as (subject, roi, time, channel), otherwise as (subject, time, roi, channel).
    """
    parameters = (norm.weight, norm.bias, bias)
    result: Tensor = _Pooled.apply(_rows(features), *parameters, norm, dropout, rois_first)
    return result.permute(0, 3, 2, 1) if rois_first else result.permute(0, 3, 1, 2)


def _rows(features: Tensor) -> Tensor:
    """(subject, time, roi, channel), the memory order of channels-last features."""
    return features.permute(0, 2, 3, 1).contiguous()


def _seed(like: Tensor) -> Tensor:
    """Seed drawn on the device, so that every replay of a recorded step draws a new one."""
    return torch.randint(2**31 - 1, (1,), device=like.device, dtype=torch.int32)


class _Joined(torch.autograd.Function):
    """The gradient needs no mask of dropout and ReLU: it passes where the output is not 0. For a bias before a norm it is 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, r: Tensor, w_x: Tensor, b_x: Tensor, w_r: Tensor, b_r: Tensor, bias: Tensor,
                norm_x: nn.BatchNorm2d, norm_r: nn.BatchNorm2d, dropout: float) -> Tensor:  # fmt: skip
        moments_x, moments_r = _statistics(x, norm_x, None), _statistics(r, norm_r, bias)
        y = torch.empty_like(x)
        rows, channels, per = _sizes(x)
        _join[(triton.cdiv(rows, per),)](x, r, y, moments_x, moments_r, _seed(x), dropout, rows, channels, per)
        ctx.save_for_backward(x, r, y, w_x, w_r, moments_x, moments_r)
        ctx.dropout = dropout
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, r, y, w_x, w_r, moments_x, moments_r = ctx.saved_tensors
        rows, channels, per = _sizes(x)
        same = dy.stride()[1:] == (0, 0, 1)  # the gradient of a sum over time and ROIs: one row for each subject
        dy, of = (dy, rows // len(dy)) if same and dy.stride(0) == channels else (dy.contiguous(), 1)
        partial = x.new_empty(PROGRAMS, 3, channels, dtype=torch.float32)
        _join_sums[(PROGRAMS,)](dy, of, y, x, r, partial, ctx.dropout, rows, channels, per)
        line_x, line_r, dw_x, dw_r, db = (x.new_empty(n, channels, dtype=torch.float32) for n in (3, 3, 1, 1, 1))
        part = min(channels, PART)
        grid = (channels // part,)
        _lines[grid](partial, moments_x, w_x, line_x, dw_x, db, 1, rows, PROGRAMS, 3, channels, part)
        _lines[grid](partial, moments_r, w_r, line_r, dw_r, db, 2, rows, PROGRAMS, 3, channels, part)
        dx, dr = torch.empty_like(x), torch.empty_like(r)
        grid = (triton.cdiv(rows, per),)
        _join_gradients[grid](dy, of, y, x, r, dx, dr, line_x, line_r, ctx.dropout, rows, channels, per)
        return dx, dr, dw_x[0], db[0], dw_r[0], db[0].clone(), torch.zeros_like(db[0]), None, None, None


class _Pooled(torch.autograd.Function):
    """The backward pass recomputes the dropout mask and the larger of two steps instead of storing them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, beta: Tensor, bias: Tensor, norm: nn.BatchNorm2d, dropout: float,
                rois_first: bool) -> Tensor:  # fmt: skip
        moments, seed = _statistics(x, norm, bias), _seed(x)
        subjects, steps, rois, channels = x.shape
        y = x.new_empty(subjects, *((rois, steps // 2) if rois_first else (steps // 2, rois)), channels)
        rows, channels, per = _sizes(y)
        ctx.sizes = (rows, rois, steps // 2 if rois_first else 0)
        _pool[(triton.cdiv(rows, per),)](x, y, moments, seed, dropout, *ctx.sizes, channels, per)
        ctx.save_for_backward(x, weight, moments, seed)
        ctx.dropout = dropout
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, moments, seed = ctx.saved_tensors
        dy = dy.contiguous()
        rows, channels, per = _sizes(dy)
        per = max(per // 2, 1)
        partial = x.new_empty(PROGRAMS, 2, channels, dtype=torch.float32)
        _pool_sums[(PROGRAMS,)](dy, x, partial, moments, seed, ctx.dropout, *ctx.sizes, channels, per)
        line, dw, db = (x.new_empty(n, channels, dtype=torch.float32) for n in (3, 1, 1))
        part = min(channels, PART)
        _lines[(channels // part,)](partial, moments, weight, line, dw, db, 1, 2 * rows, PROGRAMS, 2, channels, part)
        dx = torch.empty_like(x)
        _pool_gradients[(triton.cdiv(rows, per),)](dy, x, dx, line, moments, seed, ctx.dropout, *ctx.sizes, channels, per)
        return dx, dw[0], db[0], torch.zeros_like(db[0]), None, None, None


def _sizes(features: Tensor) -> tuple[int, int, int]:
    """Rows, channels, and rows per block."""
    channels = features.shape[-1]
    return features.numel() // channels, channels, BLOCK // channels


def _statistics(x: Tensor, norm: nn.BatchNorm2d, bias: Tensor | None) -> Tensor:
    """(4, channel) mean, 1 / sd, scale and shift of the norm; also updates the module's running statistics (with the bias)."""
    rows, channels, per = _sizes(x)
    partial = x.new_empty(PROGRAMS, 2, channels, dtype=torch.float32)
    moments = x.new_empty(4, channels, dtype=torch.float32)
    _sums[(PROGRAMS,)](x, partial, rows, channels, per, num_warps=8)
    part = min(channels, PART)
    running = (norm.running_mean, norm.running_var, norm.num_batches_tracked)
    _moments[(channels // part,)](
        partial, norm.weight, norm.bias, moments, *running, norm.bias if bias is None else bias, bias is not None,
        norm.momentum, norm.eps, rows, PROGRAMS, channels, part,
    )  # fmt: skip
    return moments


@triton.jit
def _sums(x, partial, rows, C: tl.constexpr, B: tl.constexpr):
    """Sum and sum of squares of every channel."""
    c = tl.arange(0, C)
    total, square = tl.zeros((B, C), tl.float32), tl.zeros((B, C), tl.float32)
    for start in range(tl.program_id(0) * B, rows, tl.num_programs(0) * B):
        row = start + tl.arange(0, B)
        value = tl.load(x + row.to(tl.int64)[:, None] * C + c[None, :], mask=(row < rows)[:, None], other=0.0).to(tl.float32)
        total += value
        square += value * value
    at = partial + tl.program_id(0) * 2 * C + c
    tl.store(at, tl.sum(total, 0))
    tl.store(at + C, tl.sum(square, 0))


@triton.jit
def _added(partial, row, programs, ROWS: tl.constexpr, C: tl.constexpr, c, PART: tl.constexpr):
    """Sum over programs of one row of partial sums, at some channels."""
    total = tl.zeros((256, PART), tl.float32)
    for start in range(0, programs, 256):
        p = start + tl.arange(0, 256)
        total += tl.load(partial + (p[:, None] * ROWS + row) * C + c[None, :], mask=(p < programs)[:, None], other=0.0)
    return tl.sum(total, 0)


@triton.jit
def _moments(partial, weight, beta, moments, running_mean, running_var, tracked, bias, HAS_BIAS: tl.constexpr, momentum, eps,
             rows, programs, C: tl.constexpr, PART: tl.constexpr):  # fmt: skip
    """Mean, 1 / sd, scale and shift of every channel, and the update of the running statistics."""
    c = tl.program_id(0) * PART + tl.arange(0, PART)
    mean = _added(partial, 0, programs, 2, C, c, PART) / rows
    var = tl.maximum(_added(partial, 1, programs, 2, C, c, PART) / rows - mean * mean, 0.0)
    rstd = 1.0 / tl.sqrt(var + eps)
    scale = tl.load(weight + c) * rstd
    tl.store(moments + c, mean)
    tl.store(moments + C + c, rstd)
    tl.store(moments + 2 * C + c, scale)
    tl.store(moments + 3 * C + c, tl.load(beta + c) - mean * scale)
    level = mean + tl.load(bias + c) if HAS_BIAS else mean
    tl.store(running_mean + c, tl.load(running_mean + c) * (1 - momentum) + momentum * level)
    unbiased = var * (rows / (rows - 1.0))
    tl.store(running_var + c, tl.load(running_var + c) * (1 - momentum) + momentum * unbiased)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + 1)


@triton.jit
def _kept(index, seed, dropout):
    """Whether dropout keeps the number at an index: a hash of index and seed, as a fraction of 2^32."""
    mixed = index.to(tl.uint32) * 0x9E3779B1 + seed.to(tl.uint32)
    mixed = (mixed ^ (mixed >> 16)) * 0x7FEB352D
    mixed = (mixed ^ (mixed >> 15)) * 0x846CA68B
    mixed = mixed ^ (mixed >> 16)
    return (mixed >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout


@triton.jit
def _join(x, r, y, moments_x, moments_r, seed, dropout, rows, C: tl.constexpr, B: tl.constexpr):
    row, c = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, C)
    at, inside = row.to(tl.int64)[:, None] * C + c[None, :], (row < rows)[:, None]
    one = tl.load(x + at, mask=inside).to(tl.float32) * tl.load(moments_x + 2 * C + c)[None, :]
    other = tl.load(r + at, mask=inside).to(tl.float32) * tl.load(moments_r + 2 * C + c)[None, :]
    level = tl.load(moments_x + 3 * C + c) + tl.load(moments_r + 3 * C + c)
    value = tl.maximum(one + other + level[None, :], 0.0)
    value = tl.where(_kept(row[:, None] * C + c[None, :], tl.load(seed), dropout), value / (1 - dropout), 0.0)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _join_back(dy, of, y, row, c, at, inside, dropout, C: tl.constexpr):
    """Gradient before ReLU; `of` rows share one row of the incoming gradient."""
    back = tl.load(dy + (row // of).to(tl.int64)[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(tl.load(y + at, mask=inside, other=0.0).to(tl.float32) > 0, back / (1 - dropout), 0.0)


@triton.jit
def _join_sums(dy, of, y, x, r, partial, dropout, rows, C: tl.constexpr, B: tl.constexpr):
    """Sums of the gradient before ReLU, and of its products with x and r."""
    c = tl.arange(0, C)
    s, s_x, s_r = tl.zeros((B, C), tl.float32), tl.zeros((B, C), tl.float32), tl.zeros((B, C), tl.float32)
    for start in range(tl.program_id(0) * B, rows, tl.num_programs(0) * B):
        row = start + tl.arange(0, B)
        at, inside = row.to(tl.int64)[:, None] * C + c[None, :], (row < rows)[:, None]
        back = _join_back(dy, of, y, row, c, at, inside, dropout, C)
        s += back
        s_x += back * tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        s_r += back * tl.load(r + at, mask=inside, other=0.0).to(tl.float32)
    at = partial + tl.program_id(0) * 3 * C + c
    tl.store(at, tl.sum(s, 0))
    tl.store(at + C, tl.sum(s_x, 0))
    tl.store(at + 2 * C, tl.sum(s_r, 0))


@triton.jit
def _lines(partial, moments, weight, line, dw, db, WHICH: tl.constexpr, rows, programs, ROWS: tl.constexpr, C: tl.constexpr,
           PART: tl.constexpr):  # fmt: skip
    """Gradients of a norm's weight and bias, and a, b, c of its input gradient: a * (gradient after it) + b * x + c."""
    c = tl.program_id(0) * PART + tl.arange(0, PART)
    s, s_x = _added(partial, 0, programs, ROWS, C, c, PART), _added(partial, WHICH, programs, ROWS, C, c, PART)
    mean, rstd = tl.load(moments + c), tl.load(moments + C + c)
    to_weight = rstd * (s_x - mean * s)
    a = tl.load(weight + c) * rstd
    b = -a * rstd * to_weight / rows
    tl.store(line + c, a)
    tl.store(line + C + c, b)
    tl.store(line + 2 * C + c, -a * s / rows - b * mean)
    tl.store(dw + c, to_weight)
    tl.store(db + c, s)


@triton.jit
def _join_gradients(dy, of, y, x, r, dx, dr, line_x, line_r, dropout, rows, C: tl.constexpr, B: tl.constexpr):
    row, c = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, C)
    at, inside = row.to(tl.int64)[:, None] * C + c[None, :], (row < rows)[:, None]
    back = _join_back(dy, of, y, row, c, at, inside, dropout, C)
    one, other = tl.load(x + at, mask=inside).to(tl.float32), tl.load(r + at, mask=inside).to(tl.float32)
    to_x = tl.load(line_x + c)[None, :] * back + tl.load(line_x + C + c)[None, :] * one + tl.load(line_x + 2 * C + c)[None, :]
    to_r = tl.load(line_r + c)[None, :] * back + tl.load(line_r + C + c)[None, :] * other + tl.load(line_r + 2 * C + c)[None, :]
    tl.store(dx + at, to_x.to(dx.dtype.element_ty), mask=inside)
    tl.store(dr + at, to_r.to(dr.dtype.element_ty), mask=inside)


@triton.jit
def _normal(z):
    """Standard normal distribution function; GELU is z times it."""
    return 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476))


@triton.jit
def _pool(x, y, moments, seed, dropout, rows, rois, steps, C: tl.constexpr, B: tl.constexpr):
    row, c = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, C)
    inside, first = (row < rows)[:, None], (row + row // rois * rois).to(tl.int64)[:, None] * C + c[None, :]
    scale, shift = tl.load(moments + 2 * C + c)[None, :], tl.load(moments + 3 * C + c)[None, :]
    one = tl.load(x + first, mask=inside, other=0.0).to(tl.float32) * scale + shift
    other = tl.load(x + first + rois * C, mask=inside, other=0.0).to(tl.float32) * scale + shift
    value = tl.maximum(one * _normal(one), other * _normal(other))
    value = tl.where(_kept(row[:, None] * C + c[None, :], tl.load(seed), dropout), value / (1 - dropout), 0.0)
    tl.store(y + _lies(row, rois, steps)[:, None] * C + c[None, :], value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _lies(row, rois, steps):
    """Memory position of the row of a subject, time step and ROI; with ROIs first if `steps` is given."""
    if steps > 0:
        row = (row // (rois * steps) * rois + row % rois) * steps + row // rois % steps
    return row.to(tl.int64)


@triton.jit
def _pool_back(dy, one, other, row, rois, steps, c, seed, dropout, inside, C: tl.constexpr):
    """Gradient after the norm, for two time steps of normalised features."""
    back = tl.load(dy + _lies(row, rois, steps)[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32) / (
        1 - dropout
    )
    back = tl.where(_kept(row[:, None] * C + c[None, :], tl.load(seed), dropout), back, 0.0)
    below_one, below_other = _normal(one), _normal(other)
    first = one * below_one >= other * below_other
    slope_one = below_one + one * tl.exp(-0.5 * one * one) * 0.3989422804014327
    slope_other = below_other + other * tl.exp(-0.5 * other * other) * 0.3989422804014327
    return tl.where(first, back * slope_one, 0.0), tl.where(first, 0.0, back * slope_other)


@triton.jit
def _pool_sums(dy, x, partial, moments, seed, dropout, rows, rois, steps, C: tl.constexpr, B: tl.constexpr):
    c = tl.arange(0, C)
    s, s_x = tl.zeros((B, C), tl.float32), tl.zeros((B, C), tl.float32)
    scale, shift = tl.load(moments + 2 * C + c)[None, :], tl.load(moments + 3 * C + c)[None, :]
    for start in range(tl.program_id(0) * B, rows, tl.num_programs(0) * B):
        row = start + tl.arange(0, B)
        inside, first = (row < rows)[:, None], (row + row // rois * rois).to(tl.int64)[:, None] * C + c[None, :]
        one = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(x + first + rois * C, mask=inside, other=0.0).to(tl.float32)
        to_one, to_other = _pool_back(
            dy, one * scale + shift, other * scale + shift, row, rois, steps, c, seed, dropout, inside, C
        )
        s += to_one + to_other
        s_x += to_one * one + to_other * other
    at = partial + tl.program_id(0) * 2 * C + c
    tl.store(at, tl.sum(s, 0))
    tl.store(at + C, tl.sum(s_x, 0))


@triton.jit
def _pool_gradients(dy, x, dx, line, moments, seed, dropout, rows, rois, steps, C: tl.constexpr, B: tl.constexpr):
    row, c = tl.program_id(0) * B + tl.arange(0, B), tl.arange(0, C)
    inside, first = (row < rows)[:, None], (row + row // rois * rois).to(tl.int64)[:, None] * C + c[None, :]
    scale, shift = tl.load(moments + 2 * C + c)[None, :], tl.load(moments + 3 * C + c)[None, :]
    one = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + first + rois * C, mask=inside, other=0.0).to(tl.float32)
    to_one, to_other = _pool_back(dy, one * scale + shift, other * scale + shift, row, rois, steps, c, seed, dropout, inside, C)
    a, b, rest = tl.load(line + c)[None, :], tl.load(line + C + c)[None, :], tl.load(line + 2 * C + c)[None, :]
    tl.store(dx + first, (a * to_one + b * one + rest).to(dx.dtype.element_ty), mask=inside)
    tl.store(dx + first + rois * C, (a * to_other + b * other + rest).to(dx.dtype.element_ty), mask=inside)

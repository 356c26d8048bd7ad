"""Graph product for at most 128 ROIs, and its gradients, as Triton kernels that read every feature once.

The local encoder's fast form calls `spread` on the bfloat16 output of its temporal convolution for each Chebyshev term.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

SIDE = 128  # ROIs per block
WIDE = 64  # channels per block
PROGRAMS = 132  # programs that sum over all time steps of all subjects


def spread(terms: Tensor, operators: Tensor, level: Tensor) -> Tensor:
    """term_0 + sum over k of T_k term_k + level: the graph convolution of features whose channels are already mixed.

    terms (subject, time, roi, order, channel), operators (roi, (order - 1) roi) from `chebyshev_operators`,
    level (time, channel).
    """
    rois, order = terms.shape[2], terms.shape[3]
    square = operators.view(rois, order - 1, rois).permute(1, 2, 0)  # (order - 1, roi, roi)
    square = functional.pad(square, (0, SIDE - rois, 0, SIDE - rois)).to(terms.dtype)
    result: Tensor = _Spread.apply(terms.contiguous(), square, level)
    return result


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, terms: Tensor, square: Tensor, level: Tensor) -> Tensor:
        subjects, steps, rois, order, channels = terms.shape
        result = terms.new_empty(subjects, steps, rois, channels)
        grid = (subjects * steps, channels // WIDE)
        _forward[grid](terms, square, level.float().contiguous(), result, steps, rois, order, channels, SIDE, WIDE, num_warps=8)
        ctx.save_for_backward(terms, square)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        terms, square = ctx.saved_tensors
        gradient = gradient.contiguous()
        subjects, steps, rois, order, channels = terms.shape
        to_terms = torch.empty_like(terms)
        to_level = terms.new_empty(subjects, steps, channels, dtype=torch.float32)
        grid = (subjects * steps, channels // WIDE)
        _backward[grid](gradient, square, to_terms, to_level, rois, order, channels, SIDE, WIDE, num_warps=4)
        partial = terms.new_empty(PROGRAMS, order - 1, SIDE, SIDE, dtype=torch.float32)
        count = subjects * steps
        _to_operators[(PROGRAMS, order - 1)](gradient, terms, partial, count, rois, order, channels, SIDE, WIDE, num_warps=8)
        return to_terms, partial.sum(dim=0).to(square.dtype), to_level.sum(dim=0)


@triton.jit
def _forward(terms, square, level, result, steps, rois, K: tl.constexpr, C: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """One time step of one subject: (roi, channel)."""
    at, c, n = tl.program_id(0), tl.program_id(1) * W + tl.arange(0, W), tl.arange(0, N)
    inside = (n < rois)[:, None]
    start = terms + at.to(tl.int64) * rois * K * C + n[:, None] * (K * C) + c[None, :]
    total = tl.load(start, mask=inside, other=0.0).to(tl.float32) + tl.load(level + at % steps * C + c)[None, :]
    for k in tl.static_range(1, K):
        operator = tl.load(square + (k - 1) * N * N + n[:, None] * N + tl.arange(0, N)[None, :])
        total = tl.dot(operator, tl.load(start + k * C, mask=inside, other=0.0), total)
    tl.store(result + (at.to(tl.int64) * rois + n[:, None]) * C + c[None, :], total.to(result.dtype.element_ty), mask=inside)


@triton.jit
def _backward(gradient, square, to_terms, to_level, rois, K: tl.constexpr, C: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """Gradient of the terms at one time step of one subject, and that of the level, summed over ROIs."""
    at, c, n = tl.program_id(0), tl.program_id(1) * W + tl.arange(0, W), tl.arange(0, N)
    inside = (n < rois)[:, None]
    back = tl.load(gradient + (at.to(tl.int64) * rois + n[:, None]) * C + c[None, :], mask=inside, other=0.0)
    tl.store(to_level + at.to(tl.int64) * C + c, tl.sum(back.to(tl.float32), 0))
    start = to_terms + at.to(tl.int64) * rois * K * C + n[:, None] * (K * C) + c[None, :]
    tl.store(start, back, mask=inside)
    for k in tl.static_range(1, K):
        transposed = tl.load(square + (k - 1) * N * N + tl.arange(0, N)[None, :] * N + n[:, None])
        tl.store(start + k * C, tl.dot(transposed, back).to(to_terms.dtype.element_ty), mask=inside)


@triton.jit
def _to_operators(gradient, terms, partial, count, rois, K: tl.constexpr, C: tl.constexpr, N: tl.constexpr, W: tl.constexpr):
    """Gradient of T_k from some of the time steps: gradient times transposed term, summed over channels and steps."""
    k, n = tl.program_id(1) + 1, tl.arange(0, N)
    inside = (n < rois)[:, None]
    total = tl.zeros((N, N), tl.float32)
    for i in range(tl.program_id(0) * (C // W), count * (C // W), tl.num_programs(0) * (C // W)):
        at = i // (C // W)
        for part in range(C // W):
            c = part * W + tl.arange(0, W)
            row = at.to(tl.int64) * rois + n[:, None]
            back = tl.load(gradient + row * C + c[None, :], mask=inside, other=0.0)
            term = tl.load(terms + (row * K + k) * C + c[None, :], mask=inside, other=0.0)
            total = tl.dot(back, tl.trans(term), total)
    start = partial + (tl.program_id(0) * (K - 1) + k - 1) * N * N
    tl.store(start + n[:, None] * N + tl.arange(0, N)[None, :], total)

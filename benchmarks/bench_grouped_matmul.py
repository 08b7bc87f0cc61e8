"""grouped_matmul, also as the gradient of its input, and grouped_matmul_weight_grad.

The naive form is a loop of ``torch.mm``.
"""

from dataclasses import replace

import torch

import naive
import peers
import torch_moe_ops
from harness import Case, Problem, multiplying
from inputs import GROUPS_SHAPES, Groups, Size, cross, uneven_counts

WIDE_DTYPES = (torch.float32, torch.bfloat16)


def cases(size: Size) -> list[Case]:
    shapes = GROUPS_SHAPES[size]
    # torch's float16 product can be 500 times slower than float32: with all rows one call of the
    # naive form takes minutes.
    short = [replace(shape, M=min(shape.M, 1024)) for shape in shapes]
    ops = {
        "grouped_matmul": forward,
        "grouped_matmul, trans_weight": _input_grad,
        "grouped_matmul_weight_grad": _weight_grad,
    }
    return [
        case
        for op, prepare in ops.items()
        for case in (
            *cross(op, shapes, prepare, WIDE_DTYPES),
            *cross(op, short, prepare, [torch.float16]),
        )
    ]


def forward(shape: Groups, dtype: torch.dtype) -> Problem:
    x, weight = torch.randn(shape.M, shape.K).to(dtype), _weight(shape, dtype)
    counts = uneven_counts(shape.M, shape.E)
    return multiplying(
        *(shape.M, shape.K, shape.N, dtype),
        ours=lambda: torch_moe_ops.grouped_matmul(x, weight, counts),
        naive=lambda: naive.grouped_matmul(x, weight, counts),
        peers=peers.grouped_mm(x, weight, counts),
    )


def _input_grad(shape: Groups, dtype: torch.dtype) -> Problem:
    grad_y, weight = torch.randn(shape.M, shape.N).to(dtype), _weight(shape, dtype)
    counts = uneven_counts(shape.M, shape.E)
    return multiplying(
        *(shape.M, shape.N, shape.K, dtype),
        ours=lambda: torch_moe_ops.grouped_matmul(grad_y, weight, counts, trans_weight=True),
        naive=lambda: naive.grouped_matmul(grad_y, weight.mT, counts),
        peers=peers.grouped_mm(grad_y, weight.mT, counts),
    )


def _weight_grad(shape: Groups, dtype: torch.dtype) -> Problem:
    x = torch.randn(shape.M, shape.K).to(dtype)
    grad_y = torch.randn(shape.M, shape.N).to(dtype)
    counts = uneven_counts(shape.M, shape.E)
    return multiplying(
        *(shape.M, shape.K, shape.N, dtype),
        ours=lambda: torch_moe_ops.grouped_matmul_weight_grad(x, grad_y, counts),
        naive=lambda: naive.grouped_matmul_weight_grad(x, grad_y, counts),
        peers=peers.grouped_mm(x.t(), grad_y, counts),
    )


def _weight(shape: Groups, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape.E, shape.K, shape.N).to(dtype)

"""swiglu and swiglu_grad, on M rows of 2 * I values."""

from functools import partial

import torch

import naive
import torch_moe_ops
from harness import Case, Problem, moving
from inputs import DTYPES, Size

SHAPES: dict[Size, list[tuple[int, int]]] = {
    "full": [(8192, 4096), (16384, 1408)],
    "quick": [(2048, 1024)],
    "tiny": [(6, 8)],
}


def cases(size: Size) -> list[Case]:
    return [
        Case(op, {"M": rows, "I": width}, dtype, partial(prepare, rows, width, dtype))
        for op, prepare in (("swiglu", _forward), ("swiglu_grad", _grad))
        for rows, width in SHAPES[size]
        for dtype in DTYPES
    ]


def _forward(rows: int, width: int, dtype: torch.dtype) -> Problem:
    x = torch.randn(rows, 2 * width).to(dtype)
    return moving(
        3 * rows * width * dtype.itemsize,
        ours=lambda: torch_moe_ops.swiglu(x),
        naive=lambda: naive.swiglu(x),
    )


def _grad(rows: int, width: int, dtype: torch.dtype) -> Problem:
    x, grad = torch.randn(rows, 2 * width).to(dtype), torch.randn(rows, width).to(dtype)
    return moving(
        5 * rows * width * dtype.itemsize,
        ours=lambda: torch_moe_ops.swiglu_grad(grad, x),
        naive=lambda: naive.swiglu_grad(grad, x),
    )

"""nn.MoE, forward and backward, against a loop over experts. The limit is its matrix products."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import naive
from harness import NAIVE, OURS, Call, Case, Problem
from inputs import Size
from torch_moe_ops.nn import MoE


@dataclass(frozen=True)
class Layer:
    """T tokens of size H, each sent to K of E experts of intermediate size I."""

    T: int
    H: int
    I: int  # noqa: E741
    E: int
    K: int


SHAPES: dict[Size, Layer] = {
    "full": Layer(2048, 1024, 2048, 16, 4),
    "quick": Layer(1024, 512, 1024, 16, 4),
    "tiny": Layer(6, 8, 12, 4, 2),
}


def cases(size: Size) -> list[Case]:
    shape = SHAPES[size]

    def case(dtype: torch.dtype) -> Case:
        return Case("nn.MoE + backward", asdict(shape), dtype, lambda: _prepare(shape, dtype))

    return [case(torch.float32), case(torch.bfloat16)]


def _prepare(shape: Layer, dtype: torch.dtype) -> Problem:
    layer = MoE(shape.H, shape.I, num_experts=shape.E, top_k=shape.K, dtype=dtype)
    x = torch.randn(shape.T, shape.H).to(dtype).requires_grad_()
    grad = torch.randn(shape.T, shape.H).to(dtype)
    wanted = (x, *layer.parameters())

    def training(forward: Callable[[], Tensor]) -> Call:
        def step() -> tuple[Tensor, ...]:
            y = forward()
            return (y.detach(), *torch.autograd.grad(y, wanted, grad))

        return step

    counts = layer(x).tokens_per_expert.tolist()
    products = ((shape.H, 2 * shape.I), (shape.I, shape.H))
    flop = sum(3 * 2 * sum(counts) * k * n for k, n in products)
    return Problem(
        {
            OURS: training(lambda: layer(x).output),
            NAIVE: training(lambda: naive.moe_layer(layer, x)),
        },
        {"GEMMs alone": _products(counts, products, dtype)},
        flop,
        "GFLOP/s",
    )


def _products(counts: list[int], products: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Call:
    """All products of a step with the same groups: y = x w, x_grad = g w^T, w_grad = x^T g."""
    jobs: list[tuple[Tensor, Tensor, Tensor]] = []
    for k, n in products:
        x, x_grad = torch.randn(2, sum(counts), k).to(dtype)
        y, g = torch.randn(2, sum(counts), n).to(dtype)
        w, w_grad = torch.randn(2, len(counts), k, n).to(dtype)
        xs, x_grads, ys, gs = (rows.split(counts) for rows in (x, x_grad, y, g))
        jobs += zip(xs, w, ys, strict=True)
        jobs += zip(gs, w.mT, x_grads, strict=True)
        jobs += zip((rows.t() for rows in xs), gs, w_grad, strict=True)

    def multiply() -> None:
        for left, right, out in jobs:
            torch.mm(left, right, out=out)

    return multiply

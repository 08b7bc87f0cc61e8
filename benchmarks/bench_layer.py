"""nn.MoE, forward and backward, against a loop over experts and the layers of other packages.

All take the same weights and tokens. The limits are its matrix products alone, as a loop of
``torch.mm`` and by our own operators: what is above them is spent outside of products.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

import naive
import peer_layers
from harness import NAIVE, OURS, Call, Case, Problem
from inputs import Size
from torch_moe_ops import grouped_matmul, grouped_matmul_weight_grad
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
    x = _decided_tokens(layer, shape.T).to(dtype).requires_grad_()
    grad = torch.randn(shape.T, shape.H).to(dtype)

    def training(forward: Callable[[Tensor], Tensor], parameters: Sequence[Tensor]) -> Call:
        def step() -> tuple[Tensor, ...]:
            y = forward(x)
            return (y.detach(), *torch.autograd.grad(y, (x, *parameters), grad))

        return step

    def peer(build: Callable[[], peer_layers.PeerLayer]) -> Call:
        built = build()
        others = [p for p in built.parameters if p is not built.router_weight]
        step = training(built.forward, [built.router_weight, *others])
        return lambda: step()[:3]  # layouts of the other weights differ

    weights = tuple(layer.parameters())  # the router's first
    counts = layer(x).tokens_per_expert
    products = ((shape.H, 2 * shape.I), (shape.I, shape.H))
    factors = [_factors(counts, k, n, dtype) for k, n in products]
    return Problem(
        {
            OURS: training(lambda x: layer(x).output, weights),
            NAIVE: training(lambda x: naive.moe_layer(layer, x), weights),
        },
        {"GEMMs alone": _mm_loop(factors), "our GEMMs alone": _our_products(factors)},
        sum(3 * 2 * int(counts.sum()) * k * n for k, n in products),
        "GFLOP/s",
        {name: partial(peer, build) for name, build in peer_layers.builders(layer, dtype).items()},
    )


@torch.no_grad()
def _decided_tokens(layer: MoE, num_tokens: int) -> Tensor:
    """(T, H), float32: random, with clear winners among the experts.

    Packages round the logits of 16-bit numbers differently: near ties would go to other experts.
    """
    router_EH = layer.router.weight.float()
    preference_TE = torch.randn(num_tokens, layer.num_experts) + 0.3 * torch.randn(
        layer.num_experts
    )
    ids_TK = preference_TE.topk(layer.top_k).indices
    directions_EH = router_EH / router_EH.norm(dim=1, keepdim=True)
    return torch.randn(num_tokens, layer.hidden_size) + 8 * directions_EH[ids_TK].sum(1)


@dataclass(frozen=True)
class _Factors:
    """What the products of one linear map of all experts are made of: y = x w, and both grads."""

    counts: Tensor
    x: Tensor
    weight: Tensor
    grad_y: Tensor


def _factors(counts: Tensor, k: int, n: int, dtype: torch.dtype) -> _Factors:
    rows, experts = int(counts.sum()), len(counts)
    sizes = ((rows, k), (experts, k, n), (rows, n))
    return _Factors(counts, *(torch.randn(size).to(dtype) for size in sizes))


def _mm_loop(factors: list[_Factors]) -> Call:
    """All products of a step, one after the other, into buffers that are there."""
    jobs: list[tuple[Tensor, Tensor, Tensor]] = []
    for given in factors:
        sizes = given.counts.tolist()
        xs, grads = given.x.split(sizes), given.grad_y.split(sizes)
        outputs = [torch.empty_like(t) for t in (given.grad_y, given.x, given.weight)]
        jobs += zip(xs, given.weight, outputs[0].split(sizes), strict=True)
        jobs += zip(grads, given.weight.mT, outputs[1].split(sizes), strict=True)
        jobs += zip((rows.t() for rows in xs), grads, outputs[2], strict=True)

    def multiply() -> None:
        for left, right, out in jobs:
            torch.mm(left, right, out=out)

    return multiply


def _our_products(factors: list[_Factors]) -> Call:
    def multiply() -> None:
        for given in factors:
            grouped_matmul(given.x, given.weight, given.counts)
            grouped_matmul(given.grad_y, given.weight, given.counts, trans_weight=True)
            grouped_matmul_weight_grad(given.x, given.grad_y, given.counts)

    return multiply

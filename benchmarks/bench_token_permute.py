"""token_permute and token_permute_grad."""

import torch

import naive
import peers
import torch_moe_ops
from harness import Case, Problem, moving
from inputs import ROUTING_SHAPES, Routing, RoutingInputs, Size, cross


def cases(size: Size) -> list[Case]:
    shapes = ROUTING_SHAPES[size]
    return [
        *cross("token_permute", shapes, forward),
        *cross("token_permute_grad", shapes, _grad),
    ]


def forward(shape: Routing, dtype: torch.dtype) -> Problem:
    given = RoutingInputs(shape, dtype)
    tokens, ids = given.tokens, given.ids
    return moving(
        given.num_bytes(tokens=1, rows=1),
        ours=lambda: torch_moe_ops.token_permute(tokens, ids),
        naive=lambda: naive.token_permute(tokens, ids),
        peers=peers.megatron_permute(given),
    )


def _grad(shape: Routing, dtype: torch.dtype) -> Problem:
    given = RoutingInputs(shape, dtype)
    rows_grad, row_of_slot = given.rows, given.row_of_slot
    return moving(
        given.num_bytes(tokens=1, slots=1),
        ours=lambda: torch_moe_ops.token_permute_grad(rows_grad, row_of_slot, shape.K),
        naive=lambda: naive.token_permute_grad(rows_grad, row_of_slot, shape.K),
        peers=peers.megatron_permute_grad(given),
    )

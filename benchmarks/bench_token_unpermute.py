"""token_unpermute and token_unpermute_grad, with probs."""

import torch

import naive
import peers
import torch_moe_ops
from harness import Case, Problem, moving
from inputs import ROUTING_SHAPES, Routing, RoutingInputs, Size, cross


def cases(size: Size) -> list[Case]:
    shapes = ROUTING_SHAPES[size]
    return [
        *cross("token_unpermute", shapes, forward),
        *cross("token_unpermute_grad", shapes, _grad),
    ]


def forward(shape: Routing, dtype: torch.dtype) -> Problem:
    given = RoutingInputs(shape, dtype)
    arguments = (given.rows, given.row_of_slot, given.probs)
    return moving(
        given.num_bytes(tokens=1, slots=1),
        ours=lambda: torch_moe_ops.token_unpermute(*arguments),
        naive=lambda: naive.token_unpermute(*arguments),
        peers=peers.megatron_unpermute(given),
    )


def _grad(shape: Routing, dtype: torch.dtype) -> Problem:
    given = RoutingInputs(shape, dtype)
    arguments = (given.rows, given.tokens, given.row_of_slot, given.probs)
    return moving(
        given.num_bytes(tokens=1, slots=1, rows=1),
        ours=lambda: torch_moe_ops.token_unpermute_grad(*arguments),
        naive=lambda: naive.token_unpermute_grad(*arguments),
        peers=peers.megatron_unpermute_grad(given),
    )

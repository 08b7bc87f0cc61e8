"""What a call costs on inputs so small that the work does not count. The limit is one aten call."""

import torch
from torch import Tensor

import naive
import peers
import torch_moe_ops
from harness import NAIVE, OURS, Case, Problem
from inputs import ROUTING_SHAPES, Routing, RoutingInputs, Size, cross


def cases(size: Size) -> list[Case]:
    shapes = ROUTING_SHAPES["tiny"]
    return [
        *cross("overhead: token_permute", shapes, _no_grad, [torch.float32]),
        *cross("overhead: permute + unpermute + backward", shapes, _training, [torch.float32]),
    ]


def _no_grad(shape: Routing, dtype: torch.dtype) -> Problem:
    given = RoutingInputs(shape, dtype)
    tokens, ids = given.tokens, given.ids
    return Problem(
        {
            OURS: lambda: torch_moe_ops.token_permute(tokens, ids),
            NAIVE: lambda: naive.token_permute(tokens, ids),
        },
        {"clone": tokens.clone},
        peers=peers.megatron_permute(given),
    )


def _training(shape: Routing, dtype: torch.dtype) -> Problem:
    given = RoutingInputs(shape, dtype)
    ids = given.ids
    grad = torch.randn_like(given.tokens)
    tokens, probs = given.tokens.requires_grad_(), given.probs.requires_grad_()

    def ours() -> tuple[Tensor, ...]:
        rows, row_of_slot = torch_moe_ops.token_permute(tokens, ids)
        y = torch_moe_ops.token_unpermute(rows, row_of_slot, probs)
        return torch.autograd.grad(y, (tokens, probs), grad)

    def naively() -> tuple[Tensor, ...]:
        rows, row_of_slot = naive.token_permute(tokens, ids)
        y = naive.token_unpermute(rows, row_of_slot, probs)
        return torch.autograd.grad(y, (tokens, probs), grad)

    def clone() -> tuple[Tensor, ...]:
        return torch.autograd.grad(tokens.clone(), (tokens,), grad)

    return Problem(
        {OURS: ours, NAIVE: naively},
        {"clone": clone},
        peers=peers.megatron_round_trip(tokens, probs, grad, given),
    )

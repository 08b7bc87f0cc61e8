"""init_routing_v2 and init_routing_v2_grad, dropless and with a capacity (drop/pad)."""

import torch

import naive
import peers
import torch_moe_ops
from harness import Case, Problem, moving
from inputs import ROUTING_SHAPES, Routing, RoutingInputs, Size, cross


def cases(size: Size) -> list[Case]:
    shapes = ROUTING_SHAPES[size]
    return [
        *cross("init_routing_v2", shapes, _dropless),
        *cross("init_routing_v2, drop/pad", shapes, _drop_pad),
        *cross("init_routing_v2_grad", shapes, _dropless_grad),
        *cross("init_routing_v2_grad, drop/pad", shapes, _drop_pad_grad),
    ]


def _dropless(shape: Routing, dtype: torch.dtype) -> Problem:
    given = RoutingInputs(shape, dtype)
    x, ids = given.tokens, given.ids
    return moving(
        given.num_bytes(tokens=1, rows=1),
        ours=lambda: torch_moe_ops.init_routing_v2(x, ids)[:2],
        naive=lambda: naive.token_permute(x, ids),
        peers=peers.megatron_permute(given),
    )


def _drop_pad(shape: Routing, dtype: torch.dtype) -> Problem:
    given = RoutingInputs(shape, dtype, drop_pad=True)
    x, ids = given.tokens, given.ids
    return moving(
        given.num_bytes(tokens=1, rows=1),
        ours=lambda: torch_moe_ops.init_routing_v2(
            x, ids, expert_capacity=given.capacity, expert_num=shape.E, drop_pad_mode=1
        )[:2],
        naive=lambda: naive.init_routing_drop_pad(x, ids, shape.E, given.capacity),
        compilable=False,
    )


def _dropless_grad(shape: Routing, dtype: torch.dtype) -> Problem:
    given = RoutingInputs(shape, dtype)
    arguments = (given.rows, given.row_of_slot, shape.K)
    return moving(
        given.num_bytes(tokens=1, slots=1),
        ours=lambda: torch_moe_ops.init_routing_v2_grad(*arguments),
        naive=lambda: naive.token_permute_grad(*arguments),
        peers=peers.megatron_permute_grad(given),
    )


def _drop_pad_grad(shape: Routing, dtype: torch.dtype) -> Problem:
    given = RoutingInputs(shape, dtype, drop_pad=True)
    arguments = (given.rows, given.row_of_slot, shape.K)
    return moving(
        given.num_bytes(tokens=1, slots=1),
        ours=lambda: torch_moe_ops.init_routing_v2_grad(*arguments, drop_pad_mode=1),
        naive=lambda: naive.init_routing_drop_pad_grad(*arguments),
    )

"""finalize_routing_v2 and finalize_routing_v2_grad with scales and bias, dropless and drop/pad."""

from functools import partial

import torch

import naive
import torch_moe_ops
from harness import Case, Problem, moving
from inputs import ROUTING_SHAPES, Routing, RoutingInputs, Size, cross


def cases(size: Size) -> list[Case]:
    shapes = ROUTING_SHAPES[size]
    return [
        *cross("finalize_routing_v2", shapes, partial(_forward, drop_pad=False)),
        *cross("finalize_routing_v2, drop/pad", shapes, partial(_forward, drop_pad=True)),
        *cross("finalize_routing_v2_grad", shapes, partial(_grad, drop_pad=False)),
        *cross("finalize_routing_v2_grad, drop/pad", shapes, partial(_grad, drop_pad=True)),
    ]


def _forward(shape: Routing, dtype: torch.dtype, *, drop_pad: bool) -> Problem:
    given = RoutingInputs(shape, dtype, drop_pad)
    rows, row_of_slot, bias, scales, ids = (
        given.rows,
        given.row_of_slot,
        given.bias,
        given.probs,
        given.ids,
    )
    return moving(
        given.num_bytes(tokens=1, slots=1),
        ours=lambda: torch_moe_ops.finalize_routing_v2(
            rows,
            row_of_slot,
            bias=bias,
            scales=scales,
            expert_idx=ids,
            drop_pad_mode=3 if drop_pad else 2,
        ),
        naive=lambda: naive.finalize_routing(rows, row_of_slot, bias, scales, ids),
    )


def _grad(shape: Routing, dtype: torch.dtype, *, drop_pad: bool) -> Problem:
    given = RoutingInputs(shape, dtype, drop_pad)
    arguments = (given.tokens, given.row_of_slot, given.rows, given.probs, given.ids, given.bias)
    return moving(
        given.num_bytes(tokens=1, slots=1, rows=1),
        ours=lambda: torch_moe_ops.finalize_routing_v2_grad(
            *arguments,
            drop_pad_mode=int(drop_pad),
            expert_num=shape.E,
            expert_capacity=given.capacity,
        ),
        naive=lambda: naive.finalize_routing_grad(*arguments),
        compilable=not drop_pad,
    )

"""The calls that finalize_routing_v2 and finalize_routing_v2_grad refuse."""

from typing import Any

import torch
from torch import Tensor

from .common import Refusal, index_refusals
from .data import Sample, drop

GOOD_MAP = torch.tensor([0, 1, 2, 3])
IDS = torch.tensor([[0, 2], [1, 0]])


def call(rows: Tensor | None = None, row_of_slot: Tensor = GOOD_MAP, **options: Any) -> Sample:
    """A call with 4 slots, K = 2, 3 experts with 2 places each; mode 2 unless stated otherwise."""
    options = {"scales": torch.ones(2, 2), "drop_pad_mode": 2, **options}
    if rows is None:
        rows = torch.zeros(3, 2, 3) if options["drop_pad_mode"] in (1, 3) else torch.zeros(4, 3)
    return Sample("", (rows, row_of_slot), options)


def grad_call(grad: Tensor | None = None, row_of_slot: Tensor = GOOD_MAP, **options: Any) -> Sample:
    """The same for the grad operator; mode 0 unless stated otherwise."""
    options = {"scales": torch.ones(2, 2), "drop_pad_mode": 0, **options}
    places = options["drop_pad_mode"] == 1
    if options["scales"] is not None and "expanded_x" not in options:
        options["expanded_x"] = torch.zeros(3, 2, 3) if places else torch.zeros(4, 3)
    if places:
        options = {"expert_num": 3, "expert_capacity": 2, **options}
    return Sample("", (torch.zeros(2, 3) if grad is None else grad, row_of_slot), options)


def shared_refusals(op: str, rows: str, make: Any) -> list[Refusal]:
    """What forward and grad refuse in the same words. ``rows`` is the argument that the others
    have to agree with."""

    def refused(name: str, error: type[Exception], text: str, **options: Any) -> Refusal:
        return Refusal(name, lambda: make(**options), error, f"moe::{op}: {text}")

    floats = "must be float32, float64, bfloat16 or float16, got"
    return [
        refused(
            "map 2-D",
            ValueError,
            "expanded_row_idx must be 1-D, got shape [2, 2]",
            row_of_slot=GOOD_MAP.reshape(2, 2),
        ),
        refused(
            "map floating",
            TypeError,
            "expanded_row_idx must be int32 or int64, got float32",
            row_of_slot=GOOD_MAP.float(),
        ),
        refused(
            "scales 1-D",
            ValueError,
            "scales must be 2-D, got shape [4]",
            scales=torch.ones(4),
        ),
        refused(
            "scales of whole numbers",
            TypeError,
            f"scales {floats} int64",
            scales=torch.ones(2, 2).long(),
        ),
        refused(
            "scales without choices",
            ValueError,
            "size of scales in dimension 1 must be at least 1, got 0",
            scales=torch.ones(2, 0),
        ),
        refused(
            "scales of too many tokens",
            ValueError,
            "scales must have as many elements as expanded_row_idx (4), got shape [3, 2]",
            scales=torch.ones(3, 2),
        ),
        refused(
            "ids of another shape",
            ValueError,
            "expert_idx must have shape [2, 2], got [4]",
            expert_idx=IDS.flatten(),
        ),
        refused(
            "ids floating",
            TypeError,
            "expert_idx must be int32 or int64, got bfloat16",
            expert_idx=IDS.bfloat16(),
        ),
        refused(
            "bias without ids",
            ValueError,
            "expert_idx must be given when bias is, got None",
            bias=torch.zeros(3, 3),
        ),
        refused(
            "bias 1-D",
            ValueError,
            "bias must be 2-D, got shape [3]",
            bias=torch.zeros(3),
            expert_idx=IDS,
        ),
        refused(
            "bias of another dtype",
            TypeError,
            f"bias must have the dtype of {rows} (float32), got float64",
            bias=torch.zeros(3, 3).double(),
            expert_idx=IDS,
        ),
        refused(
            "bias of another width",
            ValueError,
            "bias must have size 3 in dimension 1, got shape [3, 4]",
            bias=torch.zeros(3, 4),
            expert_idx=IDS,
        ),
        Refusal(
            "map on another device",
            lambda: make(row_of_slot=GOOD_MAP.to("meta")),
            RuntimeError,
            f"moe::{op}: expanded_row_idx must be on the device of {rows} (cpu), got meta",
        ),
        Refusal(
            "scales on another device",
            lambda: make(scales=torch.ones(2, 2, device="meta")),
            RuntimeError,
            f"moe::{op}: scales must be on the device of {rows} (cpu), got meta",
        ),
        *index_refusals(
            op,
            "expert_idx",
            [
                (
                    "id of no bias row",
                    lambda: make(bias=torch.zeros(2, 3), expert_idx=IDS),
                    2,
                    1,
                    "[0, 2)",
                ),
                (
                    "negative id of a bias row",
                    lambda: make(bias=torch.zeros(3, 3), expert_idx=-IDS),
                    -2,
                    1,
                    "[0, 3)",
                ),
                (
                    "bias without experts",
                    lambda: make(bias=torch.zeros(0, 3), expert_idx=IDS),
                    0,
                    0,
                    "[0, 0)",
                ),
            ],
        ),
    ]


FORWARD = (
    *shared_refusals("finalize_routing_v2", "expanded_x", call),
    Refusal(
        "rows 3-D in mode 2",
        lambda: call(torch.zeros(2, 2, 3)),
        ValueError,
        "moe::finalize_routing_v2: expanded_x must be 2-D, got shape [2, 2, 3]",
    ),
    Refusal(
        "rows 2-D in mode 3",
        lambda: call(torch.zeros(4, 3), drop_pad_mode=3),
        ValueError,
        "moe::finalize_routing_v2: expanded_x must be 3-D, got shape [4, 3]",
    ),
    Refusal(
        "rows of whole numbers",
        lambda: call(torch.zeros(4, 3).long()),
        TypeError,
        "moe::finalize_routing_v2: expanded_x must be float32, float64, bfloat16 or float16, "
        "got int64",
    ),
    Refusal(
        "more rows than slots",
        lambda: call(torch.zeros(5, 3)),
        ValueError,
        "moe::finalize_routing_v2: size of expanded_x in dimension 0 must be at most the "
        "number of slots (4), got 5",
    ),
    Refusal(
        "no rows, but slots",
        lambda: call(torch.zeros(0, 3)),
        ValueError,
        "moe::finalize_routing_v2: size of expanded_x in dimension 0 must be at least 1, got 0",
    ),
    Refusal(
        "unknown mode",
        lambda: call(torch.zeros(4, 3), drop_pad_mode=4),
        ValueError,
        "moe::finalize_routing_v2: drop_pad_mode must be one of [0, 1, 2, 3], got 4",
    ),
    Refusal(
        "x2 without x1",
        lambda: call(x2=torch.zeros(2, 3)),
        ValueError,
        "moe::finalize_routing_v2: x1 must be given when x2 is, got None",
    ),
    Refusal(
        "x1 of another shape",
        lambda: call(x1=torch.zeros(4, 3)),
        ValueError,
        "moe::finalize_routing_v2: x1 must have shape [2, 3], got [4, 3]",
    ),
    Refusal(
        "x2 of another dtype",
        lambda: call(x1=torch.zeros(2, 3), x2=torch.zeros(2, 3).half()),
        TypeError,
        "moe::finalize_routing_v2: x2 must have the dtype of expanded_x (float32), got float16",
    ),
    Refusal(
        "bias of too few experts",
        lambda: call(drop_pad_mode=3, bias=torch.zeros(2, 3), expert_idx=IDS),
        ValueError,
        "moe::finalize_routing_v2: bias must have size 3 in dimension 0, got shape [2, 3]",
    ),
    *index_refusals(
        "finalize_routing_v2",
        "expanded_row_idx",
        [
            ("dropped, mode 2", lambda: call(row_of_slot=drop(GOOD_MAP, 3)), -1, 3, "[0, 4)"),
            (
                "dropped, mode 0",
                lambda: call(row_of_slot=drop(GOOD_MAP, 1), drop_pad_mode=0),
                -1,
                1,
                "[0, 4)",
            ),
            (
                "past the slots, rows cut off",
                lambda: call(torch.zeros(2, 3), torch.tensor([0, 3, 4, -1])),
                4,
                2,
                "[0, 4)",
            ),
            (
                "past the places, mode 1",
                lambda: call(row_of_slot=torch.tensor([5, 6, 0, -9]), drop_pad_mode=1),
                6,
                1,
                "[-1, 6)",
            ),
            (
                "below -1, mode 3",
                lambda: call(row_of_slot=torch.tensor([5, 1, 0, -2]), drop_pad_mode=3),
                -2,
                3,
                "[-1, 6)",
            ),
            (
                "wraps around in 32 bits",
                lambda: call(row_of_slot=torch.tensor([2**32, 1, 2, 3])),
                2**32,
                0,
                "[0, 4)",
            ),
        ],
    ),
)


GRAD = (
    *shared_refusals("finalize_routing_v2_grad", "grad_y", grad_call),
    Refusal(
        "gradient 3-D",
        lambda: grad_call(torch.zeros(1, 2, 3)),
        ValueError,
        "moe::finalize_routing_v2_grad: grad_y must be 2-D, got shape [1, 2, 3]",
    ),
    Refusal(
        "gradient of whole numbers",
        lambda: grad_call(torch.zeros(2, 3).int()),
        TypeError,
        "moe::finalize_routing_v2_grad: grad_y must be float32, float64, bfloat16 or float16, "
        "got int32",
    ),
    Refusal(
        "gradient of other tokens",
        lambda: grad_call(torch.zeros(3, 3)),
        ValueError,
        "moe::finalize_routing_v2_grad: grad_y must have size 2 in dimension 0, got shape [3, 3]",
    ),
    Refusal(
        "scales without rows",
        lambda: grad_call(expanded_x=None),
        ValueError,
        "moe::finalize_routing_v2_grad: expanded_x must be given when scales is, got None",
    ),
    Refusal(
        "rows of another shape",
        lambda: grad_call(expanded_x=torch.zeros(4, 3), active_num=3),
        ValueError,
        "moe::finalize_routing_v2_grad: expanded_x must have shape [3, 3], got [4, 3]",
    ),
    Refusal(
        "rows of the other mode",
        lambda: grad_call(expanded_x=torch.zeros(6, 3), drop_pad_mode=1),
        ValueError,
        "moe::finalize_routing_v2_grad: expanded_x must have shape [3, 2, 3], got [6, 3]",
    ),
    Refusal(
        "rows of another dtype",
        lambda: grad_call(expanded_x=torch.zeros(4, 3).bfloat16()),
        TypeError,
        "moe::finalize_routing_v2_grad: expanded_x must have the dtype of grad_y (float32), "
        "got bfloat16",
    ),
    Refusal(
        "a mode of the forward operator",
        lambda: grad_call(drop_pad_mode=2),
        ValueError,
        "moe::finalize_routing_v2_grad: drop_pad_mode must be one of [0, 1], got 2",
    ),
    Refusal(
        "negative active_num",
        lambda: grad_call(active_num=-1),
        ValueError,
        "moe::finalize_routing_v2_grad: active_num must be at least 0, got -1",
    ),
    Refusal(
        "negative expert_num",
        lambda: grad_call(drop_pad_mode=1, expert_num=-1),
        ValueError,
        "moe::finalize_routing_v2_grad: expert_num must be at least 0, got -1",
    ),
    Refusal(
        "negative capacity",
        lambda: grad_call(drop_pad_mode=1, expert_capacity=-1),
        ValueError,
        "moe::finalize_routing_v2_grad: expert_capacity must be at least 0, got -1",
    ),
    Refusal(
        "capacity forgotten",
        lambda: grad_call(drop_pad_mode=1, expert_capacity=0),
        ValueError,
        "moe::finalize_routing_v2_grad: expanded_x must have shape [3, 0, 3], got [3, 2, 3]",
    ),
    Refusal(
        "more places than int32 can name",
        lambda: grad_call(drop_pad_mode=1, expert_num=2**31, expert_capacity=1),
        ValueError,
        "moe::finalize_routing_v2_grad: grad_expanded_x, counted in rows, must have at most "
        "2147483647 elements, got 2147483648",
    ),
    Refusal(
        "more places than int64 can count",
        lambda: grad_call(drop_pad_mode=1, expert_num=2**40, expert_capacity=2**40),
        ValueError,
        "moe::finalize_routing_v2_grad: grad_expanded_x, counted in rows, must have at most "
        "2147483647 elements, got 1099511627776",
    ),
    Refusal(
        "bias of too many experts",
        lambda: grad_call(drop_pad_mode=1, bias=torch.zeros(4, 3), expert_idx=IDS),
        ValueError,
        "moe::finalize_routing_v2_grad: bias must have size 3 in dimension 0, got shape [4, 3]",
    ),
    Refusal(
        "row named twice",
        lambda: grad_call(row_of_slot=torch.tensor([0, 2, 1, 2])),
        IndexError,
        "moe::finalize_routing_v2_grad: expanded_row_idx must name each row at most once, got "
        "row 2 at positions 1 and 3",
    ),
    Refusal(
        "place named twice",
        lambda: grad_call(row_of_slot=torch.tensor([5, -1, -1, 5]), drop_pad_mode=1),
        IndexError,
        "moe::finalize_routing_v2_grad: expanded_row_idx must name each row at most once, got "
        "row 5 at positions 0 and 3",
    ),
    *index_refusals(
        "finalize_routing_v2_grad",
        "expert_idx",
        [
            (
                "id of no bias row, without scales",
                lambda: grad_call(
                    torch.zeros(4, 3),
                    scales=None,
                    bias=torch.zeros(2, 3),
                    expert_idx=IDS.reshape(4, 1),
                ),
                2,
                1,
                "[0, 2)",
            ),
        ],
    ),
    *index_refusals(
        "finalize_routing_v2_grad",
        "expanded_row_idx",
        [
            ("dropped", lambda: grad_call(row_of_slot=drop(GOOD_MAP, 3)), -1, 3, "[0, 4)"),
            (
                "past the slots, active",
                lambda: grad_call(
                    row_of_slot=torch.tensor([0, 4, 2, 3]),
                    active_num=2,
                    expanded_x=torch.zeros(2, 3),
                ),
                4,
                1,
                "[0, 4)",
            ),
            (
                "past the places",
                lambda: grad_call(row_of_slot=torch.tensor([5, 6, 0, -9]), drop_pad_mode=1),
                6,
                1,
                "[-1, 6)",
            ),
            (
                "below -1",
                lambda: grad_call(row_of_slot=torch.tensor([5, 1, 0, -2]), drop_pad_mode=1),
                -2,
                3,
                "[-1, 6)",
            ),
        ],
    ),
)

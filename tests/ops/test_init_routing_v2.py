"""init_routing_v2 and init_routing_v2_grad."""

import torch
from torch import Tensor

import torch_moe_ops

from .common import OpSuite, Refusal, index_refusals
from .data import (
    ALL_TO_ONE,
    BIG_CAPACITY,
    BIG_TOKENS,
    BIG_WIDTH,
    EVERY_EXPERT,
    UNEVEN,
    WIDTH,
    Sample,
    Values,
    capacity_map,
    drop,
    row_map,
)

SLOTS = UNEVEN.numel()
COUNTS = {"expert_tokens_count_or_cumsum_flag": 2}
TOTALS = {"expert_tokens_count_or_cumsum_flag": 1}
BEFORE = {"expert_tokens_before_capacity_flag": True}


def drop_pad(capacity: int, experts: int = 4) -> dict[str, int]:
    return {"drop_pad_mode": 1, "expert_capacity": capacity, "expert_num": experts}


def init_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype)
    return [
        Sample("uneven", (v(5, 3), UNEVEN)),
        Sample("int32 ids", (v(5, 3), UNEVEN.int()), {"expert_num": 4}),
        Sample("keep 4, totals", (v(5, 3), UNEVEN), {"active_num": 4, "expert_num": 4, **TOTALS}),
        Sample(
            "keep too many, counts",
            (v(5, 3), UNEVEN),
            {"active_num": 11, "expert_num": 6, **COUNTS},
        ),
        Sample("no capacity in mode 0", (v(5, 3), UNEVEN), {"expert_capacity": 1, **BEFORE}),
        Sample("overflow", (v(5, 3), UNEVEN), {**drop_pad(2), **BEFORE}),
        Sample("capacity 1", (v(5, 3), UNEVEN.int()), {**drop_pad(1), **TOTALS}),
        Sample("full capacity", (v(5, 3), UNEVEN), {**drop_pad(5, 5), **BEFORE, "active_num": 3}),
        Sample("huge ids", (v(2, 3), torch.tensor([[2**40, 0], [7, 2**40]]))),
        Sample("1-D ids", (v(4, 1), ALL_TO_ONE), {"expert_num": 3, **COUNTS}),
        Sample("1-D ids, overflow", (v(4, 1), ALL_TO_ONE), {**drop_pad(3, 3), **BEFORE}),
        Sample("every expert", (v(4, 37), EVERY_EXPERT), {**drop_pad(4, 3), **BEFORE}),
        Sample("one token", (v(1, 130), torch.tensor([[2, 0]])), drop_pad(1)),
        Sample("no tokens", (v(0, 4), UNEVEN[:0]), {"expert_num": 4, "active_num": 2, **TOTALS}),
        Sample("no tokens, no capacity", (v(0, 4), UNEVEN[:0]), {**drop_pad(0), **BEFORE}),
        Sample("no width", (v(5, 0), UNEVEN)),
        Sample("no width, overflow", (v(5, 0), UNEVEN), drop_pad(2)),
    ]


def init_sample(ids: Tensor = UNEVEN, x: Tensor | None = None, **options: int) -> Sample:
    return Sample("", (torch.zeros(5, 3) if x is None else x, ids), options)


def with_id(value: int) -> Tensor:
    """UNEVEN with one id replaced: the one at flat position 6."""
    ids = UNEVEN.clone()
    ids[3, 0] = value
    return ids


class TestInitRoutingV2(OpSuite):
    op = "init_routing_v2"
    moves_data = True
    samples = staticmethod(init_samples)

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        v = Values(dtype)
        ids = v.ids(BIG_TOKENS, 2, experts=7)
        return Sample(
            "big", (v(BIG_TOKENS, BIG_WIDTH), ids), {**drop_pad(BIG_CAPACITY, 7), **BEFORE}
        )

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        v = Values(torch.float32)
        options = drop_pad((tokens + 1) // 2)
        return Sample(f"{tokens} tokens", (v(tokens, WIDTH), v.ids(tokens, 2, experts=4)), options)

    refusals = (
        Refusal(
            "x 1-D",
            lambda: init_sample(x=torch.zeros(5)),
            ValueError,
            "moe::init_routing_v2: x must be 2-D, got shape [5]",
        ),
        Refusal(
            "x of whole numbers",
            lambda: init_sample(x=torch.zeros(5, 3).int()),
            TypeError,
            "moe::init_routing_v2: x must be float32, float64, bfloat16 or float16, got int32",
        ),
        Refusal(
            "ids 3-D",
            lambda: init_sample(UNEVEN[..., None]),
            ValueError,
            "moe::init_routing_v2: expert_idx must be 1-D or 2-D, got shape [5, 2, 1]",
        ),
        Refusal(
            "ids floating",
            lambda: init_sample(UNEVEN.double()),
            TypeError,
            "moe::init_routing_v2: expert_idx must be int32 or int64, got float64",
        ),
        Refusal(
            "ids of too few tokens",
            lambda: init_sample(UNEVEN[:4]),
            ValueError,
            "moe::init_routing_v2: expert_idx must have size 5 in dimension 0, got shape [4, 2]",
        ),
        Refusal(
            "no choices",
            lambda: init_sample(UNEVEN[:, :0]),
            ValueError,
            "moe::init_routing_v2: size of expert_idx in dimension 1 must be at least 1, got 0",
        ),
        Refusal(
            "two devices",
            lambda: init_sample(UNEVEN.to("meta")),
            RuntimeError,
            "moe::init_routing_v2: expert_idx must be on the device of x (cpu), got meta",
        ),
        Refusal(
            "unknown mode",
            lambda: init_sample(drop_pad_mode=2),
            ValueError,
            "moe::init_routing_v2: drop_pad_mode must be one of [0, 1], got 2",
        ),
        Refusal(
            "unknown flag",
            lambda: init_sample(expert_tokens_count_or_cumsum_flag=3),
            ValueError,
            "moe::init_routing_v2: expert_tokens_count_or_cumsum_flag must be one of [0, 1, 2], "
            "got 3",
        ),
        Refusal(
            "negative active_num",
            lambda: init_sample(active_num=-1),
            ValueError,
            "moe::init_routing_v2: active_num must be at least 0, got -1",
        ),
        Refusal(
            "negative expert_num",
            lambda: init_sample(expert_num=-4),
            ValueError,
            "moe::init_routing_v2: expert_num must be at least 0, got -4",
        ),
        Refusal(
            "counts of unknown experts",
            lambda: init_sample(expert_tokens_count_or_cumsum_flag=2),
            ValueError,
            "moe::init_routing_v2: expert_num must be at least 1, got 0",
        ),
        Refusal(
            "capacity of unknown experts",
            lambda: init_sample(drop_pad_mode=1, expert_capacity=2),
            ValueError,
            "moe::init_routing_v2: expert_num must be at least 1, got 0",
        ),
        Refusal(
            "capacity forgotten",
            lambda: init_sample(**drop_pad(0)),
            ValueError,
            "moe::init_routing_v2: expert_capacity must be at least 1, got 0",
        ),
        Refusal(
            "more experts than int32 can name",
            lambda: init_sample(**drop_pad(1, 2**31)),
            ValueError,
            "moe::init_routing_v2: expert_num must be at most the largest int32 (2147483647), got "
            "2147483648",
        ),
        Refusal(
            "more places than int32 can name",
            lambda: init_sample(**drop_pad(5, 2**30)),
            ValueError,
            "moe::init_routing_v2: expanded_x, counted in rows, must have at most 2147483647 "
            "elements, got 5368709120",
        ),
        Refusal(
            "capacity beyond the tokens",
            lambda: init_sample(**drop_pad(6)),
            ValueError,
            "moe::init_routing_v2: expert_capacity must be at most the number of tokens in x (5), "
            "got 6",
        ),
        Refusal(
            "negative without expert_num",
            lambda: init_sample(with_id(-3)),
            IndexError,
            "moe::init_routing_v2: expert_idx must be at least 0, got -3 at position 6",
        ),
        *index_refusals(
            "init_routing_v2",
            "expert_idx",
            [
                ("id = E", lambda: init_sample(expert_num=3), 3, 0, "[0, 3)"),
                ("the first of many", lambda: init_sample(**drop_pad(2, 3)), 3, 0, "[0, 3)"),
                (
                    "int32 limit",
                    lambda: init_sample(with_id(2**31 - 1), expert_num=4),
                    2**31 - 1,
                    6,
                    "[0, 4)",
                ),
                (
                    "wraps around in 32 bits",
                    lambda: init_sample(with_id(2**32 + 1), **drop_pad(2)),
                    2**32 + 1,
                    6,
                    "[0, 4)",
                ),
                (
                    "negative with experts",
                    lambda: init_sample(with_id(-1).int(), expert_num=4),
                    -1,
                    6,
                    "[0, 4)",
                ),
            ],
        ),
    )

    def test_hand_table(self) -> None:
        x = torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0]])
        function = torch_moe_ops.init_routing_v2
        # Slots of expert 0: 1, 2, 7, 8; of 1: 3, 6; of 2: none; of 3: 0, 4, 5, 9.
        rows, row_of_slot, counts, before = function(
            x, UNEVEN, expert_num=4, active_num=6, **COUNTS, **BEFORE
        )
        assert rows.flatten().tolist() == [10, 20, 40, 50, 20, 40]
        assert row_of_slot.tolist() == [6, 0, 1, 4, 7, 8, 5, 2, 3, 9]
        assert counts.tolist() == [4, 2, 0, 4]
        assert before.shape == (0,)
        assert function(x, UNEVEN, expert_num=4, **TOTALS)[2].tolist() == [4, 6, 6, 10]

        rows, row_of_slot, counts, before = function(x, UNEVEN, **drop_pad(3), **TOTALS, **BEFORE)
        assert rows[..., 0].tolist() == [[10, 20, 40], [20, 40, 0], [0, 0, 0], [10, 30, 30]]
        assert row_of_slot.tolist() == [9, 0, 1, 3, 10, 11, 4, 2, -1, -1]
        assert counts.shape == (0,)
        assert before.tolist() == [4, 2, 0, 4]
        assert {counts.dtype, before.dtype, row_of_slot.dtype} == {torch.int32}


def grad_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype)
    rows = row_map(UNEVEN)
    places = capacity_map(UNEVEN, 2)
    return [
        Sample("uneven", (v(SLOTS, 3), rows, 2)),
        Sample("int64 map", (v(SLOTS, 3), rows.long(), 2, 0, 0)),
        Sample("active", (v(4, 3), rows, 2), {"active_num": 4}),
        Sample("active beyond the slots", (v(SLOTS, 3), rows, 2), {"active_num": SLOTS + 7}),
        Sample("overflow", (v(4, 2, 3), places, 2, 1)),
        Sample("overflow, active_num not used", (v(4, 2, 3), places.long(), 2, 1, 3)),
        Sample("all dropped", (v(4, 2, 3), drop(places, *range(SLOTS)), 2), {"drop_pad_mode": 1}),
        Sample("one choice", (v(3, 3, 1), capacity_map(ALL_TO_ONE, 3), 1, 1)),
        Sample("every expert", (v(12, 37), row_map(EVERY_EXPERT), 3)),
        Sample("one token", (v(4, 1, 130), torch.tensor([2, 0]), 2, 1)),
        Sample("no tokens", (v(0, 4), rows[:0], 2)),
        Sample("no tokens, no capacity", (v(4, 0, 3), rows[:0], 2, 1)),
        Sample("no width", (v(SLOTS, 0), rows, 2)),
    ]


def grad_sample(
    rows: Tensor, top_k: int = 2, mode: int = 0, active_num: int = 0, grad: Tensor | None = None
) -> Sample:
    if grad is None:
        grad = torch.zeros(3, 2, 3) if mode == 1 else torch.zeros(4, 3)
    return Sample("", (grad, rows, top_k, mode, active_num))


GOOD_MAP = torch.tensor([0, 1, 2, 3])


class TestInitRoutingV2Grad(OpSuite):
    op = "init_routing_v2_grad"
    samples = staticmethod(grad_samples)

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        v = Values(dtype)
        places = capacity_map(v.ids(BIG_TOKENS, 2, experts=7), BIG_CAPACITY)
        return Sample("big", (v(7, BIG_CAPACITY, BIG_WIDTH), places, 2, 1))

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        v = Values(torch.float32)
        capacity = (tokens + 1) // 2
        places = capacity_map(v.ids(tokens, 2, experts=4), capacity)
        return Sample(f"{tokens} tokens", (v(4, capacity, WIDTH), places, 2, 1))

    refusals = (
        Refusal(
            "gradient of the other mode",
            lambda: grad_sample(GOOD_MAP, mode=1, grad=torch.zeros(4, 3)),
            ValueError,
            "moe::init_routing_v2_grad: grad_expanded_x must be 3-D, got shape [4, 3]",
        ),
        Refusal(
            "gradient 3-D in mode 0",
            lambda: grad_sample(GOOD_MAP, grad=torch.zeros(2, 2, 3)),
            ValueError,
            "moe::init_routing_v2_grad: grad_expanded_x must be 2-D, got shape [2, 2, 3]",
        ),
        Refusal(
            "gradient of whole numbers",
            lambda: grad_sample(GOOD_MAP, grad=torch.zeros(4, 3).long()),
            TypeError,
            "moe::init_routing_v2_grad: grad_expanded_x must be float32, float64, bfloat16 or "
            "float16, got int64",
        ),
        Refusal(
            "map 2-D",
            lambda: grad_sample(GOOD_MAP.reshape(2, 2)),
            ValueError,
            "moe::init_routing_v2_grad: expanded_row_idx must be 1-D, got shape [2, 2]",
        ),
        Refusal(
            "map floating",
            lambda: grad_sample(GOOD_MAP.float()),
            TypeError,
            "moe::init_routing_v2_grad: expanded_row_idx must be int32 or int64, got float32",
        ),
        Refusal(
            "two devices",
            lambda: grad_sample(GOOD_MAP.to("meta")),
            RuntimeError,
            "moe::init_routing_v2_grad: expanded_row_idx must be on the device of "
            "grad_expanded_x (cpu), got meta",
        ),
        Refusal(
            "no choices",
            lambda: grad_sample(GOOD_MAP, top_k=0),
            ValueError,
            "moe::init_routing_v2_grad: top_k must be at least 1, got 0",
        ),
        Refusal(
            "slots that are no multiple",
            lambda: grad_sample(GOOD_MAP, top_k=3),
            ValueError,
            "moe::init_routing_v2_grad: number of expanded_row_idx must be a multiple of top_k "
            "(3), got 4",
        ),
        Refusal(
            "unknown mode",
            lambda: grad_sample(GOOD_MAP, mode=3),
            ValueError,
            "moe::init_routing_v2_grad: drop_pad_mode must be one of [0, 1], got 3",
        ),
        Refusal(
            "negative active_num",
            lambda: grad_sample(GOOD_MAP, active_num=-2),
            ValueError,
            "moe::init_routing_v2_grad: active_num must be at least 0, got -2",
        ),
        Refusal(
            "rows that are not active_num",
            lambda: grad_sample(GOOD_MAP, active_num=3),
            ValueError,
            "moe::init_routing_v2_grad: grad_expanded_x must have size 3 in dimension 0, got shape "
            "[4, 3]",
        ),
        Refusal(
            "rows that are not all",
            lambda: grad_sample(GOOD_MAP, grad=torch.zeros(3, 3)),
            ValueError,
            "moe::init_routing_v2_grad: grad_expanded_x must have size 4 in dimension 0, got shape "
            "[3, 3]",
        ),
        *index_refusals(
            "init_routing_v2_grad",
            "expanded_row_idx",
            [
                ("dropped in mode 0", lambda: grad_sample(drop(GOOD_MAP, 2)), -1, 2, "[0, 4)"),
                (
                    "past the slots, active",
                    lambda: grad_sample(
                        torch.tensor([0, 4, 2, 3]), active_num=1, grad=torch.zeros(1, 3)
                    ),
                    4,
                    1,
                    "[0, 4)",
                ),
                (
                    "past the places",
                    lambda: grad_sample(torch.tensor([5, 0, 6, -9]), mode=1),
                    6,
                    2,
                    "[-1, 6)",
                ),
                (
                    "below -1",
                    lambda: grad_sample(torch.tensor([5, 0, -2, -1]).int(), mode=1),
                    -2,
                    2,
                    "[-1, 6)",
                ),
            ],
        ),
    )

    def test_hand_table(self) -> None:
        grad = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
        function = torch_moe_ops.init_routing_v2_grad
        rows = torch.tensor([2, 0, 3, 1])
        assert function(grad, rows, 2).flatten().tolist() == [101, 1010]
        assert function(grad[:3], rows, 2, active_num=3).flatten().tolist() == [101, 10]
        places = torch.tensor([3, -1, -1, 0])
        assert function(grad.reshape(2, 2, 1), places, 2, 1).flatten().tolist() == [1000, 1]

    def test_dropped_slot_ignores_nan(self) -> None:
        grad = torch.tensor([[[float("nan")], [2.0]]])
        result = torch_moe_ops.init_routing_v2_grad(grad, torch.tensor([-1, 1]), 1, 1)
        assert result.flatten().tolist() == [0, 2]

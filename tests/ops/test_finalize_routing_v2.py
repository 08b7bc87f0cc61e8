"""finalize_routing_v2 and finalize_routing_v2_grad."""

from typing import Any

import pytest
import torch

import torch_moe_ops

from . import finalize_refusals
from .common import OpSuite, operators_in_backward
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
    k_major,
    row_map,
)

SLOTS = UNEVEN.numel()
ROWS = row_map(UNEVEN)
PLACES = capacity_map(UNEVEN, 2)


def mode(value: int) -> dict[str, int]:
    return {"drop_pad_mode": value}


def finalize_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype)

    def everything(
        tokens: int = 5, width: int = 3, experts: int = 4, top_k: int = 2
    ) -> dict[str, Any]:
        return {
            "x1": v(tokens, width),
            "x2": v(tokens, width),
            "bias": v(experts, width),
            "scales": v(tokens, top_k),
            "expert_idx": UNEVEN[:tokens] if top_k == 2 else EVERY_EXPERT[:tokens],
        }

    def only_scales(dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"scales": v(5, 2, dtype=dtype)}

    def biased() -> dict[str, Any]:
        return {"bias": v(4, 3), "expert_idx": UNEVEN.int()}

    return [
        Sample("everything, mode 2", (v(SLOTS, 3), ROWS), {**everything(), **mode(2)}),
        Sample("everything, mode 0", (v(SLOTS, 3), k_major(ROWS, 2)), everything()),
        Sample("everything, mode 1", (v(4, 2, 3), k_major(PLACES, 2)), {**everything(), **mode(1)}),
        Sample("everything, mode 3", (v(4, 2, 3), PLACES.long()), {**everything(), **mode(3)}),
        Sample("scales, mode 0", (v(SLOTS, 3), k_major(ROWS, 2).long()), only_scales()),
        Sample(
            "scales, mode 1",
            (v(4, 2, 3), k_major(PLACES, 2), None, None),
            {**only_scales(), **mode(1)},
        ),
        Sample("scales, mode 2", (v(SLOTS, 3), ROWS), {**only_scales(), **mode(2)}),
        Sample("scales, mode 3", (v(4, 2, 3), PLACES), {**only_scales(), **mode(3)}),
        Sample(
            "float32 scales", (v(SLOTS, 3), ROWS), {**only_scales(dtype=torch.float32), **mode(2)}
        ),
        Sample(
            "float64 scales",
            (v(4, 2, 3), PLACES, v(5, 3), v(5, 3)),
            {**only_scales(dtype=torch.float64), **biased(), **mode(3)},
        ),
        Sample("bias", (v(4, 2, 3), PLACES), {**only_scales(), **biased(), **mode(3)}),
        Sample("bias, cut off", (v(6, 3), ROWS), {**only_scales(), **biased(), **mode(2)}),
        Sample("cut off, k-major", (v(6, 3), k_major(ROWS, 2)), only_scales()),
        Sample(
            "everything dropped",
            (v(4, 2, 3), drop(PLACES, *range(SLOTS))),
            {**everything(), **mode(3)},
        ),
        Sample("no places", (v(4, 0, 3), drop(PLACES, *range(SLOTS))), {**everything(), **mode(3)}),
        Sample("rows only", (v(SLOTS, 3), ROWS), mode(2)),
        Sample("rows only, k-major places", (v(4, 2, 3), PLACES), mode(1)),
        Sample("skip 1", (v(SLOTS, 3), ROWS, v(SLOTS, 3))),
        Sample("both skips, no scales", (v(4, 2, 3), PLACES, v(SLOTS, 3), v(SLOTS, 3)), mode(3)),
        Sample(
            "bias, no scales",
            (
                v(3, 3, 1),
                capacity_map(ALL_TO_ONE, 3),
                None,
                None,
                v(3, 1),
                None,
                ALL_TO_ONE[:, None],
            ),
            mode(3),
        ),
        Sample(
            "ids without bias",
            (v(SLOTS, 3), ROWS),
            {**only_scales(), "expert_idx": UNEVEN, **mode(2)},
        ),
        Sample(
            "every expert",
            (v(12, 37), row_map(EVERY_EXPERT)),
            {**everything(4, 37, 3, 3), **mode(2)},
        ),
        Sample(
            "fewer experts than choices",
            (v(12, 3), row_map(EVERY_EXPERT)),
            {**everything(4, 3, 2, 3), "expert_idx": EVERY_EXPERT % 2, **mode(2)},
        ),
        Sample(
            "fewer experts than choices, places",
            (v(2, 4, 3), capacity_map(EVERY_EXPERT % 2, 4)),
            {**everything(4, 3, 2, 3), "expert_idx": EVERY_EXPERT % 2, **mode(3)},
        ),
        Sample("one token", (v(4, 1, 130), torch.tensor([2, -1])), {"scales": v(1, 2), **mode(1)}),
        Sample("no tokens", (v(0, 3), ROWS[:0]), {**everything(0), **mode(2)}),
        Sample("no tokens, no capacity", (v(4, 0, 3), ROWS[:0]), {**everything(0), **mode(3)}),
        Sample("no width", (v(SLOTS, 0), ROWS), {**everything(width=0), **mode(2)}),
    ]


class TestFinalizeRoutingV2(OpSuite):
    op = "finalize_routing_v2"
    samples = staticmethod(finalize_samples)

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        v = Values(dtype)
        ids = v.ids(BIG_TOKENS, 2, experts=7)
        options = {
            "x1": v(BIG_TOKENS, BIG_WIDTH),
            "x2": v(BIG_TOKENS, BIG_WIDTH),
            "bias": v(7, BIG_WIDTH),
            "scales": v(BIG_TOKENS, 2),
            "expert_idx": ids,
            **mode(3),
        }
        return Sample(
            "big", (v(7, BIG_CAPACITY, BIG_WIDTH), capacity_map(ids, BIG_CAPACITY)), options
        )

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        v = Values(torch.float32)
        ids = v.ids(tokens, 2, experts=4)
        capacity = (tokens + 1) // 2
        options = {
            "x1": v(tokens, WIDTH),
            "bias": v(4, WIDTH),
            "scales": v(tokens, 2),
            "expert_idx": ids,
            **mode(3),
        }
        return Sample(
            f"{tokens} tokens", (v(4, capacity, WIDTH), capacity_map(ids, capacity)), options
        )

    refusals = finalize_refusals.FORWARD

    @pytest.mark.parametrize("number", [0, 1, 2, 3])
    def test_hand_table(self, number: int) -> None:
        rows = torch.tensor([[1.0], [10.0], [100.0], [1000.0], [9e9], [9e9]])
        drop_pad = number in (1, 3)
        row_of_slot = torch.tensor([2, -1, 3, 1]) if drop_pad else torch.tensor([2, 0, 3, 1])
        if number in (0, 1):
            row_of_slot = k_major(row_of_slot, 2)
        out = torch_moe_ops.finalize_routing_v2(
            rows.reshape(3, 2, 1) if drop_pad else rows[:4],
            row_of_slot,
            torch.tensor([[0.25], [0.5]]),
            torch.tensor([[2.0], [4.0]]),
            torch.tensor([[3.0], [5.0], [7.0]]),
            torch.tensor([[2.0, 3.0], [-1.0, 5.0]]),
            torch.tensor([[0, 2], [1, 0]]),
            drop_pad_mode=number,
        )
        second = 0 if drop_pad else 3 * (1 + 7)
        assert out.flatten().tolist() == [
            0.25 + 2 + 2 * (100 + 3) + second,
            0.5 + 4 - 1 * (1000 + 5) + 5 * (10 + 3),
        ]

    def test_dropped_slot_ignores_nan(self) -> None:
        nan = float("nan")
        rows = torch.tensor([[[nan], [2.0]]], requires_grad=True)
        scales = torch.tensor([[nan], [0.5]], requires_grad=True)
        bias = torch.tensor([[1.0]], requires_grad=True)
        ids = torch.zeros(2, 1, dtype=torch.int64)
        out = torch_moe_ops.finalize_routing_v2(
            rows, torch.tensor([-1, 1]), None, None, bias, scales, ids, drop_pad_mode=3
        )
        assert out.flatten().tolist() == [0, 1.5]
        # Token 0 has lost its only slot: not even NaN comes back from there.
        out.backward(torch.tensor([[nan], [1.0]]))
        assert rows.grad.flatten().tolist() == [0, 0.5]
        assert scales.grad.flatten().tolist() == [0, 3]
        assert bias.grad.flatten().tolist() == [0.5]

    def test_no_work_for_frozen_inputs(self) -> None:
        """The skips get the gradient as it is; the rows and scales come from one operator."""
        sample = self.samples(torch.float32)[0]
        names = ["expanded_x", "x1", "x2", "bias", "scales"]
        for wanted, expected in (
            ({"x1", "x2"}, []),
            ({"expanded_x"}, ["finalize_routing_v2_grad"]),
            ({"expanded_x", "scales", "x1"}, ["finalize_routing_v2_grad"]),
        ):
            flags = [name in wanted for name in names]
            assert operators_in_backward(self.function, sample, flags) == expected

    def test_scale_zero_is_a_product_like_any_other(self) -> None:
        """Only token_unpermute skips a weight of 0."""
        rows = torch.tensor([[float("nan")], [3.0]])
        out = torch_moe_ops.finalize_routing_v2(
            rows, torch.tensor([0, 1]), scales=torch.tensor([[0.0], [0.0]]), drop_pad_mode=2
        )
        assert out[0].isnan()
        assert out[1].item() == 0

    def test_scale_is_not_rounded_to_the_dtype_of_the_rows(self) -> None:
        rows = torch.tensor([[1024.0], [-1024.0]], dtype=torch.bfloat16)
        scales = torch.tensor([[1 + 2**-10, 1.0]])
        out = torch_moe_ops.finalize_routing_v2(
            rows, torch.tensor([0, 1]), scales=scales, drop_pad_mode=2
        )
        assert out.flatten().tolist() == [1]


def grad_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype, seed=2)
    places = {"drop_pad_mode": 1, "expert_num": 4, "expert_capacity": 2}

    def scaled(*shape: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
        return {"expanded_x": v(*shape), "scales": v(5, 2, dtype=dtype)}

    def biased(width: int = 3) -> dict[str, Any]:
        return {"bias": v(4, width), "expert_idx": UNEVEN}

    # Rows 2 and 5 have no slot, row 0 is where slot 1 stays out.
    gaps = drop(PLACES, 1)
    return [
        Sample("bias, places", (v(5, 3), PLACES), {**scaled(4, 2, 3), **biased(), **places}),
        Sample("bias", (v(5, 3), ROWS.long()), {**scaled(SLOTS, 3), **biased()}),
        Sample("bias, active", (v(5, 3), ROWS), {**scaled(6, 3), **biased(), "active_num": 6}),
        Sample("scales", (v(5, 3), ROWS), scaled(SLOTS, 3)),
        Sample("active", (v(5, 3), ROWS), {**scaled(4, 3), "active_num": 4}),
        Sample(
            "active beyond the slots",
            (v(5, 3), ROWS),
            {**scaled(SLOTS, 3), "active_num": SLOTS + 1},
        ),
        Sample(
            "places, active_num not used",
            (v(5, 3), gaps),
            {**scaled(4, 2, 3), **places, "active_num": 1},
        ),
        Sample(
            "all dropped",
            (v(5, 3), drop(PLACES, *range(SLOTS))),
            {**scaled(4, 2, 3), **biased(), **places},
        ),
        Sample(
            "no places",
            (v(5, 3), drop(PLACES, *range(SLOTS))),
            {**scaled(4, 0, 3), **biased(), **places, "expert_capacity": 0},
        ),
        Sample("float32 scales", (v(5, 3), ROWS), scaled(SLOTS, 3, dtype=torch.float32)),
        Sample(
            "float64 scales", (v(5, 3), PLACES), {**scaled(4, 2, 3, dtype=torch.float64), **places}
        ),
        Sample("no scales", (v(SLOTS, 3), ROWS)),
        Sample("no scales, active", (v(SLOTS, 3), ROWS, None), {"active_num": 3}),
        Sample("no scales, places", (v(SLOTS, 3), gaps), places),
        Sample("no scales but rows", (v(SLOTS, 3), gaps, v(4, 2, 3)), places),
        Sample(
            "ids without bias", (v(5, 3), ROWS), {**scaled(SLOTS, 3), "expert_idx": UNEVEN.int()}
        ),
        Sample("every expert", (v(4, 37), row_map(EVERY_EXPERT), v(12, 37), v(4, 3))),
        Sample(
            "one token",
            (v(1, 130), torch.tensor([3, 0]), v(4, 1, 130), v(1, 2)),
            {**places, "expert_capacity": 1},
        ),
        Sample("one wide", (v(4, 1), row_map(ALL_TO_ONE), v(4, 1), v(4, 1))),
        Sample("no tokens", (v(0, 3), ROWS[:0], v(0, 3), v(0, 2), UNEVEN[:0], v(4, 3))),
        Sample("no tokens but places", (v(0, 3), ROWS[:0], v(4, 2, 3), v(0, 2)), places),
        Sample(
            "no tokens, no capacity",
            (v(0, 3), ROWS[:0], v(4, 0, 3), v(0, 2)),
            {**places, "expert_capacity": 0},
        ),
        Sample("no width", (v(5, 0), ROWS), {**scaled(SLOTS, 0), **biased(0)}),
    ]


class TestFinalizeRoutingV2Grad(OpSuite):
    op = "finalize_routing_v2_grad"
    samples = staticmethod(grad_samples)

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        v = Values(dtype, seed=2)
        ids = v.ids(BIG_TOKENS, 2, experts=7)
        args = (
            v(BIG_TOKENS, BIG_WIDTH),
            capacity_map(ids, BIG_CAPACITY),
            v(7, BIG_CAPACITY, BIG_WIDTH),
            v(BIG_TOKENS, 2),
            ids,
            v(7, BIG_WIDTH),
        )
        return Sample(
            "big", args, {"drop_pad_mode": 1, "expert_num": 7, "expert_capacity": BIG_CAPACITY}
        )

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        v = Values(torch.float32)
        ids = v.ids(tokens, 2, experts=4)
        args = (
            v(tokens, WIDTH),
            row_map(ids),
            v(2 * tokens, WIDTH),
            v(tokens, 2),
            ids,
            v(4, WIDTH),
        )
        return Sample(f"{tokens} tokens", args)

    refusals = finalize_refusals.GRAD

    def test_hand_table(self) -> None:
        rows = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
        grad = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
        scales = torch.tensor([[0.5, 2.0], [0.0, -1.0]])
        bias = torch.tensor([[10.0, 20.0], [30.0, 40.0]])
        rows_grad, scales_grad = torch_moe_ops.finalize_routing_v2_grad(
            grad,
            torch.tensor([2, -1, 0, 3]),
            rows,
            scales,
            torch.tensor([[1, 1], [0, 1]]),
            bias,
            drop_pad_mode=1,
            expert_num=2,
            expert_capacity=2,
        )
        # Row 1 is named by nobody. A dropped slot has no gradient, not even the bias part.
        assert rows_grad.tolist() == [[[0, 0], [0, 0]], [[0.5, 5], [-100, -1000]]]
        assert scales_grad.tolist() == [[35 + 460, 0], [1100 + 22000, 3700 + 48000]]

    def test_unnamed_rows_are_zero_in_mode_0(self) -> None:
        """With active_num and with fewer slots than rows named, nothing is left uninitialized."""
        for _ in range(10):
            poison = torch.full((3, 2), float("nan"))
            del poison
            rows_grad, scales_grad = torch_moe_ops.finalize_routing_v2_grad(
                torch.tensor([[1.0, 2.0]] * 4), torch.tensor([3, 1, 2, 0]), active_num=3
            )
            assert rows_grad.tolist() == [[1, 2]] * 3
            assert scales_grad.shape == (0,)

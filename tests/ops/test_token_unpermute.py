"""token_unpermute and token_unpermute_grad."""

import pytest
import torch
from torch import Tensor

import torch_moe_ops

from .common import OpSuite, Refusal, index_refusals
from .data import (
    ALL_TO_ONE,
    BIG_ROWS,
    BIG_TOKENS,
    BIG_WIDTH,
    EVERY_EXPERT,
    UNEVEN,
    WIDTH,
    Sample,
    Values,
    drop,
    row_map,
)

SLOTS = UNEVEN.numel()
ROWS = row_map(UNEVEN)


def with_zeros(probs: Tensor) -> Tensor:
    """Some exactly zero weights."""
    probs = probs.clone()
    probs[0, 1] = probs[3, 0] = probs[4] = 0
    return probs


def unpermute_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype)
    wide, narrow = torch.float64, torch.bfloat16
    return [
        Sample("uneven", (v(SLOTS, 3), ROWS, v(5, 2))),
        Sample(
            "int64 map", (v(SLOTS, 3), ROWS.long()), {"probs": v(5, 2), "restore_shape": [5, 3]}
        ),
        Sample("no probs", (v(SLOTS, 3), ROWS)),
        Sample("no probs, cut off and dropped", (v(6, 3), drop(ROWS, 1, 5))),
        Sample("zero probs", (v(SLOTS, 3), ROWS, with_zeros(v(5, 2)))),
        Sample("dropped", (v(SLOTS, 3), drop(ROWS, 0, 4, 5), v(5, 2), False, None)),
        Sample("cut off", (v(4, 3), ROWS, v(5, 2))),
        Sample("all cut off", (v(0, 3), ROWS, v(5, 2))),
        Sample("rows beyond the slots", (v(SLOTS + 3, 3), ROWS + 3, v(5, 2))),
        Sample("a gap in the rows", (v(SLOTS + 3, 3), ROWS + 3 * (ROWS > 4), v(5, 2))),
        Sample("float32 probs", (v(SLOTS, 3), ROWS, v(5, 2, dtype=torch.float32))),
        Sample("float64 probs", (v(SLOTS, 3), ROWS, v(5, 2, dtype=wide))),
        Sample("bfloat16 probs", (v(SLOTS, 3), ROWS, v(5, 2, dtype=narrow))),
        Sample("one choice", (v(4, 1), row_map(ALL_TO_ONE), v(4, 1))),
        Sample("every expert", (v(12, 37), row_map(EVERY_EXPERT), v(4, 3))),
        Sample("one token", (v(2, 130), torch.tensor([1, 0]), v(1, 2))),
        Sample("no tokens", (v(0, 4), ROWS[:0], v(0, 2))),
        Sample("no tokens but rows", (v(3, 4), ROWS[:0], v(0, 2))),
        Sample("no tokens, no probs", (v(0, 4), ROWS[:0])),
        Sample("no width", (v(SLOTS, 0), ROWS, v(5, 2))),
        Sample("more dimensions", (v(SLOTS, 3, 2), drop(ROWS, 2), v(5, 2))),
    ]


def shared_refusals(op: str, call: "type[Call]") -> list[Refusal]:
    """What forward and grad refuse in the same words."""
    good_map = torch.tensor([0, 1, 2, 3])
    return [
        Refusal(
            "rows 1-D",
            lambda: call.sample(rows=torch.zeros(4)),
            ValueError,
            f"moe::{op}: permuted_tokens must be at least 2-D, got shape [4]",
        ),
        Refusal(
            "rows of whole numbers",
            lambda: call.sample(rows=torch.zeros(4, 3).long()),
            TypeError,
            f"moe::{op}: permuted_tokens must be float32, float64, bfloat16 or float16, got int64",
        ),
        Refusal(
            "map 2-D",
            lambda: call.sample(row_map=good_map[None]),
            ValueError,
            f"moe::{op}: sorted_indices must be 1-D, got shape [1, 4]",
        ),
        Refusal(
            "map floating",
            lambda: call.sample(row_map=good_map.half()),
            TypeError,
            f"moe::{op}: sorted_indices must be int32 or int64, got float16",
        ),
        Refusal(
            "map on another device",
            lambda: call.sample(row_map=good_map.to("meta")),
            RuntimeError,
            f"moe::{op}: sorted_indices must be on the device of permuted_tokens (cpu), got meta",
        ),
        Refusal(
            "probs 1-D",
            lambda: call.sample(probs=torch.ones(4)),
            ValueError,
            f"moe::{op}: probs must be 2-D, got shape [4]",
        ),
        Refusal(
            "probs of whole numbers",
            lambda: call.sample(probs=torch.ones(2, 2).int()),
            TypeError,
            f"moe::{op}: probs must be float32, float64, bfloat16 or float16, got int32",
        ),
        Refusal(
            "probs on another device",
            lambda: call.sample(probs=torch.ones(2, 2, device="meta")),
            RuntimeError,
            f"moe::{op}: probs must be on the device of permuted_tokens (cpu), got meta",
        ),
        Refusal(
            "probs without choices",
            lambda: call.sample(probs=torch.ones(2, 0)),
            ValueError,
            f"moe::{op}: size of probs in dimension 1 must be at least 1, got 0",
        ),
        Refusal(
            "probs of too many tokens",
            lambda: call.sample(probs=torch.ones(3, 2)),
            ValueError,
            f"moe::{op}: probs must have as many elements as sorted_indices (4), got shape [3, 2]",
        ),
        Refusal(
            "padded_mode",
            lambda: call.sample(padded_mode=True),
            NotImplementedError,
            f"moe::{op}: padded_mode must be False, got True",
        ),
        *index_refusals(
            op,
            "sorted_indices",
            [
                (
                    "past the end",
                    lambda: call.sample(row_map=torch.tensor([0, 1, 2, 4])),
                    4,
                    3,
                    "[-1, 4)",
                ),
                (
                    "the first of two",
                    lambda: call.sample(row_map=torch.tensor([0, -2, 7, 3])),
                    -2,
                    1,
                    "[-1, 4)",
                ),
                (
                    "past the slots, rows cut off",
                    lambda: call.sample(rows=torch.zeros(1, 3), row_map=torch.tensor([0, 9, 2, 3])),
                    9,
                    1,
                    "[-1, 4)",
                ),
                (
                    "past the rows, more rows than slots",
                    lambda: call.sample(rows=torch.zeros(6, 3), row_map=torch.tensor([5, 0, 6, 3])),
                    6,
                    2,
                    "[-1, 6)",
                ),
                (
                    "wraps around in 32 bits",
                    lambda: call.sample(row_map=torch.tensor([0, 1, -(2**32) + 2, 3])),
                    -(2**32) + 2,
                    2,
                    "[-1, 4)",
                ),
                (
                    "past the end at a slot of prob 0",
                    lambda: call.sample(
                        row_map=torch.tensor([0, 1, 2, 7]), probs=torch.zeros(2, 2)
                    ),
                    7,
                    3,
                    "[-1, 4)",
                ),
            ],
        ),
    ]


class Call:
    """A valid call of token_unpermute with one thing changed."""

    @staticmethod
    def sample(
        rows: Tensor | None = None,
        row_map: Tensor | None = None,
        probs: Tensor | None = None,
        padded_mode: bool = False,
    ) -> Sample:
        rows = torch.zeros(4, 3) if rows is None else rows
        row_map = torch.tensor([0, 1, 2, 3]) if row_map is None else row_map
        probs = torch.ones(2, 2) if probs is None else probs
        return Sample("", (rows, row_map, probs, padded_mode))


class GradCall(Call):
    """The same for token_unpermute_grad."""

    @staticmethod
    def sample(
        rows: Tensor | None = None,
        row_map: Tensor | None = None,
        probs: Tensor | None = None,
        padded_mode: bool = False,
        grad: Tensor | None = None,
    ) -> Sample:
        rows, row_map, probs, padded_mode = Call.sample(rows, row_map, probs, padded_mode).args
        grad = torch.zeros(2, 3) if grad is None else grad
        return Sample("", (rows, grad, row_map, probs, padded_mode))


class TestTokenUnpermute(OpSuite):
    op = "token_unpermute"
    samples = staticmethod(unpermute_samples)
    refusals = shared_refusals("token_unpermute", Call)

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        v = Values(dtype)
        return Sample(
            "big",
            (v(BIG_ROWS, BIG_WIDTH), row_map(v.ids(BIG_TOKENS, 2, experts=7)), v(BIG_TOKENS, 2)),
        )

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        v = Values(torch.float32)
        rows = row_map(v.ids(tokens, 2, experts=4))
        return Sample(f"{tokens} tokens", (v(2 * tokens, WIDTH), rows, v(tokens, 2)))

    def test_hand_table(self) -> None:
        rows = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
        function = torch_moe_ops.token_unpermute
        assert function(rows, torch.tensor([2, 0, 3, 1])).flatten().tolist() == [100, 1, 1000, 10]
        assert function(rows, torch.tensor([2, -1, 3, 1])).flatten().tolist() == [100, 0, 1000, 10]
        assert function(rows[:2], torch.tensor([2, 0, 3, 1])).flatten().tolist() == [0, 1, 0, 10]
        probs = torch.tensor([[2.0, 3.0], [-1.0, 5.0]])
        assert function(rows, torch.tensor([2, 0, 3, 1]), probs).flatten().tolist() == [203, -950]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    def test_weight_zero_hides_a_bad_row(self, bad: float) -> None:
        rows = torch.tensor([[bad], [3.0]])
        probs = torch.tensor([[0.0, 2.0]], requires_grad=True)
        out = torch_moe_ops.token_unpermute(rows, torch.tensor([0, 1]), probs)
        assert out.flatten().tolist() == [6]
        minus_zero = torch.tensor([[-0.0, 2.0]])
        out = torch_moe_ops.token_unpermute(rows, torch.tensor([0, 1]), minus_zero)
        assert out.flatten().tolist() == [6]

    def test_prob_is_not_rounded_to_the_dtype_of_the_rows(self) -> None:
        """1 + 2^-10 is no bfloat16; times 1024 the difference is visible: 1025 rounds to 1024."""
        rows = torch.tensor([[1024.0], [-1024.0]], dtype=torch.bfloat16)
        probs = torch.tensor([[1 + 2**-10, 1.0]])
        out = torch_moe_ops.token_unpermute(rows, torch.tensor([0, 1]), probs)
        assert out.flatten().tolist() == [1]

    def test_row_named_twice_is_only_refused_in_backward(self) -> None:
        """Reading a row twice is fine; its gradient would be written twice."""
        rows = torch.tensor([[1.0], [10.0]], requires_grad=True)
        out = torch_moe_ops.token_unpermute(rows, torch.tensor([1, 1]))
        assert out.flatten().tolist() == [10, 10]
        with pytest.raises(IndexError) as caught:
            out.sum().backward()
        assert str(caught.value) == (
            "moe::token_unpermute_grad: sorted_indices must name each row at most once, "
            "got row 1 at positions 0 and 1"
        )


def grad_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype, seed=2)
    samples = []
    for sample in unpermute_samples(dtype):
        rows, row_of_slot, *rest = sample.args
        probs = rest[0] if rest else sample.kwargs.get("probs")
        tokens = row_of_slot.shape[0] if probs is None else probs.shape[0]
        args = (rows, v(tokens, *rows.shape[1:]), row_of_slot, *rest)
        samples.append(Sample(sample.name, args, sample.kwargs))
    return samples


class TestTokenUnpermuteGrad(OpSuite):
    op = "token_unpermute_grad"
    samples = staticmethod(grad_samples)

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        rows, row_of_slot, probs = TestTokenUnpermute.big(dtype).args
        grad = Values(dtype, seed=2)(probs.shape[0], rows.shape[1])
        return Sample("big", (rows, grad, row_of_slot, probs))

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        rows, row_of_slot, probs = TestTokenUnpermute.dynamic(tokens).args
        grad = Values(torch.float32, seed=2)(tokens, WIDTH)
        return Sample(f"{tokens} tokens", (rows, grad, row_of_slot, probs))

    refusals = (
        *shared_refusals("token_unpermute_grad", GradCall),
        Refusal(
            "gradient of another dtype",
            lambda: GradCall.sample(grad=torch.zeros(2, 3).bfloat16()),
            TypeError,
            "moe::token_unpermute_grad: unpermuted_tokens_grad must have the dtype of "
            "permuted_tokens (float32), got bfloat16",
        ),
        Refusal(
            "gradient of whole numbers",
            lambda: GradCall.sample(grad=torch.zeros(2, 3).long()),
            TypeError,
            "moe::token_unpermute_grad: unpermuted_tokens_grad must be float32, float64, bfloat16 "
            "or float16, got int64",
        ),
        Refusal(
            "gradient of another shape",
            lambda: GradCall.sample(grad=torch.zeros(2, 4)),
            ValueError,
            "moe::token_unpermute_grad: unpermuted_tokens_grad must have shape [2, 3], got [2, 4]",
        ),
        Refusal(
            "gradient on another device",
            lambda: GradCall.sample(grad=torch.zeros(2, 3, device="meta")),
            RuntimeError,
            "moe::token_unpermute_grad: unpermuted_tokens_grad must be on the device of "
            "permuted_tokens (cpu), got meta",
        ),
        Refusal(
            "row named twice",
            lambda: GradCall.sample(row_map=torch.tensor([0, 2, 1, 2])),
            IndexError,
            "moe::token_unpermute_grad: sorted_indices must name each row at most once, got row 2 "
            "at positions 1 and 3",
        ),
    )

    def test_hand_table(self) -> None:
        rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        grad = torch.tensor([[1.0, 10.0], [100.0, 1000.0]])
        probs = torch.tensor([[0.5, 2.0], [0.0, -1.0]])
        # Slot 1 is dropped, row 3 of slot 3 is cut off, row 1 is named by nobody.
        rows_grad, probs_grad = torch_moe_ops.token_unpermute_grad(
            rows, grad, torch.tensor([2, -1, 0, 3]), probs
        )
        assert rows_grad.tolist() == [[0, 0], [0, 0], [0.5, 5]]
        # A weight of 0 has a gradient, a slot that is not there has none.
        assert probs_grad.tolist() == [[65, 0], [2100, 0]]

    def test_without_probs(self) -> None:
        rows = torch.zeros(3, 2, dtype=torch.bfloat16)
        grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
        rows_grad, probs_grad = torch_moe_ops.token_unpermute_grad(rows, grad, torch.tensor([2, 0]))
        assert rows_grad.tolist() == [[3, 4], [0, 0], [1, 2]]
        assert probs_grad.shape == (0,)
        assert probs_grad.dtype == torch.bfloat16

    def test_dropped_and_cut_off_slots_ignore_nan(self) -> None:
        nan = float("nan")
        rows = torch.tensor([[2.0], [nan]])
        grad = torch.tensor([[3.0], [nan]])
        probs = torch.tensor([[0.5, nan], [nan, 7.0]])
        # Token 1 has no row at all, token 0 only row 0.
        rows_grad, probs_grad = torch_moe_ops.token_unpermute_grad(
            rows, grad, torch.tensor([0, -1, 2, 3]), probs
        )
        assert rows_grad.tolist() == [[1.5], [0]]
        assert probs_grad.tolist() == [[6, 0], [0, 0]]
        out = torch_moe_ops.token_unpermute(rows, torch.tensor([0, -1, 2, 3]), probs)
        assert out.tolist() == [[1], [0]]

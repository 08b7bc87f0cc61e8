"""token_permute and token_permute_grad."""

import pytest
import torch

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

ROWS = UNEVEN.numel()


def permute_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype)
    return [
        Sample("uneven", (v(5, 3), UNEVEN)),
        Sample("int32 ids", (v(5, 3), UNEVEN.int(), None, False)),
        Sample("keep 0 is all", (v(5, 3), UNEVEN, 0)),
        Sample("keep 4", (v(5, 3), UNEVEN), {"num_out_tokens": 4}),
        Sample("keep all but 3", (v(5, 3), UNEVEN, -3)),
        Sample("keep none", (v(5, 3), UNEVEN, -ROWS)),
        Sample("drop more than there are", (v(5, 3), UNEVEN, -ROWS - 5)),
        Sample("keep more than there are", (v(5, 3), UNEVEN, ROWS + 5)),
        Sample("all to one, 1-D ids", (v(4, 1), ALL_TO_ONE)),
        Sample("every expert", (v(4, 37), EVERY_EXPERT)),
        Sample("one token", (v(1, 130), torch.tensor([[2, 0]]))),
        Sample(
            "negative and huge ids",
            (v(3, 2), torch.tensor([[-7, 2**63 - 1], [5, -(2**63)], [0, -7]])),
        ),
        Sample("no tokens", (v(0, 4), UNEVEN[:0])),
        Sample("no tokens, keep 3", (v(0, 4), UNEVEN[:0], 3)),
        Sample("no width", (v(5, 0), UNEVEN)),
        Sample("more dimensions", (v(5, 3, 2), UNEVEN, 7)),
    ]


class TestTokenPermute(OpSuite):
    op = "token_permute"
    moves_data = True
    samples = staticmethod(permute_samples)

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        v = Values(dtype)
        return Sample("big", (v(BIG_TOKENS, BIG_WIDTH), v.ids(BIG_TOKENS, 2, experts=7), BIG_ROWS))

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        v = Values(torch.float32)
        return Sample(
            f"{tokens} tokens", (v(tokens, WIDTH), v.ids(tokens, 2, experts=4), 2 * tokens - 3)
        )

    refusals = (
        Refusal(
            "tokens 1-D",
            lambda: Sample("", (torch.zeros(3), ALL_TO_ONE[:3])),
            ValueError,
            "moe::token_permute: tokens must be at least 2-D, got shape [3]",
        ),
        Refusal(
            "tokens of whole numbers",
            lambda: Sample("", (torch.zeros(5, 3, dtype=torch.int64), UNEVEN)),
            TypeError,
            "moe::token_permute: tokens must be float32, float64, bfloat16 or float16, got int64",
        ),
        Refusal(
            "indices 3-D",
            lambda: Sample("", (torch.zeros(5, 3), UNEVEN[None])),
            ValueError,
            "moe::token_permute: indices must be 1-D or 2-D, got shape [1, 5, 2]",
        ),
        Refusal(
            "indices 0-D",
            lambda: Sample("", (torch.zeros(5, 3), UNEVEN[0, 0])),
            ValueError,
            "moe::token_permute: indices must be 1-D or 2-D, got shape []",
        ),
        Refusal(
            "indices floating",
            lambda: Sample("", (torch.zeros(5, 3), UNEVEN.float())),
            TypeError,
            "moe::token_permute: indices must be int32 or int64, got float32",
        ),
        Refusal(
            "indices of too few tokens",
            lambda: Sample("", (torch.zeros(6, 3), UNEVEN)),
            ValueError,
            "moe::token_permute: indices must have size 6 in dimension 0, got shape [5, 2]",
        ),
        Refusal(
            "no choices",
            lambda: Sample("", (torch.zeros(5, 3), UNEVEN[:, :0])),
            ValueError,
            "moe::token_permute: size of indices in dimension 1 must be at least 1, got 0",
        ),
        Refusal(
            "two devices",
            lambda: Sample("", (torch.zeros(5, 3, device="meta"), UNEVEN)),
            RuntimeError,
            "moe::token_permute: indices must be on the device of tokens (meta), got cpu",
        ),
        Refusal(
            "padded_mode",
            lambda: Sample("", (torch.zeros(5, 3), UNEVEN), {"padded_mode": True}),
            NotImplementedError,
            "moe::token_permute: padded_mode must be False, got True",
        ),
    )

    def test_hand_table(self) -> None:
        tokens = torch.tensor([[10.0], [20.0], [30.0], [40.0], [50.0]])
        # Slots of expert 0: 1, 2, 7, 8; of 1: 3, 6; of 2: none; of 3: 0, 4, 5, 9.
        rows, sorted_indices = torch_moe_ops.token_permute(tokens, UNEVEN)
        assert rows.flatten().tolist() == [10, 20, 40, 50, 20, 40, 10, 30, 30, 50]
        assert sorted_indices.tolist() == [6, 0, 1, 4, 7, 8, 5, 2, 3, 9]
        assert sorted_indices.dtype == torch.int32

    @pytest.mark.parametrize(("slots", "experts"), [(16384, 7), (100_001, 3), (40_000, 30_000)])
    def test_many_slots_are_sorted_in_parts(self, slots: int, experts: int) -> None:
        ids = Values(torch.float32).ids(slots, experts=experts) - 2
        expected = ids.argsort(stable=True).argsort()
        for threads in (1, 3):
            torch.set_num_threads(threads)
            _, rows = torch_moe_ops.token_permute(torch.zeros(slots, 1), ids)
            assert torch.equal(rows.long(), expected)

    @pytest.mark.parametrize("spread", [1, 10**6, -(2**61)])
    def test_stable_with_many_ties(self, spread: int) -> None:
        """Long runs of equal ids keep the order of the slots, also where ids lie far apart."""
        ids = torch.arange(4000).remainder(3).reshape(2000, 2) * spread
        rows, sorted_indices = torch_moe_ops.token_permute(torch.arange(2000.0)[:, None], ids)
        slots = sorted(range(4000), key=lambda slot: slot % 3 * spread)
        assert rows.flatten().tolist() == [slot // 2 for slot in slots]
        assert sorted_indices[slots].tolist() == list(range(4000))

    @pytest.mark.parametrize("special", [float("nan"), float("inf"), -0.0, 1e-45])
    def test_copies_special_values(self, special: float) -> None:
        tokens = torch.tensor([[special, 1.0]])
        rows, _ = torch_moe_ops.token_permute(tokens, torch.tensor([[1, 0]]))
        assert torch.equal(rows.view(torch.int32), tokens.view(torch.int32).expand(2, 2))


def grad_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype)
    rows = row_map(UNEVEN)
    return [
        Sample("uneven", (v(ROWS, 3), rows, 2)),
        Sample("int64 map", (v(ROWS, 3), rows.long(), 2, False)),
        Sample("cut off", (v(4, 3), rows, 2)),
        Sample("all cut off", (v(0, 3), rows, 2)),
        Sample("dropped", (v(ROWS, 3), drop(rows, 0, 4, 5)), {"num_topk": 2}),
        Sample("dropped and cut off", (v(7, 3), drop(rows, 0, 4, 5), 2)),
        Sample("rows beyond the slots", (v(ROWS + 3, 3), rows + 3, 2)),
        Sample("a gap in the rows", (v(ROWS + 3, 3), rows + 3 * (rows > 4), 2)),
        Sample("one choice", (v(4, 1), row_map(ALL_TO_ONE), 1)),
        Sample("every expert", (v(12, 37), row_map(EVERY_EXPERT), 3)),
        Sample("one token", (v(2, 130), torch.tensor([1, 0]), 2)),
        Sample("no tokens", (v(0, 4), rows[:0], 2)),
        Sample("no width", (v(ROWS, 0), rows, 2)),
        Sample("more dimensions", (v(ROWS, 3, 2), rows, 2)),
    ]


def grad_sample(rows: torch.Tensor, num_rows: int = 4) -> Sample:
    return Sample("", (torch.zeros(num_rows, 3), rows, 2))


class TestTokenPermuteGrad(OpSuite):
    op = "token_permute_grad"
    samples = staticmethod(grad_samples)

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        v = Values(dtype)
        return Sample("big", (v(BIG_ROWS, BIG_WIDTH), row_map(v.ids(BIG_TOKENS, 2, experts=7)), 2))

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        v = Values(torch.float32)
        return Sample(
            f"{tokens} tokens", (v(2 * tokens, WIDTH), row_map(v.ids(tokens, 2, experts=4)), 2)
        )

    refusals = (
        Refusal(
            "gradient 1-D",
            lambda: Sample("", (torch.zeros(4), torch.tensor([0, 1, 2, 3]), 2)),
            ValueError,
            "moe::token_permute_grad: permuted_output_grad must be at least 2-D, got shape [4]",
        ),
        Refusal(
            "gradient of whole numbers",
            lambda: Sample("", (torch.zeros(4, 3).int(), torch.tensor([0, 1, 2, 3]), 2)),
            TypeError,
            "moe::token_permute_grad: permuted_output_grad must be float32, float64, bfloat16 or "
            "float16, got int32",
        ),
        Refusal(
            "map 2-D",
            lambda: grad_sample(torch.tensor([[0, 1], [2, 3]])),
            ValueError,
            "moe::token_permute_grad: sorted_indices must be 1-D, got shape [2, 2]",
        ),
        Refusal(
            "map of bytes",
            lambda: grad_sample(torch.tensor([0, 1, 2, 3], dtype=torch.uint8)),
            TypeError,
            "moe::token_permute_grad: sorted_indices must be int32 or int64, got uint8",
        ),
        Refusal(
            "two devices",
            lambda: Sample(
                "", (torch.zeros(4, 3), torch.zeros(4, device="meta", dtype=torch.int32), 2)
            ),
            RuntimeError,
            "moe::token_permute_grad: sorted_indices must be on the device of "
            "permuted_output_grad (cpu), got meta",
        ),
        Refusal(
            "no choices",
            lambda: Sample("", (torch.zeros(4, 3), torch.tensor([0, 1, 2, 3]), 0)),
            ValueError,
            "moe::token_permute_grad: num_topk must be at least 1, got 0",
        ),
        Refusal(
            "slots that are no multiple",
            lambda: grad_sample(torch.tensor([0, 1, 2])),
            ValueError,
            "moe::token_permute_grad: number of sorted_indices must be a multiple of num_topk (2), "
            "got 3",
        ),
        Refusal(
            "padded_mode",
            lambda: Sample("", (torch.zeros(4, 3), torch.tensor([0, 1, 2, 3]), 2, True)),
            NotImplementedError,
            "moe::token_permute_grad: padded_mode must be False, got True",
        ),
        *index_refusals(
            "token_permute_grad",
            "sorted_indices",
            [
                ("past the end", lambda: grad_sample(torch.tensor([0, 1, 2, 4])), 4, 3, "[-1, 4)"),
                (
                    "the first of two",
                    lambda: grad_sample(torch.tensor([0, -2, 7, 3])),
                    -2,
                    1,
                    "[-1, 4)",
                ),
                (
                    "past the slots, rows cut off",
                    lambda: grad_sample(torch.tensor([0, 9, 2, 3]), num_rows=1),
                    9,
                    1,
                    "[-1, 4)",
                ),
                (
                    "past the rows, more rows than slots",
                    lambda: grad_sample(torch.tensor([5, 0, 6, 3]), num_rows=6),
                    6,
                    2,
                    "[-1, 6)",
                ),
                (
                    "wraps around in 32 bits",
                    lambda: grad_sample(torch.tensor([0, 1, 2**32 + 2, 3])),
                    2**32 + 2,
                    2,
                    "[-1, 4)",
                ),
            ],
        ),
    )

    def test_hand_table(self) -> None:
        grad = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
        function = torch_moe_ops.token_permute_grad
        assert function(grad, torch.tensor([2, 0, 3, 1]), 2).flatten().tolist() == [101, 1010]
        assert function(grad, torch.tensor([-1, 0, 3, -1]), 2).flatten().tolist() == [1, 1000]
        assert function(grad[:2], torch.tensor([2, 0, 3, 1]), 2).flatten().tolist() == [1, 10]
        assert function(grad, torch.tensor([2, 0, 3, 1]), 4).flatten().tolist() == [1111]

    def test_row_nobody_names_is_not_read(self) -> None:
        """A dropped slot must not become 0 * NaN."""
        grad = torch.tensor([[float("nan")], [2.0]])
        result = torch_moe_ops.token_permute_grad(grad, torch.tensor([-1, 1]), 1)
        assert result.flatten().tolist() == [0, 2]

"""grouped_matmul and grouped_matmul_weight_grad."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_moe_ops
from torch_moe_ops import reference

from .accuracy import assert_rounded_once, outputs_of
from .common import OpSuite, Refusal, operators_in_backward
from .data import WIDTH, Sample, Values, assert_same_bits

TOTALS = {"group_list_type": 0}
TRANS = {"trans_weight": True}


def counts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def matmul_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype)
    return [
        Sample("uneven", (v(5, 3), v(4, 3, 2), counts(2, 0, 3, 0))),
        Sample("trans_weight", (v(5, 3), v(4, 2, 3), counts(2, 0, 3, 0)), TRANS),
        Sample("totals", (v(5, 3), v(4, 3, 2), counts(0, 4, 4, 5)), TOTALS),
        Sample(
            "totals, trans_weight", (v(5, 3), v(4, 2, 3), counts(0, 1, 1, 5)), {**TOTALS, **TRANS}
        ),
        Sample("int32 list", (v(5, 3), v(2, 3, 5), counts(1, 4).int())),
        Sample("all to one", (v(4, 3), v(3, 3, 2), counts(0, 4, 0))),
        Sample("one expert", (v(4, 3), v(1, 3, 2), counts(4))),
        Sample("odd sizes", (v(7, 37), v(3, 37, 5), counts(1, 0, 6))),
        Sample("wide", (v(3, 130), v(2, 130, 1), counts(2, 1))),
        Sample("one wide", (v(3, 1), v(2, 1, 1), counts(1, 2))),
        Sample("one row", (v(1, 3), v(2, 3, 5), counts(0, 1))),
        Sample("one row, one wide", (v(1, 3), v(2, 3, 1), counts(1, 0))),
        Sample("no rows", (v(0, 3), v(4, 3, 2), counts(0, 0, 0, 0))),
        Sample("no rows, totals", (v(0, 3), v(2, 2, 3), counts(0, 0)), {**TOTALS, **TRANS}),
        Sample("no experts", (v(0, 3), v(0, 3, 2), counts())),
        Sample("no outputs", (v(5, 3), v(2, 3, 0), counts(2, 3))),
        Sample("no inputs", (v(5, 0), v(2, 0, 3), counts(2, 3))),
    ]


def shared_refusals(op: str, second: Tensor) -> list[Refusal]:
    """What both operators refuse in the same words.

    The calls have 5 rows and 3 experts; ``second`` is the weight or the gradient.
    """

    def refused(
        name: str, error: type[Exception], text: str, group_list: Tensor, list_type: int = 1
    ) -> Refusal:
        args = (torch.zeros(5, 4), second, group_list)
        sample = Sample("", args, {"group_list_type": list_type})
        return Refusal(name, lambda: sample, error, f"moe::{op}: group_list{text}")

    good = counts(1, 2, 2)
    by_data = [
        (
            "too few rows",
            " must use up the 5 rows of x, got a total of 4",
            counts(1, 2, 1),
            1,
        ),
        (
            "too many rows",
            " must use up the 5 rows of x, got a total of 6",
            counts(1, 2, 3).int(),
            1,
        ),
        (
            "last total too small",
            " must use up the 5 rows of x, got a total of 4",
            counts(1, 2, 4),
            0,
        ),
        (
            "last total too large",
            " must use up the 5 rows of x, got a total of 6",
            counts(1, 2, 6),
            0,
        ),
        (
            "negative count",
            " must be at least 0, got -1 at position 1",
            counts(3, -1, 3),
            1,
        ),
        (
            "one count beyond the rows",
            " must be at most the number of rows of x (5), got 6 at position 2",
            counts(0, 0, 6),
            1,
        ),
        (
            "a sum that wraps around to the rows",
            " must be at most the number of rows of x (5), got 9223372036854775807 at position 0",
            counts(2**63 - 1, 2**63 - 1, 7),
            1,
        ),
        (
            "falling totals",
            " must not fall with group_list_type 0, got 2 after 3 at position 1",
            counts(3, 2, 5),
            0,
        ),
        (
            "negative total",
            " must not fall with group_list_type 0, got -1 after 0 at position 0",
            counts(-1, 2, 5),
            0,
        ),
    ]
    return [
        refused("list 2-D", ValueError, " must be 1-D, got shape [1, 3]", good[None]),
        refused("list floating", TypeError, " must be int32 or int64, got float32", good.float()),
        refused(
            "list on another device",
            RuntimeError,
            " must be on the device of x (cpu), got meta",
            good.to("meta"),
        ),
        refused("unknown list type", ValueError, "_type must be one of [0, 1], got 2", good, 2),
        *(
            replace(refused(name, ValueError, text, *group_list), needs_data=True)
            for name, text, *group_list in by_data
        ),
    ]


class TestGroupedMatmul(OpSuite):
    op = "grouped_matmul"
    samples = staticmethod(matmul_samples)
    layout_rounds_differently = True

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        v = Values(dtype)
        return Sample("big", (v(1500, 65), v(5, 65, 48), counts(700, 0, 1, 797, 2)))

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        v = Values(torch.float32)
        group_list = counts(tokens - tokens // 3, 0, tokens // 3)
        return Sample(f"{tokens} rows", (v(tokens, WIDTH), v(3, WIDTH, 2), group_list))

    refusals = (
        Refusal(
            "x 3-D",
            lambda: Sample("", (torch.zeros(1, 5, 4), torch.zeros(3, 4, 2), counts(1, 2, 2))),
            ValueError,
            "moe::grouped_matmul: x must be 2-D, got shape [1, 5, 4]",
        ),
        Refusal(
            "x of whole numbers",
            lambda: Sample("", (torch.zeros(5, 4).int(), torch.zeros(3, 4, 2), counts(1, 2, 2))),
            TypeError,
            "moe::grouped_matmul: x must be float32, float64, bfloat16 or float16, got int32",
        ),
        Refusal(
            "weight 2-D",
            lambda: Sample("", (torch.zeros(5, 4), torch.zeros(4, 2), counts(5))),
            ValueError,
            "moe::grouped_matmul: weight must be 3-D, got shape [4, 2]",
        ),
        Refusal(
            "weight of another dtype",
            lambda: Sample(
                "", (torch.zeros(5, 4), torch.zeros(3, 4, 2).bfloat16(), counts(1, 2, 2))
            ),
            TypeError,
            "moe::grouped_matmul: weight must have the dtype of x (float32), got bfloat16",
        ),
        Refusal(
            "weight on another device",
            lambda: Sample(
                "", (torch.zeros(5, 4), torch.zeros(3, 4, 2, device="meta"), counts(1, 2, 2))
            ),
            RuntimeError,
            "moe::grouped_matmul: weight must be on the device of x (cpu), got meta",
        ),
        Refusal(
            "weight of another width",
            lambda: Sample("", (torch.zeros(5, 4), torch.zeros(3, 6, 2), counts(1, 2, 2))),
            ValueError,
            "moe::grouped_matmul: weight must have size 4 in dimension 1, got shape [3, 6, 2]",
        ),
        Refusal(
            "weight of another width, trans_weight",
            lambda: Sample("", (torch.zeros(5, 4), torch.zeros(3, 4, 2), counts(1, 2, 2)), TRANS),
            ValueError,
            "moe::grouped_matmul: weight must have size 4 in dimension 2, got shape [3, 4, 2]",
        ),
        Refusal(
            "list of too many experts",
            lambda: Sample("", (torch.zeros(5, 4), torch.zeros(2, 4, 2), counts(1, 2, 1, 1))),
            ValueError,
            "moe::grouped_matmul: group_list must have size 2 in dimension 0, got shape [4]",
        ),
        *shared_refusals("grouped_matmul", torch.zeros(3, 4, 2)),
    )

    def test_hand_table(self) -> None:
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        weight = torch.tensor([[[1.0, 10.0], [100.0, 1000.0]], [[0.0, 0.0]] * 2, [[2.0, -1.0]] * 2])
        expected = [[201, 2010], [14, -7], [22, -11]]
        function = torch_moe_ops.grouped_matmul
        assert function(x, weight, counts(1, 0, 2)).tolist() == expected
        assert function(x, weight, counts(1, 1, 3), group_list_type=0).tolist() == expected
        transposed = weight.transpose(1, 2).contiguous()
        assert function(x, transposed, counts(1, 0, 2), trans_weight=True).tolist() == expected

    def test_list_forms(self, dtype: torch.dtype) -> None:
        """A list, a tuple and tensors of both integer dtypes, counts or totals: the same bits."""
        v = Values(dtype)
        x, weight = v(5, 3), v(3, 3, 2)
        forms = [counts(1, 0, 4), counts(1, 0, 4).int(), [1, 0, 4], (1, 0, 4)]
        totals = [counts(1, 1, 5), counts(1, 1, 5).int(), [1, 1, 5], (1, 1, 5)]
        results = [torch_moe_ops.grouped_matmul(x, weight, form) for form in forms]
        results += [
            torch_moe_ops.grouped_matmul(x, weight, form, group_list_type=0) for form in totals
        ]
        for result in results:
            assert_same_bits([result], results[:1])

    @pytest.mark.parametrize(
        ("group_list", "error", "condition"),
        [
            ([1.5, 3.5], TypeError, "be int32 or int64, got float32"),
            (["a", "b"], TypeError, "be a tensor or a sequence of ints, got ['a', 'b']"),
            ([[2], [3]], ValueError, "be 1-D, got shape [2, 1]"),
            ([5], ValueError, "have size 2 in dimension 0, got shape [1]"),
        ],
    )
    def test_bad_list(self, group_list: Any, error: type[Exception], condition: str) -> None:
        x, weight = torch.zeros(5, 3), torch.zeros(2, 3, 4)
        with pytest.raises(error) as caught:
            torch_moe_ops.grouped_matmul(x, weight, group_list)
        assert str(caught.value) == f"moe::grouped_matmul: group_list must {condition}"

    def test_list_goes_to_the_device_of_x(self) -> None:
        x, weight = torch.empty(5, 3, device="meta"), torch.empty(3, 3, 2, device="meta")
        assert torch_moe_ops.grouped_matmul(x, weight, [1, 0, 4]).shape == (5, 2)

    def test_no_work_for_frozen_inputs(self) -> None:
        sample = self.samples(torch.float32)[0]
        for wanted, expected in (
            ((True, False), ["grouped_matmul"]),
            ((False, True), ["grouped_matmul_weight_grad"]),
        ):
            assert operators_in_backward(self.function, sample, wanted) == expected

    def test_empty_group_ignores_a_bad_weight(self) -> None:
        weight = torch.tensor([[[2.0]], [[float("nan")]], [[3.0]]])
        x = torch.tensor([[1.0], [1.0]], requires_grad=True)
        out = torch_moe_ops.grouped_matmul(x, weight, counts(1, 0, 1))
        assert out.flatten().tolist() == [2, 3]
        out.sum().backward()
        assert x.grad.flatten().tolist() == [2, 3]

    def test_crowded_expert_is_split(self) -> None:
        """So many rows of one expert that several threads share them."""
        v = Values(torch.float32)
        sample = Sample("", (v(1101, 512), v(3, 512, 512), counts(1090, 0, 11)))
        outputs = sample.call(torch_moe_ops.grouped_matmul)
        assert_rounded_once(outputs, outputs_of(reference.grouped_matmul), sample)
        for threads in (2, 3, 4):
            torch.set_num_threads(threads)
            assert_same_bits(sample.call(torch_moe_ops.grouped_matmul), outputs)

    def test_float16_is_accumulated_in_float32(self) -> None:
        """The products pass the largest float16; their sum does not."""
        x = torch.tensor([[250.0, 250.0]], dtype=torch.float16)
        weight = torch.tensor([[[300.0], [-299.0]]], dtype=torch.float16)
        assert torch_moe_ops.grouped_matmul(x, weight, [1]).tolist() == [[250]]

    def test_autocast(self, name: str) -> None:
        """The casts of torch.matmul, for every pair of dtypes."""
        del name  # one table serves all samples
        dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
        for low, x_dtype, weight_dtype in itertools.product(
            [torch.bfloat16, torch.float16], dtypes, dtypes
        ):
            x = torch.ones(2, 3, dtype=x_dtype, requires_grad=True)
            weight = torch.ones(1, 3, 4, dtype=weight_dtype, requires_grad=True)
            with torch.autocast("cpu", low):
                try:
                    expected = torch.matmul(x, weight[0]).dtype
                except RuntimeError:
                    with pytest.raises(TypeError, match="must have the dtype of x"):
                        torch_moe_ops.grouped_matmul(x, weight, [2])
                    continue
                out = torch_moe_ops.grouped_matmul(x, weight, [2])
                raw = torch.ops.moe.grouped_matmul(x, weight, counts(2))
            assert out.dtype == raw.dtype == expected
            out.sum().backward()
            assert x.grad.dtype == x_dtype
            assert weight.grad.dtype == weight_dtype


def grad_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype, seed=3)
    samples = []
    for sample in matmul_samples(dtype):
        x, weight, group_list = sample.args
        width = weight.shape[1] if sample.kwargs.get("trans_weight") else weight.shape[2]
        args = (x, v(x.shape[0], width), group_list)
        samples.append(Sample(sample.name, args, sample.kwargs))
    return samples


class TestGroupedMatmulWeightGrad(OpSuite):
    op = "grouped_matmul_weight_grad"
    samples = staticmethod(grad_samples)
    layout_rounds_differently = True

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        v = Values(dtype)
        return Sample("big", (v(1500, 65), v(1500, 48), counts(700, 0, 1, 797, 2)))

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        v = Values(torch.float32)
        group_list = counts(tokens - tokens // 3, 0, tokens // 3)
        return Sample(f"{tokens} rows", (v(tokens, WIDTH), v(tokens, 2), group_list))

    refusals = (
        Refusal(
            "x 1-D",
            lambda: Sample("", (torch.zeros(5), torch.zeros(5, 2), counts(5))),
            ValueError,
            "moe::grouped_matmul_weight_grad: x must be 2-D, got shape [5]",
        ),
        Refusal(
            "x of whole numbers",
            lambda: Sample("", (torch.zeros(5, 4).int(), torch.zeros(5, 2), counts(5))),
            TypeError,
            "moe::grouped_matmul_weight_grad: x must be float32, float64, bfloat16 or float16, "
            "got int32",
        ),
        Refusal(
            "gradient 3-D",
            lambda: Sample("", (torch.zeros(5, 4), torch.zeros(5, 2, 1), counts(5))),
            ValueError,
            "moe::grouped_matmul_weight_grad: grad_y must be 2-D, got shape [5, 2, 1]",
        ),
        Refusal(
            "gradient of another dtype",
            lambda: Sample("", (torch.zeros(5, 4), torch.zeros(5, 2).double(), counts(5))),
            TypeError,
            "moe::grouped_matmul_weight_grad: grad_y must have the dtype of x (float32), got "
            "float64",
        ),
        Refusal(
            "gradient of other rows",
            lambda: Sample("", (torch.zeros(5, 4), torch.zeros(4, 2), counts(5))),
            ValueError,
            "moe::grouped_matmul_weight_grad: grad_y must have size 5 in dimension 0, got shape "
            "[4, 2]",
        ),
        Refusal(
            "gradient on another device",
            lambda: Sample("", (torch.zeros(5, 4), torch.zeros(5, 2, device="meta"), counts(5))),
            RuntimeError,
            "moe::grouped_matmul_weight_grad: grad_y must be on the device of x (cpu), got meta",
        ),
        *shared_refusals("grouped_matmul_weight_grad", torch.zeros(5, 2)),
    )

    def test_hand_table(self) -> None:
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        grad = torch.tensor([[1.0], [10.0], [100.0]])
        function = torch_moe_ops.grouped_matmul_weight_grad
        result = function(x, grad, counts(1, 0, 2))
        assert result.tolist() == [[[1], [2]], [[0], [0]], [[530], [640]]]
        result = function(x, grad, counts(1, 1, 3), group_list_type=0, trans_weight=True)
        assert result.tolist() == [[[1, 2]], [[0, 0]], [[530, 640]]]

    def test_large_gradient_is_split(self) -> None:
        """One expert whose gradient is so much work that several threads share it."""
        v = Values(torch.float32)
        sample = Sample("", (v(1101, 512), v(1101, 512), counts(1090, 0, 11)))
        outputs = sample.call(torch_moe_ops.grouped_matmul_weight_grad)
        assert_rounded_once(outputs, outputs_of(reference.grouped_matmul_weight_grad), sample)
        for threads in (2, 3, 4):
            torch.set_num_threads(threads)
            assert_same_bits(sample.call(torch_moe_ops.grouped_matmul_weight_grad), outputs)

    def test_list_forms(self) -> None:
        v = Values(torch.float32)
        x, grad = v(5, 3), v(5, 2)
        forms = [counts(1, 0, 4), counts(1, 0, 4).int(), [1, 0, 4], (1, 0, 4)]
        results = [torch_moe_ops.grouped_matmul_weight_grad(x, grad, form) for form in forms]
        for result in results:
            assert_same_bits([result], results[:1])

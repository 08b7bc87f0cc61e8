"""alltoallv_grouped_matmul and grouped_matmul_alltoallv in one process: the group "".

With several ranks: tests/distributed.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import torch_moe_ops

from .accuracy import gradients_of
from .alltoallv_refusals import GOOD, changed, refusals
from .common import OpSuite, operators_in_backward
from .data import WIDTH, Sample, Values, assert_same_bits
from .tracing import upstream_for

FORWARD, REVERSE = "alltoallv_grouped_matmul", "grouped_matmul_alltoallv"
TRANS = {"trans_gmm_weight": True}
Make = Callable[..., Tensor]


def here(name: str, x: Tensor, weight: Tensor, counts: list[int], **kwargs: Any) -> Sample:
    """A call in which this process sends itself so many rows for each expert."""
    return Sample(name, (x, weight, "", 1, counts, list(counts)), kwargs)


def shared(v: Make, rows: int, width: int, columns: int, *, transposed: bool = False) -> Any:
    """The arguments of a shared expert."""
    shape = (columns, width) if transposed else (width, columns)
    return {"mm_x": v(rows, width), "mm_weight": v(*shape), "trans_mm_weight": transposed}


def both_ops_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype)
    return [
        here("shared expert", v(5, 3), v(4, 3, 2), [2, 0, 3, 0], **shared(v, 2, 4, 3)),
        here("plain", v(5, 3), v(4, 3, 2), [2, 0, 3, 0]),
        here("trans_gmm_weight", v(5, 3), v(4, 2, 3), [2, 0, 3, 0], **TRANS),
        here(
            "trans both",
            v(4, 3),
            v(2, 2, 3),
            [1, 3],
            **TRANS,
            **shared(v, 3, 2, 4, transposed=True),
        ),
        here("trans_mm_weight", v(3, 2), v(2, 2, 3), [2, 1], **shared(v, 3, 2, 4, transposed=True)),
        here("one expert", v(4, 3), v(1, 3, 2), [4]),
        here("odd sizes", v(7, 37), v(3, 37, 5), [1, 0, 6], **shared(v, 3, 35, 7)),
        here("one row", v(1, 3), v(2, 3, 5), [0, 1]),
        here("no rows", v(0, 3), v(4, 3, 2), [0, 0, 0, 0], **shared(v, 2, 3, 2)),
        here("no rows at all", v(0, 3), v(2, 3, 2), [0, 0], **shared(v, 0, 3, 2)),
        here("no experts", v(0, 3), v(0, 3, 2), []),
        here("no outputs", v(5, 3), v(2, 3, 0), [2, 3], **shared(v, 2, 3, 0)),
        here("no inputs", v(5, 0), v(2, 0, 3), [2, 3], **shared(v, 2, 0, 3)),
    ]


def forward_samples(dtype: torch.dtype) -> list[Sample]:
    v = Values(dtype, seed=7)
    flag = {"permute_out_flag": True}
    return [
        here("all outputs", v(5, 3), v(4, 3, 2), [2, 0, 3, 0], **flag, **shared(v, 2, 4, 3)),
        *both_ops_samples(dtype),
        here("permute_out", v(4, 3), v(3, 2, 3), [3, 0, 1], **flag, **TRANS),
        here("permute_out, no rows", v(0, 3), v(2, 3, 2), [0, 0], **flag),
        here("permute_out, no outputs", v(5, 3), v(2, 3, 0), [2, 3], **flag),
        here("permute_out, no inputs", v(5, 0), v(2, 0, 3), [2, 3], **flag),
    ]


def big_sample(dtype: torch.dtype, **kwargs: Any) -> Sample:
    v = Values(dtype)
    counts = [700, 0, 1, 797, 2]
    return here("big", v(1500, 65), v(5, 65, 48), counts, **shared(v, 301, 129, 67), **kwargs)


def dynamic_sample(tokens: int, **kwargs: Any) -> Sample:
    """Counts that vary, but for one that stays 0."""
    v = Values(torch.float32)
    counts = [tokens - tokens // 2, 0, tokens // 2]
    weights = v(3, WIDTH, 2)
    return here(
        f"{tokens} rows", v(tokens, WIDTH), weights, counts, **shared(v, 9, 4, 13), **kwargs
    )


class _Both(OpSuite):
    """What both operators have in common."""

    layout_rounds_differently = True

    def test_autocast(self, name: str) -> None:
        """The casts of torch.matmul, for every pair of dtypes, the shared expert's included."""
        del name  # one table serves all samples
        dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
        for low, x_dtype, weight_dtype in itertools.product(dtypes[1:3], dtypes, dtypes):
            x = torch.ones(2, 3, dtype=x_dtype, requires_grad=True)
            weight = torch.ones(1, 3, 4, dtype=weight_dtype, requires_grad=True)
            mm = {
                "mm_x": torch.ones(3, 2, dtype=x_dtype, requires_grad=True),
                "mm_weight": torch.ones(2, 3, dtype=weight_dtype, requires_grad=True),
            }
            sample = here("", x, weight, [2], **mm)
            with torch.autocast("cpu", low):
                try:
                    expected = torch.matmul(x, weight[0]).dtype
                except RuntimeError:
                    with pytest.raises(TypeError, match="gmm_weight must have the dtype of gmm_x"):
                        sample.call(self.function)
                    continue
                outputs = sample.call(self.function)
                raw = sample.call(getattr(torch.ops.moe, self.op))
            assert {out.dtype for out in [*outputs, *raw]} == {expected}
            sum(out.double().sum() for out in outputs[:2]).backward()
            for leaf in sample.floating():
                assert leaf.grad is not None
                assert leaf.grad.dtype == leaf.dtype

    def test_autocast_of_the_shared_expert_alone(self) -> None:
        """Dtypes that only agree after the cast: of mm_x and gmm_x, of mm_x and mm_weight."""
        mm = {"mm_x": torch.ones(2, 3).half(), "mm_weight": torch.ones(3, 4).bfloat16()}
        sample = here("", torch.ones(2, 3), torch.ones(1, 3, 4).half(), [2], **mm)
        with torch.autocast("cpu", torch.bfloat16):
            assert {out.dtype for out in sample.call(self.function)} == {torch.bfloat16}

    def test_forms_of_counts_and_group(self) -> None:
        """Lists, tuples, tensors of both dtypes: the same bits."""
        sample = self.samples(torch.float32)[0]
        x, weight, _, _, counts, _ = sample.args
        expected = sample.call(self.function)
        for form in (tuple, torch.tensor, lambda c: torch.tensor(c, dtype=torch.int32), torch.Size):
            for send, recv in ((form(counts), counts), (counts, form(counts))):
                result = self.function(x, weight, "", 1, send, recv, **sample.kwargs)
                assert_same_bits(result, expected)

    def test_counts_overwritten_after_the_call(self) -> None:
        """The backward pass has the counts of the call, whatever became of the caller's own."""
        sample = self.samples(torch.float64)[0]
        upstream = upstream_for(sample.call(self.function))
        expected = gradients_of(self.function)(sample, upstream)
        for function in (self.function, getattr(torch.ops.moe, self.op)):
            for form in (list, torch.tensor):
                if form is torch.tensor and function is not self.function:
                    continue
                leaves = sample.leaves()
                x, weight, group, ep, counts, _ = leaves.args
                send, recv = form(counts), form(counts)
                outputs = function(x, weight, group, ep, send, recv, **leaves.kwargs)
                for own in (send, recv):
                    own[0], own[2] = 4, 1
                pairs = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
                assert_same_bits([leaf.grad for leaf in leaves.floating()], expected)

    @pytest.mark.parametrize("which", ["send_counts", "recv_counts"])
    @pytest.mark.parametrize(
        ("counts", "text"),
        [
            ([1.0, 2.0, 2.0], "a sequence of ints, got [1.0, 2.0, 2.0]"),
            ([True, True, False], "a sequence of ints, got [True, True, False]"),
            ("122", "a sequence of ints, got '122'"),
            (None, "a sequence of ints, got None"),
            (5, "a sequence of ints, got 5"),
            ([[1, 2, 2]], "a sequence of ints, got [[1, 2, 2]]"),
            (
                torch.ones(3),
                "a 1-D int32 or int64 tensor, got torch.float32 of shape [3]",
            ),
            (
                torch.ones(1, 3).long(),
                "a 1-D int32 or int64 tensor, got torch.int64 of shape [1, 3]",
            ),
        ],
    )
    def test_counts_that_are_none(self, which: str, counts: Any, text: str) -> None:
        with pytest.raises(TypeError) as caught:
            changed(**{which: counts}).call(self.function)
        assert str(caught.value) == f"moe::{self.op}: {which} must be {text}"

    @pytest.mark.parametrize("group", [None, 0, object, b""])
    def test_group_that_is_none(self, group: Any) -> None:
        with pytest.raises(TypeError) as caught:
            changed(group=group).call(self.function)
        assert str(caught.value) == (
            f"moe::{self.op}: group must be a ProcessGroup or its name, got {group!r}"
        )

    @pytest.mark.parametrize("flag", ["trans_gmm_weight", "trans_mm_weight"])
    def test_flags_matter(self, flag: str) -> None:
        """Square weights: a flag that is not passed on shows in the values alone."""
        v = Values(torch.float32)
        sample = here("", v(3, 2), v(2, 2, 2), [1, 2], mm_x=v(3, 2), mm_weight=v(2, 2))
        plain = sample.call(self.function)
        place = 0 if flag == "trans_gmm_weight" else 1
        name = "gmm_weight" if place == 0 else "mm_weight"
        arguments = dict(zip(GOOD, sample.args, strict=True)) | sample.kwargs
        arguments[name] = arguments[name].mT.contiguous()
        torch.testing.assert_close(self.function(**arguments, **{flag: True}), plain)

    def test_forward_mode_is_refused(self) -> None:
        sample = self.samples(torch.float32)[0]
        for place, tensor in enumerate(sample.floating()):

            def call(value: Tensor, place: int = place) -> Tensor:
                leaves = iter(range(len(sample.floating())))
                return sample.map_floating(
                    lambda own: value if next(leaves) == place else own
                ).call(self.function)[0]

            with pytest.raises(NotImplementedError, match=f"moe::{self.op}: forward-mode"):
                torch.func.jvp(call, (tensor,), (torch.ones_like(tensor),))

    def test_compile_with_counts_of_the_data(self) -> None:
        """Counts read from a tensor within the graph, rows whose number only they know."""
        torch._dynamo.reset()

        def call(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
            sizes = counts.tolist()
            return self.function(x, weight, "", 1, sizes, sizes)[0]

        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
        v = Values(torch.float32)
        weight = v(2, WIDTH, 3)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            for counts in ([3, 1], [0, 4], [2, 5], [0, 0], [1, 0]):
                results = []
                for function in (call, compiled):
                    x = v(sum(counts), WIDTH) if not results else results[0][1].detach()
                    leaves = [x.requires_grad_(), weight.clone().requires_grad_()]
                    y = function(*leaves, torch.tensor(counts))
                    y.backward(torch.arange(y.numel(), dtype=y.dtype).view_as(y))
                    results.append([y, leaves[0], leaves[0].grad, leaves[1].grad])
                    leaves[0].grad, leaves[1].grad = None, None
                assert_same_bits(results[1], results[0])
        assert counter.frame_count <= 3

    @pytest.mark.parametrize("place", [0, 1])
    def test_nothing_keeps_the_rows_alive(self, place: int) -> None:
        sample = self.samples(torch.float32)[place].leaves()
        outputs = sample.call(self.function)
        watched = [weakref.ref(t) for t in [*outputs, *sample.tensors()]]
        sum(out.sum() for out in outputs).backward()
        gc.disable()
        try:
            del outputs, sample
            assert [ref() for ref in watched] == [None] * len(watched)
        finally:
            gc.enable()


class TestAlltoallvGroupedMatmul(_Both):
    op = FORWARD
    samples = staticmethod(forward_samples)
    refusals = tuple(refusals(FORWARD))

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        return big_sample(dtype, permute_out_flag=True)

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        return dynamic_sample(tokens, permute_out_flag=True)

    def test_hand_table(self) -> None:
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        weight = torch.tensor([[[1.0, 10.0], [100.0, 1000.0]], [[0.0, 0.0]] * 2, [[2.0, -1.0]] * 2])
        mm = {"mm_x": torch.tensor([[3.0]]), "mm_weight": torch.tensor([[1.0, -2.0, 4.0]])}
        y, mm_y, rows = here("", x, weight, [1, 0, 2], permute_out_flag=True, **mm).call(
            torch_moe_ops.alltoallv_grouped_matmul
        )
        assert y.tolist() == [[201, 2010], [14, -7], [22, -11]]
        assert mm_y.tolist() == [[3, -6, 12]]
        assert rows.tolist() == x.tolist()

    def test_outputs_that_were_not_asked_for(self, dtype: torch.dtype) -> None:
        """Empty; summing them up with the others changes no gradient."""
        v = Values(dtype)
        sample = here("", v(3, 2), v(1, 2, 4), [3])
        for wanted in itertools.product([False, True], repeat=2):
            y, *others = sample.leaves(wanted).call(self.function)
            for out in others:
                assert (tuple(out.shape), out.dtype) == ((0,), dtype)
            if any(wanted):
                (y.sum() + sum(out.sum() for out in others)).backward()

    def test_no_work_for_frozen_inputs(self) -> None:
        sample = self.samples(torch.float32)[0]
        for wanted, expected in (
            ((False, True, False, False), ["grouped_matmul_weight_grad"]),
            ((False, False, True, False), ["grouped_matmul"]),
            ((False, False, False, True), ["grouped_matmul_weight_grad"]),
        ):
            assert operators_in_backward(self.function, sample, wanted) == expected
        plain = self.sample("plain")
        way_back = ["grouped_matmul_alltoallv"]
        assert operators_in_backward(self.function, plain, (True, False)) == way_back

    def test_gradient_of_permute_out_alone(self) -> None:
        """It moves rows: every bit of its gradient arrives, also that of a NaN."""
        sample = self.sample("permute_out", torch.float32).leaves()
        x, weight = sample.floating()
        *_, rows = sample.call(self.function)
        upstream = Values(torch.float32, seed=3)(*rows.shape)
        upstream[1, 1] = float("nan")
        rows.backward(upstream)
        # Beside it stands the product with the zero gradient of gmm_y: 0 + g is g.
        assert_same_bits([x.grad], [upstream])
        assert torch.equal(weight.grad, torch.zeros_like(weight))

    def test_sum_of_gradients_is_rounded_once(self) -> None:
        """1000.25 - 1000 in float16: each part rounded by itself would give 0."""
        x = torch.ones(1, 2, dtype=torch.float16, requires_grad=True)
        weight = torch.tensor([[[1000.0, 1.0], [0.0, 0.0]]], dtype=torch.float16)
        y, _, rows = here("", x, weight, [1], permute_out_flag=True).call(self.function)
        upstream = torch.tensor([[1.0, 0.25]], dtype=torch.float16)
        rows_upstream = torch.tensor([[-1000.0, 0.0]], dtype=torch.float16)
        torch.autograd.backward([y, rows], [upstream, rows_upstream])
        assert x.grad.tolist() == [[0.25, 0.0]]

    def test_hidden_rows_do_not_change_the_result(self) -> None:
        """The rows that the weight's gradient needs are kept whether they are shown or not."""
        sample = self.sample("plain", torch.float64)
        shown = Sample("", sample.args, {**sample.kwargs, "permute_out_flag": True})
        upstream = upstream_for(sample.call(self.function))
        hidden = gradients_of(self.function)(sample, upstream)
        upstream[2] = torch.zeros(5, 3, dtype=torch.float64)
        assert_same_bits(hidden, gradients_of(self.function)(shown, upstream))

    def test_permute_out_changed_in_place(self) -> None:
        """A gradient from changed rows would be wrong in silence."""
        sample = self.sample("permute_out").leaves()
        y, _, rows = sample.call(self.function)
        with torch.no_grad():
            rows.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class TestGroupedMatmulAlltoallv(_Both):
    op = REVERSE
    samples = staticmethod(both_ops_samples)
    refusals = tuple(refusals(REVERSE))
    big = staticmethod(big_sample)
    dynamic = staticmethod(dynamic_sample)

    def test_hand_table(self) -> None:
        x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        weight = torch.tensor([[[1.0, 10.0], [100.0, 1000.0]], [[0.0, 0.0]] * 2, [[2.0, -1.0]] * 2])
        mm = {"mm_x": torch.tensor([[3.0]]), "mm_weight": torch.tensor([[1.0], [-2.0], [4.0]])}
        y, mm_y = here("", x, weight, [1, 0, 2], **mm, trans_mm_weight=True).call(
            torch_moe_ops.grouped_matmul_alltoallv
        )
        assert y.tolist() == [[201, 2010], [14, -7], [22, -11]]
        assert mm_y.tolist() == [[3, -6, 12]]

    def test_no_work_for_frozen_inputs(self) -> None:
        sample = self.samples(torch.float32)[0]
        for wanted, expected in (
            ((True, False, False, False), ["alltoallv_grouped_matmul"]),
            (
                (False, True, False, False),
                ["_exchange_expert_rows", "grouped_matmul_weight_grad"],
            ),
            (
                (True, True, False, False),
                ["alltoallv_grouped_matmul", "grouped_matmul_weight_grad"],
            ),
            ((False, False, True, False), ["grouped_matmul"]),
            ((False, False, False, True), ["grouped_matmul_weight_grad"]),
        ):
            assert operators_in_backward(self.function, sample, wanted) == expected


EXCHANGE = torch.ops.moe._exchange_expert_rows


class TestExchangeExpertRows:
    """The movement of rows alone, which only gradients use."""

    @pytest.mark.parametrize("to_experts", [False, True])
    @pytest.mark.parametrize("shape", [(5, 3), (0, 3), (5, 0)])
    def test_one_rank(self, shape: tuple[int, int], to_experts: bool) -> None:
        """A fresh copy; to any order its own gradient."""
        counts = [shape[0] - shape[0] // 2, 0, shape[0] // 2]
        rows = Values(torch.float64)(*shape).requires_grad_()

        def call(value: Tensor) -> Tensor:
            return EXCHANGE(value, "", 1, counts, counts, to_experts=to_experts)

        assert_same_bits([call(rows).detach()], [rows.detach()])
        assert rows.numel() == 0 or call(rows).data_ptr() != rows.data_ptr()
        assert torch.autograd.gradcheck(call, rows)
        assert torch.autograd.gradgradcheck(call, rows)
        args = (rows, "", 1, counts, counts)
        torch.library.opcheck(EXCHANGE.default, args, {"to_experts": to_experts})

    @pytest.mark.parametrize(
        ("args", "error", "text"),
        [
            ((torch.zeros(5), "", 1, [5], [5]), ValueError, "rows must be 2-D, got shape [5]"),
            (
                (torch.zeros(5, 2).int(), "", 1, [5], [5]),
                TypeError,
                "rows must be float32, float64, bfloat16 or float16, got int32",
            ),
            (
                (torch.zeros(5, 2), "", 0, [5], [5]),
                ValueError,
                "ep_world_size must be at least 1, got 0",
            ),
            (
                (torch.zeros(5, 2), "", 2, [5], [5]),
                ValueError,
                "number of send_counts must be a multiple of ep_world_size (2), got 1",
            ),
            (
                (torch.zeros(5, 2), "", 1, [4], [4]),
                ValueError,
                "send_counts must sum to the number of rows of rows (5), got 4",
            ),
        ],
    )
    def test_refusal(self, args: tuple[Any, ...], error: type[Exception], text: str) -> None:
        for device in ("cpu", "meta"):
            with pytest.raises(error) as caught:
                EXCHANGE(args[0].to(device), *args[1:], to_experts=True)
            assert str(caught.value) == f"moe::_exchange_expert_rows: {text}"


def test_forward_and_reverse_return_every_bit() -> None:
    """Identity weights."""
    v = Values(torch.bfloat16)
    x, eye = v(9, 5), torch.eye(5).bfloat16().expand(4, 5, 5)
    y = here("", x, eye, [2, 0, 3, 4]).call(torch_moe_ops.alltoallv_grouped_matmul)[0]
    back = here("", y, eye, [2, 0, 3, 4]).call(torch_moe_ops.grouped_matmul_alltoallv)[0]
    assert_same_bits([back], [x])

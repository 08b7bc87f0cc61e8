"""Calls that once went wrong, or that nobody expects: the right error or the right number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_moe_ops as moe

HUGE = 2**62
DROPPED = torch.full((3,), -1)


def first_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


# One small call of every operator, as a function of its first argument.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "token_permute": lambda x: moe.token_permute(x, torch.tensor([1, 0, 1])),
    "token_permute_grad": lambda g: moe.token_permute_grad(g, torch.tensor([2, 0, 1]), 1),
    "token_unpermute": lambda x: moe.token_unpermute(x, torch.tensor([2, 0, 1])),
    "token_unpermute_grad": lambda x: moe.token_unpermute_grad(
        x, torch.ones(3, 2), torch.tensor([2, 0, 1])
    ),
    "init_routing_v2": lambda x: moe.init_routing_v2(x, torch.tensor([1, 0, 1])),
    "init_routing_v2_grad": lambda g: moe.init_routing_v2_grad(g, torch.tensor([2, 0, 1]), 1),
    "finalize_routing_v2": lambda x: moe.finalize_routing_v2(x, torch.tensor([2, 0, 1])),
    "finalize_routing_v2_grad": lambda g: moe.finalize_routing_v2_grad(g, torch.tensor([2, 0, 1])),
    "grouped_matmul": lambda x: moe.grouped_matmul(x, torch.ones(2, 2, 4), [1, 2]),
    "grouped_matmul_weight_grad": lambda x: moe.grouped_matmul_weight_grad(
        x, torch.ones(3, 4), [1, 2]
    ),
    "swiglu": lambda x: moe.swiglu(x),
    "swiglu_grad": lambda x: moe.swiglu_grad(torch.ones(3, 1), x),
    "alltoallv_grouped_matmul": lambda x: moe.alltoallv_grouped_matmul(
        x, torch.ones(2, 2, 4), "", 1, [1, 2], [1, 2]
    ),
    "grouped_matmul_alltoallv": lambda x: moe.grouped_matmul_alltoallv(
        x, torch.ones(2, 2, 4), "", 1, [1, 2], [1, 2]
    ),
}


def test_every_operator_has_a_call() -> None:
    assert sorted(CALLS) == sorted(moe.ops.__all__)


@pytest.mark.parametrize("op", CALLS)
@pytest.mark.parametrize("trained", [False, True])
def test_forward_mode_is_refused(op: str, trained: bool) -> None:
    """A dropped tangent would be a silent zero."""
    x = torch.ones(3, 2, requires_grad=trained)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: first_tensor(CALLS[op](x)), (x,), (torch.ones_like(x),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            CALLS[op](dual)
        assert first_tensor(CALLS[op](torch.ones(3, 2))).isfinite().all()  # no tangent, no error


@pytest.mark.parametrize("shape", [(2, 0, 2), (0, 3, 2)])
def test_drop_pad_without_any_row(shape: tuple[int, int, int]) -> None:
    """What the forward takes, its gradient takes too."""
    rows = torch.randn(shape, requires_grad=True)
    scales = torch.rand(3, 1, requires_grad=True)
    moe.finalize_routing_v2(rows, DROPPED, scales=scales, drop_pad_mode=3).sum().backward()
    assert rows.grad is not None
    assert rows.grad.shape == shape
    assert scales.grad is not None
    assert torch.equal(scales.grad, torch.zeros(3, 1))
    rows = torch.randn(shape, requires_grad=True)
    moe.init_routing_v2_grad(rows, DROPPED, 1, 1).sum().backward()
    assert rows.grad is not None
    assert rows.grad.shape == shape


def test_drop_pad_without_tokens_and_room() -> None:
    no_slots = torch.zeros(0, dtype=torch.int32)
    rows = torch.randn(2, 0, 2, requires_grad=True)
    scales = torch.rand(0, 2, requires_grad=True)
    moe.finalize_routing_v2(rows, no_slots, scales=scales, drop_pad_mode=3).sum().backward()
    assert rows.grad is not None
    assert rows.grad.shape == (2, 0, 2)
    assert scales.grad is not None
    assert scales.grad.shape == (0, 2)


def test_second_order_sum_is_rounded_once() -> None:
    """1 * -1000 ... + 0.999 * 1000 in bfloat16: each part rounded by itself would give 0."""
    bf16 = torch.bfloat16
    for forward in (
        lambda rows, scales: moe.token_unpermute(rows, torch.tensor([0]), scales),
        lambda rows, scales: moe.finalize_routing_v2(
            rows, torch.tensor([0]), scales=scales, drop_pad_mode=2
        ),
    ):
        rows = torch.tensor([[-1000.0]], dtype=bf16, requires_grad=True)
        scales = torch.ones(1, 1, requires_grad=True)
        upstream = torch.ones(1, 1, dtype=bf16, requires_grad=True)
        first = torch.autograd.grad(
            forward(rows, scales), [rows, scales], upstream, create_graph=True
        )
        cotangents = [torch.tensor([[1000.0]], dtype=bf16), torch.tensor([[0.999]])]
        (second,) = torch.autograd.grad(first, upstream, cotangents)
        assert second.item() == 1.0


def test_bias_is_added_before_the_weight() -> None:
    """(2 - 1.5) * 3e38 is finite; 2 * 3e38 is not."""
    row, bias = torch.tensor([[2.0]]), torch.tensor([[-1.5]])
    scales, expert, zero = torch.tensor([[3e38]]), torch.tensor([[0]]), torch.tensor([0])
    y = moe.finalize_routing_v2(
        row, zero, bias=bias, scales=scales, expert_idx=expert, drop_pad_mode=2
    )
    assert y.item() == pytest.approx(1.5e38)
    _, scales_grad = moe.finalize_routing_v2_grad(scales, zero, row, torch.ones(1, 1), expert, bias)
    assert scales_grad.item() == pytest.approx(1.5e38)


@pytest.mark.parametrize(
    ("group_list", "text"),
    [
        ([1.9, 1.1], "group_list must be int32 or int64, got float32"),
        ([True, True], "group_list must be int32 or int64, got bool"),
        (None, "group_list must be a tensor or a sequence of ints, got None"),
        ("ab", "group_list must be a tensor or a sequence of ints, got 'ab'"),
        ([2**63], f"group_list must be a tensor or a sequence of ints, got [{2**63}]"),
    ],
)
def test_group_lists_that_are_none(group_list: Any, text: str) -> None:
    with pytest.raises(TypeError) as caught:
        moe.grouped_matmul(torch.ones(3, 2), torch.ones(2, 2, 2), group_list)
    assert str(caught.value) == f"moe::grouped_matmul: {text}"


def test_group_totals_do_not_overflow() -> None:
    x = torch.empty(HUGE, 0)
    sizes = torch.tensor([HUGE] * 5)  # 5 * 2**62 is 2**62 in 64 bits
    with pytest.raises(ValueError, match=f"must use up the {HUGE} rows of x"):
        moe.grouped_matmul(x, torch.empty(5, 0, 0), sizes)
    with pytest.raises(ValueError, match=f"must use up the {HUGE} rows of x"):
        moe.grouped_matmul_weight_grad(x, x, sizes)
    one = torch.tensor([HUGE])
    assert moe.grouped_matmul(x, torch.empty(1, 0, 0), one).shape == (HUGE, 0)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_row_counts_do_not_overflow(device: str) -> None:
    text = "must have at most 2147483647 elements"
    none = DROPPED.to(device)
    rows = torch.zeros(2**32, 2**31, 0, device=device)
    with pytest.raises(ValueError, match=text):
        moe.finalize_routing_v2(rows, none, drop_pad_mode=3)
    with pytest.raises(ValueError, match=text):
        moe.init_routing_v2_grad(rows, none, 1, 1)
    with pytest.raises(ValueError, match=text):
        moe.finalize_routing_v2_grad(
            torch.zeros(3, 0, device=device),
            none,
            drop_pad_mode=1,
            expert_num=2**63 - 1,
            expert_capacity=2,
        )


UNBACKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "finalize_routing_v2": lambda x, mask: moe.finalize_routing_v2(
        x[mask], torch.arange(x[mask].shape[0]), drop_pad_mode=2
    ),
    "init_routing_v2": lambda x, mask: moe.init_routing_v2(
        x[mask],
        torch.zeros_like(x[mask][:, 0], dtype=torch.int64),
        expert_num=3,
        expert_capacity=1,
        drop_pad_mode=1,
    )[0],
    "finalize_routing_v2_grad": lambda x, mask: moe.finalize_routing_v2_grad(
        x[mask],
        torch.full_like(x[mask][:, 0], -1, dtype=torch.int64),
        drop_pad_mode=1,
        expert_num=3,
        expert_capacity=2,
    )[0],
}


@pytest.mark.parametrize("op", UNBACKED)
def test_number_of_tokens_that_only_data_knows(op: str) -> None:
    x, mask = torch.randn(5, 2), torch.tensor([True, False, True, True, False])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(UNBACKED[op], fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x, mask), UNBACKED[op](x, mask))

"""Trouble that people met with other implementations, each as a small input with its right answer.

A: index maps, ranges, drop and pad. B: gradients. C: precision and size. D: the interface of
grouped_matmul. E: no tokens. F: compiling, shape functions and memory are in test_cases_tracing.py.
"""

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_moe_ops as moe

from .data import Values, assert_same_bits

X = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
IDS = torch.tensor([[2, 0], [1, 2], [0, 1]])
PROBS = torch.tensor([[0.5, 0.25], [1.0, 2.0], [0.125, 4.0]])
ROWS = [[1, 10], [3, 30], [2, 20], [3, 30], [1, 10], [2, 20]]
ROW_OF_SLOT = [4, 0, 2, 5, 1, 3]
COMBINED = [[0.75, 7.5], [6, 60], [12.375, 123.75]]


def raises(error: type[Exception], text: str, function: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(error) as caught:
        function(*args)
    assert str(caught.value) == text


# A: index maps, ranges, drop and pad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a1_map_is_row_of_slot(dtype: torch.dtype) -> None:
    rows, row_of_slot = moe.token_permute(X.to(dtype), IDS)
    assert rows.tolist() == ROWS
    assert row_of_slot.tolist() == ROW_OF_SLOT  # and not the slot of each row, [1, 4, 2, 5, 0, 3]
    combined = moe.token_unpermute(rows, row_of_slot, PROBS.to(dtype))
    assert combined.dtype == dtype
    # 123.75 has one bit more than bfloat16 holds.
    last = 123.75 if dtype == torch.float32 else 124
    assert combined.tolist() == [*COMBINED[:2], [12.375, last]]


def test_a1_both_operators_that_make_a_map_agree() -> None:
    rows, row_of_slot = moe.token_permute(X, IDS)
    expanded, expanded_row_idx, *_ = moe.init_routing_v2(X, IDS)
    assert_same_bits([expanded, expanded_row_idx], [rows, row_of_slot])


def test_a2_column_and_row_order() -> None:
    rows = torch.tensor(ROWS, dtype=torch.float32)
    column = torch.tensor([4, 2, 1, 0, 5, 3])  # what InitRouting V1 makes of the same choices
    row = torch.tensor(ROW_OF_SLOT)
    assert moe.finalize_routing_v2(rows, column, scales=PROBS).tolist() == COMBINED
    by_row = moe.finalize_routing_v2(rows, row, scales=PROBS, drop_pad_mode=2)
    assert by_row.tolist() == COMBINED
    mixed_up = moe.finalize_routing_v2(rows, column, scales=PROBS, drop_pad_mode=2)
    assert mixed_up.tolist() == [[1, 10], [5, 50], [12.25, 122.5]]


def test_a2_active_num() -> None:
    expanded, row_of_slot, *_ = moe.init_routing_v2(X, IDS, active_num=4)
    assert expanded.tolist() == ROWS[:4]
    assert row_of_slot.tolist() == ROW_OF_SLOT


def test_a4_minus_one_in_a_dropless_mode() -> None:
    raises(
        IndexError,
        "moe::finalize_routing_v2: expanded_row_idx must be in [0, 6), got -1 at position 2",
        lambda: moe.finalize_routing_v2(
            torch.tensor(ROWS, dtype=torch.float32),
            torch.tensor([4, 0, -1, 5, 1, 3]),
            scales=PROBS,
            drop_pad_mode=2,
        ),
    )


@pytest.mark.parametrize("row", [6, 7, 2**31 - 1, 2**40])
def test_a4_row_past_the_slots(row: int) -> None:
    raises(
        IndexError,
        f"moe::token_unpermute: sorted_indices must be in [-1, 6), got {row} at position 5",
        moe.token_unpermute,
        torch.tensor(ROWS, dtype=torch.float32),
        torch.tensor([4, 0, 2, 5, 1, row]),
        PROBS,
    )


@pytest.mark.parametrize("expert", [3, 2**31 - 1])
def test_a4_expert_past_the_end(expert: int) -> None:
    ids = IDS.clone()
    ids[1, 1] = expert
    for options in ({}, {"drop_pad_mode": 1, "expert_capacity": 2}):
        raises(
            IndexError,
            f"moe::init_routing_v2: expert_idx must be in [0, 3), got {expert} at position 3",
            lambda options=options: moe.init_routing_v2(X, ids, expert_num=3, **options),
        )


def test_a5_dropped_slot_loses_its_bias() -> None:
    out = moe.finalize_routing_v2(
        torch.tensor([[[5.0, 5.0], [7.0, 8.0]], [[9.0, 9.0], [1.0, 1.0]]]),
        torch.tensor([1, -1, 3, -1]),
        scales=torch.tensor([[0.5, 0.5], [2.0, 1.0]]),
        bias=torch.tensor([[100.0, 200.0], [1000.0, 2000.0]]),
        expert_idx=torch.tensor([[0, 1], [1, 0]]),
        drop_pad_mode=3,
    )
    assert out.tolist() == [[53.5, 104], [2002, 4002]]  # with the bias: [553.5, 1104], ...


@pytest.mark.parametrize(
    ("num_out_tokens", "kept"), [(None, 6), (0, 6), (4, 4), (-1, 5), (9, 6), (-6, 0)]
)
def test_a7_num_out_tokens(num_out_tokens: int | None, kept: int) -> None:
    rows, row_of_slot = moe.token_permute(X, IDS, num_out_tokens)
    assert rows[:, 0].tolist() == [1, 3, 2, 3, 1, 2][:kept]
    assert row_of_slot.tolist() == ROW_OF_SLOT


def test_a9_capacity() -> None:
    x = torch.arange(1.0, 5.0)[:, None]
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [2, 0]])
    buffer, row_of_slot, _, counts = moe.init_routing_v2(
        x,
        ids,
        expert_num=4,
        expert_capacity=2,
        drop_pad_mode=1,
        expert_tokens_before_capacity_flag=True,
    )
    assert buffer[..., 0].tolist() == [[1, 2], [1, 3], [2, 4], [0, 0]]
    assert row_of_slot.tolist() == [0, 2, 1, 4, -1, 3, 5, -1]
    assert counts.tolist() == [4, 2, 2, 0]
    raises(
        ValueError,
        "moe::init_routing_v2: expert_capacity must be at most the number of tokens in x (4), "
        "got 5",
        lambda: moe.init_routing_v2(x, ids, expert_num=4, expert_capacity=5, drop_pad_mode=1),
    )


def test_a10_one_expert_twice_for_a_token() -> None:
    x = torch.tensor([[1.0], [2.0]], requires_grad=True)
    rows, row_of_slot = moe.token_permute(x, torch.tensor([[1, 1], [0, 1]]))
    assert rows.flatten().tolist() == [2, 1, 1, 2]
    assert row_of_slot.tolist() == [1, 2, 0, 3]
    probs = torch.tensor([[0.5, 0.25], [1.0, 1.0]])
    out = moe.token_unpermute(rows, row_of_slot, probs)
    assert out.flatten().tolist() == [0.75, 4]
    out.sum().backward()
    assert x.grad.flatten().tolist() == [0.75, 2]


# B: gradients


def test_b1_probs_get_their_gradient() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], requires_grad=True)
    probs = torch.tensor([[0.5, 2.0], [1.0, -1.0]], requires_grad=True)
    out = moe.token_unpermute(rows, torch.tensor([2, 0, 3, 1]), probs)
    assert out.tolist() == [[4.5, 7], [4, 4]]
    out.backward(torch.tensor([[1.0, 10.0], [100.0, 1000.0]]))
    assert rows.grad.tolist() == [[2, 20], [-100, -1000], [0.5, 5], [100, 1000]]
    assert probs.grad.tolist() == [[65, 21], [8700, 4300]]


@pytest.mark.parametrize("trans_weight", [False, True])
def test_b4_experts_without_tokens(trans_weight: bool) -> None:
    x = torch.arange(1.0, 11.0).reshape(5, 2)
    weight = torch.ones(4, *((3, 2) if trans_weight else (2, 3)), requires_grad=True)
    for _ in range(10):
        poison = [torch.full_like(weight, float("nan")) for _ in range(3)]
        del poison
        weight.grad = None
        out = moe.grouped_matmul(x, weight, [2, 0, 3, 0], trans_weight=trans_weight)
        out.sum().backward()
        gradient = weight.grad.transpose(1, 2) if trans_weight else weight.grad
        assert gradient[0].tolist() == [[4] * 3, [6] * 3]
        assert gradient[2].tolist() == [[21] * 3, [24] * 3]
        assert gradient[1].count_nonzero() == gradient[3].count_nonzero() == 0


@pytest.mark.parametrize("compiled", [False, True])
def test_b4_no_tokens_at_all(compiled: bool) -> None:
    function = moe.grouped_matmul
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(moe.grouped_matmul, fullgraph=True, backend="aot_eager")
    weight = torch.ones(4, 2, 3, requires_grad=True)
    out = function(torch.empty(0, 2), weight, torch.zeros(4, dtype=torch.int64))
    assert out.shape == (0, 3)
    out.sum().backward()
    assert weight.grad.shape == (4, 2, 3)
    assert weight.grad.count_nonzero() == 0


def test_b5_rows_past_the_last_group() -> None:
    raises(
        ValueError,
        "moe::grouped_matmul: group_list must use up the 5 rows of x, got a total of 4",
        moe.grouped_matmul,
        torch.ones(5, 2),
        torch.ones(2, 2, 3),
        [2, 2],
    )


def experts(tokens: Tensor, probs: Tensor, weight: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    """The whole way of the tokens: to the experts, through them, and back."""
    rows, row_of_slot = moe.token_permute(tokens, ids)
    return moe.token_unpermute(moe.grouped_matmul(rows, weight, counts), row_of_slot, probs)


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)))
def test_b7_frozen_parts(wanted: tuple[bool, bool, bool]) -> None:
    v = Values(torch.float64)
    counts = torch.tensor([2, 2, 2, 0])

    def run(flags: tuple[bool, ...]) -> list[Tensor | None]:
        inputs = [X.double(), PROBS.double(), v(4, 2, 2)]
        leaves = [value.requires_grad_(flag) for value, flag in zip(inputs, flags, strict=True)]
        v.generator.manual_seed(0)
        out = experts(*leaves, IDS, counts)
        assert out.requires_grad == any(flags)
        if any(flags):
            out.square().sum().backward()
        return [leaf.grad for leaf in leaves]

    v.generator.manual_seed(0)
    everything = run((True, True, True))
    assert all(gradient.count_nonzero() > 0 for gradient in everything)
    assert_same_bits(
        run(wanted),
        [gradient if flag else None for gradient, flag in zip(everything, wanted, strict=True)],
    )


# C: precision and size


def test_c1_sum_is_wider_than_the_rows() -> None:
    rows = torch.ones(8, 1, dtype=torch.bfloat16)
    rows[0] = 256
    ones = torch.ones(1, 8, dtype=torch.bfloat16)
    # 256 + 1 is 256 in bfloat16; 263 rounds to 264.
    assert moe.token_unpermute(rows, torch.arange(8), ones).item() == 264
    rows = torch.full((2, 1), 60000.0, dtype=torch.float16)
    halves = torch.full((1, 2), 0.5, dtype=torch.float16)
    assert moe.token_unpermute(rows, torch.arange(2), halves).item() == 60000


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_k", [1, 2, 8, 64])
def test_c1_error_does_not_grow_with_k(dtype: torch.dtype, top_k: int) -> None:
    """Half a unit in the last place of the result, and the rounding of float32 in the sum."""
    v = Values(dtype)
    rows, probs = v(50 * top_k, 5), v(50, top_k, dtype=torch.float32).abs()
    out = moe.token_unpermute(rows, torch.arange(50 * top_k), probs)
    terms = rows.double().reshape(50, top_k, 5) * probs.double()[..., None]
    exact = terms.sum(1)
    above = torch.nextafter(out.abs(), torch.full_like(out, float("inf"))).double()
    half_unit = (above - out.abs().double()) / 2
    assert ((out.double() - exact).abs() <= half_unit + 2**-22 * terms.abs().sum(1)).all()


@pytest.mark.huge
def test_c5_more_than_32_bits_of_elements() -> None:
    """32800 rows of 65536 elements: rows from 32768 on start past 2^31 elements."""
    assert os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > 12e9, "needs 12 GB"
    torch.set_num_threads(os.cpu_count() or 1)
    count, width = 32800, 65536
    picked = [0, 32767, 32768, 32769, count - 1]
    tokens = torch.zeros(count, width, dtype=torch.bfloat16)
    for row in picked:
        tokens[row] = torch.arange(width).remainder(row % 251 + 2).bfloat16()
    ids = torch.zeros(count, 1, dtype=torch.int64)
    rows, row_of_slot = moe.token_permute(tokens, ids)
    assert all(torch.equal(rows[row], tokens[row]) for row in picked)
    del tokens
    # Backward of permute, and forward of unpermute: both read the same rows.
    gradient = moe.token_permute_grad(rows, row_of_slot, 1)
    assert all(torch.equal(rows[row], gradient[row]) for row in picked)
    del gradient
    grad_rows, _ = moe.token_unpermute_grad(rows, rows, row_of_slot)
    assert all(torch.equal(rows[row], grad_rows[row]) for row in picked)


@pytest.mark.huge
def test_c5_more_than_32_bits_of_weights() -> None:
    experts_count, width = 33, 8200
    weight = torch.zeros(experts_count, width, width, dtype=torch.bfloat16)
    assert weight.numel() > 2**31
    weight[-1].fill_diagonal_(2)
    x = torch.arange(width).remainder(7).bfloat16()[None]
    counts = [0] * (experts_count - 1) + [1]
    assert torch.equal(moe.grouped_matmul(x, weight, counts), 2 * x)
    del weight
    gradient = moe.grouped_matmul_weight_grad(x, x, counts)
    assert torch.equal(gradient[-1, 6], 6 * x[0])
    assert gradient[-2].count_nonzero() == 0


# D: the interface of grouped_matmul


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_d2_odd_sizes_and_transposed_weights(dtype: torch.dtype) -> None:
    v = Values(dtype)
    x, stored = v(5, 3).requires_grad_(), v(3, 5, 3).requires_grad_()
    counts = torch.tensor([1, 0, 4])
    view = moe.grouped_matmul(x, stored.transpose(1, 2), counts)
    gradients = torch.autograd.grad(view.sum(), [x, stored])
    copy = moe.grouped_matmul(x, stored.transpose(1, 2).contiguous(), counts)
    # BLAS may add the three products in another order: one rounding of the dtype apart.
    close = {"rtol": torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(view, copy, **close)
    expected = torch.autograd.grad(copy.sum(), [x, stored])
    for gradient, other, leaf in zip(gradients, expected, [x, stored], strict=True):
        torch.testing.assert_close(gradient, other, **close)
        assert gradient.shape == leaf.shape
    assert gradients[1][1].count_nonzero() == 0
    assert gradients[1][2].count_nonzero() > 0


def test_d3_mixed_dtypes() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    weight = torch.ones(1, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    raises(
        TypeError,
        "moe::grouped_matmul: weight must have the dtype of x (float32), got bfloat16",
        moe.grouped_matmul,
        x,
        weight,
        [3],
    )
    with torch.autocast("cpu", torch.bfloat16):
        out = moe.grouped_matmul(x, weight, [3])
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [[2] * 4] * 3
    out.sum().backward()
    assert x.grad.dtype == torch.float32
    assert x.grad.tolist() == [[4] * 2] * 3
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [[[3] * 4] * 2]


def test_d3_autocast_does_not_round_tokens() -> None:
    tokens = torch.tensor([[1.0 + 2**-20]])
    with torch.autocast("cpu", torch.bfloat16):
        rows, row_of_slot = moe.token_permute(tokens, torch.tensor([[0]]))
        back = moe.token_unpermute(rows, row_of_slot, torch.ones(1, 1))
    assert rows.item() == back.item() == 1.0 + 2**-20


def test_d4_forms_of_the_group_list() -> None:
    v = Values(torch.float32)
    x, weight = v(5, 3), v(2, 3, 4)
    forms = [torch.tensor([1, 4]), torch.tensor([1, 4], dtype=torch.int32), [1, 4], (1, 4)]
    results = [moe.grouped_matmul(x, weight, form) for form in forms]
    assert_same_bits(results, results[:1] * 4)
    raises(
        ValueError,
        "moe::grouped_matmul: group_list must have size 2 in dimension 0, got shape [4]",
        moe.grouped_matmul,
        x,
        weight,
        [1, 4, 0, 0],
    )
    one = moe.grouped_matmul(x, weight[:1], [5])
    torch.testing.assert_close(one, x @ weight[0])


# E: no tokens


@pytest.mark.parametrize("width", [4, 0])
def test_e1_no_tokens(width: int) -> None:
    tokens = torch.empty(0, width, requires_grad=True)
    probs = torch.empty(0, 2, requires_grad=True)
    ids = torch.empty(0, 2, dtype=torch.int64)
    weight = torch.ones(3, width, 5, requires_grad=True)
    rows, row_of_slot = moe.token_permute(tokens, ids)
    assert rows.shape == (0, width)
    assert row_of_slot.shape == (0,)
    hidden = moe.grouped_matmul(rows, weight, [0, 0, 0])
    assert hidden.shape == (0, 5)
    out = moe.token_unpermute(hidden, row_of_slot, probs)
    finalized = moe.finalize_routing_v2(hidden, row_of_slot, scales=probs, drop_pad_mode=2)
    assert out.shape == finalized.shape == (0, 5)
    (out.sum() + finalized.sum()).backward()
    assert tokens.grad.shape == (0, width)
    assert probs.grad.shape == (0, 2)
    assert weight.grad.shape == weight.shape
    assert weight.grad.count_nonzero() == 0


def test_e1_no_width() -> None:
    tokens = torch.empty(3, 0, requires_grad=True)
    probs = torch.ones(3, 2, requires_grad=True)
    rows, row_of_slot = moe.token_permute(tokens, IDS)
    out = moe.token_unpermute(rows, row_of_slot, probs)
    assert out.shape == (3, 0)
    out.sum().backward()
    assert tokens.grad.shape == (3, 0)
    assert probs.grad.tolist() == [[0, 0]] * 3


def test_e1_all_dropped() -> None:
    rows = torch.empty(0, 4, requires_grad=True)
    probs = torch.ones(3, 1, requires_grad=True)
    out = moe.token_unpermute(rows, torch.full((3,), -1), probs)
    assert out.tolist() == [[0] * 4] * 3
    out.sum().backward()
    assert rows.grad.shape == (0, 4)
    assert probs.grad.tolist() == [[0]] * 3

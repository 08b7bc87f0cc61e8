"""Properties that hold for all inputs, tried on many: there and back again."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import torch_moe_ops as moe

from .data import assert_same_bits

Choices = tuple[Tensor, Tensor, int]


@st.composite
def choices(draw: st.DrawFn, max_top_k: int = 4) -> Choices:
    """Tokens of small whole numbers (sums of them are exact), expert ids, and the experts."""
    tokens = draw(st.integers(0, 9))
    top_k = draw(st.integers(1, max_top_k))
    width = draw(st.integers(0, 5))
    experts = draw(st.integers(1, 6))
    ids = draw(
        st.lists(st.integers(0, experts - 1), min_size=tokens * top_k, max_size=tokens * top_k)
    )
    values = draw(st.lists(st.integers(-99, 99), min_size=tokens * width, max_size=tokens * width))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]))
    index_dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    x = torch.tensor(values, dtype=dtype).reshape(tokens, width)
    return x, torch.tensor(ids, dtype=index_dtype).reshape(tokens, top_k), experts


@given(choices(max_top_k=1))
@settings(max_examples=60)
def test_unpermute_undoes_permute(case: Choices) -> None:
    x, ids, _ = case
    rows, row_of_slot = moe.token_permute(x, ids)
    assert_same_bits([moe.token_unpermute(rows, row_of_slot)], [x])


@given(choices())
@settings(max_examples=60)
def test_unpermute_of_permute_counts_the_choices(case: Choices) -> None:
    x, ids, _ = case
    rows, row_of_slot = moe.token_permute(x, ids)
    ones = torch.ones(ids.shape, dtype=x.dtype)
    expected = [x * ids.shape[1]]
    assert_same_bits([moe.token_unpermute(rows, row_of_slot, ones)], expected)
    assert_same_bits([moe.token_permute_grad(rows, row_of_slot, ids.shape[1])], expected)


@given(choices())
@settings(max_examples=60)
def test_rows_are_sorted_by_expert_and_complete(case: Choices) -> None:
    x, ids, experts = case
    _, row_of_slot = moe.token_permute(x, ids)
    flat = ids.flatten()
    assert row_of_slot.sort().values.tolist() == list(range(flat.numel()))
    by_row = torch.empty_like(flat)
    by_row[row_of_slot.long()] = flat
    assert by_row.tolist() == sorted(flat.tolist())
    counts = moe.init_routing_v2(x, ids, expert_num=experts, expert_tokens_count_or_cumsum_flag=2)[
        2
    ]
    assert counts.tolist() == [flat.tolist().count(expert) for expert in range(experts)]


@given(choices(), st.integers(-40, 40))
@settings(max_examples=60)
def test_kept_rows_are_the_first_ones(case: Choices, keep: int) -> None:
    x, ids, _ = case
    rows, row_of_slot = moe.token_permute(x, ids)
    some, same_map = moe.token_permute(x, ids, keep)
    slots = ids.numel()
    count = slots if keep == 0 else min(keep, slots) if keep > 0 else max(slots + keep, 0)
    assert_same_bits([some, same_map], [rows[:count], row_of_slot])
    # Rows cut off count as zeros, forward and backward.
    padded = torch.cat([some, torch.zeros_like(rows[count:])])
    assert_same_bits(
        [moe.token_permute_grad(some, row_of_slot, ids.shape[1])],
        [moe.token_permute_grad(padded, row_of_slot, ids.shape[1])],
    )


@given(choices())
@settings(max_examples=60)
def test_finalize_undoes_init(case: Choices) -> None:
    x, ids, _ = case
    expanded, row_of_slot, *_ = moe.init_routing_v2(x, ids)
    ones = torch.ones(ids.shape)
    for mode, row_map in (
        (2, row_of_slot),
        (0, row_of_slot.reshape(ids.shape).t().reshape(-1)),
    ):
        out = moe.finalize_routing_v2(expanded, row_map, scales=ones, drop_pad_mode=mode)
        assert_same_bits([out], [x * ids.shape[1]])


@given(choices(), st.integers(1, 9))
@settings(max_examples=60)
def test_capacity_drops_the_latest_slots_only(case: Choices, capacity: int) -> None:
    x, ids, experts = case
    capacity = min(capacity, x.shape[0])
    expanded, row_of_slot, *_ = moe.init_routing_v2(
        x, ids, expert_num=experts, expert_capacity=capacity, drop_pad_mode=1
    )
    earlier = [0] * experts
    kept = []
    for expert in ids.flatten().tolist():
        kept.append(earlier[expert] < capacity)
        earlier[expert] += 1
    assert (row_of_slot >= 0).tolist() == kept
    weights = torch.tensor(kept, dtype=x.dtype).reshape(ids.shape)
    expected = [x * weights.sum(1, keepdim=True)]
    scales = torch.ones(ids.shape)
    out = moe.finalize_routing_v2(expanded, row_of_slot, scales=scales, drop_pad_mode=3)
    assert_same_bits([out + 0], [value + 0 for value in expected])


@given(choices())
@settings(max_examples=60)
def test_enough_capacity_is_dropless(case: Choices) -> None:
    """One expert can be named K times by every token, so that T places may be too few."""
    x, ids, experts = case
    ids = ids[:, :1]
    scales = torch.linspace(-2, 2, ids.numel()).reshape(ids.shape)
    expanded, row_of_slot, *_ = moe.init_routing_v2(
        x, ids, expert_num=experts, expert_capacity=x.shape[0], drop_pad_mode=1
    )
    padded = moe.finalize_routing_v2(expanded, row_of_slot, scales=scales, drop_pad_mode=3)
    rows, row_of_slot, *_ = moe.init_routing_v2(x, ids)
    dropless = moe.finalize_routing_v2(rows, row_of_slot, scales=scales, drop_pad_mode=2)
    assert_same_bits([padded], [dropless])

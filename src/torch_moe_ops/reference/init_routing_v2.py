"""init_routing_v2: expand the tokens to rows sorted by expert, dropless or with a capacity.

With slot ``i = t * K + k`` and ``e[i]`` its expert id, in stable ascending order of the ids::

    mode 0   expanded_row_idx[i] = position of slot i in the sorted order (n long, never cut)
             expanded_x[r] = x[slot of row r // K]         for the first M rows,
                                                           M = min(active_num, n), all if it is 0
    mode 1   s = how many slots before i have the same expert
             expanded_row_idx[i] = e[i] * C + s            if s < C, else -1 (dropped)
             expanded_x[e[i], s] = x[t]                    unused places are zero

    expert_tokens_count_or_cumsum   mode 0: (E,) running totals (flag 1) or counts (flag 2)
    expert_tokens_before_capacity   mode 1: (E,) counts before dropping
    both are of shape (0,) where they were not asked for

The gradient adds up, for every token, the rows of its slots; -1 and rows past the end add nothing.
"""

import torch
from torch import Tensor

from ._slots import accumulation_dtype, rows_from_slots, slots_from_rows, sum_over_choices


def init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    active_num: int = 0,
    expert_capacity: int = 0,
    expert_num: int = 0,
    drop_pad_mode: int = 0,
    expert_tokens_count_or_cumsum_flag: int = 0,
    expert_tokens_before_capacity_flag: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, the row of each slot, and the optional counts. See the module docstring."""
    ids = expert_idx.reshape(-1).long()
    slots = ids.shape[0]
    top_k = expert_idx.shape[1] if expert_idx.dim() == 2 else 1
    order = torch.argsort(ids, stable=True)
    place = torch.arange(slots, device=ids.device)
    # Without expert_num the ids have no upper bound, and nothing is counted.
    counts = torch.bincount(ids, minlength=expert_num) if expert_num > 0 else ids.new_zeros(0)
    totals = counts.cumsum(0)

    count_or_cumsum = ids.new_zeros(0)
    before_capacity = ids.new_zeros(0)
    row_of_slot = torch.empty_like(ids)
    if drop_pad_mode == 0:
        row_of_slot[order] = place
        num_rows = min(active_num, slots) if active_num > 0 else slots
        expanded_x = x[order[:num_rows] // top_k]
        if expert_tokens_count_or_cumsum_flag == 1:
            count_or_cumsum = totals
        elif expert_tokens_count_or_cumsum_flag == 2:
            count_or_cumsum = counts
    else:
        place_in_expert = place - (totals - counts)[ids[order]]
        row = ids[order] * expert_capacity + place_in_expert
        row_of_slot[order] = torch.where(place_in_expert < expert_capacity, row, -1)
        x_of_slot = x.repeat_interleave(top_k, 0)
        expanded_x = rows_from_slots(x_of_slot, row_of_slot, expert_num * expert_capacity)
        expanded_x = expanded_x.reshape(expert_num, expert_capacity, x.shape[1])
        if expert_tokens_before_capacity_flag:
            before_capacity = counts
    return (
        expanded_x,
        row_of_slot.to(torch.int32),
        count_or_cumsum.to(torch.int32),
        before_capacity.to(torch.int32),
    )


def init_routing_v2_grad(
    grad_expanded_x: Tensor,
    expanded_row_idx: Tensor,
    top_k: int,
    drop_pad_mode: int = 0,
    active_num: int = 0,
) -> Tensor:
    """The gradient of ``x``: the sum over the K slots of a token, rounded once."""
    grad = grad_expanded_x.to(accumulation_dtype(grad_expanded_x))
    if drop_pad_mode == 1:
        grad = grad.flatten(0, 1)
    total = sum_over_choices(slots_from_rows(grad, expanded_row_idx), top_k)
    return total.to(grad_expanded_x.dtype)

"""finalize_routing_v2: bring the rows of a token back together, with bias, weight and two skips.

::

    out[t] = x1[t] + x2[t] + sum over k of scales[t, k] * (rows[r] + bias[expert_idx[t, k]])

    drop_pad_mode   index of (t, k) in expanded_row_idx    expanded_x
    0               k * T + t  (k-major)                   (M, H), dropless
    1               k * T + t  (k-major)                   (E, C, H), drop/pad
    2               t * K + k  (token-major)               (M, H), dropless
    3               t * K + k  (token-major)               (E, C, H), drop/pad

Whatever is not given is left out (scales: 1, and K = 1). A slot whose row is -1 or past the end
loses its whole term, bias included. ``finalize_routing_v2_grad`` is token-major: its mode 0 belongs
to forward mode 2, its mode 1 to forward mode 3. With slot ``i = t * K + k`` and row r::

    grad_expanded_x[r] = scales[t, k] * grad_y[t]          zero for a row that no slot names
    grad_scales[t, k] = <rows[r] + bias[expert_idx[t, k]], grad_y[t]>
                                                           zero if the row is -1 or past the end
"""

from torch import Tensor

from ._slots import (
    accumulation_dtype,
    keep_present,
    per_slot,
    rows_from_slots,
    slots_from_rows,
    sum_over_choices,
)


def finalize_routing_v2(
    expanded_x: Tensor,
    expanded_row_idx: Tensor,
    x1: Tensor | None = None,
    x2: Tensor | None = None,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    expert_idx: Tensor | None = None,
    *,
    drop_pad_mode: int = 0,
) -> Tensor:
    """The weighted sum of the rows of each token, rounded once. See the module docstring."""
    acc = accumulation_dtype(expanded_x, scales)
    top_k = 1 if scales is None else scales.shape[1]
    num_tokens = expanded_row_idx.shape[0] // top_k
    row_of_slot = expanded_row_idx
    if drop_pad_mode in (0, 1):
        row_of_slot = row_of_slot.reshape(top_k, num_tokens).t().reshape(-1)
    rows = expanded_x.to(acc)
    if drop_pad_mode in (1, 3):
        rows = rows.flatten(0, 1)

    # Both factors of a slot that is not there become 0, so that autograd never meets 0 * NaN.
    terms = slots_from_rows(rows, row_of_slot)
    if bias is not None and expert_idx is not None:
        terms = terms + bias.to(acc)[expert_idx.reshape(-1).long()]
        terms = keep_present(terms, row_of_slot, rows.shape[0])
    if scales is not None:
        weight = per_slot(scales.to(acc), terms)
        terms = terms * keep_present(weight, row_of_slot, rows.shape[0])
    out = sum_over_choices(terms, top_k)
    for skip in (x1, x2):
        if skip is not None:
            out = out + skip.to(acc)
    return out.to(expanded_x.dtype)


def finalize_routing_v2_grad(
    grad_y: Tensor,
    expanded_row_idx: Tensor,
    expanded_x: Tensor | None = None,
    scales: Tensor | None = None,
    expert_idx: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    drop_pad_mode: int = 0,
    active_num: int = 0,
    expert_num: int = 0,
    expert_capacity: int = 0,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``expanded_x`` and ``scales``; the second is (0,) without scales."""
    acc = accumulation_dtype(grad_y, scales)
    slots = expanded_row_idx.shape[0]
    num_rows = active_num if 0 < active_num < slots else slots
    rows_shape = [num_rows, grad_y.shape[1]]
    if drop_pad_mode == 1:
        num_rows = expert_num * expert_capacity
        rows_shape = [expert_num, expert_capacity, grad_y.shape[1]]
    top_k = 1 if scales is None else scales.shape[1]
    slots_grad = grad_y.to(acc).repeat_interleave(top_k, 0)

    if scales is None:
        rows_grad = rows_from_slots(slots_grad, expanded_row_idx, num_rows)
        return rows_grad.reshape(rows_shape).to(grad_y.dtype), grad_y.new_zeros(0)

    weighted = slots_grad * per_slot(scales.to(acc), slots_grad)
    rows_grad = rows_from_slots(weighted, expanded_row_idx, num_rows)
    assert expanded_x is not None
    rows = expanded_x.to(acc)
    if drop_pad_mode == 1:
        rows = rows.flatten(0, 1)
    terms = slots_from_rows(rows, expanded_row_idx)
    if bias is not None and expert_idx is not None:
        terms = terms + bias.to(acc)[expert_idx.reshape(-1).long()]
    products = keep_present(terms * slots_grad, expanded_row_idx, num_rows)
    scales_grad = products.sum(1).reshape(scales.shape)
    return rows_grad.reshape(rows_shape).to(grad_y.dtype), scales_grad.to(scales.dtype)

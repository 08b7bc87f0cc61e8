"""Moving data between slots and rows, shared by the definitions."""

import torch
from torch import Tensor


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any of the given tensors is float64, else float32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def per_slot(values: Tensor, like: Tensor) -> Tensor:
    """One value per slot, shaped to broadcast over the trailing dimensions of ``like``."""
    return values.reshape(-1, *[1] * (like.dim() - 1))


def is_present(row_of_slot: Tensor, num_rows: int) -> Tensor:
    """Boolean (n,): false for a slot that was dropped (-1) or cut off (past the last row)."""
    return (row_of_slot >= 0) & (row_of_slot < num_rows)


def keep_present(slots: Tensor, row_of_slot: Tensor, num_rows: int) -> Tensor:
    """``slots`` with exact zeros where the row is not there.

    A selection, never a product with a 0/1 mask: 0 * NaN is not zero.
    """
    present = per_slot(is_present(row_of_slot, num_rows), slots)
    return torch.where(present, slots, torch.zeros_like(slots))


def slots_from_rows(rows: Tensor, row_of_slot: Tensor) -> Tensor:
    """``out[i] = rows[row_of_slot[i]]``; exactly zero for a slot whose row is not there."""
    present = is_present(row_of_slot, rows.shape[0]).nonzero().flatten()
    out = rows.new_zeros(row_of_slot.shape[0], *rows.shape[1:])
    return out.index_copy(0, present, rows[row_of_slot[present].long()])


def rows_from_slots(slots: Tensor, row_of_slot: Tensor, num_rows: int) -> Tensor:
    """``out[row_of_slot[i]] = slots[i]``; exactly zero for a row that no slot names."""
    present = is_present(row_of_slot, num_rows).nonzero().flatten()
    out = slots.new_zeros(num_rows, *slots.shape[1:])
    return out.index_copy(0, row_of_slot[present].long(), slots[present])


def sum_over_choices(slots: Tensor, top_k: int) -> Tensor:
    """``out[t] = sum over k of slots[t * K + k]``."""
    return slots.reshape(slots.shape[0] // top_k, top_k, *slots.shape[1:]).sum(1)

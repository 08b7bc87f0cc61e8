"""What a user would write without the package: each operator's formula in eager PyTorch.

No slower than necessary, but no cleverer than the formula either. Dimension letters are those of
the package; slot ``i = t * K + k``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_moe_ops.nn import MoE


def sorted_rows(ids_TK: Tensor) -> Tensor:
    """The row of each slot when slots are sorted by expert."""
    return ids_TK.flatten().argsort(stable=True).argsort().int()


def rows_with_capacity(ids_TK: Tensor, num_experts: int, capacity: int) -> Tensor:
    """The row of each slot when every expert has ``capacity`` rows; -1 where they are full."""
    ids_n = ids_TK.flatten()
    slot_of_rank = ids_n.argsort(stable=True)
    counts_E = ids_n.bincount(minlength=num_experts)
    sorted_ids_n = ids_n[slot_of_rank]
    place_n = torch.arange(ids_n.numel()) - (counts_E.cumsum(0) - counts_E)[sorted_ids_n]
    row_of_rank = torch.where(place_n < capacity, sorted_ids_n * capacity + place_n, -1)
    row_of_slot = torch.empty_like(row_of_rank)
    row_of_slot[slot_of_rank] = row_of_rank
    return row_of_slot.int()


def token_permute(tokens: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    slot_of_row = ids_TK.flatten().argsort(stable=True)
    rows = tokens.index_select(0, slot_of_row // ids_TK.shape[1])
    return rows, slot_of_row.argsort().int()


def token_permute_grad(rows_grad: Tensor, row_of_slot: Tensor, top_k: int) -> Tensor:
    return rows_grad.index_select(0, row_of_slot).unflatten(0, (-1, top_k)).sum(1)


def token_unpermute(rows: Tensor, row_of_slot: Tensor, probs: Tensor) -> Tensor:
    chosen_TKH = rows.index_select(0, row_of_slot).unflatten(0, probs.shape)
    return (chosen_TKH * probs.unsqueeze(-1)).sum(1)


def token_unpermute_grad(
    rows: Tensor, grad: Tensor, row_of_slot: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    chosen_TKH = rows.index_select(0, row_of_slot).unflatten(0, probs.shape)
    probs_grad = (chosen_TKH * grad.unsqueeze(1)).sum(-1)
    rows_grad = torch.zeros_like(rows)
    rows_grad[row_of_slot.long()] = (grad.unsqueeze(1) * probs.unsqueeze(-1)).flatten(0, 1)
    return rows_grad, probs_grad


def init_routing_drop_pad(
    x: Tensor, ids_TK: Tensor, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor]:
    row_of_slot = rows_with_capacity(ids_TK, num_experts, capacity)
    (kept_slots,) = torch.where(row_of_slot >= 0)
    rows = x.new_zeros(num_experts * capacity, x.shape[1])
    rows[row_of_slot[kept_slots].long()] = x.index_select(0, kept_slots // ids_TK.shape[1])
    return rows.unflatten(0, (num_experts, capacity)), row_of_slot


def init_routing_drop_pad_grad(rows_grad: Tensor, row_of_slot: Tensor, top_k: int) -> Tensor:
    chosen = rows_grad.flatten(0, 1).index_select(0, row_of_slot.clamp(min=0))
    chosen = chosen * (row_of_slot >= 0).unsqueeze(-1)
    return chosen.unflatten(0, (-1, top_k)).sum(1)


def finalize_routing(
    rows: Tensor, row_of_slot: Tensor, bias: Tensor, scales: Tensor, ids_TK: Tensor
) -> Tensor:
    drop_pad = rows.dim() == 3
    if drop_pad:
        scales = scales.masked_fill((row_of_slot < 0).view_as(scales), 0)
        rows, row_of_slot = rows.flatten(0, 1), row_of_slot.clamp(min=0)
    chosen_TKH = rows.index_select(0, row_of_slot).unflatten(0, scales.shape)
    return ((chosen_TKH + bias[ids_TK]) * scales.unsqueeze(-1)).sum(1)


def finalize_routing_grad(
    grad: Tensor, row_of_slot: Tensor, rows: Tensor, scales: Tensor, ids_TK: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    drop_pad = rows.dim() == 3
    rows_MH = rows.flatten(0, -2)
    read_from = row_of_slot.clamp(min=0) if drop_pad else row_of_slot
    chosen_TKH = rows_MH.index_select(0, read_from).unflatten(0, scales.shape) + bias[ids_TK]
    scales_grad = (chosen_TKH * grad.unsqueeze(1)).sum(-1)
    write_to = row_of_slot.long()
    grad_of_slot = (grad.unsqueeze(1) * scales.unsqueeze(-1)).flatten(0, 1)
    if drop_pad:
        kept = row_of_slot >= 0
        scales_grad = scales_grad * kept.view_as(scales_grad)
        write_to, grad_of_slot = write_to[kept], grad_of_slot[kept]
    rows_grad = torch.zeros_like(rows_MH)
    rows_grad[write_to] = grad_of_slot
    return rows_grad.view_as(rows), scales_grad


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """A loop of torch.mm that writes into its output: nothing is put together afterwards."""
    sizes = counts.tolist()
    y = x.new_empty(x.shape[0], weight.shape[2])
    for rows, matrix, out in zip(x.split(sizes), weight, y.split(sizes), strict=True):
        torch.mm(rows, matrix, out=out)
    return y


def grouped_matmul_weight_grad(x: Tensor, grad_y: Tensor, counts: Tensor) -> Tensor:
    sizes = counts.tolist()
    weight_grad = x.new_empty(len(sizes), x.shape[1], grad_y.shape[1])
    for rows, grad, out in zip(x.split(sizes), grad_y.split(sizes), weight_grad, strict=True):
        torch.mm(rows.t(), grad, out=out)
    return weight_grad


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_grad(grad: Tensor, gate_up: Tensor) -> Tensor:
    """What autograd runs for the form above, but for the copies of the halves into zeros."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate_grad = torch.ops.aten.silu_backward(grad * up, gate)
    return torch.cat([gate_grad, grad * F.silu(gate)], dim=-1)


def moe_layer(layer: MoE, x: Tensor) -> Tensor:
    """The dropless layer as a loop over experts, on the router and the weights of ``layer``."""
    routed = layer.router(x)
    probs = routed.probs.to(x.dtype)
    y = torch.zeros_like(x)
    for expert in range(layer.num_experts):
        tokens, choices = torch.where(routed.expert_ids == expert)
        gate_up = x[tokens] @ layer.experts.gate_up_proj[expert]
        rows = swiglu(gate_up) @ layer.experts.down_proj[expert]
        y = y.index_add(0, tokens, rows * probs[tokens, choices].unsqueeze(-1))
    return y

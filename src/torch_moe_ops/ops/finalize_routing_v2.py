"""Combines expert rows, skips and biases per token: ``finalize_routing_v2`` and its gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.ops._registration import needs_grad, register_autograd, sums_dtype


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
    r"""Weighted sum of each token's rows, with optional skips and expert biases.

    ``y[t] = x1[t] + x2[t] + sum_k scales[t, k] * (expanded_x[r(t, k)] + bias[expert_idx[t, k]])``

    ============= ============== ===================================== =====================
    drop_pad_mode expanded_x     ``r(t, k)`` in ``expanded_row_idx``    map made by
    ============= ============== ===================================== =====================
    0             (M, H)         k-major, position ``k * T + t``        InitRouting V1
    1             (E, C, H)      k-major                                InitRouting V1
    2             (M, H)         token-major, position ``t * K + k``    init_routing_v2 mode 0
    3             (E, C, H)      token-major                            init_routing_v2 mode 1
    ============= ============== ===================================== =====================

    In modes 1 and 3 a row of -1 marks a dropped slot, which loses its whole term, bias included.
    In modes 0 and 2 rows from M on are cut off and contribute nothing.

    Args:
        expanded_x: (M, H) with M at most T·K, or (E, C, H); floating.
        expanded_row_idx: (T·K,), int32 or int64, in [0, T·K) in modes 0 and 2, [-1, E·C) in 1
            and 3.
        x1: (T, H), the dtype of ``expanded_x``.
        x2: (T, H); needs ``x1``.
        bias: (E, H); needs ``expert_idx``.
        scales: (T, K), any floating dtype; it is not rounded to the dtype of the rows. None: K is
            1 and every scale is 1.
        expert_idx: (T, K), int32 or int64, in [0, E); used with ``bias`` only.
        drop_pad_mode: See the table.

    Returns:
        (T, H), the dtype of ``expanded_x``. Summed in float32 (float64 where rows or scales are
        float64): x1, x2, then the choices in the order of k; rounded once.

    Raises:
        IndexError: A row or an expert id is out of range; names its value and position.
        ValueError: Ranks, sizes or modes do not fit, or an argument that another needs is missing.
        TypeError: A dtype is not supported, or differs from that of ``expanded_x``.

    Gradients:
        ``expanded_x``, ``x1``, ``x2``, ``bias`` and ``scales``, to any order. Rows that no slot
        names and scales of dropped slots get exactly zero.

    Note:
        Deterministic. On an NPU: aclnnMoeFinalizeRoutingV2.
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> rows = torch.tensor([[1.], [3.], [2.], [3.], [1.], [2.]])
        >>> scales = torch.tensor([[.5, .25], [1., 2.], [.125, 4.]])
        >>> torch_moe_ops.finalize_routing_v2(
        ...     rows, torch.tensor([4, 0, 2, 5, 1, 3]), scales=scales, drop_pad_mode=2).tolist()
        [[0.75], [6.0], [12.375]]
    """
    return torch.ops.moe.finalize_routing_v2(
        expanded_x,
        expanded_row_idx,
        x1,
        x2,
        bias,
        scales,
        expert_idx,
        drop_pad_mode=drop_pad_mode,
    )


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
    r"""Gradients of :func:`finalize_routing_v2` for the rows and the scales, in one pass.

    The row map is token-major; mode 0 belongs to the forward's mode 2, mode 1 to its mode 3. With
    ``i = t * K + k`` and ``r = expanded_row_idx[i]``: ``grad_expanded_x[r] = scales[t, k] *
    grad_y[t]`` and ``grad_scales[t, k] = <expanded_x[r] + bias[expert_idx[t, k]], grad_y[t]>``.

    Args:
        grad_y: (T, H), floating.
        expanded_row_idx: (T·K,), int32 or int64, in [0, T·K) in mode 0, [-1, E·C) in mode 1; no
            row twice.
        expanded_x: The rows of the forward, the shape of ``grad_expanded_x``; needed with
            ``scales``.
        scales: (T, K), any floating dtype, or None (K = 1).
        expert_idx: (T, K), int32 or int64; needed with ``bias``.
        bias: (E, H), the dtype of ``grad_y``; matters only with ``scales``.
        drop_pad_mode: 0 dropless, 1 drop/pad.
        active_num: Mode 0: M = min(active_num, T·K) rows; 0 for all.
        expert_num: Mode 1: E.
        expert_capacity: Mode 1: C.

    Returns:
        ``grad_expanded_x`` (M, H) or (E, C, H), the dtype of ``grad_y``, zero in rows that no slot
        names; and ``grad_scales`` (T, K), the dtype of ``scales``, zero for dropped and cut-off
        slots. Without ``scales`` the latter is empty, of shape (0,).

    Raises:
        IndexError: A row or expert id is out of range, or a row is named by two slots.
        ValueError: Ranks, sizes or modes do not fit, or an argument that another needs is missing.
        TypeError: A dtype is not supported, or differs from that of ``grad_y``.

    Gradients:
        ``grad_y``, ``expanded_x``, ``scales`` and ``bias``, to any order.

    Note:
        Deterministic. On an NPU: aclnnMoeFinalizeRoutingV2Grad.
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> grad_rows, grad_scales = torch_moe_ops.finalize_routing_v2_grad(
        ...     torch.tensor([[1., 10.]]), torch.tensor([1, -1]),
        ...     torch.tensor([[[0., 0.], [5., 7.]]]), torch.tensor([[.5, 2.]]),
        ...     drop_pad_mode=1, expert_num=1, expert_capacity=2)
        >>> grad_rows.tolist(), grad_scales.tolist()
        ([[[0.0, 0.0], [0.5, 5.0]]], [[75.0, 0.0]])
    """
    return torch.ops.moe.finalize_routing_v2_grad(
        grad_y,
        expanded_row_idx,
        expanded_x,
        scales,
        expert_idx,
        bias,
        drop_pad_mode=drop_pad_mode,
        active_num=active_num,
        expert_num=expert_num,
        expert_capacity=expert_capacity,
    )


def _grad_modes(expanded_shape: Sequence[int], drop_pad: bool) -> dict[str, Any]:
    """The keyword arguments of the grad operator that describe the expanded rows."""
    if drop_pad:
        experts, capacity, _ = expanded_shape
        return {"drop_pad_mode": 1, "expert_num": experts, "expert_capacity": capacity}
    return {"drop_pad_mode": 0, "active_num": expanded_shape[0]}


def _bias_grad(
    grad_y: Tensor,
    weights: Tensor | None,
    row_of_slot: Tensor,
    num_rows: int,
    expert_idx: Tensor,
    bias: Tensor,
) -> Tensor:
    """The gradient of the bias, which CANN's grad operator does not make.

    ``bias_grad[e]`` is the sum of ``weights[t, k] * grad_y[t]`` over the slots of expert e that
    have a row: a grouped product of the slots sorted by expert. Slots without a row form a group of
    their own that is thrown away, so that not even a NaN in them reaches an expert.
    """
    num_experts = bias.shape[0]
    ops = torch.ops.moe
    if weights is None:
        weights = torch.ones(expert_idx.shape, dtype=torch.float32, device=grad_y.device)
    sums = sums_dtype(grad_y, weights)
    has_row = ((row_of_slot >= 0) & (row_of_slot < num_rows)).view(expert_idx.shape)
    groups_TK = torch.where(has_row, expert_idx.long(), num_experts)
    groups_n = groups_TK.flatten()
    sorted_weights_n1, _ = ops.token_permute(weights.reshape(-1, 1).to(sums), groups_n)
    sorted_grad_nH, _ = ops.token_permute(grad_y.to(sums), groups_TK)
    sizes = groups_n.new_zeros(num_experts + 1)
    sizes = sizes.scatter_add(0, groups_n, torch.ones_like(groups_n))
    sums_E1H = ops.grouped_matmul_weight_grad(sorted_weights_n1, sorted_grad_nH, sizes)
    return sums_E1H[:num_experts].squeeze(1).to(bias.dtype)


def _num_rows(expanded_shape: Sequence[int]) -> int:
    return math.prod(expanded_shape[:-1])


def _setup_finalize(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    expanded_x, row_of_slot, _, _, bias, scales, expert_idx = inputs
    mode = keyword_only_inputs["drop_pad_mode"]
    ctx.drop_pad = mode in (1, 3)
    ctx.k_major = mode in (0, 1)
    ctx.expanded_shape = expanded_x.shape
    # The rows matter for the gradient of the scales alone.
    rows = None if scales is None else expanded_x
    ctx.save_for_backward(rows, row_of_slot, bias, scales, None if bias is None else expert_idx)


def _finalize_backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
    rows, row_of_slot, bias, scales, expert_idx = ctx.saved_tensors
    needs_rows, _, needs_x1, needs_x2, needs_bias, needs_scales, _ = needs_grad(ctx, 7)
    if ctx.k_major and scales is not None:
        row_of_slot = row_of_slot.view(scales.shape[1], scales.shape[0]).t().reshape(-1)
    rows_grad = scales_grad = bias_grad = None
    if needs_rows or needs_scales:
        rows_grad, scales_grad = torch.ops.moe.finalize_routing_v2_grad(
            grad_y,
            row_of_slot,
            rows,
            scales,
            expert_idx,
            bias,
            **_grad_modes(ctx.expanded_shape, ctx.drop_pad),
        )
    if needs_bias:
        num_rows = _num_rows(ctx.expanded_shape)
        bias_grad = _bias_grad(grad_y, scales, row_of_slot, num_rows, expert_idx, bias)
    return (
        rows_grad if needs_rows else None,
        None,
        grad_y if needs_x1 else None,
        grad_y if needs_x2 else None,
        bias_grad,
        scales_grad if needs_scales else None,
        None,
    )


def _setup_finalize_grad(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, Tensor],
) -> None:
    ctx.save_for_backward(*inputs)
    ctx.modes = keyword_only_inputs


def _finalize_grad_backward(
    ctx: Any, rows_cotangent: Tensor, scales_cotangent: Tensor
) -> tuple[Any, ...]:
    # rows_grad = s g is linear in s and g; scales_grad = <row + bias, g> in row, bias and g.
    grad_y, row_of_slot, rows, scales, expert_idx, bias = ctx.saved_tensors
    ops = torch.ops.moe
    forward_mode = {"drop_pad_mode": ctx.modes["drop_pad_mode"] + 2}
    if scales is None:
        adjoint = ops.finalize_routing_v2(rows_cotangent, row_of_slot, **forward_mode)
        return adjoint, None, None, None, None, None
    needs_grad_y, _, needs_rows, needs_scales, _, needs_bias = needs_grad(ctx, 6)
    grad_y_adjoint = rows_adjoint = scales_adjoint = bias_adjoint = None
    if needs_grad_y:
        # One sum, rounded once: both parts in the dtype of the sums.
        sums = sums_dtype(rows, scales)
        through_rows = ops.finalize_routing_v2(
            rows_cotangent.to(sums), row_of_slot, scales=scales, **forward_mode
        )
        through_scales = ops.finalize_routing_v2(
            rows.to(sums),
            row_of_slot,
            bias=None if bias is None else bias.to(sums),
            scales=scales_cotangent,
            expert_idx=expert_idx,
            **forward_mode,
        )
        grad_y_adjoint = (through_rows + through_scales).to(grad_y.dtype)
    if needs_rows:
        rows_adjoint, _ = ops.finalize_routing_v2_grad(
            grad_y, row_of_slot, rows, scales_cotangent, **ctx.modes
        )
    if needs_scales:
        _, scales_adjoint = ops.finalize_routing_v2_grad(
            grad_y, row_of_slot, rows_cotangent, scales, **ctx.modes
        )
    if needs_bias:
        num_rows = _num_rows(rows.shape)
        bias_adjoint = _bias_grad(grad_y, scales_cotangent, row_of_slot, num_rows, expert_idx, bias)
    return grad_y_adjoint, None, rows_adjoint, scales_adjoint, None, bias_adjoint


register_autograd("finalize_routing_v2", _finalize_backward, _setup_finalize)
register_autograd("finalize_routing_v2_grad", _finalize_grad_backward, _setup_finalize_grad)

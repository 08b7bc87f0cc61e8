"""Expands tokens to the rows of their experts: ``init_routing_v2`` and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.ops._registration import register_autograd


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
    r"""Copies each token to a row of each of its experts.

    Mode 0 (dropless) sorts the n = T·K slots by expert (stable), as :func:`token_permute` does.
    Mode 1 (drop/pad) gives each expert ``expert_capacity`` rows: its first slots in slot order
    (slot ``i = t * K + k``) take them, later ones are dropped, and rows without a slot are zero.

    Args:
        x: (T, H), floating.
        expert_idx: (T, K) or (T,), int32 or int64, at least 0, and below ``expert_num`` where that
            is given.
        active_num: Mode 0: keep the first ``min(active_num, n)`` rows; 0 keeps all.
        expert_capacity: Mode 1: C, rows of each expert, in [1, T].
        expert_num: E; required in mode 1 and for counts.
        drop_pad_mode: 0 dropless, 1 drop/pad.
        expert_tokens_count_or_cumsum_flag: Mode 0: 1 asks for running totals of the slots of each
            expert, 2 for counts.
        expert_tokens_before_capacity_flag: Mode 1: ask for the counts before dropping.

    Returns:
        ``expanded_x`` (M, H) in mode 0, (E, C, H) in mode 1; ``expanded_row_idx`` (T·K,) int32, the
        row of each slot (in mode 1 ``e * C + place``, -1 if dropped; never truncated);
        ``expert_tokens_count_or_cumsum`` (E,) int32 and ``expert_tokens_before_capacity`` (E,)
        int32. The last two are empty, of shape (0,), where not asked for.

    Raises:
        IndexError: An expert id is out of range; names its value and position.
        ValueError: Ranks, sizes or modes do not fit; a capacity larger than T.
        TypeError: A dtype is not supported.

    Gradients:
        ``x``, to any order. Dropped and cut-off slots have zero gradients.

    Note:
        Deterministic. On an NPU: aclnnMoeInitRoutingV2.
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> x = torch.tensor([[1.], [2.], [3.], [4.]])
        >>> experts = torch.tensor([[0, 1], [0, 2], [0, 1], [2, 0]])
        >>> rows, row_of_slot, _, before = torch_moe_ops.init_routing_v2(
        ...     x, experts, expert_num=4, expert_capacity=2, drop_pad_mode=1,
        ...     expert_tokens_before_capacity_flag=True)
        >>> rows.squeeze(-1).tolist()
        [[1.0, 2.0], [1.0, 3.0], [2.0, 4.0], [0.0, 0.0]]
        >>> row_of_slot.tolist(), before.tolist()
        ([0, 2, 1, 4, -1, 3, 5, -1], [4, 2, 2, 0])
    """
    return torch.ops.moe.init_routing_v2(
        x,
        expert_idx,
        active_num=active_num,
        expert_capacity=expert_capacity,
        expert_num=expert_num,
        drop_pad_mode=drop_pad_mode,
        expert_tokens_count_or_cumsum_flag=expert_tokens_count_or_cumsum_flag,
        expert_tokens_before_capacity_flag=expert_tokens_before_capacity_flag,
    )


def init_routing_v2_grad(
    grad_expanded_x: Tensor,
    expanded_row_idx: Tensor,
    top_k: int,
    drop_pad_mode: int = 0,
    active_num: int = 0,
) -> Tensor:
    r"""Sums the gradients of each token's rows: the gradient of :func:`init_routing_v2`.

    Args:
        grad_expanded_x: (M, H) in mode 0, with M = min(active_num, n) or n; (E, C, H) in mode 1.
        expanded_row_idx: (T·K,), int32 or int64: in [0, n) in mode 0, where rows from M on
            contribute nothing; in [-1, E·C) in mode 1, where -1 does.
        top_k: K, at least 1; a divisor of the number of slots.
        drop_pad_mode: 0 dropless, 1 drop/pad.
        active_num: As in the forward; 0 for all rows. Not used in mode 1.

    Returns:
        (T, H), the dtype of ``grad_expanded_x``. Summed in float32 (float64 for float64), in the
        order of k, and rounded once.

    Raises:
        IndexError: A row is out of range; names its value and position.
        ValueError: Ranks, sizes or modes do not fit.
        TypeError: A dtype is not supported.

    Gradients:
        ``grad_expanded_x``, to any order.

    Note:
        Deterministic. On an NPU: aclnnMoeInitRoutingV2Grad.
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> rows_grad = torch.tensor([[[1.], [2.]], [[4.], [8.]]])
        >>> row_of_slot = torch.tensor([0, 2, 1, -1])
        >>> torch_moe_ops.init_routing_v2_grad(rows_grad, row_of_slot, 2, 1).tolist()
        [[5.0], [2.0]]
    """
    return torch.ops.moe.init_routing_v2_grad(
        grad_expanded_x, expanded_row_idx, top_k, drop_pad_mode, active_num
    )


def _setup_init(
    ctx: Any,
    inputs: tuple[Any, ...],
    keyword_only_inputs: dict[str, Any],
    output: tuple[Tensor, ...],
) -> None:
    _, expert_idx = inputs
    ctx.save_for_backward(output[1])
    ctx.top_k = expert_idx.shape[1] if expert_idx.dim() == 2 else 1
    ctx.drop_pad_mode = keyword_only_inputs["drop_pad_mode"]
    ctx.active_num = keyword_only_inputs["active_num"]


def _init_backward(ctx: Any, rows_grad: Tensor, *_: Tensor | None) -> tuple[Any, ...]:
    (row_of_slot,) = ctx.saved_tensors
    x_grad = torch.ops.moe.init_routing_v2_grad(
        rows_grad, row_of_slot, ctx.top_k, ctx.drop_pad_mode, ctx.active_num
    )
    return x_grad, None


def _setup_init_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows_grad, row_of_slot, top_k, drop_pad_mode, active_num = inputs
    ctx.save_for_backward(rows_grad, row_of_slot)
    ctx.top_k, ctx.drop_pad_mode, ctx.active_num = top_k, drop_pad_mode, active_num


def _init_grad_backward(ctx: Any, x_cotangent: Tensor) -> tuple[Any, ...]:
    # The adjoint of a sum of rows copies the cotangent to each of them: finalize's gradient with
    # all scales one.
    rows_grad, row_of_slot = ctx.saved_tensors
    ones = x_cotangent.new_ones((x_cotangent.shape[0], ctx.top_k))
    drop_pad = ctx.drop_pad_mode == 1
    rows_cotangent, _ = torch.ops.moe.finalize_routing_v2_grad(
        x_cotangent,
        row_of_slot,
        rows_grad,
        ones,
        drop_pad_mode=ctx.drop_pad_mode,
        active_num=ctx.active_num,
        expert_num=rows_grad.shape[0] if drop_pad else 0,
        expert_capacity=rows_grad.shape[1] if drop_pad else 0,
    )
    return rows_cotangent, None, None, None, None


register_autograd("init_routing_v2", _init_backward, _setup_init)
register_autograd("init_routing_v2_grad", _init_grad_backward, _setup_init_grad)

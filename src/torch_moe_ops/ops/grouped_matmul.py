"""One matrix product for each expert: ``grouped_matmul`` and its weight gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.ops._registration import (
    needs_grad,
    register_autograd,
    register_matmul_autocast,
)


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor | Sequence[int],
    *,
    trans_weight: bool = False,
    group_list_type: int = 1,
) -> Tensor:
    r"""Multiplies consecutive groups of rows by the weight of their expert.

    ``y[rows of e] = x[rows of e] @ weight[e]``, where the rows of expert 0 come first.

    Args:
        x: (M, K), floating: rows sorted by expert. (K and N are the sizes of a matrix product
            here.)
        weight: (E, K, N), or (E, N, K) with ``trans_weight``; the dtype of ``x``. Transposed views
            are used as they are.
        group_list: (E,) int32 or int64, or a list of ints: the sizes of the groups.
        trans_weight: ``weight[e]`` is stored transposed.
        group_list_type: 1: counts. 0: running totals (the end of each group).

    Returns:
        (M, N), the dtype of ``x``, each element rounded once. Sums are float32 (float64 for
            float64).

    Raises:
        ValueError: Ranks or sizes do not fit; a count is negative, totals fall, or the groups do
            not use up the rows of ``x`` exactly.
        TypeError: A dtype is not supported, or ``weight`` has another than ``x``.

    Gradients:
        ``x`` and ``weight``, to any order. The weight gradient of an expert without rows is
        exactly zero.

    Note:
        Deterministic: the same bits for any number of threads. Under autocast, cast as
        torch.matmul does. On an NPU: aclnnGroupedMatmulV5 (or V4).
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> x = torch.tensor([[1., 2.], [3., 4.], [5., 6.]])
        >>> weight = torch.stack([torch.eye(2), 10 * torch.eye(2), 100 * torch.eye(2)])
        >>> torch_moe_ops.grouped_matmul(x, weight, [1, 0, 2]).tolist()
        [[1.0, 2.0], [300.0, 400.0], [500.0, 600.0]]
    """
    return torch.ops.moe.grouped_matmul(
        x,
        weight,
        _as_tensor("grouped_matmul", group_list, x),
        trans_weight=trans_weight,
        group_list_type=group_list_type,
    )


def grouped_matmul_weight_grad(
    x: Tensor,
    grad_y: Tensor,
    group_list: Tensor | Sequence[int],
    *,
    trans_weight: bool = False,
    group_list_type: int = 1,
) -> Tensor:
    r"""Gradient of :func:`grouped_matmul` for its weight.

    ``weight_grad[e] = x[rows of e].T @ grad_y[rows of e]``, transposed with ``trans_weight``.

    Args:
        x: (M, K), floating.
        grad_y: (M, N), the dtype of ``x``.
        group_list: (E,) int32 or int64, or a list of ints, as in :func:`grouped_matmul`.
        trans_weight: Return the layout (E, N, K).
        group_list_type: 1: counts. 0: running totals.

    Returns:
        (E, K, N), or (E, N, K) with ``trans_weight``, contiguous, the dtype of ``x``. Exactly zero
        for an expert without rows.

    Raises:
        ValueError: Ranks or sizes do not fit, or the groups do not use up the rows.
        TypeError: A dtype is not supported, or ``grad_y`` has another than ``x``.

    Gradients:
        ``x`` and ``grad_y``, to any order.

    Note:
        Deterministic. On an NPU: aclnnGroupedMatmulV5 with groupType 2 (or V4).
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> x, grad_y = torch.tensor([[1.], [2.], [3.]]), torch.tensor([[1.], [10.], [100.]])
        >>> torch_moe_ops.grouped_matmul_weight_grad(x, grad_y, [2, 0, 1]).flatten().tolist()
        [21.0, 0.0, 300.0]
    """
    return torch.ops.moe.grouped_matmul_weight_grad(
        x,
        grad_y,
        _as_tensor("grouped_matmul_weight_grad", group_list, x),
        trans_weight=trans_weight,
        group_list_type=group_list_type,
    )


def _as_tensor(op: str, group_list: Tensor | Sequence[int], x: Tensor) -> Tensor:
    if isinstance(group_list, Tensor) or not isinstance(x, Tensor):  # what x must be, C++ says
        return group_list
    try:
        # Without a dtype, so that a list of floats is refused and not truncated.
        sizes = torch.tensor(group_list, device=x.device)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"moe::{op}: group_list must be a tensor or a sequence of ints, got {group_list!r}"
        ) from None
    return sizes if sizes.numel() else sizes.long()


def _setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    # Both operators take two matrices and a group list, and so need the same for their gradients.
    ctx.save_for_backward(*inputs)
    ctx.trans_weight = keyword_only_inputs["trans_weight"]
    ctx.group_list_type = keyword_only_inputs["group_list_type"]


def _product(
    ctx: Any, rows: Tensor, weight: Tensor, group_list: Tensor, *, transposed: bool
) -> Tensor:
    """Rows times weight in each group, the weight transposed with respect to the forward or not."""
    return torch.ops.moe.grouped_matmul(
        rows,
        weight,
        group_list,
        trans_weight=ctx.trans_weight != transposed,
        group_list_type=ctx.group_list_type,
    )


def _matmul_backward(ctx: Any, y_grad: Tensor) -> tuple[Any, ...]:
    x, weight, group_list = ctx.saved_tensors
    needs_x, needs_weight, _ = needs_grad(ctx, 3)
    x_grad = weight_grad = None
    if needs_x:
        x_grad = _product(ctx, y_grad, weight, group_list, transposed=True)
    if needs_weight:
        weight_grad = torch.ops.moe.grouped_matmul_weight_grad(
            x,
            y_grad,
            group_list,
            trans_weight=ctx.trans_weight,
            group_list_type=ctx.group_list_type,
        )
    return x_grad, weight_grad, None


def _weight_grad_backward(ctx: Any, weight_cotangent: Tensor) -> tuple[Any, ...]:
    # x^T g is bilinear. Its adjoints g u^T and x u are products like the forward's.
    x, y_grad, group_list = ctx.saved_tensors
    needs_x, needs_y_grad, _ = needs_grad(ctx, 3)
    x_adjoint = y_grad_adjoint = None
    if needs_x:
        x_adjoint = _product(ctx, y_grad, weight_cotangent, group_list, transposed=True)
    if needs_y_grad:
        y_grad_adjoint = _product(ctx, x, weight_cotangent, group_list, transposed=False)
    return x_adjoint, y_grad_adjoint, None


register_autograd("grouped_matmul", _matmul_backward, _setup)
register_autograd("grouped_matmul_weight_grad", _weight_grad_backward, _setup)
register_matmul_autocast("grouped_matmul", num_tensors=2)

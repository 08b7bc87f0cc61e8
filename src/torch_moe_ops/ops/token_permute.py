"""Copies each token to the rows of its experts: ``token_permute`` and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.ops._registration import register_autograd


def token_permute(
    tokens: Tensor,
    indices: Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Sorts the T·K (token, choice) slots by expert and copies each token to its rows.

    With slots numbered ``i = t * K + k`` and a stable sort of ``indices``,
    ``permuted_tokens[sorted_indices[i]] = tokens[i // K]``: the rows of one expert are
    consecutive, and within an expert they keep the order of the tokens.

    Args:
        tokens: (T, H) or (T, ...), floating.
        indices: (T, K) or (T,) expert ids, int32 or int64. Any integer is an id.
        num_out_tokens: How many rows to keep: None or 0 all of the T·K; a positive number at most
            that many; a negative one all but that many. Later rows are cut off.
        padded_mode: Only False is supported, as in CANN.

    Returns:
        ``permuted_tokens`` (M, H), the dtype of ``tokens``, and ``sorted_indices`` (T·K,), int32:
        the row of each slot. It is never truncated, so that rows cut off can be recognized
        (``>= M``).

    Raises:
        ValueError: Ranks or sizes do not fit.
        TypeError: A dtype is not supported.
        NotImplementedError: ``padded_mode=True``.

    Gradients:
        ``tokens``, to any order. A slot whose row was cut off has a zero gradient.

    Note:
        Deterministic: a copy, bit for bit. On an NPU: aclnnMoeTokenPermute.
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> tokens = torch.tensor([[1., 10.], [2., 20.], [3., 30.]])
        >>> experts = torch.tensor([[2, 0], [1, 2], [0, 1]])
        >>> rows, row_of_slot = torch_moe_ops.token_permute(tokens, experts)
        >>> rows[:, 0].tolist()
        [1.0, 3.0, 2.0, 3.0, 1.0, 2.0]
        >>> row_of_slot.tolist()
        [4, 0, 2, 5, 1, 3]
    """
    return torch.ops.moe.token_permute(tokens, indices, num_out_tokens, padded_mode)


def token_permute_grad(
    permuted_output_grad: Tensor,
    sorted_indices: Tensor,
    num_topk: int,
    padded_mode: bool = False,
) -> Tensor:
    r"""Sums the gradients of each token's rows: the gradient of :func:`token_permute`.

    ``tokens_grad[t] = sum_k permuted_output_grad[sorted_indices[t * K + k]]``, over the rows that
    are there.

    Args:
        permuted_output_grad: (M, H) or (M, ...), floating.
        sorted_indices: (T·K,) row of each slot, int32 or int64, each in [-1, max(M, T·K)). -1 and
            rows past the end contribute nothing.
        num_topk: K, at least 1; a divisor of the number of slots.
        padded_mode: Only False is supported.

    Returns:
        (T, H), the dtype of ``permuted_output_grad``. Summed in float32 (float64 for float64), in
        the order of k, and rounded once.

    Raises:
        IndexError: A row is out of range; names its value and position.
        ValueError: Ranks or sizes do not fit.
        TypeError: A dtype is not supported.
        NotImplementedError: ``padded_mode=True``.

    Gradients:
        ``permuted_output_grad``, to any order.

    Note:
        Deterministic. On an NPU: aclnnMoeTokenPermuteGrad.
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> rows_grad = torch.tensor([[1.], [2.], [4.], [8.]])
        >>> torch_moe_ops.token_permute_grad(rows_grad, torch.tensor([2, 0, 3, 1]), 2).tolist()
        [[5.0], [10.0]]
    """
    return torch.ops.moe.token_permute_grad(
        permuted_output_grad, sorted_indices, num_topk, padded_mode
    )


def _setup_permute(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, indices, _, _ = inputs
    _, sorted_indices = output
    ctx.save_for_backward(sorted_indices)
    ctx.num_topk = indices.shape[1] if indices.dim() == 2 else 1


def _permute_backward(ctx: Any, rows_grad: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    (sorted_indices,) = ctx.saved_tensors
    tokens_grad = torch.ops.moe.token_permute_grad(rows_grad, sorted_indices, ctx.num_topk)
    return tokens_grad, None, None, None


def _setup_permute_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows_grad, sorted_indices, num_topk, _ = inputs
    ctx.save_for_backward(rows_grad, sorted_indices)
    ctx.num_topk = num_topk


def _permute_grad_backward(ctx: Any, tokens_cotangent: Tensor) -> tuple[Any, ...]:
    # The adjoint of a sum of rows copies the cotangent to each of them: unpermute's gradient with
    # all weights one.
    rows_grad, sorted_indices = ctx.saved_tensors
    ones = tokens_cotangent.new_ones((tokens_cotangent.shape[0], ctx.num_topk))
    rows_cotangent, _ = torch.ops.moe.token_unpermute_grad(
        rows_grad, tokens_cotangent, sorted_indices, ones
    )
    return rows_cotangent, None, None, None


register_autograd("token_permute", _permute_backward, _setup_permute)
register_autograd("token_permute_grad", _permute_grad_backward, _setup_permute_grad)

"""Brings the rows of the experts back to the tokens: ``token_unpermute`` and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.ops._registration import needs_grad, register_autograd, sums_dtype


def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> Tensor:
    r"""Weighted sum of each token's rows: the way back from :func:`token_permute`.

    ``output[t] = sum_k probs[t, k] * permuted_tokens[sorted_indices[t * K + k]]``. Left out are
    slots without a row (-1), slots whose row is not there (cut off by ``num_out_tokens``), and
    slots whose prob is exactly 0: not even NaN or inf of such a row reaches the output.

    Args:
        permuted_tokens: (M, H) or (M, ...), floating.
        sorted_indices: (T·K,) row of each slot, int32 or int64, each in [-1, max(M, T·K)).
        probs: (T, K), any floating dtype; it is not rounded to the dtype of the rows. None: K is 1
            and every weight is 1.
        padded_mode: Only False is supported, as in CANN.
        restore_shape: Part of CANN's signature; without ``padded_mode`` it has no meaning.

    Returns:
        (T, H), the dtype of ``permuted_tokens``. Summed in float32 (float64 where rows or probs
        are float64), in the order of k, and rounded once.

    Raises:
        IndexError: A row is out of range; names its value and position.
        ValueError: Ranks or sizes do not fit.
        TypeError: A dtype is not supported.
        NotImplementedError: ``padded_mode=True``.

    Gradients:
        ``permuted_tokens`` and ``probs``, to any order. Rows that no slot names get zero.

    Note:
        Deterministic. On an NPU: aclnnMoeTokenUnpermute.
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> rows = torch.tensor([[1., 2.], [3., 4.], [5., 6.], [7., 8.]])
        >>> probs = torch.tensor([[.5, 2.], [1., -1.]])
        >>> torch_moe_ops.token_unpermute(rows, torch.tensor([2, 0, 3, 1]), probs).tolist()
        [[4.5, 7.0], [4.0, 4.0]]
    """
    return torch.ops.moe.token_unpermute(
        permuted_tokens, sorted_indices, probs, padded_mode, restore_shape
    )


def token_unpermute_grad(
    permuted_tokens: Tensor,
    unpermuted_tokens_grad: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Gradients of :func:`token_unpermute` for the rows and the probs, in one pass.

    With ``i = t * K + k`` and ``r = sorted_indices[i]``:
    ``permuted_tokens_grad[r] = probs[t, k] * unpermuted_tokens_grad[t]`` and
    ``probs_grad[t, k] = <permuted_tokens[r], unpermuted_tokens_grad[t]>``. Rows that no slot names
    and probs of slots without a row get exactly zero.

    Args:
        permuted_tokens: (M, H) or (M, ...), floating: the rows of the forward.
        unpermuted_tokens_grad: (T, H), the dtype of the rows.
        sorted_indices: (T·K,), int32 or int64, each in [-1, max(M, T·K)); no row twice.
        probs: (T, K), any floating dtype, or None (K = 1).
        padded_mode: Only False is supported.
        restore_shape: As in :func:`token_unpermute`.

    Returns:
        ``permuted_tokens_grad`` (M, H) in the dtype of the rows, and ``probs_grad`` (T, K) in the
        dtype of ``probs``; without ``probs`` the latter is empty, of shape (0,).

    Raises:
        IndexError: A row is out of range, or named by two slots; names both.
        ValueError: Ranks or sizes do not fit.
        TypeError: A dtype is not supported.
        NotImplementedError: ``padded_mode=True``.

    Gradients:
        ``permuted_tokens``, ``unpermuted_tokens_grad`` and ``probs``, to any order.

    Note:
        Deterministic. On an NPU: aclnnMoeTokenUnpermuteGrad.
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> rows = torch.tensor([[1., 2.], [3., 4.], [5., 6.], [7., 8.]])
        >>> upstream = torch.tensor([[1., 10.], [100., 1000.]])
        >>> rows_grad, probs_grad = torch_moe_ops.token_unpermute_grad(
        ...     rows, upstream, torch.tensor([2, 0, 3, 1]), torch.tensor([[.5, 2.], [1., -1.]]))
        >>> probs_grad.tolist()
        [[65.0, 21.0], [8700.0, 4300.0]]
    """
    return torch.ops.moe.token_unpermute_grad(
        permuted_tokens, unpermuted_tokens_grad, sorted_indices, probs, padded_mode, restore_shape
    )


def _setup_unpermute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, sorted_indices, probs, *_ = inputs
    # The rows matter for the gradient of the probs alone.
    ctx.save_for_backward(None if probs is None else rows, sorted_indices, probs)
    ctx.rows_shape = rows.shape


def _unpermute_backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
    rows, sorted_indices, probs = ctx.saved_tensors
    if rows is None:
        rows = output_grad.new_zeros(1).expand(ctx.rows_shape)  # read for its shape only
    rows_grad, probs_grad = torch.ops.moe.token_unpermute_grad(
        rows, output_grad, sorted_indices, probs
    )
    needs_rows, _, needs_probs, *_ = needs_grad(ctx, 5)
    return (
        rows_grad if needs_rows else None,
        None,
        probs_grad if needs_probs else None,
        None,
        None,
    )


def _setup_unpermute_grad(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, output_grad, sorted_indices, probs, *_ = inputs
    ctx.save_for_backward(rows, output_grad, sorted_indices, probs)


def _unpermute_grad_backward(
    ctx: Any, rows_cotangent: Tensor, probs_cotangent: Tensor
) -> tuple[Any, ...]:
    # rows_grad = p g is linear in p and g; probs_grad = <row, g> is linear in row and g.
    rows, output_grad, sorted_indices, probs = ctx.saved_tensors
    ops = torch.ops.moe
    if probs is None:
        grad = ops.token_unpermute(rows_cotangent, sorted_indices)
        return None, grad, None, None, None, None
    needs_rows, needs_output_grad, _, needs_probs, *_ = needs_grad(ctx, 6)
    rows_adjoint = grad_adjoint = probs_adjoint = None
    if needs_rows:
        rows_adjoint, _ = ops.token_unpermute_grad(
            rows, output_grad, sorted_indices, probs_cotangent
        )
    if needs_output_grad:
        # One sum, rounded once: both parts in the dtype of the sums.
        sums = sums_dtype(rows, probs)
        through_rows = ops.token_unpermute(rows_cotangent.to(sums), sorted_indices, probs)
        through_probs = ops.token_unpermute(rows.to(sums), sorted_indices, probs_cotangent)
        grad_adjoint = (through_rows + through_probs).to(output_grad.dtype)
    if needs_probs:
        _, probs_adjoint = ops.token_unpermute_grad(
            rows_cotangent, output_grad, sorted_indices, probs
        )
    return rows_adjoint, grad_adjoint, None, probs_adjoint, None, None


register_autograd("token_unpermute", _unpermute_backward, _setup_unpermute)
register_autograd("token_unpermute_grad", _unpermute_grad_backward, _setup_unpermute_grad)

"""token_unpermute: bring the rows of a token back together, weighted by the router's probs.

With slot ``i = t * K + k``, row ``r = sorted_indices[i]``, and K = 1 where there are no probs::

    out[t] = sum over k of probs[t, k] * permuted_tokens[r]

A slot contributes nothing if its row is -1 or past the end, or if its prob is exactly 0 (so that a
row of NaN or infinity with weight 0 does not leak). Gradients, for ``g = unpermuted_tokens_grad``::

    permuted_tokens_grad[r] = probs[t, k] * g[t]        zero for a row that no slot names
    probs_grad[t, k] = <permuted_tokens[r], g[t]>       zero if the row is -1 or past the end
"""

import torch
from torch import Tensor

from ._slots import (
    accumulation_dtype,
    keep_present,
    per_slot,
    rows_from_slots,
    slots_from_rows,
    sum_over_choices,
)


def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """The weighted sum of the rows of each token, rounded once. See the module docstring."""
    acc = accumulation_dtype(permuted_tokens, probs)
    slots = slots_from_rows(permuted_tokens.to(acc), sorted_indices)
    top_k = 1
    if probs is not None:
        top_k = probs.shape[1]
        # Both factors of a slot that is not there become 0, so that autograd never meets 0 * NaN.
        weight = per_slot(probs.to(acc), slots)
        weight = keep_present(weight, sorted_indices, permuted_tokens.shape[0])
        # Only 0 * NaN and 0 * infinity have to be kept out. A finite row stays in the product, so
        # that autograd still finds the gradient of a prob that happens to be 0. (For a row that is
        # not finite autograd finds 0; the definition is token_unpermute_grad's <row, g>.)
        leaks = (weight == 0) & ~slots.isfinite()
        slots = torch.where(leaks, torch.zeros_like(slots), slots) * weight
    return sum_over_choices(slots, top_k).to(permuted_tokens.dtype)


def token_unpermute_grad(
    permuted_tokens: Tensor,
    unpermuted_tokens_grad: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``permuted_tokens`` and ``probs``; the second is (0,) without probs."""
    num_rows = permuted_tokens.shape[0]
    acc = accumulation_dtype(permuted_tokens, probs)
    top_k = 1 if probs is None else probs.shape[1]
    slots_grad = unpermuted_tokens_grad.to(acc).repeat_interleave(top_k, 0)

    if probs is None:
        rows_grad = rows_from_slots(slots_grad, sorted_indices, num_rows)
        return rows_grad.to(permuted_tokens.dtype), permuted_tokens.new_zeros(0)

    weighted = slots_grad * per_slot(probs.to(acc), slots_grad)
    rows_grad = rows_from_slots(weighted, sorted_indices, num_rows)
    products = slots_from_rows(permuted_tokens.to(acc), sorted_indices) * slots_grad
    products = keep_present(products, sorted_indices, num_rows)
    probs_grad = products.flatten(1).sum(1).reshape(probs.shape)
    return rows_grad.to(permuted_tokens.dtype), probs_grad.to(probs.dtype)

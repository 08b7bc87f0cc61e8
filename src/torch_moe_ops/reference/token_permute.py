"""token_permute: copy every token to its K experts, rows sorted by expert id.

With ``ids`` the n flattened expert ids and slot ``i = t * K + k``::

    order          = stable ascending argsort of ids    (slot of each row)
    sorted_indices = inverse permutation of order       (row of each slot, always n long)
    permuted_tokens[r] = tokens[order[r] // K]          for the first M rows

    M = n              num_out_tokens None or 0
        min(v, n)      num_out_tokens v > 0
        max(n + v, 0)  num_out_tokens v < 0

The gradient adds up, for every token, the rows of its slots; a row past the end adds nothing::

    tokens_grad[t] = sum over k of permuted_output_grad[sorted_indices[t * K + k]]
"""

import torch
from torch import Tensor

from ._slots import accumulation_dtype, slots_from_rows, sum_over_choices


def token_permute(
    tokens: Tensor,
    indices: Tensor,
    num_out_tokens: int | None = None,
    padded_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rows sorted by expert, and the row of each slot. See the module docstring."""
    slots = indices.numel()
    top_k = indices.shape[1] if indices.dim() == 2 else 1
    limit = num_out_tokens or 0
    num_rows = min(limit, slots) if limit > 0 else max(slots + limit, 0)

    order = torch.argsort(indices.reshape(-1), stable=True)
    sorted_indices = torch.empty_like(order)
    sorted_indices[order] = torch.arange(slots, device=order.device)
    permuted_tokens = tokens[order[:num_rows] // top_k]
    return permuted_tokens, sorted_indices.to(torch.int32)


def token_permute_grad(
    permuted_output_grad: Tensor,
    sorted_indices: Tensor,
    num_topk: int,
    padded_mode: bool = False,
) -> Tensor:
    """The gradient of ``tokens``: the sum over the K slots of a token, rounded once."""
    grad = permuted_output_grad.to(accumulation_dtype(permuted_output_grad))
    total = sum_over_choices(slots_from_rows(grad, sorted_indices), num_topk)
    return total.to(permuted_output_grad.dtype)

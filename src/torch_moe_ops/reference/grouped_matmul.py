"""grouped_matmul: every group of consecutive rows is multiplied with the matrix of its expert.

Group e is the rows from ``ends[e - 1]`` up to ``ends[e]``, where ``ends`` are the running totals of
the group sizes (group_list_type 1 gives the sizes, group_list_type 0 the totals)::

    out[group e] = x[group e] @ weight[e]               weight (E, K, N)
    out[group e] = x[group e] @ weight[e].T             weight (E, N, K), trans_weight

    weight_grad[e] = x[group e].T @ grad_y[group e]     transposed again for trans_weight;
                                                        exactly zero for an empty group
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ._slots import accumulation_dtype


def _group_sizes(group_list: Tensor | Sequence[int], group_list_type: int) -> list[int]:
    """The number of rows of each group."""
    values = group_list.tolist() if isinstance(group_list, Tensor) else list(group_list)
    if group_list_type == 1:
        return values
    return [end - start for start, end in zip([0, *values], values, strict=False)]


def grouped_matmul(
    x: Tensor,
    weight: Tensor,
    group_list: Tensor | Sequence[int],
    *,
    trans_weight: bool = False,
    group_list_type: int = 1,
) -> Tensor:
    """(M, N): the product of every row with its group's matrix, rounded once."""
    acc = accumulation_dtype(x)
    matrices = weight.to(acc)
    if trans_weight:
        matrices = matrices.transpose(1, 2)
    groups = x.to(acc).split(_group_sizes(group_list, group_list_type))
    products = [group @ matrix for group, matrix in zip(groups, matrices, strict=True)]
    empty = x.new_zeros(0, matrices.shape[2], dtype=acc)
    return torch.cat([empty, *products]).to(x.dtype)


def grouped_matmul_weight_grad(
    x: Tensor,
    grad_y: Tensor,
    group_list: Tensor | Sequence[int],
    *,
    trans_weight: bool = False,
    group_list_type: int = 1,
) -> Tensor:
    """(E, K, N), or (E, N, K) with ``trans_weight``: the gradient of the weight, rounded once."""
    acc = accumulation_dtype(x)
    sizes = _group_sizes(group_list, group_list_type)
    pairs = zip(x.to(acc).split(sizes), grad_y.to(acc).split(sizes), strict=True)
    matrices = [rows.t() @ grads for rows, grads in pairs]
    if trans_weight:
        matrices = [matrix.t() for matrix in matrices]
    empty_shape = (grad_y.shape[1], x.shape[1]) if trans_weight else (x.shape[1], grad_y.shape[1])
    return torch.cat([x.new_zeros(0, *empty_shape, dtype=acc), *(m[None] for m in matrices)]).to(
        x.dtype
    )

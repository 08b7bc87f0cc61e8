"""alltoallv_grouped_matmul and grouped_matmul_alltoallv: experts whose rows lie on other ranks.

There are ``ep`` ranks with ``e`` experts each. Counts are indexed by a pair: ``count[r, j]`` is
entry ``r * e + j`` of the list. Rows are in blocks of ``count[r, j]``: rank-major rows have the
blocks in the order (0, 0), (0, 1), ..., (1, 0), ..., expert-major rows in the order (0, 0), (1, 0),
..., (0, 1), .... On rank p::

    alltoallv_grouped_matmul: the way there
        arrived[q, j]    = gmm_x[p, j] of rank q                            both rank-major
        permute_out      = arrived, expert-major
        gmm_y[rows of j] = permute_out[rows of j] @ gmm_weight[j]

    grouped_matmul_alltoallv: the way back
        z[rows of j]     = gmm_x[rows of j] @ gmm_weight[j]                 both expert-major
        y[q, j]          = z[p, j] of rank q                                y is rank-major

    both: mm_y = mm_x @ mm_weight

"rows of j" are the blocks (0, j), (1, j), ..., which follow each other in expert-major rows. A
weight that is stored transposed (``trans_...``) is transposed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from .grouped_matmul import grouped_matmul

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def alltoallv_grouped_matmul(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    group: ProcessGroup | str,
    ep_world_size: int,
    send_counts: Sequence[int] | Tensor,
    recv_counts: Sequence[int] | Tensor,
    *,
    mm_x: Tensor | None = None,
    mm_weight: Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    permute_out_flag: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to the ranks of their experts, and their products: gmm_y, mm_y, permute_out."""
    send, recv = _by_rank(send_counts, ep_world_size), _by_rank(recv_counts, ep_world_size)
    arrived = _all_to_all(gmm_x, group, send, recv)
    permute_out = _expert_major(arrived, recv)
    sizes = _rows_by_expert(recv)
    gmm_y = grouped_matmul(permute_out, gmm_weight, sizes, trans_weight=trans_gmm_weight)
    mm_y = _shared_expert(gmm_x, mm_x, mm_weight, trans_mm_weight)
    return gmm_y, mm_y, permute_out if permute_out_flag else gmm_x.new_empty(0)


def grouped_matmul_alltoallv(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    group: ProcessGroup | str,
    ep_world_size: int,
    send_counts: Sequence[int] | Tensor,
    recv_counts: Sequence[int] | Tensor,
    *,
    mm_x: Tensor | None = None,
    mm_weight: Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    """Products of rows with this rank's experts, sent to the ranks of the rows: y, mm_y."""
    send, recv = _by_rank(send_counts, ep_world_size), _by_rank(recv_counts, ep_world_size)
    sizes = _rows_by_expert(send)
    z = grouped_matmul(gmm_x, gmm_weight, sizes, trans_weight=trans_gmm_weight)
    y = _all_to_all(_rank_major(z, send), group, send, recv)
    return y, _shared_expert(gmm_x, mm_x, mm_weight, trans_mm_weight)


Counts = list[list[int]]  # [peer rank][local expert]


def _by_rank(counts: Sequence[int] | Tensor, ranks: int) -> Counts:
    flat = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    experts = len(flat) // ranks
    return [flat[r * experts : (r + 1) * experts] for r in range(ranks)]


def _rows_by_expert(counts: Counts) -> list[int]:
    return [sum(of_expert) for of_expert in zip(*counts, strict=True)]


def _pairs(counts: Counts) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All (rank, expert) in rank-major and in expert-major order."""
    ranks, experts = range(len(counts)), range(len(counts[0]))
    return [(r, j) for r in ranks for j in experts], [(r, j) for j in experts for r in ranks]


def _expert_major(rows: Tensor, counts: Counts) -> Tensor:
    rank_major, expert_major = _pairs(counts)
    return _reordered(rows, counts, rank_major, expert_major)


def _rank_major(rows: Tensor, counts: Counts) -> Tensor:
    rank_major, expert_major = _pairs(counts)
    return _reordered(rows, counts, expert_major, rank_major)


def _reordered(
    rows: Tensor, counts: Counts, old: list[tuple[int, int]], new: list[tuple[int, int]]
) -> Tensor:
    blocks = dict(zip(old, rows.split([counts[r][j] for r, j in old]), strict=True))
    return torch.cat([rows[:0], *(blocks[pair] for pair in new)])


def _all_to_all(
    rows: Tensor, group: ProcessGroup | str, send_counts: Counts, recv_counts: Counts
) -> Tensor:
    """Rank-major rows to their ranks."""
    send, recv = [sum(row) for row in send_counts], [sum(row) for row in recv_counts]
    if group == "":
        return rows
    if isinstance(group, str):
        name: Any = group.removesuffix("@fused").removesuffix("@composed")  # of exchange_counts
        group = _resolve_process_group(name)
    return _AllToAll.apply(rows, group, send, recv)


class _AllToAll(torch.autograd.Function):
    """The gradient of what was received goes back to where it came from."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: ProcessGroup, send: list[int], recv: list[int]
    ) -> Tensor:
        ctx.group, ctx.send, ctx.recv = group, send, recv
        received = rows.new_empty(sum(recv), rows.shape[1])
        if rows.shape[1] > 0:
            dist.all_to_all_single(received, rows.contiguous(), recv, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grads[0], ctx.group, ctx.recv, ctx.send), None, None, None


def _shared_expert(
    like: Tensor, mm_x: Tensor | None, mm_weight: Tensor | None, transposed: bool
) -> Tensor:
    if mm_x is None or mm_weight is None:
        return like.new_empty(0)
    return grouped_matmul(mm_x, mm_weight[None], [mm_x.shape[0]], trans_weight=transposed)

"""What the expert-parallel operators compute, over the data of all ranks in one process.

Independent of the code under test, in slices and concatenations, differentiable by autograd. The
lists have one element for each rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

Counts = list[list[int]]  # for each rank, indexed [peer rank * experts + local expert]


def recv_counts(send: Counts, experts: int) -> Counts:
    """What each rank receives, from what all of them send."""
    ranks = range(len(send))
    return [[send[q][p * experts + j] for q in ranks for j in range(experts)] for p in ranks]


def _blocks(rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    ends = list(itertools.accumulate(sizes))
    assert rows.shape[0] == (ends[-1] if ends else 0)
    return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def to_experts(rows: list[Tensor], send: Counts, experts: int) -> list[Tensor]:
    """Rows sorted by global expert to their ranks: by local expert, then by source rank."""
    ranks = range(len(rows))
    sent = [_blocks(rows[q], send[q]) for q in ranks]
    return [
        torch.cat([sent[q][p * experts + j] for j in range(experts) for q in ranks]) for p in ranks
    ]


def to_sources(rows: list[Tensor], send: Counts, experts: int) -> list[Tensor]:
    """The way back; ``send[p][r * experts + j]`` rows of expert j of rank p go to rank r."""
    ranks = range(len(rows))
    pairs = [(j, r) for j in range(experts) for r in ranks]
    blocks = []
    for p in ranks:
        sizes = [send[p][r * experts + j] for j, r in pairs]
        blocks.append(dict(zip(pairs, _blocks(rows[p], sizes), strict=True)))
    return [torch.cat([blocks[p][j, r] for p in ranks for j in range(experts)]) for r in ranks]


def multiply(rows: Tensor, weight: Tensor, sizes: Sequence[int], transposed: bool) -> Tensor:
    """Each group of rows with its matrix."""
    matrices = weight.transpose(1, 2) if transposed else weight
    groups = _blocks(rows, sizes)
    return torch.cat([group @ matrix for group, matrix in zip(groups, matrices, strict=True)])


def rows_by_expert(counts: Sequence[int], experts: int) -> list[int]:
    """The rows of each local expert, over all peers."""
    return [sum(counts[j::experts]) for j in range(experts)]


def alltoallv_grouped_matmul(
    xs: list[Tensor], weights: list[Tensor], send: Counts, *, transposed: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """gmm_y and permute_out of every rank."""
    experts = weights[0].shape[0]
    recv = recv_counts(send, experts)
    rows = to_experts(xs, send, experts)
    products = [
        multiply(rows[p], weights[p], rows_by_expert(recv[p], experts), transposed)
        for p in range(len(xs))
    ]
    return products, rows


def grouped_matmul_alltoallv(
    xs: list[Tensor], weights: list[Tensor], send: Counts, *, transposed: bool = False
) -> list[Tensor]:
    """y of every rank."""
    experts = weights[0].shape[0]
    products = [
        multiply(xs[p], weights[p], rows_by_expert(send[p], experts), transposed)
        for p in range(len(xs))
    ]
    return to_sources(products, send, experts)

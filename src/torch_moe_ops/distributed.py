"""What expert parallelism needs beside the operators: ranks tell each other how many rows come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torch_moe_ops import _C, _npu
from torch_moe_ops.ops._group import as_ints, check_counts_tensor, group_name

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ExpertCounts(NamedTuple):
    """Who sends how many rows to whom: what :func:`exchange_counts` returns."""

    send_counts: list[int]
    """(ep * e,): rows of this rank for expert ``j`` of rank ``r``, at ``r * e + j``."""
    recv_counts: list[int]
    """(ep * e,): rows from rank ``q`` for the expert ``j`` of this rank, at ``q * e + j``."""
    group: str
    """To be passed on as ``group``: its name, and on NPUs the way that all ranks have agreed on."""
    rows_per_expert: list[int]
    """(ep * e,): rows of all ranks for each global expert."""


def exchange_counts(send_counts: Sequence[int] | Tensor, group: ProcessGroup | str) -> ExpertCounts:
    """Tells every rank how many rows it will receive.

    Call it once, before all :func:`alltoallv_grouped_matmul` and :func:`grouped_matmul_alltoallv`
    with these counts (the latter with ``send_counts`` and ``recv_counts`` swapped)::

        counts = exchange_counts(send_counts, group)
        y, _, _ = alltoallv_grouped_matmul(
            x, w, counts.group, ep, counts.send_counts, counts.recv_counts
        )

    Every rank of the group calls it, also one without rows. It waits for the values: they decide
    the sizes of tensors. On NPUs it finds out beside this whether all ranks are within the limits
    of the fused kernels; the operators would otherwise have to ask, and wait, at every call.

    Args:
        send_counts: (ep * e,), ints: ``send_counts[r * e + j]`` rows of this rank are for expert
            ``j`` of rank ``r``, which is the global expert ``r * e + j``. The number of rows for
            each expert, that is.
        group: A process group of torch.distributed or its name. The empty name is this process
            alone.

    Returns:
        See :class:`ExpertCounts`. The lists are the caller's own.

    Raises:
        ValueError: The number of counts is no multiple of the number of ranks, a count is negative,
            or there is no such group. On every rank: their numbers of counts differ.
        TypeError: ``send_counts`` is not made of ints.
        RuntimeError: A rank died, or did not come within the timeout of the group.

    Example:
        >>> from torch_moe_ops import exchange_counts
        >>> exchange_counts([3, 0, 2], "").recv_counts
        [3, 0, 2]
    """
    name = group_name("exchange_counts", group)
    rank, by_rank = _C.exchange_counts(_as_tensor(send_counts), name)
    experts = len(by_rank[rank]) // len(by_rank)
    first = rank * experts
    return ExpertCounts(
        send_counts=by_rank[rank],
        recv_counts=[row[first + j] for row in by_rank for j in range(experts)],
        group=_with_agreed_path(name, by_rank),
        rows_per_expert=[sum(column) for column in zip(*by_rank, strict=True)],
    )


def _as_tensor(send_counts: Sequence[int] | Tensor) -> Tensor:
    """1-D, int64. What is on a device stays there: it is the exchange that waits for it."""
    if isinstance(send_counts, Tensor):
        check_counts_tensor("exchange_counts", "send_counts", send_counts)
        return send_counts.detach().to(torch.int64)
    ints = as_ints("exchange_counts", "send_counts", send_counts)
    return torch.tensor(ints, dtype=torch.int64)


def _with_agreed_path(name: str, by_rank: list[list[int]]) -> str:
    if not name or _npu.status():
        return name  # no NPU: there is nothing to agree about
    from torch_moe_ops import _C_npu

    agreed: str = _C_npu.with_agreed_path(name, by_rank)
    return agreed

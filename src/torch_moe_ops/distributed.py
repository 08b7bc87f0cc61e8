"""What expert parallelism needs beside the operators: ranks tell each other how many rows come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from torch import Tensor

from torch_moe_ops import _C
from torch_moe_ops.ops._group import as_ints, group_name

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
    sent = as_ints("exchange_counts", "send_counts", send_counts)
    by_rank = _C.exchange_counts(sent, name)
    rank = dist.distributed_c10d._resolve_process_group(name).rank() if name else 0
    experts = len(sent) // len(by_rank)
    first = rank * experts
    return ExpertCounts(
        send_counts=sent,
        recv_counts=[row[first + j] for row in by_rank for j in range(experts)],
        group=name,
        rows_per_expert=[sum(column) for column in zip(*by_rank, strict=True)],
    )

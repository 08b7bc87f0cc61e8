"""Arguments of the operators that communicate: the process group, and counts of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def group_name(op: str, group: ProcessGroup | str) -> str:
    """The name under which the operators find a process group."""
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise TypeError(f"moe::{op}: group must be a ProcessGroup or its name, got {group!r}")
    return name


def as_ints(op: str, name: str, counts: Sequence[int] | Tensor) -> list[int]:
    """A list of our own: the caller may change theirs before the backward pass reads it."""
    if not isinstance(counts, Tensor):
        if not isinstance(counts, Sequence) or not all(_is_int(count) for count in counts):
            raise TypeError(f"moe::{op}: {name} must be a sequence of ints, got {counts!r}")
        return list(counts)
    check_counts_tensor(op, name, counts)
    ints: list[int] = counts.tolist()
    return ints


def _is_int(value: object) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def check_counts_tensor(op: str, name: str, counts: Tensor) -> None:
    """TypeError unless the tensor holds a list of ints."""
    if counts.dim() != 1 or counts.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"moe::{op}: {name} must be a 1-D int32 or int64 tensor, got {counts.dtype} of shape "
            f"{list(counts.shape)}"
        )

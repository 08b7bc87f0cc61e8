"""Shapes and inputs that the bench files share."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal, TypeVar

import torch
from torch import Tensor

import naive
from harness import Case, Problem

Size = Literal["full", "quick", "tiny"]
"""Of the inputs: those to quote, a few minutes' worth, or just enough to run the code."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Routing:
    """T tokens of size H, each sent to K of E experts."""

    T: int
    H: int
    K: int
    E: int


@dataclass(frozen=True)
class Groups:
    """M rows of size K in E groups of uneven size, each times a (K, N) matrix."""

    M: int
    K: int
    N: int
    E: int


ROUTING_SHAPES: dict[Size, list[Routing]] = {
    "full": [
        Routing(4096, 2048, 8, 64),
        Routing(8192, 4096, 2, 8),
        Routing(2048, 7168, 8, 256),
    ],
    "quick": [Routing(4096, 2048, 4, 16)],  # past the caches
    "tiny": [Routing(6, 8, 2, 4)],
}
GROUPS_SHAPES: dict[Size, list[Groups]] = {
    "full": [Groups(8192, 1024, 2048, 16), Groups(2048, 1024, 1024, 64)],
    "quick": [Groups(2048, 512, 1024, 16), Groups(1024, 512, 512, 64)],
    "tiny": [Groups(9, 8, 12, 4)],
}

Shape = TypeVar("Shape", Routing, Groups)


def cross(
    op: str,
    shapes: Sequence[Shape],
    prepare: Callable[[Shape, torch.dtype], Problem],
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> list[Case]:
    """The cases of an operator: every shape in every dtype."""

    def case(shape: Shape, dtype: torch.dtype) -> Case:
        return Case(op, asdict(shape), dtype, lambda: prepare(shape, dtype))

    return [case(shape, dtype) for shape in shapes for dtype in dtypes]


class RoutingInputs:
    """Random tensors for the routing operators; the large ones are made when first used.

    Args:
        shape: Sizes.
        dtype: Of all floating tensors.
        drop_pad: Each expert takes T·K / E rows, its even share, and drops the slots that come
            too late. The rows are then (E, C, H), else (T·K, H).
    """

    def __init__(self, shape: Routing, dtype: torch.dtype, drop_pad: bool = False) -> None:
        self.shape = shape
        self.dtype = dtype
        self.capacity = shape.T * shape.K // shape.E if drop_pad else 0
        scores_TE = torch.rand(shape.T, shape.E)
        self.ids = scores_TE.argsort(1)[:, : shape.K].contiguous()
        self.probs = torch.rand(shape.T, shape.K).to(dtype)
        self.bias = torch.randn(shape.E, shape.H).to(dtype)
        if drop_pad:
            self.row_of_slot = naive.rows_with_capacity(self.ids, shape.E, self.capacity)
            self.rows_shape: tuple[int, ...] = (shape.E, self.capacity, shape.H)
        else:
            self.row_of_slot = naive.sorted_rows(self.ids)
            self.rows_shape = (shape.T * shape.K, shape.H)

    @cached_property
    def tokens(self) -> Tensor:
        """(T, H): tokens, or the gradient of the output of a token."""
        return torch.randn(self.shape.T, self.shape.H).to(self.dtype)

    @cached_property
    def rows(self) -> Tensor:
        """Expert rows, or their gradient. All differ, so that a mix-up shows."""
        return torch.randn(self.rows_shape).to(self.dtype)

    def num_bytes(self, *, tokens: int = 0, slots: int = 0, rows: int = 0) -> int:
        """Bytes of so many times all tokens, the rows that slots have, and all rows."""
        num_rows = self.shape.E * self.capacity or self.shape.T * self.shape.K
        num_slots = int((self.row_of_slot >= 0).sum())
        count = tokens * self.shape.T + slots * num_slots + rows * num_rows
        return count * self.shape.H * self.dtype.itemsize


def uneven_counts(num_rows: int, num_groups: int) -> Tensor:
    """(E,), int64: group sizes that differ by up to 6 times; many small groups leave some empty."""
    shares = torch.rand(num_groups) + 0.2
    if num_rows < 64 * num_groups:
        shares[torch.rand(num_groups) < 0.2] = 0
        shares[0] = 1
    counts = (shares / shares.sum() * num_rows).long()
    counts[0] += num_rows - counts.sum()
    return counts

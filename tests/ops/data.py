"""Inputs for the operator tests: values, expert choices, memory layouts.

The choices are uneven on purpose: experts without tokens, an expert named twice by one token, all
tokens on one expert. Balanced or symmetric data hides swapped indices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]

# (T, K) = (5, 2), E = 4: expert 2 has no token, token 2 names expert 3 twice.
UNEVEN = torch.tensor([[3, 0], [0, 1], [3, 3], [1, 0], [0, 3]])
# (T, K) = (4, 3), K = E: every token visits every expert, each in another order.
EVERY_EXPERT = torch.tensor([[2, 0, 1], [1, 2, 0], [0, 1, 2], [1, 0, 2]])
# (T,): one choice per token, all of them expert 1.
ALL_TO_ONE = torch.tensor([1, 1, 1, 1])

# Rows wider than what the kernels sum up at once, and enough of them to be split over threads. Some
# experts get more than BIG_CAPACITY tokens, some fewer; BIG_ROWS cuts some of the 602 slots off.
BIG_TOKENS, BIG_WIDTH, BIG_ROWS, BIG_CAPACITY = 301, 1057, 508, 90
# The width of samples with a dynamic number of tokens. None of their other sizes is the same: torch
# takes two equal sizes for one symbol, and compiles again when they differ.
WIDTH = 17


def row_map(ids: Tensor) -> Tensor:
    """The row of each slot when the slots are sorted by expert id (stable), int32."""
    order = torch.argsort(ids.reshape(-1), stable=True)
    return torch.argsort(order).int()


def capacity_map(ids: Tensor, capacity: int) -> Tensor:
    """The row of each slot in (E * C) places, -1 once an expert is full, int32."""
    taken: dict[int, int] = {}
    rows = []
    for expert in ids.flatten().tolist():
        place = taken.get(expert, 0)
        taken[expert] = place + 1
        rows.append(expert * capacity + place if place < capacity else -1)
    return torch.tensor(rows, dtype=torch.int32)


def k_major(token_major_map: Tensor, top_k: int) -> Tensor:
    """The same map in the order of InitRouting V1: entry k * T + t."""
    return token_major_map.reshape(-1, top_k).t().reshape(-1).contiguous()


def drop(rows: Tensor, *slots: int) -> Tensor:
    """A copy of the map with -1 in the given slots."""
    rows = rows.clone()
    rows[list(slots)] = -1
    return rows


class Values:
    """Draws random tensors of one dtype; the same ones in every run."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal values, rounded to the dtype."""
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return values.to(dtype or self.dtype)

    def ids(self, *shape: int, experts: int) -> Tensor:
        """Expert ids that leave expert 0 without tokens and crowd the low ones."""
        draws = torch.rand(*shape, generator=self.generator, dtype=torch.float64)
        return (1 + (experts - 1) * draws**2).long().clamp(max=experts - 1)


@dataclass(frozen=True)
class Sample:
    """One call of an operator."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any]) -> tuple[Tensor, ...]:
        """The outputs of ``function``, always as a tuple."""
        result = function(*self.args, **self.kwargs)
        return result if isinstance(result, tuple) else (result,)

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    def floating(self) -> list[Tensor]:
        """The tensors that can get a gradient, in order."""
        return [tensor for tensor in self.tensors() if tensor.is_floating_point()]

    def map(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """A copy with every tensor changed."""
        args, kwargs = tree_map_only(Tensor, change, (self.args, self.kwargs))
        return Sample(self.name, args, kwargs)

    def map_floating(self, change: Callable[[Tensor], Tensor]) -> Sample:
        """A copy with every floating tensor changed."""
        return self.map(lambda tensor: change(tensor) if tensor.is_floating_point() else tensor)

    def leaves(self, wanted: Sequence[bool] | None = None) -> Sample:
        """A detached copy whose floating tensors ask for a gradient (where ``wanted``).

        Keeps strides, so that a strange layout stays strange.
        """
        flags = iter(wanted) if wanted is not None else None
        return self.map_floating(
            lambda tensor: tensor.detach().requires_grad_(next(flags) if flags else True)
        )


def _poisoned(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A buffer whose every value is wrong: NaN, or an index far outside any range."""
    poison = float("nan") if tensor.is_floating_point() else -77_777_777
    return torch.full(tuple(shape), poison, dtype=tensor.dtype, device=tensor.device)


def sliced(tensor: Tensor) -> Tensor:
    """Every second element, in every dimension, of a larger poisoned buffer."""
    buffer = _poisoned(tensor, [2 * size + 1 for size in tensor.shape])
    view = buffer[tuple(slice(1, 2 * size + 1, 2) for size in tensor.shape)]
    return view.copy_(tensor)


def padded_rows(tensor: Tensor) -> Tensor:
    """The last dimension is packed, but there is a poisoned gap after every row."""
    buffer = _poisoned(tensor, [*tensor.shape[:-1], tensor.shape[-1] + 3])
    return buffer.narrow(-1, 2, tensor.shape[-1]).copy_(tensor)


def shifted(tensor: Tensor) -> Tensor:
    """Packed, but not where an allocation starts: vector loads meet another alignment."""
    buffer = _poisoned(tensor, [tensor.numel() + 1])
    return buffer[1:].view(tensor.shape).copy_(tensor)


def transposed(tensor: Tensor) -> Tensor:
    """The dimensions lie in memory in the opposite order."""
    reverse = list(range(tensor.dim()))[::-1]
    return tensor.permute(reverse).contiguous().permute(reverse)


def expanded_rows(tensor: Tensor) -> Tensor:
    """The first entry again and again, with stride 0. Maps and group lists cannot repeat."""
    if tensor.shape[0] == 0 or (tensor.dim() == 1 and not tensor.is_floating_point()):
        return tensor
    return tensor[:1].expand(tensor.shape)


def expanded_value(tensor: Tensor) -> Tensor:
    """One value everywhere, all strides 0: the gradient that ``sum().backward()`` sends."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return tensor
    return tensor.flatten()[0].expand(tensor.shape)


LAYOUTS = {
    layout.__name__: layout
    for layout in (sliced, padded_rows, shifted, transposed, expanded_rows, expanded_value)
}


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal shape, dtype and bit patterns: also tells 0 from -0, and NaN equals itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(integers), right.contiguous().view(integers))


def assert_same_bits(left: Sequence[Tensor | None], right: Sequence[Tensor | None]) -> None:
    """The same outputs or gradients, to the bit."""
    assert len(left) == len(right)
    for place, (one, other) in enumerate(zip(left, right, strict=True)):
        if one is None or other is None:
            assert one is other, f"output {place}: only one of the two is None"
        else:
            assert same_bits(one, other), f"output {place}: {one} is not {other}"

"""Calls of the expert-parallel operators on several ranks: their data, what one rank gets, and
what the definition says.

A call is a description from which every process makes the same data, so that only results travel
between processes. The tensors of all ranks in one list are those of rank 0, then of rank 1, ....
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import torch_moe_ops
from tests.ops.accuracy import Run, assert_rounded_once
from tests.ops.data import Sample, Values, assert_same_bits
from torch_moe_ops import reference

from . import definition
from .definition import Counts, recv_counts

FORWARD, REVERSE = "alltoallv_grouped_matmul", "grouped_matmul_alltoallv"


@dataclass(frozen=True)
class Call:
    """One call on every rank. ``send`` has the ``send_counts`` of each rank."""

    op: str
    send: Counts
    dtype: torch.dtype = torch.float64
    hidden: int = 5
    columns: int = 3
    trans: bool = False
    shared: bool = False
    trans_mm: bool = False
    permute_out: bool = False
    by_reference: bool = False

    @property
    def ranks(self) -> int:
        """Of the group."""
        return len(self.send)

    @property
    def experts(self) -> int:
        """Of each rank."""
        return len(self.send[0]) // self.ranks

    @property
    def recv(self) -> Counts:
        """The ``recv_counts`` of each rank."""
        return recv_counts(self.send, self.experts)

    @property
    def names(self) -> list[str]:
        """Of the tensors of a rank."""
        return ["gmm_x", "gmm_weight", *(["mm_x", "mm_weight"] if self.shared else [])]

    @property
    def num_outputs(self) -> int:
        """Of the outputs of a rank that are asked for."""
        return 1 + self.shared + self.permute_out

    def inputs(self, rank: int) -> list[Tensor]:
        """The tensors of a rank; no two ranks have the same ones."""
        v = Values(self.dtype, seed=100 + rank)
        matrix = (self.columns, self.hidden) if self.trans else (self.hidden, self.columns)
        tensors = [v(sum(self.send[rank]), self.hidden), v(self.experts, *matrix)]
        if self.shared:
            rows, matrix = (rank + 1) % 3, (2, 4)  # rank 2 has none
            tensors += [v(rows, matrix[0]), v(*(matrix[::-1] if self.trans_mm else matrix))]
        return tensors

    def upstream(self, rank: int) -> list[Tensor]:
        """A gradient for every output of a rank."""
        v = Values(self.dtype, seed=200 + rank)
        rows = sum(self.recv[rank])
        shapes = [(rows, self.columns)]
        shapes += [((rank + 1) % 3, 4)] if self.shared else []
        shapes += [(rows, self.hidden)] if self.permute_out else []
        return [v(*shape) for shape in shapes]

    def directions(self, rank: int) -> list[Tensor]:
        """Like the inputs of a rank: weights of its first gradients, for second ones."""
        v = Values(self.dtype, seed=300 + rank)
        return [v(*tensor.shape) for tensor in self.inputs(rank)]

    def run(self, rank: int, tensors: Sequence[Tensor], group: Any) -> list[Tensor]:
        """The operator on a rank: the outputs that are asked for."""
        named = dict(zip(self.names, tensors, strict=True))
        if self.op == FORWARD:
            named["permute_out_flag"] = self.permute_out
        y, mm_y, *rows = getattr(reference if self.by_reference else torch_moe_ops, self.op)(
            group=group,
            ep_world_size=self.ranks,
            send_counts=self.send[rank],
            recv_counts=self.recv[rank],
            trans_gmm_weight=self.trans,
            trans_mm_weight=self.trans_mm,
            **named,
        )
        assert self.shared or mm_y.shape == (0,)
        assert self.permute_out or not rows or rows[0].shape == (0,)
        return [y, *([mm_y] if self.shared else []), *(rows if self.permute_out else [])]

    def define(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of all ranks by definition, from the tensors of all ranks."""
        width = len(self.names)
        by_rank = [tensors[first : first + width] for first in range(0, len(tensors), width)]
        xs, weights = [t[0] for t in by_rank], [t[1] for t in by_rank]
        if self.op == FORWARD:
            ys, rows = definition.alltoallv_grouped_matmul(
                xs, weights, self.send, transposed=self.trans
            )
        else:
            ys = definition.grouped_matmul_alltoallv(xs, weights, self.send, transposed=self.trans)
        outputs = []
        for rank in range(self.ranks):
            outputs.append(ys[rank])
            if self.shared:
                mm_x, mm_weight = by_rank[rank][2:]
                outputs.append(mm_x @ (mm_weight.t() if self.trans_mm else mm_weight))
            if self.permute_out:
                outputs.append(rows[rank])
        return outputs

    def all_inputs(self) -> list[Tensor]:
        """The tensors of all ranks."""
        return [tensor for rank in range(self.ranks) for tensor in self.inputs(rank)]

    def all_upstream(self) -> list[Tensor]:
        """The gradients of the outputs of all ranks."""
        return [tensor for rank in range(self.ranks) for tensor in self.upstream(rank)]


# On one rank


def step(
    rank: int, call: Call, wanted: Sequence[bool] | None = None, group: Any = "0"
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and the gradients of the inputs that are wanted."""
    flags = wanted or [True] * len(call.names)
    tensors = [t.requires_grad_(w) for t, w in zip(call.inputs(rank), flags, strict=True)]
    outputs = call.run(rank, tensors, group)
    pairs = [(o, g) for o, g in zip(outputs, call.upstream(rank), strict=True) if o.requires_grad]
    torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return [output.detach() for output in outputs], [tensor.grad for tensor in tensors]


def twice(rank: int, call: Call, threads: Sequence[int]) -> list[Any]:
    """The same step for each number of threads."""
    results = []
    for number in threads:
        torch.set_num_threads(number)
        results.append(step(rank, call))
    torch.set_num_threads(1)
    return results


def second_order(rank: int, call: Call) -> list[Tensor]:
    """The gradients of a sum over the first gradients: of the inputs, then of the upstream."""
    tensors = [t.requires_grad_() for t in call.inputs(rank)]
    upstream = [t.requires_grad_() for t in call.upstream(rank)]
    outputs = call.run(rank, tensors, "0")
    return list(_second_order(tensors, outputs, upstream, [call.directions(rank)]))


def _second_order(
    tensors: list[Tensor], outputs: list[Tensor], upstream: list[Tensor], directions: Any
) -> tuple[Tensor, ...]:
    first = torch.autograd.grad(outputs, tensors, upstream, create_graph=True)
    flat = [direction for of_rank in directions for direction in of_rank]
    total = sum((grad * direction).sum() for grad, direction in zip(first, flat, strict=True))
    assert isinstance(total, Tensor)
    return torch.autograd.grad(total, tensors + upstream, materialize_grads=True)


# In the process of the tests


def joined(results: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The tensors of all ranks in one list."""
    return [tensor for of_rank in results for tensor in of_rank]


def outputs_of(call: Call) -> Run:
    """The definition's outputs, for assert_rounded_once."""
    return lambda sample, upstream: call.define(sample.args)


def gradients_of(call: Call) -> Run:
    """The definition's gradients of all inputs of all ranks."""

    def run(sample: Sample, upstream: Sequence[Tensor | None]) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in sample.args]
        outputs = call.define(leaves)
        return list(torch.autograd.grad(outputs, leaves, upstream, materialize_grads=True))

    return run


def assert_right(call: Call, results: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
    """Outputs and gradients of every rank are the definition's, rounded once.

    In float64 that is far within 1e-11. Moved rows keep every bit.
    """
    sample = Sample("", tuple(call.all_inputs()))
    outputs = joined([result[0] for result in results])
    assert_rounded_once(outputs, outputs_of(call), sample)
    if call.permute_out:
        last = call.num_outputs - 1
        rows = definition.to_experts(
            [call.inputs(rank)[0] for rank in range(call.ranks)], call.send, call.experts
        )
        assert_same_bits([result[0][last] for result in results], rows)
    gradients = joined([result[1] for result in results])
    assert_rounded_once(gradients, gradients_of(call), sample, call.all_upstream())


def assert_second_order_right(call: Call, results: Sequence[Sequence[Tensor]]) -> None:
    """The same for :func:`second_order`, to 1e-11."""
    tensors = [t.requires_grad_() for t in call.all_inputs()]
    upstream = [t.requires_grad_() for t in call.all_upstream()]
    directions = [call.directions(rank) for rank in range(call.ranks)]
    expected = _second_order(tensors, call.define(tensors), upstream, directions)
    width = len(call.names)
    for rank, result in enumerate(results):
        mine = [
            *expected[rank * width : (rank + 1) * width],
            *expected[len(tensors) :][rank * call.num_outputs : (rank + 1) * call.num_outputs],
        ]
        torch.testing.assert_close(result, mine, rtol=1e-11, atol=1e-11)

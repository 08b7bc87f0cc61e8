"""The expert-parallel operators on several gloo processes, against the definition in one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import torch_moe_ops
from tests.ops.data import Values, assert_same_bits
from tests.ranks import Ranks

from . import definition
from .calls import (
    FORWARD,
    REVERSE,
    Call,
    assert_right,
    assert_second_order_right,
    joined,
    second_order,
    step,
    twice,
)
from .definition import Counts

Pool = Callable[[int], Ranks]
OPS = [FORWARD, REVERSE]


def uneven(ranks: int, experts: int) -> Counts:
    """All different but for many zeros, so that no two counts can be taken for each other."""
    draw = random.Random(10 * ranks + experts)
    pairs = ranks * ranks * experts
    sizes = list(range(1, pairs + 1))
    draw.shuffle(sizes)
    sizes = [0 if draw.random() < 0.35 else 1 + size % 11 for size in sizes]
    return [sizes[r * ranks * experts :][: ranks * experts] for r in range(ranks)]


# For 3 ranks with 2 experts each.
PATTERNS: dict[str, Counts] = {
    "rank 0 sends nothing": [[0] * 6, [1, 2, 0, 3, 4, 0], [0, 5, 6, 0, 1, 2]],
    "rank 1 receives nothing": [[3, 1, 0, 0, 2, 4], [1, 0, 0, 0, 0, 5], [0, 2, 0, 0, 6, 1]],
    "rank 2 takes no part": [[1, 2, 3, 0, 0, 0], [4, 0, 5, 6, 0, 0], [0] * 6],
    "one heavy pair": [[0, 0, 1, 150, 0, 2], [1, 0, 0, 0, 0, 0], [0, 0, 0, 3, 0, 0]],
    "nobody stays at home": [[0, 0, 2, 1, 0, 3], [4, 1, 0, 0, 2, 0], [0, 5, 1, 2, 0, 0]],
    "everybody stays at home": [[2, 1, 0, 0, 0, 0], [0, 0, 0, 4, 0, 0], [0, 0, 0, 0, 3, 1]],
    "last expert alone": [[0, 0, 0, 0, 0, 4], [0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2]],
    "nothing at all": [[0] * 6] * 3,
}


@pytest.mark.parametrize("trans", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("experts", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_outputs_and_gradients(pool: Pool, op: str, ranks: int, experts: int, trans: bool) -> None:
    """Also the second order, with and without the optional outputs."""
    send = uneven(ranks, experts)
    assert any(0 in counts for counts in send)
    plain = Call(op, send, trans=trans)
    full = replace(plain, shared=True, trans_mm=not trans, permute_out=op == FORWARD)
    for call in (plain, full):
        assert_right(call, pool(ranks).run(step, call))
        assert_second_order_right(call, pool(ranks).run(second_order, call))


@pytest.mark.parametrize("op", OPS)
def test_reference(pool: Pool, op: str) -> None:
    """The definitions for users, on process groups, against the one over all ranks' data."""
    call = Call(op, uneven(3, 2), shared=True, permute_out=op == FORWARD, by_reference=True)
    for other in (call, replace(call, trans=True, trans_mm=True), replace(call, shared=False)):
        assert_right(other, pool(3).run(step, other))
        assert_second_order_right(other, pool(3).run(second_order, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", OPS)
def test_low_precision(pool: Pool, op: str, dtype: torch.dtype) -> None:
    call = Call(op, uneven(3, 2), dtype, 37, 7, shared=True, permute_out=op == FORWARD)
    assert_right(call, pool(3).run(step, call))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("op", OPS)
def test_patterns_of_counts(pool: Pool, op: str, pattern: str) -> None:
    call = Call(op, PATTERNS[pattern], shared=True, permute_out=op == FORWARD)
    assert_right(call, pool(3).run(step, call))
    assert_second_order_right(call, pool(3).run(second_order, call))


@pytest.mark.parametrize("sizes", [(0, 3), (5, 0), (0, 0), (1, 1)])
@pytest.mark.parametrize("op", OPS)
def test_sizes_of_rows(pool: Pool, op: str, sizes: tuple[int, int]) -> None:
    call = Call(op, uneven(2, 3), torch.float64, *sizes, permute_out=op == FORWARD)
    assert_right(call, pool(2).run(step, call))


@pytest.mark.parametrize("op", OPS)
def test_no_experts(pool: Pool, op: str) -> None:
    results = pool(2).run(step, Call(op, [[], []], permute_out=op == FORWARD))
    for (y, *rows), (x_grad, weight_grad) in results:
        assert [tuple(t.shape) for t in (y, *rows)] == [(0, 3), (0, 5)][: 1 + len(rows)]
        assert x_grad.shape == (0, 5)
        assert weight_grad.shape == (0, 5, 3)


# rank 0 has rows 0 ... 3, rank 1 has rows 10 ... 15; both have two experts.
WORKED = [[1, 2, 0, 1], [3, 0, 2, 1]]


def worked_example(rank: int) -> list[list[float]]:
    recv = definition.recv_counts(WORKED, 2)[rank]
    x = torch.tensor([[0.0, 1, 2, 3], [10.0, 11, 12, 13, 14, 15]][rank:][:1][0])[:, None]
    weight = torch.tensor([1.0, 100.0]).view(2, 1, 1) * (rank + 1)
    y, _, rows = torch_moe_ops.alltoallv_grouped_matmul(
        x, weight, "0", 2, WORKED[rank], recv, permute_out_flag=True
    )
    back, _ = torch_moe_ops.grouped_matmul_alltoallv(rows, weight, "0", 2, recv, WORKED[rank])
    return [tensor.flatten().tolist() for tensor in (rows, y, back)]


def test_worked_example(pool: Pool) -> None:
    """By hand: expert-major there; and in the order of departure after the way back."""
    first, second = pool(2).run(worked_example)
    assert first == [
        [0, 10, 11, 12, 1, 2],
        [0, 10, 11, 12, 100, 200],
        [0, 100, 200, 600],
    ]
    assert second == [[13, 14, 3, 15], [26, 28, 600, 3000], [10, 11, 12, 26, 28, 3000]]


@pytest.mark.parametrize("op", OPS)
def test_gradients_only_where_asked(pool: Pool, op: str) -> None:
    """The same bits where asked, and none elsewhere: x frozen, weights alone, and so on."""
    call = Call(op, uneven(3, 2), shared=True, permute_out=op == FORWARD)
    everything = pool(3).run(step, call)
    for wanted in ("0111", "0100", "1000", "0001", "0010", "1011", "1101"):
        flags = [flag == "1" for flag in wanted]
        for rank, (outputs, gradients) in enumerate(pool(3).run(step, call, flags)):
            assert_same_bits(outputs, everything[rank][0])
            expected = [g if f else None for g, f in zip(everything[rank][1], flags, strict=True)]
            assert_same_bits(gradients, expected)


def through_one_output(rank: int, call: Call, used: int) -> list[Tensor]:
    tensors = [tensor.requires_grad_() for tensor in call.inputs(rank)]
    output = call.run(rank, tensors, "0")[used]
    grads = torch.autograd.grad(output, tensors, call.upstream(rank)[used], materialize_grads=True)
    return list(grads)


@pytest.mark.parametrize("used", [0, 1, 2])
def test_gradient_through_one_output(pool: Pool, used: int) -> None:
    """permute_out has a gradient of its own; an output that nobody used takes no part."""
    call = Call(FORWARD, uneven(3, 2), shared=True, permute_out=True)
    results = pool(3).run(through_one_output, call, used)
    leaves = [tensor.requires_grad_() for tensor in call.all_inputs()]
    outputs, upstream = call.define(leaves)[used::3], call.all_upstream()[used::3]
    expected = torch.autograd.grad(outputs, leaves, upstream, materialize_grads=True)
    torch.testing.assert_close(joined(results), list(expected), rtol=1e-11, atol=1e-11)


def different_losses(rank: int, call: Call, used: list[list[int]]) -> list[Tensor]:
    """The loss of a rank has only some of its outputs."""
    tensors = [tensor.requires_grad_() for tensor in call.inputs(rank)]
    outputs, upstream = call.run(rank, tensors, "0"), call.upstream(rank)
    torch.autograd.backward(
        [outputs[place] for place in used[rank]], [upstream[place] for place in used[rank]]
    )
    assert tensors[0].grad is not None
    assert tensors[1].grad is not None
    return [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]


@pytest.mark.parametrize(
    ("op", "used"),
    [
        (FORWARD, [[0], [1]]),
        (FORWARD, [[0, 2], [0]]),
        (FORWARD, [[1], [1, 2]]),
        (FORWARD, [[2], [0, 1, 2]]),
        (REVERSE, [[1], [0]]),
        (REVERSE, [[0, 1], [0]]),
    ],
)
def test_ranks_use_different_outputs(pool: Pool, op: str, used: list[list[int]]) -> None:
    """What a rank's loss leaves out has zero gradients there: the others wait for its rows."""
    call = Call(op, uneven(2, 2), shared=True, permute_out=op == FORWARD)
    results = pool(2).run(different_losses, call, used)
    leaves = [tensor.requires_grad_() for tensor in call.all_inputs()]
    places = [rank * call.num_outputs + place for rank in range(2) for place in used[rank]]
    outputs, upstream = call.define(leaves), call.all_upstream()
    expected = torch.autograd.grad(
        [outputs[p] for p in places], leaves, [upstream[p] for p in places], materialize_grads=True
    )
    torch.testing.assert_close(joined(results), list(expected), rtol=1e-11, atol=1e-11)


def there_and_back(rank: int, send: Counts, dtype: torch.dtype) -> bool:
    experts = len(send[0]) // len(send)
    recv = definition.recv_counts(send, experts)[rank]
    x = Values(dtype, seed=rank)(sum(send[rank]), 9)
    eye = torch.eye(9, dtype=dtype).expand(experts, 9, 9)
    ep, sent = len(send), send[rank]
    y, _, rows = torch_moe_ops.alltoallv_grouped_matmul(
        x, eye, "0", ep, sent, recv, permute_out_flag=True
    )
    back, _ = torch_moe_ops.grouped_matmul_alltoallv(y, eye, "0", ep, recv, sent)
    assert_same_bits([back, y], [x, rows])
    return True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_there_and_back_is_the_identity(pool: Pool, dtype: torch.dtype) -> None:
    for ranks, experts in ((2, 3), (3, 2), (4, 1)):
        assert all(pool(ranks).run(there_and_back, uneven(ranks, experts), dtype))


@pytest.mark.parametrize("op", OPS)
def test_threads(pool: Pool, op: str) -> None:
    """The same bits for any number of threads, on sizes that are split over them."""
    send = [[700, 0, 300, 201], [1, 0, 404, 77]]
    call = Call(op, send, torch.float32, 65, 48, shared=True, permute_out=op == FORWARD)
    for results in pool(2).run(twice, call, [1, 2, 3, 1]):
        for outputs, gradients in results[1:]:
            assert_same_bits(outputs, results[0][0])
            assert_same_bits(gradients, results[0][1])


@pytest.mark.parametrize("op", OPS)
def test_many_experts(pool: Pool, op: str) -> None:
    """300 on each rank: what the ranks tell each other passes the 512 numbers of one message."""
    draw = random.Random(0)
    send = [[draw.choice([0, 0, 0, 1, 2]) for _ in range(600)] for _ in range(2)]
    call = Call(op, send, torch.float64, 3, 2)
    assert_right(call, pool(2).run(step, call))


def large_rows(rank: int, send: Counts, width: int) -> bool:
    """Each row is filled with its own number."""
    numbers = [torch.arange(sum(send[r])) + 10_000 * r for r in range(2)]
    x = numbers[rank].float()[:, None].expand(-1, width).contiguous()
    recv = definition.recv_counts(send, 2)
    weight = torch.zeros(2, width, 1)
    weight[:, -1] = 1
    y, _, rows = torch_moe_ops.alltoallv_grouped_matmul(
        x, weight, "0", 2, send[rank], recv[rank], permute_out_flag=True
    )
    expected = definition.to_experts([n.float()[:, None] for n in numbers], send, 2)[rank]
    back, _ = torch_moe_ops.grouped_matmul_alltoallv(
        y, torch.ones(2, 1, 1), "0", 2, recv[rank], send[rank]
    )
    return all(
        (
            torch.equal(rows, expected.expand(-1, width)),
            torch.equal(y, expected),
            torch.equal(back[:, 0], numbers[rank].float()),
        )
    )


def test_large_rows(pool: Pool) -> None:
    """About 48 MB from each rank, most of it to the other."""
    assert all(pool(2).run(large_rows, [[100, 1, 2000, 900], [3000, 0, 7, 1]], 4001))

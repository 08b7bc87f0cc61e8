"""The expert-parallel operators in training: empty ranks, compilation, recomputation, memory."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import torch_moe_ops
from tests.ops.data import Values, assert_same_bits
from tests.ranks import Ranks, wait_until

from .calls import FORWARD, REVERSE, Call, assert_right, step
from .definition import Counts, recv_counts

Pool = Callable[[int], Ranks]
OPS = [FORWARD, REVERSE]


@pytest.mark.parametrize("op", OPS)
def test_no_rows_anywhere(pool: Pool, op: str) -> None:
    """Gradients are there, empty or zero: no rank leaves the graph."""
    call = Call(op, [[0] * 4] * 2, permute_out=op == FORWARD)
    for outputs, (x_grad, weight_grad) in pool(2).run(step, call):
        widths = [3, 5] if op == FORWARD else [3]
        assert [tuple(out.shape) for out in outputs] == [(0, width) for width in widths]
        assert x_grad.shape == (0, 5)
        assert_same_bits([weight_grad], [torch.zeros(2, 5, 3, dtype=torch.float64)])


def test_one_rank_has_no_rows(pool: Pool) -> None:
    """Rank 0 sends both its rows to rank 1, which has none."""
    call = Call(FORWARD, [[0, 2], [0, 0]], hidden=4)
    results = pool(2).run(step, call)
    assert_right(call, results)
    (y, *_), (x_grad, weight_grad) = results[0]
    assert y.shape == (0, 3)
    assert x_grad.shape == (2, 4)
    assert not weight_grad.any()
    assert results[1][1][0].shape == (0, 4)


def rank_coded(rank: int, send: Counts) -> list[Tensor]:
    """The gradient of sum(out * (rank + 1)), in bfloat16."""
    recv = recv_counts(send, 1)[rank]
    x = (torch.arange(sum(send[rank])) + 10 * rank + 1).bfloat16()[:, None].requires_grad_()
    weight = torch.full((1, 1, 1), 3.0 + rank).bfloat16().requires_grad_()
    y, _, _ = torch_moe_ops.alltoallv_grouped_matmul(x, weight, "0", 2, send[rank], recv)
    (y * (rank + 1)).sum().backward()
    return [tensor.flatten().tolist() for tensor in (y, x.grad, weight.grad)]


def test_counts_are_swapped_in_the_backward_pass(pool: Pool) -> None:
    """By hand. Each row's gradient is the weight and the code of the rank that multiplied it."""
    first, second = pool(2).run(rank_coded, [[1, 2], [3, 0]])
    assert first == [[3, 33, 36, 39], [3, 8, 8], [1 + 11 + 12 + 13]]
    assert second == [[8, 12], [3, 3, 3], [2 * (2 + 3)]]


def compiled_steps(rank: int, op: str, experts: int, sends: list[Counts]) -> tuple[int, bool]:
    """How often torch compiled, and that every step was that of the eager operator."""
    torch._dynamo.reset()

    def call(x: Tensor, weight: Tensor, send: list[int], recv: list[int]) -> Tensor:
        y, *_ = getattr(torch_moe_ops, op)(x * 2, weight, "0", 2, send, recv)
        return y * y

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    v = Values(torch.bfloat16, seed=rank)
    weight = v(experts, 7, 4)
    for send in sends:
        x, recv = v(sum(send[rank]), 7), recv_counts(send, experts)[rank]
        results = []
        for function in (call, compiled):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
            y = function(*leaves, send[rank], recv)
            (y * (rank + 1)).sum().backward()
            results.append([y, *(leaf.grad for leaf in leaves)])
        assert_same_bits(results[1], results[0])
    return counter.frame_count, True


@pytest.mark.parametrize("op", OPS)
def test_compiled_with_changing_counts(pool: Pool, op: str) -> None:
    """A rank may compile while the other waits. 0 and 1 are compiled by themselves."""
    sends = [[[2, 3], [4, 5]], [[3, 2], [7, 6]], [[5, 9], [2, 2]], [[1, 2], [3, 0]]]
    sends += [[[0, 2], [0, 0]], [[0, 0], [0, 0]], [[4, 2], [3, 8]]]
    for compilations, _ in pool(2).run(compiled_steps, op, 1, sends, timeout=60):
        assert compilations <= 4
    draw = random.Random(0)
    general = [[[draw.randint(2, 9) for _ in range(4)] for _ in range(2)] for _ in range(5)]
    for compilations, _ in pool(2).run(compiled_steps, op, 2, general, timeout=60):
        assert compilations == 1


def compiled_counts_of_the_data(rank: int, op: str, sends: list[Counts]) -> int:
    torch._dynamo.reset()

    def call(x: Tensor, weight: Tensor, send: Tensor, recv: Tensor) -> Tensor:
        return getattr(torch_moe_ops, op)(x, weight, "0", 2, send, recv)[0]

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    v = Values(torch.float32, seed=rank)
    weight = v(2, 7, 4)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        for send in sends:
            recv = recv_counts(send, 2)[rank]
            x, counts = v(sum(send[rank]), 7), [torch.tensor(c) for c in (send[rank], recv)]
            results = []
            for function in (call, compiled):
                leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
                y = function(*leaves, *counts)
                y.backward(Values(torch.float32, seed=5)(*y.shape))
                results.append([y, *(leaf.grad for leaf in leaves)])
            assert_same_bits(results[1], results[0])
    return counter.frame_count


@pytest.mark.parametrize("op", OPS)
def test_compiled_with_counts_of_the_data(pool: Pool, op: str) -> None:
    """The counts are tensors: one graph serves all, also where they are 0 and 1."""
    sends = [[[2, 3, 4, 5], [6, 7, 8, 9]], [[1, 0, 0, 2], [0, 3, 1, 0]], [[0] * 4, [4, 0, 0, 1]]]
    for compilations in pool(2).run(compiled_counts_of_the_data, op, sends, timeout=60):
        assert compilations <= 3


def recomputed(rank: int, call: Call, reentrant: bool) -> tuple[list[Tensor], list[Any]]:
    """The operator last in a checkpointed function: the exchange runs again in the backward."""
    tensors = [tensor.requires_grad_() for tensor in call.inputs(rank)]
    outputs = checkpoint(
        lambda *values: tuple(call.run(rank, values, "0")), *tensors, use_reentrant=reentrant
    )
    torch.autograd.backward(outputs, call.upstream(rank))
    return [out.detach() for out in outputs], [tensor.grad for tensor in tensors]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_recomputation(pool: Pool, op: str, reentrant: bool) -> None:
    call = Call(op, [[2, 0, 1, 4], [0, 3, 5, 1]], shared=True, permute_out=op == FORWARD)
    results = pool(2).run(recomputed, call, reentrant)
    assert_right(call, results)
    for one, other in zip(results, pool(2).run(step, call), strict=True):
        assert_same_bits([*one[0], *one[1]], [*other[0], *other[1]])


def resident() -> float:
    """Megabytes of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 / 2**20


def random_sends(steps: int) -> list[Counts]:
    draw = random.Random(3)
    return [
        [[draw.choice([0, 1, 60, 120]) for _ in range(4)] for _ in range(2)] for _ in range(steps)
    ]


def two_layers(
    weights: list[Tensor], sent: list[int], received: list[int], watched: list[Any], x: Tensor
) -> Tensor:
    y, *_ = torch_moe_ops.alltoallv_grouped_matmul(x, weights[0], "0", 2, sent, received)
    watched.append(weakref.ref(y))
    return torch_moe_ops.grouped_matmul_alltoallv(y, weights[1], "0", 2, received, sent)[0]


def many_steps(rank: int, sends: list[Counts]) -> tuple[float, int]:
    """Growth after the 20th step, and the tensors of a step that outlived it, over all steps.

    Steps are plain, recomputed, or forward only. A leak of one tensor of rows in each step would
    be about 0.1 MB a step.
    """
    v = Values(torch.float32, seed=rank)
    weights = [v(2, 256, 256).requires_grad_(), v(2, 256, 256).requires_grad_()]
    before = 0.0
    watched: list[Any] = []
    gc.disable()
    for number, send in enumerate(sends):
        if number == 20:
            before = resident()
        sent, received = send[rank], recv_counts(send, 2)[rank]
        experts = partial(two_layers, weights, sent, received, watched)
        x = torch.randn(sum(sent), 256, requires_grad=True)
        y = checkpoint(experts, x, use_reentrant=False) if number % 3 == 1 else experts(x)
        watched += [weakref.ref(x), weakref.ref(y)]
        if number % 3 != 2:
            y.backward(torch.ones_like(y))
            for weight in weights:
                weight.grad = None
        del x, y
    growth = resident() - before
    wait_until(lambda: all(ref() is None for ref in watched))
    gc.enable()
    return growth, sum(ref() is not None for ref in watched)


def test_memory_does_not_grow(pool: Pool) -> None:
    for growth, survivors in pool(2).run(many_steps, random_sends(200), timeout=60):
        assert growth < 20
        assert survivors == 0

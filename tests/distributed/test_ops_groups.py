"""Which processes take part: parts of the world, several groups in turn, and exchange_counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_moe_ops
from tests.ops.data import assert_same_bits
from tests.ranks import Ranks

from .calls import FORWARD, REVERSE, Call, assert_right, step

Pool = Callable[[int], Ranks]
PAIR = [[2, 0, 1, 4], [0, 3, 5, 1]]
THREE = [[1, 0, 2], [0, 3, 4], [5, 1, 0]]

# Of this process: made once, since making a group is collective.
_groups: dict[tuple[int, ...], Any] = {}


def group_of(*ranks: int) -> Any:
    """Every process of the world calls it."""
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks))
    return _groups[ranks]


def in_two_halves(rank: int, call: Call, by_name: bool) -> tuple[Any, Any]:
    """Two steps: on ranks 0 and 2 or 1 and 3, each pair by itself; the order of a group counts."""
    halves = [group_of(0, 2), group_of(1, 3)]
    mine = halves[rank % 2]
    group = mine.group_name if by_name else mine
    return dist.get_rank(mine), step(dist.get_rank(mine), call, group=group)


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("op", [FORWARD, REVERSE])
def test_part_of_the_world(pool: Pool, op: str, by_name: bool) -> None:
    call = Call(op, PAIR, shared=True, permute_out=op == FORWARD)
    results = pool(4).run(in_two_halves, call, by_name, timeout=60)
    assert [place for place, _ in results] == [0, 0, 1, 1]
    assert_right(call, [results[0][1], results[2][1]])
    assert_right(call, [results[1][1], results[3][1]])


def in_turn(rank: int, world_call: Call, part_call: Call, rounds: int) -> list[Any]:
    """Rank 2 is in the world alone; the others change between two groups without waiting."""
    part = group_of(0, 1)
    results = []
    for _ in range(rounds):
        if rank < 2:
            results.append(step(rank, part_call, group=part))
        results.append(step(rank, world_call, group=dist.group.WORLD))
        if rank < 2:
            results.append(step(rank, part_call, group=part))
    return results


def test_two_groups_in_turn(pool: Pool) -> None:
    world_call, part_call = Call(FORWARD, THREE), Call(REVERSE, PAIR)
    results = pool(3).run(in_turn, world_call, part_call, 4, timeout=60)
    for start in range(0, 12, 3):
        assert_right(part_call, [results[r][start] for r in (0, 1)])
        assert_right(world_call, [*(results[r][start + 1] for r in (0, 1)), results[2][start // 3]])
        assert_right(part_call, [results[r][start + 2] for r in (0, 1)])


def alone(rank: int, call: Call) -> list[Any]:
    """A group of one process, and no group."""
    groups = [group_of(0), group_of(1)]
    return [step(0, call, group=group) for group in (groups[rank], groups[rank].group_name, "")]


@pytest.mark.parametrize("op", [FORWARD, REVERSE])
def test_group_of_one(pool: Pool, op: str) -> None:
    call = Call(op, [[3, 0, 2]], shared=True, permute_out=op == FORWARD)
    for results in pool(2).run(alone, call, timeout=60):
        assert_right(call, results[:1])
        for outputs, gradients in results[1:]:
            assert_same_bits(outputs, results[0][0])
            assert_same_bits(gradients, results[0][1])


def texts_of_bad_groups(rank: int) -> list[str]:
    """A group that is no more, one of others, and a wrong number of ranks."""
    gone = dist.new_group([0, 1])
    name = gone.group_name
    dist.destroy_process_group(gone)
    of_others = [group_of(0), group_of(1)][1 - rank]
    texts = []
    for group, ep in ((name, 2), (of_others, 1), (dist.group.WORLD, 3)):
        x, weight = torch.zeros(0, 2), torch.zeros(1, 2, 2)
        for op in (FORWARD, REVERSE):
            try:
                getattr(torch_moe_ops, op)(x, weight, group, ep, [0] * ep, [0] * ep)
            except (TypeError, ValueError) as error:
                texts.append(f"{type(error).__name__} {error}".replace(f'"{name}"', "GONE"))
    return texts


def test_bad_groups(pool: Pool) -> None:
    """Refused on each rank by itself, before anything is sent."""
    for texts in pool(2).run(texts_of_bad_groups, timeout=60):
        assert texts[:2] == [
            f"ValueError moe::{op}: group must be the name of a process group of torch.distributed,"
            " got GONE"
            for op in (FORWARD, REVERSE)
        ]
        for text, op in zip(texts[2:4], (FORWARD, REVERSE), strict=True):
            assert text.startswith(f"TypeError moe::{op}: group must be a ProcessGroup or its name")
        assert texts[4:] == [
            f'ValueError moe::{op}: ep_world_size must be the size of group "0" (2), got 3'
            for op in (FORWARD, REVERSE)
        ]


# exchange_counts


def counts_of(rank: int, send: list[list[int]], form: str) -> Any:
    own: Any = send[rank]
    if form != "list":
        own = torch.tensor(own, dtype=getattr(torch, form))
    group = dist.group.WORLD if form == "list" else "0"
    counts = torch_moe_ops.exchange_counts(own, group)
    return counts.send_counts, counts.recv_counts, counts.group, counts.rows_per_expert


@pytest.mark.parametrize("form", ["list", "int32", "int64"])
def test_exchange_counts(pool: Pool, form: str) -> None:
    """recv_counts of rank p: what every rank q sends to the experts of p."""
    results = pool(2).run(counts_of, PAIR, form)
    assert results == [
        ([2, 0, 1, 4], [2, 0, 0, 3], "0", [2, 3, 6, 5]),
        ([0, 3, 5, 1], [1, 4, 5, 1], "0", [2, 3, 6, 5]),
    ]


def test_exchange_counts_of_many_experts(pool: Pool) -> None:
    """More numbers than one message has."""
    send = [[1000 * rank + i for i in range(3 * 500)] for rank in range(3)]
    results = pool(3).run(counts_of, send, "list")
    for p, (sent, received, _, per_expert) in enumerate(results):
        assert sent == send[p]
        assert received == [send[q][p * 500 + j] for q in range(3) for j in range(500)]
        assert per_expert == [send[0][i] + send[1][i] + send[2][i] for i in range(1500)]


def test_exchange_counts_of_no_experts(pool: Pool) -> None:
    assert pool(2).run(counts_of, [[], []], "list") == [([], [], "0", [])] * 2

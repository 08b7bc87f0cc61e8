"""alltoallv_grouped_matmul and grouped_matmul_alltoallv over HCCL: fused, composed, and which.

Each class is a group of several processes: two ranks on the Ascend 950, eight on A3, which has
fused kernels for no fewer, and two on A2, which has none.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch_npu
from torch import Tensor

import torch_moe_ops
from tests.cann.bootstrap import normalised, read_trace
from tests.distributed import definition
from tests.npu import plugin
from tests.npu.hccl import comm_name, start_hccl
from tests.npu.settings import only_in
from tests.ranks import Ranks
from torch_moe_ops import exchange_counts
from torch_moe_ops.nn import MoE

INNER, COLUMNS, SHARED_INNER, SHARED_COLUMNS = 8, 6, 5, 7
FORWARD, REVERSE = "aclnnAlltoAllvGroupedMatMulV2", "aclnnGroupedMatMulAlltoAllvV2"
EXCHANGE = "HcclAlltoAllV"
Counts = list[list[int]]


# ---- data ----------------------------------------------------------------------------------------


def uneven(world: int, experts: int, seed: int = 0) -> Counts:
    """Different everywhere, many of them zero, but every rank sends and receives something."""
    generator = torch.Generator().manual_seed(1000 * world + 10 * experts + seed)
    counts = torch.randint(-3, 5, (world, world * experts), generator=generator).clamp(min=0)
    for rank in range(world):
        counts[rank, ((rank + 1) % world) * experts] += 1 + rank % 3
    return counts.tolist()


def one_sends_nothing(world: int, experts: int) -> Counts:
    counts = uneven(world, experts)
    counts[1] = [0] * (world * experts)
    return counts


def one_receives_nothing(world: int, experts: int) -> Counts:
    counts = uneven(world, experts)
    for row in counts:
        row[:experts] = [0] * experts
    return counts


def equal_totals(world: int, experts: int) -> Counts:
    """Every rank sends and receives as many rows as every other."""
    return [[(r + p) % 2 for p in range(world * experts)] for r in range(world)]


COUNTS: dict[str, Callable[[int, int], Counts]] = {
    "uneven": uneven,
    "one sends nothing": one_sends_nothing,
    "one receives nothing": one_receives_nothing,
    "equal totals": equal_totals,
    "nothing at all": lambda world, experts: [[0] * (world * experts) for _ in range(world)],
}


def whole(*size: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: all sums of products here are exact, in any order and dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, size, generator=generator).to(dtype)


def npu(tensor: Tensor) -> Tensor:
    """A leaf of its own on the device."""
    return tensor.detach().npu().requires_grad_()


def traced(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The calls of CANN in a call of ours, which leaves no descriptor and no executor behind."""
    assert plugin.standin is not None
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace"
        torch.npu.synchronize()
        before = plugin.live(plugin.standin)
        plugin.standin.trace(path)
        call()
        torch.npu.synchronize()
        plugin.standin.trace(None)
        assert plugin.live(plugin.standin) == before
        return read_trace(path)


def apis(call: Callable[[], Any]) -> list[str]:
    return [record["api"] for record in traced(call)]


def fused_calls(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """The calls of fused functions, with addresses as numbers of their first appearance."""
    records = [record for record in traced(call) if "AlltoAllv" in record["api"]]
    return [normalised(record["args"], {}) for record in records]


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double().requires_grad_() for tensor in tensors]


# ---- on every rank -------------------------------------------------------------------------------


def both_ways(
    rank: int, kind: str, experts: int, dtype: torch.dtype, transposed: bool, agree: bool
) -> list[str]:
    """Outputs and gradients of both operators by their definition. Returns the calls of CANN."""
    world = dist.get_world_size()
    ranks = range(world)
    counts = COUNTS[kind](world, experts)
    recv = definition.recv_counts(counts, experts)
    weights = [whole(experts, INNER, COLUMNS, seed=50 + r, dtype=dtype) for r in ranks]
    group: Any = dist.group.WORLD
    if agree:
        exchanged = exchange_counts(torch.tensor(counts[rank]).npu(), group)
        assert (exchanged.send_counts, exchanged.recv_counts) == (counts[rank], recv[rank])
        group = exchanged.group

    def stored(weight: Tensor) -> Tensor:
        return weight.mT.contiguous() if transposed else weight

    def check(forward: bool, function: Callable[..., Any], send: Counts, back: Counts) -> None:
        rows = [whole(sum(send[r]), INNER, seed=r, dtype=dtype) for r in ranks]
        xs, ws = leaves(rows), leaves(weights)
        if forward:
            expected, moved = definition.alltoallv_grouped_matmul(xs, ws, send)
        else:
            expected = definition.grouped_matmul_alltoallv(xs, ws, send)
        grads = [whole(*y.shape, seed=90 + r, dtype=dtype) for r, y in enumerate(expected)]
        torch.autograd.backward(expected, [grad.double() for grad in grads])

        x, w = npu(rows[rank]), npu(stored(weights[rank]))
        call = functools.partial(
            function, x, w, group, world, send[rank], back[rank], trans_gmm_weight=transposed
        )
        y, mm_y, *_ = call()
        y.backward(grads[rank].npu())
        assert torch.equal(y.cpu(), expected[rank].to(dtype))
        assert mm_y.shape == (0,)
        if forward:
            # Apart: its own gradient, though nobody asks for it, would be exchanged by itself.
            with torch.no_grad():
                *_, permuted = call(permute_out_flag=True)
            assert torch.equal(permuted.cpu(), moved[rank].to(dtype))
        assert torch.equal(x.grad.cpu(), xs[rank].grad.to(dtype))
        assert torch.equal(w.grad.cpu(), stored(ws[rank].grad).to(dtype))

    def run() -> None:
        check(True, torch_moe_ops.alltoallv_grouped_matmul, counts, recv)
        check(False, torch_moe_ops.grouped_matmul_alltoallv, recv, counts)

    return apis(run)


def shared_expert(rank: int, rows_per_token: int) -> list[str]:
    """The shared expert's product and gradients, inside and outside the fused kernels' limits."""
    world = dist.get_world_size()
    counts = [[4] * world for _ in range(world)]
    dtype = torch.bfloat16
    tokens = 4 * world // rows_per_token
    shared = whole(tokens, SHARED_INNER, seed=rank, dtype=dtype)
    weight = whole(SHARED_INNER, SHARED_COLUMNS, seed=rank, dtype=dtype)
    grad = whole(tokens, SHARED_COLUMNS, seed=9, dtype=dtype)
    s, m = leaves([shared, weight])
    expected = s @ m
    expected.backward(grad.double())
    group = exchange_counts(counts[rank], dist.group.WORLD).group
    rows = whole(4 * world, INNER, seed=rank, dtype=dtype).npu()
    experts = whole(1, INNER, COLUMNS, seed=rank, dtype=dtype).npu()
    mm_x, mm_weight = npu(shared), npu(weight)

    def run() -> None:
        for function in (
            torch_moe_ops.alltoallv_grouped_matmul,
            torch_moe_ops.grouped_matmul_alltoallv,
        ):
            mm_x.grad = mm_weight.grad = None
            outputs = function(
                rows, experts, group, world, counts[rank], counts[rank],
                mm_x=mm_x, mm_weight=mm_weight,
            )  # fmt: skip
            outputs[1].backward(grad.npu())
            assert torch.equal(outputs[1].cpu(), expected.to(dtype))
            assert torch.equal(mm_x.grad.cpu(), s.grad.to(dtype))
            assert torch.equal(mm_weight.grad.cpu(), m.grad.to(dtype))

    return apis(run)


def same_rows_on_both_paths(rank: int) -> None:
    """What a row holds, and where it lands, does not depend on the path."""
    world = dist.get_world_size()
    counts = uneven(world, 2)
    recv = definition.recv_counts(counts, 2)
    name = dist.group.WORLD.group_name
    x = torch.randn(sum(counts[rank]), INNER).bfloat16().npu()
    w = torch.eye(INNER).bfloat16().repeat(2, 1, 1).npu()
    results = []
    for path in ("fused", "composed"):
        group = f"{name}@{path}"
        y, _, moved = torch_moe_ops.alltoallv_grouped_matmul(
            x, w, group, world, counts[rank], recv[rank], permute_out_flag=True
        )
        z, _ = torch_moe_ops.grouped_matmul_alltoallv(y, w, group, world, recv[rank], counts[rank])
        results.append((y.cpu(), moved.cpu(), z.cpu()))
    for fused, composed in zip(*results, strict=True):
        assert torch.equal(fused.view(torch.int16), composed.view(torch.int16))
    assert torch.equal(results[0][2], x.cpu())


def as_torch_npu_calls(rank: int, transposed: bool) -> None:
    """Argument by argument the same calls as torch_npu's own functions make."""
    world = dist.get_world_size()
    counts = uneven(world, 2)
    for row in counts:
        row[0] += sum(row) % 2
    recv = definition.recv_counts(counts, 2)
    send, back = counts[rank], recv[rank]
    group = exchange_counts(send, dist.group.WORLD).group
    dtype = torch.bfloat16
    x, y = torch.randn(sum(send), INNER), torch.randn(sum(back), INNER)
    w = torch.randn(2, COLUMNS, INNER) if transposed else torch.randn(2, INNER, COLUMNS)
    mm_w = torch.randn(SHARED_COLUMNS, SHARED_INNER)
    mm_w = mm_w if transposed else mm_w.t().contiguous()
    x, y, w, mm_w = (tensor.to(dtype).npu() for tensor in (x, y, w, mm_w))
    mm_x = torch.randn(sum(send) // 2, SHARED_INNER).to(dtype).npu()
    flags = {"trans_gmm_weight": transposed}
    shared = {"mm_x": mm_x, "mm_weight": mm_w, "trans_mm_weight": transposed}
    theirs = {"comm_mode": "ai_cpu"}

    def compare(ours: Callable[[], Any], others: Callable[[], Any]) -> None:
        calls = fused_calls(ours)
        assert len(calls) == 1
        assert calls == fused_calls(others)

    for extra in ({}, shared):
        for permute in (False, True):
            compare(
                lambda extra=extra, permute=permute: torch_moe_ops.alltoallv_grouped_matmul(
                    x, w, group, world, send, back, permute_out_flag=permute, **flags, **extra
                ),
                lambda extra=extra, permute=permute: torch_npu.npu_alltoallv_gmm(
                    x, w, comm_name(), world, send, back,
                    permute_out_flag=permute, **flags, **extra, **theirs,
                ),
            )  # fmt: skip
        compare(
            lambda extra=extra: torch_moe_ops.grouped_matmul_alltoallv(
                y, w, group, world, back, send, **flags, **extra
            ),
            lambda extra=extra: torch_npu.npu_gmm_alltoallv(
                y, w, comm_name(), world, back, send, **flags, **extra, **theirs
            ),
        )


def refusals(rank: int) -> list[str]:
    """The messages of calls that must fail on every rank before anything is exchanged."""
    world = dist.get_world_size()
    x, w, ones = torch.zeros(world, 4).npu(), torch.zeros(1, 4, 4).npu(), [1] * world
    name = dist.group.WORLD.group_name
    wide, wide_w = x.cpu().double().npu(), w.cpu().double().npu()
    calls = [
        lambda: torch_moe_ops.alltoallv_grouped_matmul(wide, wide_w, name, world, ones, ones),
        lambda: torch_moe_ops.alltoallv_grouped_matmul(x, w, "nobody", world, ones, ones),
        lambda: torch_moe_ops.alltoallv_grouped_matmul(x, w.cpu(), name, world, ones, ones),
    ]
    return [message_of(call) for call in calls]


def disagreement(rank: int) -> str:
    """MOE_OPS_CHECK_COUNTS=1: every rank raises, as on the CPU."""
    world = dist.get_world_size()
    os.environ["MOE_OPS_CHECK_COUNTS"] = "1"
    try:
        x, w = torch.zeros(world, 4).npu(), torch.zeros(1, 4, 4).npu()
        recv = [1] * world if rank != 1 else [2] + [1] * (world - 1)
        group = dist.group.WORLD
        return message_of(
            lambda: torch_moe_ops.alltoallv_grouped_matmul(x, w, group, world, [1] * world, recv)
        )
    finally:
        del os.environ["MOE_OPS_CHECK_COUNTS"]


def refused_by_cann(rank: int) -> str:
    """Every rank's phase 1 fails: an error that tells the call, nothing left, then all works."""
    assert plugin.standin is not None
    world = dist.get_world_size()
    ones = [1] * world
    group = exchange_counts(ones, dist.group.WORLD).group
    x = whole(world, INNER, seed=rank, dtype=torch.bfloat16).npu()
    w = whole(1, INNER, COLUMNS, seed=rank, dtype=torch.bfloat16).npu()
    before = plugin.live(plugin.standin)
    plugin.standin.fail(f"phase1:{FORWARD}", 1)
    message = message_of(
        lambda: torch_moe_ops.alltoallv_grouped_matmul(x, w, group, world, ones, ones)
    )
    assert plugin.live(plugin.standin) == before
    plugin.standin.fail(f"phase1:{FORWARD}", 0)
    _, _, moved = torch_moe_ops.alltoallv_grouped_matmul(
        x, w, group, world, ones, ones, permute_out_flag=True
    )
    sent = [whole(world, INNER, seed=r, dtype=torch.bfloat16)[rank] for r in range(world)]
    assert torch.equal(moved.cpu(), torch.stack(sent))
    return message


def layer(rank: int, dtype: torch.dtype) -> list[str]:
    """nn.MoE over the group, against the layer of one process on the CPU."""
    world, tokens = dist.get_world_size(), 24
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_experts": 2 * world, "top_k": 2}
    torch.manual_seed(5)
    alone = MoE(**sizes)
    torch.manual_seed(5)
    spread = MoE(**sizes, ep_group=dist.group.WORLD)
    parts = [torch.randn(tokens, 16) for _ in range(world)]
    xs = [part.clone().requires_grad_() for part in parts]
    expected = alone(torch.cat(xs)).output
    expected.square().sum().backward()

    spread = spread.to(dtype).npu()
    x = npu(parts[rank].to(dtype))

    def step() -> None:
        spread(x).output.float().square().sum().backward()

    called = apis(step)
    local = slice(2 * rank, 2 * rank + 2)
    tolerance = {"rtol": 2e-4, "atol": 2e-4} if dtype == torch.float32 else {"rtol": 1, "atol": 0.5}
    torch.testing.assert_close(x.grad.cpu().float(), xs[rank].grad, **tolerance)
    for name in ("gate_up_proj", "down_proj"):
        found = getattr(spread.experts, name).grad.cpu().float()
        torch.testing.assert_close(found, getattr(alone.experts, name).grad[local], **tolerance)
    return called


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# ---- tests ---------------------------------------------------------------------------------------


@pytest.fixture(scope="class")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    pool = Ranks(request.cls.world, start_hccl)
    yield pool
    pool.close()


def launches(results: list[list[str]]) -> set[str]:
    """The fused functions and the exchanges of rows that were called: the same on all ranks."""
    kinds = [set(names) & {FORWARD, REVERSE, EXCHANGE} for names in results]
    assert all(kind == kinds[0] for kind in kinds)
    return kinds[0]


class Group:
    """What holds in every group."""

    world: int
    has_fused: bool

    def run(self, ranks: Ranks, *args: Any) -> set[str]:
        return launches(ranks.run(both_ways, *args, timeout=60))

    @pytest.mark.parametrize("transposed", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_both_ways(self, ranks: Ranks, dtype: torch.dtype, transposed: bool) -> None:
        for agree in (True, False):
            used = self.run(ranks, "uneven", 2, dtype, transposed, agree)
            assert used == ({FORWARD, REVERSE} if self.has_fused else {EXCHANGE})

    @pytest.mark.parametrize(
        "kind", ["one sends nothing", "one receives nothing", "nothing at all"]
    )
    def test_ranks_without_rows_are_composed(self, ranks: Ranks, kind: str) -> None:
        """CANN would return at once on such a rank, and the others wait for it."""
        for agree in (True, False):
            assert self.run(ranks, kind, 2, torch.bfloat16, False, agree) == {EXCHANGE}

    def test_float32_is_composed(self, ranks: Ranks) -> None:
        assert self.run(ranks, "uneven", 3, torch.float32, False, True) == {EXCHANGE}

    def test_many_experts(self, ranks: Ranks) -> None:
        """Up to 16 a rank in any case, up to 32 if all ranks have as many rows, no more than 32."""
        fused = {FORWARD, REVERSE} if self.has_fused else {EXCHANGE}
        for experts, kind, expected in (
            (16, "uneven", fused),
            (18, "uneven", {EXCHANGE}),
            (18, "equal totals", fused),
            (33, "equal totals", {EXCHANGE}),
        ):
            used = self.run(ranks, kind, experts, torch.float16, False, True)
            assert used == expected, (experts, kind)

    @pytest.mark.parametrize("rows_per_token", [1, 2, 4])
    def test_shared_expert(self, ranks: Ranks, rows_per_token: int) -> None:
        """One row a token is outside the fused kernels' limits: a product beside them."""
        results = ranks.run(shared_expert, rows_per_token, timeout=60)
        assert launches(results) == ({FORWARD, REVERSE} if self.has_fused else {EXCHANGE})

    def test_layer(self, ranks: Ranks) -> None:
        assert launches(ranks.run(layer, torch.float32, timeout=60)) == {EXCHANGE}
        used = launches(ranks.run(layer, torch.bfloat16, timeout=60))
        assert used == ({FORWARD, REVERSE} if self.has_fused else {EXCHANGE})

    def test_refusals(self, ranks: Ranks) -> None:
        for wide, unknown, elsewhere in ranks.run(refusals):
            assert wide.startswith("NotImplementedError: moe::alltoallv_grouped_matmul: gmm_x must")
            assert unknown == (
                "ValueError: moe::alltoallv_grouped_matmul: group must be the name of a process "
                'group of torch.distributed, got "nobody"'
            )
            assert "gmm_weight must be on the device of gmm_x" in elsewhere

    def test_counts_are_compared_on_request(self, ranks: Ranks) -> None:
        assert set(ranks.run(disagreement)) == {
            "ValueError: moe::alltoallv_grouped_matmul: send_counts must equal the recv_counts of "
            "the other rank, got 1 rows from rank 0 to rank 1 for its expert 0, where rank 1 "
            "expects 2"
        }


class Fused(Group):
    has_fused = True

    def test_same_rows_on_both_paths(self, ranks: Ranks) -> None:
        ranks.run(same_rows_on_both_paths)

    def test_what_cann_refuses(self, ranks: Ranks) -> None:
        for message in ranks.run(refused_by_cann):
            assert message.startswith(
                f"RuntimeError: moe::alltoallv_grouped_matmul: {FORWARD} failed in phase 1 "
                "(GetWorkspaceSize): 161002 ACLNN_ERR_PARAM_INVALID"
            )
            assert f"  epWorldSize: {self.world}\n" in message

    @pytest.mark.parametrize("transposed", [False, True])
    def test_calls_are_those_of_torch_npu(self, ranks: Ranks, transposed: bool) -> None:
        ranks.run(as_torch_npu_calls, transposed)


@only_in(4)
class TestTwoRanksOn950(Fused):
    world = 2


@only_in(3)
class TestEightRanksOnA3(Fused):
    world = 8


@only_in(0)
class TestTwoRanksOnA2(Group):
    world = 2
    has_fused = False

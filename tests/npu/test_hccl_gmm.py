"""The fused communication operators of the stand-in for CANN compute what CANN documents.

Through torch_npu's own functions, in groups of several processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch_npu
from torch import Tensor

from tests.distributed import definition
from tests.npu.hccl import comm_name, start_hccl
from tests.npu.settings import only_in
from tests.ranks import Ranks

EXPERTS, INNER, COLUMNS, SHARED_INNER, SHARED_COLUMNS = 3, 8, 5, 7, 6


# ---- what the operators are to compute -----------------------------------------------------------


def whole(*size: int, seed: int) -> Tensor:
    """Small whole numbers: sums of their products are exact in float32 in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, size, generator=generator).float()


def uneven(world: int) -> definition.Counts:
    """Every rank sends and receives something, in all different amounts, some of them 0."""
    generator = torch.Generator().manual_seed(world)
    counts = torch.randint(0, 4, (world, world * EXPERTS), generator=generator)
    counts[:, 0] = 0
    counts[0, EXPERTS : 2 * EXPERTS] = 0
    counts[:, -1] += counts.sum(1) % 2  # even totals: mm_x has half the rows
    return counts.tolist()


def product(rows: Tensor, matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.float() @ matrix.float()).to(dtype)


def in_float32(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.float() for tensor in tensors]


# ---- on every rank -------------------------------------------------------------------------------


def fused(rank: int, world: int, dtype: torch.dtype, trans: bool, mode: str | None) -> None:
    """Both operators with a shared expert, by their definition."""
    counts = uneven(world)
    received = definition.recv_counts(counts, EXPERTS)
    send, recv = counts[rank], received[rank]
    rows = [whole(sum(counts[r]), INNER, seed=r).to(dtype) for r in range(world)]
    weights = [whole(EXPERTS, INNER, COLUMNS, seed=100 + r).to(dtype) for r in range(world)]
    shared = whole(sum(send) // 2, SHARED_INNER, seed=rank).to(dtype)
    shared_weight = whole(SHARED_INNER, SHARED_COLUMNS, seed=rank).to(dtype)

    def stored(weight: Tensor) -> Tensor:
        return weight.mT.contiguous().npu() if trans else weight.npu()

    options = {
        "mm_x": shared.npu(),
        "mm_weight": stored(shared_weight),
        "trans_gmm_weight": trans,
        "trans_mm_weight": trans,
        "comm_mode": mode,
    }
    y, mm_y, permuted = torch_npu.npu_alltoallv_gmm(
        rows[rank].npu(),
        stored(weights[rank]),
        comm_name(),
        world,
        send,
        recv,
        permute_out_flag=True,
        **options,
    )
    expected, expected_rows = definition.alltoallv_grouped_matmul(
        in_float32(rows), in_float32(weights), counts
    )
    assert torch.equal(permuted.cpu(), expected_rows[rank].to(dtype))
    assert torch.equal(y.cpu(), expected[rank].to(dtype))
    assert torch.equal(mm_y.cpu(), product(shared, shared_weight, dtype))

    back = [whole(sum(received[r]), INNER, seed=r).to(dtype) for r in range(world)]
    y, mm_y = torch_npu.npu_gmm_alltoallv(
        back[rank].npu(), stored(weights[rank]), comm_name(), world, recv, send, **options
    )
    expected = definition.grouped_matmul_alltoallv(in_float32(back), in_float32(weights), received)
    assert torch.equal(y.cpu(), expected[rank].to(dtype))
    assert torch.equal(mm_y.cpu(), product(shared, shared_weight, dtype))


def there_and_back(rank: int, world: int) -> None:
    """With identity weights all bits of a row come back, and nothing else is returned."""
    counts = uneven(world)
    received = definition.recv_counts(counts, EXPERTS)
    send, recv = counts[rank], received[rank]
    rows = torch.randn(sum(send), INNER, generator=torch.Generator().manual_seed(rank)).bfloat16()
    weight = torch.eye(INNER).bfloat16().repeat(EXPERTS, 1, 1).npu()
    name = comm_name()
    for _ in range(3):
        y, mm_y, permuted = torch_npu.npu_alltoallv_gmm(rows.npu(), weight, name, world, send, recv)
        assert mm_y is None or mm_y.numel() == 0
        assert permuted is None or permuted.numel() == 0
        back, mm_y = torch_npu.npu_gmm_alltoallv(y, weight, name, world, recv, send)
        assert torch.equal(back.cpu(), rows)


def worked_example(rank: int) -> list[int]:
    """Two experts a rank: the numbers of the rows in permuteOut."""
    counts = [[1, 2, 0, 1], [3, 0, 2, 1]]
    recv = [[1, 2, 3, 0], [0, 1, 2, 1]][rank]
    start = [0, 10][rank]
    rows = torch.arange(start, start + sum(counts[rank])).half().view(-1, 1)
    weight = torch.ones(2, 1, 1).half().npu()
    _, _, permuted = torch_npu.npu_alltoallv_gmm(
        rows.npu(), weight, comm_name(), 2, counts[rank], recv, permute_out_flag=True
    )
    return permuted.cpu().flatten().int().tolist()


def without_rows(rank: int) -> str:
    """Rank 1 sends two rows to rank 0 and gets none."""
    name = comm_name()
    send, recv = [([1, 0], [1, 2]), ([2, 0], [0, 0])][rank]
    rows = torch.ones(sum(send), 4).half().npu()
    weight = torch.ones(1, 4, 4).half().npu()
    torch_npu.npu_alltoallv_gmm(rows, weight, name, 2, send, recv)
    if rank == 1:
        return "returned"
    torch.npu.synchronize()
    return "received"


def counts_that_differ(rank: int) -> None:
    send = [[1, 1], [1, 1]][rank]
    recv = [[1, 1], [2, 1]][rank]
    rows = torch.ones(2, 4).half().npu()
    weight = torch.ones(1, 4, 4).half().npu()
    torch_npu.npu_alltoallv_gmm(rows, weight, comm_name(), 2, send, recv)
    torch.npu.synchronize()


# ---- tests of several ranks ----------------------------------------------------------------------


@pytest.fixture(scope="class")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    pool = Ranks(request.cls.world, start_hccl)
    yield pool
    pool.close()


class Fused:
    """The same on two groups."""

    world: int
    modes: tuple[str, ...]

    @pytest.mark.parametrize("trans", [False, True])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_values(self, ranks: Ranks, dtype: torch.dtype, trans: bool) -> None:
        ranks.run(fused, self.world, dtype, trans, None, timeout=60)

    def test_comm_mode(self, ranks: Ranks) -> None:
        for mode in self.modes:
            ranks.run(fused, self.world, torch.bfloat16, False, mode, timeout=60)

    def test_there_and_back(self, ranks: Ranks) -> None:
        ranks.run(there_and_back, self.world, timeout=60)


@only_in(4)
class TestTwoRanksOn950(Fused):
    world = 2
    modes = ("ai_cpu", "ccu")

    def test_worked_example(self, ranks: Ranks) -> None:
        assert ranks.run(worked_example) == [[0, 10, 11, 12, 1, 2], [13, 14, 3, 15]]


@only_in(3)
class TestEightRanksOnA3(Fused):
    world = 8
    modes = ("ai_cpu",)


@only_in(4)
class TestGroupsThatFail:
    def test_a_rank_without_rows_launches_nothing(self, capfd: pytest.CaptureFixture[str]) -> None:
        pool = Ranks(2, start_hccl, {"CANN_STANDIN_HCCL_TIMEOUT": "2"})
        pool.run(worked_example)  # makes the communicator, for which a rank waits too
        outcomes = pool.outcomes(without_rows)
        assert outcomes[1].value == "returned"
        assert outcomes[0].error == "the process ended"
        error = capfd.readouterr().err
        assert "waited 2 s for rank 1, which did not send: AlltoAllvGroupedMatMul" in error

    def test_counts_that_differ(self, capfd: pytest.CaptureFixture[str]) -> None:
        outcomes = Ranks(2, start_hccl).outcomes(counts_that_differ)
        assert outcomes[1].error == "the process ended"
        error = capfd.readouterr().err
        assert "rows of 8 bytes for the experts 2; it sent: AlltoAllvGroupedMatMul" in error

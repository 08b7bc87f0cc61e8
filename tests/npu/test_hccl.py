"""torch.distributed with the backend "hccl" on the stand-in for CANN: other tests build on it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.cann.bootstrap import Standin, read_trace
from tests.npu import plugin
from tests.npu.hccl import comm_name, start_hccl
from tests.npu.settings import only_in
from tests.ranks import Ranks

RANKS = 2
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SHARED = Path("/dev/shm")
in_one_setting = only_in(4)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(RANKS, start_hccl)
    yield pool
    pool.close()


def rows(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers, different on every rank and exact in every dtype."""
    return (torch.arange(count) + 10 * (rank + 1)).to(dtype)


# ---- on every rank -------------------------------------------------------------------------------


def reductions(rank: int, dtype: torch.dtype) -> None:
    contributions = torch.stack([rows(r, 5, dtype) for r in range(RANKS)])
    expected = {
        dist.ReduceOp.SUM: contributions.sum(0),
        dist.ReduceOp.PRODUCT: contributions.float().prod(0),
        dist.ReduceOp.MAX: contributions.amax(0),
        dist.ReduceOp.MIN: contributions.amin(0),
    }
    for op, result in expected.items():
        mine = contributions[rank].npu()
        dist.all_reduce(mine, op)
        assert torch.equal(mine.cpu(), result.to(dtype))
    mine = contributions[rank].npu()
    dist.reduce(mine, dst=1)
    if rank == 1:
        assert torch.equal(mine.cpu(), contributions.sum(0).to(dtype))


def half_sums(rank: int) -> None:
    """bfloat16 has steps of 2 from 256 on: rounded to nearest, ties to even."""
    mine = torch.tensor([256.0, 256.0] if rank == 0 else [1.0, 1.5]).bfloat16().npu()
    dist.all_reduce(mine)
    assert mine.cpu().tolist() == [256.0, 258.0]


def copies(rank: int, dtype: torch.dtype) -> None:
    everyone = [rows(r, 6, dtype) for r in range(RANKS)]
    mine = everyone[rank].npu()
    gathered = torch.empty(RANKS * 6, dtype=dtype).npu()
    dist.all_gather_into_tensor(gathered, mine)
    assert torch.equal(gathered.cpu(), torch.cat(everyone))

    scattered = torch.empty(3, dtype=dtype).npu()
    dist.reduce_scatter_tensor(scattered, mine)
    assert torch.equal(scattered.cpu(), sum(everyone)[3 * rank : 3 * rank + 3])

    dist.broadcast(mine, src=1)
    assert torch.equal(mine.cpu(), everyone[1])

    part = torch.empty(6, dtype=dtype).npu()
    dist.scatter(part, [row.npu() for row in everyone] if rank == 0 else None, src=0)
    assert torch.equal(part.cpu(), everyone[rank])

    objects: list[object] = [None] * RANKS
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]


def all_to_all(rank: int, dtype: torch.dtype, splits: list[list[int]], trace: str) -> list[str]:
    """``splits[a][b]`` rows of 3 go from a to b. Which collectives were called."""
    assert plugin.standin is not None
    sent = splits[rank]
    received = [row[rank] for row in splits]
    inputs = [rows(r, 3 * sum(splits[r]), dtype).view(-1, 3) for r in range(RANKS)]
    expected = [inputs[r].split(splits[r])[rank] for r in range(RANKS)]
    output = torch.empty(sum(received), 3, dtype=dtype).npu()
    path = f"{trace}-{rank}"
    plugin.standin.trace(path)
    dist.all_to_all_single(output, inputs[rank].npu(), received, sent)
    torch.npu.synchronize()
    plugin.standin.trace(None)
    assert torch.equal(output.cpu(), torch.cat(expected))
    calls = [call for call in read_trace(path) if call["api"].startswith("Hccl")]
    assert all(call["phase2"]["launched"] for call in calls)
    return [call["api"] for call in calls]


def even_all_to_all(rank: int) -> None:
    output = torch.empty(4).npu()
    dist.all_to_all_single(output, rows(rank, 4, torch.float32).npu())
    everyone = [rows(r, 4, torch.float32) for r in range(RANKS)]
    assert torch.equal(output.cpu(), torch.cat([e[2 * rank : 2 * rank + 2] for e in everyone]))


def messages(rank: int) -> None:
    data = rows(0, 4, torch.bfloat16)
    if rank == 0:
        dist.send(data.npu(), dst=1)
        dist.send((2 * data).npu(), dst=1)
    else:
        got = torch.empty_like(data).npu()
        for factor in (1, 2):
            dist.recv(got, src=0)
            assert torch.equal(got.cpu(), factor * data)
    peer = 1 - rank
    got = torch.empty(3).npu()
    batch = [
        dist.P2POp(dist.isend, rows(rank, 3, torch.float32).npu(), peer),
        dist.P2POp(dist.irecv, got, peer),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    assert torch.equal(got.cpu(), rows(peer, 3, torch.float32))


def groups(rank: int) -> list[str]:
    """A second group has a communicator of its own; works may be waited for later."""
    other = dist.new_group([1, 0])
    first, second = torch.ones(1000).npu(), torch.ones(7).npu()
    works = [
        dist.all_reduce(first, async_op=True),
        dist.all_reduce(second, group=other, async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()
    assert first.cpu().eq(RANKS).all()
    assert second.cpu().eq(RANKS).all()
    dist.barrier()
    names = [comm_name(), comm_name(other)]
    dist.destroy_process_group(other)
    return names


def ddp(rank: int) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

    batches = torch.randn(RANKS, 5, 4, generator=torch.Generator().manual_seed(4))
    parallel = DistributedDataParallel(model().npu())
    parallel(batches[rank].npu()).square().mean().backward()
    alone = model()
    alone(batches.flatten(0, 1)).square().mean().backward()
    for got, expected in zip(parallel.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), expected.grad)


def mismatch(rank: int) -> None:
    dist.all_reduce(torch.ones(3 + rank).npu())
    torch.npu.synchronize()


def absent(rank: int) -> str:
    if rank == 1:
        dist.all_reduce(torch.ones(3).npu())
        torch.npu.synchronize()
    return "here"


# ---- tests ---------------------------------------------------------------------------------------


@in_one_setting
class TestCollectives:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_reductions(self, ranks: Ranks, dtype: torch.dtype) -> None:
        ranks.run(reductions, dtype)

    def test_bfloat16_is_rounded_to_nearest(self, ranks: Ranks) -> None:
        ranks.run(half_sums)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_copies(self, ranks: Ranks, dtype: torch.dtype) -> None:
        ranks.run(copies, dtype)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "splits",
        [[[2, 2], [2, 2]], [[1, 4], [3, 2]], [[0, 2], [0, 5]], [[0, 0], [0, 1]], [[0, 0], [0, 0]]],
        ids=str,
    )
    def test_all_to_all(
        self, ranks: Ranks, dtype: torch.dtype, splits: list[list[int]], tmp_path: Path
    ) -> None:
        calls = ranks.run(all_to_all, dtype, splits, str(tmp_path / "trace"))
        assert calls == [["HcclAlltoAllV"]] * RANKS

    def test_even_all_to_all(self, ranks: Ranks) -> None:
        ranks.run(even_all_to_all)

    def test_messages(self, ranks: Ranks) -> None:
        ranks.run(messages)

    def test_groups(self, ranks: Ranks) -> None:
        first, second = ranks.run(groups)
        assert first == second
        assert len(set(first)) == 2

    def test_ddp(self, ranks: Ranks) -> None:
        ranks.run(ddp)


@in_one_setting
class TestFailures:
    """Where devices would hang, the stand-in ends the process and says why."""

    def test_nothing_is_said_otherwise(self, capfd: pytest.CaptureFixture[str]) -> None:
        pool = Ranks(RANKS, start_hccl)
        pool.run(reductions, torch.float32)
        pool.close()
        assert "CANN stand-in" not in capfd.readouterr().err

    def test_counts_that_differ(self, capfd: pytest.CaptureFixture[str]) -> None:
        outcomes = Ranks(RANKS, start_hccl).outcomes(mismatch)
        assert any(outcome.error == "the process ended" for outcome in outcomes)
        error = capfd.readouterr().err
        assert "HcclAllReduce sum, 3 x float32" in error
        assert "HcclAllReduce sum, 4 x float32" in error

    def test_a_peer_that_does_not_come(self, capfd: pytest.CaptureFixture[str]) -> None:
        pool = Ranks(RANKS, start_hccl, {"CANN_STANDIN_HCCL_TIMEOUT": "1.5"})
        pool.run(reductions, torch.float32)  # makes the communicator, for which a rank waits too
        outcomes = pool.outcomes(absent)
        assert outcomes[0].value == "here"
        assert outcomes[1].error == "the process ended"
        error = capfd.readouterr().err
        assert "rank 1 of group_name_0 waited 1.5 s for rank 0, which did not send" in error


class TestFiles:
    """Without torch: libhccl.so by itself, a group of one."""

    def directories(self) -> set[Path]:
        return set(SHARED.glob("cann_standin-*"))

    def test_a_communicator_removes_its_directory(self, standin: Standin) -> None:
        hccl = ctypes.CDLL(str(standin.directory / "libhccl.so"))
        root = ctypes.create_string_buffer(4108)
        assert hccl.HcclGetRootInfo(root) == 0
        ours = SHARED / f"cann_standin-{root.value.decode()}"
        comm = ctypes.c_void_p()
        assert hccl.HcclCommInitRootInfo(1, root, 0, ctypes.byref(comm)) == 0
        assert ours.is_dir()
        assert hccl.HcclCommDestroy(comm) == 0
        assert not ours.exists()

    def test_stale_directories_are_cleared(self, standin: Standin) -> None:
        stale = SHARED / "cann_standin-of-a-killed-process"
        stale.mkdir(exist_ok=True)
        (stale / "collective-1-0-1").touch()
        hccl = ctypes.CDLL(str(standin.directory / "libhccl.so"))
        root = ctypes.create_string_buffer(4108)
        assert hccl.HcclGetRootInfo(root) == 0
        assert not stale.exists()
        comm = ctypes.c_void_p()
        assert hccl.HcclCommInitRootInfo(1, root, 0, ctypes.byref(comm)) == 0
        assert hccl.HcclCommDestroy(comm) == 0

    def test_an_unknown_root_is_refused(self, standin: Standin) -> None:
        hccl = ctypes.CDLL(str(standin.directory / "libhccl.so"))
        root = ctypes.create_string_buffer(b"nothing", 4108)
        assert hccl.HcclCommInitRootInfo(1, root, 0, ctypes.byref(ctypes.c_void_p())) != 0

"""alltoallv_grouped_matmul and grouped_matmul_alltoallv on two gloo processes of one thread.

"ours, unchecked" is with MOE_OPS_CHECK_COUNTS=0. The limits move as many bytes: gloo's own
exchange, and a copy within one process. Small calls are timed many at a time.
"""

import multiprocessing
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import naive
import torch_moe_ops
from harness import NAIVE, OURS, Call, Case, Problem
from inputs import Size, uneven_counts

RANKS = 2
FORWARD, REVERSE = "alltoallv_grouped_matmul", "grouped_matmul_alltoallv"
UNCHECKED = f"{OURS}, unchecked"
GLOO, COPY = "all_to_all_single", "copy_"


@dataclass(frozen=True)
class Exchange:
    """M rows of size K on each of two ranks, E experts there, each (K, N); so many calls."""

    M: int
    K: int
    N: int
    E: int
    calls: int = 1


SHAPES: dict[Size, list[Exchange]] = {
    "full": [Exchange(8192, 2048, 64, 8), Exchange(4096, 1024, 1024, 8)],
    "quick": [Exchange(2048, 1024, 64, 8)],
    "tiny": [Exchange(9, 8, 12, 2)],
}
SMALL = Exchange(8, 16, 16, 2, calls=50)


def cases(size: Size) -> list[Case]:
    pair = _Pair()  # lives as long as the cases

    def case(name: str, op: str, shape: Exchange, dtype: torch.dtype) -> Case:
        return Case(name, _sizes(shape), dtype, lambda: _prepare(pair, op, shape, dtype))

    rows = [(op, op, shape) for op in (FORWARD, REVERSE) for shape in SHAPES[size]]
    rows += [(f"latency: {op}", op, SMALL) for op in (FORWARD, REVERSE)]
    return [case(*row, dtype) for row in rows for dtype in (torch.float32, torch.bfloat16)]


def _sizes(shape: Exchange) -> dict[str, int]:
    return {name: size for name, size in asdict(shape).items() if (name, size) != ("calls", 1)}


def _prepare(pair: "_Pair", op: str, shape: Exchange, dtype: torch.dtype) -> Problem:
    pair.ask("prepare", op, shape, dtype)

    def call(name: str) -> Call:
        results = iter([True])  # the first call is to be compared; later ones send nothing back
        return lambda: pair.ask("run", name, next(results, False))

    moved = 2 * shape.calls * shape.M * (shape.K if op == FORWARD else shape.N) * dtype.itemsize
    return Problem(
        {name: call(name) for name in (OURS, NAIVE, UNCHECKED)},
        {name: call(name) for name in (GLOO, COPY)},
        moved,
        "GB/s",
    )


# The processes


class _Pair:
    """Two processes that do the same at once. They end with this object."""

    def ask(self, request: str, *args: Any) -> Any:
        """What rank 0 answers, once both are done."""
        for pipe in self._pipes:
            pipe.send((request, args))
        answers = [pipe.recv() for pipe in self._pipes]
        return answers[0]

    @cached_property
    def _pipes(self) -> list[Connection]:
        """Starts them. The harness's own process has no process group."""
        context = multiprocessing.get_context("spawn")
        directory = tempfile.TemporaryDirectory()
        ours = []
        for rank in range(RANKS):
            here, there = context.Pipe()
            store = str(Path(directory.name) / "store")
            context.Process(target=_serve, args=(rank, store, there), daemon=True).start()
            there.close()
            ours.append(here)
        weakref.finalize(self, _close, ours, directory)
        return ours


def _close(pipes: list[Connection], directory: "tempfile.TemporaryDirectory[str]") -> None:
    for pipe in pipes:
        pipe.close()
    directory.cleanup()


def _serve(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    calls: dict[str, Call] = {}
    repeats = 1
    while True:
        try:
            request, args = pipe.recv()
        except EOFError:
            os._exit(0)  # no farewell between the ranks
        answer = None
        if request == "prepare":
            op, shape, dtype = args
            calls, repeats = _Rank(rank, op, shape, dtype).contenders(), shape.calls
        else:
            name, wanted = args
            results = [calls[name]() for _ in range(repeats)]
            answer = results[-1] if wanted else None
        pipe.send(answer)


# What one of them does


@contextmanager
def _without_comparison() -> Iterator[None]:
    os.environ["MOE_OPS_CHECK_COUNTS"] = "0"
    try:
        yield
    finally:
        del os.environ["MOE_OPS_CHECK_COUNTS"]


class _Rank:
    """The inputs of a rank."""

    def __init__(self, rank: int, op: str, shape: Exchange, dtype: torch.dtype) -> None:
        self.op = op
        counts = torch.stack([uneven_counts(shape.M, RANKS * shape.E) for _ in range(RANKS)])
        dist.broadcast(counts, 0)  # both know what both send
        self.send = counts[rank].tolist()
        first = rank * shape.E
        self.recv = counts[:, first : first + shape.E].flatten().tolist()
        if op == REVERSE:
            self.send, self.recv = self.recv, self.send
        self.x = torch.randn(sum(self.send), shape.K).to(dtype)
        self.weight = torch.randn(shape.E, shape.K, shape.N).to(dtype)
        self.experts = shape.E
        self.travelling = torch.randn(sum(self.send), shape.K if op == FORWARD else shape.N)
        self.travelling = self.travelling.to(dtype)

    def contenders(self) -> dict[str, Call]:
        def unchecked() -> Tensor:
            with _without_comparison():
                return self.ours()

        by_hand = self.forward_by_hand if self.op == FORWARD else self.reverse_by_hand
        arrived = self.travelling.new_empty(sum(self.recv), self.travelling.shape[1])
        copied = torch.empty_like(self.travelling)
        return {
            OURS: self.ours,
            UNCHECKED: unchecked,
            NAIVE: by_hand,
            GLOO: lambda: self.exchange(arrived, self.travelling),
            COPY: lambda: copied.copy_(self.travelling),
        }

    def ours(self) -> Tensor:
        op: Callable[..., tuple[Tensor, ...]] = getattr(torch_moe_ops, self.op)
        return op(self.x, self.weight, "0", RANKS, self.send, self.recv)[0]

    def exchange(self, received: Tensor, sent: Tensor) -> Tensor:
        dist.all_to_all_single(received, sent, self._by_rank(self.recv), self._by_rank(self.send))
        return received

    def forward_by_hand(self) -> Tensor:
        received = self.x.new_empty(sum(self.recv), self.x.shape[1])
        self.exchange(received, self.x)
        rows = received.index_select(0, self._expert_major(self.recv))
        return naive.grouped_matmul(rows, self.weight, self._by_expert(self.recv))

    def reverse_by_hand(self) -> Tensor:
        products = naive.grouped_matmul(self.x, self.weight, self._by_expert(self.send))
        sent = products.index_select(0, self._expert_major(self.send).argsort())
        return self.exchange(products.new_empty(sum(self.recv), products.shape[1]), sent)

    def _by_rank(self, counts: list[int]) -> list[int]:
        return [sum(counts[r * self.experts :][: self.experts]) for r in range(RANKS)]

    def _by_expert(self, counts: list[int]) -> Tensor:
        return torch.tensor(counts).view(RANKS, self.experts).sum(0)

    def _expert_major(self, counts: list[int]) -> Tensor:
        """For rows sorted by expert, where they are among rows sorted by rank."""
        expert_of_pair = torch.arange(self.experts).repeat(RANKS)
        return expert_of_pair.repeat_interleave(torch.tensor(counts)).argsort(stable=True)

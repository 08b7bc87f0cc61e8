"""A pool of processes, one for each rank of a process group, that run functions of the tests.

Starting a process and importing torch takes seconds, so tests share a pool:

    def ranks_sum(rank, number): ...        # at the top level of a test module

    assert ranks.run(ranks_sum, 7) == [8, 8]

Every call has a time limit. A rank that exceeds it prints where it stands and ends: a hang is a
failure, and the next call starts a new pool.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
# Of the process group: what a rank waits for its peers before it raises.
GROUP_TIMEOUT = 15.0
# Until all processes have imported what they need and are in the group, on a busy machine.
START_TIMEOUT = 180.0


def start_gloo(rank: int, world_size: int, store: str) -> None:
    """Joins the default process group on the CPU."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
    )


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: ``error`` is empty if it returned ``value``."""

    value: Any = None
    error: str = ""


class RankFailedError(AssertionError):
    """A rank raised, hung or died."""


class Ranks:
    """``world_size`` processes; ``start(rank, world_size, store)`` runs first in each of them.

    ``env`` is added to their environment. ``store`` is the path of a file for torch's FileStore.
    """

    def __init__(
        self,
        world_size: int,
        start: Callable[[int, int, str], None] = start_gloo,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.world_size = world_size
        self._start = start
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 20) -> list[Any]:
        """``function(rank, *args)`` on every rank; its results. All of them have to return."""
        outcomes = self.outcomes(function, *args, timeout=timeout)
        failed = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error]
        if failed:
            raise RankFailedError("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], *args: Any, timeout: float = 20
    ) -> list[Outcome]:
        """The same for ranks that may fail: one that died or hung has an error that says so."""
        if not self._processes:
            self._open()
        task = pickle.dumps((_address(function), args, timeout))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(task)
        outcomes: dict[int, Outcome] = {}
        waiting = dict(zip(self._pipes, range(self.world_size), strict=True))
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout + 5)
        while waiting:
            left = (deadline - datetime.datetime.now()).total_seconds()
            ready = wait(list(waiting), max(left, 0))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                outcomes[waiting.pop(pipe)] = _receive(pipe)
        for rank in waiting.values():
            outcomes[rank] = Outcome(error=f"no answer within {timeout} s")
        if any(outcome.error for outcome in outcomes.values()):
            self.close()  # collectives that were cut short leave the group unusable
        return [outcomes[rank] for rank in range(self.world_size)]

    def pids(self) -> list[int]:
        """The processes, for tests that stop or kill one."""
        if not self._processes:
            self._open()
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends all processes. The next call starts new ones."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes, self._pipes = [], []
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _open(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        store = str(Path(self._directory.name) / "store")
        for rank in range(self.world_size):
            ours, theirs = Pipe()
            arguments = [str(theirs.fileno()), str(rank), str(self.world_size), store]
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.ranks", *arguments, _address(self._start)],
                    cwd=ROOT,
                    env=self._env,
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()
            self._pipes.append(ours)
        for rank, pipe in enumerate(self._pipes):
            started = _receive(pipe) if pipe.poll(START_TIMEOUT) else Outcome(error="no answer")
            if started.error:
                self.close()
                raise RankFailedError(f"rank {rank} did not start: {started.error}")


def _address(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _find(address: str) -> Callable[..., Any]:
    module, name = address.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def _receive(pipe: Connection) -> Outcome:
    try:
        outcome: Outcome = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        return Outcome(error="the process ended")
    return outcome


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Returns once it holds, or after so long: gloo's threads keep what they sent for a moment."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def _serve(pipe: Connection) -> None:
    """Runs what comes through the pipe until it closes."""
    rank, world_size, store, start = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
    _find(start)(rank, world_size, store)
    pipe.send_bytes(pickle.dumps(Outcome()))
    while True:
        try:
            address, args, timeout = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            os.kill(os.getpid(), signal.SIGKILL)  # no destructor that waits for a peer
        faulthandler.dump_traceback_later(timeout, exit=True)
        try:
            outcome = Outcome(_find(address)(rank, *args))
        except Exception:
            outcome = Outcome(error=traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    # Unpickling finds the classes of this module under its own name.
    importlib.import_module("tests.ranks")._serve(Connection(int(sys.argv[1])))

"""Ranks that disagree, raise, stop or die: every rank gets an error, soon; nobody hangs.

Each test ends by itself: the processes have the time limit of Ranks.run.
"""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_moe_ops
from tests.ranks import Ranks

from .calls import FORWARD, REVERSE, Call, assert_right, step

Pool = Callable[[int], Ranks]
OPS = [FORWARD, REVERSE]
SEND = [[1, 2, 3, 4], [5, 6, 7, 8]]
RECV = [[1, 2, 5, 6], [3, 4, 7, 8]]
# Of the group, where a test waits for it.
IMPATIENT = 2.0


@pytest.fixture
def impatient() -> Iterator[Ranks]:
    """Processes of one test, which leaves their group unusable."""
    ranks = Ranks(2)
    ranks.run(become_impatient)
    yield ranks
    ranks.close()


def become_impatient(rank: int) -> None:
    """Not from the start: on a busy machine it takes longer to find each other."""
    torch_moe_ops.exchange_counts([0] * dist.get_world_size(), "0")
    limit = datetime.timedelta(seconds=IMPATIENT)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)


def text_of(function: Callable[[], Any]) -> str:
    """What it raised, with the class."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def call(rank: int, op: str, **changes: Any) -> Any:
    """A call that fits the other rank's, but for what is changed."""
    x_rows = sum(changes.get("send_counts", SEND[rank]))
    dtype, hidden, columns = changes.pop("dtype", torch.float32), *changes.pop("sizes", (4, 3))
    arguments = {
        "gmm_x": torch.ones(x_rows, hidden, dtype=dtype),
        "gmm_weight": torch.ones(len(SEND[0]) // 2, hidden, columns, dtype=dtype),
        "group": "0",
        "ep_world_size": 2,
        "send_counts": SEND[rank],
        "recv_counts": RECV[rank],
    }
    return getattr(torch_moe_ops, op)(**{**arguments, **changes})


# Disagreement


DISAGREEMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "too little is sent": (
        {"send_counts": [5, 5, 7, 8]},
        "send_counts must equal the recv_counts of the other rank, got 5 rows from rank 1 to rank "
        "0 for its expert 1, where rank 0 expects 6",
    ),
    "too much is expected": (
        {"recv_counts": [3, 5, 7, 8]},
        "send_counts must equal the recv_counts of the other rank, got 4 rows from rank 0 to rank "
        "1 for its expert 1, where rank 1 expects 5",
    ),
    "the same in all, for other experts": (
        {"send_counts": [6, 5, 7, 8]},
        "send_counts must equal the recv_counts of the other rank, got 6 rows from rank 1 to rank "
        "0 for its expert 0, where rank 0 expects 5",
    ),
    "at odds with itself": (
        {"send_counts": [5, 6, 8, 7]},
        "send_counts must equal the recv_counts of the other rank, got 8 rows from rank 1 to rank "
        "1 for its expert 0, where rank 1 expects 7",
    ),
    "experts": (
        {
            "send_counts": [5, 6],
            "recv_counts": [5, 6],
            "gmm_weight": torch.ones(1, 4, 3),
        },
        "the ranks must agree, got 2 experts per rank on rank 0 and 1 experts per rank on rank 1",
    ),
    "hundreds of experts": (
        {
            "send_counts": [0] * 800,
            "recv_counts": [0] * 800,
            "gmm_weight": torch.ones(400, 4, 3),
        },
        "the ranks must agree, got 2 experts per rank on rank 0 and 400 experts per rank on rank 1",
    ),
    "dtype": (
        {"dtype": torch.bfloat16},
        "the ranks must agree, got dtype float32 on rank 0 and dtype bfloat16 on rank 1",
    ),
}


def disagree(rank: int, op: str, changes: dict[str, Any], good: Call) -> tuple[str, Any]:
    """Rank 1 makes another call; then both make a good one."""
    text = text_of(lambda: call(rank, op, **(changes if rank == 1 else {})))
    return text, step(rank, good)


@pytest.mark.parametrize("name", DISAGREEMENTS)
@pytest.mark.parametrize("op", OPS)
def test_disagreement(pool: Pool, op: str, name: str) -> None:
    """The same text on every rank, and the group serves on."""
    changes, text = DISAGREEMENTS[name]
    good = Call(op, SEND)
    results = pool(2).run(disagree, op, changes, good)
    assert [result[0] for result in results] == [f"ValueError moe::{op}: {text}"] * 2
    assert_right(good, [result[1] for result in results])


@pytest.mark.parametrize(("op", "sizes"), [(FORWARD, (6, 3)), (REVERSE, (4, 6))])
def test_disagreement_about_columns(pool: Pool, op: str, sizes: tuple[int, int]) -> None:
    """Of what travels: the rows there, the products on the way back."""
    usual = 4 if op == FORWARD else 3
    good = Call(op, SEND)
    results = pool(2).run(disagree, op, {"sizes": sizes}, good)
    assert [result[0] for result in results] == [
        f"ValueError moe::{op}: the ranks must agree, got rows of {usual} elements on rank 0 and "
        "rows of 6 elements on rank 1"
    ] * 2
    assert_right(good, [result[1] for result in results])


@pytest.mark.parametrize(("op", "sizes"), [(FORWARD, (4, 6)), (REVERSE, (6, 3))])
def test_other_columns_may_differ(pool: Pool, op: str, sizes: tuple[int, int]) -> None:
    """What does not travel is each rank's own affair."""
    texts = [result[0] for result in pool(2).run(disagree, op, {"sizes": sizes}, Call(op, SEND))]
    assert texts == ["nothing"] * 2


def different_operators(rank: int, ops: list[str], good: Call) -> tuple[str, Any]:
    def run() -> None:
        if ops[rank] == "exchange_counts":
            torch_moe_ops.exchange_counts(SEND[rank], "0")
        elif ops[rank] == "_exchange_expert_rows":
            rows = torch.ones(sum(SEND[rank]), 4)
            args = (rows, "0", 2, SEND[rank], RECV[rank])
            torch.ops.moe._exchange_expert_rows(*args, to_experts=True)
        else:
            call(rank, ops[rank])

    return text_of(run), step(rank, good)


@pytest.mark.parametrize(
    "ops",
    [
        [FORWARD, REVERSE],
        [REVERSE, FORWARD],
        ["exchange_counts", FORWARD],
        [REVERSE, "_exchange_expert_rows"],
        ["_exchange_expert_rows", "exchange_counts"],
    ],
)
def test_different_operators(pool: Pool, ops: list[str]) -> None:
    good = Call(FORWARD, SEND)
    results = pool(2).run(different_operators, ops, good)
    assert [result[0] for result in results] == [
        f"ValueError moe::{op}: the ranks must agree, got the operator {ops[0]} on rank 0 and the "
        f"operator {ops[1]} on rank 1"
        for op in ops
    ]
    assert_right(good, [result[1] for result in results])


UNEQUAL = (
    "ValueError moe::alltoallv_grouped_matmul: send_counts must equal the recv_counts of the other "
    "rank, got"
)


def disagree_among_three(rank: int, send: list[list[int]], recv: list[list[int]]) -> str:
    x, weight = torch.ones(sum(send[rank]), 2), torch.ones(1, 2, 2)
    run = torch_moe_ops.alltoallv_grouped_matmul
    return text_of(lambda: run(x, weight, "0", 3, send[rank], recv[rank]))


def test_the_first_disagreement_of_three_ranks_is_named(pool: Pool) -> None:
    """The rank that is not concerned raises too."""
    send = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    recv = [[1, 4, 0], [2, 5, 8], [3, 0, 9]]  # two are wrong
    assert pool(3).run(disagree_among_three, send, recv) == [
        f"{UNEQUAL} 6 rows from rank 1 to rank 2 for its expert 0, where rank 2 expects 0"
    ] * len(send)


def many_experts(rank: int) -> str:
    """Only the last count of the last rank is wrong, in the second part of what is exchanged."""
    counts = [[0] * 600, [0] * 600]
    recv = [0] * 600
    if rank == 1:
        recv[-1] = 1
    x, weight = torch.ones(0, 2), torch.ones(300, 2, 2)
    run = torch_moe_ops.alltoallv_grouped_matmul
    return text_of(lambda: run(x, weight, "0", 2, counts[rank], recv))


def test_disagreement_about_one_of_many_experts(pool: Pool) -> None:
    text = f"{UNEQUAL} 0 rows from rank 1 to rank 1 for its expert 299, where rank 1 expects 1"
    assert pool(2).run(many_experts) == [text, text]


def counts_of_different_lengths(rank: int) -> tuple[str, str, Any]:
    """exchange_counts: even lengths that differ; one that no number of experts gives."""
    lengths = text_of(lambda: torch_moe_ops.exchange_counts([1] * (2 + 2 * rank), "0"))
    odd = text_of(lambda: torch_moe_ops.exchange_counts([1, 2, 3], "0"))
    return lengths, odd, torch_moe_ops.exchange_counts(SEND[rank], "0").recv_counts


def test_exchange_counts_of_different_lengths(pool: Pool) -> None:
    lengths = (
        "ValueError moe::exchange_counts: the ranks must agree, got 1 experts per rank on rank 0 "
        "and 2 experts per rank on rank 1"
    )
    odd = (
        "ValueError moe::exchange_counts: number of send_counts must be a multiple of the number "
        "of ranks (2), got 3"
    )
    assert pool(2).run(counts_of_different_lengths) == [(lengths, odd, r) for r in RECV]


@pytest.mark.parametrize(
    ("counts", "text"),
    [([1, -2], "-2 at position 1"), ([2**31, 0], "2147483648 at position 0")],
)
def test_exchange_counts_of_bad_counts(counts: list[int], text: str) -> None:
    with pytest.raises(ValueError, match=f"got {text}$") as caught:
        torch_moe_ops.exchange_counts(counts, "")
    assert str(caught.value) == (
        f"moe::exchange_counts: send_counts must be between 0 and 2147483647, got {text}"
    )


def num_exchanges(rank: int, op: str, switch: str, changes: dict[str, Any]) -> tuple[str, int]:
    """What a call raises, and its collectives, with MOE_OPS_CHECK_COUNTS set to ``switch``."""
    os.environ["MOE_OPS_CHECK_COUNTS"] = switch
    try:
        with torch.profiler.profile() as profile:
            text = text_of(lambda: call(rank, op, **(changes if rank == 1 else {})))
    finally:
        del os.environ["MOE_OPS_CHECK_COUNTS"]
    names = [event.name for event in profile.events()]
    return text, sum("gloo:all_to_all" in name for name in names)


@pytest.mark.parametrize("op", OPS)
def test_comparison_can_be_left_out(pool: Pool, op: str) -> None:
    """Then the exchange of rows is the only one, and what only it would find stays unknown."""
    changes = {"send_counts": [6, 5, 7, 8]}  # as many rows for the other rank
    assert pool(2).run(num_exchanges, op, "0", changes) == [("nothing", 1)] * 2
    assert pool(2).run(num_exchanges, op, "1", {}) == [("nothing", 2)] * 2
    for text, exchanges in pool(2).run(num_exchanges, op, "1", changes):
        assert "must equal the recv_counts" in text
        assert exchanges == 1


# Failure


def failed(op: str) -> str:
    return (
        f'RuntimeError moe::{op}: the exchange over group "0" failed; a rank died, raised, or did '
        "not call the operator: "
    )


def local_error(rank: int, op: str) -> tuple[str, float]:
    """Rank 1's argument is bad in itself: it raises at once."""
    start = time.monotonic()
    changes = {"gmm_weight": torch.ones(2, 5, 3)} if rank == 1 else {}
    return text_of(lambda: call(rank, op, **changes)), time.monotonic() - start


@pytest.mark.parametrize("op", OPS)
def test_local_error(impatient: Ranks, op: str) -> None:
    (waited, seconds), (raised, at_once) = impatient.run(local_error, op)
    assert raised == (
        f"ValueError moe::{op}: gmm_weight must have size 4 in dimension 1, got shape [2, 5, 3]"
    )
    assert at_once < 1
    assert waited.startswith(failed(op))
    assert seconds < IMPATIENT + 3


def error_between(rank: int, op: str) -> tuple[str, str]:
    """Rank 1's program fails between its forward and its backward pass."""
    x = torch.ones(sum(SEND[rank]), 4, requires_grad=True)
    y = call(rank, op, gmm_x=x)[0]
    if rank == 1:
        return "nothing", text_of(lambda: y.view(-1, 7777))
    return text_of(lambda: y.sum().backward()), ""


@pytest.mark.parametrize("op", OPS)
def test_error_between_forward_and_backward(impatient: Ranks, op: str) -> None:
    (waited, _), (_, raised) = impatient.run(error_between, op)
    assert waited.startswith(failed(OPS[1 - OPS.index(op)]))  # each is the other's gradient
    assert raised.startswith("RuntimeError shape '[-1, 7777]' is invalid")


def die(rank: int, op: str, where: str) -> tuple[str, float]:
    """Rank 1 dies after its forward pass, or at any point of many steps."""
    x = torch.ones(sum(SEND[rank]), 4, requires_grad=True)
    if rank == 1 and where == "anywhere":
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()

    def steps() -> None:
        while True:
            y = call(rank, op, gmm_x=x)[0]
            if rank == 1 and where == "between":
                os.kill(os.getpid(), signal.SIGKILL)
            y.sum().backward()

    return text_of(steps), time.monotonic() - start


@pytest.mark.parametrize(("op", "where"), [(FORWARD, "between"), (REVERSE, "anywhere")])
def test_death_of_a_rank(impatient: Ranks, op: str, where: str) -> None:
    alive, dead = impatient.outcomes(die, op, where)
    assert dead.error == "the process ended"
    assert alive.error == ""
    text, seconds = alive.value
    assert text.startswith((failed(FORWARD), failed(REVERSE)))
    assert seconds < IMPATIENT + 3


def pause(rank: int, call: Call, seconds: float) -> tuple[Any, float]:
    """Rank 1 stops as a whole before its step."""
    start = time.monotonic()
    if rank == 1:
        wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    return step(rank, call), time.monotonic() - start


def test_pause_of_a_rank(pool: Pool) -> None:
    """Shorter than the timeout: the others wait, and nothing is lost."""
    good = Call(FORWARD, SEND, shared=True, permute_out=True)
    results = pool(2).run(pause, good, 2)
    assert_right(good, [result[0] for result in results])
    for _, seconds in results:
        assert 1.9 < seconds < 10


def other_threads(rank: int, op: str) -> int:
    """Rank 1 comes a second late. How often a thread of rank 0 gets its turn meanwhile."""
    if rank == 1:
        time.sleep(1)
    turns, done = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not done.wait(0.01):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    call(rank, op)
    done.set()
    thread.join()
    return turns


@pytest.mark.parametrize("op", OPS)
def test_other_threads_go_on_while_a_rank_waits(pool: Pool, op: str) -> None:
    """Data loaders and watchdogs, that is: waiting does not hold Python's lock."""
    assert pool(2).run(other_threads, op)[0] > 20

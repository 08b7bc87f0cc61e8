"""Measures an operator against other ways to compute the same, and against the machine's limit.

All contenders of a case take turns in one process, in an order drawn anew for every round, so that
noise and a changing clock meet them alike. Before anything is timed, their results must agree: a
naive form that differs from ours stops the run. Peers are other people's packages: one that is
missing, fails, or computes something else is left out, and the record says why.
"""

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from limits import Call as Call  # for those that make Problems
from limits import copies, matmul

Record = dict[str, Any]

OURS = "ours"
NAIVE = "naive"
COMPILED = "compile"

# Largest accepted difference between contenders, as a share of the largest value. The naive forms
# round products and sums of 16-bit numbers in between; a row in the wrong place differs by about 1.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}


@dataclass(frozen=True)
class Problem:
    """Ways to do one piece of work.

    Attributes:
        contenders: Calls that return the same values (a tensor or a tuple of tensors); one of them
            is named ``OURS``, one ``NAIVE``.
        limits: Calls that do as much work as the machine can. The fastest of them counts.
        work: Bytes moved or floating-point operations, if the work is one of these.
        unit: "GB/s" or "GFLOP/s".
        peers: Builders of further contenders, of packages that need not be there. Their calls
            return the first outputs of ours, at least one.
        compilable: Whether ``torch.compile`` of the naive form makes sense: not where its control
            flow depends on values.
    """

    contenders: Mapping[str, Call]
    limits: Mapping[str, Call]
    work: int | None = None
    unit: str | None = None
    peers: Mapping[str, Callable[[], Call]] = field(default_factory=dict)
    compilable: bool = False


@dataclass(frozen=True)
class Case:
    """One row of the table. Nothing is allocated before ``prepare`` is called."""

    op: str
    shape: Mapping[str, int]
    dtype: torch.dtype
    prepare: Callable[[], Problem]

    def __str__(self) -> str:
        return f"{self.op} {shape_label(self.shape)} {dtype_label(self.dtype)}"


@dataclass(frozen=True)
class Budget:
    """How long to measure.

    Attributes:
        rounds: Samples of each contender at most.
        seconds: Time after which a contender gets no more samples. It gets ``MIN_SAMPLES`` anyway.
        sample_ms: Short calls are repeated until one sample takes about this long.
        compiled: Dtypes in which the naive form takes part compiled as well: compiling takes 10
            seconds and more for each shape.
    """

    rounds: int
    seconds: float
    sample_ms: float
    compiled: Sequence[torch.dtype] = ()


MIN_SAMPLES = 3


def moving(
    num_bytes: int,
    *,
    ours: Call,
    naive: Call,
    peers: Mapping[str, Callable[[], Call]] | None = None,
    compilable: bool = True,
) -> Problem:
    """A problem whose limit is to copy: ``num_bytes`` counts what is read and what is written."""
    contenders = {OURS: ours, NAIVE: naive}
    return Problem(contenders, copies(num_bytes), num_bytes, "GB/s", peers or {}, compilable)


def multiplying(
    m: int,
    k: int,
    n: int,
    dtype: torch.dtype,
    *,
    ours: Call,
    naive: Call,
    peers: Mapping[str, Callable[[], Call]] | None = None,
) -> Problem:
    """A problem whose limit is one matrix product of the same size."""
    # torch multiplies float16 slower than float32 on many processors: there float32 is the limit.
    dtypes = {dtype, torch.float32} if dtype == torch.float16 else {dtype}
    limits = {f"mm {dtype_label(dtype)}": matmul(m, k, n, dtype) for dtype in dtypes}
    contenders = {OURS: ours, NAIVE: naive}
    return Problem(contenders, limits, 2 * m * k * n, "GFLOP/s", peers or {})


def measure(case: Case, budget: Budget) -> Record:
    """Runs a case.

    Returns:
        A record that can be stored as JSON; times are in milliseconds.

    Raises:
        ValueError: The contenders do not compute the same.
    """
    torch.manual_seed(0)
    problem = case.prepare()
    tolerance = TOLERANCE[case.dtype]
    ours = _as_tuple(problem.contenders[OURS]())
    check_values(str(case), problem.contenders, ours, tolerance)
    peers, skipped = _usable_peers(_all_peers(problem, case, budget), ours, tolerance)
    del ours
    contenders = {**problem.contenders, **peers}
    times = _take_turns({**contenders, **problem.limits}, budget)
    return {
        "op": case.op,
        "shape": dict(case.shape),
        "dtype": dtype_label(case.dtype),
        "work": problem.work,
        "unit": problem.unit,
        "times": {name: times[name] for name in contenders},
        "limits": {name: times[name] for name in problem.limits},
        "skipped": skipped,
    }


def check_values(
    label: str, contenders: Mapping[str, Call], ours: tuple[Tensor, ...], tolerance: float
) -> None:
    """Raises ValueError unless every contender returns what ours does."""
    for name in contenders.keys() - {OURS}:
        theirs = _as_tuple(contenders[name]())
        if len(theirs) != len(ours):
            raise ValueError(f"{label}: {name} has {len(theirs)} outputs, ours has {len(ours)}")
        if fault := _disagreement(ours, theirs, tolerance):
            raise ValueError(f"{label}: {name}: {fault}")


def _all_peers(problem: Problem, case: Case, budget: Budget) -> dict[str, Callable[[], Call]]:
    peers = dict(problem.peers)
    if problem.compilable and case.dtype in budget.compiled:
        peers[COMPILED] = lambda: _compile(problem.contenders[NAIVE])
    return peers


def _compile(call: Call) -> Call:
    # Forgetting what came before makes every case the first one, with its sizes as constants.
    torch.compiler.reset()
    return torch.compile(call, dynamic=False)


def _usable_peers(
    builders: Mapping[str, Callable[[], Call]], ours: tuple[Tensor, ...], tolerance: float
) -> tuple[dict[str, Call], dict[str, str]]:
    """The peers that compute the same as ours, and for each other one the reason."""
    usable: dict[str, Call] = {}
    skipped: dict[str, str] = {}
    for name, build in builders.items():
        try:
            call = build()
            fault = _disagreement(ours, _as_tuple(call()), tolerance)
        except Exception as error:  # whatever goes wrong in other people's code
            fault = _in_one_line(error)
        if fault:
            skipped[name] = fault
        else:
            usable[name] = call
    return usable, skipped


def _in_one_line(error: Exception) -> str:
    first_line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


def _disagreement(
    ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], tolerance: float
) -> str | None:
    """What is wrong about the outputs of a contender, of which there may be fewer than of ours."""
    if not theirs:
        return "it has no outputs"
    for position, (actual, expected) in enumerate(zip(ours, theirs, strict=False)):
        error = _difference(actual, expected)
        if not error <= tolerance:  # also where it is NaN
            return (
                f"output {position} differs from ours by {error:.3g} of the largest value, "
                f"accepted is {tolerance:.3g}"
            )
    return None


def dtype_label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shape_label(shape: Mapping[str, int]) -> str:
    return " ".join(f"{letter}{size}" for letter, size in shape.items())


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference as a share of the largest expected value; for integers 0 or infinity."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return math.inf
    if actual.numel() == 0 or not actual.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else math.inf
    largest = expected.abs().max().item()
    difference = (actual.float() - expected.float()).abs().max().item()
    return 0.0 if difference == 0 else difference / max(largest, 1e-30)


def _take_turns(calls: Mapping[str, Call], budget: Budget) -> dict[str, Record]:
    """Warm calls up, then time them in turns."""
    repeats = {name: _repeats(call, budget.sample_ms) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    shuffle = random.Random(0).shuffle
    gc.collect()
    gc.disable()
    try:
        for _ in range(max(budget.rounds, MIN_SAMPLES)):
            shuffle(order)
            for name in order:
                spent = sum(samples[name]) * repeats[name] / 1e3
                if spent < budget.seconds or len(samples[name]) < MIN_SAMPLES:
                    samples[name].append(_sample(calls[name], repeats[name]))
    finally:
        gc.enable()
    return {name: _summary(samples[name], repeats[name]) for name in calls}


def _repeats(call: Call, sample_ms: float) -> int:
    warm_up = _sample(call, 1)
    return 1 if warm_up > sample_ms else max(1, round(sample_ms / _sample(call, 1)))


def _sample(call: Call, repeats: int) -> float:
    """Milliseconds per call. The results are freed within the time, as a user pays for that too."""
    start = time.perf_counter_ns()
    for _ in range(repeats):
        call()
    return (time.perf_counter_ns() - start) / repeats / 1e6


def _summary(samples: list[float], repeats: int) -> Record:
    lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return {
        "median": median,
        "lower_quartile": lower,
        "upper_quartile": upper,
        "best": min(samples),
        "samples": len(samples),
        "calls_per_sample": repeats,
    }

"""Measures an operator against other ways to compute the same, and against the machine's limit.

All contenders of a case take turns in one process, in an order drawn anew for every round, so that
noise and a changing clock meet them alike. Before anything is timed, their results must agree.
"""

import ctypes
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
Record = dict[str, Any]

OURS = "ours"
NAIVE = "naive"

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
    """

    contenders: Mapping[str, Call]
    limits: Mapping[str, Call]
    work: int | None = None
    unit: str | None = None


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
    """

    rounds: int
    seconds: float
    sample_ms: float


MIN_SAMPLES = 3


def moving(num_bytes: int, *, ours: Call, naive: Call) -> Problem:
    """A problem whose limit is to copy: ``num_bytes`` counts what is read and what is written."""
    return Problem({OURS: ours, NAIVE: naive}, _copies(num_bytes), num_bytes, "GB/s")


def multiplying(m: int, k: int, n: int, dtype: torch.dtype, *, ours: Call, naive: Call) -> Problem:
    """A problem whose limit is one matrix product of the same size."""
    # torch multiplies float16 slower than float32 on many processors: there float32 is the limit.
    dtypes = {dtype, torch.float32} if dtype == torch.float16 else {dtype}
    limits = {f"mm {dtype_label(dtype)}": _matmul(m, k, n, dtype) for dtype in dtypes}
    return Problem({OURS: ours, NAIVE: naive}, limits, 2 * m * k * n, "GFLOP/s")


def measure(case: Case, budget: Budget) -> Record:
    """Runs a case.

    Returns:
        A record that can be stored as JSON; times are in milliseconds.

    Raises:
        ValueError: The contenders do not compute the same.
    """
    torch.manual_seed(0)
    problem = case.prepare()
    check_values(str(case), problem.contenders, TOLERANCE[case.dtype])
    times = _take_turns({**problem.contenders, **problem.limits}, budget)
    return {
        "op": case.op,
        "shape": dict(case.shape),
        "dtype": dtype_label(case.dtype),
        "work": problem.work,
        "unit": problem.unit,
        "times": {name: times[name] for name in problem.contenders},
        "limits": {name: times[name] for name in problem.limits},
    }


def check_values(label: str, contenders: Mapping[str, Call], tolerance: float) -> None:
    """Raises ValueError unless every contender returns what ours does."""
    ours = _as_tuple(contenders[OURS]())
    for name in contenders.keys() - {OURS}:
        theirs = _as_tuple(contenders[name]())
        if len(theirs) != len(ours):
            raise ValueError(f"{label}: {name} has {len(theirs)} outputs, ours has {len(ours)}")
        for position, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
            error = _difference(actual, expected)
            if not error <= tolerance:  # also where it is NaN
                raise ValueError(
                    f"{label}: output {position} of ours differs from {name} by {error:.3g} of the "
                    f"largest value, accepted is {tolerance:.3g}"
                )


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


def _copies(num_bytes: int) -> dict[str, Call]:
    """Ways to copy half as many bytes, which read and write ``num_bytes`` in all."""
    source = torch.ones(max(num_bytes // 2, 1), dtype=torch.uint8)
    target = torch.empty_like(source)
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads)
    part = -(-source.numel() // threads)
    parts = list(zip(target.split(part), source.split(part), strict=True))

    def copy_part(pair: tuple[Tensor, Tensor]) -> None:
        to, origin = pair
        ctypes.memmove(to.data_ptr(), origin.data_ptr(), to.numel())

    # The C library writes large blocks past the caches, torch does not.
    return {
        "copy_": lambda: target.copy_(source),
        "memmove": lambda: list(pool.map(copy_part, parts)),
    }


def _matmul(m: int, k: int, n: int, dtype: torch.dtype) -> Call:
    # The right factor is stored transposed: the layout in which no dtype is slow.
    left, right = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype).t()
    out = torch.empty(m, n, dtype=dtype)
    return lambda: torch.mm(left, right, out=out)

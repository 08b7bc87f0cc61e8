"""Reading stored measurements: what tables, plots, targets and comparisons need to know of a row.

A file holds runs, each measured in one process with one number of threads and one allocator::

    {"format": 2, "size": "full", "runs": [{"environment": {...}, "rows": [...]}], "memory": {...}}

A row is what :func:`harness.measure` returns, with the name of its bench; ``memory`` is what
peak_memory.py adds. Times are in milliseconds.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness import NAIVE, OURS, shape_label

FORMAT = 2

Results = dict[str, Any]
Row = Mapping[str, Any]


def empty(size: str) -> Results:
    """A file without runs."""
    return {"format": FORMAT, "size": size, "runs": []}


def load(path: Path) -> Results:
    """Raises ValueError if the file is not one of ours."""
    results = json.loads(path.read_text())
    if not isinstance(results, dict) or results.get("format") != FORMAT:
        raise ValueError(f"{path}: must be a file of format {FORMAT}, written by run.py")
    return results


def store(results: Results, path: Path) -> None:
    """Writes the file anew."""
    path.write_text(json.dumps(results, indent=1) + "\n")


def label(row: Row) -> str:
    """Operator, shape and dtype."""
    return f"{row['op']} {shape_label(row['shape'])} {row['dtype']}"


def setting(run: Mapping[str, Any]) -> str:
    """What distinguishes the runs of one file."""
    facts = run["environment"]
    allocator = "memory kept" if keeps_memory(run) else "system allocator"
    return f"{facts['threads']} {'thread' if facts['threads'] == 1 else 'threads'}, {allocator}"


def keeps_memory(run: Mapping[str, Any]) -> bool:
    """Whether freed memory stayed in the process, so that no page fault is in the times."""
    return "MALLOC_MMAP_MAX_=0" in run["environment"]["allocator"]


def ours(row: Row) -> float:
    """Our median."""
    return float(row["times"][OURS]["median"])


def gain(row: Row) -> float:
    """How many times faster we are than the naive form."""
    return float(row["times"][NAIVE]["median"]) / ours(row)


def best_rival(row: Row) -> tuple[str, float]:
    """The fastest of the naive form and all peers, and how many times faster than it we are."""
    medians = {
        name: summary["median"]
        for name, summary in row["times"].items()
        if not name.startswith(OURS)  # other ways to call ours
    }
    name = min(medians, key=lambda name: medians[name])
    return name, medians[name] / ours(row)


def share_of_limit(row: Row) -> tuple[str, float]:
    """The fastest of the machine's limits, and its time as a share of ours."""
    limits = row["limits"]
    name = min(limits, key=lambda name: limits[name]["median"])
    return name, limits[name]["median"] / ours(row)


def keeps_promise(row: Row) -> bool:
    """Whether a row of ``memory`` is within what is promised, if anything is."""
    return row["promised"] is None or row["extra"][OURS] <= row["promised"]


def geometric_mean(values: Iterable[float]) -> float:
    """Of one value at least."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))

"""The Markdown table of a stored measurement: `python benchmarks/table.py RESULTS.json`."""

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import NAIVE, OURS, shape_label


def markdown(results: dict[str, Any]) -> str:
    """Environment and table.

    Args:
        results: What run.py stores.
    """
    return f"{_environment(results['environment'])}\n\n{_table(results['rows'])}"


def slower_than_naive(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The rows in which our operator takes longer than the naive form, one line each."""
    return [
        f"{row['op']} {shape_label(row['shape'])} {row['dtype']}: {_gain(row):.2f}x"
        for row in rows
        if _gain(row) < 1
    ]


def _environment(facts: dict[str, Any]) -> str:
    git = f" ({facts['git']})" if facts["git"] else ""
    return (
        f"{facts['cpu']} ({facts['capability']}), {facts['threads']} threads on {facts['cores']} "
        f"cores; torch {facts['torch']}, torch_moe_ops {facts['torch_moe_ops']}{git}; "
        f"allocator: {facts['allocator']}; load average before: {facts['load_average']}.\n"
        "Times are medians in milliseconds ± half the interquartile range; the last column is the "
        "time of the machine's limit as a share of ours."
    )


def _table(rows: list[dict[str, Any]]) -> str:
    # Whoever was measured in any row has a column.
    names = list(dict.fromkeys(name for row in rows for name in row["times"]))
    head = ["op", "shape", "dtype", *(f"{name} ms" for name in names)]
    head += ["times faster than naive", "rate", "share of limit"]
    lines = [head, ["---"] * 3 + ["---:"] * (len(head) - 3)]
    lines += [_cells(row, names) for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict[str, Any], names: list[str]) -> list[str]:
    times = [_time(row["times"].get(name)) for name in names]
    start = [row["op"], shape_label(row["shape"]), row["dtype"]]
    return [*start, *times, f"{_gain(row):.2f}", *_rates(row)]


def _rates(row: dict[str, Any]) -> tuple[str, str]:
    ours = row["times"][OURS]["median"]
    limit = min(row["limits"], key=lambda name: row["limits"][name]["median"])
    share = row["limits"][limit]["median"] / ours
    # Bytes per millisecond are millionths of GB/s, and so for operations.
    rate = f"{_digits(row['work'] / ours / 1e6, 3)} {row['unit']}" if row["unit"] else "-"
    return rate, f"{share:.0%} of {limit}"


def _gain(row: dict[str, Any]) -> float:
    times = row["times"]
    return times[NAIVE]["median"] / times[OURS]["median"]


def _time(summary: dict[str, Any] | None) -> str:
    if summary is None:
        return "-"
    spread = (summary["upper_quartile"] - summary["lower_quartile"]) / 2
    return f"{_digits(summary['median'], 3)} ± {_digits(spread, 1)}"


def _digits(value: float, digits: int) -> str:
    """At least so many significant digits, never in powers of ten."""
    if value == 0:
        return "0"
    return f"{value:.{max(digits - 1 - math.floor(math.log10(value)), 0)}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON file written by run.py")
    arguments = parser.parse_args()
    print(markdown(json.loads(arguments.results.read_text())))


if __name__ == "__main__":
    main()

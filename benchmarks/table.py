"""The Markdown tables of a stored measurement: `python benchmarks/table.py RESULTS.json`.

One section for each run, in it one table for each bench; a last section for memory. A number in
bold misses its target (targets.py). `--summary` prints one line for each operator instead, and
`--targets` what is met and what is missed.
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import results
import targets
from harness import COMPILED, NAIVE, OURS, shape_label
from targets import BEST, SHARE

EXPLANATION = (
    "Times are medians in milliseconds ± half the interquartile range. The last columns say how "
    "many times faster ours is than the naive form and than the best of naive form and peers, how "
    "much it moves or computes in a second, how long the machine's limits take, and the time of "
    "the best of them as a share of ours. "
    "**Bold**: misses its target."
)


def markdown(stored: results.Results) -> str:
    """All tables.

    Args:
        stored: What run.py stores.
    """
    sections = [EXPLANATION, *(_section(run) for run in stored["runs"])]
    if "memory" in stored:
        sections.append(_memory(stored["memory"]))
    return "\n\n".join(sections)


def summary(stored: results.Results) -> str:
    """For each run a line for each operator, with the range over its shapes and dtypes."""
    head = ["operator", "rows", "over naive", "over best", "share of limit"]
    parts = []
    for run in stored["runs"]:
        by_op: dict[str, list[results.Row]] = {}
        for row in run["rows"]:
            by_op.setdefault(row["op"], []).append(row)
        body = [
            [
                *(op, str(len(rows))),
                _range([results.gain(row) for row in rows]),
                _range([results.best_rival(row)[1] for row in rows]),
                _range([results.share_of_limit(row)[1] for row in rows]),
            ]
            for op, rows in by_op.items()
        ]
        title = f"## {_capitalized(results.setting(run))}"
        parts += [title, _environment(run["environment"]), _as_markdown(head, body, names=1)]
    return "\n\n".join(parts)


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} - {high}"


def _section(run: Mapping[str, Any]) -> str:
    rows = run["rows"]
    benches = dict.fromkeys(row["bench"] for row in rows)
    tables = [
        f"### {bench}, {results.setting(run)}\n\n"
        + _table([row for row in rows if row["bench"] == bench], run)
        for bench in benches
    ]
    parts = [f"## {_capitalized(results.setting(run))}", _environment(run["environment"])]
    return "\n\n".join([*parts, *tables, *_left_out(rows)])


def _environment(facts: Mapping[str, Any]) -> str:
    git = f" ({facts['git']})" if facts["git"] else ""
    peers = ", ".join(f"{name} {version}" for name, version in facts["peers"].items() if version)
    return (
        f"{facts['cpu']} ({facts['capability']}), {facts['cores']} cores; torch {facts['torch']}, "
        f"torch_moe_ops {facts['torch_moe_ops']}{git}; peers: {peers or 'none'}; allocator: "
        f"{facts['allocator']}; load average before: {facts['load_average']}."
    )


def _left_out(rows: list[results.Row]) -> list[str]:
    reasons = dict.fromkeys(
        f"* {name}: {reason}" for row in rows for name, reason in row["skipped"].items()
    )
    return ["Left out:\n\n" + "\n".join(reasons)] if reasons else []


def _table(rows: list[results.Row], run: Mapping[str, Any]) -> str:
    # Whoever was measured in any row has a column.
    found = dict.fromkeys(name for row in rows for name in row["times"])
    names = sorted(found, key=lambda name: name == COMPILED)
    head = ["op", "shape", "dtype", *(f"{name} ms" for name in names)]
    head += ["over naive", "over best", "rate", "limits ms", "share of limit"]
    return _as_markdown(head, [_cells(row, names, run) for row in rows])


def _as_markdown(head: list[str], body: list[list[str]], names: int = 3) -> str:
    """The first columns are ``names``, the others numbers."""
    lines = [head, ["---"] * names + ["---:"] * (len(head) - names), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: results.Row, names: list[str], run: Mapping[str, Any]) -> list[str]:
    missed = {verdict.measure for verdict in targets.judge(row, run) if not verdict.met}

    def mark(measure: str, text: str) -> str:
        return f"**{text}**" if measure in missed else text

    best, over_best = results.best_rival(row)
    limit, share = results.share_of_limit(row)
    return [
        *(row["op"], shape_label(row["shape"]), row["dtype"]),
        *(_time(row["times"].get(name)) for name in names),
        mark(targets.NAIVE, f"{results.gain(row):.2f}"),
        mark(BEST, f"{over_best:.2f} ({best})"),
        _rate(row),
        ", ".join(f"{name} {_digits(row['limits'][name]['median'], 3)}" for name in row["limits"]),
        mark(SHARE, f"{share:.0%} of {limit}"),
    ]


def _rate(row: results.Row) -> str:
    if row["unit"] is None:
        return "-"
    # Bytes per millisecond are millionths of GB/s, and so for operations.
    return f"{_digits(row['work'] / results.ours(row) / 1e6, 3)} {row['unit']}"


def _memory(memory: Mapping[str, Any]) -> str:
    """Peaks beyond inputs and outputs."""
    head = ["op", "shape", "dtype", "outputs", "ours, extra", "naive, extra", "promised"]
    body = [
        [
            *(row["op"], shape_label(row["shape"]), row["dtype"]),
            _mebibytes(row["outputs"]),
            _mebibytes(row["extra"][OURS], bold=not results.keeps_promise(row)),
            _mebibytes(row["extra"][NAIVE]),
            _mebibytes(row["promised"]),
        ]
        for row in memory["rows"]
    ]
    return f"## Peak memory, MiB\n\n{_as_markdown(head, body)}"


def _mebibytes(size: int | None, bold: bool = False) -> str:
    if size is None:
        return "-"
    text = f"{size / 2**20:.1f}"
    return f"**{text}**" if bold else text


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _time(summary: Mapping[str, Any] | None) -> str:
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
    parser = argparse.ArgumentParser(description="Markdown tables of a stored measurement.")
    parser.add_argument("results", type=Path, help="JSON file written by run.py")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument(
        "--summary", dest="show", action="store_const", const=summary, help="a line per operator"
    )
    parts.add_argument(
        "--targets", dest="show", action="store_const", const=targets.summary, help="met and missed"
    )
    parser.set_defaults(show=markdown)
    arguments = parser.parse_args()
    print(arguments.show(results.load(arguments.results)))


if __name__ == "__main__":
    main()

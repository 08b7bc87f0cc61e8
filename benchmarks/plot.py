"""Pictures of a stored measurement: `python benchmarks/plot.py RESULTS.json --folder docs/images`.

Writes ``speed.svg`` (how many times faster than the naive form and than the best rival) and
``scaling.svg`` (time per byte, or per product, against each size). Both on a white card, so that
they can be read on light and dark pages; the same file gives the same bytes.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

import bench_scaling
import results
from harness import shape_label

# Pixels at 100 dots per inch: the width of a README.
WIDTH = 8.0
BLUE, ORANGE, GRAY, INK = "#2f6db5", "#e08a1e", "#8a929c", "#24292f"
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "torch_moe_ops",  # else the names of clip paths are random
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#dfe3e8",
}

Run = Mapping[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw a stored measurement.")
    parser.add_argument("results", type=Path, help="JSON file written by run.py")
    parser.add_argument("--folder", type=Path, default=Path(), help="for the pictures")
    options = parser.parse_args(argv)
    stored = results.load(options.results)
    options.folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, draw in (("speed", speed), ("scaling", scaling)):
            path = options.folder / f"{name}.svg"
            draw(stored).savefig(path, metadata={"Date": None})
            print(path)
    return 0


def speed(stored: results.Results) -> Figure:
    """A pair of bars for each operator: the mean over its rows; a line spans all of them."""
    run = _main_run(stored)
    by_op: dict[str, list[results.Row]] = {}
    for row in run["rows"]:
        if ":" not in row["op"] and "," not in row["op"]:  # no scaling, latency, variants
            by_op.setdefault(row["op"], []).append(row)
    figure = Figure(figsize=(WIDTH, 1.5 + 0.42 * len(by_op)), layout="constrained")
    axes = figure.subplots()
    for place, rows in enumerate(by_op.values()):
        _bar(axes, place - 0.2, [results.gain(row) for row in rows], BLUE)
        _bar(axes, place + 0.2, [results.best_rival(row)[1] for row in rows], ORANGE)
    axes.axvline(1, color=INK, linewidth=1)
    axes.set_yticks(range(len(by_op)), list(by_op))
    axes.set_ylim(len(by_op) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator([0.5, 1, 2, 3, 5, 10, 20, 50]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.margins(x=0.08)
    axes.grid(axis="x")
    axes.set_xlabel("bar: geometric mean over shapes and dtypes; line: all of them", fontsize=8)
    handles = [Patch(color=color) for color in (BLUE, ORANGE)]
    labels = ["than the naive form in eager PyTorch", "than the best of naive form and peers"]
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    machine = f"{_machine(run)}, {results.setting(run)}"
    axes.set_title(f"Times faster (right of 1x: ours wins)\n{machine}", fontsize=10)
    return figure


def _bar(axes: Axes, place: float, factors: list[float], color: str) -> None:
    mean = results.geometric_mean(factors)
    axes.barh(place, mean - 1, 0.36, left=1, color=color)
    axes.plot([min(factors), max(factors)], [place, place], color=INK, linewidth=1)
    axes.annotate(
        f"{mean:.1f}" if mean < 10 else f"{mean:.0f}",
        (max(1.0, *factors), place),
        xytext=(4, 0),
        textcoords="offset points",
        verticalalignment="center",
        fontsize=8,
    )


def scaling(stored: results.Results) -> Figure:
    """A panel for each size of the routing operators, and one for groups of a product."""
    runs = [run for run in stored["runs"] if results.keeps_memory(run)]
    panels = [("routing", letter) for letter in "THKE"] + [("groups", "E")]
    figure = Figure(figsize=(WIDTH, 5), layout="constrained")
    grid = figure.subplots(2, 3)
    for axes, (kind, letter) in zip(grid.flat, panels, strict=False):
        _panel(axes, runs, kind, letter)
    corner = grid.flat[-1]
    corner.set_axis_off()
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    corner.legend(handles.values(), handles.keys(), loc="center", frameon=False)
    figure.suptitle(f"Cost when one size changes\n{_machine(_main_run(stored))}", fontsize=10)
    return figure


def _panel(axes: Axes, runs: list[Run], kind: str, letter: str) -> None:
    base = bench_scaling.ROUTING if kind == "routing" else bench_scaling.GROUPS
    fixed = {name: size for name, size in vars(base).items() if name != letter}
    for run in runs:
        curves: dict[str, dict[int, float]] = {}
        for row in run["rows"]:
            others = {name: size for name, size in row["shape"].items() if name != letter}
            if row["bench"] == "scaling" and others == fixed:
                op = row["op"].removeprefix(bench_scaling.PREFIX)
                curves.setdefault(op, {})[row["shape"][letter]] = _cost(row)
        threads = run["environment"]["threads"]
        for op, points in sorted(curves.items()):
            color = {"token_permute": BLUE, "token_unpermute": ORANGE}.get(op, GRAY)
            style = ":" if threads == 1 else "-"
            label = f"{op}, {threads} {'thread' if threads == 1 else 'threads'}"
            sizes, costs = zip(*sorted(points.items()), strict=True)
            axes.plot(sizes, costs, style, color=color, marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    unit = "ns per KiB moved" if kind == "routing" else "ps per operation"
    axes.set_title(f"{letter} ({shape_label(fixed)})", fontsize=8)
    axes.set_ylabel(unit, fontsize=8)
    axes.tick_params(labelsize=7)


def _cost(row: results.Row) -> float:
    """Nanoseconds for 1024 bytes, or picoseconds for an operation."""
    scale = 1e6 * 1024 if row["unit"] == "GB/s" else 1e9
    return results.ours(row) * scale / float(row["work"])


def _main_run(stored: results.Results) -> Run:
    """The one with most threads, first among those that keep memory."""
    runs = [run for run in stored["runs"] if run["rows"]]
    if not runs:
        raise ValueError("a file with at least one measured row is needed")
    return max(runs, key=lambda r: (results.keeps_memory(r), r["environment"]["threads"]))


def _machine(run: Run) -> str:
    facts = run["environment"]
    return f"{facts['cpu']} ({facts['capability']}), torch {facts['torch']}"


if __name__ == "__main__":
    sys.exit(main())

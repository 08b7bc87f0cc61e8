"""What changed between two stored measurements: `python benchmarks/compare.py BEFORE AFTER`.

Rows are paired by setting, operator, shape and dtype. What is compared is our time as a multiple of
the machine's limit in the same turns, not milliseconds, so that a slower hour does not count. The
exit status is 1 if a row got slower by more than the threshold.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results

# Differences in these make a comparison questionable; others (load, git commit) are expected.
MACHINE = ("cpu", "cores", "capability", "torch_capability", "torch", "transparent_huge_pages")

Key = tuple[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare two stored measurements.")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument(
        "--threshold", type=float, default=0.1, help="relative change that counts (default: 0.1)"
    )
    options = parser.parse_args(argv)
    try:
        before, after = results.load(options.before), results.load(options.after)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for warning in differences(before, after):
        print(f"careful: {warning}")
    ratios = changes(before, after)
    moved = {key: ratio for key, ratio in ratios.items() if _distance(ratio) > options.threshold}
    for (setting, label), ratio in sorted(moved.items(), key=lambda item: -item[1]):
        word = "slower" if ratio > 1 else "faster"
        print(f"{word}: {max(ratio, 1 / ratio):.2f}x, {label} ({setting})")
    slower = sum(ratio > 1 for ratio in moved.values())
    print(f"{len(ratios)} rows compared, {slower} slower, {len(moved) - slower} faster")
    return int(slower > 0)


def differences(before: results.Results, after: results.Results) -> list[str]:
    """What is not the same about the two, other than times."""
    found = []
    runs = [_runs_by_setting(stored) for stored in (before, after)]
    for name in sorted(runs[0].keys() ^ runs[1].keys()):
        found.append(f"measured in one file only: {name}")
    for name in sorted(runs[0].keys() & runs[1].keys()):
        old, new = (found_runs[name]["environment"] for found_runs in runs)
        for fact in (*MACHINE, "allocator"):
            if old[fact] != new[fact]:
                found.append(f"{fact} differs ({name}): {old[fact]}, then {new[fact]}")
    rows = [_relative_times(stored).keys() for stored in (before, after)]
    if single := rows[0] ^ rows[1]:
        found.append(f"{len(single)} rows are in one file only")
    return found


def changes(before: results.Results, after: results.Results) -> dict[Key, float]:
    """For each row that both have, the new relative time over the old one."""
    old, new = _relative_times(before), _relative_times(after)
    return {key: new[key] / old[key] for key in old if key in new}


def _runs_by_setting(stored: results.Results) -> dict[str, Any]:
    return {results.setting(run): run for run in stored["runs"]}


def _relative_times(stored: results.Results) -> dict[Key, float]:
    return {
        (name, results.label(row)): 1 / results.share_of_limit(row)[1]
        for name, run in _runs_by_setting(stored).items()
        for row in run["rows"]
    }


def _distance(ratio: float) -> float:
    """The same for twice as slow and twice as fast."""
    return max(ratio, 1 / ratio) - 1


if __name__ == "__main__":
    sys.exit(main())

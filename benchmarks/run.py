"""Measures the operators: `python benchmarks/run.py [--quick]`.

Writes one JSON file and prints its Markdown table (table.py prints it again). To add an operator,
write a bench_<op>.py with a function `cases` and list it in BENCHES; to add a peer to a row, give
its `Problem` one more contender: the table gets a column for it.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tqdm import tqdm

import allocator
import bench_alltoallv_grouped_matmul
import bench_finalize_routing_v2
import bench_grouped_matmul
import bench_init_routing_v2
import bench_layer
import bench_overhead
import bench_token_permute
import bench_token_unpermute
import environment
import table
from harness import Budget, measure
from inputs import Size

BENCHES: dict[str, ModuleType] = {
    "token_permute": bench_token_permute,
    "token_unpermute": bench_token_unpermute,
    "init_routing_v2": bench_init_routing_v2,
    "finalize_routing_v2": bench_finalize_routing_v2,
    "grouped_matmul": bench_grouped_matmul,
    "alltoallv_grouped_matmul": bench_alltoallv_grouped_matmul,
    "overhead": bench_overhead,
    "layer": bench_layer,
}
BUDGETS: dict[Size, Budget] = {
    "full": Budget(rounds=15, seconds=2.0, sample_ms=5.0),
    "quick": Budget(rounds=11, seconds=0.5, sample_ms=5.0),
    "tiny": Budget(rounds=3, seconds=0.01, sample_ms=0.1),
}
DEFAULT_OUTPUT = Path(__file__).parent / "results" / "latest.local.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.plain_allocator:
        allocator.restart_keeping_memory()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    results: dict[str, Any] = {
        "size": options.size,
        "environment": environment.describe(),
        "rows": [],
    }
    try:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        _store(results, options.output)
    except OSError as error:
        parser.error(f"cannot write {options.output}: {error.strerror}")

    cases = [case for name in options.only for case in BENCHES[name].cases(options.size)]
    with tqdm(cases, unit="row") as progress:
        for case in progress:
            progress.set_postfix_str(str(case))
            results["rows"].append(measure(case, BUDGETS[options.size]))
            _store(results, options.output)  # after each row: an interrupted run is not lost
    print(table.markdown(results))
    for line in table.slower_than_naive(results["rows"]):
        print(f"slower than naive: {line}", file=sys.stderr)
    return 0


def _store(results: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(results, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure the operators against the naive forms.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="smaller shapes"
    )
    size.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny", help="only see that all runs"
    )
    parser.set_defaults(size="full")
    parser.add_argument(
        "--only", nargs="+", choices=BENCHES, default=list(BENCHES), help="run some benches only"
    )
    parser.add_argument("--threads", type=_positive, help="default: torch's own choice")
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="default: benchmarks/results"
    )
    parser.add_argument(
        "--plain-allocator",
        action="store_true",
        help="measure with the system's allocator as it is, page faults included",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())

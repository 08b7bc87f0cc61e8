"""Measures the operators in one setting: `python benchmarks/run.py [--quick]`.

Writes one JSON file and prints its Markdown tables (table.py prints them again). suite.py calls
this program once for each number of threads and each allocator. To add an operator, write a
bench_<op>.py with a function `cases` and list it in BENCHES; to add a peer to a row, give its
`Problem` one more builder: the table gets a column for it.
"""

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
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
import bench_scaling
import bench_swiglu
import bench_token_permute
import bench_token_unpermute
import environment
import results
import table
import targets
from harness import Budget, Case, measure
from inputs import Size

BENCHES: dict[str, ModuleType] = {
    "token_permute": bench_token_permute,
    "token_unpermute": bench_token_unpermute,
    "init_routing_v2": bench_init_routing_v2,
    "finalize_routing_v2": bench_finalize_routing_v2,
    "grouped_matmul": bench_grouped_matmul,
    "swiglu": bench_swiglu,
    "alltoallv_grouped_matmul": bench_alltoallv_grouped_matmul,
    "overhead": bench_overhead,
    "layer": bench_layer,
    "scaling": bench_scaling,
}
BUDGETS: dict[Size, Budget] = {
    "full": Budget(rounds=15, seconds=2.0, sample_ms=5.0, compiled=(torch.float32, torch.bfloat16)),
    "quick": Budget(rounds=11, seconds=0.5, sample_ms=5.0, compiled=(torch.float32,)),
    "tiny": Budget(rounds=3, seconds=0.01, sample_ms=0.1),
}
DEFAULT_OUTPUT = Path(__file__).parent / "results" / "latest.local.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if not options.plain_allocator:
        allocator.restart_with(allocator.KEEP_MEMORY)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    run: dict[str, Any] = {"environment": environment.describe(), "rows": []}
    try:
        stored = open_results(options.output, options.size, options.append)
        stored["runs"].append(run)
        results.store(stored, options.output)
    except (OSError, ValueError) as error:
        parser.error(f"cannot write {options.output}: {error}")

    gc.freeze()  # a collection before each row need not look at everything that was imported
    cases = [(name, case) for name in options.only for case in BENCHES[name].cases(options.size)]
    with tqdm(cases, unit="row", desc=results.setting(run)) as progress:
        for row in _measured(progress, BUDGETS[options.size]):
            run["rows"].append(row)
            results.store(stored, options.output)  # each row: an interrupted run is not lost
    if not options.append:
        print(table.markdown(stored))
        print(f"\n{targets.summary(stored)}", file=sys.stderr)
    return 0


def _measured(progress: "tqdm[tuple[str, Case]]", budget: Budget) -> Iterator[dict[str, Any]]:
    """The rows; says once why a peer is left out."""
    mentioned: set[str] = set()
    for bench, case in progress:
        progress.set_postfix_str(str(case))
        row = {"bench": bench, **measure(case, budget)}
        yield row
        reasons = {f"{name}: {reason}" for name, reason in row["skipped"].items()}
        for reason in sorted(reasons - mentioned):
            progress.write(f"left out: {reason}", file=sys.stderr)
        mentioned |= reasons


def open_results(path: Path, size: Size, append: bool) -> results.Results:
    """What is in the file, if one is to be continued."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return results.load(path) if append and path.exists() else results.empty(size)


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Those of all programs that measure."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", dest="size", action="store_const", const="quick", help="fewer shapes"
    )
    size.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny", help="only see that all runs"
    )
    parser.set_defaults(size="full")
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="default: benchmarks/results"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure the operators against naive forms.")
    add_common_options(parser)
    parser.add_argument(
        "--append", action="store_true", help="add a run to the file and print no tables"
    )
    parser.add_argument(
        "--only", nargs="+", choices=BENCHES, default=list(BENCHES), help="run some benches only"
    )
    parser.add_argument("--threads", type=_positive, help="default: torch's own choice")
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

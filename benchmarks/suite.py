"""All measurements, one after the other, into one file: `python benchmarks/suite.py [--quick]`.

Each setting (number of threads, allocator) runs in a process of its own, and so do the peaks of
memory. Ctrl-C ends it; what was measured is in the file. Prints the tables and the targets.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import results
import run
import table
import targets
from inputs import Size

ROUTING = ("token_permute", "token_unpermute", "init_routing_v2", "finalize_routing_v2")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure everything.")
    run.add_common_options(parser)
    options = parser.parse_args(argv)
    options.output.unlink(missing_ok=True)
    common = ["--output", str(options.output)]
    if options.size != "full":
        common.append(f"--{options.size}")

    failed = []
    try:
        for program, *arguments in steps(options.size):
            path = Path(__file__).parent / program
            done = subprocess.run([sys.executable, str(path), *arguments, *common], check=False)
            if done.returncode:
                failed.append(" ".join([program, *arguments]))
    except KeyboardInterrupt:
        failed.append("what was interrupted")
    if options.output.exists():
        stored = results.load(options.output)
        print(f"{table.markdown(stored)}\n\n{targets.summary(stored)}")
    for part in failed:
        print(f"not complete: {part}", file=sys.stderr)
    return bool(failed)


def steps(size: Size) -> list[list[str]]:
    """Program and arguments of each part."""
    everything = ["run.py", "--append"]
    plain = [*everything, "--plain-allocator", "--only"]
    if size != "full":
        return [everything, [*plain, *ROUTING[:2]], ["peak_memory.py"]]
    cores = len(os.sched_getaffinity(0))
    kept = [[*everything, "--threads", str(n)] for n in dict.fromkeys((cores, 1))]
    return [*kept, [*plain, *ROUTING, "layer"], ["peak_memory.py"]]


if __name__ == "__main__":
    sys.exit(main())

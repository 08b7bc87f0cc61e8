"""How much memory a call needs beyond its inputs and outputs: `python benchmarks/peak_memory.py`.

Linux counts the largest resident size of a process since it was last told to forget it. The
allocator gives everything back at once here, so what a call adds at its peak is what it needs.
Adds ``memory`` to a file of run.py. The promise of the routing operators: their temporaries are
some integers for each slot and some rows for each thread, whatever the hidden size and dtype.
"""

import argparse
import gc
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import allocator
import environment
import results
import run
from harness import NAIVE, OURS, Case, dtype_label
from inputs import Size
from limits import Call

ROUTING_BENCHES = ("token_permute", "token_unpermute", "init_routing_v2", "finalize_routing_v2")
OTHER_BENCHES = ("grouped_matmul", "layer")
DTYPES = (torch.float32, torch.bfloat16)

# Linux adds up the pages of a process in batches: counts are this inexact.
SLACK = 1 << 19


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the memory that calls need.")
    run.add_common_options(parser)
    options = parser.parse_args(argv)
    allocator.restart_with(allocator.RETURN_MEMORY)
    stored = run.open_results(options.output, options.size, append=True)
    rows: list[dict[str, Any]] = []
    stored["memory"] = {"environment": environment.describe(), "rows": rows}
    with tqdm(_cases(options.size), unit="row", desc="peak memory") as progress:
        for bench, case in progress:
            progress.set_postfix_str(str(case))
            rows.append(measure(case, promised=bench in ROUTING_BENCHES))
            results.store(stored, options.output)
    return 0


def measure(case: Case, promised: bool) -> dict[str, Any]:
    """Runs ours and the naive form once each, and once before to load what they need."""
    torch.manual_seed(0)
    problem = case.prepare()
    return {
        "op": case.op,
        "shape": dict(case.shape),
        "dtype": dtype_label(case.dtype),
        "outputs": _num_bytes(problem.contenders[OURS]()),
        "extra": {name: _extra_peak(problem.contenders[name]) for name in (OURS, NAIVE)},
        "promised": _promise(case) if promised else None,
    }


def _cases(size: Size) -> list[tuple[str, Case]]:
    """Of each operator the first shape."""
    found: dict[tuple[str, torch.dtype], tuple[str, Case]] = {}
    for bench in (*ROUTING_BENCHES, *OTHER_BENCHES):
        for case in run.BENCHES[bench].cases(size):
            if case.dtype in DTYPES:
                found.setdefault((case.op, case.dtype), (bench, case))
    return list(found.values())


def _promise(case: Case) -> int:
    """Two int32 for each slot, and four float32 rows for each thread."""
    slots, row = case.shape["T"] * case.shape["K"], case.shape["H"] * 4
    return 2 * slots * 4 + 4 * row * torch.get_num_threads() + SLACK


def _extra_peak(call: Call) -> int:
    call()
    gc.collect()
    before = _resident()
    Path("/proc/self/clear_refs").write_text("5")
    outputs = call()
    extra = _peak() - before - _num_bytes(outputs)
    return max(extra, 0)


def _num_bytes(outputs: Tensor | tuple[Tensor, ...]) -> int:
    tensors = (outputs,) if isinstance(outputs, Tensor) else outputs
    return sum(tensor.nbytes for tensor in tensors)


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    """Bytes."""
    text = Path("/proc/self/status").read_text()
    match = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None:
        raise OSError(f"/proc/self/status has no {field}: peaks can only be measured on Linux")
    return int(match[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())

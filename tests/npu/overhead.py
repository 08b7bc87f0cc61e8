"""Host time of one call, beside torch_npu's own operator, on the stand-in for CANN.

    python tests/npu/overhead.py        (in .venv-npu; the stand-in as tests/npu/run.py builds it)

The kernels of the stand-in are a few loops over tiny tensors and the same for both sides, so the
difference is what the wrappers cost. It says nothing about an NPU. Not a test: times vary.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CANN_STANDIN_ASYNC", "1")

from tests.cann import bootstrap, build  # noqa: E402

bootstrap.load(build.build(ROOT / "build" / "cann-standin"))

import torch  # noqa: E402
import torch_npu  # noqa: E402

import torch_moe_ops  # noqa: E402, F401

REPEATS, CALLS = 30, 200


def pairs() -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """For each operator: our call and torch_npu's, without gradients."""
    tokens = torch.randn(4, 8).npu()
    ids = torch.tensor([[0, 1], [1, 2], [2, 0], [1, 0]], dtype=torch.int32).npu()
    rows, row_map = torch.ops.moe.token_permute(tokens, ids)
    probs = torch.rand(4, 2).npu()
    weight = torch.randn(3, 8, 8).npu()
    counts = torch.tensor([3, 3, 2]).npu()
    ours, theirs = torch.ops.moe, torch_npu
    return {
        "token_permute": (
            lambda: ours.token_permute(tokens, ids),
            lambda: theirs.npu_moe_token_permute(tokens, ids),
        ),
        "token_permute_grad": (
            lambda: ours.token_permute_grad(rows, row_map, 2),
            lambda: theirs.npu_moe_token_permute_grad(tokens, rows, ids, row_map),
        ),
        "token_unpermute": (
            lambda: ours.token_unpermute(rows, row_map, probs),
            lambda: theirs.npu_moe_token_unpermute(rows, row_map, probs),
        ),
        "token_unpermute_grad": (
            lambda: ours.token_unpermute_grad(rows, tokens, row_map, probs),
            lambda: theirs.npu_moe_token_unpermute_grad(rows, tokens, row_map, probs),
        ),
        "grouped_matmul": (
            lambda: ours.grouped_matmul(rows, weight, counts),
            lambda: theirs.npu_grouped_matmul(
                [rows], [weight], group_list=counts, split_item=2, group_type=0, group_list_type=1
            ),
        ),
    }


def microseconds(call: Callable[[], object]) -> float:
    """Host time of one call; the device works on in the meantime."""
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    elapsed = time.perf_counter() - started
    torch.npu.synchronize()
    return elapsed / CALLS * 1e6


def main() -> None:
    """Prints a table of medians, interleaved."""
    print(f"{'operator':22}{'ours':>10}{'torch_npu':>12}   microseconds per call")
    with torch.no_grad():
        for name, (ours, theirs) in pairs().items():
            times = [(microseconds(ours), microseconds(theirs)) for _ in range(REPEATS)]
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            print(f"{name:22}{medians[0]:10.1f}{medians[1]:12.1f}")


if __name__ == "__main__":
    main()

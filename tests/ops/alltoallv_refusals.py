"""What alltoallv_grouped_matmul and grouped_matmul_alltoallv refuse, in the same words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .common import Refusal
from .data import Sample

# What a good call is made of, for calls in which one argument is bad.
GOOD: dict[str, Any] = {
    "gmm_x": torch.zeros(5, 4),
    "gmm_weight": torch.zeros(3, 4, 2),
    "group": "",
    "ep_world_size": 1,
    "send_counts": [1, 2, 2],
    "recv_counts": [1, 2, 2],
}
MM = {"mm_x": torch.zeros(2, 6), "mm_weight": torch.zeros(6, 7)}
MAX = 2**31 - 1


def changed(**changes: Any) -> Sample:
    arguments = {**GOOD, **changes}
    return Sample(
        "",
        tuple(arguments[name] for name in GOOD),
        {name: value for name, value in arguments.items() if name not in GOOD},
    )


def refusals(op: str) -> list[Refusal]:
    def refused(name: str, error: type[Exception], text: str, **changes: Any) -> Refusal:
        return Refusal(name, lambda: changed(**changes), error, f"moe::{op}: {text}")

    def value(name: str, text: str, **changes: Any) -> Refusal:
        return refused(name, ValueError, text, **changes)

    def kind(name: str, text: str, **changes: Any) -> Refusal:
        return refused(name, TypeError, text, **changes)

    def place(name: str, text: str, **changes: Any) -> Refusal:
        return refused(name, RuntimeError, text, **changes)

    floats = "must be float32, float64, bfloat16 or float16, got"
    lists = "must have ep_world_size * experts (3) elements, got"
    limits = "must be between 0 and 2147483647, got"
    # Only the kernels know the group; the shape functions see one rank.
    by_kernel = [
        value(
            "more is sent than expected",
            "send_counts must equal the recv_counts of the other rank, got 2 rows from rank 0 to "
            "rank 0 for its expert 1, where rank 0 expects 1",
            recv_counts=[1, 1, 2],
        ),
        value(
            "another number of ranks",
            'ep_world_size must be the size of group "" (1), got 2',
            ep_world_size=2,
            send_counts=[1, 2, 2, 0, 0, 0],
            recv_counts=[1, 2, 2, 0, 0, 0],
        ),
        value(
            "unknown group",
            'group must be the name of a process group of torch.distributed, got "nowhere"',
            group="nowhere",
        ),
        value(
            "unknown group that agreed",
            'group must be the name of a process group of torch.distributed, got "0"',
            group="0@fused",
        ),
    ]
    return [
        value("x 3-D", "gmm_x must be 2-D, got shape [1, 5, 4]", gmm_x=torch.zeros(1, 5, 4)),
        kind("x of whole numbers", f"gmm_x {floats} int64", gmm_x=torch.zeros(5, 4).long()),
        value(
            "weight 2-D", "gmm_weight must be 3-D, got shape [4, 2]", gmm_weight=torch.zeros(4, 2)
        ),
        kind(
            "weight of another dtype",
            "gmm_weight must have the dtype of gmm_x (float32), got float16",
            gmm_weight=torch.zeros(3, 4, 2).half(),
        ),
        kind(
            "weight of bools", f"gmm_weight {floats} bool", gmm_weight=torch.zeros(3, 4, 2).bool()
        ),
        place(
            "weight on another device",
            "gmm_weight must be on the device of gmm_x (cpu), got meta",
            gmm_weight=torch.zeros(3, 4, 2, device="meta"),
        ),
        value(
            "weight of another width",
            "gmm_weight must have size 4 in dimension 1, got shape [3, 6, 2]",
            gmm_weight=torch.zeros(3, 6, 2),
        ),
        value(
            "weight of another width, transposed",
            "gmm_weight must have size 4 in dimension 2, got shape [3, 4, 2]",
            trans_gmm_weight=True,
        ),
        value(
            "mm_x alone", "mm_weight must be given when mm_x is, got None", mm_x=torch.zeros(2, 6)
        ),
        value(
            "mm_weight alone",
            "mm_x must be given when mm_weight is, got None",
            mm_weight=torch.zeros(2, 6),
        ),
        value("mm_x 1-D", "mm_x must be 2-D, got shape [6]", **{**MM, "mm_x": torch.zeros(6)}),
        kind(
            "mm_x of another dtype",
            "mm_x must have the dtype of gmm_x (float32), got float64",
            **{**MM, "mm_x": torch.zeros(2, 6).double()},
        ),
        value(
            "mm_weight 3-D",
            "mm_weight must be 2-D, got shape [1, 6, 7]",
            **{**MM, "mm_weight": torch.zeros(1, 6, 7)},
        ),
        kind(
            "mm_weight of ints",
            f"mm_weight {floats} int32",
            **{**MM, "mm_weight": torch.zeros(6, 7).int()},
        ),
        place(
            "mm_weight on another device",
            "mm_weight must be on the device of gmm_x (cpu), got meta",
            **{**MM, "mm_weight": torch.zeros(6, 7, device="meta")},
        ),
        value(
            "mm_weight of another width",
            "mm_weight must have size 6 in dimension 0, got shape [5, 7]",
            **{**MM, "mm_weight": torch.zeros(5, 7)},
        ),
        value(
            "mm_weight of another width, transposed",
            "mm_weight must have size 6 in dimension 1, got shape [6, 7]",
            **MM,
            trans_mm_weight=True,
        ),
        value("no ranks", "ep_world_size must be at least 1, got 0", ep_world_size=0),
        value(
            "ranks beyond counting",
            "ep_world_size must be at most the largest int32 (2147483647), got 4611686018427387904",
            ep_world_size=2**62,
        ),
        value("negative ranks", "ep_world_size must be at least 1, got -1", ep_world_size=-1),
        value("too few send counts", f"send_counts {lists} 2", send_counts=[2, 3]),
        value("too many send counts", f"send_counts {lists} 4", send_counts=[2, 3, 0, 0]),
        value("too many receive counts", f"recv_counts {lists} 4", recv_counts=[2, 3, 0, 0]),
        value("no counts", f"send_counts {lists} 0", send_counts=[]),
        value("negative count", f"send_counts {limits} -1 at position 1", send_counts=[3, -1, 3]),
        value(
            "huge count",
            f"send_counts {limits} {2**63 - 1} at position 0",
            send_counts=[2**63 - 1, 2**63 - 1, 7],
        ),
        value(
            "negative receive count",
            f"recv_counts {limits} -2 at position 2",
            recv_counts=[3, 4, -2],
        ),
        value(
            "huge receive count",
            f"recv_counts {limits} {MAX + 1} at position 0",
            recv_counts=[MAX + 1, 0, 0],
        ),
        value(
            "too few rows",
            "send_counts must sum to the number of rows of gmm_x (5), got 6",
            send_counts=[1, 2, 3],
        ),
        value(
            "too many rows",
            f"send_counts must sum to the number of rows of gmm_x (5), got {3 * MAX}",
            send_counts=[MAX] * 3,
        ),
        *(replace(refusal, needs_data=True) for refusal in by_kernel),
    ]

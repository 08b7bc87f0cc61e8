"""What the operators are meant to reach, in one table, and which rows do.

Three measures, all "at least": the share of the machine's limit (the best copy, the best GEMM), how
many times faster than the naive form, and how many times faster than the best of naive form and
peers. The share is only asked of runs that keep memory: elsewhere page faults are in our times and
not in those of a copy between buffers that are there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import results

SHARE, NAIVE, BEST = "share of limit", "over naive", "over best"

TARGETS: dict[str, dict[str, float]] = {
    "token_permute": {SHARE: 1.0, NAIVE: 1.7, BEST: 1.0},
    "token_permute_grad": {SHARE: 0.85, NAIVE: 2.5, BEST: 1.0},
    "token_unpermute": {SHARE: 0.85, NAIVE: 3.5, BEST: 1.0},
    "token_unpermute_grad": {SHARE: 0.85, NAIVE: 4.5, BEST: 1.0},
    "init_routing_v2": {SHARE: 0.85, BEST: 1.0},
    "init_routing_v2_grad": {SHARE: 0.85, BEST: 1.0},
    "finalize_routing_v2": {SHARE: 0.85, BEST: 1.0},
    "finalize_routing_v2_grad": {SHARE: 0.85, NAIVE: 7.0, BEST: 1.0},
    "swiglu": {SHARE: 0.85, BEST: 1.0},
    "swiglu_grad": {SHARE: 0.85, BEST: 1.0},
    "grouped_matmul": {BEST: 1.0},
    "grouped_matmul_weight_grad": {BEST: 1.0},
    "alltoallv_grouped_matmul": {BEST: 1.0},
    "grouped_matmul_alltoallv": {BEST: 1.0},
    "overhead": {NAIVE: 1 / 0.9},
    "nn.MoE + backward": {SHARE: 1 / 1.04, BEST: 1.0},  # 4 % more than its products alone
}


@dataclass(frozen=True)
class Verdict:
    """One target of one row."""

    measure: str
    reached: float
    target: float

    @property
    def met(self) -> bool:
        """A tie within half a percent is no miss: medians are not more exact."""
        return self.reached >= self.target * 0.995

    def __str__(self) -> str:
        return f"{self.measure} {self.reached:.2f} of {self.target:.2f}"


def judge(row: results.Row, run: Mapping[str, Any]) -> list[Verdict]:
    """The targets of a row of the run. Variants, named after a comma, have those of their op."""
    reached = {
        SHARE: results.share_of_limit(row)[1],
        NAIVE: results.gain(row),
        BEST: results.best_rival(row)[1],
    }
    wanted = TARGETS.get(row["op"].partition(",")[0].partition(":")[0], {})
    return [
        Verdict(measure, reached[measure], target)
        for measure, target in wanted.items()
        if measure != SHARE or results.keeps_memory(run)
    ]


def summary(stored: results.Results) -> str:
    """For each run how many targets are met, and each one that is missed; Markdown."""
    parts = [_of_run(run) for run in stored["runs"]]
    if "memory" in stored:
        parts.append(_of_memory(stored["memory"]["rows"]))
    return "\n\n".join(parts)


def _of_memory(rows: Sequence[results.Row]) -> str:
    promised = [row for row in rows if row["promised"] is not None]
    broken = [row for row in promised if not results.keeps_promise(row)]
    lines = [f"Temporaries as promised: {len(promised) - len(broken)} of {len(promised)} met."]
    lines += [f"* missed: {results.label(row)}" for row in broken]
    return "\n".join(lines)


def _of_run(run: Mapping[str, Any]) -> str:
    verdicts = [(row, verdict) for row in run["rows"] for verdict in judge(row, run)]
    missed = [(row, verdict) for row, verdict in verdicts if not verdict.met]
    met = f"{len(verdicts) - len(missed)} of {len(verdicts)} met"
    lines = [f"Targets, {results.setting(run)}: {met}."]
    lines += [f"* missed: {results.label(row)}: {verdict}" for row, verdict in missed]
    return "\n".join(lines)

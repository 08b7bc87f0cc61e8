"""Trouble that people met when they compiled, or trained for long. See test_cases.py.

Shape functions under every layout are part of the suite in common.py.
"""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torch_moe_ops as moe

from .data import Sample, Values
from .tracing import assert_compiles


def through_experts(
    tokens: Tensor, ids: Tensor, probs: Tensor, weight: Tensor, counts: Tensor, keep: int
) -> Tensor:
    """To the experts, through them, and back; only the first ``keep`` rows."""
    rows, row_of_slot = moe.token_permute(tokens, ids, keep)
    rows = moe.grouped_matmul(rows, weight, counts)
    return moe.token_unpermute(rows, row_of_slot, probs)


def sample(tokens: int, counts: list[int], experts: int = 2, width: int = 3) -> Sample:
    v = Values(torch.float32)
    args = (
        v(tokens, width),
        torch.arange(2 * tokens).remainder(experts).reshape(tokens, 2),
        v(tokens, 2),
        v(experts, width, 5),
        torch.tensor(counts),
        sum(counts),
    )
    return Sample(f"{tokens} tokens", args)


def test_f3_tokens_and_counts_change() -> None:
    """One graph for all general sizes, and one each for 1 and 0, never dynamic in torch."""
    samples = [
        sample(6, [3, 1]),
        sample(6, [0, 4]),
        sample(4, [3, 1]),
        sample(7, [9, 5]),
        sample(7, [0, 13]),
        sample(1, [1, 1]),
        sample(1, [0, 2]),
        sample(0, [0, 0]),
    ]
    assert_compiles(through_experts, samples, max_graphs=3)


def test_f3_num_out_tokens_is_symbolic() -> None:
    """One graph serves every number of rows kept, in the layer's form and as a plain call."""
    v = Values(torch.float32)
    tokens, ids = v(9, 3), v.ids(9, 2, experts=4)
    samples = [Sample(str(keep), (tokens, ids, keep)) for keep in (5, 7, 11, 17)]
    assert_compiles(moe.token_permute, samples, max_graphs=1)


def test_f1_inductor() -> None:
    """The default backend, forward and backward, on sizes that change."""
    torch._dynamo.reset()
    compiled = torch.compile(through_experts, fullgraph=True, dynamic=True)
    for one in (sample(6, [3, 1]), sample(9, [0, 13])):
        results = []
        for function in (through_experts, compiled):
            leaves = one.leaves()
            (out,) = leaves.call(function)
            # A transposed use: inductor must know the strides of the operator's output.
            (out.t() * out.t().cos()).sum().backward()
            results.append([out.detach(), *(leaf.grad for leaf in leaves.floating())])
        for eager, fast in zip(*results, strict=True):
            # cos of inductor is another implementation than torch's: a few units of float32.
            torch.testing.assert_close(fast, eager, rtol=1e-5, atol=1e-5)


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def train_step(tokens: int, use_reentrant: bool | None) -> None:
    """The operator comes last in the checkpointed function; None: no backward at all."""
    leaves = sample(tokens, [tokens // 3, 2 * tokens - tokens // 3], width=128).leaves()
    if use_reentrant is None:
        through_experts(*leaves.args)
        return
    out = checkpoint(through_experts, *leaves.args, use_reentrant=use_reentrant)
    out.sum().backward()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to read memory")
@pytest.mark.parametrize(
    "use_reentrant", [False, True, None], ids=["plain", "reentrant", "no_grad"]
)
def test_f5_memory_is_flat(use_reentrant: bool | None) -> None:
    """Every step has rows of about 0.5 MB: 280 steps that leak one of them show as 140 MB."""
    gc.disable()  # what only the collector frees is a cycle, and grows where it runs seldom
    try:
        for step in range(300):
            train_step(450 + 37 * step % 101, use_reentrant)
            if step == 20:
                before = resident_megabytes()
        assert resident_megabytes() - before < 20
    finally:
        gc.enable()


def outputs(op: str) -> tuple[Any, ...]:
    v = Values(torch.float32)
    args = sample(6, [5, 7]).leaves().args
    rows, row_of_slot = moe.token_permute(args[0], args[1])
    if op == "token_permute":
        return rows, row_of_slot
    if op == "token_unpermute":
        return (moe.token_unpermute(rows, row_of_slot, args[2]),)
    if op == "grouped_matmul":
        return (moe.grouped_matmul(rows, args[3], args[4]),)
    expanded, *rest = moe.init_routing_v2(args[0], args[1])
    if op == "init_routing_v2":
        return expanded, *rest
    bias = v(2, 3).requires_grad_()
    return (
        moe.finalize_routing_v2(
            expanded, rest[0], bias=bias, scales=args[2], expert_idx=args[1], drop_pad_mode=2
        ),
    )


@pytest.mark.parametrize(
    "op",
    [
        "token_permute",
        "token_unpermute",
        "grouped_matmul",
        "init_routing_v2",
        "finalize_routing_v2",
    ],
)
def test_f5_outputs_die_with_their_last_name(op: str) -> None:
    """Without the collector: an output on its own graph node would keep itself alive."""
    gc.disable()
    try:
        results = outputs(op)
        references = [weakref.ref(result) for result in results]
        nodes = [weakref.ref(result.grad_fn) for result in results if result.requires_grad]
        assert nodes
        del results
        assert all(reference() is None for reference in [*references, *nodes])
    finally:
        gc.enable()

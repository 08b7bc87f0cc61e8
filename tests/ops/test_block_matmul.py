"""The products of grouped_matmul and its weight gradient in blocks: csrc/cpu/block_matmul.h."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_moe_ops
from torch_moe_ops import reference

from .accuracy import assert_rounded_once, outputs_of
from .data import DTYPES, Sample, Values, assert_same_bits

TRANS = {"trans_weight": True}
# The kernels multiply in blocks of rows, columns and depth: sizes on both sides of every edge.
BLOCKS = torch.tensor([1, 0, 15, 16, 64, 65, 131, 0, 600])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
products = pytest.mark.parametrize(
    ("function", "definition", "options"),
    [
        (torch_moe_ops.grouped_matmul, reference.grouped_matmul, {}),
        (torch_moe_ops.grouped_matmul, reference.grouped_matmul, TRANS),
        (torch_moe_ops.grouped_matmul_weight_grad, reference.grouped_matmul_weight_grad, {}),
        (torch_moe_ops.grouped_matmul_weight_grad, reference.grouped_matmul_weight_grad, TRANS),
    ],
    ids=["forward", "trans_weight", "weight_grad", "weight_grad, trans_weight"],
)


def block_sample(dtype: torch.dtype, depth: int, cols: int, function: Any, options: Any) -> Sample:
    v = Values(dtype)
    rows, experts = int(BLOCKS.sum()), len(BLOCKS)
    if function is torch_moe_ops.grouped_matmul:
        shape = (cols, depth) if options else (depth, cols)
        return Sample("blocks", (v(rows, depth), v(experts, *shape), BLOCKS), options)
    return Sample("blocks", (v(rows, depth), v(rows, cols), BLOCKS), options)


@dtypes
@products
@pytest.mark.parametrize(("depth", "cols"), [(255, 257), (513, 300), (1026, 48)])
def test_blocks(
    dtype: torch.dtype, depth: int, cols: int, function: Any, definition: Any, options: Any
) -> None:
    sample = block_sample(dtype, depth, cols, function, options)
    outputs = sample.call(function)
    assert_rounded_once(outputs, outputs_of(definition), sample)
    torch.set_num_threads(3)
    assert_same_bits(sample.call(function), outputs)


@dtypes
@products
@pytest.mark.parametrize("depth", [31, 32])
def test_nan_stays_in_its_place(
    dtype: torch.dtype, depth: int, function: Any, definition: Any, options: Any
) -> None:
    """Also where a kernel takes two elements at a time and the depth is odd."""
    sample = block_sample(dtype, depth, 33, function, options)
    left, right, _ = sample.args
    for factor, places in ((left, [(0, 0), (40, 30), (95, 5)]), (right, [(1, 2), (4, 7)])):
        for place in places:
            factor[place] = float("nan")
    (out,) = sample.call(function)
    (expected,) = sample.call(definition)
    assert torch.equal(out.isnan(), expected.isnan())


@dtypes
@products
def test_factors_of_any_layout(
    dtype: torch.dtype, function: Any, definition: Any, options: Any
) -> None:
    """Rows that are one row, overlap, or have gaps; neither dimension dense."""
    sample = block_sample(dtype, 40, 33, function, options)
    left, right, sizes = sample.args
    for other in (
        right[:1].expand_as(right),
        right.narrow(right.dim() - 2, 0, 1).expand_as(right),
        right.narrow(right.dim() - 1, 0, 1).expand_as(right),
        right.flatten()[: right.numel() // 2].as_strided(right.shape, (1,) * right.dim()),
        right.repeat_interleave(2, -1)[..., ::2],
        right.repeat_interleave(2, -2)[..., ::2, :],
    ):
        strided = replace(sample, args=(left, other, sizes))
        assert_rounded_once(strided.call(function), outputs_of(definition), strided)


GROWTH = """
import resource, torch, torch_moe_ops as moe
torch.set_num_threads(1)
x, grad_y, weight = torch.randn(600, 80), torch.randn(600, 96), torch.randn(1, 80, 96)

def run(sizes):
    for size in sizes:
        rows, grads, list_ = x[:size], grad_y[:size], torch.tensor([size])
        moe.grouped_matmul_weight_grad(rows, grads, list_)
        moe.grouped_matmul(rows, weight, list_)
        moe.grouped_matmul(grads, weight, list_, trans_weight=True)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

before = run(range(3, 600, 7))
print((run(range(600)) - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit")
def test_no_memory_for_every_size_of_a_group() -> None:
    """Kernels are compiled for a size and kept: sizes that a step makes up must share them."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=100
    )
    assert int(done.stdout) < 8  # MiB; a kernel has about 0.02

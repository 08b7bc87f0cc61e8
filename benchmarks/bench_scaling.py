"""How the time grows with each size of the input, the others fixed.

Routing operators should take time in proportion to the bytes that they move, whatever T, H, K and
E are; a grouped product should not depend on E. Threads are those of the run: compare two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch

import bench_grouped_matmul
import bench_token_permute
import bench_token_unpermute
from harness import Case, Problem
from inputs import Groups, Routing, Shape, Size, cross

PREFIX = "scaling: "
DTYPES = [torch.bfloat16]

ROUTING = Routing(4096, 2048, 4, 64)
ROUTING_SIZES: dict[Size, dict[str, Sequence[int]]] = {
    "full": {
        "T": (512, 1024, 2048, 4096, 8192, 16384),
        "H": (256, 512, 1024, 2048, 4096, 8192),
        "K": (1, 2, 4, 8, 16),
        "E": (8, 32, 64, 128, 512),
    },
    "quick": {"T": (1024, 4096), "H": (512, 2048), "K": (2, 4), "E": (16, 64)},
    "tiny": {"T": (1,)},
}
GROUPS = Groups(4096, 1024, 1024, 32)
GROUPS_SIZES: dict[Size, dict[str, Sequence[int]]] = {
    "full": {"E": (1, 2, 8, 32, 128)},
    "quick": {"E": (8, 32)},
    "tiny": {},
}


def cases(size: Size) -> list[Case]:
    routing = _varied(ROUTING, ROUTING_SIZES[size])
    groups = _varied(GROUPS, GROUPS_SIZES[size])
    return [
        *cross(PREFIX + "token_permute", routing, _permute, DTYPES),
        *cross(PREFIX + "token_unpermute", routing, _unpermute, DTYPES),
        *cross(PREFIX + "grouped_matmul", groups, _grouped_matmul, DTYPES),
    ]


def _varied(base: Shape, sizes: Mapping[str, Sequence[int]]) -> list[Shape]:
    """The base with one size at a time replaced; each shape once."""
    shapes = [replace(base, **{letter: n}) for letter, ns in sizes.items() for n in ns]
    return list({tuple(asdict(shape).values()): shape for shape in shapes}.values())


# Peers are measured on the shapes of their benches.


def _permute(shape: Routing, dtype: torch.dtype) -> Problem:
    return _alone(bench_token_permute.forward(shape, dtype))


def _unpermute(shape: Routing, dtype: torch.dtype) -> Problem:
    return _alone(bench_token_unpermute.forward(shape, dtype))


def _grouped_matmul(shape: Groups, dtype: torch.dtype) -> Problem:
    return _alone(bench_grouped_matmul.forward(shape, dtype))


def _alone(problem: Problem) -> Problem:
    return replace(problem, peers={}, compilable=False)

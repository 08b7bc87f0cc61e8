"""Compiling and exporting an operator with dynamic sizes, and asking its shape function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from .accuracy import gradients_of
from .data import Sample, Values, assert_same_bits


def facts(outputs: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What a shape function has to know about the outputs."""
    return [(tuple(out.shape), out.stride(), out.dtype) for out in outputs]


def assert_shape_function_exact(function: Callable[..., Any], sample: Sample) -> None:
    """Meta and fake tensors give outputs of the real shape, strides, dtype and device."""
    real = facts(sample.call(function))

    on_meta = sample.map(lambda tensor: tensor.to("meta")).call(function)
    assert facts(on_meta) == real
    assert {out.device.type for out in on_meta} == {"meta"}

    mode = FakeTensorMode()
    fake_sample = sample.map(mode.from_tensor)
    with mode:
        fake = fake_sample.call(function)
    assert facts(fake) == real
    assert {out.device.type for out in fake} == {"cpu"}


def upstream_for(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A random gradient for every floating output."""
    return [Values(out.dtype, seed=1)(*out.shape) for out in outputs if out.dtype.is_floating_point]


def assert_compiles(
    function: Callable[..., Any], samples: Sequence[Sample], *, max_graphs: int
) -> None:
    """Compiled without a graph break, outputs and gradients are those of the eager call.

    One compiled function meets all samples in turn; ``max_graphs`` bounds how often it may be
    compiled for that.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    # A new function object every time: dynamo counts recompilations per code object.
    compiled = torch.compile(
        lambda *args, **kwargs: function(*args, **kwargs),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for sample in samples:
        leaves = sample.leaves()
        assert_same_bits(leaves.call(compiled), leaves.call(function))
        upstream = upstream_for(sample.call(function))
        assert_same_bits(
            gradients_of(compiled)(sample, upstream), gradients_of(function)(sample, upstream)
        )
    assert 1 <= counter.frame_count <= max_graphs


class _Call(torch.nn.Module):
    """A call as a module, which torch.export needs, of the arguments that can vary.

    These are the tensors and the whole numbers, but not the flags.
    """

    def __init__(self, function: Callable[..., Any], sample: Sample) -> None:
        super().__init__()
        self.function = function
        self.constants, self.spec = tree_flatten((sample.args, sample.kwargs))
        self.places = [i for i, leaf in enumerate(self.constants) if _can_vary(leaf)]

    def forward(self, values: list[Any]) -> Any:
        leaves = list(self.constants)
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value
        args, kwargs = tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


def _can_vary(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) or type(leaf) is int


def _inputs(sample: Sample) -> list[Any]:
    return [leaf for leaf in tree_leaves((sample.args, sample.kwargs)) if _can_vary(leaf)]


def _dynamic(one: Any, two: Any) -> Any:
    """torch.export's specification of what differs between two values of one argument."""
    if not isinstance(one, Tensor):
        return None if one == two else torch.export.Dim.AUTO
    dims = range(one.dim())
    return {dim: torch.export.Dim.AUTO for dim in dims if one.shape[dim] != two.shape[dim]}


def assert_exports(
    function: Callable[..., Any], small: Sample, other: Sample, third: Sample, *, strict: bool
) -> None:
    """Exported once with ``small``, the program serves sizes that it has not seen.

    What differs between ``small`` and ``other`` is dynamic. A shape function that fixes a size
    passes opcheck, and fails here.
    """
    dynamic = [_dynamic(one, two) for one, two in zip(_inputs(small), _inputs(other), strict=True)]
    assert any(dynamic), "nothing varies between the two samples"
    program = torch.export.export(
        _Call(function, small), (_inputs(small),), dynamic_shapes=(dynamic,), strict=strict
    ).module()
    for sample in (small, other, third):
        result = program(_inputs(sample))
        outputs = result if isinstance(result, tuple) else (result,)
        assert_same_bits(outputs, sample.call(function))

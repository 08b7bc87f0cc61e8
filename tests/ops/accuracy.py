"""How far an operator may be from its definition: one rounding of the output's dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .data import Sample

# What is compared: the outputs of an operator, or the gradients of its inputs for given upstream
# gradients.
Run = Callable[[Sample, Sequence[Tensor | None]], Sequence[Tensor | None]]


def outputs_of(function: Callable[..., Any]) -> Run:
    """The outputs; upstream gradients are not used."""
    return lambda sample, upstream: sample.call(function)


def backward(
    leaves: Sample, outputs: Sequence[Tensor], upstream: Sequence[Tensor | None]
) -> list[Tensor]:
    """The gradients of the floating inputs; zero for one on which nothing depends.

    ``upstream`` belongs to the floating outputs; None stands for an output that nobody used.
    """
    floating = [output for output in outputs if output.is_floating_point()]
    pairs = [
        (output, gradient)
        for output, gradient in zip(floating, upstream, strict=True)
        if output.requires_grad and gradient is not None
    ]
    gradients = torch.autograd.grad(
        [output for output, _ in pairs],
        leaves.floating(),
        [gradient for _, gradient in pairs],
        allow_unused=True,
    )
    return [
        torch.zeros_like(leaf) if gradient is None else gradient
        for leaf, gradient in zip(leaves.floating(), gradients, strict=True)
    ]


def gradients_of(function: Callable[..., Any]) -> Run:
    """The gradients of the floating inputs for the given upstream gradients."""

    def run(sample: Sample, upstream: Sequence[Tensor | None]) -> list[Tensor]:
        leaves = sample.leaves()
        return backward(leaves, leaves.call(function), upstream)

    return run


def _unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding: half a unit in the last place."""
    return torch.finfo(dtype).eps / 2


def assert_rounded_once(
    actual: Sequence[Tensor | None],
    run: Run,
    sample: Sample,
    upstream: Sequence[Tensor | None] = (),
    majorant: Run | None = None,
) -> None:
    """``actual`` is what the definition gives in float64 on the same numbers, rounded once.

    Nearly all operators are sums of products with plus signs. So the definition applied to the
    absolute values of its inputs gives the sum of the sizes of the terms, and applied to ones it
    gives the number of terms. For any other operator ``majorant`` is such a sum that is nowhere
    smaller, in its values and in its gradients. The classical bound for adding up m products in a
    precision with unit u is ``(m + 2) * u * (sum of sizes)``: at most m - 1 additions, the product
    of up to three factors before them. One rounding to the output's dtype comes on top, half a unit
    in its last place.
    """

    majorant = majorant or run

    def evaluate(run: Run, change: Callable[[Tensor], Tensor]) -> Sequence[Tensor | None]:
        wide = sample.map_floating(lambda tensor: change(tensor.detach().double()))
        wide_upstream = [None if grad is None else change(grad.double()) for grad in upstream]
        return run(wide, wide_upstream)

    expected = evaluate(run, lambda tensor: tensor)
    sizes = evaluate(majorant, torch.abs)
    terms = evaluate(majorant, torch.ones_like)
    wide_sum = any(tensor.dtype == torch.float64 for tensor in sample.floating())
    sum_unit = _unit(torch.float64 if wide_sum else torch.float32)
    if wide_sum:
        sum_unit *= 2  # the definition, in float64 itself, has the same error

    assert len(actual) == len(expected)
    for place, (value, exact, size, count) in enumerate(
        zip(actual, expected, sizes, terms, strict=True)
    ):
        assert all(tensor is not None for tensor in (value, exact, size, count)), place
        assert value.shape == exact.shape, f"output {place}"
        if not value.is_floating_point():
            assert torch.equal(value, exact), f"output {place}: {value} is not {exact}"
            continue
        sum_error = (count + 2) * sum_unit * size
        smallest = torch.finfo(value.dtype).smallest_normal * _unit(value.dtype)
        bound = sum_error + _unit(value.dtype) * (exact.abs() + sum_error) + smallest
        error = (value.double() - exact).abs()
        # Not written as "error > bound": that lets NaN through.
        wrong = ~(error <= bound)
        assert not wrong.any(), (
            f"output {place}: {value[wrong]} should be {exact[wrong]} within {bound[wrong]}, "
            f"at {wrong.nonzero().tolist()[:5]}"
        )

"""The suite that every operator has to pass.

An operator's test file derives a class from ``OpSuite`` and states its data: the samples, one large
sample, one sample for every number of tokens, and the table of refused calls. Everything that holds
for all operators is tested here, once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_moe_ops
from torch_moe_ops import reference

from .accuracy import Run, assert_rounded_once, backward, gradients_of, outputs_of
from .data import DTYPES, LAYOUTS, Sample, assert_same_bits, same_bits
from .tracing import assert_compiles, assert_exports, assert_shape_function_exact, upstream_for


@dataclass(frozen=True)
class Refusal:
    """A call that must raise exactly this."""

    name: str
    sample: Callable[[], Sample]
    error: type[Exception]
    text: str

    # Only the values in a tensor show it. That is so for every bad index.
    needs_data: bool = False

    @property
    def on_meta(self) -> bool:
        """Whether the shape function has to refuse it too, with all tensors on one device."""
        return not self.needs_data and self.error not in (IndexError, RuntimeError)


def roads(op: str) -> dict[str, Callable[..., Any]]:
    """The ways in which users reach an operator."""
    packet = getattr(torch.ops.moe, op)
    return {"python": getattr(torch_moe_ops, op), "torch.ops": packet, "overload": packet.default}


def assert_refuses(function: Callable[..., Any], sample: Sample, refusal: Refusal) -> None:
    """The class is exact, and the text is the whole text."""
    with pytest.raises(refusal.error) as caught:
        sample.call(function)
    assert type(caught.value) is refusal.error
    assert str(caught.value) == refusal.text


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace == "moe":
            self.names.append(func._schema.name.removeprefix("moe::"))
        return func(*args, **(kwargs or {}))


def operators_in_backward(
    function: Callable[..., Any], sample: Sample, wanted: Sequence[bool]
) -> list[str]:
    """The names of our operators that run in the backward for the wanted gradients."""
    outputs = sample.leaves(wanted).call(function)
    total = sum(out.double().sum() for out in outputs if out.requires_grad)
    with _Recorder() as recorder:
        total.backward()
    return recorder.names


class OpSuite:
    """Derive from it with the data of one operator."""

    op: ClassVar[str]
    # Takes a dtype for the floating inputs; the first sample is the plain one.
    samples: ClassVar[Callable[[torch.dtype], list[Sample]]]
    # Large enough that the kernels split the work over threads.
    big: ClassVar[Callable[[torch.dtype], Sample]]
    # Takes the number of tokens; all other sizes stay the same.
    dynamic: ClassVar[Callable[[int], Sample]]
    refusals: ClassVar[Sequence[Refusal]]
    # The first output is a copy of input values.
    moves_data: ClassVar[bool] = False
    # BLAS adds up in another order for another layout: equal within rounding, not to the bit.
    layout_rounds_differently: ClassVar[bool] = False
    # For an operator that is no sum of products with plus signs: see assert_rounded_once.
    majorant: ClassVar[Callable[..., Any] | None] = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Spread the class's data over the tests that ask for it."""
        names = [sample.name for sample in self.samples(torch.float32)]
        assert len(set(names)) == len(names), "sample names must be unique"
        refusal_names = [refusal.name for refusal in self.refusals]
        assert len(set(refusal_names)) == len(refusal_names), "refusal names must be unique"
        wanted = metafunc.fixturenames
        if "name" in wanted:
            metafunc.parametrize("name", names)
        if "dtype" in wanted:
            metafunc.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
        if "layout" in wanted:
            metafunc.parametrize("layout", LAYOUTS)
        if "refusal" in wanted:
            metafunc.parametrize("refusal", self.refusals, ids=refusal_names)

    @property
    def function(self) -> Callable[..., Any]:
        """The public function."""
        return getattr(torch_moe_ops, self.op)

    @property
    def definition(self) -> Callable[..., Any]:
        """What it has to compute."""
        return getattr(reference, self.op)

    def assert_accurate(
        self,
        actual: Sequence[Tensor | None],
        run_of: Callable[[Callable[..., Any]], Run],
        sample: Sample,
        upstream: Sequence[Tensor | None] = (),
    ) -> None:
        """``actual`` is what the definition gives, rounded once: outputs or gradients."""
        majorant = self.majorant and run_of(self.majorant)
        assert_rounded_once(actual, run_of(self.definition), sample, upstream, majorant)

    def sample(self, name: str, dtype: torch.dtype = torch.float32) -> Sample:
        """The sample of this name, freshly made."""
        return next(sample for sample in self.samples(dtype) if sample.name == name)

    # Interface

    @pytest.mark.parametrize("key", ["CPU", "Meta", "Autograd"])
    def test_has_kernel(self, key: str) -> None:
        """A CPU kernel and a shape function of its own, and a gradient formula."""
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        assert has_kernel(f"moe::{self.op}", key)
        assert not has_kernel(f"moe::{self.op}", "CompositeImplicitAutograd")

    def test_same_on_every_road(self, name: str) -> None:
        sample = self.sample(name)
        expected = sample.call(self.function)
        for road in roads(self.op).values():
            assert_same_bits(sample.call(road), expected)

    def test_inference_mode(self, name: str) -> None:
        expected = self.sample(name).call(self.function)
        with torch.inference_mode():
            sample = self.sample(name)
            assert all(tensor.is_inference() for tensor in sample.floating())
            for road in roads(self.op).values():
                assert_same_bits(sample.call(road), expected)

    def test_inputs_untouched_and_outputs_fresh(self, name: str) -> None:
        sample = self.sample(name)
        before = sample.map(torch.clone)
        versions = [tensor._version for tensor in sample.tensors()]
        outputs = sample.call(self.function)
        for now, then in zip(sample.tensors(), before.tensors(), strict=True):
            assert same_bits(now, then)
        assert [tensor._version for tensor in sample.tensors()] == versions
        # Empty tensors may all have the address 0.
        addresses = [
            tensor.untyped_storage().data_ptr()
            for tensor in [*sample.tensors(), *outputs]
            if tensor.numel() > 0
        ]
        assert len(set(addresses)) == len(addresses)

    # Values and gradients

    def test_value(self, name: str, dtype: torch.dtype) -> None:
        sample = self.sample(name, dtype)
        outputs = sample.call(self.function)
        plain = sample.call(self.definition)
        assert [(out.shape, out.dtype) for out in outputs] == [
            (out.shape, out.dtype) for out in plain
        ]
        assert all(out.is_contiguous() for out in outputs)
        if self.moves_data:
            # Copies, of any values: nothing may change a bit.
            assert_same_bits(outputs, plain)
        self.assert_accurate(outputs, outputs_of, sample)

    def test_gradient(self, name: str, dtype: torch.dtype) -> None:
        sample = self.sample(name, dtype)
        upstream = upstream_for(sample.call(self.function))
        gradients = gradients_of(self.function)(sample, upstream)
        assert [grad.dtype for grad in gradients] == [leaf.dtype for leaf in sample.floating()]
        self.assert_accurate(gradients, gradients_of, sample, upstream)

    def test_gradient_through_one_output(self, name: str) -> None:
        """An output that nobody used takes no part, whatever stands in for its gradient."""
        sample = self.sample(name, torch.float64)
        upstream = upstream_for(sample.call(self.function))
        for used in range(len(upstream)):
            if upstream[used].numel() == 0:
                continue
            alone = [grad if place == used else None for place, grad in enumerate(upstream)]
            gradients = gradients_of(self.function)(sample, alone)
            self.assert_accurate(gradients, gradients_of, sample, alone)

    def test_gradcheck(self, name: str) -> None:
        """First and second order, in float64, for every floating input at once."""
        sample = self.sample(name, torch.float64).map_floating(torch.Tensor.double).leaves()
        inputs = sample.floating()

        def call(*values: Tensor) -> tuple[Tensor, ...]:
            remaining = iter(values)
            outputs = sample.map_floating(lambda _: next(remaining)).call(self.function)
            # An empty output that was not asked for has no gradient.
            return tuple(out for out in outputs if out.requires_grad)

        # Every element by itself where that is quick, else random directions: the operators are
        # polynomials, so that a wrong formula shows in a random direction too.
        fast = sum(leaf.numel() for leaf in inputs) > 60
        assert torch.autograd.gradcheck(call, inputs, fast_mode=fast)
        assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)

    def test_gradients_only_where_asked(self) -> None:
        """All on/off patterns: the same gradients where asked, and none elsewhere."""
        sample = self.samples(torch.float32)[0]
        upstream = upstream_for(sample.call(self.function))
        everything = gradients_of(self.function)(sample, upstream)
        for wanted in itertools.product([False, True], repeat=len(everything)):
            leaves = sample.leaves(wanted)
            outputs = [out for out in leaves.call(self.function) if out.dtype.is_floating_point]
            pairs = [(o, g) for o, g in zip(outputs, upstream, strict=True) if o.requires_grad]
            if not any(wanted):
                assert not pairs
                continue
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
            for leaf, asked, expected in zip(leaves.floating(), wanted, everything, strict=True):
                assert (leaf.grad is not None) == asked
                assert leaf.grad is None or same_bits(leaf.grad, expected)

    # Memory layouts

    def test_layout_of_inputs(self, name: str, layout: str) -> None:
        """The strides of an input change nothing: not one bit of the outputs and gradients."""
        strange = self.sample(name).map(LAYOUTS[layout])
        upstream = upstream_for(strange.call(self.function))
        packed = strange.map(torch.Tensor.contiguous)
        for run in (outputs_of, gradients_of):
            result = run(self.function)(strange, upstream)
            if self.layout_rounds_differently:
                self.assert_accurate(result, run, packed, upstream)
            else:
                assert_same_bits(result, run(self.function)(packed, upstream))

    def test_layout_of_upstream_gradients(self, name: str, layout: str) -> None:
        sample = self.sample(name)
        upstream = [LAYOUTS[layout](grad) for grad in upstream_for(sample.call(self.function))]
        packed = [grad.contiguous() for grad in upstream]
        result = gradients_of(self.function)(sample, upstream)
        if self.layout_rounds_differently:
            self.assert_accurate(result, gradients_of, sample, packed)
        else:
            assert_same_bits(result, gradients_of(self.function)(sample, packed))

    # What torch asks of an operator

    def test_opcheck(self, name: str) -> None:
        sample = self.sample(name)
        self.opcheck(sample, trace=False)
        self.opcheck(sample.leaves())

    def test_opcheck_layouts(self, layout: str) -> None:
        self.opcheck(self.samples(torch.float32)[0].map(LAYOUTS[layout]).leaves(), trace=False)
        self.opcheck(self.samples(torch.bfloat16)[0].map(LAYOUTS[layout]).leaves())

    def opcheck(self, sample: Sample, *, trace: bool = True) -> None:
        """Schema, autograd registration, shape function, and ahead-of-time tracing.

        Tracing takes nearly all of the time, and covers the forward too where it covers gradients.
        """
        checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
        if trace:
            checks.append("test_aot_dispatch_dynamic")
        operator = getattr(torch.ops.moe, self.op).default
        results = torch.library.opcheck(operator, sample.args, sample.kwargs, test_utils=checks)
        assert results == dict.fromkeys(checks, "SUCCESS")

    def test_shape_function(self, name: str) -> None:
        for dtype in (torch.float32, torch.bfloat16):
            for function in roads(self.op).values():
                assert_shape_function_exact(function, self.sample(name, dtype))

    def test_shape_function_layouts(self, layout: str) -> None:
        assert_shape_function_exact(
            self.function, self.samples(torch.float32)[0].map(LAYOUTS[layout])
        )

    def test_compile(self) -> None:
        """Three general sizes share one graph."""
        assert_compiles(self.function, [self.dynamic(t) for t in (5, 7, 11)], max_graphs=1)

    def test_compile_edge_sizes(self) -> None:
        """torch always compiles sizes 0 and 1 by themselves: one graph for each, and one."""
        assert_compiles(self.function, [self.dynamic(t) for t in (6, 7, 1, 0)], max_graphs=3)

    @pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
    def test_export(self, strict: bool) -> None:
        samples = [self.dynamic(t) for t in (5, 7, 12)]
        assert_exports(self.function, *samples, strict=strict)

    def test_autocast(self, name: str) -> None:
        """Autocast leaves an operator that moves or adds rows alone, gradients included.

        As everywhere in torch, only the forward runs inside the region.
        """
        for own, dtype in itertools.product(DTYPES, (torch.bfloat16, torch.float16)):
            sample = self.sample(name, own)
            outputs = sample.call(self.function)
            upstream = upstream_for(outputs)
            leaves = sample.leaves()
            with torch.autocast("cpu", dtype):
                inside = leaves.call(self.function)
            assert_same_bits(inside, outputs)
            assert_same_bits(
                backward(leaves, inside, upstream), gradients_of(self.function)(sample, upstream)
            )

    # Threads

    def test_threads(self, dtype: torch.dtype) -> None:
        """Right, and the same bits for any number of threads and in every run."""
        sample = self.big(dtype)
        outputs = sample.call(self.function)
        upstream = upstream_for(outputs)
        gradients = gradients_of(self.function)(sample, upstream)
        self.assert_accurate(outputs, outputs_of, sample)
        self.assert_accurate(gradients, gradients_of, sample, upstream)
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            for _ in range(2):
                assert_same_bits(sample.call(self.function), outputs)
                assert_same_bits(gradients_of(self.function)(sample, upstream), gradients)

    # Errors

    def test_refusal(self, refusal: Refusal) -> None:
        """The same class and text on every road, with and without inference mode."""
        for road in roads(self.op).values():
            assert_refuses(road, refusal.sample(), refusal)
            assert_refuses(road, refusal.sample().leaves(), refusal)
            with torch.inference_mode():
                assert_refuses(road, refusal.sample(), refusal)

    def test_none_for_a_tensor(self) -> None:
        """torch passes None on as an undefined tensor, which no kernel may touch."""
        sample = self.samples(torch.float32)[0]
        arguments = getattr(torch.ops.moe, self.op).default._schema.arguments
        required = [
            (place, argument.name)
            for place, argument in enumerate(arguments)
            if str(argument.type) == "Tensor"
        ]
        for place, name in required:
            args = (*sample.args[:place], None, *sample.args[place + 1 :])
            for device, road in itertools.product(["cpu", "meta"], roads(self.op).values()):
                call = Sample("", args, sample.kwargs).map(lambda t, device=device: t.to(device))
                with pytest.raises(TypeError) as caught:
                    call.call(road)
                # The Python functions of grouped_matmul take a sequence of ints too.
                assert re.fullmatch(
                    f"moe::{self.op}: {name} must be a tensor( or a sequence of ints)?, got None",
                    str(caught.value),
                )

    def test_refusal_of_shape_function(self, refusal: Refusal) -> None:
        """Meta tensors meet the same text; what only data can tell passes there."""
        for road in roads(self.op).values():
            sample = refusal.sample().map(lambda tensor: tensor.to("meta"))
            if refusal.on_meta:
                assert_refuses(road, sample, refusal)
            else:
                sample.call(road)


def index_refusals(op: str, argument: str, cases: Sequence[tuple[Any, ...]]) -> list[Refusal]:
    """Refusals of an index: (name, sample, value, position, range)."""
    return [
        Refusal(
            name,
            sample,
            IndexError,
            f"moe::{op}: {argument} must be in {allowed}, got {value} at position {position}",
        )
        for name, sample, value, position, allowed in cases
    ]

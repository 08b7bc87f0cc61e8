"""Every sample of every operator's CPU suite, on the NPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import torch_moe_ops
from tests.npu.settings import CHECKS_INDICES
from tests.ops import (
    test_alltoallv_grouped_matmul,
    test_finalize_routing_v2,
    test_grouped_matmul,
    test_init_routing_v2,
    test_swiglu,
    test_token_permute,
    test_token_unpermute,
)
from tests.ops.accuracy import gradients_of, outputs_of
from tests.ops.common import OpSuite, Refusal, assert_refuses, roads
from tests.ops.data import LAYOUTS, Sample, assert_same_bits
from tests.ops.tracing import upstream_for

MODULES = (
    test_token_permute,
    test_token_unpermute,
    test_init_routing_v2,
    test_finalize_routing_v2,
    test_grouped_matmul,
    test_swiglu,
    # In one process these are grouped_matmul, which runs in every setting: one is enough here.
    *([test_alltoallv_grouped_matmul] if CHECKS_INDICES else []),
)
SUITES = {
    suite.op: suite
    for module in MODULES
    for suite in vars(module).values()
    if isinstance(suite, type) and issubclass(suite, OpSuite) and hasattr(suite, "op")
}
# Samples that no NPU can run.
BEYOND_NPU = {
    ("init_routing_v2", "huge ids"): "the kernels sort ids as float32, up to 2**24",
    ("token_permute", "negative and huge ids"): "the kernels sort ids as float32, up to 2**24",
}
# float64 has no kernels on an NPU.
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def npu(tensor: Tensor) -> Tensor:
    return tensor.to("npu")


def cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


def has_float64(sample: Sample) -> bool:
    return any(tensor.dtype == torch.float64 for tensor in sample.floating())


class _Parametrized:
    """Spreads the suites over the tests that ask for ``op`` with ``name``, ``refusal`` or alone."""

    wants: ClassVar[str] = ""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        wanted = metafunc.fixturenames
        if "name" in wanted:
            cases = [
                (op, sample.name)
                for op, suite in SUITES.items()
                for sample in suite.samples(torch.float32)
            ]
            metafunc.parametrize(("op", "name"), cases, ids=[f"{o}-{n}" for o, n in cases])
        elif "refusal" in wanted:
            refusals = [(op, refusal) for op, suite in SUITES.items() for refusal in suite.refusals]
            metafunc.parametrize(
                ("op", "refusal"), refusals, ids=[f"{o}-{r.name}" for o, r in refusals]
            )
        elif "op" in wanted:
            metafunc.parametrize("op", SUITES)
        if "dtype" in wanted:
            metafunc.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
        if "layout" in wanted:
            metafunc.parametrize("layout", LAYOUTS)


def with_some(tensor: Tensor, value: float, first: int) -> Tensor:
    """A copy with the value in every other row."""
    changed = tensor.clone()
    if tensor.numel() > 0:
        changed.view(-1, tensor.shape[-1])[first::2] = value
    return changed


def sample_of(op: str, name: str, dtype: torch.dtype = torch.float32) -> Sample:
    return next(s for s in SUITES[op].samples(dtype) if s.name == name)


def run_on_npu(
    run: Callable[..., Any], function: Callable[..., Any], sample: Sample, upstream: Any
) -> list[Tensor]:
    results = run(function)(sample.map(npu), [npu(grad) for grad in upstream])
    assert {tensor.device.type for tensor in results} == {"npu"}
    return cpu(results)


class TestOps(_Parametrized):
    def test_outputs_and_gradients(self, op: str, name: str, dtype: torch.dtype) -> None:
        """Shape, dtype and strides of the CPU kernel, the value of the definition, rounded once."""
        function, suite = getattr(torch_moe_ops, op), SUITES[op]()
        if (op, name) in BEYOND_NPU:
            pytest.skip(BEYOND_NPU[op, name])
        sample = sample_of(op, name, dtype)
        if has_float64(sample):
            with pytest.raises(NotImplementedError, match="on an NPU, got float64"):
                sample.map(npu).call(function)
            return
        on_cpu = sample.call(function)
        upstream = upstream_for(on_cpu)
        outputs = run_on_npu(outputs_of, function, sample, upstream)
        assert [(o.shape, o.dtype, o.stride()) for o in outputs] == [
            (o.shape, o.dtype, o.stride()) for o in on_cpu
        ]
        suite.assert_accurate(outputs, outputs_of, sample)
        if SUITES[op].moves_data:
            assert_same_bits(outputs, on_cpu)
        gradients = run_on_npu(gradients_of, function, sample, upstream)
        suite.assert_accurate(gradients, gradients_of, sample, upstream)

    @pytest.mark.parametrize(
        ("value", "first"), [(float("nan"), 0), (float("nan"), 1), (float("inf"), 0)]
    )
    def test_special_values(self, op: str, name: str, value: float, first: int) -> None:
        """NaN and inf reach what they reach on the CPU: nothing from where a slot was dropped."""
        if (op, name) in BEYOND_NPU:
            pytest.skip(BEYOND_NPU[op, name])
        sample = sample_of(op, name)
        if has_float64(sample):
            return
        function = getattr(torch_moe_ops, op)
        upstream = upstream_for(sample.call(function))
        for place in range(-1, len(sample.floating())):
            # In one input, or in the incoming gradients: two at once would hide one another.
            inputs = iter(range(len(sample.floating())))
            special = sample.map_floating(
                lambda tensor, place=place, inputs=inputs: (
                    with_some(tensor, value, first) if next(inputs) == place else tensor
                )
            )
            incoming = (
                [with_some(grad, value, first) for grad in upstream] if place < 0 else upstream
            )
            for run in (outputs_of, gradients_of):
                expected = run(function)(special, incoming)
                torch.testing.assert_close(
                    run_on_npu(run, function, special, incoming), list(expected), equal_nan=True
                )

    def test_layouts(self, op: str, layout: str) -> None:
        """Strided inputs and incoming gradients, with poison between their elements."""
        function, suite = getattr(torch_moe_ops, op), SUITES[op]()
        change = LAYOUTS[layout]
        for sample in SUITES[op].samples(torch.bfloat16):
            strange = sample.map(change)
            if has_float64(sample) or strange.tensors()[0].numel() == 0:
                continue
            if (op, sample.name) in BEYOND_NPU:
                continue
            try:
                upstream = [change(grad) for grad in upstream_for(strange.call(function))]
            except IndexError:
                continue  # repeated entries are no valid index here
            on_npu = strange.map(torch.Tensor.contiguous).map(npu).map(change)
            grads_on_npu = [change(npu(grad.contiguous())) for grad in upstream]
            packed = strange.map(torch.Tensor.contiguous)
            suite.assert_accurate(cpu(on_npu.call(function)), outputs_of, packed)
            gradients = cpu(gradients_of(function)(on_npu, grads_on_npu))
            suite.assert_accurate(gradients, gradients_of, packed, upstream)

    def test_float64_is_refused(self, op: str) -> None:
        sample = SUITES[op].samples(torch.float64)[0].map(npu)
        with pytest.raises(
            NotImplementedError, match="must be float32, bfloat16 or float16 on an NPU"
        ):
            sample.call(getattr(torch_moe_ops, op))

    def test_refusal(self, op: str, refusal: Refusal) -> None:
        """The texts of the CPU. Index values are looked at only with MOE_OPS_CHECK_INDICES=1."""
        if refusal.error is RuntimeError:
            return  # tensors on two devices: the text names the devices
        sample = refusal.sample().map(npu)
        for road in roads(op).values():
            if refusal.on_meta or CHECKS_INDICES or "[0, 0)" in refusal.text:
                assert_refuses(road, sample, refusal)
            elif "group_list" not in refusal.text:
                # Nothing is promised about the numbers, but the kernels stay within their buffers:
                # the stand-in ends the process where one does not.
                sample.call(road)

    def test_opcheck(self, op: str) -> None:
        checks = ["test_schema", "test_faketensor"]  # torch's other checks know no NPU
        operator = getattr(torch.ops.moe, op).default
        sample = SUITES[op].samples(torch.float32)[0].map(npu).leaves()
        results = torch.library.opcheck(operator, sample.args, sample.kwargs, test_utils=checks)
        assert results == dict.fromkeys(checks, "SUCCESS")

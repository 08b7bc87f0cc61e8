"""swiglu and swiglu_grad."""

from __future__ import annotations

import decimal
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_moe_ops
from torch_moe_ops import reference

from .common import OpSuite, Refusal
from .data import BIG_TOKENS, BIG_WIDTH, WIDTH, Sample, Values, assert_same_bits

INF, NAN = math.inf, math.nan
# Gates where sigmoid is all but 0 or 1, or e^-gate is too large for float32.
EXTREME_GATES = (0.0, -0.0, 1e-3, -1.25, 9, -9, 17, -17, 40, -40, 88, -88, 89, -89, 200, -200)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """gate and up."""
    width = x.shape[-1] // 2
    return x[..., :width], x[..., width:]


def inputs(v: Values) -> list[tuple[str, Tensor]]:
    gates = torch.tensor(EXTREME_GATES, dtype=torch.float64).to(v.dtype)
    return [
        ("plain", v(5, 6)),
        ("odd width", v(4, 2 * 37)),  # a part of what the kernel takes at once, and more than it
        ("one row", v(1, 2 * 64)),
        ("one value", v(1, 2)),
        ("one dimension", v(2 * 33)),
        ("four dimensions", v(2, 3, 1, 2 * 5)),
        ("nine dimensions", v(1, 2, 1, 1, 1, 1, 1, 3, 4)),  # CANN takes eight
        ("extremes", torch.stack([gates, v(len(gates))]).flatten()[None]),
        ("no rows", v(0, 8)),
        ("no rows between", v(2, 0, 4)),
        ("no width", v(3, 0)),
    ]


# silu(a), silu'(a) and silu''(a) are sums of products of a, sigmoid(a) and 1 - sigmoid(a), and no
# product is larger than |a|, 1 and 1/2. The polynomials here are larger than the sums, with a
# factor for the roundings inside of sigmoid.
def swiglu_majorant(x: Tensor) -> Tensor:
    gate, up = halves(x)
    return (3 * gate + gate**2) * up


def swiglu_grad_majorant(grad_output: Tensor, x: Tensor) -> Tensor:
    gate, up = halves(x)
    return torch.cat(
        [grad_output * up * (3 + 2 * gate), grad_output * (3 * gate + gate**2)], dim=-1
    )


def shared_refusals(op: str, call: type[Call]) -> list[Refusal]:
    """What forward and grad refuse in the same words."""
    return [
        Refusal(
            "no dimension",
            lambda: call.sample(torch.tensor(1.0)),
            ValueError,
            f"moe::{op}: x must be at least 1-D, got shape []",
        ),
        Refusal(
            "odd size",
            lambda: call.sample(torch.zeros(2, 7)),
            ValueError,
            f"moe::{op}: last size of x must be even, got 7",
        ),
        Refusal(
            "whole numbers",
            lambda: call.sample(torch.zeros(2, 6).long()),
            TypeError,
            f"moe::{op}: x must be float32, float64, bfloat16 or float16, got int64",
        ),
    ]


class Call:
    """A call of swiglu."""

    @staticmethod
    def sample(x: Tensor) -> Sample:
        return Sample("", (x,))


class GradCall(Call):
    """A valid call of swiglu_grad with one thing changed."""

    @staticmethod
    def sample(x: Tensor | None = None, grad: Tensor | None = None) -> Sample:
        x = torch.zeros(2, 6) if x is None else x
        return Sample("", (torch.zeros(2, 3) if grad is None else grad, x))


def assert_within(actual: Tensor, exact: Tensor, bound: Tensor) -> None:
    wrong = ~((actual.double() - exact).abs() <= bound)
    assert not wrong.any(), (actual[wrong][:5], exact[wrong][:5])


# Every binary order of size, and densely where sigmoid is not 0 or 1. From -88.7 on, e^-gate is a
# float32.
GATES = torch.cat(
    [
        torch.linspace(-88.7, 105, 200_001),
        torch.logspace(-44, 38, 20_001),
        -torch.logspace(-44, 1.9, 20_001),
    ]
).float()
UNIT = torch.finfo(torch.float32).eps / 2
SMALLEST = 2.0**-149


class TestSwiglu(OpSuite):
    op = "swiglu"
    refusals = shared_refusals("swiglu", Call)
    majorant = staticmethod(swiglu_majorant)

    @staticmethod
    def samples(dtype: torch.dtype) -> list[Sample]:
        return [Sample(name, (x,)) for name, x in inputs(Values(dtype))]

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        return Sample("big", (Values(dtype)(BIG_TOKENS, 2 * BIG_WIDTH),))

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        return Sample(f"{tokens} tokens", (Values(torch.float32)(tokens, 2 * WIDTH),))

    def test_hand_table(self) -> None:
        """sigmoid(ln 3) is 3/4 and sigmoid(-ln 3) is 1/4; ln 3 = 1.0986122886681098."""
        ln3 = 1.0986122886681098
        x = torch.tensor(
            [[0.0, ln3, -ln3, 5.0, 2.0, 4.0], [ln3, ln3, 0.0, 0.0, -10.0, 1.0]], dtype=torch.float64
        )
        expected = torch.tensor(
            [[0.0, 1.6479184330021646, -1.0986122886681098], [0.0, -8.239592165010824, 0.0]],
            dtype=torch.float64,
        )
        torch.testing.assert_close(torch_moe_ops.swiglu(x), expected, rtol=1e-15, atol=0)

    @pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
    def test_special_values(self, wide: torch.dtype) -> None:
        """What torch.nn.functional.silu gives, signs of zero included; in a vector and alone."""
        special = [INF, -INF, NAN, 0.0, -0.0, 1e3, -1e3, 3e38, -3e38]
        gate = torch.tensor(special * 4, dtype=wide)
        for gates in (gate, gate[: len(special)]):
            out = torch_moe_ops.swiglu(torch.cat([gates, torch.ones_like(gates)]))
            expected = F.silu(gates)
            assert torch.equal(out.isnan(), expected.isnan())
            known = ~expected.isnan()
            assert_same_bits([out[known]], [expected[known]])

    def test_accuracy_in_float32(self) -> None:
        """Four units: two of e^-gate, one of the sum, one of the quotient."""
        out = torch_moe_ops.swiglu(torch.cat([GATES, torch.ones_like(GATES)]))
        exact = F.silu(GATES.double())
        assert_within(out, exact, 4 * UNIT * exact.abs() + SMALLEST / 2)
        # Beyond, e^-gate is infinite.
        far = torch.tensor([-88.8, -95, -104, -1e10])
        assert_same_bits([torch_moe_ops.swiglu(torch.cat([far, far]))], [torch.zeros(4)])

    def test_accuracy_in_float64(self) -> None:
        gates = torch.cat([torch.linspace(-709, 709, 301), torch.linspace(-3, 3, 301)]).double()
        out = torch_moe_ops.swiglu(torch.cat([gates, torch.ones_like(gates)]))
        unit = torch.finfo(torch.float64).eps / 2
        with decimal.localcontext(prec=60):
            for gate, value in zip(gates.tolist(), out.tolist(), strict=True):
                exact = decimal.Decimal(gate) / (1 + decimal.Decimal(-gate).exp())
                error = abs(decimal.Decimal(value) - exact)
                assert error <= 4 * decimal.Decimal(unit) * abs(exact), gate

    @pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
    def test_every_gate_of_16_bits(self, narrow: torch.dtype) -> None:
        """One rounding to 16 bits, on top of the four units of float32."""
        gate = torch.arange(-(2**15), 2**15, dtype=torch.int32).short().view(narrow)
        gate = gate[gate.isfinite() & (gate > -88.7)]
        out = torch_moe_ops.swiglu(torch.cat([gate, torch.ones_like(gate)]))
        exact = F.silu(gate.double())
        info = torch.finfo(narrow)
        smallest = info.smallest_normal * info.eps
        assert_within(out, exact, (info.eps / 2 + 4 * UNIT) * exact.abs() + smallest / 2)

    def test_rounded_once(self) -> None:
        """silu(1) * 9 is 6.5795; of silu(1) in bfloat16, 0.73046875, it would become 6.5625."""
        x = torch.tensor([1.0, 9.0], dtype=torch.bfloat16)
        assert torch_moe_ops.swiglu(x).tolist() == [6.59375]


class TestSwigluGrad(OpSuite):
    op = "swiglu_grad"
    majorant = staticmethod(swiglu_grad_majorant)
    refusals = (
        *shared_refusals("swiglu_grad", GradCall),
        Refusal(
            "gradient of another dtype",
            lambda: GradCall.sample(grad=torch.zeros(2, 3).bfloat16()),
            TypeError,
            "moe::swiglu_grad: grad_output must have the dtype of x (float32), got bfloat16",
        ),
        Refusal(
            "gradient of whole numbers",
            lambda: GradCall.sample(grad=torch.zeros(2, 3).int()),
            TypeError,
            "moe::swiglu_grad: grad_output must be float32, float64, bfloat16 or float16, "
            "got int32",
        ),
        Refusal(
            "gradient as wide as x",
            lambda: GradCall.sample(grad=torch.zeros(2, 6)),
            ValueError,
            "moe::swiglu_grad: grad_output must have shape [2, 3], got [2, 6]",
        ),
        Refusal(
            "gradient of another rank",
            lambda: GradCall.sample(grad=torch.zeros(3)),
            ValueError,
            "moe::swiglu_grad: grad_output must have shape [2, 3], got [3]",
        ),
        Refusal(
            "gradient on another device",
            lambda: GradCall.sample(grad=torch.zeros(2, 3, device="meta")),
            RuntimeError,
            "moe::swiglu_grad: grad_output must be on the device of x (cpu), got meta",
        ),
    )

    @staticmethod
    def with_grad(sample: Sample) -> Sample:
        (x,) = sample.args
        grad = Values(x.dtype, seed=2)(*x.shape[:-1], x.shape[-1] // 2)
        return Sample(sample.name, (grad, x))

    @staticmethod
    def samples(dtype: torch.dtype) -> list[Sample]:
        return [TestSwigluGrad.with_grad(sample) for sample in TestSwiglu.samples(dtype)]

    @staticmethod
    def big(dtype: torch.dtype) -> Sample:
        return TestSwigluGrad.with_grad(TestSwiglu.big(dtype))

    @staticmethod
    def dynamic(tokens: int) -> Sample:
        return TestSwigluGrad.with_grad(TestSwiglu.dynamic(tokens))

    def test_hand_table(self) -> None:
        """The slope of silu at +-ln 3 is 3/4 (1 + ln 3 / 4) and 1/4 (1 - 3/4 ln 3)."""
        ln3 = 1.0986122886681098
        x = torch.tensor([[0.0, ln3, -ln3, 5.0, 2.0, 4.0]], dtype=torch.float64)
        grad = torch.tensor([[1.0, 10.0, -100.0]], dtype=torch.float64)
        expected = torch.tensor(
            [
                # Slopes 1/2, 0.95598..., 0.04401... and silu 0, 0.82395..., -0.27465...
                [
                    2.5,
                    19.119796082505413,
                    -17.60407834989177,
                    0,
                    8.239592165010824,
                    27.465307216702745,
                ]
            ],
            dtype=torch.float64,
        )
        torch.testing.assert_close(torch_moe_ops.swiglu_grad(grad, x), expected, rtol=1e-14, atol=0)

    def test_accuracy_in_float32(self) -> None:
        """Of silu' = s + gate * (1 - s) * s. The second term has the most roundings, 12 units:

        five of 1 - s, as of s one more, a product, the sum, and s with two products.
        """
        gates, ones = GATES, torch.ones_like(GATES)
        slope, silu = halves(torch_moe_ops.swiglu_grad(ones, torch.cat([gates, ones])))
        wide = gates.double()
        s, rest = wide.sigmoid(), (-wide).sigmoid()
        terms = s + (wide * rest * s).abs()
        # The sigmoid of the lowest gates is below the normal numbers.
        tiny = (1 + wide.abs().clamp(max=105)) * SMALLEST
        assert_within(slope, s * (1 + wide * rest), 12 * UNIT * terms + tiny)
        assert_within(silu, wide * s, 5 * UNIT * (wide * s).abs() + tiny)

    @pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
    def test_special_values(self, wide: torch.dtype) -> None:
        """What torch's own gradient is: NaN at both infinities, as inf * 0 is."""
        gate = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1e3, -1e3, 3e38, -3e38], dtype=wide)
        x = torch.cat([gate, torch.full_like(gate, 2)])
        leaf = x.clone().requires_grad_()
        own, up = halves(leaf)
        (F.silu(own) * up).sum().backward()
        actual = torch_moe_ops.swiglu_grad(torch.ones_like(gate), x)
        assert torch.equal(torch.nan_to_num(actual, 7), torch.nan_to_num(leaf.grad, 7))

    def test_second_order_sum_is_rounded_once(self) -> None:
        """1000 * up * silu''(0) is 503.90625, 1000 * silu'(0) is 500; bfloat16 has 504."""
        x = torch.tensor([0.0, 1.0078125], dtype=torch.bfloat16, requires_grad=True)
        first = torch_moe_ops.swiglu_grad(torch.ones(1, dtype=torch.bfloat16), x)
        cotangent = torch.tensor([1000.0, -1000.0], dtype=torch.bfloat16)
        (second,) = torch.autograd.grad(first, x, cotangent)
        assert second.tolist() == [3.90625, 500]

    def test_definition_is_the_gradient_of_the_definition(self) -> None:
        x = Values(torch.float64)(7, 10).requires_grad_()
        grad = Values(torch.float64, seed=2)(7, 5)
        (expected,) = torch.autograd.grad(reference.swiglu(x), x, grad)
        torch.testing.assert_close(reference.swiglu_grad(grad, x), expected)

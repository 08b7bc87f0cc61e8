"""Low precision, autocast, and mixed dtypes."""

import pytest
import torch

from torch_moe_ops.nn import MoE

H, E = 32, 8
capacities = pytest.mark.parametrize("capacity_factor", [None, 0.75])


def make_pair(dtype, **options):
    """The same layer in `dtype` and, with the same rounded numbers, in float64."""
    torch.manual_seed(0)
    layer = MoE(H, 24, E, top_k=2, shared_intermediate_size=16, dtype=dtype, **options)
    exact = MoE(H, 24, E, top_k=2, shared_intermediate_size=16, dtype=torch.float64, **options)
    exact.load_state_dict(layer.state_dict())
    return layer, exact


@capacities
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)]
)
def test_low_precision_follows_float64(dtype, tolerance, capacity_factor):
    layer, exact = make_pair(dtype, capacity_factor=capacity_factor, aux_loss_coef=1.0)
    x = torch.randn(60, H).to(dtype).requires_grad_()
    x_exact = x.detach().double().requires_grad_()
    y, expected = layer(x), exact(x_exact)
    assert y.output.dtype == dtype
    assert y.aux_loss.dtype == torch.float32
    assert expected.aux_loss.dtype == torch.float64
    # Routed in float32, the choices are those of float64 for all tokens here.
    assert torch.equal(y.tokens_per_expert, expected.tokens_per_expert)
    torch.testing.assert_close(y.output.double(), expected.output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(y.aux_loss.double(), expected.aux_loss, rtol=1e-5, atol=1e-6)

    (y.output.float().sum() + y.aux_loss).backward()
    (expected.output.sum() + expected.aux_loss).backward()
    exact_parameters = dict(exact.named_parameters())
    grads = {"x": (x.grad, x_exact.grad)} | {
        name: (p.grad, exact_parameters[name].grad) for name, p in layer.named_parameters()
    }
    for name, (grad, grad_exact) in grads.items():
        assert grad.dtype == dtype, name
        error = (grad.double() - grad_exact).norm() / grad_exact.norm()
        assert error < tolerance, name


@capacities
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, capacity_factor):
    layer, _ = make_pair(torch.float32, capacity_factor=capacity_factor, aux_loss_coef=1.0)
    x = torch.randn(4, 30, H, requires_grad=True)
    expected = layer(x)
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.output.dtype == dtype
    # The router does not see autocast at all.
    assert torch.equal(y.tokens_per_expert, expected.tokens_per_expert)
    assert torch.equal(y.drop_rate, expected.drop_rate)
    assert torch.equal(y.aux_loss, expected.aux_loss)
    torch.testing.assert_close(y.output.float(), expected.output, rtol=3e-2, atol=3e-2)
    (y.output.float().sum() + y.aux_loss).backward()
    assert x.grad.dtype == torch.float32
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32, name
        assert parameter.grad.abs().sum() > 0, name


def test_autocast_accepts_bfloat16_weights_and_float32_input():
    layer, _ = make_pair(torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(5, H))
    y.output.float().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.bfloat16}


def test_mixed_dtypes_outside_autocast_are_refused():
    layer, _ = make_pair(torch.bfloat16)
    with pytest.raises(TypeError, match=r"float32.*bfloat16"):
        layer(torch.randn(5, H))


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_weights_are_not_rounded_to_the_rows(capacity_factor):
    # One token, experts that answer 256 and -256, weights 1/2 +- 2^-10: the sum is 1/2. Weights
    # rounded to bfloat16 would both be 1/2, and the sum 0.
    layer = MoE(2, 1, num_experts=2, top_k=2, capacity_factor=capacity_factor, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[2.0**-9, 0], [-(2.0**-9), 0]]))
        layer.experts.gate_up_proj.zero_()
        layer.experts.gate_up_proj[:, 0, :] = 16.0  # gate = up = 16: silu(16) * 16 is 256 in bf16
        layer.experts.down_proj[0] = 1.0
        layer.experts.down_proj[1] = -1.0
    x = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    # The softmax of +-2^-9 is 1/2 +- 2^-10, less 3e-10.
    assert layer(x).output.tolist() == [[0.5, 0.5]]

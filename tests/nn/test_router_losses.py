"""Load-balancing loss and z-loss."""

import math

import pytest
import torch

from torch_moe_ops.nn import MoE, load_balancing_loss, router_z_loss


def test_balance_by_hand():
    scores = torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]])
    counts = torch.tensor([2, 1, 1])  # K = 2: tokens chose (0, 1) and (0, 2)
    expected = 3 * (2 / 4 * 0.6 + 1 / 4 * 0.225 + 1 / 4 * 0.175)
    assert load_balancing_loss(scores, counts, top_k=2).item() == pytest.approx(expected)


@pytest.mark.parametrize("num_experts", [1, 2, 8, 64])
def test_balance_is_one_when_even_and_e_when_collapsed(num_experts):
    even = torch.full((num_experts, num_experts), 1 / num_experts)
    counts = torch.ones(num_experts, dtype=torch.int64)
    assert load_balancing_loss(even, counts, top_k=1).item() == pytest.approx(1)
    collapsed = torch.zeros(5, num_experts)
    collapsed[:, 0] = 1
    counts = torch.zeros(num_experts, dtype=torch.int32)
    counts[0] = 5
    assert load_balancing_loss(collapsed, counts, top_k=1).item() == pytest.approx(num_experts)


def test_z_by_hand():
    logits = torch.tensor([[0.0, 0.0], [1.0, math.log(3 - math.e)]])
    expected = (math.log(2) ** 2 + math.log(3) ** 2) / 2
    assert router_z_loss(logits).item() == pytest.approx(expected)
    # Far past where exp overflows.
    assert router_z_loss(torch.tensor([[1e4, 0.0]])).item() == pytest.approx(1e8)


def test_gradients():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    counts = torch.tensor([4, 0, 5, 1])

    def balance(logits):
        return load_balancing_loss(logits.softmax(dim=-1), counts, top_k=2)

    for function in (balance, router_z_loss):
        assert torch.autograd.gradcheck(function, (logits,))
        assert torch.autograd.gradgradcheck(function, (logits,))


def test_gradients_by_hand():
    scores = torch.full((2, 3), 1 / 3, dtype=torch.float64, requires_grad=True)
    load_balancing_loss(scores, torch.tensor([2, 1, 1]), top_k=2).backward()
    expected = torch.tensor([[0.75, 0.375, 0.375]] * 2, dtype=torch.float64)
    torch.testing.assert_close(scores.grad, expected)

    logits = torch.zeros(1, 4, dtype=torch.float64, requires_grad=True)
    router_z_loss(logits).backward()
    torch.testing.assert_close(logits.grad, torch.full_like(logits, 2 * math.log(4) / 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_reduced_in_float32(dtype):
    logits = torch.randn(4096, 8).to(dtype)
    z_loss = router_z_loss(logits)
    assert z_loss.dtype == torch.float32
    torch.testing.assert_close(z_loss, router_z_loss(logits.float()))
    scores = logits.softmax(dim=-1)
    counts = torch.full((8,), 512)
    torch.testing.assert_close(
        load_balancing_loss(scores, counts, 1), load_balancing_loss(scores.float(), counts, 1)
    )


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_no_tokens_is_zero_with_graph(score_function):
    layer = MoE(4, 4, 3, 2, score_function=score_function, aux_loss_coef=1.0, z_loss_coef=1.0)
    aux_loss = layer(torch.empty(0, 4)).aux_loss
    assert aux_loss.item() == 0
    aux_loss.backward()
    assert torch.equal(layer.router.weight.grad, torch.zeros(3, 4))


def test_coefficients():
    torch.manual_seed(0)
    x = torch.randn(9, 4)
    layer = MoE(4, 4, 3, 2)
    assert layer(x).aux_loss.item() == 0
    layer(x).aux_loss.backward()  # has a graph, so that it can always be added to a loss
    assert torch.equal(layer.router.weight.grad, torch.zeros(3, 4))

    def aux_loss(**coefficients):
        other = MoE(4, 4, 3, 2, **coefficients)
        other.load_state_dict(layer.state_dict())
        value = other(x).aux_loss
        assert value.dtype == torch.float32
        assert value.shape == ()
        return value.item()

    routed = layer.router(x)
    counts = routed.expert_ids.flatten().bincount(minlength=3)
    balance = load_balancing_loss(routed.scores, counts, 2).item()
    z_loss = router_z_loss(routed.logits).item()
    assert aux_loss(aux_loss_coef=0.5) == pytest.approx(0.5 * balance)
    assert aux_loss(z_loss_coef=0.25) == pytest.approx(0.25 * z_loss)
    assert aux_loss(aux_loss_coef=2, z_loss_coef=3) == pytest.approx(2 * balance + 3 * z_loss)


def test_aux_loss_of_a_nan_token_is_finite():
    torch.manual_seed(0)
    layer = MoE(4, 4, 3, 2, aux_loss_coef=1.0, z_loss_coef=1.0)
    x = torch.randn(5, 4)
    x[1, 2] = math.nan
    x.requires_grad_()
    aux_loss = layer(x).aux_loss
    assert aux_loss.isfinite()
    aux_loss.backward()
    assert x.grad[[0, 2, 3, 4]].isfinite().all()
    assert x.grad[[0, 2, 3, 4]].abs().sum(dim=1).gt(0).all()

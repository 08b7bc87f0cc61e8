"""Values, gradients and losses of the layer against its definition written out in loops."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from torch_moe_ops.nn import MoE

H, INTERMEDIATE, E = 6, 5, 4

CASES = [
    {},
    {"normalize_top_k": False},
    {"score_function": "sigmoid"},
    {"score_function": "sigmoid", "normalize_top_k": False},
    {"shared_intermediate_size": 3},
    {"capacity_factor": 0.5},
    {"capacity_factor": 1.0, "score_function": "sigmoid", "shared_intermediate_size": 7},
    {"capacity_factor": 0.75, "normalize_top_k": False},
    {"capacity_factor": 100.0},
]
CASE_IDS = ["-".join(f"{k}={v}" for k, v in case.items()) or "default" for case in CASES]


class DenseOutput(NamedTuple):
    output: Tensor
    balance_loss: Tensor
    z_loss: Tensor
    counts: list[int]
    dropped: list[tuple[int, int]]
    """(token, choice) of each choice that found its expert full."""


def swiglu(x_H: Tensor, gate_up_H2I: Tensor, down_IH: Tensor) -> Tensor:
    gate_up = x_H @ gate_up_H2I
    half = gate_up.shape[0] // 2
    gate, up = gate_up[:half], gate_up[half:]
    return (gate / (1 + torch.exp(-gate)) * up) @ down_IH


def dense_moe(
    x_TH: Tensor,
    weights: dict[str, Tensor],
    top_k: int,
    score_function: str = "softmax",
    normalize_top_k: bool = True,
    capacity_factor: float | None = None,
) -> DenseOutput:
    """The layer written out: loops over tokens and experts, scalars and dot products only.

    Independent of the package, and differentiable by ordinary autograd. `weights` has the names of
    the layer's state_dict.
    """
    router_EH = weights["router.weight"]
    num_tokens, num_experts = x_TH.shape[0], router_EH.shape[0]
    capacity = num_tokens
    if capacity_factor is not None:
        average = capacity_factor * num_tokens * top_k / num_experts
        capacity = min(num_tokens, max(1, math.ceil(average)))

    counts = [0] * num_experts
    dropped = []
    rows = []
    squared_lse = []
    score_shares = []
    for t in range(num_tokens):
        logits = [x_TH[t] @ router_EH[e] for e in range(num_experts)]
        total = sum(torch.exp(logit) for logit in logits)
        if score_function == "softmax":
            scores = [torch.exp(logit) / total for logit in logits]
        else:
            scores = [1 / (1 + torch.exp(-logit)) for logit in logits]
        squared_lse.append(torch.log(total) ** 2)
        score_shares.append([score / sum(scores) for score in scores])

        chosen = sorted(range(num_experts), key=lambda e: (-logits[e].item(), e))[:top_k]
        norm = sum(scores[e] for e in chosen) if normalize_top_k else 1.0
        row = torch.zeros_like(x_TH[t])
        for k, e in enumerate(chosen):
            counts[e] += 1
            if counts[e] > capacity:
                dropped.append((t, k))
                continue
            y = swiglu(x_TH[t], weights["experts.gate_up_proj"][e], weights["experts.down_proj"][e])
            row = row + scores[e] / norm * y
        if "shared_expert.down_proj.weight" in weights:
            row = row + swiglu(
                x_TH[t],
                weights["shared_expert.gate_up_proj.weight"].T,
                weights["shared_expert.down_proj.weight"].T,
            )
        rows.append(row)

    mean_scores = [sum(share[e] for share in score_shares) / num_tokens for e in range(num_experts)]
    balance = num_experts * sum(
        counts[e] / (num_tokens * top_k) * mean_scores[e] for e in range(num_experts)
    )
    return DenseOutput(torch.stack(rows), balance, sum(squared_lse) / num_tokens, counts, dropped)


def make_layer(**options):
    torch.manual_seed(1)
    return MoE(H, INTERMEDIATE, E, **{"top_k": 2, "dtype": torch.float64, **options})


def make_input(num_tokens=7, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, H, dtype=torch.float64, generator=generator) * 2


def run_dense(layer, x, options):
    weights = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    routing = {k: v for k, v in options.items() if k != "shared_intermediate_size"}
    return weights, dense_moe(x, weights, **{"top_k": layer.top_k, **routing})


@pytest.mark.parametrize("options", CASES, ids=CASE_IDS)
def test_value_gradients_and_losses(options):
    layer = make_layer(aux_loss_coef=0.3, z_loss_coef=0.7, **options)
    x = make_input().requires_grad_()
    x_dense = x.detach().clone().requires_grad_()
    weights, expected = run_dense(layer, x_dense, options)
    y = layer(x)

    torch.testing.assert_close(y.output, expected.output, rtol=1e-12, atol=1e-12)
    expected_aux = 0.3 * expected.balance_loss + 0.7 * expected.z_loss
    torch.testing.assert_close(y.aux_loss, expected_aux, rtol=1e-12, atol=1e-12)
    assert y.tokens_per_expert.tolist() == expected.counts
    assert y.drop_rate.item() == pytest.approx(len(expected.dropped) / (x.shape[0] * 2))

    upstream = torch.randn_like(x)
    ((y.output * upstream).sum() + y.aux_loss).backward()
    ((expected.output * upstream).sum() + expected_aux).backward()
    torch.testing.assert_close(x.grad, x_dense.grad, rtol=1e-11, atol=1e-12)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-11, atol=1e-12, msg=name
        )


def test_some_cases_do_drop():
    # Guards the table above: a capacity test in which nothing overflows would test nothing.
    layer = make_layer(capacity_factor=0.5)
    _, expected = run_dense(layer, make_input(), {"capacity_factor": 0.5})
    assert expected.dropped


@pytest.mark.parametrize("top_k", [1, 3, 4])
def test_any_number_of_choices(top_k):
    layer = make_layer(top_k=top_k)
    x = make_input()
    _, expected = run_dense(layer, x, {})
    torch.testing.assert_close(layer(x).output, expected.output, rtol=1e-12, atol=1e-12)


def test_one_expert():
    layer = MoE(H, INTERMEDIATE, num_experts=1, top_k=1, dtype=torch.float64)
    x = make_input()
    _, expected = run_dense(layer, x, {})
    torch.testing.assert_close(layer(x).output, expected.output, rtol=1e-12, atol=1e-12)


def test_full_expert_drops_the_last_tokens():
    # One choice per token, all of them for expert 2. Capacity ceil(1.5 * 6 / 4) = 3.
    layer = make_layer(top_k=1, capacity_factor=1.5)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2] = 1.0
    x = make_input(6).abs().requires_grad_()
    y = layer(x)
    free = make_layer(top_k=1)
    free.load_state_dict(layer.state_dict())

    assert layer.expert_capacity(6) == 3
    torch.testing.assert_close(y.output[:3], free(x).output[:3])
    assert torch.equal(y.output[3:], torch.zeros(3, H, dtype=torch.float64))
    assert y.tokens_per_expert.tolist() == [0, 0, 6, 0]
    assert y.drop_rate.item() == 0.5
    y.output.sum().backward()
    assert torch.equal(x.grad[3:], torch.zeros(3, H, dtype=torch.float64))
    assert x.grad[:3].abs().sum(dim=1).gt(0).all()


def test_enough_capacity_equals_dropless():
    x = make_input(33)
    layer = make_layer(shared_intermediate_size=3)
    limited = make_layer(shared_intermediate_size=3, capacity_factor=2.0)  # C = T with E = 2K
    assert limited.expert_capacity(33) == 33
    torch.testing.assert_close(limited(x).output, layer(x).output, rtol=1e-12, atol=1e-12)
    assert limited(x).drop_rate.item() == 0


@pytest.mark.parametrize(
    ("factor", "num_tokens", "top_k", "expected"),
    [
        (None, 7, 2, 7),
        (1.0, 8, 2, 4),
        (1.25, 8, 2, 5),
        (1.0, 7, 1, 2),
        (0.001, 8, 2, 1),
        (100.0, 8, 2, 8),
        (1.1, 20, 2, 11),
        (1 / 3, 12, 1, 1),
        (2 / 3, 12, 2, 4),
        (1, 4, 4, 4),
        (0.5, 0, 2, 0),
    ],
)
def test_expert_capacity(factor, num_tokens, top_k, expected):
    layer = MoE(2, 2, num_experts=4, top_k=top_k, capacity_factor=factor)
    assert layer.expert_capacity(num_tokens) == expected
    # The formula as people write it, away from the edges of rounding.
    if factor is not None and factor != 1.1:
        plain = math.ceil(round(factor * num_tokens * top_k / 4, 9))
        assert expected == min(num_tokens, max(1, plain))


@pytest.mark.parametrize("leading", [(7,), (), (1, 7), (2, 3), (2, 1, 3, 2), (0, 5), (3, 0)])
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_leading_dimensions_count_as_tokens(leading, capacity_factor):
    layer = make_layer(capacity_factor=capacity_factor)
    x = make_input(math.prod(leading)).reshape(*leading, H)
    y = layer(x)
    assert y.output.shape == x.shape
    assert torch.equal(y.output.reshape(-1, H), layer(x.reshape(-1, H)).output)


def test_input_that_is_not_contiguous():
    layer = make_layer()
    x = make_input(12).reshape(3, 4, H)
    expected = layer(x.transpose(0, 1).contiguous()).output
    assert torch.equal(layer(x.transpose(0, 1)).output, expected)
    one = make_input(1)
    assert torch.equal(layer(one.expand(5, H)).output, layer(one.repeat(5, 1)).output)


def test_second_derivatives():
    # A fixed choice: the layer is smooth as long as no two logits cross.
    layer = make_layer(shared_intermediate_size=2, z_loss_coef=0.1, aux_loss_coef=0.1)
    x = make_input(3).requires_grad_()

    def function(x, *parameters):
        named = dict(zip(dict(layer.named_parameters()), parameters, strict=True))
        y = torch.func.functional_call(layer, named, (x,))
        return y.output, y.aux_loss

    inputs = (x, *layer.parameters())
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_capacity_second_derivatives():
    layer = make_layer(capacity_factor=0.5)
    x = make_input(5).requires_grad_()
    assert layer(x).drop_rate > 0
    assert torch.autograd.gradgradcheck(lambda x: layer(x).output, (x,), fast_mode=True)

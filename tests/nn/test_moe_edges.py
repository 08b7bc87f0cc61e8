"""The layer at its edges: no tokens, idle experts, bad tokens, frozen parameters, bad arguments."""

import itertools
import math
import re

import pytest
import torch

from torch_moe_ops.nn import GroupedSwiGLU, MoE, SwiGLU

H, E = 16, 4
capacities = pytest.mark.parametrize("capacity_factor", [None, 1.0])
score_functions = pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])


def make_layer(**options):
    torch.manual_seed(0)
    defaults = {"hidden_size": H, "intermediate_size": 16, "num_experts": E, "top_k": 2}
    return MoE(**{**defaults, **options})


def exactly(message):
    return f"^{re.escape(message)}$"


def send_all_to(layer, *experts):
    """Every token of positive numbers goes to these experts, best first."""
    with torch.no_grad():
        layer.router.weight.fill_(-1.0)
        for rank, expert in enumerate(experts):
            layer.router.weight[expert] = 1.0 - 0.1 * rank


@capacities
@score_functions
@pytest.mark.parametrize("shape", [(0, H), (2, 0, H)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_no_tokens(capacity_factor, score_function, shape, dtype):
    layer = make_layer(
        capacity_factor=capacity_factor,
        score_function=score_function,
        shared_intermediate_size=8,
        aux_loss_coef=1.0,
        z_loss_coef=1.0,
        dtype=dtype,
    )
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    y = layer(x)
    assert y.output.shape == shape
    assert y.output.dtype == dtype
    assert y.aux_loss.item() == 0
    assert y.tokens_per_expert.tolist() == [0] * E
    assert y.drop_rate.item() == 0
    (y.output.sum() + y.aux_loss).backward()
    assert x.grad.shape == shape
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@capacities
def test_idle_experts_get_zero_gradients(capacity_factor):
    layer = make_layer(capacity_factor=capacity_factor)
    send_all_to(layer, 3, 1)
    y = layer(torch.rand(6, H) + 0.1)
    assert y.tokens_per_expert.tolist() == [0, 6, 0, 6]
    y.output.sum().backward()
    for weight in layer.experts.parameters():
        used = weight.grad.flatten(1).abs().sum(dim=1) > 0
        assert used.tolist() == [False, True, False, True]


@capacities
@score_functions
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_token_stays_alone(capacity_factor, score_function, normalize, bad):
    # Whole numbers in float64, so that sums are exact in any order; and row sizes that are whole
    # vectors, so that each element meets the same instructions wherever its row stands.
    layer = make_layer(
        capacity_factor=capacity_factor and float(E),
        score_function=score_function,
        normalize_top_k=normalize,
        shared_intermediate_size=16,
        dtype=torch.float64,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    clean = torch.randint(-2, 3, (8, H), generator=generator).double()
    x = clean.clone()
    x[5, 3] = bad
    y = layer(x)
    others = [t for t in range(8) if t != 5]
    assert torch.equal(y.output[others], layer(clean).output[others])
    assert y.tokens_per_expert.sum() == 16
    if math.isnan(bad):
        assert y.output[5].isnan().all()
    assert not y.output[5].isfinite().all()


@pytest.mark.parametrize("score_function", ["softmax", "sigmoid"])
def test_nan_token_without_shared_expert_is_nan(score_function):
    for normalize, capacity_factor in itertools.product([True, False], [None, 4.0]):
        layer = make_layer(
            score_function=score_function,
            normalize_top_k=normalize,
            capacity_factor=capacity_factor,
        )
        x = torch.randn(3, H)
        x[1] = math.nan
        is_nan = layer(x).output.isnan()
        assert is_nan.all(dim=1).tolist() == is_nan.any(dim=1).tolist() == [False, True, False]


@capacities
def test_gradients_only_where_asked(capacity_factor):
    layer = make_layer(capacity_factor=capacity_factor, top_k=3)
    parameters = dict(layer.named_parameters())
    x = torch.randn(5, H)
    x.requires_grad_()
    layer(x).output.sum().backward()
    expected = {"x": x.grad} | {name: p.grad for name, p in parameters.items()}
    for wanted in itertools.product([False, True], repeat=1 + len(parameters)):
        if not any(wanted):
            continue
        layer.zero_grad()
        leaves = {"x": x.detach().clone()} | parameters
        for leaf, flag in zip(leaves.values(), wanted, strict=True):
            leaf.requires_grad_(flag)
        layer(leaves["x"]).output.sum().backward()
        for (name, leaf), flag in zip(leaves.items(), wanted, strict=True):
            if flag:
                assert torch.equal(leaf.grad, expected[name]), (name, wanted)
            else:
                assert leaf.grad is None, (name, wanted)


def test_no_grad_and_inference_mode():
    layer = make_layer(aux_loss_coef=1.0)
    x = torch.randn(5, H)
    expected = layer(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x)
        assert not y.output.requires_grad
        assert torch.equal(y.output, expected.output)
        assert torch.equal(y.aux_loss, expected.aux_loss)


def test_counts_and_drop_rate_carry_no_graph():
    y = make_layer(capacity_factor=0.5)(torch.randn(9, H))
    assert y.tokens_per_expert.dtype == torch.int64
    assert not y.tokens_per_expert.requires_grad
    assert y.drop_rate.dtype == torch.float32
    assert not y.drop_rate.requires_grad
    assert y.aux_loss.requires_grad


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 9}, "MoE: top_k must be in [1, num_experts=4], got 9"),
        ({"top_k": True}, "MoE: top_k must be in [1, num_experts=4], got True"),
        ({"hidden_size": 0}, "MoE: hidden_size must be a positive int, got 0"),
        ({"intermediate_size": 2.5}, "MoE: intermediate_size must be a positive int, got 2.5"),
        ({"num_experts": -4}, "MoE: num_experts must be a positive int, got -4"),
        (
            {"shared_intermediate_size": 0},
            "MoE: shared_intermediate_size must be a positive int, got 0",
        ),
        (
            {"capacity_factor": 0},
            "MoE: capacity_factor must be None or positive and finite, got 0",
        ),
        (
            {"capacity_factor": math.nan},
            "MoE: capacity_factor must be None or positive and finite, got nan",
        ),
        (
            {"score_function": "relu"},
            "MoE: score_function must be 'softmax' or 'sigmoid', got 'relu'",
        ),
        ({"aux_loss_coef": -1.0}, "MoE: aux_loss_coef must be finite and >= 0, got -1.0"),
        ({"z_loss_coef": math.inf}, "MoE: z_loss_coef must be finite and >= 0, got inf"),
    ],
)
def test_constructor_errors(arguments, message):
    with pytest.raises(ValueError, match=exactly(message)):
        make_layer(**arguments)


def test_capacity_factor_can_be_changed():
    layer = make_layer(top_k=1)
    assert layer.expert_capacity(8) == 8
    layer.capacity_factor = 1.5
    assert layer.capacity_factor == 1.5
    assert layer.expert_capacity(8) == 3
    with pytest.raises(ValueError, match=r"^MoE: capacity_factor must be None or positive"):
        layer.capacity_factor = -1.0
    layer.capacity_factor = None
    assert layer.expert_capacity(8) == 8


def test_errors_of_the_parts():
    with pytest.raises(ValueError, match=r"^GroupedSwiGLU: num_experts must be a positive int"):
        GroupedSwiGLU(8, 8, 0)
    with pytest.raises(ValueError, match=r"^SwiGLU: intermediate_size must be a positive int"):
        SwiGLU(8, -1)


@pytest.mark.parametrize("shape", [(3, H + 1), (H, 3), (0, H - 1), ()])
def test_input_of_the_wrong_width(shape):
    message = f"MoE: x must have shape (..., hidden_size=16), got {list(shape)}"
    with pytest.raises(ValueError, match=exactly(message)):
        make_layer()(torch.zeros(shape))


def test_parameters_start_like_a_linear_layer():
    layer = MoE(256, 64, num_experts=3, top_k=1, shared_intermediate_size=32)
    fan_in = {
        "router.weight": 256,
        "experts.gate_up_proj": 256,
        "experts.down_proj": 64,
        "shared_expert.gate_up_proj.weight": 256,
        "shared_expert.down_proj.weight": 32,
    }
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == fan_in.keys()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    for name, parameter in parameters.items():
        bound = 1 / math.sqrt(fan_in[name])
        assert parameter.abs().max() <= bound
        assert parameter.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    layer.reset_parameters()
    assert all(not torch.equal(parameters[name], before[name]) for name in before)


def test_device_and_dtype_reach_every_parameter():
    layer = make_layer(shared_intermediate_size=8, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    for capacity_factor in (None, 1.5):
        layer.capacity_factor = capacity_factor
        y = layer(torch.empty(2, 5, H, device="meta", dtype=torch.bfloat16))
        assert y.output.shape == (2, 5, H)
        assert y.output.dtype == torch.bfloat16


def test_repr_shows_the_setting():
    text = repr(make_layer(capacity_factor=1.5, score_function="sigmoid", z_loss_coef=0.1))
    for part in ("top_k=2", "num_experts=4", "'sigmoid'", "capacity_factor=1.5", "z_loss_coef=0.1"):
        assert part in text

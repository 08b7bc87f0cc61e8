"""The router alone: ties, bad logits, precision, weights."""

import math
import re

import pytest
import torch
import torch.nn.functional as F

from torch_moe_ops.nn import TopKRouter

MODES = [(f, n) for f in ("softmax", "sigmoid") for n in (True, False)]
modes = pytest.mark.parametrize(("score_function", "normalize"), MODES)


def make_router(num_experts=4, top_k=2, score_function="softmax", normalize=True, hidden_size=8):
    torch.manual_seed(0)
    return TopKRouter(
        hidden_size,
        num_experts,
        top_k,
        score_function=score_function,
        normalize_top_k=normalize,
    )


@modes
def test_ties_go_to_the_lower_id(score_function, normalize):
    router = make_router(5, 2, score_function, normalize)
    assert router.route(torch.tensor([[1.0, 3, 3, 3, 0]])).expert_ids.tolist() == [[1, 2]]
    router = make_router(128, 8, score_function, normalize)
    routed = router.route(torch.zeros(3, 128))
    assert routed.expert_ids.tolist() == [list(range(8))] * 3
    assert (routed.probs == routed.probs[0, 0]).all()
    zeros_of_both_signs = torch.tensor([[-0.0, 0.0]]).repeat(1, 64)
    assert router.route(zeros_of_both_signs).expert_ids.tolist() == [list(range(8))]


def test_saturated_scores_are_still_told_apart():
    # sigmoid(30) and sigmoid(40) are both 1 in float32; the logits differ.
    router = make_router(4, 2, "sigmoid")
    routed = router.route(torch.tensor([[30.0, 0, 40, 35]]))
    assert routed.expert_ids.tolist() == [[2, 3]]


def test_weights_by_hand():
    logits = torch.tensor([[0.0, math.log(2.0), math.log(5.0), 0.0]], dtype=torch.float64)
    expected = {
        ("softmax", False): [5 / 9, 2 / 9],
        ("softmax", True): [5 / 7, 2 / 7],
        ("sigmoid", False): [5 / 6, 2 / 3],
        ("sigmoid", True): [5 / 9, 4 / 9],
    }
    for (score_function, normalize), weights in expected.items():
        routed = make_router(4, 2, score_function, normalize).route(logits)
        assert routed.expert_ids.tolist() == [[2, 1]]
        assert routed.probs.tolist()[0] == pytest.approx(weights, abs=1e-15)
    shares = make_router(4, 2, "sigmoid").route(logits).scores.tolist()[0]
    total = 1 / 2 + 2 / 3 + 5 / 6 + 1 / 2
    assert shares == pytest.approx([0.5 / total, 2 / 3 / total, 5 / 6 / total, 0.5 / total])


@modes
@pytest.mark.parametrize(
    "bad",
    [
        [math.nan] * 6,
        [-math.inf] * 6,
        [math.inf] * 6,
        [0.5, math.nan, 1.0, 2.0, -1.0, 0.0],
        [math.nan, math.nan, math.nan, math.nan, math.nan, -5.0],
        [math.inf, math.inf, -math.inf, math.nan, 1.0, 0.0],
        [-200.0] * 6,
        [-200.0, -180.0, -190.0, -200.0, -300.0, -185.0],
        [3.4e38, -3.4e38, 3.4e38, 0.0, 0.0, 0.0],
    ],
    ids=str,
)
def test_bad_logits(bad, score_function, normalize):
    router = make_router(6, 3, score_function, normalize)
    clean = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    logits = clean.clone()
    logits[2] = torch.tensor(bad)
    logits.requires_grad_()
    routed = router.route(logits)
    expected = router.route(clean)

    assert all(
        len(set(row)) == 3 and set(row) <= set(range(6)) for row in routed.expert_ids.tolist()
    )
    for part in (routed.probs, routed.scores, routed.logits):
        assert part.isfinite().all()
    torch.testing.assert_close(routed.scores.sum(dim=-1), torch.ones(5))
    if normalize:
        torch.testing.assert_close(routed.probs.sum(dim=-1), torch.ones(5))
    others = [0, 1, 3, 4]
    for part, part_expected in zip(routed, expected, strict=True):
        assert torch.equal(part[others], part_expected[others])

    (routed.probs.sin().sum() + routed.scores.cos().sum()).backward()
    assert logits.grad.isfinite().all()


def test_nan_is_chosen_last_and_infinity_first():
    router = make_router(5, 3)
    logits = torch.tensor([[math.nan, -1.0, math.inf, -2.0, -math.inf]])
    assert router.route(logits).expert_ids.tolist() == [[2, 1, 3]]


@modes
def test_row_of_nan_keeps_weights_above_zero(score_function, normalize):
    # token_unpermute skips weights of exactly 0, which would turn a NaN token into zeros.
    probs = make_router(4, 2, score_function, normalize).route(torch.full((1, 4), math.nan)).probs
    assert (probs > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_maths_in_float32(dtype, weight_dtype, autocast):
    router = make_router(8, 2, hidden_size=64).to(weight_dtype)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        routed = router(x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    logits = F.linear(x.to(wide), router.weight.to(wide))
    assert routed.logits.dtype == routed.probs.dtype == routed.scores.dtype == wide
    assert torch.equal(routed.logits, logits)
    chosen = logits.sort(dim=-1, descending=True, stable=True).indices[:, :2]
    assert torch.equal(routed.expert_ids, chosen)


@modes
def test_gradcheck(score_function, normalize):
    router = make_router(5, 2, score_function, normalize)
    logits = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)

    def function(logits):
        return router.route(logits)[1:]

    assert torch.autograd.gradcheck(function, (logits,))
    assert torch.autograd.gradgradcheck(function, (logits,))


@modes
def test_no_tokens(score_function, normalize):
    router = make_router(5, 2, score_function, normalize)
    routed = router(torch.empty(0, 8))
    assert [tuple(part.shape) for part in routed] == [(0, 2), (0, 2), (0, 5), (0, 5)]
    sum(part.sum() for part in routed[1:]).backward()
    assert torch.equal(router.weight.grad, torch.zeros(5, 8))


def test_meta_device():
    router = TopKRouter(8, 5, 2, device="meta", dtype=torch.bfloat16)
    routed = router(torch.empty(3, 8, device="meta", dtype=torch.bfloat16))
    assert routed.probs.shape == (3, 2)
    assert routed.probs.dtype == torch.float32


def test_initial_weight_is_that_of_a_linear_layer():
    router = TopKRouter(400, 50, 2)
    bound = 1 / math.sqrt(400)
    assert router.weight.abs().max() <= bound
    assert router.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    before = router.weight.detach().clone()
    router.reset_parameters()
    assert not torch.equal(router.weight, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 9}, "TopKRouter: top_k must be in [1, num_experts=4], got 9"),
        ({"top_k": 0}, "TopKRouter: top_k must be in [1, num_experts=4], got 0"),
        ({"num_experts": 0}, "TopKRouter: num_experts must be a positive int, got 0"),
        ({"hidden_size": -1}, "TopKRouter: hidden_size must be a positive int, got -1"),
        (
            {"score_function": "relu"},
            "TopKRouter: score_function must be 'softmax' or 'sigmoid', got 'relu'",
        ),
    ],
)
def test_constructor_errors(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        TopKRouter(**{"hidden_size": 8, "num_experts": 4, "top_k": 2, **arguments})

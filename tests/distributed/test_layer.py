"""The expert-parallel layer against the layer of one process: values, gradients, losses, copies.

The reference is a layer without a group that sees the tokens of one rank after the other: that is
what capacities, counts and drop rates are documented to be of.
"""

import copy
import io
import pickle
import re

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from torch_moe_ops import exchange_counts
from torch_moe_ops.nn import GroupedSwiGLU, MoE

H, E = 8, 4
TOKENS = [7, 0, 12, 3]  # of each rank
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
WORLD_SIZES = [1, 2, 4]


@pytest.fixture(params=WORLD_SIZES)
def ranks(request, pool):
    return pool(request.param)


def make_layer(ep_group, **options):
    torch.manual_seed(3)
    defaults = {"shared_intermediate_size": 6, "aux_loss_coef": 0.5, "z_loss_coef": 0.1}
    defaults |= {"num_experts": E, "dtype": torch.float64}
    return MoE(H, 12, top_k=2, ep_group=ep_group, **{**defaults, **options})


def make_tokens(tokens, dtype=torch.float64):
    """The input of each rank, and the gradient of its output."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, n, H, generator=generator, dtype=dtype) for n in tokens]


def local_slice(whole, rank, world_size):
    e = E // world_size
    return whole[rank * e : (rank + 1) * e]


def run(layer, x, weight, needs_grad=True, call=None):
    """Outputs, then the gradients of x and of the parameters by name. ``call`` wraps the layer."""
    leaf = x.clone().requires_grad_(needs_grad)
    call = layer if call is None else call
    output, aux_loss, counts, drop_rate = call(leaf)
    ((output * weight).sum() + aux_loss).backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return [output.detach(), aux_loss.detach(), counts, drop_rate], leaf.grad, grads


def assert_same_bits(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def on_ranks(rank, tokens, options, needs_grad, tolerance):
    """Checks this rank's part; every assertion compares with the layer of one process."""
    world_size = dist.get_world_size()
    layer, whole = make_layer(dist.group.WORLD, **options), make_layer(None, **options)
    outputs, x_grad, grads = run(layer, *make_tokens(tokens)[rank], needs_grad[rank])
    expected = [run(whole, *pair) for pair in make_tokens(tokens)]  # their gradients add up
    close = {"rtol": tolerance, "atol": tolerance}

    output, _, counts, drop_rate = outputs
    torch.testing.assert_close(output, expected[rank][0][0], **close)
    assert torch.equal(counts, expected[rank][0][2])
    assert torch.equal(drop_rate, expected[rank][0][3])
    if needs_grad[rank]:
        torch.testing.assert_close(x_grad, expected[rank][1], **close)
    for name, grad in expected[-1][2].items():
        if name in EXPERTS:
            grad = local_slice(grad, rank, world_size)
        else:
            dist.all_reduce(grads[name])
        torch.testing.assert_close(grads[name], grad, **close)
    return drop_rate.item()


@pytest.mark.parametrize(
    "options", [{}, {"capacity_factor": 0.6}, {"score_function": "sigmoid"}], ids=str
)
def test_equals_one_process(ranks, options):
    # The balance loss is of all tokens; it has tests of its own.
    options = {**options, "aux_loss_coef": 0.0}
    tokens = TOKENS[: ranks.world_size]
    rates = ranks.run(on_ranks, tokens, options, [True] * len(tokens), 1e-10)
    assert any(rates) == ("capacity_factor" in options)


def test_input_that_needs_no_gradient(ranks):
    # Every rank takes part in the backward pass of all others, whatever it needs itself.
    tokens = TOKENS[: ranks.world_size]
    for needs_grad in ([False, True] * 2, [False] * 4):
        ranks.run(on_ranks, tokens, {"aux_loss_coef": 0.0}, needs_grad, 1e-10)


def aux_losses(rank, options):
    tokens = make_tokens([6] * dist.get_world_size())
    layer, whole = make_layer(dist.group.WORLD, **options), make_layer(None, **options)
    y, expected = layer(tokens[rank][0]), whole(torch.cat([x for x, _ in tokens]))
    y.aux_loss.backward()
    expected.aux_loss.backward()
    mean = torch.stack([y.aux_loss.detach(), layer.router.weight.grad.norm()]) / len(tokens)
    dist.all_reduce(mean)
    router_grad = layer.router.weight.grad / len(tokens)
    dist.all_reduce(router_grad)
    torch.testing.assert_close(mean[0], expected.aux_loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(router_grad, whole.router.weight.grad, rtol=1e-10, atol=1e-12)
    load = y.tokens_per_expert.clone()
    dist.all_reduce(load)
    assert torch.equal(load, expected.tokens_per_expert)


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.5}], ids=str)
def test_mean_aux_loss_is_that_of_one_process(ranks, options):
    ranks.run(aux_losses, options)


def no_tokens_anywhere(rank, options):
    layer = make_layer(dist.group.WORLD, **options)
    x = torch.empty(0, H, dtype=torch.float64)
    y = layer(x)
    assert y.output.shape == (0, H)
    assert y.aux_loss.item() == 0
    (y.output.sum() + y.aux_loss).backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter)), name


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.5}], ids=str)
def test_no_tokens_anywhere(ranks, options):
    ranks.run(no_tokens_anywhere, options)


def draws(rank, dtype):
    layer = make_layer(dist.group.WORLD, dtype=dtype)
    state = torch.get_rng_state()
    whole = make_layer(None, dtype=dtype)
    assert torch.equal(state, torch.get_rng_state())
    for _ in range(2):
        for name, parameter in whole.named_parameters():
            if name in EXPERTS:
                parameter = local_slice(parameter, rank, dist.get_world_size())
            assert torch.equal(layer.state_dict()[name], parameter), name
        torch.manual_seed(9)
        layer.reset_parameters()
        torch.manual_seed(9)
        whole.reset_parameters()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_weights_are_those_of_one_process(ranks, dtype):
    ranks.run(draws, dtype)


def one_rank_bits(rank):
    x, weight = make_tokens([5])[0]
    group = alone(rank)
    for options in ({}, {"capacity_factor": 0.5}):
        first, second = (run(make_layer(group, **options), x, weight) for group in (None, group))
        assert_same_bits(first, second)


def alone(rank):
    """A group of this rank only; all ranks have to make all groups."""
    return [dist.new_group([r]) for r in range(dist.get_world_size())][rank]


def test_a_group_of_one_changes_no_bit(ranks):
    ranks.run(one_rank_bits)


def subgroup(rank):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = pairs[rank % 2]
    layer, whole = make_layer(group, aux_loss_coef=0.0), make_layer(None, aux_loss_coef=0.0)
    tokens = make_tokens(TOKENS)
    output, x_grad, _ = run(layer, *tokens[rank])
    expected, expected_grad, _ = run(whole, *tokens[rank])
    torch.testing.assert_close(output[0], expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(x_grad, expected_grad, rtol=1e-10, atol=1e-10)
    message = "MoE: ep_group must be None or a ProcessGroup that this rank belongs to"
    with pytest.raises(TypeError, match=message):
        make_layer(pairs[1 - rank % 2])


def constructor_errors(rank):
    message = "MoE: num_experts must be a multiple of the number of ranks in ep_group (4), got 6"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make_layer(dist.group.WORLD, num_experts=6)
    with pytest.raises(ValueError, match=r"^GroupedSwiGLU: num_experts must be .* \(4\), got 2$"):
        GroupedSwiGLU(4, 4, 2, ep_group=dist.group.WORLD)
    with pytest.raises(TypeError, match=r"^MoE: ep_group must be None or a ProcessGroup"):
        make_layer("0")


def test_groups_that_are_not_the_world(ranks):
    if ranks.world_size == 4:
        ranks.run(subgroup)
        ranks.run(constructor_errors)


def copies(rank):
    layer = make_layer(dist.group.WORLD)
    x, _ = make_tokens(TOKENS)[rank]
    y = layer(x)
    twin = copy.deepcopy(layer)
    assert twin.experts.ep_group is dist.group.WORLD
    assert torch.equal(twin(x).output, y.output)
    with torch.no_grad():
        twin.experts.down_proj.zero_()
    assert torch.equal(layer(x).output, y.output)
    for dump in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be pickled.*save its state_dict\(\) instead"):
            dump(layer)
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(twin(x).output, y.output)


def test_copy_and_save(ranks):
    ranks.run(copies)


def recomputed(rank, use_reentrant, options):
    layer = make_layer(dist.group.WORLD, **options)
    with torch.no_grad():
        layer.router.weight[3] = layer.router.weight[1]  # exact ties for every token
        layer.router.weight[2] = layer.router.weight[1]
    x, weight = make_tokens([9, 4, 6, 5])[rank]
    plain = run(layer, x, weight)
    layer.zero_grad()

    def call(leaf):
        return checkpoint(layer, leaf, use_reentrant=use_reentrant)

    assert_same_bits(run(layer, x, weight, call=call), plain)


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.5}], ids=str)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_is_bitwise_the_same(ranks, use_reentrant, options):
    ranks.run(recomputed, use_reentrant, options)


def compiled(rank):
    for options in ({}, {"capacity_factor": 0.5}):
        layer = make_layer(dist.group.WORLD, **options)
        function = torch.compile(layer, backend="aot_eager", dynamic=True)
        for tokens in (TOKENS, [3, 1], [5, 5]):
            x, weight = make_tokens(tokens)[rank]
            layer.zero_grad()
            plain = run(layer, x, weight)
            layer.zero_grad()
            torch.testing.assert_close(run(layer, x, weight, call=function), plain)


def test_compiles_with_a_break(ranks):
    if ranks.world_size == 2:
        ranks.run(compiled, timeout=60)


def bfloat16(rank, options):
    layer = make_layer(dist.group.WORLD, dtype=torch.bfloat16, **options)
    exact = make_layer(dist.group.WORLD, **options)
    exact.load_state_dict(layer.state_dict())
    x, _ = make_tokens([30] * dist.get_world_size(), dtype=torch.bfloat16)[rank]
    leaf, leaf_exact = x.clone().requires_grad_(), x.double().requires_grad_()
    y, expected = layer(leaf), exact(leaf_exact)
    assert torch.equal(y.tokens_per_expert, expected.tokens_per_expert)
    torch.testing.assert_close(y.output.double(), expected.output, rtol=2e-2, atol=2e-2)
    (y.output.float().sum() + y.aux_loss).backward()
    (expected.output.sum() + expected.aux_loss).backward()
    names = dict(exact.named_parameters())
    pairs = [(p, names[name]) for name, p in layer.named_parameters()]
    for p, p_exact in [(leaf, leaf_exact), *pairs]:
        assert p.grad.dtype == torch.bfloat16
        assert (p.grad.double() - p_exact.grad).norm() < 2e-2 * p_exact.grad.norm()


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.75}], ids=str)
def test_bfloat16_follows_float64(ranks, options):
    ranks.run(bfloat16, options)


def experts_alone(rank):
    torch.manual_seed(0)
    experts = GroupedSwiGLU(H, 4, E, ep_group=dist.group.WORLD, dtype=torch.float64)
    torch.manual_seed(0)
    whole = GroupedSwiGLU(H, 4, E, dtype=torch.float64)
    x = torch.randn(6, H, dtype=torch.float64)
    counts = torch.tensor([2, 0, 3, 1])
    for form in (counts, exchange_counts(counts, dist.group.WORLD)):
        torch.testing.assert_close(experts(x, form), whole(x, counts), rtol=1e-12, atol=1e-12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert experts.float()(x.float(), counts).dtype == torch.bfloat16


def test_experts_without_a_layer(ranks):
    ranks.run(experts_alone)

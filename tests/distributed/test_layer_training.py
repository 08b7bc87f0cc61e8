"""Training with expert-parallel layers on 2 ranks: DDP, FSDP2, accumulation, clipping, memory.

Each run is compared with the same run of one process on the tokens of all ranks.
"""

import gc
import math
import os
import resource

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import wait_until
from torch_moe_ops.nn import MoE, average_expert_gradients, clip_grad_norm_, expert_parameters

H, E, T = 8, 4, 6
MICRO_BATCHES, STEPS = 2, 3
EXPERTS = ["moe.experts.gate_up_proj", "moe.experts.down_proj"]


@pytest.fixture
def pair(pool):
    return pool(2)


class Net(nn.Module):
    def __init__(self, ep_group, **options):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(H, H, dtype=torch.float64)
        self.moe = MoE(H, 12, E, ep_group=ep_group, dtype=torch.float64, **{"top_k": 2, **options})
        self.last = nn.Linear(H, 2, dtype=torch.float64)

    def forward(self, x):
        y = self.moe(self.first(x).relu() + 0.1)
        return self.last(y.output), y.aux_loss


def batch(step, micro, world_size=2):
    """The tokens of all ranks, and what the net shall answer."""
    generator = torch.Generator().manual_seed(10 * step + micro)
    draw = torch.randn(world_size, T, H + 2, generator=generator, dtype=torch.float64)
    return draw[..., :H], draw[..., H:]


def train(net, forward, rank, max_norm=math.inf, accumulate=None):
    """The losses and the norms of some steps. ``rank`` None is one process with all tokens."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, foreach=False)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            if accumulate:
                accumulate(micro == MICRO_BATCHES - 1)
            x, target = (
                part.flatten(0, 1) if rank is None else part[rank] for part in batch(step, micro)
            )
            output, aux_loss = forward(x)
            loss = (output - target).square().mean()
            ((loss + aux_loss) / MICRO_BATCHES).backward()
            losses.append(loss.detach())
        norms.append(clip_grad_norm_(net, max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), torch.stack(norms)


def assert_trained_alike(net, result, rank, options, max_norm):
    """Losses, norms and final parameters are those of one process."""
    whole = Net(None, **options)
    expected_losses, expected_norms = train(whole, whole, None, max_norm)
    losses, norms = result
    dist.all_reduce(losses)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(losses / 2, expected_losses, **close)
    torch.testing.assert_close(norms, expected_norms, **close)
    for name, expected in whole.state_dict().items():
        actual = net.state_dict()[name]
        if name in EXPERTS:
            expected = expected.chunk(2)[rank]
        if hasattr(actual, "full_tensor"):
            actual = actual.full_tensor()
        torch.testing.assert_close(actual, expected, **close)


def make_ddp(net):
    average_expert_gradients(net)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, list(expert_parameters(net))
    )
    return DistributedDataParallel(net)


def with_ddp(rank, options, max_norm):
    net = Net(dist.group.WORLD, **options)
    assert list(expert_parameters(net)) == EXPERTS
    ddp = make_ddp(net)

    def accumulate(last):
        ddp.require_backward_grad_sync = last  # what ddp.no_sync() sets

    result = train(net, ddp, rank, max_norm, accumulate)
    assert_trained_alike(net, result, rank, options, max_norm)


def with_fsdp(rank, options, max_norm):
    net = Net(dist.group.WORLD, **options)
    average_expert_gradients(net)
    fully_shard(net, ignored_params=set(expert_parameters(net).values()))
    result = train(net, net, rank, max_norm, net.set_requires_gradient_sync)
    assert_trained_alike(net, result, rank, options, max_norm)


@pytest.mark.parametrize("wrapped", [with_ddp, with_fsdp])
def test_trains_like_one_process(pair, wrapped):
    options = {"aux_loss_coef": 0.1, "z_loss_coef": 0.01, "shared_intermediate_size": 4}
    for max_norm in (math.inf, 0.5):
        pair.run(wrapped, options, max_norm)


def one_busy_expert(rank):
    """Every token goes to expert 0 of rank 0."""
    nets = [Net(group, top_k=1, normalize_top_k=False) for group in (dist.group.WORLD, None)]
    for net in nets:
        with torch.no_grad():
            net.moe.router.weight.fill_(-1.0)
            net.moe.router.weight[0] = 1.0
        net.moe.router.weight.requires_grad_(False)
    net, whole = nets
    ddp = make_ddp(net)
    grads = []
    for p in expert_parameters(net).values():
        p.register_post_accumulate_grad_hook(lambda p: grads.append(p.grad.clone()))
    losses, _ = train(net, ddp, rank)
    dist.all_reduce(losses)
    expected, _ = train(whole, whole, None)
    torch.testing.assert_close(losses / 2, expected, rtol=1e-10, atol=1e-10)
    assert len(grads) == 2 * MICRO_BATCHES * STEPS
    if rank == 1:
        assert not any(grad.any() for grad in grads)


def test_one_busy_expert(pair):
    pair.run(one_busy_expert)


def sums_and_means(rank):
    grads = {}
    for enabled in (False, True):
        net = Net(dist.group.WORLD)
        average_expert_gradients(net)
        average_expert_gradients(net, enabled)
        x, target = (part[rank] for part in batch(0, 0))
        for _ in range(2):  # accumulated
            (net(x)[0] - target).square().mean().backward()
        grads[enabled] = [p.grad for p in expert_parameters(net).values()]
    for mean, total in zip(grads[True], grads[False], strict=True):
        torch.testing.assert_close(2 * mean, total, rtol=1e-12, atol=0)


def test_sums_and_means(pair):
    pair.run(sums_and_means)


def clipping(rank):
    net = Net(dist.group.WORLD)
    # No gradients anywhere, then only in the experts of rank 1.
    assert clip_grad_norm_(net, 1.0) == 0
    if rank == 1:
        net.moe.experts.down_proj.grad = torch.full_like(net.moe.experts.down_proj, 2.0)
    count = net.moe.experts.down_proj.numel()
    assert clip_grad_norm_(net, 1e9).item() == pytest.approx(2 * math.sqrt(count))
    # What all ranks have counts once.
    net.first.bias.grad = torch.full_like(net.first.bias, 3.0)
    norm = math.sqrt(4 * count + 9 * H)
    assert clip_grad_norm_(net, 1.0).item() == pytest.approx(norm)
    assert net.first.bias.grad[0].item() == pytest.approx(3 / norm)
    assert clip_grad_norm_(net, 1.0).item() == pytest.approx(1.0, rel=1e-5)
    # A bad value on one rank is an error on all.
    if rank == 1:
        net.moe.experts.down_proj.grad[0, 0, 0] = math.nan
    message = r"^clip_grad_norm_: the norm of the gradients must be finite, got nan$"
    with pytest.raises(RuntimeError, match=message):
        clip_grad_norm_(net, 1.0, error_if_nonfinite=True)
    assert math.isnan(clip_grad_norm_(net, 1.0))
    assert net.first.bias.grad.isnan().all()


def test_clipping(pair):
    pair.run(clipping)


def test_clipping_of_one_process_is_that_of_torch():
    for max_norm in (0.1, 1e9):
        nets = [Net(None), Net(None)]
        for net in nets:
            net(torch.ones(3, H, dtype=torch.float64))[0].square().sum().backward()
        norms = [
            clip_grad_norm_(nets[0], max_norm),
            nn.utils.clip_grad_norm_(nets[1].parameters(), max_norm),
        ]
        assert torch.equal(*norms)
        for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def count_tensors():
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def long_run(rank, options):
    layer = MoE(256, 16, E, top_k=2, ep_group=dist.group.WORLD, aux_loss_coef=0.1, **options)
    gc.collect()
    gc.disable()  # a cycle would keep the tensors of a step until the next collection
    try:
        for step in range(120):
            x = torch.randn(1 + (37 * step + 11 * rank) % 150, 256, requires_grad=True)
            y = layer(x)
            if step % 4:
                (y.output.sum() + y.aux_loss).backward()
            layer.zero_grad()
            del x, y
            if step == 20:
                first, start = count_tensors(), resident_bytes()
        wait_until(lambda: count_tensors() <= first)
        assert count_tensors() <= first
        assert resident_bytes() - start < 20 * 2**20
    finally:
        gc.enable()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.5}], ids=str)
def test_memory_is_flat(pair, options):
    pair.run(long_run, options)

"""Checkpoints of expert-parallel models: saved on 1, 2 or 4 ranks, loaded on another number."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from torch_moe_ops.nn import (
    MoE,
    average_expert_gradients,
    dtensor_expert_state,
    expert_parameters,
    gather_expert_state,
    slice_expert_state,
)

H, E, T = 8, 4, 12


@pytest.fixture
def on(pool):
    """``on(n, function, *args)``: the results of n ranks, or of this process without a group."""

    def run(ranks, function, *args):
        return [function(0, *args)] if ranks == 1 else pool(ranks).run(function, *args)

    return run


def group():
    return dist.group.WORLD if dist.is_initialized() else None


def make(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Linear(H, H),
        MoE(H, 12, E, top_k=2, shared_intermediate_size=4, ep_group=group()),
    ).double()
    average_expert_gradients(net)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def step(net, optimizer, rank, seed):
    """One step on the tokens of all ranks; the loss of all."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, H, generator=generator, dtype=torch.float64).chunk(ranks)[rank]
    loss = net(x).output.square().mean()
    loss.backward()
    loss = loss.detach()
    if ranks > 1:
        dist.all_reduce(loss)
        experts = set(expert_parameters(net).values())
        for p in net.parameters():
            if p not in experts:
                dist.all_reduce(p.grad)
                p.grad /= ranks
    optimizer.step()
    optimizer.zero_grad()
    return loss.item() / ranks


def train_and_save(rank, folder):
    """Two steps, both kinds of checkpoint, and the losses of two steps more."""
    net, optimizer = make(seed=1)
    for seed in (0, 1):
        step(net, optimizer, rank, seed)
    state = {
        "model": dtensor_expert_state(net, net.state_dict()),
        "optimizer": dtensor_expert_state(net, get_optimizer_state_dict(net, optimizer)),
    }
    dcp.save(state, checkpoint_id=f"{folder}/dcp", no_dist=group() is None)
    whole = {
        "model": gather_expert_state(net, net.state_dict()),
        "optimizer": gather_expert_state(net, optimizer.state_dict(), optimizer),
    }
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")
    return [step(net, optimizer, rank, seed) for seed in (2, 3)]


def load_whole(rank, folder):
    net, optimizer = make(seed=2)
    state = torch.load(f"{folder}/whole.pt", weights_only=True)
    net.load_state_dict(slice_expert_state(net, state["model"]))
    optimizer.load_state_dict(slice_expert_state(net, state["optimizer"], optimizer))
    return [step(net, optimizer, rank, seed) for seed in (2, 3)]


def load_dcp(rank, folder):
    net, optimizer = make(seed=2)
    step(net, optimizer, rank, 9)  # an optimizer has no state before its first step
    for p in net.parameters():
        optimizer.state[p]["step"].zero_()
    state = {
        "model": dtensor_expert_state(net, net.state_dict()),
        "optimizer": dtensor_expert_state(net, get_optimizer_state_dict(net, optimizer)),
    }
    dcp.load(state, checkpoint_id=f"{folder}/dcp", no_dist=group() is None)
    return [step(net, optimizer, rank, seed) for seed in (2, 3)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("saved_on", [1, 2, 4])
def test_another_number_of_ranks_goes_on(on, saved_on, tmp_path):
    expected = on(saved_on, train_and_save, str(tmp_path))[0]
    for loaded_on in (1, 2, 4):
        for load in (load_whole, load_dcp):
            losses = on(loaded_on, load, str(tmp_path))
            assert losses == [pytest.approx(expected, rel=1e-12)] * loaded_on


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_are_those_of_one_process(on, tmp_path):
    states = []
    for ranks in (1, 2, 4):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        on(ranks, train_and_save, str(folder))
        states.append(torch.load(folder / "whole.pt", weights_only=True))
    for state in states[1:]:
        torch.testing.assert_close(state, states[0], rtol=1e-12, atol=1e-12)


def refusals(rank):
    net, _ = make(seed=1)
    state = net.state_dict()
    message = r"^slice_expert_state: a tensor must have all experts \(4\), got \[2, 8, 24\]$"
    with pytest.raises(ValueError, match=message):
        slice_expert_state(net, state)
    with pytest.raises(RuntimeError, match=r"size mismatch for 1\.experts.gate_up_proj"):
        net.load_state_dict(gather_expert_state(net, state))
    # What is not of experts is passed on as it is.
    sliced = slice_expert_state(net, gather_expert_state(net, {"deep": state, "step": 3}))
    assert sliced["step"] == 3
    assert sliced["deep"]["0.weight"] is state["0.weight"]
    assert torch.equal(sliced["deep"]["1.experts.down_proj"], state["1.experts.down_proj"])


def test_refusals(on):
    on(2, refusals)

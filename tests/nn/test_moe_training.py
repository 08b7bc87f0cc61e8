"""What a training loop does to a layer: recompute, copy, save, run for long."""

import copy
import gc
import io
import resource
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_moe_ops.nn import MoE, RouterOutput

H, E = 16, 6
capacities = pytest.mark.parametrize("capacity_factor", [None, 0.5])


def make_layer(**options):
    torch.manual_seed(0)
    return MoE(
        H,
        16,
        E,
        top_k=2,
        shared_intermediate_size=8,
        aux_loss_coef=0.1,
        z_loss_coef=0.01,
        **options,
    )


def tensors_with_graph(module):
    """Every tensor reachable from the attributes of the module tree that carries a graph."""
    found = []

    def walk(value, path):
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                found.append(path)
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{path}[{key!r}]")
        elif isinstance(value, list | tuple | set):
            for i, item in enumerate(value):
                walk(item, f"{path}[{i}]")

    for name, child in module.named_modules():
        walk(vars(child), name)
    return found


@capacities
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_is_bitwise_the_same(use_reentrant, capacity_factor):
    layer = make_layer(capacity_factor=capacity_factor)
    with torch.no_grad():
        layer.router.weight[3] = layer.router.weight[1]  # exact ties for every token
        layer.router.weight[4] = layer.router.weight[1]
    x = torch.randn(40, H)
    x[7] = 0  # and a tie of all experts

    def grads(run):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        output, aux_loss, tokens_per_expert, drop_rate = run(leaf)
        (output.square().sum() + aux_loss).backward()
        return [output, aux_loss, tokens_per_expert, drop_rate, leaf.grad] + [
            p.grad.clone() for p in layer.parameters()
        ]

    plain = grads(layer)
    recomputed = grads(lambda leaf: checkpoint(layer, leaf, use_reentrant=use_reentrant))
    assert len(plain) == len(recomputed)
    for a, b in zip(plain, recomputed, strict=True):
        assert torch.equal(a, b)


@capacities
def test_no_graph_is_kept_on_the_module(capacity_factor):
    layer = make_layer(capacity_factor=capacity_factor)
    y = layer(torch.randn(10, H))
    assert y.output.grad_fn is not None
    assert tensors_with_graph(layer) == []
    layer.last = y.aux_loss
    assert tensors_with_graph(layer) == ["['last']"]  # the walk does find such a tensor


@capacities
def test_copies_are_independent_and_equal(capacity_factor):
    layer = make_layer(capacity_factor=capacity_factor)
    x = torch.randn(10, H)
    y = layer(x)  # copied after a forward, with its graph alive
    twin = copy.deepcopy(layer)
    assert torch.equal(twin(x).output, y.output)
    with torch.no_grad():
        twin.experts.down_proj.zero_()
    assert torch.equal(layer(x).output, y.output)


@capacities
def test_save_and_load(capacity_factor):
    layer = make_layer(capacity_factor=capacity_factor, score_function="sigmoid")
    x = torch.randn(10, H)
    y = layer(x)

    def round_trip(value, **options):
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, **options)

    whole = round_trip(layer, weights_only=False)
    fresh = make_layer(capacity_factor=capacity_factor, score_function="sigmoid")
    fresh.reset_parameters()
    assert not torch.equal(fresh(x).output, y.output)
    fresh.load_state_dict(round_trip(layer.state_dict(), weights_only=True))
    for other in (whole, fresh):
        for a, b in zip(other(x), y, strict=True):
            assert torch.equal(a, b)


def test_state_dict_names():
    assert list(make_layer().state_dict()) == [
        "router.weight",
        "experts.gate_up_proj",
        "experts.down_proj",
        "shared_expert.gate_up_proj.weight",
        "shared_expert.down_proj.weight",
    ]


def train_once(layer, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    layer.zero_grad()
    try:
        x = torch.randn(64, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = layer(x)
        (y.output.square().sum() + y.aux_loss).backward()
        return [*y, x.grad, *(p.grad for p in layer.parameters())]
    finally:
        torch.set_num_threads(before)


@capacities
def test_runs_are_repeatable(capacity_factor):
    first, second = (
        train_once(make_layer(capacity_factor=capacity_factor), threads=2) for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


class FixedRouter(nn.Module):
    """Gives the same answer again, and the gradient of its weights. No matrix product."""

    def __init__(self, routed):
        super().__init__()
        self.routed = RouterOutput(*(part.detach() for part in routed))
        self.probs = nn.Parameter(self.routed.probs)

    def forward(self, _):
        return self.routed._replace(probs=self.probs)


@capacities
def test_experts_and_routing_do_not_depend_on_the_number_of_threads(capacity_factor):
    # torch's own products, in the router and the shared expert, may: their sums are split.
    torch.manual_seed(0)
    layer = MoE(H, 16, E, top_k=2, capacity_factor=capacity_factor)
    x = torch.randn(64, H, generator=torch.Generator().manual_seed(1))
    layer.router = FixedRouter(layer.router(x))
    one = train_once(layer, threads=1)
    for threads in (2, 3):
        for a, b in zip(one, train_once(layer, threads), strict=True):
            assert torch.equal(a, b)


def resident_bytes():
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    # Only the peak is known elsewhere; it grows with a leak all the same.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@capacities
@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant", "forward only"])
def test_memory_is_flat(mode, capacity_factor):
    layer = MoE(256, 16, 8, top_k=4, capacity_factor=capacity_factor, aux_loss_coef=0.1)
    rows = []
    layer.experts.register_forward_hook(lambda _, __, y: rows.append(weakref.ref(y)))
    gc.collect()
    gc.disable()  # a cycle would keep the rows of a step until the next collection
    try:
        start = 0
        for step in range(300):
            x = torch.randn(1 + (37 * step) % 150, 256, requires_grad=True)
            if mode in ("plain", "forward only"):
                y = layer(x)
            else:
                y = checkpoint(layer, x, use_reentrant=mode == "reentrant")
            if mode != "forward only":
                output, aux_loss = y[:2]
                (output.sum() + aux_loss).backward()
                layer.zero_grad()
                del output, aux_loss
            del x, y
            assert rows
            assert all(reference() is None for reference in rows), step
            if step == 20:
                start = resident_bytes()
        assert resident_bytes() - start < 20 * 2**20
    finally:
        gc.enable()


@capacities
def test_a_layer_learns(capacity_factor):
    # Two clusters with opposite targets: the router and the experts must both move.
    layer = make_layer(capacity_factor=capacity_factor)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x = torch.randn(64, H)
    target = torch.where(x[:, :1] > 0, x, -x)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    losses = []
    for _ in range(60):
        y = layer(x)
        loss = (y.output - target).square().mean()
        optimizer.zero_grad()
        (loss + y.aux_loss).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 4
    assert all(not torch.equal(p, before[name]) for name, p in layer.named_parameters())

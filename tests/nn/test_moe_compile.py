"""The layer under torch.compile and torch.export: one graph, dynamic token count."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from torch_moe_ops.nn import MoE

H, E = 16, 4
capacities = pytest.mark.parametrize("capacity_factor", [None, 0.75])


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


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


def run(function, layer, x):
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    (y.output.float().square().sum() + y.aux_loss).backward()
    return [*y, leaf.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize(
    ("capacity_factor", "score_function"), [(None, "softmax"), (0.75, "sigmoid")]
)
def test_one_dynamic_graph(capacity_factor, score_function):
    layer = make_layer(capacity_factor=capacity_factor, score_function=score_function)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    # 0 and 1 are always compiled for themselves.
    for num_tokens, graphs in ((7, 1), (1, 2), (0, 3), (12, 3), (33, 3)):
        x = torch.randn(num_tokens, H)
        for a, b in zip(run(compiled, layer, x), run(layer, layer, x), strict=True):
            torch.testing.assert_close(a, b)
        assert counter.frame_count <= graphs


def test_batch_dimensions_and_autocast():
    layer = make_layer(capacity_factor=0.75)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((2, 5, H), (3, 4, H)):
        x = torch.randn(shape)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pairs = zip(run(compiled, layer, x), run(layer, layer, x), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_inductor():
    layer = make_layer()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for num_tokens in (7, 12):
        x = torch.randn(num_tokens, H)
        for a, b in zip(run(compiled, layer, x), run(layer, layer, x), strict=True):
            torch.testing.assert_close(a, b)


@capacities
@pytest.mark.parametrize("strict", [True, False])
def test_export_with_a_dynamic_token_count(capacity_factor, strict):
    layer = make_layer(capacity_factor=capacity_factor)
    # A named Dim would have to be proven never to give a capacity of 1.
    tokens = torch.export.Dim.AUTO
    program = torch.export.export(
        layer, (torch.randn(9, H),), dynamic_shapes=({0: tokens},), strict=strict
    )
    for num_tokens in (9, 3, 50):
        x = torch.randn(num_tokens, H)
        for a, b in zip(program.module()(x), layer(x), strict=True):
            torch.testing.assert_close(a, b)

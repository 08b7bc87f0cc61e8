"""Whole mixture-of-experts layers of other packages, with the weights of one of ours.

Each builder returns a layer as a function of (T, H) tokens, and its router's weight and all its
parameters. They take the same router, so that the same tokens meet the same experts. What a package
insists on having and does not need on one CPU (a CUDA device, a compiler for it, several ranks) is
put in its place while it loads, never in its computations.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_moe_ops.nn import MoE


class PeerLayer(NamedTuple):
    """A layer of another package."""

    forward: Callable[[Tensor], Tensor]
    router_weight: nn.Parameter
    parameters: Sequence[nn.Parameter]


def builders(layer: MoE, dtype: torch.dtype) -> dict[str, Callable[[], PeerLayer]]:
    """All of them, by name."""
    return {
        "transformers grouped_mm": lambda: _transformers(layer, dtype, "grouped_mm"),
        "transformers eager": lambda: _transformers(layer, dtype, "eager"),
        "torchtitan": lambda: _torchtitan(layer, dtype),
        "Megatron": lambda: _megatron(layer, dtype),
    }


@torch.no_grad()
def _load(module: nn.Module, weights: dict[str, Tensor], router: str) -> PeerLayer:
    """The module with these weights, which must be all that it has."""
    module.load_state_dict(weights, strict=True)
    parameters = dict(module.named_parameters())
    return PeerLayer(module, parameters[router], list(parameters.values()))


def _transformers(
    layer: MoE, dtype: torch.dtype, experts: Literal["grouped_mm", "eager"]
) -> PeerLayer:
    """The block of Qwen3-MoE."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=layer.hidden_size,
        moe_intermediate_size=layer.experts.intermediate_size,
        num_experts=layer.num_experts,
        num_experts_per_tok=layer.top_k,
        norm_topk_prob=True,
        experts_implementation=experts,
    )
    weights = {
        "gate.weight": layer.router.weight,
        "experts.gate_up_proj": layer.experts.gate_up_proj.mT,
        "experts.down_proj": layer.experts.down_proj.mT,
    }
    block = _load(Qwen3MoeSparseMoeBlock(config).to(dtype), weights, "gate.weight")
    return block._replace(forward=lambda x: block.forward(x.unsqueeze(0)).squeeze(0))


def _torchtitan(layer: MoE, dtype: torch.dtype) -> PeerLayer:
    """Its MoE block with softmax scores."""
    if dtype != torch.bfloat16:
        raise ValueError("torchtitan's experts compute in bfloat16 whatever they are given")
    importlib.import_module("torchtitan")  # the next takes seconds, in vain if this is missing
    # Its kernels for GPUs are decorated when the module is loaded. torch's compiler has to have
    # looked for the real triton by then.
    importlib.import_module("torch._inductor.compile_fx")
    with _stand_ins("triton", "triton.language"):
        from torchtitan.models.common import linear, moe, token_dispatcher

    sizes = {"num_experts": layer.num_experts, "top_k": layer.top_k}
    gate = linear.Linear.Config(in_features=layer.hidden_size, out_features=layer.num_experts)
    inner = moe.GroupedExperts.Config(
        dim=layer.hidden_size,
        hidden_dim=layer.experts.intermediate_size,
        num_experts=layer.num_experts,
    )
    dispatcher = token_dispatcher.LocalTokenDispatcher.Config(**sizes)
    config = moe.MoE.Config(
        num_experts=layer.num_experts,
        router=moe.TokenChoiceTopKRouter.Config(
            gate=gate, score_func="softmax", route_norm=True, **sizes
        ),
        routed_experts=moe.RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher),
        load_balance_coeff=None,
    )
    # It asks for float32, warns that a CPU cannot, and goes on.
    warnings.filterwarnings("ignore", "In CPU autocast, but the target dtype")
    gate_proj, up_proj = layer.experts.gate_up_proj.mT.chunk(2, dim=1)
    experts = "routed_experts.inner_experts."
    weights = {
        "router.gate.weight": layer.router.weight,
        f"{experts}w1_EFD": gate_proj,
        f"{experts}w2_EDF": layer.experts.down_proj.mT,
        f"{experts}w3_EFD": up_proj,
    }
    block = _load(config.build().to(dtype), weights, "router.gate.weight")
    return block._replace(forward=lambda x: block.forward(x.unsqueeze(0)).squeeze(0))


@contextmanager
def _stand_ins(*names: str) -> Iterator[None]:
    """Modules that do nothing, where there are none of these names."""
    added = [name for name in names if name not in sys.modules]
    sys.modules.update({name: mock.MagicMock() for name in added})
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def _megatron(layer: MoE, dtype: torch.dtype) -> PeerLayer:
    """Megatron-core's MoELayer, one MLP after the other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that CUDA packages are missing
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.transformer.mlp import MLPSubmodules
        from megatron.core.transformer.moe import moe_utils
        from megatron.core.transformer.moe.experts import SequentialMLP
        from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
        from megatron.core.transformer.spec_utils import ModuleSpec

    vars(moe_utils).setdefault("te_general_gemm", None)  # looked up and not there
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    mlp = MLPSubmodules(
        linear_fc1=tensor_parallel.ColumnParallelLinear,
        linear_fc2=tensor_parallel.RowParallelLinear,
    )
    submodules = MoESubmodules(experts=ModuleSpec(module=SequentialMLP, submodules=mlp))
    on_cpu = mock.patch.object(torch.cuda, "current_device", return_value="cpu")
    with on_cpu:
        module = MoELayer(_megatron_config(layer, dtype), submodules)
    weights: dict[str, Tensor] = {"router.weight": layer.router.weight}
    gate_up, down = layer.experts.gate_up_proj.mT, layer.experts.down_proj.mT
    for expert in range(layer.num_experts):
        name = f"experts.local_experts.{expert}.linear_fc"
        weights |= {f"{name}1.weight": gate_up[expert], f"{name}2.weight": down[expert]}
    block = _load(module, weights, "router.weight")

    def forward(x: Tensor) -> Tensor:
        with on_cpu:  # the router moves its weight to the device that is current
            y: Tensor = block.forward(x.unsqueeze(1))[0]
        return y.squeeze(1)

    return block._replace(forward=forward)


def _megatron_config(layer: MoE, dtype: torch.dtype) -> Any:
    from megatron.core.transformer import TransformerConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about defaults that are deprecated
        return TransformerConfig(
            num_layers=1,
            num_attention_heads=1,
            hidden_size=layer.hidden_size,
            ffn_hidden_size=layer.experts.intermediate_size,
            num_moe_experts=layer.num_experts,
            moe_router_topk=layer.top_k,
            moe_ffn_hidden_size=layer.experts.intermediate_size,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="allgather",
            moe_router_dtype="fp32",
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            bias_activation_fusion=False,
            add_bias_linear=False,
            use_cpu_initialization=True,
            perform_initialization=False,
            params_dtype=dtype,
            gradient_accumulation_fusion=False,
        )

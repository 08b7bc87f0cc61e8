"""The rest of training beside expert-parallel layers: gradients, clipping, DDP and FSDP2.

The experts' weights of a layer with an ``ep_group`` differ from rank to rank, all other parameters
are the same on all ranks. Whatever averages gradients, or adds up norms, must tell them apart:
:func:`expert_parameters` does. docs/expert_parallel.md has the recipes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from .experts import GroupedSwiGLU

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def sharded_experts(module: nn.Module) -> Iterator[tuple[str, GroupedSwiGLU]]:
    """The name and module of all experts in ``module`` that are spread over several ranks."""
    for name, child in module.named_modules():
        if isinstance(child, GroupedSwiGLU) and child.ep_size > 1:
            yield name, child


def expert_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that belong to this rank alone.

    They are found by the kind of their module, so copies, casts and moves to a device cannot lose
    them. DDP has to leave them alone, and so has FSDP2::

        experts = expert_parameters(model)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
        ddp = DistributedDataParallel(model)

        fully_shard(model, ignored_params=set(experts.values()))

    Args:
        module: the model, before it is wrapped.

    Returns:
        Parameters by the names that they have in ``module.named_parameters()``. None, where there
        is no layer with an ``ep_group`` of more than one rank.

    Example:
        >>> from torch_moe_ops.nn import MoE, expert_parameters
        >>> layer = MoE(16, 32, num_experts=4, top_k=2)  # no ep_group: all experts are here
        >>> expert_parameters(layer)
        {}
    """
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, experts in sharded_experts(module)
        for name, parameter in experts.named_parameters()
    }


def average_expert_gradients(module: nn.Module, enabled: bool = True) -> None:
    """Makes the experts' gradients those of the mean of all ranks' losses, instead of their sum.

    Call it where everything else is averaged over the ranks, as DDP and FSDP2 do, and where each
    rank's loss is the mean over its own tokens: the gradients are then those of one process. Leave
    it where gradients are summed. Each gradient is divided as it flows back, so it is right under
    gradient accumulation; the setting belongs to the modules and is kept in copies.

    Args:
        module: the model. Layers whose experts are all on one rank are left as they are.
        enabled: False goes back to sums.

    Example:
        >>> from torch_moe_ops.nn import MoE, average_expert_gradients
        >>> average_expert_gradients(MoE(16, 32, num_experts=4, top_k=2))
    """
    for _, experts in sharded_experts(module):
        experts.average_gradients = enabled


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales all gradients down so that their norm over all ranks is at most ``max_norm``.

    As :func:`torch.nn.utils.clip_grad_norm_`, which sees the experts of one rank only. Parameters
    that all ranks have count once, with the gradients of this rank: average them first. Every rank
    calls it, also one without gradients.

    Args:
        module: the model; parameters without a gradient are left out.
        max_norm: largest norm of the gradients.
        error_if_nonfinite: raise if the norm is infinite or NaN.

    Returns:
        The norm before, the same on all ranks.

    Raises:
        RuntimeError: the norm is infinite or NaN, and ``error_if_nonfinite``. On every rank.

    Example:
        >>> from torch_moe_ops.nn import MoE, clip_grad_norm_
        >>> layer = MoE(16, 32, num_experts=4, top_k=2)
        >>> layer(torch.ones(5, 16)).output.sum().backward()
        >>> norm = clip_grad_norm_(layer, 0.1)
        >>> round(float(clip_grad_norm_(layer, 0.1)), 4)
        0.1
    """
    experts = set(expert_parameters(module).values())
    everywhere = [p for p in module.parameters() if p not in experts]
    total = _norm(everywhere)
    if experts:
        total = (total.square() + _squares_on_all_ranks(module, like=total)).sqrt()
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of the gradients must be finite, got {total.item()}"
        )
    # Apart, since with FSDP2 one kind is made of DTensors and the other not.
    clip_grads_with_norm_(everywhere, max_norm, total)
    clip_grads_with_norm_(experts, max_norm, total)
    return total


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    # That of DTensors is one itself, with the part of this rank.
    full_tensor = getattr(norm, "full_tensor", None)
    return norm if full_tensor is None else full_tensor()


def _squares_on_all_ranks(module: nn.Module, like: Tensor) -> Tensor:
    """The sum of squares of all experts' gradients. A rank without gradients adds zero."""
    by_group: dict[ProcessGroup, list[nn.Parameter]] = {}
    for _, experts in sharded_experts(module):
        if experts.ep_group is not None:
            by_group.setdefault(experts.ep_group, []).extend(experts.parameters())
    total = torch.zeros_like(like)
    for group, parameters in by_group.items():
        # Of one dtype and device on all ranks, whatever gradients there are.
        weight = parameters[0]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        squares = _norm(parameters).to(weight.device, dtype).square()
        dist.all_reduce(squares, group=group)
        total = total.to(squares.device) + squares
    return total

"""State dicts of models whose experts are spread over ranks: whole, in parts, or as DTensors.

``state_dict()`` of such a model, and of its optimizer, has this rank's experts only. The functions
here find their tensors in it and return a new state with these replaced:

    ====================  ================================  =================================
    gather_expert_state   this rank's experts to all        for torch.save: one file for any
                          experts                           number of ranks
    slice_expert_state    all experts to this rank's        for load_state_dict
    dtensor_expert_state  this rank's experts to DTensors   for torch.distributed.checkpoint,
                          of all experts                    which moves parts between ranks
    ====================  ================================  =================================

Where no experts are spread, each returns the state as it is: one program serves one process and
many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .expert_parallel import sharded_experts
from .experts import GroupedSwiGLU

State = dict[str, Any]


def gather_expert_state(
    module: nn.Module, state: State, optimizer: Optimizer | None = None
) -> State:
    """Replaces this rank's experts by those of all ranks: the state dict of one process.

    A collective: every rank calls it, and gets all experts.

    Args:
        module: the model.
        state: ``module.state_dict()``, or a dict in which names of its parameters lead to tensors
            or to dicts of them, at any depth. With ``optimizer`` its ``state_dict()``.
        optimizer: the optimizer that ``state`` is of, if it is one's.

    Returns:
        A new state. Tensors that were not replaced are those of ``state``.

    Example:
        >>> from torch_moe_ops.nn import MoE, gather_expert_state
        >>> layer = MoE(16, 32, num_experts=4, top_k=2)
        >>> gather_expert_state(layer, layer.state_dict())["experts.down_proj"].shape
        torch.Size([4, 32, 16])
    """
    return _replace(state, _owners(module, optimizer), _gather)


def slice_expert_state(
    module: nn.Module, state: State, optimizer: Optimizer | None = None
) -> State:
    """Replaces all experts by those of this rank: the way back of :func:`gather_expert_state`.

    No communication: every rank has the whole state.

    Args:
        module: the model.
        state: as :func:`gather_expert_state` returns it, or from a model of one process.
        optimizer: the optimizer that ``state`` is for, if it is one's.

    Returns:
        A new state, for ``load_state_dict``.

    Raises:
        ValueError: a tensor has not all experts.

    Example:
        >>> from torch_moe_ops.nn import MoE, slice_expert_state
        >>> layer = MoE(16, 32, num_experts=4, top_k=2)
        >>> layer.load_state_dict(slice_expert_state(layer, layer.state_dict()))
        <All keys matched successfully>
    """
    return _replace(state, _owners(module, optimizer), _slice)


def dtensor_expert_state(
    module: nn.Module, state: State, optimizer: Optimizer | None = None
) -> State:
    """Replaces this rank's experts by DTensors of all experts, sharded over the ranks.

    torch.distributed.checkpoint saves and loads such a state on any number of ranks. The DTensors
    share memory with ``state``: what is loaded into them, in place, is in the model. No
    communication.

    Args:
        module: the model.
        state: as for :func:`gather_expert_state`; also what
            ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` returns.
        optimizer: the optimizer that ``state`` is of, if it is the ``state_dict()`` of one.

    Returns:
        A new state.

    Example:
        >>> from torch_moe_ops.nn import MoE, dtensor_expert_state
        >>> layer = MoE(16, 32, num_experts=4, top_k=2)
        >>> state = dtensor_expert_state(layer, layer.state_dict())
        >>> # dcp.save(state, checkpoint_id=...), or dcp.load
    """
    return _replace(state, _owners(module, optimizer), _as_dtensor)


def _owners(module: nn.Module, optimizer: Optimizer | None) -> dict[str | int, GroupedSwiGLU]:
    """The module that a parameter belongs to, by its name or its number in the optimizer."""
    names: dict[str | int, GroupedSwiGLU] = {}
    owner_of = {}
    for prefix, experts in sharded_experts(module):
        for name, parameter in experts.named_parameters():
            names[f"{prefix}.{name}" if prefix else name] = experts
            owner_of[parameter] = experts
    if optimizer is None:
        return names
    in_order = [p for group in optimizer.param_groups for p in group["params"]]
    return {number: owner_of[p] for number, p in enumerate(in_order) if p in owner_of}


Transform = Callable[[Tensor, GroupedSwiGLU], Tensor]


def _replace(state: State, owners: dict[str | int, GroupedSwiGLU], transform: Transform) -> State:
    """A copy of the nested dict with the tensors of the experts transformed."""

    def walk(value: Any, owner: GroupedSwiGLU | None) -> Any:
        if isinstance(value, dict):
            return {key: walk(item, owners.get(key, owner)) for key, item in value.items()}
        # The step count of an optimizer has no experts.
        if owner is None or not isinstance(value, Tensor) or value.dim() == 0:
            return value
        return transform(value.detach(), owner)

    replaced: State = walk(state, None)
    return replaced


def _gather(local: Tensor, owner: GroupedSwiGLU) -> Tensor:
    parts = [torch.empty_like(local) for _ in range(owner.ep_size)]
    dist.all_gather(parts, local.contiguous(), group=owner.ep_group)
    return torch.cat(parts)


def _slice(whole: Tensor, owner: GroupedSwiGLU) -> Tensor:
    if whole.shape[0] != owner.num_experts:
        raise ValueError(
            f"slice_expert_state: a tensor must have all experts ({owner.num_experts}), "
            f"got {list(whole.shape)}"
        )
    local = owner.local_experts
    return whole[local.start : local.stop].clone()


def _as_dtensor(local: Tensor, owner: GroupedSwiGLU) -> Tensor:
    # Here, since importing them takes long.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    group = owner.ep_group
    if group is None:
        return local
    mesh = DeviceMesh.from_group(group, local.device.type)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

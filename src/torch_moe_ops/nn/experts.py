"""SwiGLU feed-forward networks: a group of experts, and a dense one for the shared expert."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torch_moe_ops.distributed import ExpertCounts, exchange_counts
from torch_moe_ops.ops import (
    alltoallv_grouped_matmul,
    grouped_matmul,
    grouped_matmul_alltoallv,
    swiglu,
)

from . import _checks
from ._eager import run_eagerly
from ._ep_group import EPGroup

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GroupedSwiGLU(nn.Module):
    """E experts ``down(silu(gate(x)) * up(x))``, without biases, on rows sorted by expert.

    With an ``ep_group`` each of its ranks holds E / ranks of the experts, in the order of the
    ranks, and gives rows to all of them: they travel to the rank of their expert and back.

    Args:
        hidden_size: H.
        intermediate_size: I.
        num_experts: E, over all ranks.
        ep_group: process group of torch.distributed that the experts are spread over, or None.
        device: of the weights.
        dtype: of the weights.

    Attributes:
        gate_up_proj: (E, H, 2 * I); ``[..., :I]`` is the gate, ``[..., I:]`` is up. With an
            ``ep_group`` the first size is E / ranks.
        down_proj: (E, I, H), or (E / ranks, I, H).
        average_gradients: divide the gradients of both by the number of ranks; see
            :func:`average_expert_gradients`.

    Raises:
        ValueError: a size is not a positive int, or E is no multiple of the number of ranks.
        TypeError: ``ep_group`` is no process group, or one without this rank.

    Example:
        >>> import torch
        >>> from torch_moe_ops.nn import GroupedSwiGLU
        >>> experts = GroupedSwiGLU(hidden_size=8, intermediate_size=16, num_experts=3)
        >>> rows = torch.randn(5, 8)
        >>> experts(rows, torch.tensor([2, 0, 3])).shape  # two rows for expert 0, three for 2
        torch.Size([5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        ep_group: ProcessGroup | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        _checks.check_positive(
            owner,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
        )
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.average_gradients = False
        self._ep = None if ep_group is None else EPGroup(owner, ep_group, num_experts)
        e = len(self.local_experts)
        self.gate_up_proj = nn.Parameter(
            torch.empty(e, hidden_size, 2 * intermediate_size, device=device, dtype=dtype)
        )
        self.down_proj = nn.Parameter(
            torch.empty(e, intermediate_size, hidden_size, device=device, dtype=dtype)
        )
        self.reset_parameters()

    @property
    def ep_group(self) -> ProcessGroup | None:
        """The process group that the experts are spread over."""
        return None if self._ep is None else self._ep.group

    @property
    def ep_size(self) -> int:
        """The number of ranks that the experts are spread over; 1 without a group."""
        return 1 if self._ep is None else self._ep.size

    @property
    def local_experts(self) -> range:
        """The global ids of the experts that this rank holds."""
        return range(self.num_experts) if self._ep is None else self._ep.local_experts

    def reset_parameters(self) -> None:
        """Draws every expert like ``nn.Linear``: uniform in +-1 / sqrt(fan-in).

        On the CPU, ranks that start from one seed end up with their parts of what one process would
        have drawn, and with its generator state.
        """
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[1])
            if self.ep_size == 1:
                nn.init.uniform_(weight, -bound, bound)
            else:
                self._draw_local(weight, bound)

    def _draw_local(self, weight: Tensor, bound: float) -> None:
        # Expert by expert: the whole tensor may not fit where its part does.
        discarded = torch.empty_like(weight[0], requires_grad=False)
        local = {expert: place for place, expert in enumerate(self.local_experts)}
        for expert in range(self.num_experts):
            mine = expert in local
            nn.init.uniform_(weight.detach()[local[expert]] if mine else discarded, -bound, bound)

    def forward(self, x: Tensor, tokens_per_expert: Tensor | ExpertCounts) -> Tensor:
        """Applies expert e to the e-th group of rows.

        With more ranks than one, all of them call it, also those without rows.

        Args:
            x: (M, H), in the dtype of the weights (any under autocast), rows sorted by expert.
                Where the weights are frozen, it must need a gradient on all ranks or on none.
            tokens_per_expert: (E,), int32 or int64, the size of each group; the sum must be M.
                On one rank it stays on its device: nothing waits for its values. More ranks have to
                tell each other; what :func:`torch_moe_ops.exchange_counts` returned saves that.

        Returns:
            (M, H).

        Gradients:
            In ``x`` and both weights. An expert without rows has zero gradients, not None. With
            more ranks than one the backward pass is collective, and the gradient of a weight is
            that of the sum of all ranks' losses (``average_gradients``: of their mean).
        """
        if self.ep_size > 1:
            return self._across_ranks(x, tokens_per_expert)
        if isinstance(tokens_per_expert, ExpertCounts):
            tokens_per_expert = torch.tensor(tokens_per_expert.send_counts, device=x.device)
        gate_up_M2I = grouped_matmul(x, self.gate_up_proj, tokens_per_expert)
        return grouped_matmul(swiglu(gate_up_M2I), self.down_proj, tokens_per_expert)

    # The counts are numbers that no compiler can know: torch.compile runs this as it stands.
    @run_eagerly
    def _across_ranks(self, x: Tensor, tokens_per_expert: Tensor | ExpertCounts) -> Tensor:
        counts = tokens_per_expert
        if isinstance(counts, Tensor):
            counts = exchange_counts(counts, self.ep_group or "")
        learning = self.gate_up_proj.requires_grad or self.down_proj.requires_grad
        if torch.is_grad_enabled() and learning and not x.requires_grad:
            # Another rank's rows may need a gradient: this rank has to take part in sending it.
            x = x.detach().requires_grad_()
        there, back = counts.send_counts, counts.recv_counts
        gate_up_R2I, _, _ = alltoallv_grouped_matmul(
            x, self._weight(self.gate_up_proj), counts.group, self.ep_size, there, back
        )
        y_MH, _ = grouped_matmul_alltoallv(
            swiglu(gate_up_R2I),
            self._weight(self.down_proj),
            counts.group,
            self.ep_size,
            back,
            there,
        )
        return y_MH

    def _weight(self, weight: Tensor) -> Tensor:
        """The weight; what flows back through it is divided by the number of ranks if so set."""
        if not (self.average_gradients and weight.requires_grad and torch.is_grad_enabled()):
            return weight
        # A hook on the parameter itself would be lost when it is copied or moved to a device.
        ranks = self.ep_size
        alias = weight.view_as(weight)
        alias.register_hook(lambda grad: grad / ranks)
        return alias

    def extra_repr(self) -> str:
        """Shows the setting in `repr`."""
        local = self.local_experts
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}"
            + (f", local_experts={local.start}..{local.stop - 1}" if self.ep_size > 1 else "")
        )


class SwiGLU(nn.Module):
    """One dense network ``down(silu(gate(x)) * up(x))`` without biases: a shared expert.

    Args:
        hidden_size: H.
        intermediate_size: I.
        device: of the weights.
        dtype: of the weights.

    Attributes:
        gate_up_proj: linear map H -> 2 * I, the gate first.
        down_proj: linear map I -> H.

    Raises:
        ValueError: a size is not a positive int.

    Example:
        >>> import torch
        >>> from torch_moe_ops.nn import SwiGLU
        >>> SwiGLU(hidden_size=8, intermediate_size=16)(torch.randn(5, 8)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _checks.check_positive(
            type(self).__name__, hidden_size=hidden_size, intermediate_size=intermediate_size
        )
        self.gate_up_proj = nn.Linear(
            hidden_size, 2 * intermediate_size, bias=False, device=device, dtype=dtype
        )
        self.down_proj = nn.Linear(
            intermediate_size, hidden_size, bias=False, device=device, dtype=dtype
        )

    def reset_parameters(self) -> None:
        """Draws both weights anew, as ``nn.Linear`` does."""
        self.gate_up_proj.reset_parameters()
        self.down_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Applies the network.

        Args:
            x: (..., H), floating.

        Returns:
            (..., H).
        """
        output: Tensor = self.down_proj(swiglu(self.gate_up_proj(x)))
        return output

"""SwiGLU feed-forward networks: a group of experts, and a dense one for the shared expert."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_moe_ops.ops import grouped_matmul

from . import _checks


def _swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up; gate is the first half of the last dimension, up the second."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class GroupedSwiGLU(nn.Module):
    """E experts ``down(silu(gate(x)) * up(x))``, without biases, on rows sorted by expert.

    Args:
        hidden_size: H.
        intermediate_size: I.
        num_experts: E.
        device: of the weights.
        dtype: of the weights.

    Attributes:
        gate_up_proj: (E, H, 2 * I); ``[..., :I]`` is the gate, ``[..., I:]`` is up.
        down_proj: (E, I, H).

    Raises:
        ValueError: a size is not a positive int.

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _checks.check_positive(
            type(self).__name__,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
        )
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(
            torch.empty(num_experts, hidden_size, 2 * intermediate_size, device=device, dtype=dtype)
        )
        self.down_proj = nn.Parameter(
            torch.empty(num_experts, intermediate_size, hidden_size, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every expert like ``nn.Linear``: uniform in +-1 / sqrt(fan-in)."""
        for weight in (self.gate_up_proj, self.down_proj):
            bound = 1 / math.sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Applies expert e to the e-th group of rows.

        Args:
            x: (M, H), in the dtype of the weights (any under autocast), rows sorted by expert.
            tokens_per_expert: (E,), int32 or int64, the size of each group; the sum must be M.
                It stays on its device: nothing waits for its values.

        Returns:
            (M, H).

        Gradients:
            In ``x`` and both weights. An expert without rows has zero gradients, not None.
        """
        gate_up_M2I = grouped_matmul(x, self.gate_up_proj, tokens_per_expert)
        return grouped_matmul(_swiglu(gate_up_M2I), self.down_proj, tokens_per_expert)

    def extra_repr(self) -> str:
        """Shows the setting in `repr`."""
        return (
            f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}, "
            f"num_experts={self.num_experts}"
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
        output: Tensor = self.down_proj(_swiglu(self.gate_up_proj(x)))
        return output

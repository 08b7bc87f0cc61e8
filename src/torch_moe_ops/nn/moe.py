"""The mixture-of-experts layer."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_moe_ops.distributed import exchange_counts
from torch_moe_ops.ops import (
    finalize_routing_v2,
    init_routing_v2,
    token_permute,
    token_unpermute,
)

from . import _checks
from ._eager import run_eagerly
from ._ep_group import EPGroup
from .experts import GroupedSwiGLU, SwiGLU
from .losses import balance_of_shares, load_balancing_loss, router_z_loss
from .router import RouterOutput, ScoreFunction, TopKRouter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MoEOutput(NamedTuple):
    """What :class:`MoE` returns.

    Flat, since ``torch.utils.checkpoint`` with ``use_reentrant=True`` only tracks tensors at the
    top level (it hands them back as a plain tuple, in this order).
    """

    output: Tensor
    """Shape of the input; its dtype too, except under autocast, where it is that of a matmul."""
    aux_loss: Tensor
    """Scalar with graph, float32 (float64 for float64 input): the weighted sum of the router
    losses, to be added to the loss. 0 when both coefficients are 0, or without tokens."""
    tokens_per_expert: Tensor
    """(E,), int64: choices of this rank's tokens that fell on each expert, before any drop."""
    drop_rate: Tensor
    """Scalar, float32, no graph: share of the T * K choices that found their expert full."""


class MoE(nn.Module):
    """Mixture of SwiGLU experts: each token is processed by the K experts that its router picks.

    ``output[t] = sum_k probs[t, k] * expert[ids[t, k]](x[t])``, plus ``shared_expert(x[t])`` if
    there is one. See :class:`TopKRouter` for ids, probs, ties and bad values.

    Without a capacity factor no choice is ever dropped. With one, each expert takes at most
    ``C = min(T, max(1, ceil(capacity_factor * T * K / E)))`` rows; when more want it, the last
    tokens of the batch lose that term of the sum (the other weights are not raised).

    The counts per expert stay on the device as a tensor: no step waits for their values, and the
    layer compiles as one graph with dynamic shapes. The module keeps no tensor of a forward pass.

    **Expert parallelism.** With an ``ep_group`` of more than one rank each rank holds E / ranks
    experts and all the rest of the layer, and passes its own tokens, of which there may be none.
    Outputs and gradients are those of one process with all tokens. What the layer measures is of
    this rank's tokens: T, so C and what is dropped, counts and drop rate. ``aux_loss`` takes the
    load from all ranks and the scores from this one: where ranks have equally many tokens, its mean
    over the ranks is the ``aux_loss`` of one process. Forward and backward are collective, and the
    ranks have to tell each other their counts: this part is run eagerly under torch.compile. See
    docs/expert_parallel.md.

    Args:
        hidden_size: H.
        intermediate_size: I, of each expert.
        num_experts: E, over all ranks.
        top_k: K, experts per token, in [1, E].
        score_function: "softmax" or "sigmoid".
        normalize_top_k: make the K weights of a token sum to 1.
        capacity_factor: None for no limit; else positive, 1.0 being just enough for a perfectly
            even load.
        shared_intermediate_size: intermediate size of a shared expert that sees every token; None
            for no shared expert.
        aux_loss_coef: factor of :func:`load_balancing_loss` in ``aux_loss``.
        z_loss_coef: factor of :func:`router_z_loss` in ``aux_loss``.
        ep_group: process group of torch.distributed whose ranks share out the experts; None for
            all experts here. A deep copy of the layer uses the same group; pickling raises.
        device: of the parameters.
        dtype: of the parameters.

    Attributes:
        router: :class:`TopKRouter`.
        experts: :class:`GroupedSwiGLU`.
        shared_expert: :class:`SwiGLU`, or None.

    Raises:
        ValueError: an argument is out of range, or E is no multiple of the number of ranks.
        TypeError: ``ep_group`` is no process group, or one without this rank.

    Example:
        >>> import torch
        >>> from torch_moe_ops.nn import MoE
        >>> layer = MoE(16, 32, num_experts=4, top_k=2, aux_loss_coef=0.01)
        >>> x = torch.randn(3, 5, 16)
        >>> y = layer(x)
        >>> y.output.shape, int(y.tokens_per_expert.sum()), float(y.drop_rate)
        (torch.Size([3, 5, 16]), 30, 0.0)
        >>> (y.output.square().mean() + y.aux_loss).backward()
        >>> layer.experts.gate_up_proj.grad.shape
        torch.Size([4, 16, 64])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: ScoreFunction = "softmax",
        normalize_top_k: bool = True,
        capacity_factor: float | None = None,
        shared_intermediate_size: int | None = None,
        aux_loss_coef: float = 0.0,
        z_loss_coef: float = 0.0,
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
        _checks.check_top_k(owner, top_k, num_experts)
        _checks.check_score_function(owner, score_function)
        _checks.check_coefficients(owner, aux_loss_coef=aux_loss_coef, z_loss_coef=z_loss_coef)
        if ep_group is not None:
            EPGroup(owner, ep_group, num_experts)
        if shared_intermediate_size is not None:
            _checks.check_positive(owner, shared_intermediate_size=shared_intermediate_size)

        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.capacity_factor = capacity_factor
        self.aux_loss_coef = aux_loss_coef
        self.z_loss_coef = z_loss_coef
        self.router = TopKRouter(
            hidden_size,
            num_experts,
            top_k,
            score_function=score_function,
            normalize_top_k=normalize_top_k,
            device=device,
            dtype=dtype,
        )
        self.experts = GroupedSwiGLU(
            hidden_size,
            intermediate_size,
            num_experts,
            ep_group=ep_group,
            device=device,
            dtype=dtype,
        )
        self.shared_expert = (
            SwiGLU(hidden_size, shared_intermediate_size, device=device, dtype=dtype)
            if shared_intermediate_size is not None
            else None
        )

    @property
    def capacity_factor(self) -> float | None:
        """None for no limit; may be changed between steps."""
        return self._capacity_factor

    @capacity_factor.setter
    def capacity_factor(self, value: float | None) -> None:
        _checks.check_capacity_factor(type(self).__name__, value)
        self._capacity_factor = value
        # As whole numbers: 1.1 * 10 in floating point is above 11 and its ceiling 12, and
        # torch.compile takes a float attribute for a variable of its graph.
        ratio = None if value is None else Fraction(value).limit_denominator(1_000_000)
        self._capacity_ratio = None if ratio is None else ratio.as_integer_ratio()

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared_expert is not None:
            self.shared_expert.reset_parameters()

    def forward(self, x: Tensor) -> MoEOutput:
        """Applies the layer.

        Args:
            x: (..., H), in the dtype of the parameters (any under autocast). All leading dimensions
                count as tokens, in row-major order; there may be no tokens.

        Returns:
            See :class:`MoEOutput`.

        Raises:
            ValueError: the last dimension of x is not H.

        Gradients:
            In x and in every parameter: through the experts, and through the weights of the chosen
            experts into the router. Parameters of experts without tokens get zeros. With more ranks
            than one, all of them run the backward pass; the experts' gradients are then those of
            the sum of the ranks' losses, all others those of this rank's loss.
        """
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{type(self).__name__}: x must have shape (..., hidden_size={self.hidden_size}), "
                f"got {list(x.shape)}"
            )
        x_TH = x.reshape(-1, self.hidden_size)
        routed: RouterOutput = self.router(x_TH)
        counts_E = _count(routed.expert_ids, self.num_experts)
        if self._capacity_ratio is None:
            y_TH, load_E = self._dropless(x_TH, routed, counts_E)
            drop_rate = torch.zeros((), dtype=torch.float32, device=x.device)
        else:
            capacity = self.expert_capacity(x_TH.shape[0])
            y_TH, load_E = self._with_capacity(x_TH, routed, counts_E, capacity)
            dropped = (counts_E - capacity).clamp(min=0).sum()
            drop_rate = dropped.to(torch.float32) / max(routed.expert_ids.numel(), 1)
        if self.shared_expert is not None:
            y_TH = y_TH + self.shared_expert(x_TH)
        return MoEOutput(
            y_TH.reshape(x.shape), self._aux_loss(routed, counts_E, load_E), counts_E, drop_rate
        )

    def expert_capacity(self, num_tokens: int) -> int:
        """C, the rows that one expert takes at most in a batch of this many tokens.

        Without a capacity factor that is ``num_tokens``, as choices of a token are distinct.
        """
        if self._capacity_ratio is None:
            return num_tokens
        numerator, denominator = self._capacity_ratio
        ceiling = -(-numerator * num_tokens * self.top_k // (denominator * self.num_experts))
        return min(num_tokens, max(1, ceiling))

    def _dropless(
        self, x_TH: Tensor, routed: RouterOutput, counts_E: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows_MH, row_of_slot = token_permute(x_TH, routed.expert_ids)
        if self.experts.ep_size == 1:
            rows_MH, load_E = self.experts(rows_MH, counts_E), counts_E
        else:
            rows_MH, load_E = self._dropless_across_ranks(rows_MH, counts_E)
        return token_unpermute(rows_MH, row_of_slot, routed.probs), load_E

    def _with_capacity(
        self, x_TH: Tensor, routed: RouterOutput, counts_E: Tensor, capacity: int
    ) -> tuple[Tensor, Tensor]:
        rows_ECH, row_of_slot, _, _ = init_routing_v2(
            x_TH,
            routed.expert_ids,
            expert_capacity=capacity,
            expert_num=self.num_experts,
            drop_pad_mode=1,
        )
        # Every expert works on all C rows of its block, used or not; unused ones are zero.
        rows_MH, load_E = rows_ECH.flatten(0, 1), counts_E
        if self.experts.ep_size == 1:
            block_sizes_E = torch.full(
                (self.num_experts,), capacity, dtype=torch.int64, device=x_TH.device
            )
            rows_MH = self.experts(rows_MH, block_sizes_E)
        else:
            rows_MH, load_E = self._blocks_across_ranks(rows_MH, counts_E, capacity)
        y_TH = finalize_routing_v2(
            rows_MH.unflatten(0, (self.num_experts, capacity)),
            row_of_slot,
            scales=routed.probs,
            drop_pad_mode=3,
        )
        return y_TH, load_E

    # The counts are numbers that no compiler can know: torch.compile runs these two as they stand.
    # Beside the rows they return the load: the choices of all ranks for each expert.

    @run_eagerly
    def _dropless_across_ranks(self, rows_MH: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor]:
        counts = exchange_counts(counts_E, self.experts.ep_group or "")
        load_E = torch.tensor(counts.rows_per_expert, device=counts_E.device)
        return self.experts(rows_MH, counts), load_E

    @run_eagerly
    def _blocks_across_ranks(
        self, rows_MH: Tensor, counts_E: Tensor, capacity: int
    ) -> tuple[Tensor, Tensor]:
        # C is known here, and that of the other ranks asked for: nothing waits for the device.
        counts = exchange_counts([capacity] * self.num_experts, self.experts.ep_group or "")
        load_E = counts_E
        if self.aux_loss_coef:
            load_E = counts_E.clone()  # Before the drop, unlike what is exchanged.
            dist.all_reduce(load_E, group=self.experts.ep_group)
        return self.experts(rows_MH, counts), load_E

    def _aux_loss(self, routed: RouterOutput, counts_E: Tensor, load_E: Tensor) -> Tensor:
        if self.experts.ep_size == 1:
            balance = load_balancing_loss(routed.scores, counts_E, self.top_k)
        else:
            shares_E = load_E.to(routed.scores.dtype) / load_E.sum().clamp(min=1)
            balance = balance_of_shares(routed.scores, shares_E)
        aux_loss = self.aux_loss_coef * balance
        # Not 0 * z: the z-loss of infinite logits is infinite.
        if self.z_loss_coef:
            aux_loss = aux_loss + self.z_loss_coef * router_z_loss(routed.logits)
        return aux_loss

    def extra_repr(self) -> str:
        """Shows the setting in `repr`."""
        return (
            f"capacity_factor={self.capacity_factor}, aux_loss_coef={self.aux_loss_coef}, "
            f"z_loss_coef={self.z_loss_coef}"
        )


def _count(ids_TK: Tensor, num_experts: int) -> Tensor:
    """(E,), int64: how often each id occurs. Unlike bincount its shape depends on no value."""
    ids_n = ids_TK.reshape(-1)
    return ids_n.new_zeros(num_experts).scatter_add_(0, ids_n, torch.ones_like(ids_n))

"""The router: which experts each token goes to, and with what weights."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _checks

ScoreFunction = Literal["softmax", "sigmoid"]


class RouterOutput(NamedTuple):
    """What :class:`TopKRouter` returns; floating parts are float32 (float64 for float64 input)."""

    expert_ids: Tensor
    """(T, K), int64: chosen experts, best first, distinct in each row."""
    probs: Tensor
    """(T, K): weight of each choice."""
    scores: Tensor
    """(T, E): scores of all experts, each row summing to 1; for the load-balancing loss."""
    logits: Tensor
    """(T, E): logits with non-finite values replaced; for the z-loss."""


class TopKRouter(nn.Module):
    """Scores the experts with a linear map and keeps the K best of each token.

    All maths is done in float32, also for bfloat16 and float16 input or weights and under autocast
    (float64 stays float64). With ``s`` the softmax or the sigmoid of the logits, the weight of a
    chosen expert is ``s`` itself, or ``s`` divided by the sum of the K chosen scores. Weights are
    never rounded to the dtype of the tokens.

    Equal logits go to the lower expert id. NaN counts as the lowest logit and an infinite logit as
    the largest finite number of its sign; in a row of nothing but NaN all experts count as equal.
    Ids are therefore always in range and distinct, weights always finite, and a bad row does not
    change the routing of any other.

    Args:
        hidden_size: H.
        num_experts: E.
        top_k: K, in [1, E].
        score_function: "softmax" (over all experts) or "sigmoid" (each expert for itself).
        normalize_top_k: make the K weights of a token sum to 1.
        device: of the weight.
        dtype: of the weight.

    Attributes:
        weight: (E, H).

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> import torch
        >>> from torch_moe_ops.nn import TopKRouter
        >>> router = TopKRouter(hidden_size=8, num_experts=5, top_k=2)
        >>> routed = router.route(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]))
        >>> routed.expert_ids, routed.probs
        (tensor([[1, 2]]), tensor([[0.5000, 0.5000]]))
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: ScoreFunction = "softmax",
        normalize_top_k: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        _checks.check_positive(owner, hidden_size=hidden_size, num_experts=num_experts)
        _checks.check_top_k(owner, top_k, num_experts)
        _checks.check_score_function(owner, score_function)
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.score_function = score_function
        self.normalize_top_k = normalize_top_k
        self.weight = nn.Parameter(
            torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight like ``nn.Linear``: uniform in +-1 / sqrt(H)."""
        bound = 1 / math.sqrt(self.hidden_size)
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> RouterOutput:
        """Chooses the experts of every token.

        Args:
            x: (T, H), floating.

        Returns:
            The choice, see :class:`RouterOutput`.
        """
        with _autocast_disabled(x.device):
            dtype = torch.promote_types(
                torch.promote_types(x.dtype, self.weight.dtype), torch.float32
            )
            return self.route(F.linear(x.to(dtype), self.weight.to(dtype)))

    def route(self, logits: Tensor) -> RouterOutput:
        """The part of the router after the linear map.

        Args:
            logits: (T, E), floating.

        Returns:
            The choice, see :class:`RouterOutput`.
        """
        logits_TE = _finite(logits.to(torch.promote_types(logits.dtype, torch.float32)))
        # A stable sort, since topk promises no order among equal logits. Logits are compared and
        # not scores: different logits can have the same rounded score (sigmoid(20) = sigmoid(30)).
        order_TE = torch.sort(logits_TE.detach(), dim=-1, descending=True, stable=True).indices
        ids_TK = order_TE[:, : self.top_k]

        # In logarithms, so that scores which all underflow to 0 are never divided by their sum.
        sigmoid = self.score_function == "sigmoid"
        log_scores_TE = F.logsigmoid(logits_TE) if sigmoid else logits_TE
        scores_TE = log_scores_TE.softmax(dim=-1)
        if self.normalize_top_k:
            probs_TK = log_scores_TE.gather(-1, ids_TK).softmax(dim=-1)
        elif sigmoid:
            probs_TK = logits_TE.gather(-1, ids_TK).sigmoid()
        else:
            probs_TK = scores_TE.gather(-1, ids_TK)
        return RouterOutput(ids_TK, probs_TK, scores_TE, logits_TE)

    def extra_repr(self) -> str:
        """Shows the setting in `repr`."""
        return (
            f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"score_function={self.score_function!r}, normalize_top_k={self.normalize_top_k}"
        )


def _finite(logits_TE: Tensor) -> Tensor:
    """A copy without NaN or infinity; no gradient goes to replaced values."""
    info = torch.finfo(logits_TE.dtype)
    finite_TE = torch.nan_to_num(logits_TE, nan=info.min, posinf=info.max, neginf=info.min)
    # Rows of NaN come from a NaN token. Equal logits of 0 give weights that are not 0 with either
    # score function, so the NaN reaches the token's output instead of being dropped on the way.
    is_lost_T1 = logits_TE.isnan().all(dim=-1, keepdim=True)
    return finite_TE.masked_fill(is_lost_T1, 0.0)


def _autocast_disabled(device: torch.device) -> AbstractContextManager[object]:
    # torch.autocast refuses devices that have no autocast, such as meta.
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()

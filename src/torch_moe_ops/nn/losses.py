"""Losses on the router: balance between the experts, and small logits."""

import torch
from torch import Tensor


def load_balancing_loss(scores: Tensor, tokens_per_expert: Tensor, top_k: int) -> Tensor:
    """Load-balancing loss of the Switch Transformer.

    ``E * sum_e f_e * P_e`` with ``f_e`` the share of the choices that fell on expert e and ``P_e``
    the mean score of e over the tokens. It is 1 when both are uniform, and at most E. Computed in
    float32 (float64 for float64 scores).

    Args:
        scores: (T, E), floating; each row sums to 1.
        tokens_per_expert: (E,), integer: how many of the T * K choices fell on each expert.
        top_k: K, choices per token.

    Returns:
        Scalar. 0 when there are no tokens.

    Gradients:
        In ``scores``. The counts are constants, as in the paper: choosing is not differentiable.

    Example:
        >>> import torch
        >>> from torch_moe_ops.nn import load_balancing_loss
        >>> scores = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
        >>> counts = torch.tensor([2, 0])  # both tokens chose expert 0, K = 1
        >>> load_balancing_loss(scores, counts, top_k=1)
        tensor(1.2500)
    """
    # max(..., 1): no tokens give 0 with a graph, not 0 / 0.
    choices = max(scores.shape[0] * top_k, 1)
    return balance_of_shares(scores, tokens_per_expert.to(_loss_dtype(scores)) / choices)


def balance_of_shares(scores: Tensor, shares_E: Tensor) -> Tensor:
    """:func:`load_balancing_loss` from the shares of the choices, which may be of other tokens."""
    num_tokens, num_experts = scores.shape
    means_E = scores.to(_loss_dtype(scores)).sum(dim=0) / max(num_tokens, 1)
    return num_experts * (shares_E * means_E).sum()


def router_z_loss(logits: Tensor) -> Tensor:
    """Router z-loss of ST-MoE: keeps the logits small, where softmax is well conditioned.

    ``mean over tokens of logsumexp(logits)^2``, in float32 (float64 for float64 logits).

    Args:
        logits: (T, E), floating.

    Returns:
        Scalar. 0 when there are no tokens.

    Gradients:
        In ``logits``.

    Example:
        >>> import torch
        >>> from torch_moe_ops.nn import router_z_loss
        >>> router_z_loss(torch.zeros(3, 4))  # log(4) squared
        tensor(1.9218)
    """
    logits_TE = logits.to(_loss_dtype(logits))
    return logits_TE.logsumexp(dim=-1).square().sum() / max(logits.shape[0], 1)


def _loss_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)

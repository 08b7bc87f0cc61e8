"""The same work as other packages do it: builders of calls for `Problem.peers`.

Every builder imports what it needs when it is called. Gradients of peers are autograd's, taken
again and again from one graph. Pinned in requirements/bench.txt; none has to be there.
"""

import warnings
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from inputs import RoutingInputs
from limits import Call

Builder = Callable[[], Call]

MEGATRON = "Megatron"
GROUPED_MM = "_grouped_mm"


def megatron_permute(given: RoutingInputs) -> dict[str, Builder]:
    """The rows of ``token_permute``."""

    def build() -> Call:
        permute, chosen_TE = _megatron().permute, _chosen(given)
        num_rows = given.ids.numel()
        return lambda: permute(given.tokens, chosen_TE, num_out_tokens=num_rows)[0]

    return {MEGATRON: build}


def megatron_permute_grad(given: RoutingInputs) -> dict[str, Builder]:
    def build() -> Call:
        tokens = given.tokens.clone().requires_grad_()
        num_rows = given.ids.numel()
        rows, _, _ = _megatron().permute(tokens, _chosen(given), num_out_tokens=num_rows)
        return gradient(rows, (tokens,), given.rows)

    return {MEGATRON: build}


def megatron_unpermute(given: RoutingInputs) -> dict[str, Builder]:
    def build() -> Call:
        unpermute, arguments = _megatron().unpermute, _unpermute_arguments(given)
        probs_TE = _dense_probs(given)
        return lambda: unpermute(given.rows, probs=probs_TE, **arguments)

    return {MEGATRON: build}


def megatron_unpermute_grad(given: RoutingInputs) -> dict[str, Builder]:
    """Of the rows, the first output of ours; that of the dense probs is computed as well."""

    def build() -> Call:
        rows = given.rows.clone().requires_grad_()
        probs_TE = _dense_probs(given).requires_grad_()
        y = _megatron().unpermute(rows, probs=probs_TE, **_unpermute_arguments(given))
        both = gradient(y, (rows, probs_TE), given.tokens)
        return lambda: both()[:1]

    return {MEGATRON: build}


def megatron_round_trip(
    tokens: Tensor, probs: Tensor, grad: Tensor, given: RoutingInputs
) -> dict[str, Builder]:
    """Permute, unpermute and backward; the gradient of the tokens."""

    def build() -> Call:
        utils, chosen_TE = _megatron(), _chosen(given)
        num_rows = given.ids.numel()

        def train() -> tuple[Tensor, ...]:
            probs_TE = torch.zeros(chosen_TE.shape).scatter(1, given.ids, probs)
            rows, _, token_of_row = utils.permute(tokens, chosen_TE, num_out_tokens=num_rows)
            y = utils.unpermute(
                rows, token_of_row, tokens.shape, probs=probs_TE, routing_map=chosen_TE
            )
            return torch.autograd.grad(y, (tokens, probs), grad)

        return train

    return {MEGATRON: build}


def grouped_mm(left: Tensor, right: Tensor, counts: Tensor) -> dict[str, Builder]:
    """``torch._grouped_mm``: rows times the matrix of their group, or the weight gradient.

    It is private, and its CPU kernel refuses float64 and rows of no multiple of 16 bytes.
    """

    def build() -> Call:
        ends = counts.cumsum(0).int()
        return lambda: torch._grouped_mm(left, right, offs=ends)

    return {GROUPED_MM: build}


def gradient(y: Tensor, inputs: tuple[Tensor, ...], grad: Tensor) -> Call:
    """The backward pass alone."""
    return lambda: torch.autograd.grad(y, inputs, grad, retain_graph=True)


def _megatron() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that CUDA packages are missing
        from megatron.core.transformer.moe import moe_utils
    return moe_utils


def _chosen(given: RoutingInputs) -> Tensor:
    """(T, E), bool: which experts a token goes to."""
    mask_TE = torch.zeros(given.shape.T, given.shape.E, dtype=torch.bool)
    return mask_TE.scatter_(1, given.ids, True)


def _dense_probs(given: RoutingInputs) -> Tensor:
    probs_TE = torch.zeros(given.shape.T, given.shape.E, dtype=given.dtype)
    return probs_TE.scatter_(1, given.ids, given.probs)


def _unpermute_arguments(given: RoutingInputs) -> dict[str, object]:
    shape, chosen_TE = given.shape, _chosen(given)
    token_of_row = torch.arange(shape.T).expand(shape.E, -1).masked_select(chosen_TE.t())
    return {
        "sorted_indices": token_of_row,
        "restore_shape": torch.Size((shape.T, shape.H)),
        "routing_map": chosen_TE,
    }

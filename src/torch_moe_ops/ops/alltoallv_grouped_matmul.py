"""Rows to the experts of other ranks and back, fused with the experts' matrix products.

``alltoallv_grouped_matmul`` and ``grouped_matmul_alltoallv`` are each other's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_moe_ops.ops._group import as_ints, group_name
from torch_moe_ops.ops._registration import (
    autograd_kernel,
    needs_grad,
    register_autograd,
    register_autograd_kernel,
    register_matmul_autocast,
    sums_dtype,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FORWARD = "alltoallv_grouped_matmul"
_REVERSE = "grouped_matmul_alltoallv"


def alltoallv_grouped_matmul(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    group: ProcessGroup | str,
    ep_world_size: int,
    send_counts: Sequence[int] | Tensor,
    recv_counts: Sequence[int] | Tensor,
    *,
    mm_x: Tensor | None = None,
    mm_weight: Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
    permute_out_flag: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Sends rows to the ranks of their experts, which multiply them with the experts' weights.

    There are ``ep`` ranks with ``e`` experts each; expert ``j`` of rank ``r`` is the global expert
    ``r * e + j``. Each rank holds rows sorted by global expert (as :func:`token_permute` leaves
    them) and gets those for its own experts, sorted by local expert and then by source rank::

        permute_out = [for each local expert j: for each rank q: rows from q for j]
        gmm_y[rows of j] = permute_out[rows of j] @ gmm_weight[j]

    A collective: every rank of the group calls it, also one without rows. docs/expert_parallel.md
    has a picture.

    Args:
        gmm_x: (S, H), floating: the S rows of this rank, sorted by global expert.
        gmm_weight: (e, H, N), or (e, N, H) with ``trans_gmm_weight``: the experts of this rank.
        group: A process group of torch.distributed, its name (``process_group.group_name``), or
            what :func:`exchange_counts` returns. The empty name is this process alone.
        ep_world_size: ep, the number of ranks in the group.
        send_counts: (ep * e,), ints: ``send_counts[r * e + j]`` rows of this rank are for expert
            ``j`` of rank ``r``. They sum to S. A tensor is copied to the host.
        recv_counts: (ep * e,), ints: ``recv_counts[q * e + j]`` rows come from rank ``q`` for the
            expert ``j`` of this rank; R in all. :func:`exchange_counts` finds them.
        mm_x: (T, H2), rows for a shared expert, multiplied while the others are on their way.
        mm_weight: (H2, N2), or (N2, H2) with ``trans_mm_weight``.
        trans_gmm_weight: ``gmm_weight[j]`` is stored transposed.
        trans_mm_weight: ``mm_weight`` is stored transposed.
        permute_out_flag: Return ``permute_out`` as well.

    Returns:
        ``gmm_y`` (R, N), ``mm_y`` (T, N2) and ``permute_out`` (R, H), in the dtype of ``gmm_x``.
        What was not asked for is empty, of shape (0,). Products are rounded once, sums are float32
        (float64 for float64); moved rows keep every bit.

    Raises:
        ValueError: Ranks or sizes do not fit; counts are negative, or do not sum to the rows; there
            is no such group, or it has another size. Raised before anything is sent.
        ValueError: On every rank, before any row moves: ranks disagree about a count, the dtype,
            the row size, the number of experts, or the operator.
        TypeError: A dtype is not supported, or not that of ``gmm_x``.
        RuntimeError: A rank died, raised, or did not come within the timeout of the group.

    Gradients:
        ``gmm_x``, ``gmm_weight``, ``mm_x`` and ``mm_weight``, to any order. The backward pass is
        collective: all ranks must need the same gradients. Experts without rows have zeros.

    Note:
        Deterministic: the same bits for any number of threads. Under autocast, cast as
        torch.matmul does. ``MOE_OPS_CHECK_COUNTS=0`` leaves out the comparison of the ranks, a
        small collective per call; counts that do not fit then give garbage rows or end the
        process. With ``permute_out_flag`` the backward pass exchanges rows twice. On an NPU:
        aclnnAlltoAllvGroupedMatMul
        where all ranks are within its limits (docs/expert_parallel.md), else an exchange of HCCL
        and aclnnGroupedMatmulV5.

    Example:
        >>> import torch, torch_moe_ops
        >>> x = torch.tensor([[1., 2.], [3., 4.], [5., 6.]])
        >>> weight = torch.stack([torch.eye(2), 10 * torch.eye(2)])
        >>> y, _, _ = torch_moe_ops.alltoallv_grouped_matmul(x, weight, "", 1, [1, 2], [1, 2])
        >>> y.tolist()
        [[1.0, 2.0], [30.0, 40.0], [50.0, 60.0]]
    """
    return torch.ops.moe.alltoallv_grouped_matmul(
        gmm_x,
        gmm_weight,
        group_name(_FORWARD, group),
        ep_world_size,
        as_ints(_FORWARD, "send_counts", send_counts),
        as_ints(_FORWARD, "recv_counts", recv_counts),
        mm_x=mm_x,
        mm_weight=mm_weight,
        trans_gmm_weight=trans_gmm_weight,
        trans_mm_weight=trans_mm_weight,
        permute_out_flag=permute_out_flag,
    )


def grouped_matmul_alltoallv(
    gmm_x: Tensor,
    gmm_weight: Tensor,
    group: ProcessGroup | str,
    ep_world_size: int,
    send_counts: Sequence[int] | Tensor,
    recv_counts: Sequence[int] | Tensor,
    *,
    mm_x: Tensor | None = None,
    mm_weight: Tensor | None = None,
    trans_gmm_weight: bool = False,
    trans_mm_weight: bool = False,
) -> tuple[Tensor, Tensor]:
    r"""Multiplies rows with the weights of this rank's experts and sends them back.

    The way back of :func:`alltoallv_grouped_matmul`: the rows are sorted by local expert and then
    by the rank that they go to, and arrive sorted by global expert. With the counts of the way
    there swapped and identity weights, every row returns to its place.

    A collective: every rank of the group calls it, also one without rows.

    Args:
        gmm_x: (S, H), floating: the rows of this rank's experts, sorted by local expert, then by
            destination rank.
        gmm_weight: (e, H, N), or (e, N, H) with ``trans_gmm_weight``.
        group: As in :func:`alltoallv_grouped_matmul`.
        ep_world_size: ep, the number of ranks in the group.
        send_counts: (ep * e,), ints: ``send_counts[r * e + j]`` rows of expert ``j`` of this rank
            go to rank ``r``: the ``recv_counts`` of the way there. They sum to S.
        recv_counts: (ep * e,), ints: ``recv_counts[q * e + j]`` rows come back from expert ``j``
            of rank ``q``; R in all.
        mm_x: (T, H2), rows for a shared expert.
        mm_weight: (H2, N2), or (N2, H2) with ``trans_mm_weight``.
        trans_gmm_weight: ``gmm_weight[j]`` is stored transposed.
        trans_mm_weight: ``mm_weight`` is stored transposed.

    Returns:
        ``y`` (R, N), sorted by global expert, and ``mm_y`` (T, N2), empty of shape (0,) if not
        asked for; the dtype of ``gmm_x``, rounded once.

    Raises:
        ValueError: As in :func:`alltoallv_grouped_matmul`.
        TypeError: A dtype is not supported, or not that of ``gmm_x``.
        RuntimeError: A rank died, raised, or did not come within the timeout of the group.

    Gradients:
        ``gmm_x``, ``gmm_weight``, ``mm_x`` and ``mm_weight``, to any order; collective.

    Note:
        Deterministic. Under autocast, cast as torch.matmul does. On an NPU:
        aclnnGroupedMatMulAlltoAllv where all ranks are within its limits, else
        aclnnGroupedMatmulV5 and an exchange of HCCL.

    Example:
        >>> import torch, torch_moe_ops
        >>> x = torch.tensor([[1., 2.], [30., 40.], [50., 60.]])
        >>> weight = torch.stack([torch.eye(2), 0.1 * torch.eye(2)])
        >>> y, _ = torch_moe_ops.grouped_matmul_alltoallv(x, weight, "", 1, [1, 2], [1, 2])
        >>> y.tolist()
        [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    """
    return torch.ops.moe.grouped_matmul_alltoallv(
        gmm_x,
        gmm_weight,
        group_name(_REVERSE, group),
        ep_world_size,
        as_ints(_REVERSE, "send_counts", send_counts),
        as_ints(_REVERSE, "recv_counts", recv_counts),
        mm_x=mm_x,
        mm_weight=mm_weight,
        trans_gmm_weight=trans_gmm_weight,
        trans_mm_weight=trans_mm_weight,
    )


# Places of the inputs that have gradients.
_X, _WEIGHT, _MM_X, _MM_WEIGHT = 0, 1, 6, 7
_NUM_INPUTS = 8


def _keep_exchange(ctx: Any, inputs: tuple[Any, ...]) -> None:
    """The arguments after the rows (and weights) that say who sends what to whom."""
    ctx.group, ctx.ep_world_size, send_counts, recv_counts = inputs
    # Copies: a list may be the caller's own.
    ctx.send_counts, ctx.recv_counts = list(send_counts), list(recv_counts)


def _setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    gmm_x, gmm_weight = inputs[:2]
    _keep_exchange(ctx, inputs[2:6])
    needs = needs_grad(ctx, _NUM_INPUTS)
    # The weights' gradient needs the rows where they were multiplied: on the way there these are an
    # output, on the way back the input.
    rows = output[2] if len(output) == 3 else gmm_x
    ctx.save_for_backward(
        rows if needs[_WEIGHT] else None,
        gmm_weight if needs[_X] else None,
        keyword_only_inputs["mm_x"] if needs[_MM_WEIGHT] else None,
        keyword_only_inputs["mm_weight"] if needs[_MM_X] else None,
    )
    ctx.trans_gmm_weight = keyword_only_inputs["trans_gmm_weight"]
    ctx.trans_mm_weight = keyword_only_inputs["trans_mm_weight"]
    # Only so can the gradient of an output that nobody used be told from zeros.
    ctx.set_materialize_grads(False)
    ctx.shapes = [out.shape for out in output]
    ctx.options = {"dtype": gmm_x.dtype, "device": gmm_x.device}
    ctx.permute_out_asked = keyword_only_inputs.get("permute_out_flag", False)
    ctx.mark_non_differentiable(*[out for out in output if out.dim() == 1])  # not asked for


def _defined(ctx: Any, grad: Tensor | None, place: int) -> Tensor:
    """Zeros for a missing gradient: the other ranks may have one, and wait for this rank's rows."""
    return torch.zeros(ctx.shapes[place], **ctx.options) if grad is None else grad


def _way_back(ctx: Any) -> tuple[Any, ...]:
    """The arguments of the exchange in the other direction: what was received is sent."""
    return ctx.group, ctx.ep_world_size, ctx.recv_counts, ctx.send_counts


def _group_list(sizes: Sequence[int], like: Tensor) -> Tensor:
    if all(type(size) is int for size in sizes):
        return torch.tensor(sizes, dtype=torch.int64, device=like.device)
    # While compiling: torch.tensor would make constants of symbolic sizes.
    return torch.stack([torch.scalar_tensor(s, dtype=torch.int64) for s in sizes]).to(like.device)


def _weight_grad(ctx: Any, rows: Tensor, y_grad: Tensor, counts: Sequence[int]) -> Tensor:
    """The gradient of gmm_weight, from expert-major rows; ``counts`` of them by (rank, expert)."""
    num_experts = len(counts) // ctx.ep_world_size
    sizes = [sum(counts[expert::num_experts]) for expert in range(num_experts)]
    return torch.ops.moe.grouped_matmul_weight_grad(
        rows, y_grad, _group_list(sizes, rows), trans_weight=ctx.trans_gmm_weight
    )


def _shared_expert_grads(
    ctx: Any, mm_x: Tensor | None, mm_weight: Tensor | None, mm_y_grad: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of mm_x and mm_weight.

    As products of one group: unlike those of torch.mm, their bits do not depend on the number of
    threads.
    """
    if mm_y_grad is None:
        return None, None
    rows = _group_list([mm_y_grad.shape[0]], mm_y_grad)
    mm_x_grad = mm_weight_grad = None
    if mm_weight is not None:
        mm_x_grad = torch.ops.moe.grouped_matmul(
            mm_y_grad, mm_weight[None], rows, trans_weight=not ctx.trans_mm_weight
        )
    if mm_x is not None:
        mm_weight_grad = torch.ops.moe.grouped_matmul_weight_grad(
            mm_x, mm_y_grad, rows, trans_weight=ctx.trans_mm_weight
        )[0]
    return mm_x_grad, mm_weight_grad


def _forward_backward(
    ctx: Any, y_grad: Tensor | None, mm_y_grad: Tensor | None, permute_grad: Tensor | None
) -> tuple[Any, ...]:
    rows, gmm_weight, mm_x, mm_weight = ctx.saved_tensors
    y_grad = _defined(ctx, y_grad, 0)
    x_grad = weight_grad = None
    if gmm_weight is not None:
        if ctx.permute_out_asked:
            permute_grad = _defined(ctx, permute_grad, 2)
        # Two parts are added in the dtype of sums, so that the gradient is rounded once.
        dtype = y_grad.dtype if permute_grad is None else sums_dtype(y_grad, gmm_weight)
        x_grad, _ = torch.ops.moe.grouped_matmul_alltoallv(
            y_grad.to(dtype),
            gmm_weight.to(dtype),
            *_way_back(ctx),
            trans_gmm_weight=not ctx.trans_gmm_weight,
        )
        if permute_grad is not None:
            moved = torch.ops.moe._exchange_expert_rows(
                permute_grad, *_way_back(ctx), to_experts=False
            )
            x_grad = (x_grad + moved).to(y_grad.dtype)
    if rows is not None:
        weight_grad = _weight_grad(ctx, rows, y_grad, ctx.recv_counts)
    shared_grads = _shared_expert_grads(ctx, mm_x, mm_weight, mm_y_grad)
    return x_grad, weight_grad, None, None, None, None, *shared_grads


def _reverse_backward(ctx: Any, y_grad: Tensor | None, mm_y_grad: Tensor | None) -> tuple[Any, ...]:
    rows, gmm_weight, mm_x, mm_weight = ctx.saved_tensors
    y_grad = _defined(ctx, y_grad, 0)
    x_grad = weight_grad = expert_grads = None
    if gmm_weight is not None:
        x_grad, _, expert_grads = torch.ops.moe.alltoallv_grouped_matmul(
            y_grad,
            gmm_weight,
            *_way_back(ctx),
            trans_gmm_weight=not ctx.trans_gmm_weight,
            permute_out_flag=rows is not None,
        )
    elif rows is not None:
        expert_grads = torch.ops.moe._exchange_expert_rows(y_grad, *_way_back(ctx), to_experts=True)
    if rows is not None and expert_grads is not None:
        weight_grad = _weight_grad(ctx, rows, expert_grads, ctx.send_counts)
    shared_grads = _shared_expert_grads(ctx, mm_x, mm_weight, mm_y_grad)
    return x_grad, weight_grad, None, None, None, None, *shared_grads


def _exchange_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor
) -> None:
    _keep_exchange(ctx, inputs[1:])
    ctx.to_experts = keyword_only_inputs["to_experts"]


def _exchange_backward(ctx: Any, moved_grad: Tensor) -> tuple[Any, ...]:
    rows_grad = torch.ops.moe._exchange_expert_rows(
        moved_grad, *_way_back(ctx), to_experts=not ctx.to_experts
    )
    return rows_grad, None, None, None, None


_forward_kernel = autograd_kernel("alltoallv_grouped_matmul", _forward_backward, _setup)


def _forward_keeping_rows(keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Asks for permute_out where the weights' gradient will need it."""
    keep = torch.is_grad_enabled() and getattr(args[_WEIGHT], "requires_grad", False)
    if not keep or kwargs.get("permute_out_flag"):
        return _forward_kernel(keys, *args, **kwargs)
    gmm_y, mm_y, rows = _forward_kernel(keys, *args, **{**kwargs, "permute_out_flag": True})
    gmm_y.grad_fn.permute_out_asked = False  # no rank has a gradient of it, but for a second order
    return gmm_y, mm_y, rows.detach().new_empty(0)


register_autograd_kernel("alltoallv_grouped_matmul", _forward_keeping_rows)
register_autograd("grouped_matmul_alltoallv", _reverse_backward, _setup)
register_autograd("_exchange_expert_rows", _exchange_backward, _exchange_setup)
register_matmul_autocast("alltoallv_grouped_matmul", num_tensors=2)
register_matmul_autocast("grouped_matmul_alltoallv", num_tensors=2)

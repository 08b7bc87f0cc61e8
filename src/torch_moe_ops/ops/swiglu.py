"""The activation between the two products of an expert: ``swiglu`` and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_moe_ops.ops._registration import needs_grad, register_autograd, sums_dtype


def swiglu(x: Tensor) -> Tensor:
    r"""SwiGLU of the two halves of the last dimension, in one pass.

    ``output = silu(gate) * up`` with ``gate = x[..., :I]``, ``up = x[..., I:]`` and
    ``silu(gate) = gate * sigmoid(gate)``: what is between the gate-and-up product of an expert and
    the product that leads back.

    Args:
        x: (..., 2·I), floating, of at least one dimension.

    Returns:
        (..., I), the dtype of ``x``. Computed in float32 (float64 for float64) and rounded once.

    Raises:
        ValueError: ``x`` has no dimension, or its last size is odd.
        TypeError: The dtype is not supported.

    Gradients:
        ``x``, to any order. Only ``x`` is kept for the backward pass.

    Note:
        Deterministic. Under autocast it runs in the dtype that it is given. On an NPU: aclnnSwiGlu.
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> gate_up = torch.tensor([[0., 1., 100., 5., 6., 7.]])
        >>> torch_moe_ops.swiglu(gate_up)
        tensor([[  0.0000,   4.3864, 700.0000]])
    """
    return torch.ops.moe.swiglu(x)


def swiglu_grad(grad_output: Tensor, x: Tensor) -> Tensor:
    r"""Gradient of :func:`swiglu`, in one pass.

    With ``s = sigmoid(gate)``, in the layout of ``x``:
    ``gate_grad = grad_output * up * s * (1 + gate * (1 - s))`` and
    ``up_grad = grad_output * gate * s``.

    Args:
        grad_output: (..., I), the dtype of ``x``.
        x: (..., 2·I), floating, of at least one dimension: the input of the forward.

    Returns:
        (..., 2·I), the dtype of ``x``: the gradient of the gate, and after it that of up. Computed
        in float32 (float64 for float64) and rounded once.

    Raises:
        ValueError: ``x`` has no dimension or an odd last size, or the shape of ``grad_output`` does
            not fit.
        TypeError: A dtype is not supported, or the dtypes differ.

    Gradients:
        ``grad_output`` and ``x``, to any order.

    Note:
        Deterministic. On an NPU: aclnnSwiGluGrad.
        Its dtypes and limits: docs/npu.md.

    Example:
        >>> import torch, torch_moe_ops
        >>> gate_up = torch.tensor([[0., 100., 6., 7.]])
        >>> torch_moe_ops.swiglu_grad(torch.tensor([[1., 2.]]), gate_up)
        tensor([[  3.,  14.,   0., 200.]])
    """
    return torch.ops.moe.swiglu_grad(grad_output, x)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx: Any, output_grad: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return (torch.ops.moe.swiglu_grad(output_grad, x),)


def _halves(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = x.shape[-1] // 2
    return x[..., :width].to(dtype), x[..., width:].to(dtype)


def _sigmoids(x: Tensor) -> tuple[Tensor, Tensor]:
    """sigmoid(x) and 1 - sigmoid(x).

    torch.sigmoid gives other bits for other numbers of threads, so this is made of our operator:
    silu' = s + silu * (1 - s), hence s = (silu' - silu) / (1 - silu). For the lower of x and -x,
    where silu <= 0, nothing is lost in that.
    """
    negative = x < 0
    lower = torch.where(negative, x, -x)
    ones = torch.ones_like(x)
    slope, silu = _halves(torch.ops.moe.swiglu_grad(ones, torch.cat([lower, ones], -1)), x.dtype)
    small = (slope - silu) / (1 - silu)
    large = 1 - small
    return torch.where(negative, small, large), torch.where(negative, large, small)


def _swiglu_grad_backward(ctx: Any, cotangent: Tensor) -> tuple[Any, ...]:
    """gate_grad = g * up * silu'(gate) and up_grad = g * silu(gate), differentiated once more.

    Second derivatives are rare: no kernel of their own.
    """
    grad_output, x = ctx.saved_tensors
    needs_grad_output, needs_x = needs_grad(ctx, 2)
    sums = sums_dtype(x, grad_output)
    gate, up = _halves(x, sums)
    to_gate, to_up = _halves(cotangent, sums)
    s, one_minus_s = _sigmoids(gate)
    slope = s * (1 + gate * one_minus_s)  # silu'
    grad_adjoint = x_adjoint = None
    if needs_grad_output:
        grad_adjoint = (to_gate * up * slope + to_up * gate * s).to(grad_output.dtype)
    if needs_x:
        g = grad_output.to(sums)
        bend = s * one_minus_s * (2 + gate * (one_minus_s - s))  # silu''
        gate_adjoint = g * (to_gate * up * bend + to_up * slope)
        up_adjoint = g * to_gate * slope
        x_adjoint = torch.cat([gate_adjoint, up_adjoint], -1).to(x.dtype)
    return grad_adjoint, x_adjoint


register_autograd("swiglu", _swiglu_backward, _keep_inputs)
register_autograd("swiglu_grad", _swiglu_grad_backward, _keep_inputs)

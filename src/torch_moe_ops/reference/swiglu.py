"""swiglu: the activation between the two products of an expert.

The last dimension of x holds a gate and, after it, as many values to be gated. With
``s = sigmoid(gate)``::

    out = gate * s * up

Gradients, for ``g = grad_output``, in the layout of x::

    gate_grad = g * up * s * (1 + gate * (1 - s))
    up_grad = g * gate * s
"""

import torch
from torch import Tensor


def _wide_halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The gate and up in the dtype of the arithmetic: float32, or float64 for float64."""
    wide = x.to(torch.promote_types(torch.float32, x.dtype))
    width = x.shape[-1] // 2
    return wide[..., :width], wide[..., width:]


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up, rounded once. See the module docstring."""
    gate, up = _wide_halves(x)
    return (gate * gate.sigmoid() * up).to(x.dtype)


def swiglu_grad(grad_output: Tensor, x: Tensor) -> Tensor:
    """The gradient of ``x``, rounded once."""
    gate, up = _wide_halves(x)
    grad = grad_output.to(gate.dtype)
    s = gate.sigmoid()
    one_minus_s = (-gate).sigmoid()  # 1 - s, but for the digits that the difference would lose
    gate_grad = grad * up * s * (1 + gate * one_minus_s)
    up_grad = grad * gate * s
    return torch.cat([gate_grad, up_grad], -1).to(x.dtype)

"""How the Python half of an operator is registered: autograd formulas and autocast rules.

Schemas, shape functions and kernels are C++ (csrc/ops). Formulas are Python, in terms of our own
operators, so that torch.compile sees through them and second derivatives follow by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Registrations live as long as this object.
_LIBRARY = torch.library.Library("moe", "FRAGMENT")

SetupContext = Callable[..., None]
Backward = Callable[..., Any]


def register_autograd(op: str, backward: Backward, setup_context: SetupContext) -> None:
    """Registers the gradient formula of ``moe::<op>``."""
    torch.library.register_autograd(
        f"moe::{op}", backward, setup_context=setup_context, lib=_LIBRARY
    )


def needs_grad(ctx: Any, num_inputs: int) -> tuple[bool, ...]:
    """Which of an operator's positional inputs need a gradient.

    Trailing arguments left at their defaults never reach autograd: for them the answer is no.
    """
    needs = ctx.needs_input_grad
    return (*needs, *[False] * (num_inputs - len(needs)))


def register_matmul_autocast(op: str, num_tensors: int) -> None:
    """Makes ``moe::<op>`` follow torch.matmul under autocast.

    The first ``num_tensors`` arguments, if floating and not float64, are cast to the autocast
    dtype. (torch's own register_autocast takes one fixed dtype and no keyword arguments.)
    """
    overload = getattr(torch.ops.moe, op).default

    def make_kernel(key: str) -> Callable[..., Tensor]:
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def kernel(*args: Any, **kwargs: Any) -> Tensor:
            dtype = torch.get_autocast_dtype(args[0].device.type)
            cast = [_autocast(tensor, dtype) for tensor in args[:num_tensors]]
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                return overload(*cast, *args[num_tensors:], **kwargs)

        return kernel

    for key in ("AutocastCPU", "AutocastPrivateUse1"):
        _LIBRARY.impl(op, make_kernel(key), key)


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible else tensor

"""How the Python half of an operator is registered: gradient formulas and autocast rules.

Schemas, shape functions and kernels are C++ (csrc/ops). Formulas are Python, in terms of our own
operators, so that torch.compile sees through them and second derivatives follow by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_moe_ops import _C

# Registrations live as long as this object.
_LIBRARY = torch.library.Library("moe", "FRAGMENT")

SetupContext = Callable[..., None]
Backward = Callable[..., Any]
Kernel = Callable[..., Any]

# autograd.Function.apply gets the dispatch keys and the keyword arguments before the inputs.
_NUM_LEADING = 2


def register_autograd(op: str, backward: Backward, setup_context: SetupContext) -> None:
    """Registers the gradient formula of ``moe::<op>``: see :func:`autograd_kernel`."""
    register_autograd_kernel(op, autograd_kernel(op, backward, setup_context))


def register_autograd_kernel(op: str, kernel: Kernel) -> None:
    """Registers ``kernel(dispatch_keys, *args, **kwargs)`` for the calls that a formula must see.

    Those are calls whose result requires a gradient, and calls with a forward-mode tangent. All
    others never reach Python: see csrc/autograd_entry.h.
    """
    _LIBRARY.impl(op, kernel, "AutogradOther", with_keyset=True)
    _C.install_autograd_entry(op)


def autograd_kernel(op: str, backward: Backward, setup_context: SetupContext) -> Kernel:
    """The kernel for :func:`register_autograd_kernel`, from the gradient formula of ``moe::<op>``.

    Like torch.library.register_autograd, with the same signatures of the two callbacks, but for
    three things: an input with a forward-mode tangent is refused, where torch's kernel drops the
    tangent in silence; less is done in each call (no copy of the schema's defaults, no bookkeeping
    objects), which matters for small inputs; and keyword-only tensors are allowed. These come last,
    in the order of the schema, among the inputs that ``backward`` returns gradients for.
    """
    overload = getattr(torch.ops.moe, op).default
    arguments = overload._schema.arguments
    defaults = tuple(a.default_value for a in arguments if not a.kwarg_only)
    keyword_defaults = {a.name: a.default_value for a in arguments if a.kwarg_only}
    keyword_tensors = tuple(
        a.name for a in arguments if a.kwarg_only and "Tensor" in str(a.real_type)
    )

    redispatch = overload.redispatch
    below_autograd = torch._C._AutoDispatchBelowAutograd
    keys_below = torch._C._after_autograd_keyset
    in_functorch = torch._C._are_functorch_transforms_active

    def forward(ctx: Any, keys: Any, kwargs: dict[str, Any], *args: Any) -> Any:
        # No zeros in the place of gradients of index outputs, which there cannot be.
        ctx._materialize_non_diff_grads = False
        # The keyword-only tensors behind these are for autograd alone: the kernel takes kwargs.
        args = args[: len(defaults)]
        with below_autograd():
            output = redispatch(keys & keys_below, *args, **kwargs)
        # The dispatcher leaves out trailing arguments that have their default value.
        inputs = args + defaults[len(args) :]
        if keyword_defaults:
            with_defaults = {**keyword_defaults, **kwargs}
            setup_context(ctx=ctx, inputs=inputs, keyword_only_inputs=with_defaults, output=output)
        else:
            setup_context(ctx=ctx, inputs=inputs, output=output)
        return output

    def with_leading(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return (None,) * _NUM_LEADING + tuple(backward(ctx, *grads))

    function: Any = type(
        f"{op}_gradient",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(with_leading)},
    )
    # Without functorch, Function.apply adds nothing but time to the method that it overrides.
    apply = super(torch.autograd.Function, function).apply

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if keyword_tensors:
            tensors = [kwargs.get(name) for name in keyword_tensors]
            args = (*args, *defaults[len(args) :], *tensors)
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, args)
        if in_functorch():
            return function.apply(keys, kwargs, *args)
        return apply(keys, kwargs, *args)

    return kernel


def _refuse_tangents(op: str, args: tuple[Any, ...]) -> None:
    for arg in args:
        if isinstance(arg, Tensor) and forward_ad.unpack_dual(arg).tangent is not None:
            raise NotImplementedError(f"moe::{op}: forward-mode differentiation is not supported")


def sums_dtype(rows: Tensor, weights: Tensor) -> torch.dtype:
    """The dtype that kernels sum in: float32, or float64 where rows or weights are float64."""
    return torch.promote_types(torch.promote_types(torch.float32, rows.dtype), weights.dtype)


def needs_grad(ctx: Any, num_inputs: int) -> tuple[bool, ...]:
    """Which of an operator's positional inputs need a gradient.

    Trailing arguments left at their defaults never reach autograd: for them the answer is no.
    """
    needs = ctx.needs_input_grad[_NUM_LEADING:]
    return (*needs, *[False] * (num_inputs - len(needs)))


def register_matmul_autocast(op: str, num_tensors: int) -> None:
    """Makes ``moe::<op>`` follow torch.matmul under autocast.

    The first ``num_tensors`` arguments and all keyword-only tensors, if floating and not float64,
    are cast to the autocast dtype. (torch's own register_autocast takes one fixed dtype and no
    keyword arguments.)
    """
    overload = getattr(torch.ops.moe, op).default

    def make_kernel(key: str) -> Kernel:
        excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def kernel(*args: Any, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(args[0].device.type)
            cast = [_autocast(tensor, dtype) for tensor in args[:num_tensors]]
            others = {
                name: _autocast(value, dtype) if isinstance(value, Tensor) else value
                for name, value in kwargs.items()
            }
            with torch._C._ExcludeDispatchKeyGuard(excluded):
                return overload(*cast, *args[num_tensors:], **others)

        return kernel

    for key in ("AutocastCPU", "AutocastPrivateUse1"):
        _LIBRARY.impl(op, make_kernel(key), key)


def _autocast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    eligible = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(dtype) if eligible else tensor

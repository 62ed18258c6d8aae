"""Forward-mode differentiation, refused."""

from typing import NoReturn

import torch
from torch._functorch.utils import enable_single_level_autograd_function

WITH_BACKWARD = {"attention": "torch.func.grad, vjp, jacrev", "attention_entmax": "torch.autograd.grad"}


def check_tangents(function: str, *tensors: torch.Tensor) -> None:
    """RuntimeError if one of the tensors has a tangent of forward-mode differentiation: the result would have
    none, and count as a constant. function: that was called."""
    find = super(torch.autograd.Function, _Refusal).apply  # without the part that is for `torch.func`
    if not torch._C._are_functorch_transforms_active():
        find(function, *tensors)
        return
    with enable_single_level_autograd_function():
        find(function, *tensors)


class _Refusal(torch.autograd.Function):
    """Autograd finds tangents where `torch.autograd.forward_ad.unpack_dual` can't: inside of an operator."""

    @staticmethod
    def forward(ctx, function, *tensors) -> None:
        ctx.function = function

    @staticmethod
    def jvp(ctx, *tangents):
        no_forward_derivative(ctx.function)


def no_forward_derivative(function: str) -> NoReturn:
    """Raise the error of forward-mode differentiation."""
    by = WITH_BACKWARD.get(function)
    has = "" if by is None else f"; it has a backward pass ({by})"
    raise RuntimeError(
        f"attnlib.{function} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, "
        f"torch.autograd.forward_ad){has}"
    )

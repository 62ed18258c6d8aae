"""Forward-mode differentiation, refused."""

from typing import NoReturn

import torch
from torch._functorch.utils import enable_single_level_autograd_function


def check_tangents(*tensors: torch.Tensor) -> None:
    """RuntimeError if one of the tensors has a tangent of forward-mode differentiation: the result would have
    none, and count as a constant."""
    find = super(torch.autograd.Function, _Refusal).apply  # without the part that is for `torch.func`
    if not torch._C._are_functorch_transforms_active():
        find(*tensors)
        return
    with enable_single_level_autograd_function():
        find(*tensors)


class _Refusal(torch.autograd.Function):
    """Autograd finds tangents where `torch.autograd.forward_ad.unpack_dual` can't: inside of an operator."""

    @staticmethod
    def forward(ctx, *tensors) -> None:
        pass

    @staticmethod
    def jvp(ctx, *tangents):
        no_forward_derivative()


def no_forward_derivative() -> NoReturn:
    """Raise the error of forward-mode differentiation."""
    raise RuntimeError(
        "attnlib.attention has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, "
        "torch.autograd.forward_ad); it has a backward pass (torch.func.grad, vjp, jacrev)"
    )

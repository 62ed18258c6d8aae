"""What functions without a gradient refuse: derivatives, compilers, torch.func."""

from typing import NoReturn

import torch
from torch.autograd import forward_ad

from attnlib.arguments.tangents import check_tangents
from attnlib.kernels.common.fp8 import Fp8


def refuse_onlookers(function: str) -> None:
    """NotImplementedError where somebody would look into the call: a compiler, a dispatch mode, torch.func."""
    if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        _refuse(function, "torch.compile, torch.export or a dispatch mode")
    if torch._C._are_functorch_transforms_active():
        _refuse(function, "torch.func")


def _refuse(function: str, what: str) -> NoReturn:
    raise NotImplementedError(
        f"{function} under {what}: not supported; call it outside, as in a function with "
        "torch.compiler.disable"
    )


def refuse_derivatives(function: str, **tensors: torch.Tensor | Fp8) -> None:
    """RuntimeError where a derivative would be lost, NotImplementedError for a tensor without data."""
    given = {name: x for name, x in tensors.items() if not isinstance(x, Fp8)}
    for name, tensor in given.items():
        if tensor.is_meta:
            _refuse(function, 'device "meta"')
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: expected a tensor that does not require grad, or torch.no_grad(), got one that "
                f"does: {function} has no gradient; attention has one"
            )
    if given and forward_ad._current_level >= 0:
        check_tangents(*given.values())

"""What functions without a gradient refuse: compilers, dispatch modes, transformations of torch.func, and
derivatives."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch.autograd import forward_ad

from attnlib.api.exact import plain
from attnlib.api.modes import symbolic
from attnlib.arguments.common import type_name
from attnlib.arguments.tangents import check_tangents


def refuse_transformations(function: str) -> None:
    """NotImplementedError under a compiler, a dispatch mode, torch.jit.trace or a transformation of
    torch.func."""
    if symbolic():
        _refuse(function, "torch.compile, torch.export or a dispatch mode")
    if torch.jit.is_tracing():
        _refuse(function, "torch.jit.trace", "")
    if torch._C._are_functorch_transforms_active():
        _refuse(function, "torch.func")


def refuse_derivatives(function: str, **tensors: torch.Tensor) -> None:
    """RuntimeError if a derivative is asked for; NotImplementedError for tensors without values; TypeError
    for those that stand for others."""
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise NotImplementedError(f"{name}: expected a tensor with values, got one on device meta")
        if not plain(tensor):
            raise TypeError(f"{name}: expected a plain tensor, got {type_name(tensor)}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: expected a tensor that does not require grad, or torch.no_grad(), got one that "
                f"does: {function} has no gradient; attention has one"
            )
    if tensors and forward_ad._current_level >= 0:
        check_tangents(function, *tensors.values())


def _refuse(
    function: str, what: str, how: str = ", as in a function with torch.compiler.disable"
) -> NoReturn:
    raise NotImplementedError(f"{function} under {what}: not supported; call it outside{how}")

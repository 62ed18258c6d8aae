"""Masks beside the transformations of `torch.func`.

While one of them is on, whatever PyTorch computes is a tensor of its own kind, without memory. A mask is
kept, and kernels read it, so what it holds has to be plain.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def outside_transforms(make: Callable) -> Callable:
    """The function, run as if no transformation were on. Its tensors have to be plain."""

    @wraps(make)
    def made(*args: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return make(*args)
        with temporarily_clear_interpreter_stack():
            return make(*args)

    return made


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor, of what a transformation has made. NotImplementedError for one that `torch.vmap`
    maps: there would be a mask for each."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            raise NotImplementedError("a block mask of what torch.vmap maps: not supported; make it outside")
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor

"""What a graph that is compiled calls between its parts. Import it where one is compiled: to decorate a
function imports torch's compiler, half a second, and Triton with it."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="attnlib keeps count on the host")
def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@torch.compiler.disable(reason="attnlib.BlockMask.from_torch makes one of it, outside of the graph")
def make_mask(make: Callable[..., Any], *args: Any) -> Any:
    return make(*args)

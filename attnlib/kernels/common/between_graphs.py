"""Functions at which a graph that is compiled breaks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)


def between_graphs(function: Function) -> Function:
    """A decorator as `torch.compiler.disable`, which would import torch's compiler at once."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if torch.compiler.is_dynamo_compiling():
            from attnlib.kernels.common import outside_graphs

            return outside_graphs.call(function, *args, **kwargs)
        return function(*args, **kwargs)

    return call

"""Calls that are differentiated on a CPU through `node.cpp`, as they are on a GPU."""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType

import pytest

from attnlib import node
from attnlib.kernels.common import direct


@cache
def built() -> ModuleType:
    """The module of `node.cpp`, compiled here."""
    return node.build()


@pytest.fixture(params=["Python", "C++"])
def backward_in(request, monkeypatch) -> str:
    """In which language PyTorch's engine finds the backward pass."""
    if request.param == "C++":
        built().forget()
        built().connect(direct.build().launch_all, node.slowly, node.stream_of)
        monkeypatch.setattr(node, "attend", partial(node.record, built()))
    return request.param

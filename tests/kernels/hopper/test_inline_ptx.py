"""The expansions of inline PTX that comments show are those that the compiler gets."""

from __future__ import annotations

import inspect
import re
import sys

import pytest

from attnlib.kernels.common import backward_ring, softmax


@pytest.mark.parametrize("function", [softmax._branch_asm, backward_ring._add_asm])
def test_the_expansion_in_the_comment(function) -> None:
    name, source = function.__name__, inspect.getsource(sys.modules[function.__module__])
    comment = re.search(rf"{name}\(4\)\..*?\n#\n((?:#     [^\n]*\n)+)", source, re.DOTALL)[1]
    shown = " ".join(comment.replace("#", " ").split())
    assert shown == " ".join(function(4).split())

"""Bugs planted in the source of the portable forward kernel, and a fixture that makes `attention` run it."""

from __future__ import annotations

import pytest
from families import forget_launches
from mutations import Mutation, load

from attnlib.kernels.portable import forward_kernel

__all__ = ["NOT_FINITE", "WRONG_LSE", "WRONG_VALUES", "Mutation", "use_source"]

WRONG_VALUES = r"max error .* \(budget .*\), RMS error"
NOT_FINITE = r"values are not finite"
WRONG_LSE = r"LSE: max error"


@pytest.fixture
def use_source(tmp_path, monkeypatch):
    """A function that makes attention() launch the kernel of the given source text."""

    def use(source: str) -> None:
        module = load(source, tmp_path)
        monkeypatch.setattr(forward_kernel, "attention_forward", module.attention_forward)
        forget_launches()  # of what was compiled from another source

    yield use
    forget_launches()

"""What a model collects from its layers, see `transformers.utils.output_capturing`."""

from __future__ import annotations

from typing import Any

import torch

_active: Any = None
"""What models of transformers collect, by context; None before `prepare`, or in a version without it."""


def prepare() -> None:
    """Once, when transformers is there: importing attnlib.hf does not load it."""
    global _active
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:  # another version of transformers
        return
    _active = _active_collector


def check_outputs() -> None:
    """ValueError while a model collects attention weights, which attnlib does not have. Many models do not
    tell their layers so, and their result would be empty."""
    if any(name.endswith("attentions") for name in _collected() or ()):
        raise ValueError(
            "output_attentions: expected None, attnlib does not support it, got True. Use "
            "attn_implementation='eager'"
        )


def _collected() -> dict[str, Any] | None:
    """By the name of a result; None outside of a model that collects."""
    if _active is None:
        return None
    if torch.compiler.is_dynamo_compiling():  # where it is no context variable
        return _active.global_var if _active.compiling else None
    return _active.get()

"""The cache that a mask is made for. transformers does not hand it to the function that makes the mask, but
packed sequences ask for it: a cache of a fixed size takes none, and one that holds some is not continued."""

from __future__ import annotations

import inspect
import threading
from functools import wraps
from typing import Any

import torch

from attnlib.hf.layout import require, values_known

_asked = threading.local()
_HOLDS_PACKED = "attnlib_holds_packed"
"""An attribute of caches, since copies of them hold the same: True. Where a compiled graph filled the cache
it is a bool tensor, whose value is known when the graph has run."""
_ONE_SEQUENCE = (
    "past_key_values: expected a cache of one sequence in each row, got one that was filled with packed "
    "sequences; attnlib can't know which of them its tokens go on with"
)
_ARGUMENTS = "config", "inputs_embeds", "attention_mask", "past_key_values"
"""The first ones of the function that `prepare` wraps."""


def prepare(mask: type, *names: str) -> None:
    """From now on `taken` knows the cache of models with an implementation of these names: the function of
    transformers that looks at its length, right before it asks for a mask, is wrapped. A version without this
    function, or with other arguments (5.0 to 5.3), leaves the cache unknown. The wrapped one also hands on
    what is a `mask` already, as it does a tensor of four dimensions: PaliGemma makes one for the model of its
    text, which asks once more."""
    from transformers import masking_utils

    look = getattr(masking_utils, "_preprocess_mask_arguments", None)
    if look is None or hasattr(look, "attnlib_wraps"):
        return
    if (*inspect.signature(look).parameters,)[: len(_ARGUMENTS)] != _ARGUMENTS:
        return

    @wraps(look)
    def noted(config, inputs_embeds, attention_mask, past_key_values, *args, **kwargs):
        if isinstance(attention_mask, mask):
            four = inputs_embeds.new_empty(1, 1, 1, 1)
            found = look(config, inputs_embeds, four, past_key_values, *args, **kwargs)
            return found[0], attention_mask, *found[2:]
        found = look(config, inputs_embeds, attention_mask, past_key_values, *args, **kwargs)
        asks = not found[0] and config._attn_implementation in names
        _asked.cache = past_key_values if asks else None
        return found

    noted.attnlib_wraps = look
    masking_utils._preprocess_mask_arguments = noted


def taken() -> Any:
    """The cache of the mask that is being asked for, once; None if there is none, or it is not known."""
    cache = getattr(_asked, "cache", None)
    _asked.cache = None
    return cache


def is_fixed(cache) -> bool:
    """Whether a layer of the cache has room for so many keys from the beginning."""
    from transformers.cache_utils import StaticLayer

    return any(isinstance(layer, StaticLayer) for layer in _layers(cache))


def _layers(cache) -> list:
    return getattr(getattr(cache, "self_attention_cache", cache), "layers", [])


def remember_packed(cache, holds: bool | torch.Tensor = True) -> None:
    """Packed sequences are in the cache from now on; if a graph is compiled, where `holds` says so. An
    exporter that runs the model would leave its own tensor in the cache."""
    exported = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    if cache is not None and not exported:
        setattr(cache, _HOLDS_PACKED, holds)


def check_last_queries(cache) -> None:
    """ValueError if the layers before those that compute the last queries alone took the rows apart, which is
    not known in a graph."""
    if torch.compiler.is_compiling() and cache is not None and not is_fixed(cache):
        raise ValueError(
            "logits_to_keep: expected 0 in a compiled graph for a model whose last layers share keys, beside "
            "a cache that grows and without an attention_mask, got another number: packed sequences are not "
            "known there"
        )
    check_continued(cache, None)


def check_continued(cache, q_offset: int | torch.Tensor | None) -> None:
    """ValueError for a cache with packed sequences, of which `q_offset` tokens were there before."""
    holds = getattr(cache, _HOLDS_PACKED, False)
    if holds is False:
        return
    if not isinstance(q_offset, int) or q_offset:
        if not isinstance(holds, torch.Tensor):
            raise ValueError(_ONE_SEQUENCE)
        require(~holds, _ONE_SEQUENCE)
        if not values_known(holds):
            return
    delattr(cache, _HOLDS_PACKED)  # it was emptied, or holds none

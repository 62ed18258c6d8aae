"""The masks that transformers asks for, read from its mask functions.

transformers describes a mask by a function of indices, (batch, head, query, key) -> bool, made of a few parts
that it joins. attnlib looks which parts there are. If they are a causal mask, a window, padding or packed
sequences, it never evaluates the function; any other function becomes a block mask."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import reduce
from typing import NamedTuple

import torch
from transformers import masking_utils

from attnlib.hf import caches, mask, static
from attnlib.hf.evaluated import Asked, evaluated
from attnlib.hf.forward import check_unknown
from attnlib.hf.layout import packed, values_known
from attnlib.hf.models import check_config, check_tensor, gets_tensor

__all__ = ["attention_mask"]  # which transformers calls
_CAUSAL = masking_utils.causal_mask_function
_FULL = masking_utils.bidirectional_mask_function


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function=_CAUSAL,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    config=None,
    batch_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    **others,
) -> mask.Mask | torch.Tensor:
    """What transformers calls once for each kind of mask in a forward pass of the model. A tensor, see
    `attnlib.hf.static`, for a cache of a fixed size; the one that "sdpa" has, bool (B, 1, Sq, Sk), for models
    that compute with it; and where `causal` and `window` of `attention`, padding and packed sequences do not
    say it, in a graph or for one query.

    ValueError if the model's class does not support "sdpa", or for a mask function that can't be evaluated.
    """
    cache = caches.taken()
    if isinstance(attention_mask, mask.Mask):  # made before the model was called
        return attention_mask
    check_unknown(others)
    if attention_mask is None:
        caches.check_continued(cache, q_offset)
    name = "" if config is None else type(config).__name__
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask: expected two or four dimensions, got shape {tuple(attention_mask.shape)}"
        )
    if attention_mask is not None and batch_size is not None and len(attention_mask) != batch_size:
        raise ValueError(
            f"attention_mask: expected a row for each of {batch_size} sequences, got shape "
            f"{tuple(attention_mask.shape)}"
        )
    if not torch.compiler.is_dynamo_compiling():
        check_config(type(config))
        found = _read(mask_function, kv_offset + kv_length)
        packed_alone = attention_mask is None and not use_vmap and q_length == kv_length
        if found is not None and found.sequences is not None:
            found = found if packed_alone and _is_numbered(found.sequences, q_length) else None
    else:
        plain = attention_mask is not None or allow_is_causal_skip or q_length != kv_length
        two_sided = allow_is_bidirectional_skip is not None
        known = None if use_vmap else _window(config, local_size)
        found = _deduced(mask_function, known, two_sided, None if plain else (batch_size, q_length, device))
        if found is None and plain and not use_vmap and local_size is not None:
            found = _in_one_chunk(mask_function, config, local_size, kv_offset + kv_length)

    def last(queries: int) -> torch.Tensor:
        return masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=queries, kv_length=kv_length,
            q_offset=q_offset + q_length - queries, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, use_vmap=use_vmap, device=device, allow_is_causal_skip=False,
        )  # fmt: skip

    if gets_tensor(config):
        tensor = last(q_length)
        check_tensor(tensor, config)
        return tensor
    ends = q_offset + q_length, kv_offset + kv_length
    two_sided = found is not None and found.right != 0 and found[:2] != (None, None)
    apart = isinstance(q_offset, torch.Tensor) or ends[0] != ends[1]  # attnlib's windows end with the keys
    if found is None or (found.remapped and found.sequences is None) or (two_sided and apart):
        graph = not values_known(torch.empty(0, device=device))
        if graph or (q_length == 1 and batch_size is not None):
            return last(q_length)
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        offset = 0 if isinstance(q_offset, torch.Tensor) else q_offset
        form = mask.Mask(q_length, kv_length, offset, config=name, cache=cache, last=last)
        asked = Asked(mask_function, padding, q_offset, kv_offset, batch_size, device)
        return replace(form, block_mask=evaluated(asked, form))
    causal, window = found.right == 0, None
    if found.left is not None or found.right:
        window = (-1 if found.left is None else found.left, -1 if found.right is None else found.right)
    # With one token for a cache that can be compiled, transformers does not allow to leave the mask out.
    compileable = q_length == 1 and found.right == 0 and not allow_is_causal_skip and batch_size is not None
    fixed = compileable or (causal and _is_fixed(q_length, kv_length, q_offset, kv_offset))
    kept = None
    if attention_mask is not None:
        kept = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        if fixed:  # it may end with the newest token
            kept = torch.nn.functional.pad(kept, (0, kv_length - kept.shape[1]))
        if kept.shape[1] != kv_length:
            got = tuple(attention_mask.shape)
            raise ValueError(
                f"attention_mask: expected {kv_length} tokens from {kv_offset} on, got shape {got}"
            )
    offset = 0 if isinstance(q_offset, torch.Tensor) else q_offset
    if fixed:
        plain = mask.Mask(q_length, kv_length, offset, causal, window, kept)
        return static.made(plain, q_offset + q_length - kv_offset, batch_size, device)
    layout = None if found.sequences is None else packed(found.sequences)
    rows = next((len(x) for x in (kept, found.sequences) if x is not None), None)
    named = {"config": name, "rows": rows, "cache": cache, "last": last}
    return mask.settled(mask.Mask(q_length, kv_length, offset, causal, window, kept, layout, **named))


def _is_fixed(q_length: int, kv_length: int, q_offset, kv_offset: int) -> bool:
    """Whether the cache has a fixed size: the last query is not at the last key, or that is unknown."""
    if isinstance(q_offset, torch.Tensor):
        return True
    if q_offset + q_length > kv_offset + kv_length:
        raise ValueError(
            f"past_key_values: expected a cache with keys for all queries, got {kv_length} keys from "
            f"{kv_offset} on for {q_length} queries from {q_offset} on. Use attn_implementation='sdpa'"
        )
    return q_offset + q_length < kv_offset + kv_length


# ---------------------------------------------------------------- parts of a mask function


class Rule(NamedTuple):
    """Query i attends to keys i - left .. i + right, None for no bound, of its sequence.

    sequences: (B, S), the number of each token's sequence; None: rows are not packed.
    remapped: whether positions are counted from the beginning of a sequence, which differ as indices do.
    """

    left: int | None = None
    right: int | None = None
    sequences: torch.Tensor | None = None
    remapped: bool = False


def _code(factory: str, *arguments):
    """The code of the functions that a factory of transformers makes; None where a version has no such."""
    made = getattr(masking_utils, factory, None)
    return None if made is None else made(*arguments).__code__


_ALL_OF = _code("and_masks", _CAUSAL)
_LEFT = _code("sliding_window_overlay", 1)
_TWO_SIDED = _code("sliding_window_bidirectional_overlay", 1)
_CHUNKED = _code("chunked_overlay", 1, None)
_PACKED = _code("packed_sequence_mask_function", None)
_REMAPPED = _code("remap_positions_for_packed_sequence", _CAUSAL, None)


def _read(function, length: float) -> Rule | None:
    """The rule of a mask function for positions below `length`; None if it has a part that is not known."""
    if function is _CAUSAL:
        return Rule(right=0)
    if function is _FULL:
        return Rule()
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    if code is _ALL_OF:
        return reduce(_both, (_read(part, length) for part in _captured(function, "mask_functions")))
    if code is _LEFT:
        size = _captured(function, "sliding_window")
        return Rule(left=size - 1) if size > 0 else None
    if code is _TWO_SIDED:
        size = _captured(function, "sliding_window")
        return Rule(left=size, right=size)
    if code is _CHUNKED and length <= _captured(function, "chunk_size"):  # one chunk
        return Rule()
    if code is _PACKED:
        return Rule(sequences=_captured(function, "packed_sequence_mask"))
    if code is _REMAPPED:
        positions = _captured(function, "position_ids")
        length = int(positions.max()) + 1 if values_known(positions) else math.inf
        inner = _read(_captured(function, "mask_function"), length)
        return None if inner is None else inner._replace(remapped=True)
    return None


def _captured(function, name: str):
    """A variable that a function took along from where it was made."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _is_numbered(sequences: torch.Tensor, length: int) -> bool:
    """Whether they are the numbers of `layout.packed`, as those that transformers finds from positions are; a
    caller's own may be any."""
    if not values_known(sequences):
        return True
    steps = sequences.diff(dim=1, prepend=torch.zeros_like(sequences[:, :1]))
    return sequences.shape[1] == length and bool(((steps == 0) | (steps == 1)).all())


def _both(a: Rule | None, b: Rule | None) -> Rule | None:
    if a is None or b is None or (a.sequences is not None and b.sequences is not None):
        return None
    left, right = (
        min((x for x in bounds if x is not None), default=None) for bounds in zip(a[:2], b[:2], strict=True)
    )
    return Rule(left, right, b.sequences if a.sequences is None else a.sequences, a.remapped or b.remapped)


# ---------------------------------------------------------------- under torch.compile

# Dynamo can't read what a function took along. But a function that joins parts, and comes from none of the
# caller's (`use_vmap`), is one of transformers' own few, and the other arguments tell which.


def _window(config, local_size: int | None) -> int | None:
    """How many tokens transformers' window is long; 0 if there is none; None if it may be a chunk."""
    if local_size is None:
        return 0
    if getattr(config, "sliding_window", None) != local_size:
        return None
    return None if getattr(config, "attention_chunk_size", None) == local_size else local_size


def _in_one_chunk(function, config, local_size: int, length: int) -> Rule | None:
    """Causal, if the window is a chunk that all tokens are in."""
    chunked = local_size == getattr(config, "attention_chunk_size", None)
    windowed = local_size == getattr(config, "sliding_window", None)
    known = function.__code__ is _ALL_OF and chunked and not windowed
    return Rule(right=0) if known and length <= local_size else None


def _deduced(function, window: int | None, two_sided: bool, rows: tuple | None) -> Rule | None:
    """The rule of a mask function.

    window: 0 for none, None for not known. rows: (B, S, device) if the rows may be packed."""
    if function is _CAUSAL:
        return Rule(right=0)
    if function is _FULL:
        return Rule()
    if window is None or function.__code__ is not _ALL_OF:
        return None
    if two_sided:
        return Rule(left=window, right=window) if window else None
    left = window - 1 if window else None
    if rows is None:
        return Rule(left, 0) if window else None
    batch, length, device = rows
    row = torch.arange(batch, device=device)[:, None]
    token = torch.arange(length, device=device)[None]
    # A token sees the one before it unless a sequence begins.
    begins = ~function(row, torch.zeros_like(row), token, (token - 1).clamp(min=0))
    return Rule(left, 0, (begins & (token > 0)).cumsum(1))

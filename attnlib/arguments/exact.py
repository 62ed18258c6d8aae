"""The arguments of `attention` and `attention_varlen`, checked."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from attnlib.arguments.common import (
    check_bool,
    check_common,
    check_groups,
    check_head_dim,
    check_impl,
    check_tensors,
    refuse_trace,
    type_name,
)
from attnlib.arguments.masks import check_block_mask
from attnlib.arguments.offsets import check_varlen_form
from attnlib.arguments.scores import check_functions, check_score
from attnlib.params import Varlen


class Options(NamedTuple):
    """The options of `attention` and `attention_varlen`, as they were given."""

    causal: Any = False
    window: Any = None
    sm_scale: Any = None
    return_lse: Any = False
    deterministic: Any = False
    impl: Any = None
    block_mask: Any = None
    score: Any = None


def check(q, k, v, options: Options, symbols: bool = False, own_values: bool = False) -> None:
    """Arguments of `attention`. TypeError or ValueError if one is wrong. symbols: sizes may be no numbers.
    own_values: v may have a head dimension of its own."""
    check_tensors(q, k, v, "4 dimensions (B, H, S, D)", 4)
    (_check_shapes if symbols else _check_shapes_once)(q.shape, k.shape, v.shape, own_values)
    _check_options(options, symbols)
    if own_values and v.shape[3] != q.shape[3]:
        _check_own_values(q.shape[3], v.shape[3], options)
    if options.block_mask is not None:
        check_block_mask(options.block_mask, q, k)
    if options.score is not None:
        check_score(options.score, q, k)
        wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        check_functions(options.score, wanted, options.impl)


def check_varlen(q, k, v, varlen: Varlen, options: Options, symbols: bool = False) -> None:
    """Arguments of `attention_varlen`, except for the values in `cu_seqlens_*`: see `check_offsets`."""
    check_tensors(q, k, v, "3 dimensions (T, H, D)", 3)
    (_check_shapes if symbols else _check_shapes_once)(q.shape, k.shape, v.shape, True)
    check_varlen_form(varlen, q.device, symbols)
    _check_options(options, symbols)


def _check_own_values(own: int, values: int, options: Options) -> None:
    """Refuse options that need values with the head dimension of q and k."""
    for name in ("block_mask", "score"):
        given = getattr(options, name)
        if given is not None:
            raise ValueError(
                f"{name}: expected None beside values of head dimension {values}, where q has {own}, got "
                f"{type_name(given)}"
            )


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size, own_values: bool) -> None:
    """(B, H, S, D) each, or (T, H, D)."""
    *batch, heads, _, head_dim = q if len(q) == 4 else (q[1], q[0], q[2])
    refuse_trace("attention", head_dim)
    kv_heads = k[1]
    for name, shape in (("k", k), ("v", v)):
        if batch and shape[0] != batch[0]:
            raise ValueError(f"{name}: expected batch size {batch[0]} as q has, got {shape[0]}")
        if shape[-1] != head_dim and not (own_values and name == "v"):
            raise ValueError(f"{name}: expected head dimension {head_dim} as q has, got {shape[-1]}")
    if v[:-1] != k[:-1]:
        but = " but for its head dimension" if v[-1] != head_dim else ""
        raise ValueError(f"v: expected shape {(*k[:-1], v[-1])} as k has{but}, got {tuple(v)}")
    for name, columns in (("q", head_dim), ("v", v[-1])):
        check_head_dim(name, columns)
    check_groups("k", heads, kv_heads)


_check_shapes_once = lru_cache(1024)(_check_shapes)  # lengths may change from call to call without an end


def _check_options(options: Options, symbols: bool) -> None:
    causal, window, sm_scale, return_lse, deterministic, impl, _, _ = options
    check_common(causal, window, sm_scale, return_lse, symbols)
    check_bool("deterministic", deterministic)
    check_impl(impl, ("decode", "hopper", "triton", "reference"))

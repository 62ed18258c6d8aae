"""The arguments of `attnlib.seer`, checked."""

from __future__ import annotations

import torch

from attnlib.arguments.common import check_int, check_int32, type_name
from attnlib.arguments.masks import check_chosen_size, check_density


def check_gate(heads, kv_heads, head_dim, block, width) -> None:
    """What a `SeerGate` is made of."""
    for name, value in (("heads", heads), ("kv_heads", kv_heads), ("head_dim", head_dim), ("width", width)):
        check_int(name, value, 1)
    if heads % kv_heads:
        raise ValueError(f"kv_heads: expected a divisor of heads, {heads}, got {kv_heads}")
    if width % 2:
        raise ValueError(f"width: expected an even number, for rotary embeddings, got {width}")
    check_chosen_size(block, "block")


def check_gate_call(gate, q, k) -> None:
    """q and k that a gate is called with."""
    for name, x, heads in (("q", q, gate.heads), ("k", k, gate.kv_heads)):
        _check_floating(name, x)
        if x.dim() != 4 or x.shape[1] != heads or x.shape[3] != gate.head_dim or not x.numel():
            raise ValueError(
                f"{name}: expected shape (B, {heads}, S, {gate.head_dim}) as the gate has, got "
                f"{tuple(x.shape)}"
            )
        if x.device != gate.q_map.device:
            raise ValueError(f"{name}: expected device {gate.q_map.device} as the gate has, got {x.device}")
    if (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"k: expected batch size {q.shape[0]} and {q.shape[2]} tokens as q has, got {k.shape[0]} and "
            f"{k.shape[2]}"
        )


def _check_floating(name: str, x) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type_name(x)}")
    if not x.is_floating_point():
        raise TypeError(f"{name}: expected a floating-point dtype, got {x.dtype}")


def check_loss(scores, pooled, skip) -> None:
    _check_floating("scores", scores)
    if scores.dim() != 4 or not scores.numel():
        raise ValueError(f"scores: expected shape (B, H, n, n) as a gate gives it, got {tuple(scores.shape)}")
    _check_floating("pooled", pooled)
    if pooled.shape != scores.shape:
        raise ValueError(
            f"pooled: expected shape {tuple(scores.shape)} as scores has, got {tuple(pooled.shape)}"
        )
    if pooled.device != scores.device:
        raise ValueError(f"pooled: expected device {scores.device} as scores has, got {pooled.device}")
    if isinstance(skip, bool) or not isinstance(skip, int | float):
        raise TypeError(f"skip: expected a number, got {type_name(skip)}")
    if not 0 <= skip < 1:
        raise ValueError(f"skip: expected a number from 0 up to but not 1, got {skip}")


def check_top(scores, count) -> None:
    _check_floating("scores", scores)
    if scores.dim() < 2 or scores.shape[-1] != scores.shape[-2] or not scores.shape[-1]:
        raise ValueError(f"scores: expected shape (..., n, n) with n from 1 on, got {tuple(scores.shape)}")
    check_int("count", count, 1)


def check_above(scores, threshold) -> None:
    _check_floating("scores", scores)
    if not scores.dim():
        raise ValueError("scores: expected shape (..., n), got ()")
    if isinstance(threshold, bool) or not isinstance(threshold, int | float):
        raise TypeError(f"threshold: expected a number, got {type_name(threshold)}")


def check_top_of_density(blocks, density) -> None:
    check_int("blocks", blocks, 1)
    check_density(density)


def check_decode_chosen(q, k_cache, v_cache, scores, count, lengths) -> None:
    """The arguments of `decode_chosen` that `attention_decode` does not check."""
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type_name(x)}")
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions (B, H, S, D), got shape {tuple(x.shape)}")
    _check_floating("scores", scores)
    check_int("count", count, 1)
    B, heads, S, D = k_cache.shape
    if q.shape[0] != B or q.shape[2] != 1 or q.shape[3] != D:
        raise ValueError(f"q: expected shape ({B}, H, 1, {D}) for {B} caches, got {tuple(q.shape)}")
    if not heads or q.shape[1] % heads:
        raise ValueError(f"k_cache: expected a number of heads that divides q's {q.shape[1]}, got {heads}")
    if v_cache.shape != k_cache.shape:
        raise ValueError(
            f"v_cache: expected shape {tuple(k_cache.shape)} as k_cache has, got {tuple(v_cache.shape)}"
        )
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(x.stride())}")
    if (
        scores.dim() != 3
        or tuple(scores.shape[:2]) != (B, heads)
        or not scores.numel()
        or S % scores.shape[2]
    ):
        raise ValueError(
            f"scores: expected shape ({B}, {heads}, n), where n divides {S}, got {tuple(scores.shape)}"
        )
    block = S // scores.shape[2]
    if block < 16 or block & (block - 1):
        raise ValueError(
            f"scores: expected blocks of 16, 32, 64 ... of the {S} keys, got {scores.shape[2]} of {block}"
        )
    if lengths is not None:
        check_int32("lengths", lengths, "a torch.Tensor or None")
        if tuple(lengths.shape) != (B,):
            raise ValueError(f"lengths: expected shape ({B},), got {tuple(lengths.shape)}")
    for name, x in (("scores", scores), ("lengths", lengths)):
        if x is not None and x.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} as q has, got {x.device}")

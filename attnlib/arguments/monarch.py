"""The arguments of `attention_monarch` and `monarch_matrix`, checked."""

from typing import Any, NamedTuple

import torch

from attnlib.arguments.common import (
    check_choice,
    check_dense,
    check_groups,
    check_head_dim,
    check_impl,
    check_int,
    check_scale,
    check_tensors,
    type_name,
)

PADS = "post", "pre"
IMPLEMENTATIONS = "triton", "reference"


class MonarchOptions(NamedTuple):
    """The options of `attention_monarch`, as they were given."""

    block: Any = None
    steps: Any = 1
    pad: Any = "post"
    key_mask: Any = None
    sm_scale: Any = None
    impl: Any = None


def check_monarch(q, k, v, options: MonarchOptions) -> None:
    """Arguments of `attention_monarch`; of `monarch_matrix` with k as v. TypeError or ValueError if one is
    wrong."""
    check_tensors(q, k, v, "4 dimensions (B, H, N, D)", 4)
    (batch, heads, tokens, head_dim), (first, kv_heads, keys, width) = q.shape, k.shape
    check_head_dim("q", head_dim)
    if first != batch:
        raise ValueError(f"k: expected batch size {batch} as q has, got {first}")
    if keys != tokens:
        raise ValueError(f"k: expected {tokens} tokens as q has, which are its queries too, got {keys}")
    if width != head_dim:
        raise ValueError(f"k: expected head dimension {head_dim} as q has, got {width}")
    check_groups("k", heads, kv_heads)
    if v.shape != k.shape:
        raise ValueError(f"v: expected shape {tuple(k.shape)} as k has, got {tuple(v.shape)}")
    block, steps, pad, key_mask, sm_scale, impl = options
    if block is not None:
        check_int("block", block, 1, expected="a number of tokens from 1 on, or None")
    check_int("steps", steps, 1, expected="a number of rounds from 1 on")
    check_choice("pad", pad, PADS)
    if key_mask is not None:
        _check_mask(key_mask, q)
    if sm_scale is not None:
        check_scale(sm_scale, False)
    check_impl(impl, IMPLEMENTATIONS)


def _check_mask(mask, q: torch.Tensor) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"key_mask: expected a torch.Tensor or None, got {type_name(mask)}")
    if mask.dtype != torch.bool:
        raise TypeError(f"key_mask: expected dtype bool, got {mask.dtype}")
    check_dense("key_mask", mask)
    if tuple(mask.shape) != (q.shape[0], q.shape[2]):
        wanted = q.shape[0], q.shape[2]
        raise ValueError(f"key_mask: expected shape (B, N) = {wanted} as q has, got {tuple(mask.shape)}")
    if mask.device != q.device:
        raise ValueError(f"key_mask: expected device {q.device} as q has, got {mask.device}")

"""The arguments of `attention_distr`, checked."""

from typing import Any, NamedTuple

import torch

from attnlib.arguments.common import (
    check_bool,
    check_choice,
    check_groups,
    check_head_dim,
    check_impl,
    check_int,
    check_scale,
    check_tensors,
    type_name,
)

MAX_HEAD_DIM = 128
MAX_GROUP = 16
ROWS = 128
"""Of which `rows` is a multiple: tiles of the kernels."""
MAX_SEED = 2**31 - 1
HASHED = "q", "k"
IMPLEMENTATIONS = "hopper", "triton", "reference"


class DistrOptions(NamedTuple):
    """The options of `attention_distr`, as they were given."""

    group: Any
    causal: Any = False
    seed: Any = 0
    sm_scale: Any = None
    hashed: Any = "k"
    rows: Any = None
    impl: Any = None


def check_distr(q, k, v, options: DistrOptions) -> None:
    """TypeError or ValueError if an argument is wrong."""
    group, causal, seed, sm_scale, hashed, rows, impl = options
    check_tensors(q, k, v, "4 dimensions (B, H, S, D)", 4)
    _check_shapes(q.shape, k.shape, v.shape)
    check_int("group", group, 1, MAX_GROUP)
    if q.shape[-1] % group:
        raise ValueError(
            f"group: expected a number that divides the head dimension {q.shape[-1]}, got {group}"
        )
    check_bool("causal", causal)
    check_int("seed", seed, 0, MAX_SEED)
    if sm_scale is not None:
        check_scale(sm_scale, False)
    check_choice("hashed", hashed, HASHED)
    if rows is not None:
        if isinstance(rows, bool) or not isinstance(rows, int):
            raise TypeError(f"rows: expected None or a multiple of {ROWS}, got {type_name(rows)}")
        if rows < ROWS or rows % ROWS:
            raise ValueError(f"rows: expected None or a multiple of {ROWS}, got {rows}")
        if hashed == "k":
            raise ValueError(f"rows: expected None where keys are hashed (hashed='k'), got {rows}")
    check_impl(impl, IMPLEMENTATIONS)


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    check_head_dim("q", q[3], MAX_HEAD_DIM)
    for name, shape in (("k", k), ("v", v)):
        if shape[0] != q[0]:
            raise ValueError(f"{name}: expected batch size {q[0]} as q has, got {shape[0]}")
        if shape[3] != q[3]:
            raise ValueError(f"{name}: expected head dimension {q[3]} as q has, got {shape[3]}")
    if v != k:
        raise ValueError(f"v: expected shape {tuple(k)} as k has, got {tuple(v)}")
    check_groups("k", q[1], k[1])

"""The arguments of `attention_bsfa` and `bsfa_threshold`, checked."""

import math
from typing import Any, NamedTuple

import torch

from attnlib.arguments.common import certain, check_bool, check_common, check_dense, check_impl, type_name
from attnlib.arguments.exact import Options
from attnlib.arguments.exact import check as check_exact

HEAD_DIMS = 64, 128
IMPLEMENTATIONS = "hopper", "triton", "reference"
MOST = torch.finfo(torch.float32).max
"""Of a finite threshold: kernels have it in float32."""
_NO_OPTIONS = Options()
_THRESHOLD = "expected a number, or a float32 tensor (H), (H, N) or (B, H, N)"
_KEPT = "expected a number of blocks, an int from 0 on, or a share of them, a float from 0 to 1"


class BsfaOptions(NamedTuple):
    """The options of `attention_bsfa`, as they were given."""

    threshold: Any
    causal: Any = True
    sm_scale: Any = None
    return_lse: Any = False
    return_kept: Any = False
    impl: Any = None


def check_bsfa(q, k, v, options: BsfaOptions, symbols: bool = False) -> None:
    """TypeError or ValueError if an argument is wrong. symbols: sizes may be no numbers."""
    threshold, causal, sm_scale, return_lse, return_kept, impl = options
    check_tensors_of_bsfa(q, k, v, symbols)
    check_common(causal, None, sm_scale, return_lse, symbols)
    check_bool("return_kept", return_kept)
    check_impl(impl, IMPLEMENTATIONS)
    _check_threshold(threshold, q, symbols)


def check_bsfa_threshold(q, k, kept, causal, sm_scale) -> None:
    """The same of `bsfa_threshold`."""
    check_tensors_of_bsfa(q, k, k, False)
    check_common(causal, None, sm_scale, False, False)
    if isinstance(kept, bool) or not isinstance(kept, int | float):
        raise TypeError(f"kept: {_KEPT}, got {type_name(kept)}")
    if not kept >= 0 or (isinstance(kept, float) and kept > 1):
        raise ValueError(f"kept: {_KEPT}, got {kept}")


def check_finite(**tensors: torch.Tensor) -> None:
    """Of the examples of a batch."""
    for name, x in tensors.items():
        wrong = (~x.isfinite()).flatten(1).any(1).nonzero()
        if len(wrong):
            example = int(wrong[0])
            raise ValueError(f"{name}: expected finite elements, got NaN or infinity in example {example}")


def check_tensors_of_bsfa(q, k, v, symbols: bool) -> None:
    """The checks of all functions, and then those of BSFA alone."""
    if isinstance(q, torch.Tensor) and not q.is_nested:
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(f"q: expected dtype float16 or bfloat16, got {q.dtype}")
        if q.dim() == 4 and q.shape[-1] not in HEAD_DIMS:
            raise ValueError(f"q: expected a head dimension of 64 or 128, got {q.shape[-1]}")
    check_exact(q, k, v, _NO_OPTIONS, symbols)


def _check_threshold(threshold, q: torch.Tensor, symbols: bool) -> None:
    if not isinstance(threshold, torch.Tensor):
        if isinstance(threshold, bool) or not isinstance(threshold, int | float | torch.SymFloat):
            raise TypeError(f"threshold: {_THRESHOLD}, got {type_name(threshold)}")
        right = threshold == threshold
        if not (certain(right) if symbols else right):
            raise ValueError(f"threshold: {_THRESHOLD}, got nan")
        if not symbols and MOST < abs(threshold) < math.inf:
            most = f"a magnitude of at most {MOST:.3g}, or infinity"
            raise ValueError(f"threshold: expected {most}, got {threshold!r:.40}")
        return
    if threshold.dtype != torch.float32:
        raise TypeError(f"threshold: expected dtype float32, got {threshold.dtype}")
    check_dense("threshold", threshold)
    B, H = q.shape[:2]
    sizes = threshold.shape
    heads = sizes[1] if len(sizes) == 3 else sizes[0] if len(sizes) else None
    wrong = len(sizes) not in (1, 2, 3) or heads != H or (len(sizes) == 3 and sizes[0] != B)
    if wrong or (len(sizes) > 1 and sizes[-1] < 1):
        found = tuple(sizes)
        raise ValueError(f"threshold: {_THRESHOLD} with B = {B}, H = {H} and N from 1 on, got shape {found}")
    if threshold.device != q.device:
        raise ValueError(f"threshold: expected device {q.device} as q has, got {threshold.device}")

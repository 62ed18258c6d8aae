"""The arguments of `attention_entmax`, checked."""

from typing import Any, NamedTuple

import torch

from attnlib.arguments.common import certain, check_bool, check_common, check_impl, type_name
from attnlib.arguments.exact import Options, check_varlen
from attnlib.arguments.exact import check as check_exact
from attnlib.params import Varlen

LEAST_ALPHA = 1 + 2.0**-10
"""Below it p = 1 / (alpha - 1) magnifies the rounding of scores to more than 2^-13 of a weight."""
_ALPHA = "expected a number from 1 + 2^-10 to 2 (softmax, alpha = 1, is attention)"
_NO_OPTIONS = Options()


class EntmaxOptions(NamedTuple):
    """The options of `attention_entmax`, as they were given."""

    alpha: Any = 1.5
    causal: Any = False
    sm_scale: Any = None
    return_tau: Any = False
    impl: Any = None


def check_entmax(
    q, k, v, options: EntmaxOptions, symbols: bool = False, varlen: Varlen | None = None
) -> None:
    """TypeError or ValueError if an argument is wrong, but for the values in `cu_seqlens_*`. symbols: sizes
    may be no numbers."""
    alpha, causal, sm_scale, return_tau, impl = options
    if varlen is None:
        check_exact(q, k, v, _NO_OPTIONS, symbols)
    else:
        check_varlen(q, k, v, varlen, _NO_OPTIONS, symbols)
        if v.shape[-1] != q.shape[-1]:
            raise ValueError(f"v: expected head dimension {q.shape[-1]} as q has, got {v.shape[-1]}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float | torch.SymFloat):
        raise TypeError(f"alpha: {_ALPHA}, got {type_name(alpha)}")
    right = LEAST_ALPHA <= alpha
    right = right & (alpha <= 2) if symbols else right and alpha <= 2
    if not (certain(right) if symbols else right):
        raise ValueError(f"alpha: {_ALPHA}, got {alpha}")
    check_common(causal, None, sm_scale, False, symbols)
    check_bool("return_tau", return_tau)
    check_impl(impl, ("triton", "reference"))

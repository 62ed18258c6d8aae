"""The arguments of `attnlib.distributed`, checked, as far as one rank can."""

import torch

from attnlib.arguments.common import check_common, type_name
from attnlib.arguments.exact import Options, check

METHODS = "ring", "all_gather", "ulysses", "auto"
_METHODS = "expected 'ring', 'all_gather', 'ulysses' or 'auto'"


def check_distributed(q, k, v, options: Options, divisor: int) -> None:
    """Tensors and options of one rank. divisor: what its number of rows has to be a multiple of."""
    check(q, k, v, options)
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: expected {q.shape[2]} rows as q has on this rank, got {k.shape[2]}")
    if q.shape[2] % divisor:
        raise ValueError(
            f"q: expected a multiple of {divisor} rows on each rank, for a part of either half of the "
            f"sequence, got {q.shape[2]}"
        )


def check_method(method, q_heads: int, kv_heads: int, ranks: int) -> None:
    """method; `ranks` among which "ulysses" shares out the heads."""
    if not isinstance(method, str):
        raise TypeError(f"method: {_METHODS}, got {type_name(method)}")
    if method not in METHODS:
        raise ValueError(f"method: {_METHODS}, got {method!r}")
    check_heads(q_heads, kv_heads, ranks if method == "ulysses" else 1)


def check_heads(q_heads: int, kv_heads: int, ranks: int) -> None:
    """Heads that are shared out among ranks."""
    for name, heads in (("q", q_heads), ("k", kv_heads)):
        if heads % ranks:
            raise ValueError(
                f"{name}: expected a multiple of {ranks} heads, which the ranks share, got {heads}"
            )


def check_timeout(timeout) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout: expected a number of seconds, got {type_name(timeout)}")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout: expected seconds above 0, got {timeout}")


def check_mask(causal, window) -> None:
    check_common(causal, window, None, False, False)


def check_whole(x, dim, divisor: int) -> None:
    """The whole sequence, of which a rank takes its part."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type_name(x)}")
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim: expected an int, got {type_name(dim)}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: expected a dimension of x with shape {tuple(x.shape)}, got {dim}")
    if x.shape[dim] % divisor:
        raise ValueError(
            f"x: expected a multiple of {divisor} positions in dimension {dim}, got {x.shape[dim]}; pad the "
            "sequence"
        )

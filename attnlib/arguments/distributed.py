"""The arguments of `attnlib.distributed`, checked, as far as one rank can."""

import torch
from torch.distributed.tensor import DTensor

from attnlib.arguments.common import check_choice, check_common, check_dense, check_int, type_name
from attnlib.arguments.exact import Options, check, check_varlen
from attnlib.params import Varlen

METHODS = "ring", "all_gather", "ulysses", "auto"
VARLEN_METHODS = "ulysses", "all_gather", "auto"
TIMEOUT, LONGEST_TIMEOUT = 120.0, 1e9
"""Seconds: what is usual, and some thirty years."""


def check_distributed(q, k, v, options: Options, divisor: int) -> None:
    """Tensors and options of one rank. divisor: what its number of rows has to be a multiple of."""
    check_memory(q=q, k=k, v=v)
    check(q, k, v, options)
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: expected {q.shape[2]} rows as q has on this rank, got {k.shape[2]}")
    _check_halves("q", q.shape[2], divisor)


def check_rows(rows, divisor: int) -> None:
    """The number of rows of a rank."""
    check_int("rows", rows, 0)
    _check_halves("rows", rows, divisor)


def _check_halves(name: str, rows: int, divisor: int) -> None:
    if rows % divisor:
        raise ValueError(
            f"{name}: expected a multiple of {divisor} rows on each rank, for a part of either half of the "
            f"sequence, got {rows}"
        )


def check_distributed_varlen(q, k, v, varlen: Varlen, options: Options) -> None:
    """Tensors and options of one rank, except for the values in `cu_seqlens`."""
    check_memory(q=q, k=k, v=v)
    check_local(cu_seqlens=varlen.cu_seqlens_q)
    check_varlen(q, k, v, varlen, options)
    if len(k) != len(q):
        raise ValueError(f"k: expected {len(q)} tokens as q has on this rank, got {len(k)}")


def check_varlen_method(method, q_heads: int, kv_heads: int, ranks: int) -> None:
    """method of `attention_varlen`; `ranks` among which "ulysses" shares out the heads."""
    check_choice("method", method, VARLEN_METHODS)
    check_heads(
        q_heads, kv_heads, ranks if method == "ulysses" else 1, "; method='all_gather' takes any number"
    )


def check_method(method, q_heads: int, kv_heads: int, ranks: int) -> None:
    """method; `ranks` among which "ulysses" shares out the heads."""
    check_choice("method", method, METHODS)
    check_heads(q_heads, kv_heads, ranks if method == "ulysses" else 1)


def check_in_order(in_order, shares: int) -> None:
    """in_order: None or a bool; `shares` ranks of the second dimension of a mesh."""
    if in_order is not None and not isinstance(in_order, bool):
        raise TypeError(f"in_order: expected a bool or None, got {type_name(in_order)}")
    if in_order and shares > 1:
        raise ValueError("in_order: expected False or None with a mesh of 2 dimensions, got True")


def check_heads(q_heads: int, kv_heads: int, ranks: int, advice: str = "") -> None:
    """Heads that are shared out among ranks. advice: what else can be done."""
    for name, heads in (("q", q_heads), ("k", kv_heads)):
        if heads % ranks:
            raise ValueError(
                f"{name}: expected a multiple of {ranks} heads, which the ranks share, got {heads}{advice}"
            )


def check_memory(**tensors) -> None:
    """Tensors of one rank, by name, that can be sent."""
    for name, x in tensors.items():
        if isinstance(x, torch.Tensor) and x.is_meta:
            raise ValueError(f"{name}: expected a tensor with memory, got one on device meta")


def check_local(**tensors) -> None:
    """Tensors of one rank, by name, where DTensors have no meaning."""
    check_memory(**tensors)
    for name, x in tensors.items():
        if isinstance(x, DTensor):
            raise TypeError(
                f"{name}: expected a torch.Tensor of this rank, got a DTensor; x.to_local() has its part"
            )


def check_row_parallel(q, k, v, weight, options: Options) -> None:
    """Tensors and options of one rank of `row_parallel_output`."""
    check_memory(q=q, k=k, v=v, weight=weight)
    check(q, k, v, options)
    if not q.shape[2]:
        raise ValueError("q: expected at least 1 row, got 0")
    if k.shape[2] < q.shape[2]:
        raise ValueError(f"k: expected at least the {q.shape[2]} rows that q has, got {k.shape[2]}")
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight: expected a torch.Tensor, got {type_name(weight)}")
    check_dense("weight", weight)
    if weight.dtype != q.dtype:
        raise TypeError(f"weight: expected dtype {q.dtype} as q has, got {weight.dtype}")
    if weight.device != q.device:
        raise ValueError(f"weight: expected device {q.device} as q has, got {weight.device}")
    columns = q.shape[1] * q.shape[3]
    if weight.dim() != 2 or weight.shape[1] != columns:
        raise ValueError(
            f"weight: expected (outputs, {columns}), a column for each head and dimension of q, got shape "
            f"{tuple(weight.shape)}"
        )


def check_chunks(chunks, rows: int) -> None:
    """chunks: None, a number of chunks, or the rows of each."""
    if chunks is None:
        return
    if isinstance(chunks, bool) or not isinstance(chunks, int | list | tuple):
        raise TypeError(f"chunks: expected an int, a list of ints or None, got {type_name(chunks)}")
    if isinstance(chunks, int):
        if not 1 <= chunks <= max(1, rows):
            raise ValueError(f"chunks: expected 1 to {max(1, rows)}, the rows of q, got {chunks}")
        return
    for size in chunks:
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"chunks: expected ints, got {type_name(size)}")
    if min(chunks, default=1) < 1 or sum(chunks) != rows:
        raise ValueError(f"chunks: expected sizes from 1 on that add up to q's {rows} rows, got {chunks}")


def usable_timeout(timeout) -> tuple[float, Exception | None]:
    """(seconds to wait, what is wrong with `timeout`): the other ranks hear of a mistake in it, too."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        return TIMEOUT, TypeError(f"timeout: expected a number of seconds, got {type_name(timeout)}")
    if not 0 < timeout <= LONGEST_TIMEOUT:
        return TIMEOUT, ValueError(
            f"timeout: expected seconds above 0, at most {LONGEST_TIMEOUT:g}, got {timeout}"
        )
    return timeout, None


def check_mask(causal, window) -> None:
    check_common(causal, window, None, False, False)


def check_whole(x, dim, divisor: int, advice: str = "; pad the sequence") -> None:
    """The whole sequence, of which a rank takes its part; or, without the advice, a part."""
    check_local(x=x)
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a torch.Tensor of this rank, got {type_name(x)}")
    check_dense("x", x)
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim: expected an int, got {type_name(dim)}")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: expected a dimension of x with shape {tuple(x.shape)}, got {dim}")
    if x.shape[dim] % divisor:
        raise ValueError(
            f"x: expected a multiple of {divisor} positions in dimension {dim}, got {x.shape[dim]}{advice}"
        )

"""`cu_seqlens_*`, checked: their form, and their values without reading the same tensor twice."""

import weakref
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from attnlib.arguments.common import certain, check_int32, type_name
from attnlib.params import Varlen


class Found(NamedTuple):
    """What offsets hold: tokens of the longest sequence, a number that tells their values from others, in
    every process, and the values."""

    longest: int
    fingerprint: int
    values: tuple[int, ...]


def check_offsets(q, k, varlen: Varlen) -> None:
    """The values in `cu_seqlens_*`: from 0, never down, to the number of tokens, in steps of at most
    `max_seqlen_*`. ValueError if not.

    Reading them from a GPU waits for everything that the GPU has to do, so the first call with a tensor does
    that, and later calls know what it held until PyTorch says that it was written to. While a CUDA graph is
    captured nothing can be read: the values are then taken on trust, and so are those of a tensor changed
    behind PyTorch's back (by a kernel of one's own, through `.data`).

    A dispatch mode (a FLOP counter, selective checkpointing) is not told that values are read. Where there is
    a transformation of torch.func besides, nothing is known.
    """
    if torch._C._len_torch_dispatch_stack() > 0:
        if not torch._C._are_functorch_transforms_active():
            with _disable_current_modes():
                check_offsets(q, k, varlen)
        return
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = varlen
    if any(map(torch._C._functorch.is_batchedtensor, (cu_seqlens_q, cu_seqlens_k))):
        refuse_vmap()  # there are no values to read
    found_q = _found("cu_seqlens_q", cu_seqlens_q, "q", len(q))
    if cu_seqlens_k is cu_seqlens_q and len(k) == len(q):
        found_k = found_q
    else:
        found_k = _found("cu_seqlens_k", cu_seqlens_k, "k", len(k))
    _check_longest_found("_q", found_q, max_seqlen_q)
    _check_longest_found("_k", found_k, max_seqlen_k)


def refuse_vmap() -> NoReturn:
    raise NotImplementedError(
        "attention_varlen under torch.vmap: not supported; pack the mapped sequences too, in one call"
    )


def check_offsets_of(side: str, tokens: int, offsets: torch.Tensor, longest: int) -> Found | None:
    """The same of one tensor's: `cu_seqlens_q` and `max_seqlen_q` of side "q", without a suffix of "x". What
    they hold; None if it can't be known."""
    suffix = "" if side == "x" else f"_{side}"
    found = _found(f"cu_seqlens{suffix}", offsets, side, tokens)
    _check_longest_found(suffix, found, longest)
    return found


def _check_longest_found(suffix: str, found: Found | None, longest: int) -> None:
    if found is not None and found.longest > longest:
        raise ValueError(
            f"max_seqlen{suffix}: expected at least {found.longest}, the longest sequence in "
            f"cu_seqlens{suffix}, got {longest}"
        )


def check_varlen_form(varlen: Varlen, device: torch.device, symbols: bool = False) -> None:
    """All of `cu_seqlens_*` and `max_seqlen_*` but the values in the former; device: that of q."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = varlen
    check_offsets_form("cu_seqlens_q", cu_seqlens_q, device)
    check_offsets_form("cu_seqlens_k", cu_seqlens_k, device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected {len(cu_seqlens_q)} entries as cu_seqlens_q has, got {len(cu_seqlens_k)}"
        )
    check_longest("max_seqlen_q", max_seqlen_q, symbols)
    check_longest("max_seqlen_k", max_seqlen_k, symbols)


def check_longest(name: str, longest, symbols: bool = False) -> None:
    """`max_seqlen_*`. TypeError or ValueError if it is wrong. symbols: it may be no number yet; the operator
    looks at it again, when the graph runs."""
    if isinstance(longest, bool) or not isinstance(longest, int | torch.SymInt):
        raise TypeError(f"{name}: expected an int, got {type_name(longest)}")
    wrong = longest < 0
    if certain(wrong) if symbols else wrong:
        raise ValueError(f"{name}: expected 0 or more, got {longest}")


def check_offsets_form(name: str, offsets, device: torch.device, side: str = "q") -> None:
    check_int32(name, offsets)
    if offsets.dim() != 1 or offsets.shape[0] < 2:  # `len` would make a number of a symbol
        raise ValueError(
            f"{name}: expected 1 dimension (B + 1) with B at least 1, got shape {tuple(offsets.shape)}"
        )
    if offsets.device != device:
        raise ValueError(f"{name}: expected device {device} as {side} has, got {offsets.device}")


_known: dict[int, tuple[weakref.ref, int, int, Found]] = {}
"""id of a tensor -> (the tensor, its version, tokens, what it holds) of offsets on a GPU that were right.
An address in memory would not do as a key: it may be that of the next batch's tensor."""


def _found(name: str, offsets: torch.Tensor, side: str, tokens: int) -> Found | None:
    """What they hold; None if it can't be known. ValueError if the offsets are wrong."""
    if not offsets.is_cuda:
        return _read_offsets(name, offsets, side, tokens)
    if torch.cuda.is_current_stream_capturing():
        return None
    if offsets.is_inference():  # its writes are not counted
        return _read_offsets(name, offsets, side, tokens)
    known, key, version = None, id(offsets), offsets._version
    found = _known.get(key)
    if found is not None and found[0]() is offsets and found[1:3] == (version, tokens):
        known = found[3]
    if known is None:
        known = _read_offsets(name, offsets, side, tokens)
        _known[key] = weakref.ref(offsets, partial(_forget, key)), version, tokens, known
    return known


def _forget(key: int, reference: weakref.ref) -> None:
    found = _known.get(key)
    if found is not None and found[0] is reference:  # not that of a later tensor with the same id
        del _known[key]


def _read_offsets(name: str, offsets: torch.Tensor, side: str, tokens: int) -> Found:
    values = tuple(offsets.tolist())
    if values[0] != 0:
        raise ValueError(f"{name}: expected to start at 0, got {values[0]}")
    longest = 0
    for number, (begin, end) in enumerate(zip(values, values[1:], strict=False), 1):
        if end < begin:
            raise ValueError(
                f"{name}: expected values that never go down, got {end} after {begin} at index {number}"
            )
        longest = max(longest, end - begin)
    if values[-1] != tokens:
        raise ValueError(f"{name}: expected to end at {side}'s number of tokens, {tokens}, got {values[-1]}")
    return Found(longest, hash(values), values)

"""Tensors as TMA descriptors take them: which layouts they can express, and varlen sequences."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common.signature import PREPARED, VARLEN_ROWS, Signature
from attnlib.params import Params

Window = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides of a descriptor, in elements."""


@lru_cache(PREPARED)
def legal(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...] | None:
    """The strides as a descriptor can have them; None if it can't express this layout.

    The hardware wants the last dimension contiguous, and the other strides in multiples of 16 bytes. The
    stride of a dimension of size 1 may be anything: it is never used, and becomes a legal one.
    """
    unit = 16 // dtype.itemsize
    legal = -(-shape[-1] // unit) * unit
    outer = [stride if size > 1 else legal for size, stride in zip(shape[:-1], strides[:-1], strict=True)]
    if strides[-1] != 1 or any(stride % unit or stride <= 0 for stride in outer):
        return None
    return (*outer, 1)


def describable(tensor: torch.Tensor) -> bool:
    """Whether a TMA descriptor can express this (B, H, S, D) or (T, H, D) layout. The hardware wants
    addresses in multiples of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and legal(tensor.shape, tensor.stride(), tensor.dtype) is not None


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a descriptor can express it: where it lies, or a copy, laid out alike if that can be."""
    if describable(tensor):
        return tensor
    copy = tensor.clone()
    return copy if describable(copy) else copy.contiguous()


def heads_are_close(call: Signature, window: Window) -> bool:
    """Whether the heads of a row lie side by side in this memory, as in (B, S, H, D), and of varlen
    sequences."""
    shape, strides = window
    return call.varlen or (shape[1] > 1 and strides[1] < strides[2])


class Made(NamedTuple):
    """A tensor that a launch makes: its window and shape, and the strides to allocate it with; None if they
    are those of the tensor that it is made after."""

    window: Window
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for it, on the device of `tensor`, whose rows it has."""
        if self.strides is None:
            return torch.empty_like(tensor)
        return tensor.new_empty_strided(self.shape, self.strides)


def given(call: Signature, *shapes: tuple[int, ...]) -> list[Window] | None:
    """The windows of the tensors of a call, of these shapes and the strides of its signature; None if a
    descriptor can't express one of them."""
    found = [legal(*tensor, call.dtype) for tensor in zip(shapes, call.strides, strict=True)]
    if None in found:
        return None
    return [_window(call, *tensor) for tensor in zip(shapes, found, strict=True)]


def made_like(call: Signature, shape: tuple[int, ...], strides: tuple[int, ...]) -> Made:
    """What a launch makes after a tensor of the call with these strides, in this shape, which may have other
    columns: in the layout of `torch.empty_like` where a descriptor can express that, else contiguous."""
    like = strides_like(shape, strides)
    own = None if like == strides and shape in (call.q, call.k) else like
    if legal(shape, like, call.dtype) is None:  # a copy of an odd layout
        own = like = torch.empty(shape, dtype=call.dtype, device="meta").stride()
    return Made(_window(call, shape, legal(shape, like, call.dtype)), shape, own)


def strides_like(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of `torch.empty_like` of a tensor with these: the same if its elements fill their memory,
    else without gaps, in the same order. PyTorch would tell for a tensor on device "meta", but imports sympy
    for that, which takes seconds."""
    step = 1
    for dim in sorted((dim for dim, size in enumerate(shape) if size > 1), key=strides.__getitem__):
        if strides[dim] != step:
            break
        step *= shape[dim]
    else:
        return tuple(strides)
    order = [*reversed(range(len(shape)))]  # from the innermost dimension on; sorted as PyTorch does it
    for number in range(1, len(order)):
        at = number
        for before in reversed(range(number)):
            inner, outer = order[before], order[at]
            if 0 in (strides[inner], strides[outer]):  # neither has to come first
                continue
            if strides[inner] < strides[outer]:
                break
            if strides[inner] > strides[outer] or shape[inner] > shape[outer]:
                order[before], order[at], at = outer, inner, before
    found, step = [0] * len(shape), 1
    for dim in order:
        found[dim], step = step, step * max(1, shape[dim])
    return tuple(found)


def output_like(q: torch.Tensor, v: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Memory for the output: q's rows and v's columns, its dimensions in the order in which q has them."""
    if v.shape[-1] == q.shape[-1]:
        return torch.empty_like(q, device=device)
    strided = torch.empty_strided((*q.shape[:-1], v.shape[-1]), q.stride(), dtype=q.dtype, device="meta")
    return torch.empty_like(strided, device=q.device if device is None else device)


def lse_for(q: torch.Tensor, params: Params) -> torch.Tensor | None:
    """Memory for the LSE, if asked: (B, H, Sq), varlen (H, Tq), float32."""
    if not params.return_lse:
        return None
    shape = q.shape[:3] if params.varlen is None else q.shape[1::-1]
    return torch.empty(shape, dtype=torch.float32, device=q.device)


def _window(call: Signature, shape: tuple[int, ...], strides: tuple[int, ...]) -> Window:
    return varlen_window(shape, strides) if call.varlen else (tuple(shape), strides)


def columns_of(window: Window, start: int, columns: int) -> Window:
    """The window of `columns` columns from `start` on, or of as many as there are."""
    (*shape, width), strides = window
    return (*shape, min(columns, width - start)), strides


def varlen_window(shape: tuple[int, ...], strides: tuple[int, ...]) -> Window:
    """Shape and strides of the descriptor of varlen sequences (T, H, D), with which the hardware checks
    bounds at the end of any sequence.

    A descriptor has one bound for a dimension: here that of the rows is VARLEN_ROWS, more than there are. Row
    i of a sequence of S rows is addressed as VARLEN_ROWS - S + i, so that i = S is the first that is out of
    bounds. This is VARLEN_ROWS - S rows too far. Two dimensions more take that back: one counts rows, and its
    coordinate is the sequence's end; the other has a stride that is minus that of a row, plus 2^34 elements,
    and its coordinate is VARLEN_ROWS. Its 2^64 elements are the addresses' whole range, so nothing is left of
    them:

        VARLEN_ROWS * (2^34 - row) + end * row + (VARLEN_ROWS - S + i) * row = (end - S + i) * row  (mod 2^64)

    `triton.tools.ragged_tma` has the same identity for plain Triton. It is not used here because it makes a
    descriptor object at each call, without the shared-memory layout that Gluon needs, and because its
    functions for the device can't be called from Gluon: the two families would describe one tensor in two
    ways.
    """
    (rows, heads, columns), (row, head, _) = shape, strides
    return (VARLEN_ROWS + 1, rows + 1, heads, VARLEN_ROWS, columns), ((1 << 34) - row, row, head, row, 1)

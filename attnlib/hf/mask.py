"""The mask that attnlib gives to a model, which hands it on to its attention layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnlib import BlockMask
from attnlib.arguments.decode import MOST_QUERIES
from attnlib.hf import caches
from attnlib.hf.layout import Layout, require, values_known, without_holes, without_padding


@dataclass(frozen=True, eq=False)
class Mask:
    """What queries attend to: what `attention` needs instead of a tensor (B, 1, Sq, Sk).

    A layer that takes it for a tensor gets a ValueError.

    Attributes:
        q_length, kv_length: Sq and Sk that it was made for.
        q_offset: position of the first query; how many tokens a cache has seen.
        causal, window: as in `attention`.
        kept: bool (B, Sk), False for padding; None if the caller gave no attention_mask.
        layout: the sequences to compute; None if each row is one.
        starts, lengths: of few queries the first key that each row sees, and where its keys end, (B) int32;
            None where padding asks for neither.
        block_mask: what else hides keys: a mask function, a tensor of the caller's, holes under a window.
        bias: a tensor of the caller's that is added to the scores.
        config: the name of the class of the model's configuration.
        rows: B, where rows differ in their padding, or are packed; None where it is the same for all.
        cache: transformers' cache that it was made for; None if there is none, or it is not known.
        last: makes the same for the last n queries as a tensor, bool (B, 1, n, Sk); None if it can't be made.
    """

    q_length: int
    kv_length: int
    q_offset: int = 0
    causal: bool = False
    window: tuple[int, int] | None = None
    kept: torch.Tensor | None = None
    layout: Layout | None = None
    config: str = ""
    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    block_mask: BlockMask | None = None
    bias: torch.Tensor | None = None
    rows: int | None = None
    cache: Any = None
    last: Callable[[int], torch.Tensor] | None = None

    def to(self, *args, **kwargs) -> Mask:
        """The mask on another device: what moves a model's inputs between its parts calls this. Its dtypes
        stay."""
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        named = {name: getattr(self, name) for name in ("kept", "starts", "lengths", "bias", "block_mask")}
        if device is None or all(x is None for x in (self.layout, self.last, *named.values())):
            return self

        def moved(x):
            return x.to(device) if isinstance(x, torch.Tensor | BlockMask) else x

        layout = None if self.layout is None else Layout(*map(moved, self.layout))
        last = None if self.last is None else lambda number: self.last(number).to(device)
        return replace(self, layout=layout, last=last, **{name: moved(x) for name, x in named.items()})

    ndim = 4
    """transformers asks whether a mask is padding still to be looked at, of two dimensions."""

    def contiguous(self) -> Mask:
        """transformers asks a mask for this that it makes before the model is called."""
        return self

    @property
    def spans(self) -> bool:
        """Whether starts and lengths say what padding there is."""
        return self.starts is not None or self.lengths is not None

    def __getitem__(self, index) -> Mask | torch.Tensor:
        """mask[:, :, -n:, :] for the last n queries, 0 for all. Gemma 4 asks for it in front of layers that
        take their keys from another one."""
        every = slice(None)
        rows = index[2] if isinstance(index, tuple) and len(index) == 4 else None
        named = isinstance(rows, slice) and (rows.stop, rows.step) == (None, None)
        if not named or self.last is None or (index[0], index[1], index[3]) != (every, every, every):
            raise ValueError(self._is_no_tensor("__getitem__"))
        number = len(range(self.q_length)[rows])
        if number == self.q_length:
            return self
        if self.kept is None:
            caches.check_last_queries(self.cache)
        return self.last(number)

    def __eq__(self, other) -> bool:
        if isinstance(other, torch.Tensor | bool | int | float):
            raise ValueError(self._is_no_tensor("=="))
        return self is other

    __hash__ = object.__hash__

    def __getattr__(self, name: str):
        if not name.startswith("__") and hasattr(torch.Tensor, name):
            raise ValueError(self._is_no_tensor(name))
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        mask = next((x for x in (*args, *(kwargs or {}).values()) if isinstance(x, cls)), None)
        name = getattr(function, "__name__", str(function))
        raise ValueError(mask._is_no_tensor(name) if mask is not None else f"attention_mask: in {name}")

    def _is_no_tensor(self, name: str) -> str:
        return (
            f"attention_mask: expected a model that hands its mask on to attention; one with a {self.config} "
            f"computes with it ({name}). Use attn_implementation='sdpa' or 'eager'"
        )


def _refusal(name: str):
    def operator(self, *_):
        raise ValueError(self._is_no_tensor(name))

    return operator


for _name in (
    *("setitem", "len", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "invert"),
    *("and", "rand", "or", "ror", "lt", "le", "gt", "ge"),
):
    setattr(Mask, f"__{_name}__", _refusal(f"__{_name}__"))


def settled(mask: Mask) -> Mask:
    """The mask without a window that hides nothing, and with the layout that its padding asks for; with a
    block mask if holes and a window come together, which is an error when a graph runs."""
    window, layout, kept = mask.window, mask.layout, mask.kept
    if window is not None:
        left, right = (-1 if bound >= mask.kv_length - 1 else bound for bound in window)
        window = None if left == -1 and (mask.causal or right == -1) else (left, right)
    if kept is not None and values_known(kept):
        few = mask.q_length <= MOST_QUERIES
        spans = _are_spans(kept, mask.causal or window is not None)
        every, spans = torch.stack([kept.all(), spans]).tolist()
        if every:
            return replace(mask, window=window)
        if few and spans:
            starts = kept.int().argmax(1) if mask.kv_length else kept.sum(1)
            empty = kept.sum(1) == 0
            starts = starts.masked_fill(empty, mask.kv_length)
            lengths = None if mask.causal or window is not None else (starts + kept.sum(1)).int()
            return replace(mask, window=window, starts=starts.int(), lengths=lengths)
    if kept is not None:
        # Without the tokens in a hole those on its two sides would come closer to each other.
        if window is not None and not values_known(kept):
            require(
                without_holes(kept),
                "attention_mask: expected padding at the ends of a row only beside a sliding window "
                f"{window} that is shorter than the {mask.kv_length} keys in a compiled graph, got a row "
                "with a hole. Leave the graph, or use attn_implementation='sdpa'",
            )
        elif window is not None and not without_holes(kept):
            return replace(mask, window=window, block_mask=of_padding(kept, mask.q_length))
        layout = padded(mask)
    return replace(mask, window=window, layout=layout)


def of_padding(kept: torch.Tensor, q_length: int) -> BlockMask:
    """Which keys, bool (B, Sk), all queries see."""
    batch, kv_length = kept.shape

    def seen(b, h, q, k):
        return kept[b, k]

    return BlockMask.from_function(seen, q_length, kv_length, B=batch, device=kept.device)


def padded(mask: Mask) -> Layout:
    """The sequences without their padding; where nothing is differentiated, with the last token of a row that
    ends with padding, from which `generate()` goes on."""
    queries_are_last_tokens, last_sees = mask.causal or mask.window is not None, None
    if mask.causal and not torch.is_grad_enabled():
        last_sees = mask.kept
        if mask.window is not None and mask.window[0] >= 0:
            place = torch.arange(mask.kv_length, device=last_sees.device)
            last_sees = last_sees & (place >= mask.kv_length - 1 - mask.window[0])
    return without_padding(mask.kept, mask.q_length, queries_are_last_tokens, last_sees)


def _are_spans(kept: torch.Tensor, to_the_end: bool) -> torch.Tensor:
    """Whether the tokens kept, bool (B, S), follow each other in every row, up to its last one if
    `to_the_end`; a bool tensor of one element."""
    whole = without_holes(kept)
    return whole & (kept[:, -1:].all(1) | ~kept.any(1)).all() if to_the_end else whole

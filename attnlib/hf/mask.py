"""The mask that attnlib gives to a model, which hands it on to its attention layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

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
        config: the name of the class of the model's configuration.
    """

    q_length: int
    kv_length: int
    q_offset: int = 0
    causal: bool = False
    window: tuple[int, int] | None = None
    kept: torch.Tensor | None = None
    layout: Layout | None = None
    config: str = ""

    def to(self, *args, **kwargs) -> Mask:
        """The mask on another device: what moves a model's inputs between its parts calls this."""
        if self.kept is None and self.layout is None:
            return self
        moved = None
        if self.layout is not None:
            moved = Layout(*(x.to(*args, **kwargs) if torch.is_tensor(x) else x for x in self.layout))
        return replace(self, kept=None if self.kept is None else self.kept.to(*args, **kwargs), layout=moved)

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
    *("getitem", "setitem", "len", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "invert"),
    *("and", "rand", "or", "ror", "lt", "le", "gt", "ge"),
):
    setattr(Mask, f"__{_name}__", _refusal(f"__{_name}__"))


def make(
    q_length: int,
    kv_length: int,
    *,
    q_offset: int = 0,
    causal: bool,
    window: tuple[int, int] | None = None,
    kept: torch.Tensor | None = None,
    layout: Layout | None = None,
    config: str = "",
) -> Mask:
    """A mask, with the layout that its padding asks for. ValueError if holes and a window come together."""
    if window is not None:
        left, right = (-1 if bound >= kv_length - 1 else bound for bound in window)
        window = None if left == -1 and (causal or right == -1) else (left, right)
    if kept is not None and not (values_known(kept) and bool(kept.all())):
        if window is not None:
            # Without the tokens in a hole those on its two sides would come closer to each other.
            require(
                without_holes(kept),
                "attention_mask: expected padding at the ends of a row only beside a sliding window "
                f"{window} that is shorter than the {kv_length} keys, got a row with a hole. "
                "Use attn_implementation='sdpa'",
            )
        layout = without_padding(kept, q_length, causal or window is not None)
    return Mask(q_length, kv_length, q_offset, causal, window, kept, layout, config)

"""Masks that a caller or a model gives as tensors with four dimensions: bool, or numbers that are added to
the scores."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnlib import BlockMask
from attnlib.arguments.common import DTYPES
from attnlib.hf import mask as masks
from attnlib.hf.layout import values_known
from attnlib.hf.mask import Mask
from attnlib.hf.remembered import Remembered
from attnlib.hf.score import as_bias

_made = Remembered()


def is_given(attention_mask) -> bool:
    return isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4


def mask_of(module, given: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Mask:
    """What a tensor that broadcasts to (B, H, Sq, Sk) says of a layer's queries (B, H, Sq, D) and keys. It
    says all: nothing else makes the layer causal."""
    full = *query.shape[:3], key.shape[2]
    numbers = given.dtype in DTYPES
    fits = given.shape[3] == full[3] and all(x in (1, y) for x, y in zip(given.shape, full, strict=True))
    if not fits or not (numbers or given.dtype == torch.bool):
        raise ValueError(
            "attention_mask: expected bool, float16, bfloat16 or float32 of four dimensions and a shape that "
            f"broadcasts to (B, H, Sq, Sk) = {tuple(full)}, got {given.dtype} of shape {tuple(given.shape)}"
        )
    if given.device != query.device:
        raise ValueError(f"attention_mask: expected device {query.device} of the queries, got {given.device}")
    sizes = full[2:]
    if not values_known(given):
        if given.dtype == torch.bool:
            return Mask(*sizes, bias=as_bias(given, query.dtype))
        return Mask(*sizes, bias=given.masked_fill(_hides(given), -torch.inf))
    found, added = _made.of(module, given, full, lambda: _read(given.detach(), full))
    learned = given.requires_grad and torch.is_grad_enabled()  # a bias that begins with zeros, as in Swin
    return replace(found, bias=given) if added or learned else found


def among(given, indices: torch.Tensor) -> torch.Tensor:
    """The mask bool (B, 1, Sq, Sk) of the keys that are seen and among `indices` (B, Sq, n)."""
    known = is_given(given) and given.dtype == torch.bool and isinstance(indices, torch.Tensor)
    if not known or indices.dim() != 3 or indices.is_floating_point():
        kind = f"a {type(indices).__name__}" if isinstance(indices, torch.Tensor) else f"{indices!r:.80}"
        raise ValueError(
            "indices: expected None, or integers (B, Sq, n) beside a bool attention_mask (B, 1, Sq, Sk), got "
            f"{kind}"
        )
    chosen = torch.zeros_like(given[:, 0]).scatter(-1, indices.long(), True)
    return given & chosen.unsqueeze(1)


def _read(given: torch.Tensor, full: tuple[int, ...]) -> tuple[Mask, bool]:
    """What the values hide of (B, H, Sq, Sk), and whether they are to be added to the scores. Waits for a
    GPU. The result must not hold the tensor, which it lives as long as."""
    batch, _, *sizes = full
    seen, added = given, False
    if given.dtype != torch.bool:
        seen = ~_hides(given)
        added = not ((given == 0) | ~seen).all()
    if not added and given.shape[1:3] == (1, 1):  # the same for all queries, as padding is
        return masks.settled(Mask(*sizes, kept=seen[:, 0, 0].expand(batch, -1).clone())), added
    if seen.all():
        return Mask(*sizes), added
    return Mask(*sizes, block_mask=BlockMask.from_mask(seen.expand(-1, -1, *sizes))), added


def _hides(numbers: torch.Tensor) -> torch.Tensor:
    """Where they are what transformers writes for "not seen": the least number of the dtype, or -inf."""
    return numbers <= torch.finfo(numbers.dtype).min

"""LoRA by the library peft on chapter 41's model: the same first loss, as many trained parameters and bytes
as the formula says."""

from __future__ import annotations

import pytest
import torch

from attnlib.book.live_bytes import LiveBytes
from attnlib.book.trainer import Trainer
from attnlib.book.training import LlamaShape, Training, held

pytest.importorskip("peft")
SHAPE = LlamaShape(1, 64, 4, 2, 16, 160, 100)


def kept(how: Training, peft: bool) -> tuple[int, float, int]:
    """Bytes that a forward pass leaves, its loss, and how many parameters are trained."""
    with LiveBytes() as live:
        trainer = Trainer(SHAPE, how, peft=peft)
        before = live.now
        loss = trainer.model(torch.arange(how.context)[None] % SHAPE.vocab)
        found = live.now - before
    return found, loss.item(), sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)


def test_peft_is_the_books_lora():
    how = Training(64, attention="sdpa", lora=8)
    (ours, loss, trained), (theirs, other, count) = kept(how, False), kept(how, True)
    assert trained == count == SHAPE.adapters(8)
    assert loss == pytest.approx(other, rel=1e-4)
    assert abs(theirs - ours) < 0.01 * sum(held(SHAPE, how).values())

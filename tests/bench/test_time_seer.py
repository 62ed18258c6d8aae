"""tests/gpu/time_seer.py without a GPU: its judges notice what is wrong, in an output and in a map."""

from __future__ import annotations

import pytest
import time_seer
import torch
from cases import INTERPRETER_REMARKS

from attnlib import BlockMask, attention, attention_pooled
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU as the GPU")]


@pytest.fixture
def small(monkeypatch):
    for name, value in {"DEVICE": "cpu", "HEADS": 2, "WIDTH": 16, "KEY_HEADS": 1}.items():
        monkeypatch.setattr(time_seer, name, value)


@pytest.mark.parametrize("block", [64, 128])
def test_prefill(small, block):
    q, k, v = make_inputs(Shape(1, 2, 512, 16, True), device="cpu")
    blocks = time_seer.random_blocks(512, block, 0.5)
    judge = time_seer.Judge(q, k, v, blocks, block)
    mask = BlockMask.from_chosen(blocks, 512, block_size=block)
    out = attention(q, k, v, block_mask=mask, impl="reference")
    assert judge.reason(out) is None
    assert "error" in judge.reason(attention(q, k, v, causal=True, impl="reference"))
    below = torch.ones(blocks.shape[2:], dtype=torch.bool).tril()
    assert not (blocks & ~below).any() and 0.3 < time_seer.share(blocks) <= 0.5


def test_map(small):
    q, k, v = make_inputs(Shape(1, 2, 384, 16, True), device="cpu")
    judge = time_seer.Judge(q, k, v)
    out, pooled = attention_pooled(q, k, v, causal=True, block=128, impl="reference")
    assert judge.reason((out, pooled)) is None
    assert "map" in judge.reason((out, 1.01 * pooled))
    assert "map" in judge.reason((out, torch.full_like(pooled, torch.nan)))


def test_decoding(small):
    q, k, v = make_inputs(Shape(2, 2, 1, 16, True, "float16", 1, 256), device="cpu")
    blocks = torch.tensor([[[True, False, False, True]], [[False, True, False, True]]])
    judge = time_seer.DecodeJudge(q, k, v, blocks)
    seen = blocks.repeat_interleave(64, -1)[:, :, None].expand(-1, 2, -1, -1)
    out = attention(q, k, v, block_mask=BlockMask.from_mask(seen.contiguous()), impl="reference")
    assert judge.reason(out) is None and "error" in judge.reason(out.flip(0))

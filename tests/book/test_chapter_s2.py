"""Chapter 33: its kernel under patterns, at lengths and with inputs that it has to take, and its decoding."""

from __future__ import annotations

import pytest
import torch
from cases import INTERPRETER_REMARKS

from attnlib import S2Pattern
from attnlib.bench import sources
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape

STEP = "33_s2"
pytestmark = INTERPRETER_REMARKS


def judge(module, pattern: S2Pattern, length: int, kind: str = "normal", **how) -> None:
    q, k, v = make_inputs(Shape(2, pattern.heads, length, 32), kind)
    out = module.attention(q, k, v, local=pattern.local_blocks, stride=pattern.stride, **how)
    mask = pattern.mask(length, q.device).to_dense().expand(2, -1, -1, -1)
    Oracle(q, k, v, mask=mask, **how).judge(out).raise_if_bad(f"{STEP}, {length} tokens, {kind}")


@pytest.mark.parametrize("length", [1, 64, 65, 330])
def test_the_kernel_under_a_pattern(length):
    judge(sources.load_step(STEP), S2Pattern(3, local_blocks=2, stride=3), length)


@pytest.mark.parametrize("kind", ["large", "sink"])
def test_inputs_that_need_the_maximum(kind):
    judge(sources.load_step(STEP), S2Pattern(2, local_blocks=1, stride=2), 200, kind)


def test_a_negative_scale():
    judge(sources.load_step(STEP), S2Pattern(2, local_blocks=1, stride=2), 200, sm_scale=-0.2)


@pytest.mark.parametrize(("old", "new"), [
    ("range(first, near, STRIDE)", "range(first, near, STRIDE + 1)"),
    ("H * STEP % STRIDE", "H * 0 % STRIDE"),
    ("range(near, i)", "range(near + 1, i)"),
    ("o_n[None, :] <= o_m", "o_n[None, :] < o_m"),
    ("i - LOCAL + 1, 0", "i - LOCAL, 0"),
])  # fmt: skip
def test_planted_mistakes_are_found(old, new):
    source = sources.kernel_source(sources.notebook_of(STEP))
    assert source.count(old) == 1
    planted = sources.load_source("33_planted", source.replace(old, new))
    with pytest.raises(AssertionError, match="33_s2, 330 tokens"):
        judge(planted, S2Pattern(3, local_blocks=2, stride=3), 330)


def open_cells():
    """The functions of the chapter that decode."""
    text = "import torch\n\nfrom attnlib import S2Cache, attention_decode\n\n" + "\n\n".join(
        sources.cells_tagged(sources.notebook_of(STEP), "variant"))  # fmt: skip
    return sources.load_source("33_open_cells", text)


def test_generating():
    """Past two ends of blocks."""
    pattern = S2Pattern(4, 2, local_blocks=1, stride=2)
    q, k, v = make_inputs(Shape(1, 4, 260, 32, False, heads_kv=2))
    out, cache = open_cells().generated(q, k, v, pattern, 190)
    mask = pattern.mask(260, q.device).to_dense()[:, :, 190:]
    Oracle(q[:, :, 190:], k, v, mask=mask).judge(out).raise_if_bad("generated")
    assert cache.bytes == pattern.cache_bytes(260, 32)


def test_decoding_from_kept_blocks():
    decode_kept = open_cells().decode_kept
    pattern = S2Pattern(4, 2, local_blocks=1, stride=2)
    q, k, v = make_inputs(Shape(2, 4, 1, 32, False, heads_kv=2, seqlen_k=330))
    mask = pattern.mask(330, q.device).to_dense()[:, :, -1:].expand(2, -1, -1, -1)
    assert not bool(mask.all())
    Oracle(q, k, v, mask=mask).judge(decode_kept(q, k, v, pattern)).raise_if_bad("decode_kept")
    broken = torch.where(mask[:, ::2].mT, v, torch.full_like(v, float("nan")))
    assert bool(decode_kept(q, k, broken, pattern).isfinite().all()), "what was dropped is not read"

"""attention_pooled(), BlockMask.from_chosen and attnlib.seer: every wrong argument is named, with what was
expected and what came."""

from __future__ import annotations

import pytest
import torch
from argument_rows import check_every_argument_has_a_row, check_mistake, mistakes
from cases import INTERPRETER_REMARKS

from attnlib import BlockMask, attention_pooled
from attnlib.seer import SeerGate, above, decode_chosen, top, top_of_density

pytestmark = INTERPRETER_REMARKS


def zeros(*shape, dtype=torch.float16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


HALF = zeros(2, 4, 70, 16), zeros(2, 2, 70, 16)
GOOD = {"q": HALF[0], "k": HALF[1], "v": HALF[1], "impl": "reference"}
BLOCK, IMPL = "block: expected 64 or 128, got", "impl: expected 'hopper', 'triton', 'reference' or None, got"
POOLED = [
    ({"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
    ({"q": zeros(4, 70, 16)}, ValueError, "q: expected 4 dimensions (B, H, S, D), got shape (4, 70, 16)"),
    ({"k": zeros(2, 3, 70, 16), "v": zeros(2, 3, 70, 16)}, ValueError,
     "k: expected a number of heads that divides q's 4, got 3"),
    ({"v": zeros(2, 2, 71, 16)}, ValueError, "v: expected shape (2, 2, 70, 16) as k has, got (2, 2, 71, 16)"),
    ({"v": zeros(2, 2, 70, 24)}, ValueError, "v: expected head dimension 16 as q has, got 24"),
    ({"block": 64.0}, TypeError, f"{BLOCK} float"),
    ({"block": True}, TypeError, f"{BLOCK} bool"),
    ({"block": 32}, ValueError, f"{BLOCK} 32"),
    ({"causal": 1}, TypeError, "causal: expected a bool, got int"),
    ({"sm_scale": "1"}, TypeError, "sm_scale: expected a number or None, got str"),
    ({"sm_scale": 1e27}, ValueError, "sm_scale: expected a number from -1e26 to 1e26, got 1e+27"),
    ({"impl": 1}, TypeError, f"{IMPL} int"),
    ({"impl": "decode"}, ValueError, f"{IMPL} 'decode'"),
    ({"impl": "hopper"}, ValueError, "impl: 'hopper' needs CUDA tensors; q is on cpu"),
]  # fmt: skip

CHOSEN = {"blocks": torch.ones(2, 3, 2, 2, dtype=torch.bool), "seqlen": 200}
MASK = [
    ({"blocks": [True]}, TypeError, "blocks: expected a torch.Tensor, got list"),
    ({"blocks": zeros(2, 2)}, TypeError, "blocks: expected dtype bool, got torch.float16"),
    ({"seqlen": 300}, ValueError, "blocks: expected shape (B, H, 3, 3) or (3, 3) for 300 queries and 300 "
     "keys in blocks of 128 x 128, got (2, 3, 2, 2)"),
    ({"block_size": 64.0}, TypeError, "block_size: expected 64 or 128, got float"),
    ({"block_size": 192}, ValueError, "block_size: expected 64 or 128, got 192"),
    ({"density": True}, TypeError, "density: expected a number, got bool"),
    ({"density": 0}, ValueError, "density: expected a number above 0, up to 1, got 0"),
]  # fmt: skip

MADE = {"heads": 4, "kv_heads": 2, "head_dim": 16}
GATE = [
    ({"heads": 4.0}, TypeError, "heads: expected an int, got float"),
    ({"kv_heads": 3}, ValueError, "kv_heads: expected a divisor of heads, 4, got 3"),
    ({"head_dim": 0}, ValueError, "head_dim: expected 1 or more, got 0"),
    ({"block": "64"}, TypeError, f"{BLOCK} str"),
    ({"block": 16}, ValueError, f"{BLOCK} 16"),
    ({"width": 7}, ValueError, "width: expected an even number, for rotary embeddings, got 7"),
]  # fmt: skip

CALLED = {"q": torch.zeros(2, 4, 70, 16), "k": torch.zeros(2, 2, 70, 16)}
CALL = [
    ({"q": None}, TypeError, "q: expected a torch.Tensor, got NoneType"),
    ({"q": torch.zeros(2, 2, 70, 16)}, ValueError,
     "q: expected shape (B, 4, S, 16) as the gate has, got (2, 2, 70, 16)"),
    ({"q": torch.zeros(2, 4, 70, 16).int()}, TypeError,
     "q: expected a floating-point dtype, got torch.int32"),
    ({"k": torch.zeros(2, 2, 70, 16, device="meta")}, ValueError,
     "k: expected device cpu as the gate has, got meta"),
    ({"k": torch.zeros(2, 2, 71, 16)}, ValueError,
     "k: expected batch size 2 and 70 tokens as q has, got 2 and 71"),
]  # fmt: skip

SCORES = [
    ({"scores": 1}, TypeError, "scores: expected a torch.Tensor, got int"),
    ({"scores": torch.ones(3, 3).int()}, TypeError,
     "scores: expected a floating-point dtype, got torch.int32"),
]  # fmt: skip
LOST = {"scores": torch.zeros(2, 4, 3, 3), "pooled": torch.zeros(2, 4, 3, 3), "skip": 0.25}
LOSS = [
    *SCORES,
    ({"scores": torch.zeros(3, 3)}, ValueError,
     "scores: expected shape (B, H, n, n) as a gate gives it, got (3, 3)"),
    ({"pooled": [0.5]}, TypeError, "pooled: expected a torch.Tensor, got list"),
    ({"pooled": torch.zeros(2, 4, 3, 1)}, ValueError,
     "pooled: expected shape (2, 4, 3, 3) as scores has, got (2, 4, 3, 1)"),
    ({"pooled": torch.zeros(2, 4, 3, 3, device="meta")}, ValueError,
     "pooled: expected device cpu as scores has, got meta"),
    ({"skip": "0.25"}, TypeError, "skip: expected a number, got str"),
    ({"skip": 1}, ValueError, "skip: expected a number from 0 up to but not 1, got 1"),
]  # fmt: skip
SQUARE = "scores: expected shape (..., n, n) with n from 1 on, got"
TOP = [
    *SCORES,
    ({"scores": torch.zeros(2, 130, 3)}, ValueError, f"{SQUARE} (2, 130, 3)"),
    ({"scores": torch.zeros(3)}, ValueError, f"{SQUARE} (3,)"),
    ({"scores": torch.zeros(2, 0, 0)}, ValueError, f"{SQUARE} (2, 0, 0)"),
    ({"count": 1.5}, TypeError, "count: expected an int, got float"),
    ({"count": 0}, ValueError, "count: expected 1 or more, got 0"),
]
ABOVE = [
    *SCORES,
    ({"scores": torch.zeros(())}, ValueError, "scores: expected shape (..., n), got ()"),
    ({"threshold": True}, TypeError, "threshold: expected a number, got bool"),
]
DENSITY = [
    ({"blocks": 0}, ValueError, "blocks: expected 1 or more, got 0"),
    ({"density": "0.1"}, TypeError, "density: expected a number, got str"),
    ({"density": 0.0}, ValueError, "density: expected a number above 0, up to 1, got 0.0"),
    ({"density": 1.1}, ValueError, "density: expected a number above 0, up to 1, got 1.1"),
]

CACHE = zeros(2, 2, 256, 16)
DECODED = {
    "q": zeros(2, 4, 1, 16),
    "k_cache": CACHE,
    "v_cache": CACHE,
    "scores": torch.zeros(2, 2, 4),
    "count": 2,
}
DECODE = [
    ({"q": 1}, TypeError, "q: expected a torch.Tensor, got int"),
    ({"q": zeros(2, 4, 2, 16)}, ValueError,
     "q: expected shape (2, H, 1, 16) for 2 caches, got (2, 4, 2, 16)"),
    ({"q": zeros(2, 4, 1, 32)}, ValueError,
     "q: expected shape (2, H, 1, 16) for 2 caches, got (2, 4, 1, 32)"),
    ({"scores": torch.zeros(2, 2, 32)}, ValueError,
     "scores: expected blocks of 16, 32, 64 ... of the 256 keys, got 32 of 8"),
    ({"q": zeros(2, 3, 1, 16)}, ValueError, "k_cache: expected a number of heads that divides q's 3, got 2"),
    ({"k_cache": CACHE[0]}, ValueError,
     "k_cache: expected 4 dimensions (B, H, S, D), got shape (2, 256, 16)"),
    ({"v_cache": CACHE[:, :1]}, ValueError, "v_cache: expected shape (2, 2, 256, 16) as k_cache has, got "
     "(2, 1, 256, 16)"),
    ({"k_cache": CACHE.transpose(2, 3).contiguous().transpose(2, 3)}, ValueError,
     "k_cache: expected a contiguous tensor, got strides (8192, 4096, 1, 256)"),
    ({"scores": torch.zeros(2, 2, 5)}, ValueError,
     "scores: expected shape (2, 2, n), where n divides 256, got (2, 2, 5)"),
    *SCORES,
    ({"scores": torch.zeros(2, 2, 4, device="meta")}, ValueError,
     "scores: expected device cpu as q has, got meta"),
    ({"count": 0}, ValueError, "count: expected 1 or more, got 0"),
    ({"lengths": torch.zeros(2, dtype=torch.int32, device="meta")}, ValueError,
     "lengths: expected device cpu as q has, got meta"),
    ({"lengths": torch.zeros(2)}, TypeError, "lengths: expected dtype int32, got torch.float32"),
    ({"lengths": torch.zeros(3, dtype=torch.int32)}, ValueError, "lengths: expected shape (2,), got (3,)"),
    ({"sm_scale": "1"}, TypeError, "sm_scale: expected a number or None, got str"),
]  # fmt: skip

GIVEN = {"scores": torch.zeros(3, 3), "count": 2}
TABLES = [
    (attention_pooled, GOOD, POOLED), (BlockMask.from_chosen, CHOSEN, MASK),
    (SeerGate(**MADE).forward, CALLED, CALL), (SeerGate(**MADE).loss, LOST, LOSS),
    (top, GIVEN, TOP), (above, {"scores": torch.zeros(3, 3), "threshold": 0.1}, ABOVE),
    (top_of_density, {"blocks": 4, "density": 0.5}, DENSITY), (decode_chosen, DECODED, DECODE),
]  # fmt: skip


@mistakes([*TABLES, (SeerGate, MADE, GATE)])
def test_wrong_arguments(mistake):
    check_mistake(mistake)


def test_every_argument_has_a_row():
    check_every_argument_has_a_row(TABLES)


def test_derivatives_and_transformations_are_refused():
    told = "does: attention_pooled has no gradient; attention has one"
    with pytest.raises(RuntimeError, match=f"^k: expected a tensor that does not .* {told}$"):
        attention_pooled(**(GOOD | {"k": GOOD["k"].clone().requires_grad_()}))
    with pytest.raises(NotImplementedError, match="attention_pooled under torch.func"):
        torch.func.vmap(lambda x: attention_pooled(x[None], GOOD["k"][:1], GOOD["v"][:1])[0])(GOOD["q"])

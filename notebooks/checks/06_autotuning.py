"""Checks of the exercises of chapter 06."""

from functools import partial
from typing import NamedTuple

import torch

from attnlib.bench.shapes import Shape
from attnlib.book.exercises import judge_kernel


def check_stages(stages):
    """Depths of the pipeline for tiles of the chapter and for some that do not fit at all."""
    expected = {
        (128, 64, 128, 1): 6,
        (128, 64, 256, 1): 2,
        (128, 128, 256, 1): 1,
        (64, 64, 256, 1): 3,
        (128, 64, 64, 2): 6,
        (64, 64, 128, 2): 3,
        (64, 64, 128, 3): 1,
        (128, 64, 256, 2): 1,
        (128, 128, 256, 2): 0,
        (64, 64, 64, 4): 3,  # fills its share to the last byte
        (32, 32, 64, 3): 8,  # one more would fit but for the 1 KiB of each CTA
        (32, 16, 32, 7): 14,
    }
    for (block_m, block_n, head_dim, ctas), want in expected.items():
        got = stages(block_m, block_n, head_dim, ctas)
        what = f"{block_m}x{block_n} at D = {head_dim}, {ctas} CTA(s) per SM"
        hint = " (one stage takes half the buffers: K and V take turns)" if want == 1 else ""
        hint = hint or " (of each CTA's part of the 228 KiB the system takes 1 KiB)" * (got == want + 1)
        assert got == want, f"{what}: expected {want}, got {got!r}{hint}"


class _Config(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# What is planted in which configuration; the other two are right.
_PLANTED = {
    _Config(64, 32, 4, 3): "",
    _Config(64, 64, 4, 2): "tail",
    _Config(128, 64, 8, 3): "",
    _Config(128, 128, 8, 2): "nan",
    _Config(64, 128, 4, 2): "diagonal",
    _Config(128, 32, 4, 3): "max",
}
_SYMPTOM = {
    "tail": "it drops the keys after the last whole key tile: try lengths that are no multiple of a tile",
    "nan": "one row of its output is NaN, and every comparison with NaN is False",
    "diagonal": "it lets the last rows see one key too many",
    "max": "it has no running max: exp overflows when scores are large (make_inputs has a kind for that)",
}


def _planted_attention(q, k, v, causal, sm_scale, config):
    """Dense attention in fp32 with the fault planted in `config`; (B, H, S, D) in and out."""
    fault, seqlen = _PLANTED[config], q.shape[2]
    scores = q.float() @ k.float().transpose(-1, -2) * sm_scale
    row, key = torch.meshgrid(*[torch.arange(seqlen, device=q.device)] * 2, indexing="ij")
    visible = key <= row + (fault == "diagonal") if causal else torch.ones_like(row, dtype=torch.bool)
    if fault == "tail" and seqlen > config.block_n:
        visible = visible & (key < seqlen // config.block_n * config.block_n)
    scores = scores.masked_fill(~visible, float("-inf"))
    if fault == "max":
        p = scores.exp().half().float()  # fp16 ends at 65504 = exp(11.09)
        out = p @ v.float() / p.sum(-1, keepdim=True)
    else:
        out = scores.softmax(-1) @ v.float()
    if fault == "nan":
        out[:, :, seqlen // 2] = float("nan")
    return out.to(q.dtype)


def check_wrong_configs(wrong_configs):
    """Exactly the four configurations with a planted fault must be found."""
    found = wrong_configs(_planted_attention, list(_PLANTED))
    assert isinstance(found, list | tuple | set), f"expected a list, got {type(found).__name__}"
    for config, fault in _PLANTED.items():
        if fault:
            assert config in found, f"{tuple(config)} passed your gate, but {_SYMPTOM[fault]}"
        else:
            assert config not in found, f"{tuple(config)} is right, but your gate rejects it: too tight?"


class _Grids:
    """Stands for a kernel and keeps the grids of its launches."""

    def __init__(self, kernel):
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid):
        self.grids.append(tuple(grid))
        return self.kernel[grid]


def check_packed(packed):
    """Right for groups of several sizes, with a program for every 32 rows of a whole group."""
    kernel = packed.__globals__.get("packed_forward")
    assert kernel is not None, "expected the kernel packed_forward beside packed"
    for heads, kv_heads, seqlen in ((1, 1, 70), (4, 1, 5), (6, 2, 50), (8, 4, 33)):
        for causal in (True, False):
            seen = _Grids(kernel)
            packed.__globals__["packed_forward"] = seen
            try:
                shape = Shape(2, heads, seqlen, 16, causal, heads_kv=kv_heads)
                judge_kernel(partial(packed, causal=causal), shape, causal=causal)
            finally:
                packed.__globals__["packed_forward"] = kernel
            want = [(-(-seqlen * heads // kv_heads // 32), 2 * kv_heads)]
            case = f"H={heads} of {kv_heads}, S={seqlen}"
            assert seen.grids == want, f"{case}: expected the grid {want[0]}, got {seen.grids}"

"""Attention that merges its result into an existing one, on a CUDA GPU: parts against fp64 attention to all
keys, with both kernels; equal bits in every run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from accumulated import CASES, Parts, check

from attnlib import dispatch
from attnlib.distributed.pieces import nothing_seen
from attnlib.params import MaskWindow, Params

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9.x",
)
IMPLS = pytest.mark.parametrize("impl", ["triton", pytest.param("hopper", marks=hopper)])
CAUSAL = MaskWindow(None, 0)


@IMPLS
@pytest.mark.parametrize("name", CASES)
def test_parts_are_the_whole(name, impl):
    check(CASES[name], impl, "cuda")


@IMPLS
@pytest.mark.parametrize("out", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_more_tiles_than_multiprocessors(head_dim, out, impl):
    """A program computes several, and the tiles of neighbors are written at the same time."""
    parts = Parts(cuts=(0, 500, 1100, 2000), S_q=1000, D=head_dim, H=8, H_kv=2, B=3, out=out)
    for window in (MaskWindow(None, None), CAUSAL, MaskWindow(700, 30)):
        check(replace(parts, window=window), impl, "cuda")


@IMPLS
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_equal_bits(head_dim, impl):
    """The same from two streams at once as from one, for heads of their own."""
    q, k, v = (torch.randn(1, 8, 3000, head_dim, device="cuda").bfloat16() for _ in range(3))
    params, found = Params(CAUSAL, 0.1, impl=impl), []
    halves, side = (slice(0, 4), slice(4, 8)), torch.cuda.Stream()
    for streams in [(torch.cuda.current_stream(), side)] * 3 + [(torch.cuda.current_stream(),) * 2]:
        whole = nothing_seen(q, True)
        side.wait_stream(torch.cuda.current_stream())
        for stream, heads in zip(streams, halves, strict=True):
            with torch.cuda.stream(stream):
                into = type(whole)(*(x[:, heads] for x in whole))
                for _ in range(3):
                    dispatch.accumulate(q[:, heads], k[:, heads], v[:, heads], into, params)
        torch.cuda.current_stream().wait_stream(side)
        found.append(whole)
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))

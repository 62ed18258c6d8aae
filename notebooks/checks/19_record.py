"""Checks of the exercises of chapter 19."""

import math
from collections.abc import Callable

import numpy as np
import torch

from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _moves(scores):
    """How often a shift that lags by up to 8 moves after the first 32 keys, from scores (..., S, S)."""
    shift, count = None, None
    for block in scores.split(32, -1):
        top = block.amax(-1)
        grown = torch.zeros_like(top, dtype=torch.bool) if shift is None else top > shift + 8
        shift = top if shift is None else torch.where(grown, top, shift)
        count = grown.int() if count is None else count + grown.int()
    return count


def check_lazy_attention(lazy_attention: Callable) -> None:
    """Right for scores that rise by more or by less than the threshold from block to block, and with just the
    moves that it asks for."""
    for S, causal, rise in ((150, True, 0.0), (96, False, 3.0), (100, True, 12.0), (70, False, 200.0)):
        q, k, v = make_inputs(Shape(1, 2, S, 32, causal), device=DEVICE)
        sm_scale = 32**-0.5
        q[..., 0] = 1.0
        step = rise * math.log(2) / sm_scale  # in base 2: rise
        k[..., 0] = (torch.arange(S, device=DEVICE) // 32) * step
        scores = q.double() @ k.double().mT * sm_scale
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
        found = lazy_attention(q, k, v, causal, sm_scale)
        case = f"S = {S}, {'causal' if causal else 'dense'}, scores that rise by {rise:g} a block"
        assert isinstance(found, tuple) and len(found) == 2, (
            f"{case}: expected (output, moves), got {type(found).__name__}"
        )
        verdict = Oracle(q, k, v, causal=causal).judge(found[0])
        assert verdict.ok, f"{case}: {verdict.reason}"
        off = (found[1] != _moves(scores / math.log(2))).nonzero()
        assert not len(off), (
            f"{case}: the moves of {len(off)} rows are wrong, the first is row {off[0, -1].item()}: "
            f"{found[1][tuple(off[0])].item()}"
        )


def check_power_account(power_account):
    """Share of the throttled roof, pJ per FLOP, and what less energy would bring."""
    for flops, ms, mhz, watts, better, sms in (
        (1.0995e12, 1.6, 1470, 690, 1.0, 132),
        (2.7488e11, 0.58, 1755, 650, 0.9, 132),
        (5e11, 2.0, 1980, 350, 0.5, 114),
    ):
        tflops = flops / ms * 1e-9
        want = (tflops * 1e12 / (sms * 4096 * mhz * 1e6), watts / tflops, tflops / better)
        got = power_account(flops, ms, mhz, watts, better, sms)
        assert isinstance(got, tuple) and len(got) == 3, f"expected three numbers, got {got!r}"
        names = ("share of the throttled roof", "pJ per FLOP", "TFLOP/s with less energy")
        for name, mine, theirs in zip(names, want, got, strict=True):
            case = f"{flops:.3g} FLOP in {ms} ms at {mhz} MHz and {watts} W, better = {better}"
            assert abs(theirs - mine) < 1e-6 * mine, f"{case}: {name}: expected {mine:.4g}, got {theirs:.4g}"


def _rows():
    """Two implementations over a few shapes; some did not run."""
    rng = np.random.default_rng(3)
    for dtype in ("float16", "bfloat16"):
        for causal in (True, False):
            for seqlen in (512, 4096):
                shape = {"batch": 16384 // seqlen, "heads": 16, "seqlen": seqlen, "head_dim": 128}
                shape |= {"causal": causal, "dtype": dtype}
                for impl in ("attnlib", "fa3", "cudnn"):
                    row = {"impl": impl, **shape, "status": "ok", "ms": float(rng.uniform(0.8, 1.2))}
                    if (impl, dtype, seqlen) == ("fa3", "bfloat16", 512):
                        row = {"impl": impl, **shape, "status": "not installed"}
                    yield row
    for batch, ms in ((1, 0.5), (2, 2.0)):  # differ in the batch alone
        shape = {"batch": batch, "heads": 8, "seqlen": 1024, "head_dim": 256}
        shape |= {"causal": True, "dtype": "float16"}
        yield {"impl": "attnlib", **shape, "status": "ok", "ms": ms}
        yield {"impl": "fa3", **shape, "status": "ok", "ms": 1.0}


def check_violations(violations):
    """The cells below the bar, worst first, in the right direction, shape by shape."""
    rows = list(_rows())
    keys = ("batch", "heads", "seqlen", "head_dim", "causal", "dtype")
    for peer, least in (("fa3", 0.95), ("cudnn", 1.0), ("fa3", 0.1)):
        want = []
        for a in rows:
            for b in rows:
                if (a["impl"], b["impl"]) == ("attnlib", peer) and all(a[k] == b[k] for k in keys):
                    if "ms" in a and "ms" in b and b["ms"] / a["ms"] < least:
                        want.append((b["ms"] / a["ms"], *(a[k] for k in keys[2:])))
        want.sort()
        got = violations(rows, peer, least)
        assert isinstance(got, list), f"expected a list, got {type(got).__name__}"
        got = [tuple(cell) for cell in got]
        assert len(got) == len(want), f"{peer}, {least}: expected {len(want)} cells, got {len(got)}"
        for mine, theirs in zip(want, got, strict=True):
            assert mine[1:] == theirs[1:] and abs(mine[0] - theirs[0]) < 1e-9, (
                f"{peer}, {least}: expected {mine}, got {theirs}"
            )

"""Checks of the exercises of chapter 19."""

import numpy as np


def _tiles(scores, values, block):
    starts = range(0, scores.shape[1], block)
    return [(scores[:, n : n + block], values[n : n + block]) for n in starts]


def _truth(scores, values):
    weights = np.exp2(scores - scores.max(1, keepdims=True))
    return weights @ values / weights.sum(1, keepdims=True)


def _rescalings(scores, block, threshold):
    """Counted row by row, from the definition."""
    count = 0
    for row in scores:
        shift = -np.inf
        for n in range(0, len(row), block):
            top = row[n : n + block].max()
            if shift == -np.inf:
                shift = top
            elif top > shift + threshold:
                shift, count = top, count + 1
    return count


def _cases():
    rng = np.random.default_rng(12)
    values = rng.standard_normal((128, 4))
    normal = 2 * rng.standard_normal((8, 128))
    steep = np.repeat(np.arange(16), 8)[None, :]
    late = normal.copy()
    late[:4, :20] = -np.inf  # these rows see nothing in the first two tiles
    yield "N(0, 4) scores", normal, values
    yield "scores that rise by 3 a tile", normal + 3.0 * steep, values
    yield "scores that fall by 30 a tile", normal - 30.0 * steep, values
    yield "scores up to 30000", 300.0 * normal + 2000.0 * steep, values
    yield "rows that see nothing in the first tiles", late, values


def check_lazy_attention(lazy_attention):
    """Exact for every threshold, with just the rescalings that the threshold asks for."""
    for name, scores, values in _cases():
        for threshold in (0, 3, 8):
            case = f"{name}, threshold {threshold}"
            with np.errstate(invalid="ignore", over="ignore"):
                answer = lazy_attention(_tiles(scores, values, 8), threshold)
            assert isinstance(answer, tuple) and len(answer) == 2, (
                f"{case}: expected (output, rescalings), got {type(answer).__name__}"
            )
            out, count = np.asarray(answer[0]), answer[1]
            assert out.shape == (8, 4), f"{case}: expected an output of shape (8, 4), got {out.shape}"
            error = np.abs(out - _truth(scores, values)).max()
            assert error < 1e-10, f"{case}: the output is off by {error:.1e}; does alpha use both shifts?"
            want = _rescalings(scores, 8, threshold)
            assert count == want, f"{case}: expected {want} rescalings, got {count}"


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

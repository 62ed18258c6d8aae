"""Checks of the exercises of chapter 07."""

from collections.abc import Callable

import numpy as np
import torch

from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape


def check_token_major(token_major: Callable) -> None:
    """`token_major(q, k, v)` of (B, S, H, D) -> the same shape: right, and from tensors where they are."""
    names = token_major.__globals__
    made = names.get("TensorDescriptor")
    assert made is not None, "expected descriptors made by TensorDescriptor beside token_major"
    for batch, heads, seqlen in ((1, 1, 64), (1, 3, 70), (2, 1, 33), (2, 3, 100)):
        q, k, v = make_inputs(Shape(batch, heads, seqlen, 32))
        oracle = Oracle(q, k, v, causal=True)
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        bases = []

        def noted(base, *how, bases=bases, **named):
            bases.append(base.data_ptr())
            return made(base, *how, **named)

        def from_tensor(tensor, block_shape, noted=noted):
            return noted(tensor, tensor.shape, tensor.stride(), block_shape)

        noted.from_tensor = from_tensor
        names["TensorDescriptor"] = noted
        try:
            out = token_major(q, k, v)
        finally:
            names["TensorDescriptor"] = made
        case = f"B={batch}, S={seqlen}, H={heads}"
        assert out.shape == q.shape, f"{case}: expected shape {tuple(q.shape)}, got {tuple(out.shape)}"
        verdict = oracle.judge(out.transpose(1, 2))
        assert verdict.ok, f"{case}: {verdict.reason}"
        for name, x in (("q", q), ("k", k), ("v", v), ("the output", out)):
            assert x.data_ptr() in bases, f"{case}: no descriptor of {name} itself: a copy was made"


def check_late_attention(late_attention):
    """The right output, from calls in an order that leaves the product of a tile under the next softmax."""
    rng = np.random.default_rng(7)
    for tiles in (1, 2, 5):
        scores = [4 * rng.standard_normal((8, 16)) for _ in range(tiles)]
        values = [rng.standard_normal((16, 4)) for _ in range(tiles)]
        calls = []

        def score(j, scores=scores, calls=calls):
            calls.append(f"scores {j}")
            return scores[j]

        def product(p, j, values=values, calls=calls):
            calls.append(f"values {j}")
            return p @ values[j]

        got = late_attention(score, product, tiles)
        assert isinstance(got, np.ndarray), f"expected an array of shape (8, 4), got {type(got).__name__}"
        assert got.shape == (8, 4), f"expected an array of shape (8, 4), got {got.shape}"
        flat = np.concatenate(scores, 1)
        weights = np.exp(flat - flat.max(1, keepdims=True))
        want = weights @ np.concatenate(values) / weights.sum(1, keepdims=True)
        error = np.abs(got - want).max()
        assert error < 1e-12, f"{tiles} tiles: the output is off by up to {error:.1e}"
        late = [call for j in range(1, tiles) for call in (f"scores {j}", f"values {j - 1}")]
        order = ["scores 0", *late, f"values {tiles - 1}"]
        assert calls == order, f"{tiles} tiles: expected the calls {', '.join(order)}; got {', '.join(calls)}"


def check_kept_keys(kept_keys: Callable) -> None:
    """`kept_keys(q, k, v, begin)`: dense attention to the keys from `begin` on; values before it are NaN."""
    for seqlen, begin in ((70, 0), (96, 0), (96, 32), (70, 64), (130, 32), (128, 96)):
        shape = Shape(1, 2, seqlen, 32, causal=False)
        q, k, v = make_inputs(shape)
        oracle = Oracle(q, k[:, :, begin:], v[:, :, begin:], causal=False)
        v[:, :, :begin] = torch.nan
        with np.errstate(all="ignore"):
            out = kept_keys(q, k, v, begin)
        verdict = oracle.judge(out)
        assert verdict.ok, f"S={seqlen}, begin={begin}, NaN in earlier values: {verdict.reason}"

"""Calls of `attention_pooled`, and their judgement: the output as any output, the map against fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnlib import attention_pooled
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape

RELATIVE, ABSOLUTE = 2e-3, 1e-6
"""Of a weight: its score and the LSE of its row are rounded in float32, by some 1e-7 of their magnitude,
which is up to thousands where inputs are large."""


@dataclass(frozen=True)
class PooledCase:
    """One call."""

    S: int = 200
    keys: int | None = None
    D: int = 32
    causal: bool = True
    block: int = 64
    heads: int = 2
    kv_heads: int = 1
    batch: int = 1
    dtype: str = "float16"
    sm_scale: float | None = None
    kind: str = "normal"
    impl: str | None = None

    def tensors(self, device: str) -> list[torch.Tensor]:
        """q, k, v."""
        shape = Shape(
            self.batch, self.heads, self.S, self.D, self.causal, self.dtype, self.kv_heads,
            self.keys or self.S,
        )  # fmt: skip
        return make_inputs(shape, self.kind, device=device)


def pooled_fp64(q: torch.Tensor, k: torch.Tensor, case: PooledCase) -> torch.Tensor:
    """The map from all weights, by a loop over its blocks."""
    (B, H, S, D), keys = q.shape, k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], 1)
    scores = (D**-0.5 if case.sm_scale is None else case.sm_scale) * q.double() @ k.double().mT
    if case.causal:
        place = torch.arange(S, device=q.device)[:, None] + keys - S
        scores = scores.masked_fill(torch.arange(keys, device=q.device) > place, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)  # a row that sees nothing
    down, across = -(-S // case.block), -(-keys // case.block)
    found = weights.new_zeros(B, H, down, across)
    for i in range(down):
        for j in range(across):
            rows, columns = (slice(n * case.block, (n + 1) * case.block) for n in (i, j))
            found[:, :, i, j] = weights[:, :, rows, columns].amax((2, 3))
    return found


def check(case: PooledCase, device: str = "cpu") -> None:
    """AssertionError if the output or the map is wrong."""
    q, k, v = case.tensors(device)
    out, found = attention_pooled(
        q, k, v, block=case.block, causal=case.causal, sm_scale=case.sm_scale, impl=case.impl
    )
    Oracle(q, k, v, case.causal, sm_scale=case.sm_scale).judge(out).raise_if_bad(str(case))
    truth = pooled_fp64(q, k, case)
    assert found.dtype == torch.float32 and found.shape == truth.shape
    torch.testing.assert_close(
        found.double(), truth, rtol=RELATIVE, atol=ABSOLUTE, msg=lambda text: f"{case}: {text}"
    )


CASES = {
    "causal": PooledCase(),
    "blocks of 128": PooledCase(S=300, block=128),
    "dense, ragged": PooledCase(S=70, keys=130, causal=False),
    "more keys": PooledCase(S=65, keys=200, kv_heads=2),
    "more queries": PooledCase(S=200, keys=70, block=128),
    "float32": PooledCase(S=100, D=16, dtype="float32"),
    "bfloat16": PooledCase(S=80, dtype="bfloat16", causal=False),
    "negative scale": PooledCase(S=130, sm_scale=-0.3),
    "large": PooledCase(S=130, kind="large"),
    "sink": PooledCase(S=130, kind="sink", batch=2),
    "one": PooledCase(S=1),
    "one key in the last block": PooledCase(S=1, keys=65, causal=False, heads=4),
}

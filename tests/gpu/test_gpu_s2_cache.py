"""S2Cache on a CUDA GPU: it generates past many blocks as the pattern says, and the host never waits."""

from __future__ import annotations

import pytest
import torch

from attnlib import S2Cache, S2Pattern
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("pattern", [S2Pattern(16), S2Pattern(16, 8, stride=16, dense_heads=2)],
                         ids=["published", "grouped, dense heads"])  # fmt: skip
def test_generating_without_a_wait(pattern: S2Pattern, device) -> None:
    prompt, length, D = 3000, 3600, 128
    shape = Shape(2, 16, length, D, True, "bfloat16", heads_kv=pattern.key_heads)
    q, k, v = make_inputs(shape, device=device)
    S2Cache(pattern, 2, D, 200, q.dtype, device).decode(*(x[:, :, :66] for x in (q, k, v)))  # compiles
    cache = S2Cache(pattern, 2, D, length, q.dtype, device)
    cache.append(k[:, :, :prompt], v[:, :, :prompt])
    cache.decode(*(x[:, :, prompt : prompt + 1] for x in (q, k, v)))
    torch.cuda.synchronize()
    before, found = torch.cuda.memory_allocated(), []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for t in range(prompt + 1, length):
            out = cache.decode(*(x[:, :, t : t + 1] for x in (q, k, v)))
            if t % 64 in (0, 1, 63):
                found.append((t, out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert cache.bytes == 2 * pattern.cache_bytes(length, D)
    mask = pattern.mask(length, device).to_dense()
    for t, out in found:
        oracle = Oracle(q[:, :, t : t + 1], k, v, mask=mask[:, :, t : t + 1].expand(2, -1, -1, -1))
        oracle.judge(out).raise_if_bad(f"token {t}")

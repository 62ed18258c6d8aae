"""The model of many GPUs: its limits, and what it says that no method can do."""

from __future__ import annotations

import pytest

from attnlib.bench.parallel_model import Call, Cluster, estimate

FAST = Cluster((600.0, 500.0), near=1e9, far=1e9, memory=1e9)
REAL = Cluster((600.0, 500.0))
CALL = Call(1 << 20, heads=32, kv_heads=32)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses", "hybrid"])
def test_links_without_a_limit_leave_the_kernels(method, which):
    for gpus in (1, 2, 8, 32):
        found = estimate(CALL, gpus, method, FAST, which)
        assert found.seconds == pytest.approx(found.kernels, rel=1e-3)
        alone = estimate(CALL, 1, method, FAST, which).seconds
        assert alone / found.seconds == pytest.approx(gpus, rel=1e-3)


def test_heads_limit_ulysses():
    assert estimate(CALL, 64, "ulysses", REAL) is None
    assert estimate(Call(1 << 20, 32, 4), 8, "hybrid", REAL) is None
    assert estimate(CALL, 1024, "hybrid", REAL) is not None


def test_a_ring_needs_rows_to_hide_its_transfers():
    efficiency = [estimate(Call(1 << bits), 64, "ring", REAL).efficiency for bits in (16, 18, 21, 24)]
    assert efficiency == sorted(efficiency) and efficiency[0] < 0.5 and efficiency[-1] > 0.95


def test_memory():
    """That of a ring is what two ranks hold, that of gathered keys grows with their number."""
    ring = [estimate(Call(tokens := 65536 * gpus), gpus, "ring", REAL).bytes for gpus in (2, 8, 64)]
    assert len(set(ring)) == 1 and tokens
    gathered = [estimate(Call(65536 * gpus), gpus, "all_gather", REAL).bytes for gpus in (2, 8, 64)]
    assert gathered == sorted(set(gathered))


def test_the_hybrid_sends_less_between_nodes():
    call = Call(1 << 20, 32, 8)
    assert estimate(call, 64, "hybrid", REAL).seconds < estimate(call, 64, "ring", REAL).seconds

"""What `python -m attnlib.bench.fp8_errors --shift` says of shifts of P."""

from __future__ import annotations

from attnlib.bench import fp8_errors


def test_kept_shifts_cost_no_more_than_lagging_ones() -> None:
    """They follow at least as often, and then to the largest score. A step that looks it up is one in which
    a warp's weights would be too large, or nearly."""
    found = {(row["inputs"], row["shift"]): row for row in fp8_errors.shift_rows(512, 64, rows=32)}
    kinds = {kind for kind, _ in found}
    assert len(kinds) == 5
    for kind in kinds:
        usual, kept, close = (
            found[kind, name] for name in ("as the kernel", "kept", "follows every maximum")
        )
        assert 0.9 * close["rms"] <= kept["rms"] <= 1.05 * usual["rms"], kind
        assert 0 <= kept["steps"] <= 1
    assert found["16 times N(0, 1)", "kept"]["steps"] > found["N(0, 1)", "kept"]["steps"]

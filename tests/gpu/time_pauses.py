"""Time how often a warpgroup of the Hopper backward pass pauses between its additions to dQ, on this GPU.

    ATTNLIB_FA3=... python tests/gpu/time_pauses.py    less than a minute; figures/data/<gpu>/pauses.json

Table `pauses`: calls of chapter 19's plane, 4096 tokens, bfloat16, shuffled rounds with cold L2. Forms: what
calls get, and the same without pauses ("0"), with one after each addition of a thread ("1"), after every
second, third, fourth and eighth; and FlashAttention-3 where ATTNLIB_FA3 names its library. Nothing else
differs between the forms of a call, and the one that a call gets is timed under both names. ms and TFLOP/s,
medians, and round_ms. The gradients are judged before and after, the last key head against fp64 and all
heads against the first form's. Nothing wrong is timed. Status 0 when all were right, 1 otherwise, 2 without
a Hopper GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import forms_record  # noqa: E402
import tune_backward  # noqa: E402
from tuned_forms import Rounds  # noqa: E402

from attnlib.bench.plane import Cell  # noqa: E402
from attnlib.kernels.hopper.configs_backward import HopperBackwardConfig  # noqa: E402

RECORD = "pauses"
NAMES = [f"{columns}-{kind}-4096" for columns in (256, 192, 160, 128)
         for kind in ("causal", "dense", "window", "gqa8")]  # fmt: skip
CELLS = [tune_backward.cell_of(name) for name in NAMES]
EVERY = 0, 1, 2, 3, 4, 8
ROUNDS = 8


def forms_of(cell: Cell) -> dict[str, HopperBackwardConfig]:
    config = tune_backward.default_of(cell)
    return {"as calls get it": config} | {str(n): replace(config, pause_every=n) for n in EVERY}


def pauses(cell: Cell) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a call, and what is wrong."""
    return tune_backward.rows(cell, forms_of(cell), Rounds(ROUNDS))


def main(argv: Sequence[str] | None = None) -> int:
    return forms_record.write(
        RECORD, argv, "Time pauses between additions to dQ.",
        compiled=lambda: tune_backward.compile_all(dict(zip(NAMES, map(forms_of, CELLS), strict=True))),
        method={"statistic": f"median of {ROUNDS} shuffled rounds, cold L2"},
        tables={"pauses": (pauses, CELLS)},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

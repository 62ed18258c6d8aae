"""Time how often a warpgroup of the Hopper backward pass pauses between its additions to dQ, on this GPU.

    ATTNLIB_FA3=... python tests/gpu/time_pauses.py    not run yet; figures/data/<gpu>/pauses.json

Table `pauses`: calls of chapter 19's plane, 4096 tokens, bfloat16, shuffled rounds with cold L2. Forms: what
calls get, and the same without pauses ("0"), with one after each addition of a thread ("1"), after every
second, fourth and eighth; and FlashAttention-3 where ATTNLIB_FA3 names its library. Nothing else differs
between the forms of a call, and the one that a call gets is timed under both names. ms and TFLOP/s, medians,
and round_ms. The gradients are judged before and after, the last key head against fp64 and all heads against
the first form's. Nothing wrong is timed. Status 0 when all were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import tune_backward  # noqa: E402

from attnlib.bench import records  # noqa: E402
from attnlib.bench.plane import Cell  # noqa: E402
from attnlib.kernels.hopper.configs_backward import HopperBackwardConfig  # noqa: E402

RECORD = TABLE = "pauses"
NAMES = [f"{columns}-{kind}-4096" for columns in (256, 192, 160, 128)
         for kind in ("causal", "dense", "window", "gqa8")]  # fmt: skip
CELLS = [tune_backward.cell_of(name) for name in NAMES]
EVERY = 0, 1, 2, 4, 8
ROUNDS = 8


def forms_of(cell: Cell) -> dict[str, HopperBackwardConfig]:
    config = tune_backward.default_of(cell)
    return {"as calls get it": config} | {str(n): replace(config, pause_every=n) for n in EVERY}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time pauses between additions to dQ.")
    parser.add_argument("--out", type=Path, help=f"(default: figures/data/<gpu>/{RECORD}.json)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    wrong = tune_backward.compile_all(NAMES, forms_of)
    header = records.provenance({
        "statistic": f"median of {ROUNDS} shuffled rounds, cold L2",
        "flops": "10*B*H*pairs*D; pairs: S^2, S^2/2 when causal, with a window those that see each other",
    })  # fmt: skip
    path = records.report_path(RECORD, header, args.out)
    rows: list[dict[str, Any]] = []
    for cell in CELLS:
        found, bad = tune_backward.rows(cell, forms_of(cell), ROUNDS)
        rows, wrong = rows + found, wrong + bad
        for row in found:
            print(f"{cell.label:40} {row['form']:16} {row['ms']:7.3f} ms {row['tflops']:4.0f} TFLOP/s")
        print(*bad, sep="\n", flush=True)
        records.add_table(path, header, TABLE, rows)
        torch.cuda.empty_cache()
    print(path)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

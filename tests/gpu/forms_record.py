"""What `time_order.py` and `time_pauses.py` have in common: a record of forms of the Hopper backward pass."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib.bench import records  # noqa: E402
from attnlib.bench.plane import Cell  # noqa: E402

FLOPS = "10*B*H*pairs*D; pairs: S^2, S^2/2 when causal, with a window those that see each other"


Measure = Callable[[Cell], tuple[list[dict[str, Any]], list[str]]]
"""The rows of a call, and what is wrong."""


def write(
    record: str, argv: Sequence[str] | None, description: str, compiled: Callable[[], list[str]],
    method: Mapping[str, str], tables: Mapping[str, tuple[Measure, Sequence[Cell]]],
) -> int:  # fmt: skip
    """Measure the tables of a record, which is written after each call.

    Args:
        record: its name, without ".json".
        argv: of the script.
        description: of the script, for its --help.
        compiled: compiles what is measured, and returns what failed.
        method: how it is measured, for the record.
        tables: by name, what measures a call, and the calls.

    Returns:
        The status of the script: 0 when all forms were right, 1 otherwise, 2 without a Hopper GPU.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, help=f"(default: figures/data/<gpu>/{record}.json)")
    args = parser.parse_args(argv)
    if no_hopper():
        return 2
    wrong = compiled()
    header = records.provenance({**method, "flops": FLOPS})
    path = records.report_path(record, header, args.out)
    for name, (measure, cells) in tables.items():
        rows: list[dict[str, Any]] = []
        for cell in cells:
            found, bad = measure(cell)
            rows, wrong = rows + found, wrong + bad
            print(*map(show, found), *bad, sep="\n", flush=True)
            records.add_table(path, header, name, rows)
            torch.cuda.empty_cache()
    print(path)
    return int(bool(wrong))


def show(row: dict[str, Any]) -> str:
    text = f"D{row['head_dim']} S{row['seqlen']} {row['kind']:7} {row['form']:19} {row['ms']:8.3f} ms"
    text += f" {row['tflops']:4.0f} TFLOP/s"
    if "clocks" in row:
        text += f" {row['sm_mhz']:5.0f} MHz {row['watts']:4.0f} W {row['clocks']:5.0f} clocks"
    return text

"""Time the order of a program's two consumers in the Hopper backward pass, on this GPU.

    ATTNLIB_FA3=... python tests/gpu/time_order.py    some 60 s; figures/data/<gpu>/consumer_order.json

Forms: one tile a program, or programs that stay on their SM ("stays"); consumers that nothing keeps apart,
or that start their products in turns, kept by barriers, or of which the second begins `DELAY` clocks later.
Nothing else differs between the forms of a call.

Table `bursts`: calls of chapter 19's plane, bfloat16, shuffled rounds with cold L2, and FlashAttention-3
where ATTNLIB_FA3 names its library: ms and TFLOP/s, medians, and round_ms. Table `sustained`: D = 128, 65536
tokens, back to back at the card's power limit; and what its SMs do then: sm_mhz, watts, and clocks, those of
an SM for a step of 64 queries and 128 keys. The gradients are judged before and after, the last key head
against fp64 and all heads against the first form's; for 65536 tokens against the first form's alone. Nothing
wrong is timed. Status 0 when all were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

import forms_record  # noqa: E402
import tune_backward  # noqa: E402
from tuned_forms import Rounds  # noqa: E402

from attnlib.bench import timing  # noqa: E402
from attnlib.bench.plane import ALL as KINDS  # noqa: E402
from attnlib.bench.plane import Cell  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels.hopper.configs_backward import HopperBackwardConfig, hopper_backward_config  # noqa: E402

RECORD = "consumer_order"
NAMES = [f"{columns}-{kind}-4096" for columns in (64, 96, 128) for kind in ("causal", "window", "dense")]
CELLS = [tune_backward.cell_of(name) for name in NAMES]
LONG = [Cell(kind, Shape(1, 4, 65536, 128, KINDS[kind].causal, "bfloat16")) for kind in ("causal", "dense")]
DELAY = 1200
ROUNDS, LONG_ROUNDS, LONG_MS = 8, 3, 800
STEP = 10 * 64 * 128 * 128
"""FLOPs of a step at D = 128."""


def forms_of(cell: Cell) -> dict[str, HopperBackwardConfig]:
    """At D = 64 with dQ in bulk, and under a mask with P masked early and whole for dS, as such calls have it
    where consumers take turns."""
    masked = KINDS[cell.kind].causal
    config = hopper_backward_config(cell.shape.head_dim)
    if cell.shape.head_dim == 64:
        config = replace(config, stagger=0, bulk=True, early_mask=masked, half_p=not masked)
    later = {"masked_stagger" if masked else "stagger": DELAY}
    return {
        "one tile": config,
        "one tile, later": replace(config, **later),
        "one tile, in turns": replace(config, alternate=True),
        "stays": replace(config, persistent=True),
        "stays, in turns": replace(config, persistent=True, alternate=True),
    }


def bursts(cell: Cell) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a call, and what is wrong."""
    return tune_backward.rows(cell, forms_of(cell), Rounds(ROUNDS))


def sustained(cell: Cell) -> tuple[list[dict[str, Any]], list[str]]:
    """The same, back to back."""
    tensors = tune_backward.inputs(cell)
    calls: dict[str, Callable] = tune_backward.calls_of(cell, forms_of(cell), *tensors)
    first, bad = calls["one tile"](), []
    for form in list(calls):
        for name, mine, one in zip(("dq", "dk", "dv"), calls[form](), first, strict=True):
            away = (mine.float() - one.float()).norm() / one.float().norm()
            if not away < 1e-2:
                bad.append(f"WRONG {cell.label} {form}: {name} is {away:.1e} from the first form's")
                calls.pop(form, None)
    tune_backward.add_peer(calls, cell, *tensors)
    found: dict[str, list[timing.Sustained]] = {form: [] for form in calls}
    for number in range(LONG_ROUNDS):
        for form in random.Random(number).sample(list(calls), len(calls)):
            found[form].append(timing.sustained(calls[form], LONG_MS))
    rows, sms = [], torch.cuda.get_device_properties(0).multi_processor_count
    for form, results in found.items():
        ms, mhz, watts = zip(*results, strict=True)
        row = tune_backward.row_of(cell, form, list(ms))
        if None not in mhz:
            row |= {"sm_mhz": statistics.median(mhz), "watts": statistics.median(watts)}
            row["clocks"] = row["ms"] * row["sm_mhz"] * 1e3 * sms / (cell.flops("backward") / STEP)
        rows.append(row)
    return rows, bad


def main(argv: Sequence[str] | None = None) -> int:
    return forms_record.write(
        RECORD, argv, "Time the order of the backward pass's consumers.",
        compiled=lambda: tune_backward.compile_all(dict(zip(NAMES, map(forms_of, CELLS), strict=True))),
        method={
            "bursts": f"median of {ROUNDS} shuffled rounds, cold L2",
            "sustained": f"median of {LONG_ROUNDS} rounds of {LONG_MS} ms back to back; clock and power: "
            "second half of a round",
        },
        tables={"bursts": (bursts, CELLS), "sustained": (sustained, LONG)},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

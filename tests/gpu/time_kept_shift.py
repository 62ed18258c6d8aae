"""Judge and time the forward Hopper kernel with `keep_shift` on this GPU, beside itself without, and FA3.

    python tests/gpu/time_kept_shift.py              some 110 s; figures/data/<gpu>/kept_shift.json
    python tests/gpu/time_kept_shift.py --dims 64    one head dimension alone, some 60 s
    python tests/gpu/time_kept_shift.py --seconds 60 begin nothing after so many, and say what is left out

Table `judged`, before anything is timed: outputs and LSE against fp64, fp16 and bf16, for inputs of many
kinds (`KINDS`), where warps seldom, sometimes and always need a new shift. Table `calls`: a row for each
shape and implementation, eight shuffled rounds, cold L2: a configuration without, and kept; at D = 64 three
tiles; at D = 128 kept also with the wait for P V before all exponentials; FlashAttention-3; last the control.
Table `rising`: scores that rise by more than 2^8 in each block that a row visits, so that every warp takes
the slow path in every step. First, processes side by side compile. The record is written after each shape.
Status 0 when all of attnlib's were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib.bench import harness, records, verdict  # noqa: E402
from attnlib.bench.oracle import INPUTS, Oracle, make_inputs  # noqa: E402
from attnlib.bench.setting import Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels import hopper  # noqa: E402
from attnlib.kernels.hopper.configs import (  # noqa: E402
    M128N128,
    M192N128,
    M256N64,
    HopperConfig,
    hopper_config,
)
from attnlib.params import Params, mask_window  # noqa: E402

DEVICE = "cuda"
ROUNDS = Setting("book, eight rounds", rounds=8)
KEPT = ", kept"
RISING = "rising"
KINDS = [*INPUTS, RISING]
JUDGED = 1024  # tokens
TILES: dict[int, dict[str, HopperConfig]] = {
    64: {"M256N64": M256N64, "M192N128": M192N128, "M128N128": M128N128},
    128: {"M128N128": hopper_config(128)},
    256: {"M128N64": hopper_config(256)},
    96: {"M192N64": hopper_config(96)},
    192: {"M128N64": hopper_config(192)},
    80: {"M192N64": hopper_config(80)},
}
SHAPES = [
    Shape(4, 32, 4096, 64), Shape(1, 32, 16384, 64), Shape(4, 32, 4096, 64, causal=False),
    Shape(16, 32, 1024, 64), Shape(4, 16, 4096, 128), Shape(1, 16, 16384, 128),
    Shape(4, 16, 4096, 128, causal=False), Shape(4, 8, 4096, 256), Shape(4, 8, 4096, 256, causal=False),
    *(Shape(4, 16, 4096, head_dim, causal) for head_dim in (96, 192, 80) for causal in (True, False)),
    Shape(1, 32, 512, 64),
]  # fmt: skip
"""The most important of each head dimension first."""


def configs(head_dim: int) -> dict[str, HopperConfig]:
    found = {}
    for name, config in TILES[head_dim].items():
        found |= {name: replace(config, keep_shift=False), name + KEPT: replace(config, keep_shift=True)}
        if config.late_wait and head_dim == 128:
            found[f"{name}{KEPT}, early wait"] = replace(config, keep_shift=True, late_wait=False, pin=False)
    return found


def with_config(config: HopperConfig, q, k, v, causal: bool, sm_scale: float, lse: bool = False):
    params = Params(mask_window(causal, None), sm_scale, return_lse=lse, config=config)
    found = hopper.forward(q, k, v, params)
    return found if lse else found[0]


def tensors_of(shape: Shape, kind: str) -> tuple[torch.Tensor, ...]:
    """q, k, v; rising: as a row goes over its keys, from the last one on, scores grow by 16 each 64."""
    if kind != RISING:
        return make_inputs(shape, kind, device=DEVICE)
    q, k, v = make_inputs(shape, device=DEVICE)
    q[..., 0], size = shape.head_dim**0.5, shape.seqlen // 64
    k[..., 0] = 16.0 * (size - torch.arange(shape.seqlen, device=DEVICE) // 64).to(k.dtype)
    return q, k, v


def judged(head_dim: int) -> Iterator[dict[str, Any]]:
    """Outputs and LSE of kept shifts, small calls."""
    cases = product(("float16", "bfloat16"), KINDS, (True, False))
    for (dtype, kind, causal), (name, config) in product(cases, configs(head_dim).items()):
        if not config.keep_shift:
            continue
        shape = Shape(1, 2, JUDGED, head_dim, causal, dtype)
        q, k, v = tensors_of(shape, kind)
        out, lse = with_config(config, q, k, v, causal, head_dim**-0.5, lse=True)
        found = Oracle(q, k, v, causal).judge(out, lse)
        yield {
            "impl": name, **shape.to_dict(), "inputs": kind, "status": "ok" if found.ok else "wrong",
            "reason": found.reason, "max_error": found.max_error, "budget_max": found.budget.max,
            "rms_error": found.rms_error, "budget_rms": found.budget.rms,
        }  # fmt: skip


def timed(shape: Shape, kind: str) -> list[dict[str, Any]]:
    own = configs(shape.head_dim)
    implementations = {name: partial(with_config, config) for name, config in own.items()}
    if kind != RISING:
        implementations["fa3"] = None

    def start(shape: Shape):
        tensors = tensors_of(shape, kind)
        return tensors, Oracle(*tensors, shape.causal)

    return harness.collect_runs(harness.Run, start, implementations, [shape], ROUNDS, next(iter(own)))


def told(rows: list[dict[str, Any]], shape: Shape, header: dict[str, Any]) -> Iterator[str]:
    """Each implementation, and how much faster than the first of its tile it is, with its noise."""
    table = records.Table.of("calls", rows, header, False)
    for row in table.rows:
        name = row["impl"]
        if "ms" not in row:
            yield f"  {name:28} {row['status']} {row.get('reason', '')}"
            continue
        line = f"  {name:28} {row['ms']:8.4f} ms {row['tflops']:6.1f} TFLOP/s"
        if KEPT in name:
            line += f"  over it without: {verdict.judge(table, shape, name, name.split(KEPT)[0])}"
            if any(other["impl"] == "fa3" and "ms" in other for other in table.rows):
                line += f"  over FA3: {verdict.judge(table, shape, name, 'fa3')}"
        yield line


def compile_one(head_dim: int, name: str, causal: bool) -> None:
    """In a child: what it compiles stays in Triton's cache."""
    for dtype, lse in (("float16", False), ("float16", True), ("bfloat16", True)):
        config = configs(head_dim)[name]
        if lse and not config.keep_shift:
            continue
        q, k, v = make_inputs(Shape(1, 1, 512, head_dim, causal, dtype), device=DEVICE)
        with_config(config, q, k, v, causal, head_dim**-0.5, lse)
    torch.cuda.synchronize()


def compile_all(dims: Sequence[int]) -> None:
    work = [(d, name, causal) for causal, d in product((True, False), dims) for name in configs(d)]
    children = min(len(work), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*work, strict=True)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Judge and time kept shifts.")
    parser.add_argument("--dims", type=int, nargs="+", choices=list(TILES), default=list(TILES))
    parser.add_argument("--seconds", type=float, default=150, help="begin nothing after so many")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/kept_shift.json)")
    args, begin = parser.parse_args(argv), time.monotonic()
    if no_hopper():
        return 2
    compile_all(args.dims)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    header = records.provenance(harness.method(ROUNDS, "the first configuration"))
    path = records.report_path("kept_shift", header, args.out)
    tables: dict[str, list[dict[str, Any]]] = {"judged": [], "calls": [], "rising": []}
    left_out = []

    def keep(table: str, rows: list[dict[str, Any]]) -> None:
        tables[table] += rows
        records.add_table(path, {"notebook": "kept_shift", **header}, table, tables[table])

    for head_dim in args.dims:
        keep("judged", list(judged(head_dim)))
    bad = [row for row in tables["judged"] if row["status"] != "ok"]
    print(f"judged: {len(tables['judged'])}, wrong: {len(bad)}, {time.monotonic() - begin:.0f} s", flush=True)
    for row in bad:
        print(f"WRONG {Shape.of_row(row).label} {row['inputs']} {row['impl']}: {row['reason']}", flush=True)
    shapes = [(shape, "normal") for shape in SHAPES if shape.head_dim in args.dims]
    shapes.insert(1, (replace(shapes[0][0], batch=1), RISING))
    for shape, kind in shapes:
        label = f"{shape.label}, {kind}"
        if time.monotonic() - begin > args.seconds:
            left_out.append(label)
            continue
        rows = timed(shape, kind)
        keep(RISING if kind == RISING else "calls", rows)
        print(f"{label}, {time.monotonic() - begin:.0f} s", *told(rows, shape, header), sep="\n", flush=True)
        torch.cuda.empty_cache()
    if left_out:
        print(f"left out, as {args.seconds:g} s were over:", *left_out, sep="\n  ")
    rows = [row for table in tables.values() for row in table if row["impl"] != "fa3"]
    print(path)
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

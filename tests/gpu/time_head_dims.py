"""Time head dimensions that are no powers of two on this GPU, forward: in two parts, padded, and the peers.

    python tests/gpu/time_head_dims.py               some 70 s; figures/data/<gpu>/head_dims.json
    python tests/gpu/time_head_dims.py --seconds 40  begin nothing after so many, and say what is left out
    python tests/gpu/time_head_dims.py --tune        configurations of attnlib beside each other; no record

Table `calls`, a row for each shape and implementation, causal and dense, fp16, in eight shuffled rounds with
cold L2: "attnlib" as a call gets it; "padded", its kernel at the next power of two (at D = 112 the two are
the same, a second control); FlashAttention-3; cuDNN. The last row of a shape is attnlib's control. Outputs
are judged against fp64 before and after. First, processes side by side compile. The record is written after
each shape. Status 0 when all of attnlib's were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention  # noqa: E402
from attnlib.bench import harness, records, verdict  # noqa: E402
from attnlib.bench.oracle import make_inputs  # noqa: E402
from attnlib.bench.setting import SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels import hopper  # noqa: E402
from attnlib.kernels.common.tiles import tile_width  # noqa: E402
from attnlib.kernels.hopper.configs import SPLIT, HopperConfig, SplitConfig, hopper_config  # noqa: E402
from attnlib.params import Params, mask_window  # noqa: E402

OURS, PADDED = "attnlib", "padded"
ROUNDS = Setting("book, eight rounds", rounds=8)
SHAPES = [  # those of one kernel behind one another; the longest last
    Shape(1, 40, 6000, 80), Shape(2, 16, 4000, 96), Shape(2, 16, 3000, 192), Shape(1, 40, 6000, 72),
    Shape(2, 16, 3000, 160), Shape(2, 16, 4000, 112),
    Shape(2, 16, 8192, 80), Shape(2, 16, 8192, 96), Shape(2, 16, 8192, 192),
]  # fmt: skip
CALLS = [replace(shape, causal=causal) for shape in SHAPES for causal in (True, False)]

# ---------------------------------------------------------------- who is timed


def with_config(choose: Callable[[Shape], HopperConfig], q, k, v, causal: bool, sm_scale: float):
    """attnlib's kernel in a configuration that a call does not get."""
    shape = Shape(*q.shape, causal)
    params = Params(mask_window(causal, None), sm_scale, config=choose(shape))
    return hopper.forward(q, k, v, params)[0]


def padded_config(shape: Shape) -> HopperConfig:
    """That of as many columns as the next power of two has."""
    return hopper_config(tile_width(shape.head_dim), shape.seqlen, shape.batch * shape.heads, keys=shape.keys)


def ours(q, k, v, causal: bool, sm_scale: float):
    return attention(q, k, v, causal=causal, sm_scale=sm_scale)


def everybody(shape: Shape) -> dict[str, harness.Attention | None]:
    return {OURS: ours, PADDED: partial(with_config, padded_config), "fa3": None, "cudnn": None}


# ---------------------------------------------------------------- tuning

_TWO = {"late_wait": True, "pin": True, "named": True}
_THREE = {
    "joint": True, "pin": True, "consumer_registers": 160, "producer_registers": 32, "max_registers": 128
}  # fmt: skip
CANDIDATES = {  # name -> what to compare; all compile without spills and without serialized products
    "2 x 128": lambda columns, q: SplitConfig(128, 2, 2, 64, q, **_TWO, columns=columns),
    "2 x 128, early wait": lambda columns, q: SplitConfig(128, 2, 2, 64, q, named=True, columns=columns),
    "3 x 64": lambda columns, q: SplitConfig(64, 3, 4, 64, q, **_THREE, columns=columns),
    "3 x 64, late wait": lambda columns, q: SplitConfig(
        64, 3, 4, 64, q, late_wait=True, **_THREE, columns=columns
    ),
    "2 x 64": lambda columns, q: SplitConfig(64, 2, 2, 128, q, named=True, columns=columns),
    "2 x 64, late wait": lambda columns, q: SplitConfig(64, 2, 2, 128, q, **_TWO, columns=columns),
    "2 x 64, joint": lambda columns, q: SplitConfig(
        64, 2, 2, 128, q, named=True, pin=True, joint=True, columns=columns
    ),
}
FITTING = {  # columns -> the candidates whose registers and shared memory suffice
    (64, 16): ["2 x 128", "2 x 128, early wait", "3 x 64", "3 x 64, late wait"],
    (64, 32): ["2 x 128", "2 x 128, early wait", "3 x 64", "3 x 64, late wait"],
    (128, 32): ["2 x 128", "2 x 128, early wait", "2 x 64"],
    (128, 64): ["2 x 64", "2 x 64, late wait", "2 x 64, joint"],
}


def tuned(shape: Shape) -> dict[str, harness.Attention | None]:
    """All candidates that fit a head dimension, without and with a part of Q in registers, beside FA3; of
    more columns than it needs the first two, with."""
    widths = sorted((c for c in FITTING if c[0] < shape.head_dim <= sum(c)), key=sum)
    found = {"as it is": ours}
    for columns in widths:
        fits = columns == widths[0]
        for name, q in product(FITTING[columns][: None if fits else 2], (0, columns[0])):
            config = CANDIDATES[name](columns, q)
            label = f"{columns[0]} + {columns[1]}, {name}, {q} of Q" + " *" * (config in SPLIT.values())
            if fits or q:
                found[label] = partial(with_config, lambda shape, config=config: config)
    return found | {"fa3": None}


# ---------------------------------------------------------------- command


def compile_call(shape: Shape, tune: bool) -> None:
    """In a child: what it compiles stays in Triton's cache."""
    small = replace(shape, batch=1, heads=1)  # the same kind: what depends on a length is that it has a tail
    tensors = make_inputs(small, device=harness.DEVICE)
    for function in (tuned if tune else everybody)(shape).values():
        if function is not None:
            function(*tensors, shape.causal, shape.head_dim**-0.5)
    torch.cuda.synchronize()


def compile_all(calls: Sequence[Shape], tune: bool) -> None:
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_call, calls, [tune] * len(calls)))


def ratios(rows: list[dict[str, Any]], shape: Shape, header: dict[str, Any], first: str) -> Iterator[str]:
    """What the times say: each implementation, and how much faster `first` is, with its noise."""
    table = records.Table.of("calls", rows, header, False)
    for row in table.rows:
        speed = f"{row['ms']:8.4f} ms {row['tflops']:6.1f} TFLOP/s" if "ms" in row else row["status"]
        if row["impl"] != first:
            speed += f"  {first} against it: {verdict.judge(table, shape, first, row['impl'])}"
        yield f"  {row['impl']:36} {speed}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time head dimensions that are no powers of two.")
    parser.add_argument("--tune", action="store_true", help="time configurations of attnlib; write no record")
    parser.add_argument("--seconds", type=float, default=80,
                        help="begin nothing after so many (default: %(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/head_dims.json)")
    args, begin = parser.parse_args(argv), time.monotonic()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    calls = [shape for shape in CALLS if not args.tune or shape.head_dim not in (72, 112)]
    setting, control = (SWEEP, "as it is") if args.tune else (ROUNDS, OURS)
    compile_all(calls, args.tune)
    print(f"compiled after {time.monotonic() - begin:.0f} s\n", flush=True)
    header = records.provenance(harness.method(setting, control))
    path, found, left_out = records.report_path("head_dims", header, args.out), [], []
    for shape in calls:
        if time.monotonic() - begin > args.seconds:
            left_out.append(shape.label)
            continue
        rows = harness.collect(
            tuned(shape) if args.tune else everybody(shape), [shape], setting=setting, control=control
        )
        found += rows
        print(shape.label, *ratios(rows, shape, header, control), sep="\n", flush=True)
        if not args.tune:
            records.write_report(path, {"notebook": "head_dims", **header}, {"calls": {"rows": found}})
        torch.cuda.empty_cache()
    if left_out:
        print(f"left out, as {args.seconds:g} s were over:", *left_out, sep="\n  ")
    mine = [row for row in found if row["impl"] not in ("fa3", "cudnn")]
    for row in (row for row in mine if row["status"] != "ok"):
        print(f"{Shape.of_row(row).label} {row['impl']}: {row['status']} {row.get('reason', '')}")
    return int(any(row["status"] != "ok" for row in mine))


if __name__ == "__main__":
    sys.exit(main())

"""Time head dimensions that are no powers of two on this GPU, in two parts, padded, and the peers; and values
with a head dimension of their own.

    python tests/gpu/time_head_dims.py                  some 180 s; figures/data/<gpu>/head_dims.json
    python tests/gpu/time_head_dims.py --pass backward  one of the tables alone; the others stay as they are
    python tests/gpu/time_head_dims.py --pass values values_backward    values alone
    python tests/gpu/time_head_dims.py --seconds 40     begin nothing after so many, and say what is left out
    python tests/gpu/time_head_dims.py --pass deterministic --seconds 540   gradients with the same bits

Table `calls`, the forward pass, and table `backward`: a row for each shape and implementation, causal and
dense, fp16, in eight shuffled rounds with cold L2: "attnlib" as a call gets it; "padded", its kernel at the
next power of two (at D = 112 the two are the same, a second control); FlashAttention-3; cuDNN. The last row
of a shape is attnlib's control. Tables `values` and `values_backward`: the same of values with columns of
their own, where "padded" fills the narrower ones of both up with zeros, in the time that counts. Table
`deterministic`: the backward pass at each width that has a kernel with an order of sums, as a call gets it,
with `deterministic=True`, the same by the portable kernels, and FlashAttention-3 both ways. Outputs and
gradients are judged against fp64 before and after. First, processes side by side compile. The record is
written after each shape. Status 0 when all of attnlib's were right, 1 otherwise, 2 without a Hopper GPU.
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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention  # noqa: E402
from attnlib.bench import backward, harness, peers, records, verdict  # noqa: E402
from attnlib.bench.oracle import make_inputs  # noqa: E402
from attnlib.bench.setting import Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels import hopper  # noqa: E402
from attnlib.kernels.common.tiles import tile_width  # noqa: E402
from attnlib.kernels.hopper.configs import hopper_config  # noqa: E402
from attnlib.kernels.hopper.configs_backward import hopper_backward_config  # noqa: E402
from attnlib.params import Params, mask_window  # noqa: E402

OURS, PADDED = "attnlib", "padded"
ROUNDS = Setting("book, eight rounds", rounds=8)
SHAPES = [  # those of one kernel behind one another; the longest last
    Shape(1, 40, 6000, 80), Shape(2, 16, 4000, 96), Shape(2, 16, 3000, 192), Shape(1, 40, 6000, 72),
    Shape(2, 16, 3000, 160), Shape(2, 16, 4000, 112),
    Shape(2, 16, 8192, 80), Shape(2, 16, 8192, 96), Shape(2, 16, 8192, 192),
]  # fmt: skip
VALUES = [  # the first of DeepSeek V3: 128 heads
    Shape(1, 128, 4096, 192, head_dim_v=128), Shape(2, 16, 8192, 192, head_dim_v=128),
    Shape(2, 16, 8192, 128, head_dim_v=64), Shape(2, 16, 8192, 64, head_dim_v=128),
    Shape(2, 16, 8192, 64, head_dim_v=256),
]  # fmt: skip
IN_ORDER = "attnlib_deterministic"
FA3_IN_ORDER = "fa3_deterministic"
TOKENS = [
    Shape(16384 // seqlen, 2048 // head_dim, seqlen, head_dim)
    for seqlen in (1024, 4096, 16384) for head_dim in (64, 96, 128, 160, 192, 256)
]  # fmt: skip

# ---------------------------------------------------------------- who is timed


def padded(q, k, v, causal: bool, sm_scale: float):
    """attnlib's kernel with as many columns as the next power of two has."""
    B, H, S_q, D = q.shape
    config = hopper_config(tile_width(D), S_q, B * H, keys=k.shape[2])
    return hopper.forward(q, k, v, Params(mask_window(causal, None), sm_scale, config=config))[0]


class PaddedBackward(torch.autograd.Function):
    """attnlib's kernels, the backward one with as many columns as the next power of two has."""

    @staticmethod
    def forward(ctx, q, k, v, params: Params):
        out, lse = hopper.forward(q, k, v, params)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.params = params._replace(config=hopper_backward_config(tile_width(q.shape[-1])))
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        return *hopper.backward(d_out, q, k, v, out, lse, ctx.params), None


def padded_backward(q, k, v, causal: bool, sm_scale: float):
    B, H, S_q, D = q.shape
    own = hopper_config(D, S_q, B * H, keys=k.shape[2])
    return PaddedBackward.apply(
        q, k, v, Params(mask_window(causal, None), sm_scale, return_lse=True, config=own)
    )


def filled_up(q, k, v, causal: bool, sm_scale: float):
    """Values of D columns and their own, filled up with zeros to the wider of both."""
    width, own = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return attention(q, k, v, causal=causal, sm_scale=sm_scale)[..., :own]


def ours(q, k, v, causal: bool, sm_scale: float):
    return attention(q, k, v, causal=causal, sm_scale=sm_scale)


def everybody(shape: Shape) -> dict[str, harness.Attention | None]:
    return {OURS: ours, PADDED: padded, "fa3": None, "cudnn": None}


def everybody_backward(shape: Shape) -> dict[str, harness.Attention | None]:
    return {OURS: ours, PADDED: padded_backward, "fa3": None, "cudnn": None}


def everybody_values(shape: Shape) -> dict[str, harness.Attention | None]:
    return {OURS: ours, PADDED: filled_up, "fa3": None, "cudnn": None}


def in_order(q, k, v, causal: bool, sm_scale: float, impl: str = "hopper"):
    return attention(q, k, v, causal=causal, sm_scale=sm_scale, deterministic=True, impl=impl)


def everybody_in_order(shape: Shape) -> dict[str, harness.Attention | None]:
    peers.PEERS[FA3_IN_ORDER] = replace(peers.fa3(deterministic=True), name=FA3_IN_ORDER)
    portable = partial(in_order, impl="triton")
    return {OURS: ours, IN_ORDER: in_order, "attnlib-triton": portable, "fa3": None, FA3_IN_ORDER: None}


# ---------------------------------------------------------------- command


class Pass(NamedTuple):
    """The forward or the backward pass of some calls: the name of its table, who is timed, and how."""

    table: str
    everybody: Callable[[Shape], dict[str, harness.Attention | None]]
    collect: Callable[..., list[dict[str, Any]]]
    method: dict[str, str]
    shapes: list[Shape]


TIMED = "the backward alone"
_BACKWARD = {"timed": TIMED, "flops": "2.5 x 4*B*H*Sq*Sk*D, halved when causal"}
PASSES = {
    "forward": Pass("calls", everybody, harness.collect, {}, SHAPES),
    "backward": Pass("backward", everybody_backward, backward.collect, _BACKWARD, SHAPES),
    "values": Pass(
        "values", everybody_values, harness.collect,
        {"flops": "2*B*H*Sq*Sk*(D + Dv), halved when causal"}, VALUES,
    ),
    "values_backward": Pass(
        "values_backward", everybody_values, backward.collect,
        {"timed": TIMED, "flops": "2*B*H*Sq*Sk*(3*D + 2*Dv), halved when causal"}, VALUES,
    ),
    "deterministic": Pass("deterministic", everybody_in_order, backward.collect, _BACKWARD, TOKENS),
}  # fmt: skip


def compile_call(shape: Shape, way: str) -> None:
    """In a child: what it compiles stays in Triton's cache."""
    small = replace(shape, batch=1, heads=1)  # the same kind: what depends on a length is that it has a tail
    gradients = PASSES[way].collect is backward.collect
    tensors = [x.requires_grad_(gradients) for x in make_inputs(small, device=harness.DEVICE)]
    for function in PASSES[way].everybody(shape).values():
        if function is not None:
            out = function(*tensors, shape.causal, shape.head_dim**-0.5)
            if gradients:
                out.backward(out.detach())
    torch.cuda.synchronize()


def compile_all(calls: Sequence[tuple[Shape, str]]) -> None:
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_call, *zip(*calls, strict=True)))


def ratios(rows: list[dict[str, Any]], shape: Shape, header: dict[str, Any]) -> Iterator[str]:
    """What the times say: each implementation, and how much faster attnlib is, with its noise."""
    table = records.Table.of("timed", rows, header, False)
    for row in table.rows:
        speed = f"{row['ms']:8.4f} ms {row['tflops']:6.1f} TFLOP/s" if "ms" in row else row["status"]
        if row["impl"] != OURS:
            speed += f"  {OURS} against it: {verdict.judge(table, shape, OURS, row['impl'])}"
        yield f"  {row['impl']:36} {speed}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time head dimensions that are no powers of two.")
    parser.add_argument("--pass", dest="ways", choices=list(PASSES), nargs="+",
                        default=["forward", "backward"], help="which (default: the first two)")  # fmt: skip
    parser.add_argument("--dims", type=int, nargs="+", help="these head dimensions alone (default: all)")
    parser.add_argument("--seconds", type=float, default=240,
                        help="begin nothing after so many (default: %(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/head_dims.json)")
    args, begin = parser.parse_args(argv), time.monotonic()
    if no_hopper():
        return 2
    calls = [
        (replace(shape, causal=causal), way)
        for way in args.ways
        for shape in PASSES[way].shapes
        if args.dims is None or shape.head_dim in args.dims
        for causal in (True, False)
    ]
    compile_all(calls)
    print(f"compiled after {time.monotonic() - begin:.0f} s\n", flush=True)
    found, left_out = {way: [] for way in args.ways}, []
    for shape, way in calls:
        label = f"{shape.label}, {way}"
        if time.monotonic() - begin > args.seconds:
            left_out.append(label)
            continue
        one = PASSES[way]
        header = records.provenance(harness.method(ROUNDS, OURS) | one.method)
        rows = one.collect(one.everybody(shape), [shape], setting=ROUNDS, control=OURS)
        found[way] += rows
        print(label, *ratios(rows, shape, header), sep="\n", flush=True)
        records.add_table(records.report_path("head_dims", header, args.out), header, one.table, found[way])
        torch.cuda.empty_cache()
    if left_out:
        print(f"left out, as {args.seconds:g} s were over:", *left_out, sep="\n  ")
    mine = [row for rows in found.values() for row in rows if row["impl"] not in peers.PEERS]
    for row in (row for row in mine if row["status"] != "ok"):
        print(f"{Shape.of_row(row).label} {row['impl']}: {row['status']} {row.get('reason', '')}")
    return int(any(row["status"] != "ok" for row in mine))


if __name__ == "__main__":
    sys.exit(main())

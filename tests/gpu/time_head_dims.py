"""Time head dimensions that are no powers of two on this GPU, in two parts, padded, and the peers; and values
with a head dimension of their own.

    python tests/gpu/time_head_dims.py                  some 180 s; figures/data/<gpu>/head_dims.json
    python tests/gpu/time_head_dims.py --pass backward  one of the tables alone; the others stay as they are
    python tests/gpu/time_head_dims.py --pass values values_backward    values alone
    python tests/gpu/time_head_dims.py --seconds 40     begin nothing after so many, and say what is left out
    python tests/gpu/time_head_dims.py --pass deterministic --seconds 540   gradients with the same bits
    python tests/gpu/time_head_dims.py --tune           configurations of attnlib side by side; no record
    python tests/gpu/time_head_dims.py --pass deterministic --tune    likewise

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
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention  # noqa: E402
from attnlib.bench import backward, harness, peers, records, verdict  # noqa: E402
from attnlib.bench.oracle import make_inputs  # noqa: E402
from attnlib.bench.setting import SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels import hopper  # noqa: E402
from attnlib.kernels.common.tiles import tile_width  # noqa: E402
from attnlib.kernels.hopper import configs_backward  # noqa: E402
from attnlib.kernels.hopper.configs import (  # noqa: E402
    OWN_VALUES,
    SPLIT,
    HopperConfig,
    SplitConfig,
    hopper_config,
    own_values_config,
)
from attnlib.kernels.hopper.configs_backward import (  # noqa: E402
    HopperBackwardConfig,
    hopper_backward_config,
    own_values_backward_config,
)
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
    for seqlen in (4096, 16384) for head_dim in (64, 96, 128, 160, 192, 256)
]  # fmt: skip

# ---------------------------------------------------------------- who is timed


def with_config(choose: Callable[[Shape], HopperConfig], q, k, v, causal: bool, sm_scale: float):
    """attnlib's kernel in a configuration that a call does not get."""
    shape = Shape(*q.shape, causal, head_dim_v=v.shape[-1])
    params = Params(mask_window(causal, None), sm_scale, config=choose(shape))
    return hopper.forward(q, k, v, params)[0]


def padded_config(shape: Shape) -> HopperConfig:
    """That of as many columns as the next power of two has."""
    return hopper_config(tile_width(shape.head_dim), shape.seqlen, shape.batch * shape.heads, keys=shape.keys)


class Configured(torch.autograd.Function):
    """attnlib's kernels, of which the backward one has a configuration that a call does not get."""

    @staticmethod
    def forward(ctx, q, k, v, params: Params, config: HopperBackwardConfig):
        out, lse = hopper.forward(q, k, v, params)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.params = params._replace(config=config)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        return *hopper.backward(d_out, q, k, v, out, lse, ctx.params), None, None


def with_backward_config(
    choose: Callable[[Shape], HopperBackwardConfig], q, k, v, causal: bool, sm_scale: float
):
    shape = Shape(*q.shape, causal, head_dim_v=v.shape[-1])
    own = hopper_config(shape.head_dim, shape.seqlen, shape.batch * shape.heads, keys=shape.keys)
    if shape.head_dim_v is not None:
        own = own_values_config(shape.head_dim, shape.value_dim)
    params = Params(mask_window(causal, None), sm_scale, return_lse=True, config=own)
    return Configured.apply(q, k, v, params, choose(shape))


def padded_backward_config(shape: Shape) -> HopperBackwardConfig:
    return hopper_backward_config(tile_width(shape.head_dim))


def filled_up(q, k, v, causal: bool, sm_scale: float):
    """Values of D columns and their own, filled up with zeros to the wider of both."""
    width, own = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = (torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return attention(q, k, v, causal=causal, sm_scale=sm_scale)[..., :own]


def ours(q, k, v, causal: bool, sm_scale: float):
    return attention(q, k, v, causal=causal, sm_scale=sm_scale)


def everybody(shape: Shape) -> dict[str, harness.Attention | None]:
    return {OURS: ours, PADDED: partial(with_config, padded_config), "fa3": None, "cudnn": None}


def everybody_backward(shape: Shape) -> dict[str, harness.Attention | None]:
    padded = partial(with_backward_config, padded_backward_config)
    return {OURS: ours, PADDED: padded, "fa3": None, "cudnn": None}


def everybody_values(shape: Shape) -> dict[str, harness.Attention | None]:
    return {OURS: ours, PADDED: filled_up, "fa3": None, "cudnn": None}


def in_order(q, k, v, causal: bool, sm_scale: float, impl: str = "hopper"):
    return attention(q, k, v, causal=causal, sm_scale=sm_scale, deterministic=True, impl=impl)


def everybody_in_order(shape: Shape) -> dict[str, harness.Attention | None]:
    peers.PEERS[FA3_IN_ORDER] = replace(peers.fa3(deterministic=True), name=FA3_IN_ORDER)
    portable = partial(in_order, impl="triton")
    return {OURS: ours, IN_ORDER: in_order, "attnlib-triton": portable, "fa3": None, FA3_IN_ORDER: None}


# ---------------------------------------------------------------- tuning

_TWO = {"late_wait": True, "pin": True, "named": True, "keep_shift": True}
_THREE = {
    "joint": True, "pin": True, "consumer_registers": 160, "producer_registers": 32, "max_registers": 128
}  # fmt: skip
CANDIDATES = {  # name -> what to compare; all compile without spills and without serialized products
    "2 x 128": lambda columns, q: SplitConfig(128, 2, 2, 64, q, **_TWO, columns=columns),
    "2 x 128, early wait": lambda columns, q: SplitConfig(
        128, 2, 2, 64, q, named=True, keep_shift=True, columns=columns
    ),
    "3 x 64": lambda columns, q: SplitConfig(64, 3, 4, 64, q, **_THREE, columns=columns),
    "3 x 64, late wait": lambda columns, q: SplitConfig(
        64, 3, 4, 64, q, late_wait=True, **_THREE, columns=columns
    ),
    "2 x 64": lambda columns, q: SplitConfig(
        64, 2, 2, 128, q, named=True, keep_shift=True, columns=columns
    ),
    "2 x 64, late wait": lambda columns, q: SplitConfig(64, 2, 2, 128, q, **_TWO, columns=columns),
    "2 x 64, joint": lambda columns, q: SplitConfig(
        64, 2, 2, 128, q, named=True, pin=True, joint=True, keep_shift=True, columns=columns
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


_PAIR = {"warpgroups": 2, "consumer_registers": 240, "producer_registers": 24, "max_registers": 168}
OTHERS = {  # widths of a tile of queries and of values -> changes of its configuration
    (192, 128): [
        {"q_columns": 0}, {"q_columns": 128}, {"late_wait": False, "pin": False}, {"joint": True},
        {"block_n": 64, "stages": 4}, {"block_n": 64, "stages": 4, "late_wait": False, "pin": False},
    ],
    (128, 64): [_PAIR, _PAIR | {"late_wait": True, "named": True}, _PAIR | {"q_columns": 64}],
    (64, 128): [{"q_columns": 0}, {"stages": 4, "o_columns": 64}],
    (64, 256): [{"q_columns": 0}, {"stages": 2}],
}  # fmt: skip


def tuned_values(shape: Shape) -> dict[str, harness.Attention | None]:
    """The configuration of a pair with some changes, beside FA3."""
    config, found = own_values_config(shape.head_dim, shape.value_dim), {"as it is": ours}
    (pair,) = (pair for pair, own in OWN_VALUES.items() if own == config)
    for change in OTHERS[pair]:
        other = replace(config, **change)
        name = ", ".join(f"{key} {value}" for key, value in change.items())
        found[name] = partial(with_config, lambda shape, other=other: other)
    return found | {"fa3": None}


def tuned_backward(shape: Shape) -> dict[str, harness.Attention | None]:
    """Its configuration with more or fewer parts of K and V in registers, where these suffice, with P as it
    was rounded, with dense calls' second consumer later; and the next wider one."""
    found = {"as it is": ours}
    widths = sorted(w for w in configs_backward.SPLIT if shape.head_dim <= w < tile_width(shape.head_dim))
    for config in (configs_backward.SPLIT[width] for width in widths):
        changes = [{"held": held} for held in range(config.held + 1)]
        if config.block_n == 128:
            changes += [{"half_p": True}, {"stagger": 600}, {"stagger": 1200}]
        for change in changes if config.columns == configs_backward.SPLIT[widths[0]].columns else [{}]:
            other = replace(config, **change)
            name = ", ".join(f"{key} {value}" for key, value in change.items())
            label = f"{config.columns[0]} + {config.columns[1]} {name}" + " *" * (other == config)
            found[label] = partial(with_backward_config, lambda shape, other=other: other)
    return found | {"fa3": None}


def tuned_values_backward(shape: Shape) -> dict[str, harness.Attention | None]:
    """With more or fewer parts of K and V in registers, where there is such a kernel."""
    found, config = {"as it is": ours}, own_values_backward_config(shape.head_dim, shape.value_dim)
    others = (replace(configs_backward.OWN_VALUES, held=held) for held in range(3))
    for other in () if config is None else others:
        label = f"64 keys, held {other.held}"
        found[label] = partial(with_backward_config, lambda shape, other=other: other)
    return found | {"fa3": None}


def tuned_in_order(shape: Shape) -> dict[str, harness.Attention | None]:
    """Consumers that alternate, or do what they do; turns, with more heads side by side."""
    default, ordered = hopper_backward_config(shape.head_dim), hopper_backward_config(shape.head_dim, True)
    configs = {f"in order, {n} MB": replace(ordered, l2_bytes=n << 20) for n in (16, 32, 64)}
    if default.block_n == 128:
        configs |= {"alternate": replace(default, alternate=True), "no delay": replace(default, stagger=0)}
        configs["in order, alternate"] = replace(ordered, alternate=True)
    found = {
        name: partial(with_backward_config, lambda shape, config=config: config)
        for name, config in configs.items()
    }
    return {"as it is": ours} | found


# ---------------------------------------------------------------- command


class Pass(NamedTuple):
    """The forward or the backward pass of some calls: the name of its table, who is timed, candidates, and
    how."""

    table: str
    everybody: Callable[[Shape], dict[str, harness.Attention | None]]
    tuned: Callable[[Shape], dict[str, harness.Attention | None]]
    collect: Callable[..., list[dict[str, Any]]]
    method: dict[str, str]
    shapes: list[Shape]


TIMED = "the backward alone"
_BACKWARD = {"timed": TIMED, "flops": "2.5 x 4*B*H*Sq*Sk*D, halved when causal"}
PASSES = {
    "forward": Pass("calls", everybody, tuned, harness.collect, {}, SHAPES),
    "backward": Pass("backward", everybody_backward, tuned_backward, backward.collect, _BACKWARD, SHAPES),
    "values": Pass(
        "values", everybody_values, tuned_values, harness.collect,
        {"flops": "2*B*H*Sq*Sk*(D + Dv), halved when causal"}, VALUES,
    ),
    "values_backward": Pass(
        "values_backward", everybody_values, tuned_values_backward, backward.collect,
        {"timed": TIMED, "flops": "2*B*H*Sq*Sk*(3*D + 2*Dv), halved when causal"}, VALUES,
    ),
    "deterministic": Pass(
        "deterministic", everybody_in_order, tuned_in_order, backward.collect, _BACKWARD, TOKENS
    ),
}  # fmt: skip


def compile_call(shape: Shape, way: str, tune: bool) -> None:
    """In a child: what it compiles stays in Triton's cache."""
    small = replace(shape, batch=1, heads=1)  # the same kind: what depends on a length is that it has a tail
    gradients = PASSES[way].collect is backward.collect
    tensors = [x.requires_grad_(gradients) for x in make_inputs(small, device=harness.DEVICE)]
    for function in (PASSES[way].tuned if tune else PASSES[way].everybody)(shape).values():
        if function is not None:
            out = function(*tensors, shape.causal, shape.head_dim**-0.5)
            if gradients:
                out.backward(out.detach())
    torch.cuda.synchronize()


def compile_all(calls: Sequence[tuple[Shape, str]], tune: bool) -> None:
    with ProcessPoolExecutor(12, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_call, *zip(*calls, strict=True), [tune] * len(calls)))


def ratios(rows: list[dict[str, Any]], shape: Shape, header: dict[str, Any], first: str) -> Iterator[str]:
    """What the times say: each implementation, and how much faster `first` is, with its noise."""
    table = records.Table.of("timed", rows, header, False)
    for row in table.rows:
        speed = f"{row['ms']:8.4f} ms {row['tflops']:6.1f} TFLOP/s" if "ms" in row else row["status"]
        if row["impl"] != first:
            speed += f"  {first} against it: {verdict.judge(table, shape, first, row['impl'])}"
        yield f"  {row['impl']:36} {speed}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time head dimensions that are no powers of two.")
    parser.add_argument("--tune", action="store_true", help="time configurations of attnlib; write no record")
    parser.add_argument("--pass", dest="ways", choices=list(PASSES), nargs="+",
                        default=["forward", "backward"], help="which (default: the first two)")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=240,
                        help="begin nothing after so many (default: %(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/head_dims.json)")
    args, begin = parser.parse_args(argv), time.monotonic()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    calls = [
        (replace(shape, causal=causal), way)
        for way in args.ways
        for shape in PASSES[way].shapes
        for causal in (True, False)
        if not args.tune or shape.head_dim not in (72, 112)
    ]
    setting, control = (SWEEP, "as it is") if args.tune else (ROUNDS, OURS)
    compile_all(calls, args.tune)
    print(f"compiled after {time.monotonic() - begin:.0f} s\n", flush=True)
    found, left_out = {way: [] for way in args.ways}, []
    for shape, way in calls:
        label = f"{shape.label}, {way}"
        if time.monotonic() - begin > args.seconds:
            left_out.append(label)
            continue
        one = PASSES[way]
        header = records.provenance(harness.method(setting, control) | one.method)
        implementations = (one.tuned if args.tune else one.everybody)(shape)
        rows = one.collect(implementations, [shape], setting=setting, control=control)
        found[way] += rows
        print(label, *ratios(rows, shape, header, control), sep="\n", flush=True)
        if not args.tune:
            path = records.report_path("head_dims", header, args.out)
            records.add_table(path, header, one.table, found[way])
        torch.cuda.empty_cache()
    if left_out:
        print(f"left out, as {args.seconds:g} s were over:", *left_out, sep="\n  ")
    mine = [row for rows in found.values() for row in rows if row["impl"] not in peers.PEERS]
    for row in (row for row in mine if row["status"] != "ok"):
        print(f"{Shape.of_row(row).label} {row['impl']}: {row['status']} {row.get('reason', '')}")
    return int(any(row["status"] != "ok" for row in mine))


if __name__ == "__main__":
    sys.exit(main())

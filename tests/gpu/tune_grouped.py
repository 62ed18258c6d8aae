"""Judge and time the forms of the Hopper backward pass with grouped heads on this GPU.

    python tests/gpu/tune_grouped.py                         some 400 s on 14 cores
    python tests/gpu/tune_grouped.py --dims 256 192 --groups 8 --lengths 4096 16384 --masks causal
    python tests/gpu/tune_grouped.py --seconds 200           begin no shape after so many

Forms: "all", a program visits all query heads of a group, one after the other; "added n", it visits n of them
and adds dK and dV to float32 sums in memory; "apart n", it has sums of its own, added up behind the kernel.
"default": what `sharing.chosen` takes. Beside them FlashAttention-3, where ATTNLIB_FA3 names its library.

First, processes side by side compile. Each form's gradients of the last key head are judged against fp64, and
all heads against the form "all"; nothing wrong is timed. Then shuffled rounds with cold L2, bf16, calls of
the size of the plane's (`bench.plane`). A table on the screen, no record: the time of "all", and that over
each form's, beside what the model of the launch predicts. Status 0 when all were right, 1 otherwise, 2
without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib.bench import peers, plane, roofline, timing  # noqa: E402
from attnlib.bench.backward import GRADIENTS, Judge, make_gradient  # noqa: E402
from attnlib.bench.oracle import make_inputs  # noqa: E402
from attnlib.bench.setting import Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels import hopper  # noqa: E402
from attnlib.kernels.hopper import sharing  # noqa: E402
from attnlib.kernels.hopper.configs_backward import HopperBackwardConfig, hopper_backward_config  # noqa: E402
from attnlib.params import Params, mask_window  # noqa: E402

DEVICE, ALL = "cuda", "all"
SHORT = Setting("one short window", rounds=1, pause_ms=8, warmup_ms=2, rep_ms=4)
PROCESSES = 14

Tensor = torch.Tensor


def shape_of(head_dim: int, group: int, length: int, causal: bool) -> Shape:
    one = plane.cell("causal", head_dim, length).shape
    return replace(one, causal=causal, heads_kv=one.heads // group)


def forms(shape: Shape) -> dict[str, HopperBackwardConfig]:
    config, group = hopper_backward_config(shape.head_dim), shape.heads // shape.kv_heads
    found = {ALL: replace(config, visited=group)}
    found |= {f"added {n}": replace(config, visited=n) for n in sharing.divisors(group)[:-1]}
    return found | {"apart 1": replace(config, visited=1, added=False)}


def launched(shape: Shape) -> sharing.Launched:
    """The call as the model knows it."""
    config, width = hopper_backward_config(shape.head_dim), shape.head_dim
    widths = config.width(width), config.value_width(width)
    heads, group = shape.batch * shape.kv_heads, shape.heads // shape.kv_heads
    return sharing.Launched(config, heads, group, shape.seqlen, shape.keys, *widths, shape.causal)


def calls_of(shape: Shape, *tensors: Tensor) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """The backward passes of a call: d_out, q, k, v."""
    d_out, q, k, v = tensors
    params = Params(mask_window(shape.causal, None), shape.head_dim**-0.5, return_lse=True)
    forward = params._replace(config=hopper.configuration(q, k, v, params))
    out, lse = hopper.forward(q, k, v, forward)

    def one(config: HopperBackwardConfig) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: hopper.backward(d_out, q, k, v, out, lse, params._replace(config=config))

    return {name: one(config) for name, config in forms(shape).items()}


def compile_one(head_dim: int, causal: bool) -> None:
    """In a child: what it compiles stays in Triton's cache."""
    shape = replace(shape_of(head_dim, 8, 512, causal), batch=1)
    for call in calls_of(shape, *inputs(shape)).values():
        call()
    torch.cuda.synchronize()


def inputs(shape: Shape) -> tuple[Tensor, ...]:
    return make_gradient(shape, device=DEVICE), *make_inputs(shape, device=DEVICE)


class Sample:
    """The truth of the last key head of the last batch entry, and the form "all"."""

    def __init__(self, shape: Shape, all_heads: tuple[Tensor, ...], *tensors: Tensor) -> None:
        self.group, self.all_heads = shape.heads // shape.kv_heads, all_heads
        self.judge = Judge(*self._last(*tensors[:2]), *(x[-1:, -1:] for x in tensors[2:]), shape.causal)

    def _last(self, *of_queries: Tensor) -> list[Tensor]:
        return [x[-1:, -self.group :] for x in of_queries]

    def wrong(self, gradients: tuple[Tensor, ...]) -> str:
        """Why gradients are wrong; empty when they are right."""
        dq, dk, dv = gradients
        found = self.judge.judge(*self._last(dq), dk[-1:, -1:], dv[-1:, -1:])
        for name, mine, other in zip(GRADIENTS, gradients, self.all_heads, strict=True):
            if not found[name].ok:
                return f"{name}: {found[name].reason}"
            away = (mine.float() - other.float()).square_().mean((2, 3)).sqrt_().max().item()
            if not away <= 2 * found[name].budget.rms:
                return f"{name}: a head is {away:.2e} from that of {ALL}, budget {found[name].budget.rms:.2e}"
        return ""


def times(calls: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Milliseconds of each, the median of shuffled rounds."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        order = list(calls)
        random.Random(i).shuffle(order)
        for name in order:
            samples[name].append(timing.time_ms(calls[name], setting=SHORT).median)
    return {name: statistics.median(taken) for name, taken in samples.items()}


def report(shape: Shape, rounds: int) -> tuple[str, list[str]]:
    """A line of the table, and what is wrong."""
    tensors = inputs(shape)
    calls, bad = calls_of(shape, *tensors), []
    sample = Sample(shape, calls[ALL](), *tensors)
    for name in list(calls):
        if reason := sample.wrong(calls[name]()):
            bad.append(f"WRONG {shape.label} {name}: {reason}")
            del calls[name]
    peer = peers.fa3()
    if not peer.available():
        calls["fa3"] = peer.make_backward(*tensors, shape.causal, shape.head_dim**-0.5)
    found, model = times(calls, rounds), launched(shape)
    all_ms = found.pop(ALL, math.nan)
    visited = sharing.chosen(model)
    default = ALL if visited == model.group else f"added {visited}"
    cells = [f"all {all_ms:.3f} ms {roofline.backward_flops(shape) / all_ms * 1e-9:.0f} TFLOP/s"]
    for name, ms in found.items():
        predicted = ""
        if name.startswith("added"):
            predicted = f" ({model.clocks(model.group) / model.clocks(int(name.split()[1])):.2f})"
        cells.append(f"{name} {all_ms / ms:.3f}{predicted}")
    mask = "causal" if shape.causal else "dense"
    label = f"{mask:6} D{shape.head_dim:<3} {model.group}:1 S{shape.seqlen:<5}"
    return f"{label} | " + " | ".join(cells) + f" | default {default}", bad


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time backward passes with grouped heads.")
    parser.add_argument("--dims", type=int, nargs="+", default=[256, 192, 128, 64, 160, 96])
    parser.add_argument("--groups", type=int, nargs="+", default=[8, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384, 1024, 2048])
    parser.add_argument("--masks", nargs="+", choices=["causal", "dense"], default=["causal", "dense"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=400, help="begin no shape after so many")
    args, begin = parser.parse_args(argv), time.monotonic()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    masks = [mask == "causal" for mask in args.masks]
    children = min(PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*product(args.dims, masks), strict=True)))
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    lines, wrong, left_out = [], [], []
    for causal, length, group, head_dim in product(masks, args.lengths, args.groups, args.dims):
        shape = shape_of(head_dim, group, length, causal)
        if time.monotonic() - begin > args.seconds:
            left_out.append(shape.label)
            continue
        line, bad = report(shape, args.rounds)
        lines.append(line)
        wrong += bad
        print(line, *bad, sep="\n", flush=True)
        torch.cuda.empty_cache()
    print(f"\n{time.monotonic() - begin:.0f} s. Time of all over that of a form (predicted):")
    print(*sorted(lines), sep="\n")
    if left_out:
        print(f"left out, as {args.seconds:g} s were over:", *left_out, sep="\n  ")
    print(*wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

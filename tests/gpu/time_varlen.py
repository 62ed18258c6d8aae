"""Time varlen sequences, windows and short sequences on this GPU, forward and backward, as a call gets them,
in the portable kernel and in FlashAttention-3.

    python tests/gpu/time_varlen.py             all of it, some three minutes; figures/data/<gpu>/varlen.json
    python tests/gpu/time_varlen.py --dims 128  one head dimension
    python tests/gpu/time_varlen.py --tables short,equal    some tables
    python tests/gpu/time_varlen.py --calls dense    what has this in its name
    python tests/gpu/time_varlen.py --seconds 90    begin nothing after so many, and say what is left out

fp16, causal but where it says dense. A time is the median over shuffled rounds of calls with a cold L2; a
batch and the same rows as varlen sequences are in the same rounds, and so is what a call gets a second time,
the control. FlashAttention-3 takes part where ATTNLIB_FA3 names its library. Before it is taken the
call is judged against fp64: the last head of its last sequence, forward and gradients. Nothing wrong is
timed. The record is written after each call.
Status 0 when all calls were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hopper_only import no_hopper
from rounds import in_rounds

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import dispatch  # noqa: E402
from attnlib.bench import peers, records  # noqa: E402
from attnlib.bench.backward import FLOPS  # noqa: E402
from attnlib.bench.gradient_oracle import GradientOracle  # noqa: E402
from attnlib.bench.oracle import Oracle  # noqa: E402
from attnlib.bench.setting import WINDOW  # noqa: E402
from attnlib.params import Params, Varlen, mask_window  # noqa: E402

IMPLS = {"attnlib": None, "triton": "triton", "attnlib (control)": None}
KERNELS = "attnlib", "triton", "fa3", "attnlib (control)"
"""What a call gets, the portable kernel, FlashAttention-3, and the first once more. And those of attnlib with
what is asked for."""
HEADS = {64: 32, 128: 16, 256: 8}
"""Head dimension -> heads, as in the shapes of the task."""
TOKENS = 16384
TABLES = "short", "equal", "lengths", "windows"
WIDTHS = 128, 256, 512, 1024, 2048, 4096, 8192


class Case(NamedTuple):
    """One call. lengths: of the sequences; varlen: they lie one after the other, else a batch of equal ones;
    width: of the window, keys that a query sees with itself, None for all before it."""

    table: str
    lengths: tuple[int, ...]
    head_dim: int
    heads: int
    varlen: bool
    width: int | None = None
    causal: bool = True

    @property
    def window(self) -> tuple[int, int] | None:
        """Keys that a query sees on its left and on its right, as `attention` takes them."""
        return None if self.width is None else (self.width - 1, 0)

    @property
    def label(self) -> str:
        counts = [f"{self.lengths.count(n)} x {n}" for n in dict.fromkeys(self.lengths)]
        many = f"{len(self.lengths)} of {min(self.lengths)} to {max(self.lengths)}"
        lengths = " + ".join(counts) if len(counts) < 4 else many
        window = "" if self.width is None else f", {self.width} keys"
        mask = "" if self.causal else " dense"
        return f"D{self.head_dim} {lengths}{mask}{' varlen' if self.varlen else ''}{window}"


def cases(dims: Sequence[int]) -> Iterator[Case]:
    """Batches and the same rows as varlen sequences; sequences of different lengths; short ones; windows."""
    for d in dims:
        heads = HEADS[d]
        for length, *masks in (
            (64, True), (128, True), (256, True), (512, True, False), (1024, True), (2048, True, False),
            (4096, True, False), (8192, True, False),
        ):  # fmt: skip
            for causal, varlen in product(masks, (False, True)):
                table = "equal" if length > 1024 else "short"
                yield Case(table, (length,) * (TOKENS // length), d, heads, varlen, causal=causal)
        for lengths in (
            (12288, *(64,) * 64), (*(64,) * 64, 12288), tuple(16 * (37 * i % 128 + 1) for i in range(16)),
        ):  # fmt: skip
            yield Case("lengths", lengths, d, heads, True)
        for width in (*WIDTHS, None):
            yield Case("windows", (TOKENS,), d, 8, False, width)


class Inputs(NamedTuple):
    """q, k, v and the gradient of the output, (B, H, S, D) or (T, H, D); and where varlen sequences begin."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor
    varlen: Varlen | None


def make_inputs(case: Case, device: str) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    count, longest = len(case.lengths), max(case.lengths)
    shape = (sum(case.lengths), case.heads) if case.varlen else (count, case.heads, longest)
    made = [torch.randn(*shape, case.head_dim, generator=generator, device=device).half() for _ in range(4)]
    if not case.varlen:
        return Inputs(*made, None)
    ends = torch.tensor([0, *case.lengths], device=device).cumsum(0).int()
    return Inputs(*made, Varlen(ends, ends, longest, longest))


def passes(case: Case, inputs: Inputs, kernel: str) -> dict[str, Callable[[], Any]]:
    """Forward and backward of a call, judged before they are returned. AssertionError if one is wrong."""
    found = of_fa3(case, inputs) if kernel == "fa3" else of_attnlib(case, inputs, IMPLS[kernel])
    judge(case, inputs, found["forward"](), found["backward"]())
    return found


def of_attnlib(case: Case, inputs: Inputs, impl: str | None) -> dict[str, Callable[[], Any]]:
    q, k, v, d_out, varlen = inputs
    params = Params(mask_window(case.causal, case.window), case.head_dim**-0.5, varlen, impl=impl)
    out, lse = dispatch.forward(q, k, v, params._replace(return_lse=True))
    saved = dispatch.Saved(q, k, v, out, lse)
    return {"forward": lambda: dispatch.forward(q, k, v, params)[0],
            "backward": lambda: dispatch.backward(d_out, saved, params)}  # fmt: skip


def of_fa3(case: Case, inputs: Inputs) -> dict[str, Callable[[], Any]]:
    q, k, v, d_out, varlen = inputs
    peer, how = peers.fa3(case.window, varlen=varlen), (case.causal, case.head_dim**-0.5)
    return {"forward": peer.make(q, k, v, *how), "backward": peer.make_backward(d_out, q, k, v, *how)}


def judge(case: Case, inputs: Inputs, out: torch.Tensor, gradients: tuple[torch.Tensor, ...]) -> None:
    """Of the last head of the last sequence."""
    last = case.lengths[-1]

    def part(x: torch.Tensor) -> torch.Tensor:
        return x[-last:, -1:].transpose(0, 1)[None] if case.varlen else x[-1:, -1:]

    q, k, v, d_out = (part(x) for x in inputs[:4])
    Oracle(q, k, v, case.causal, window=case.window).judge(part(out)).raise_if_bad(case.label)
    oracle = GradientOracle(d_out, q, k, v, case.causal, case.window)
    for verdict in oracle.judge(*(part(x) for x in gradients)).values():
        verdict.raise_if_bad(case.label)


def products(case: Case) -> float:
    """FLOPs of the forward pass."""
    # Of the first `width` queries each sees one key more than the one before it; all others see `width`.
    widths = [n if case.width is None else min(n, case.width) for n in case.lengths]
    seen = sum(w * (w + 1) / 2 + (n - w) * w for n, w in zip(case.lengths, widths, strict=True))
    if not case.causal:
        seen = sum(n * n for n in case.lengths)
    return 4 * case.heads * case.head_dim * seen


def rows(group: Sequence[Case], rounds: int) -> Iterator[dict[str, Any]]:
    """Times of calls that are compared, in all kernels."""
    calls: dict[tuple[Case, str, str], Callable[[], Any]] = {}
    for case in group:
        inputs = make_inputs(case, "cuda")
        for kernel in KERNELS:
            if kernel != "fa3" or peers.fa3(varlen=inputs.varlen).available() is None:
                calls |= {(case, kernel, name): call for name, call in passes(case, inputs, kernel).items()}
    for (case, kernel, name), taken in in_rounds(calls, rounds, WINDOW).items():
        ms = statistics.median(taken)
        flops = products(case) * (FLOPS if name == "backward" else 1)
        yield {
            "call": case.label, "head_dim": case.head_dim, "heads": case.heads, "varlen": case.varlen,
            "sequences": len(case.lengths), "longest": max(case.lengths), "width": case.width,
            "causal": case.causal, "kernel": kernel, "pass": name, "ms": ms, "tflops": flops / ms / 1e9,
            "round_ms": taken,
        }  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time varlen sequences and windows on this GPU.")
    parser.add_argument("--dims", default="64,128,256", help="head dimensions (default: %(default)s)")
    parser.add_argument("--tables", default=",".join(TABLES), help="(default: %(default)s)")
    parser.add_argument("--calls", default="", help="text in the name of a call (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=240,
                        help="begin nothing after so many (default: %(default)s)")  # fmt: skip
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/varlen.json)")
    args = parser.parse_args(argv)
    dims, asked = [int(d) for d in args.dims.split(",")], args.tables.split(",")
    if not set(asked) <= set(TABLES):
        parser.error(f"--tables: expected some of {', '.join(TABLES)}, got {args.tables}")
    if not set(dims) <= set(HEADS):
        parser.error(f"--dims: expected some of {', '.join(map(str, HEADS))}, got {args.dims}")
    if no_hopper():
        return 2
    wanted = [case for case in cases(dims) if case.table in asked and args.calls in case.label]
    tables: dict[str, dict[str, list[dict[str, Any]]]] = {}
    header = records.provenance({"rounds": args.rounds, "timed": "median of rounds, cold L2"})
    path, begin, wrong = records.report_path("varlen", header, args.out), time.monotonic(), 0
    if reason := peers.fa3().available():
        print(f"without FlashAttention-3: {reason}")
    for case, group in groupby(wanted, lambda case: case._replace(varlen=False)):
        if time.monotonic() - begin > args.seconds:
            print(f"left out, no time: {case.label}")
            continue
        try:
            found = list(rows(list(group), args.rounds))
        except AssertionError as error:
            wrong += 1
            print(error, flush=True)
            continue
        tables.setdefault(case.table, {"rows": []})["rows"] += found
        records.write_report(path, header, tables)
        for label, calls in groupby(found, lambda row: row["call"]):
            times = (f"{row['kernel']} {row['pass']} {row['ms']:.3f}" for row in calls)
            print(f"{label:36}", "  ".join(times), flush=True)
    print(path)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

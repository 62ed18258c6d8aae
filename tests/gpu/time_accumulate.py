"""Time attention that merges its result into an existing one on this Hopper GPU, beside attention alone and
attention followed by a kernel that merges.

    python tests/gpu/time_accumulate.py                  some 40 s; figures/data/<gpu>/accumulate.json
    python tests/gpu/time_accumulate.py --only 16384     some lengths, no record

One table, `forward`: bfloat16, B1 H16, dense, D 128 at five lengths, and D 64 and 256 at one. An existing
output is in float32 or bfloat16. The kernel that merges is the one that chapter 42 begins with.

All that is compared is timed in the same shuffled rounds, cold L2, with a control row. Before and after, each
implementation merges attention to one set of keys into that to another, and is judged against fp64 attention
to both: output and LSE of the last rows of the first and the last head.
Status 0 when all were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import dispatch  # noqa: E402
from attnlib.bench import harness, records, sources  # noqa: E402
from attnlib.bench.oracle import Oracle, make_inputs, poisoned_empty  # noqa: E402
from attnlib.bench.setting import BOOK, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.params import Existing, MaskWindow, Params  # noqa: E402

DEVICE = "cuda"
CHAPTER = "42_context_parallel"
ALONE = "attention"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Of an existing output."""
SHAPES = [(length, 128) for length in (8192, 16384, 32768, 65536, 131072)] + [(16384, 64), (16384, 256)]
JUDGED = 256
"""Last rows of a head that are judged."""
DENSE = MaskWindow(None, None)


def epilogue(dtype: str) -> str:
    return f"attention that merges, {dtype}"


def two_kernels(dtype: str) -> str:
    return f"attention, then a merge, {dtype}"


def shape_of(length: int, head_dim: int) -> Shape:
    return Shape(1, 16, length, head_dim, False, "bfloat16")


def merging_kernel() -> ModuleType:
    """That of chapter 42."""
    return sources.load_source(CHAPTER, sources.cells_tagged(sources.notebook_of(CHAPTER), "variant")[0])


class Problem:
    """Queries, two sets of keys and values, what attention to the first gives, and the truth of both."""

    def __init__(self, shape: Shape) -> None:
        self.q, *self.keys = make_inputs(shape, device=DEVICE)
        _, *others = make_inputs(shape, seed=1, device=DEVICE)
        self.params = Params(DENSE, shape.head_dim**-0.5, return_lse=True)
        self.before = dispatch.forward(self.q, *others, self.params)
        self.rows = slice(max(0, shape.seqlen - JUDGED), shape.seqlen)
        both = [torch.cat(pair, 2) for pair in zip(others, self.keys, strict=True)]
        self.oracles = {head: self._oracle(both, head) for head in sorted({0, shape.heads - 1})}
        self.alone = {head: self._oracle(self.keys, head) for head in self.oracles}

    def _oracle(self, keys: Sequence[torch.Tensor], head: int) -> Oracle:
        own = slice(head, head + 1)
        return Oracle(self.q[:, own, self.rows], *(x[:, own] for x in keys))

    def existing(self, dtype: str) -> Existing:
        """Memory for a result."""
        like = torch.empty_like(self.q, dtype=DTYPES[dtype])
        return Existing(like, torch.empty_like(self.before[1]))

    def begin(self, into: Existing) -> None:
        """Attention to the first set of keys is there."""
        into.out.copy_(self.before[0])
        into.lse.copy_(self.before[1])

    def verdicts(self, out: torch.Tensor, lse: torch.Tensor, alone: bool) -> Iterator:
        for head, oracle in (self.alone if alone else self.oracles).items():
            own = out[:, head : head + 1, self.rows].to(self.q.dtype).contiguous()
            yield oracle.judge(own, lse[:, head : head + 1, self.rows].contiguous())


class Run(harness.Run):
    """One implementation: a call, the result that it merges into, None where it has one of its own."""

    def __init__(self, name: str, shape: Shape, made: tuple[Callable[[], Any], Existing | None],
                 problem: Problem, control: bool = False) -> None:  # fmt: skip
        super().__init__(name, shape, control)
        (self.call, self.into), self.problem = made, problem
        self.attempt(lambda: self.gate(None))

    def gate(self, oracle: None) -> None:
        """From a result over other keys, or from none."""
        if self.into is not None:
            self.problem.begin(self.into)
        with poisoned_empty():
            found = self.call() or self.into
        torch.cuda.synchronize()
        for verdict in self.problem.verdicts(*found, alone=self.into is None):
            if not verdict.ok:
                self.stop("wrong", verdict.reason)
                return


def calls_of(problem: Problem, kernel: ModuleType) -> dict[str, tuple[Callable[[], Any], Existing | None]]:
    """Name -> (the call, the result that it merges into)."""
    q, keys, params = problem.q, problem.keys, problem.params
    calls: dict[str, tuple[Callable[[], Any], Existing | None]] = {
        ALONE: (lambda: dispatch.forward(q, *keys, params), None)
    }
    for dtype in DTYPES:
        into = problem.existing(dtype)
        calls[epilogue(dtype)] = (lambda into=into: dispatch.accumulate(q, *keys, into, params)), into
        calls[two_kernels(dtype)] = (
            (lambda into=into: kernel.merge(*into, *dispatch.forward(q, *keys, params))), into
        )  # fmt: skip
    return calls


def rows_of(shape: Shape, setting: Setting) -> list[dict[str, Any]]:
    problem, kernel = Problem(shape), merging_kernel()
    calls = calls_of(problem, kernel)
    runs = [Run(name, shape, made, problem) for name, made in calls.items()]
    runs.append(Run(ALONE, shape, calls[ALONE], problem, control=True))
    harness.time_rounds(runs, None, setting, lambda text: None)
    return [run.row for run in runs]


def show(row: dict[str, Any]) -> str:
    where = f"D {row['head_dim']:3} S {row['seqlen']:6} {row['impl']:36}"
    if "ms" not in row:
        return f"{where} {row['status']} {row.get('reason', '')}"
    return f"{where} {row['ms']:9.4f} ms {row['tflops']:6.0f} TFLOP/s  {row['sm_mhz'] or 0:.0f} MHz"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time attention that merges into a result, on this GPU.")
    parser.add_argument("--only", type=int, nargs="+", help="lengths at D = 128; write no record")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/accumulate.json)")
    args = parser.parse_args(argv)
    if no_hopper():
        return 2
    rows: list[dict[str, Any]] = []
    for length, head_dim in [(length, 128) for length in args.only] if args.only else SHAPES:
        rows += rows_of(shape_of(length, head_dim), BOOK)
        print(*map(show, rows[-len(DTYPES) * 2 - 2 :]), sep="\n", flush=True)
        torch.cuda.empty_cache()
    if not args.only:
        header = records.provenance(harness.method(BOOK, ALONE))
        path = records.report_path("accumulate", header, args.out)
        records.write_report(path, {"notebook": "accumulate", **header}, {"forward": {"rows": rows}})
        print(path)
    return int(any(row["status"] != "ok" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

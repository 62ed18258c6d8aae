"""DistrAttention on this Hopper GPU: timed beside our dense kernel and our FP8, part by part, and its errors.

    python tests/gpu/time_distr.py            about 50 seconds once compiled; figures/data/<gpu>/distr.json
    python tests/gpu/time_distr.py --short    the first shapes alone, no record

Three tables. `attention`: whole calls and the product alone at D = 64 and 128 and S = 1K to 32K, in bfloat16:
groups of 1, 2 and 4 with hashed keys, groups of 2 by blocks of queries, and the kernel of chapter 36, which
gathers inside of its loop. `parts`: hash, sort, sum, gather and product apart. `errors`: relative Frobenius
errors against fp64 for N(0, 1), U(0, 1) and keys with pairs of similar columns, beside those of FP8, of 16
bits and of the mean of the values in place of attention. All that is compared is timed in the same shuffled
rounds, cold L2, with a control row; outputs are judged before and after, on the first and the last head,
against dense attention of the summed queries, which is what the method computes. Status 0 when all were
right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from attnlib import attention, attention_distr, attention_fp8  # noqa: E402
from attnlib.bench import harness, records, sources  # noqa: E402
from attnlib.bench.oracle import Oracle, make_inputs  # noqa: E402
from attnlib.bench.setting import SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels import distr  # noqa: E402
from attnlib.kernels.common.distr import Grouped, Grouping  # noqa: E402
from attnlib.kernels.common.launcher import Launches  # noqa: E402
from attnlib.kernels.distr import launch_group  # noqa: E402
from attnlib.kernels.hopper import narrow  # noqa: E402
from attnlib.kernels.reference import distr as model  # noqa: E402
from attnlib.kernels.reference.dense import attention_fp64  # noqa: E402
from attnlib.params import Params, mask_window  # noqa: E402

DEVICE = "cuda"
DENSE, FP8, STEP = "attnlib", "attnlib fp8, with the pass", "36_distr"
TOKENS, WIDTH = 16384, 2048
"""Of all sequences of a call, but for one of 32K; heads times D."""
SHAPES = [
    Shape(max(1, TOKENS // S), WIDTH // D, S, D, True, "bfloat16")
    for D in (64, 128) for S in (1024, 4096, 16384, 32768)
] + [Shape(1, WIDTH // D, TOKENS, D, False, "bfloat16") for D in (64, 128)]  # fmt: skip
PARTS = [shape for shape in SHAPES if shape.causal and shape.seqlen in (4096, 16384)]
GROUPINGS = {
    "G1": Grouping(1), "G2": Grouping(2), "G4": Grouping(4), "G2, rows 1024": Grouping(2, "q", 1024),
    "G2, rows 128": Grouping(2, "q", 128),
}  # fmt: skip
MOST_KEYS = 8 << 30
"""Bytes of keys that blocks of queries have of their own; beyond that a grouping is left out."""
IN_LOOP = 4096
"""The longest sequence that chapter 36's kernel is timed on."""

Function = Callable[[], torch.Tensor]


def fits(shape: Shape, grouping: Grouping) -> bool:
    keys = shape.batch * shape.heads * grouping.blocks(shape.seqlen) * shape.keys
    return keys * shape.head_dim // grouping.group * shape.itemsize <= MOST_KEYS


def model_of(tensors: Sequence[torch.Tensor], causal: bool, grouping: Grouping) -> Oracle:
    """What the method computes, with the groups that the kernel finds."""
    q, k, v = tensors
    places = distr.group(q, k, grouping, causal).places
    return Oracle(model.scattered(q, places, grouping).to(q.dtype), k, v, causal)


class Run(harness.Run):
    """One call, or part of one. oracles: of the first head of all and the last; None for what has no output
    of attention. exact: fp64 attention of the first head."""

    def __init__(self, name: str, shape: Shape, make: Callable[[], Function], oracles: list[Oracle] | None,
                 exact: torch.Tensor | None = None, control: bool = False) -> None:  # fmt: skip
        super().__init__(name, shape, control)
        self.oracles, self.exact = oracles, exact
        self.attempt(lambda: setattr(self, "call", make()))
        self.attempt(lambda: self.gate(None))

    def gate(self, oracle: None) -> None:
        out = self.call()
        torch.cuda.synchronize()
        if self.exact is not None:
            self.row["relative_error"] = relative(out[:1, :1], self.exact)
        for place, one in zip((slice(0, 1), slice(-1, None)), self.oracles or (), strict=False):
            verdict = one.judge(out[place, place].contiguous())
            if not verdict.ok:
                self.stop("wrong", verdict.reason)

    def finish(self, oracle: None) -> None:
        super().finish(oracle)
        if self.ok and self.oracles is None:
            self.row.pop("tflops", None)


def relative(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the error over that of the truth."""
    return ((out.double() - exact).norm() / exact.norm()).item()


def product_of(q, k, v, causal: bool, grouping: Grouping) -> Function:
    """The product alone."""
    made = distr.group(q, k, grouping, causal)
    params = Params(mask_window(causal, None), q.shape[-1] ** -0.5)
    return lambda: narrow.forward(made, v, params)


def calls_of(q, k, v, causal: bool) -> dict[str, tuple[Callable[[], Function], Grouping | None]]:
    """Name -> (what makes the call, how columns are grouped)."""
    shape = Shape(*q.shape, causal, str(q.dtype).removeprefix("torch."))
    calls: dict[str, tuple[Callable[[], Function], Grouping | None]] = {
        DENSE: (lambda: lambda: attention(q, k, v, causal=causal), None),
        FP8: (lambda: lambda: attention_fp8(q, k, v, causal=causal), None),
    }
    for name, grouping in GROUPINGS.items():
        if not fits(shape, grouping):
            continue
        group, hashed, rows, _ = grouping
        options = {"group": group, "hashed": hashed, "rows": rows, "causal": causal}
        calls[f"distr {name}"] = (lambda o=options: lambda: attention_distr(q, k, v, **o)), grouping
        if hashed == "k":
            make = lambda g=grouping: product_of(q, k, v, causal, g)  # noqa: E731
            calls[f"distr {name}, product"] = make, grouping
    if shape.seqlen <= IN_LOOP:
        for name, transposed in (("columns", False), ("rows", True)):
            make = lambda t=transposed: step_of(q, k, v, causal, t)  # noqa: E731
            calls[f"{STEP}, gathers {name}"] = make, GROUPINGS["G2, rows 128"]
    return calls


def step_of(q, k, v, causal: bool, transposed: bool) -> Function:
    """The kernel of chapter 36, whose operands are prepared: like the product alone."""
    step = sources.load_step(STEP)
    operands = step.prepared(q, k, 2, causal, transposed)
    return lambda: step.product(*operands, v, causal, q.shape[-1] ** -0.5, transposed)


def attention_rows(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    q, k, v = make_inputs(shape, device=DEVICE)
    causal = shape.causal
    heads = [[x[i : i + 1 or None, i : i + 1 or None] for x in (q, k, v)] for i in (0, -1)]
    exact = attention_fp64(*heads[0], causal=causal)[0]
    dense = [Oracle(*one, causal) for one in heads]
    runs = []
    for name, (make, grouping) in calls_of(q, k, v, causal).items():
        oracles = dense if grouping is None else [model_of(one, causal, grouping) for one in heads]
        runs.append(Run(name, shape, make, [] if name == FP8 else oracles, exact))
    runs.append(Run(DENSE, shape, calls_of(q, k, v, causal)[DENSE][0], dense, exact, control=True))
    harness.time_rounds(runs, None, setting, lambda text: None)
    yield from (run.row for run in runs)


def parts_rows(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    """Each launch of the grouping alone, on what those before it left; the product; and the whole call."""
    q, k, v = make_inputs(shape, device=DEVICE)
    runs = []
    for name, grouping in GROUPINGS.items():
        if name == "G1" or not fits(shape, grouping):
            continue
        made: Grouped = distr.group(q, k, grouping, shape.causal)
        call = launch_group.Call(
            q.shape, k.shape, (q.stride(), k.stride()), q.dtype, q.get_device(), grouping, shape.causal
        )
        plan = launch_group.prepare(call)
        partial = torch.empty(plan.partial, dtype=torch.float32, device=DEVICE)
        tensors = q, k, partial, made.places, made.q, made.k
        plan.launches(*tensors)
        for part, launch in zip(launch_group.PARTS, plan.launches.launches, strict=True):
            alone = Launches([launch], q.get_device(), launch_group.TENSORS)
            runs.append(Run(f"{name}: {part}", shape, lambda a=alone, t=tensors: lambda: a(*t), None))
        runs.append(Run(f"{name}: product", shape,
                        lambda g=grouping: product_of(q, k, v, shape.causal, g), None))  # fmt: skip
    first = runs[0]
    runs.append(Run(first.impl, shape, lambda: first.call, None, control=True))
    harness.time_rounds(runs, None, setting, lambda text: None)
    yield from (run.row for run in runs)


# ---------------------------------------------------------------- errors


def inputs_of(kind: str, shape: Shape, seed: int) -> list[torch.Tensor]:
    q, k, v = make_inputs(shape, "normal", seed, DEVICE)
    if kind == "uniform":
        rng = torch.Generator().manual_seed(seed)
        q, k, v = (torch.rand(x.shape, generator=rng).to(x) for x in (q, k, v))
    elif kind != "normal":  # columns 2 c and 2 c + 1 of the keys differ by so much
        spread = float(kind.split()[-1])
        k[..., 1::2] = k[..., ::2] + spread * k[..., 1::2]
    return [q, k, v]


KINDS = "normal", "uniform", "pairs 0", "pairs 0.1", "pairs 0.3"


def error_rows(D: int, kind: str) -> Iterator[dict[str, Any]]:
    shape = Shape(1, 4, 4096, D, False, "bfloat16")
    q, k, v = inputs_of(kind, shape, 0)
    exact, _ = attention_fp64(q, k, v)
    variants = {"attnlib": lambda: attention(q, k, v), "attnlib fp8": lambda: attention_fp8(q, k, v)}
    variants["mean of the values"] = lambda: v.double().mean(2, keepdim=True).expand_as(v)
    for group in (1, 2, 4, 8):
        for name, options in {"keys": {}, "queries": {"hashed": "q"},
                              "queries, rows 128": {"hashed": "q", "rows": 128}}.items():  # fmt: skip
            variants[f"distr G{group}, {name}"] = (
                lambda g=group, o=options: attention_distr(q, k, v, group=g, **o)
            )
    for name, compute in variants.items():
        error = relative(compute(), exact)
        yield {"inputs": kind, "head_dim": D, "seqlen": shape.seqlen, "variant": name, "error": error}


# ---------------------------------------------------------------- command


def compile_all() -> None:
    """Each shape's kernels in a process of its own, which leaves them in Triton's cache."""
    command = [sys.executable, __file__, "--compile"]
    for child in [subprocess.Popen([*command, str(number)]) for number in range(len(SHAPES))]:
        child.wait()


def compile_shape(shape: Shape) -> None:
    q, k, v = make_inputs(dataclasses.replace(shape, batch=1), device=DEVICE)
    for make, _ in calls_of(q, k, v, shape.causal).values():
        make()()


def show(row: dict[str, Any]) -> str:
    if "variant" in row:
        return f"D{row['head_dim']} {row['inputs']:10} {row['variant']:28} {row['error']:.2e}"
    where = f"D{row['head_dim']} S{row['seqlen']} {'causal' if row['causal'] else 'dense'}"
    took = f"{row['ms']:.4f} ms" if "ms" in row else f"{row['status']} {row.get('reason', '')}"
    return f"{where:20} {row['impl']:32} {took} {row.get('relative_error', '')}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="DistrAttention on this GPU: timed, and its errors.")
    parser.add_argument("--short", action="store_true", help="the first shapes alone, no record")
    parser.add_argument("--compile", type=int, help="compile what this shape needs, and nothing else")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/distr.json)")
    args = parser.parse_args(argv)
    if no_hopper():
        return 2
    if args.compile is not None:
        compile_shape(SHAPES[args.compile])
        return 0
    if not args.short:
        compile_all()
    few = slice(0, 1 if args.short else None)
    tables: dict[str, list[dict[str, Any]]] = {"attention": [], "parts": [], "errors": []}
    work = [("attention", lambda s=s: attention_rows(s, SWEEP)) for s in SHAPES[few]]
    work += [("parts", lambda s=s: parts_rows(s, SWEEP)) for s in PARTS[few]]
    work += [("errors", lambda D=D, kind=kind: error_rows(D, kind)) for D in (64, 128)[few] for kind in KINDS]
    for table, rows in work:
        for row in rows():
            print(show(row), flush=True)
            tables[table].append(row)
        torch.cuda.empty_cache()
    timed = tables["attention"] + tables["parts"]
    good = all(row["status"] == "ok" for row in timed)
    if not args.short:
        header = records.provenance(harness.method(SWEEP, DENSE))
        tables = {name: {"rows": rows} for name, rows in tables.items()}
        path = records.report_path("distr", header, args.out)
        records.write_report(path, {"notebook": "distr", **header}, tables)
        print(path)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

"""FP8 attention on this Hopper GPU, timed beside 16 bits and the peers.

    python tests/gpu/time_fp8.py            about 100 seconds; figures/data/<gpu>/fp8.json
    python tests/gpu/time_fp8.py --values   some 30 seconds: the pass over values, centered or not, and whole
                                            calls with the pass; no record
    python tests/gpu/time_fp8.py --tune     the quantizing kernels with other numbers of programs; no record

Three tables. `attention`: prepared operands, tensors (with the quantizing pass), attention in bfloat16, and
the peers of `attnlib.bench.fp8_peers`; TFLOP/s. `quantizing`: each role with each scaling; GB/s of what has
to move, 2 bytes read and 1 written for an element, and % of a device copy of as many bytes. `mean`: errors
with values of a mean, centered and not; nothing is timed. All that is compared is timed in the same shuffled
rounds, cold L2, with a control row. Outputs are judged before and after, on the first and the last head: the
RMS error against fp64 may be 1.5 times that of the model, of peers 4 times. A table is written when it is
done.
Status 0 when all of attnlib's were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]


from attnlib import attention, attention_fp8, quantize_fp8  # noqa: E402
from attnlib.bench import fp8_peers, harness, records  # noqa: E402
from attnlib.bench.oracle import Budget, Judgement, make_inputs, max_and_rms, over_budget  # noqa: E402
from attnlib.bench.setting import SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels.common.fp8 import WIDTHS, Recipe  # noqa: E402
from attnlib.kernels.fp8 import launch_quantize  # noqa: E402
from attnlib.kernels.reference.dense import attention_fp64  # noqa: E402

DEVICE = "cuda"
OURS = "attnlib fp8"
SIZES = (4, 32, 4096, 64), (2, 16, 8192, 128), (1, 8, 16384, 256), (1, 16, 32768, 128)
SHAPES = [Shape(*size, causal, "bfloat16") for size in SIZES for causal in (True, False)]
QUANTIZED = [Shape(*size, False, "bfloat16") for size in SIZES[:3]]
WHOLE = [
    Shape(2, 16, 8192, 128, dtype="bfloat16"), Shape(1, 16, 16384, 128, dtype="bfloat16"),
    Shape(2, 8, 8192, 256, dtype="bfloat16"),
]  # fmt: skip
RECIPES = {
    ("q", "block"): Recipe(), ("k", "block"): Recipe(), ("k", "block, not rotated"): Recipe("block", False),
    ("k", "head"): Recipe("head"), ("v", "head"): Recipe(), ("v", "head, not centered"): Recipe(center=False),
}  # fmt: skip

Function = Callable[[], torch.Tensor]


class Judge:
    """fp64, and the model's error, of the first head of the first batch element and the last of the last."""

    def __init__(self, tensors: Sequence[torch.Tensor], causal: bool) -> None:
        self.truth, modelled = [], []
        for place in (0, -1):
            one = [x[place, place][None, None] for x in tensors]
            self.truth.append(attention_fp64(*one, causal=causal)[0][0, 0])
            out = attention_fp8(*one, causal=causal, impl="reference", out_dtype=torch.float32)
            modelled.append(out[0, 0])
        self.usual = max_and_rms(torch.stack(modelled).double() - torch.stack(self.truth))

    def judge(self, out: torch.Tensor, factor: float) -> Judgement:
        found = torch.stack([out[0, 0], out[-1, -1]]).double()
        error, rms = max_and_rms(found - torch.stack(self.truth))
        budget = Budget(2 * factor * self.usual[0], factor * self.usual[1])
        fault = over_budget(error, rms, budget)
        return Judgement(error, rms, budget, not fault, fault)


# ---------------------------------------------------------------- timing


class Run(harness.Run):
    """One implementation of a call of attention, or of a quantizing pass, which moves so many bytes."""

    def __init__(self, name: str, shape: Shape, make: Callable[[], Function], judge: Judge | None,
                 control: bool = False, moved: int = 0) -> None:  # fmt: skip
        super().__init__(name, shape, control)
        self.moved, self.judge, self.is_peer = moved, judge, not name.startswith("attnlib")
        self.attempt(lambda: self._make(make))
        self.attempt(lambda: self.gate(None))

    def _make(self, make: Callable[[], Function]) -> None:
        try:
            self.call = make()
        except ImportError as error:
            self.stop("not installed", str(error))

    def gate(self, oracle: None) -> None:
        out = self.call()
        torch.cuda.synchronize()
        if self.judge is None:
            return
        out = getattr(self.call, "finish", lambda x: x)(out)
        verdict = self.judge.judge(out, 4.0 if self.is_peer else 1.5)
        self.row |= {"max_error": verdict.max_error, "rms_error": verdict.rms_error}
        if not verdict.ok:
            self.stop("wrong", verdict.reason)

    def finish(self, oracle: None) -> None:
        super().finish(oracle)
        if self.ok and self.moved:
            del self.row["tflops"]
            self.row |= {"bytes": self.moved, "gb_per_s": self.moved / self.row["ms"] * 1e-6}


def attention_rows(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    q, k, v = tensors = make_inputs(shape, device=DEVICE)
    causal, judge = shape.causal, Judge(tensors, shape.causal)
    operands = [quantize_fp8(x, role) for x, role in zip(tensors, "qkv", strict=True)]
    unscaled = [
        quantize_fp8(x, role, scaling="tensor", rotate=False, center=False)
        for x, role in zip(tensors, "qkv", strict=True)
    ]
    as_it_is = quantize_fp8(v, "v", center=False)
    makes = {
        OURS: lambda: lambda: attention_fp8(*operands, causal=causal),
        f"{OURS}, one scale": lambda: lambda: attention_fp8(*unscaled, causal=causal),
        f"{OURS}, not centered": lambda: lambda: attention_fp8(*operands[:2], as_it_is, causal=causal),
        f"{OURS}, with the pass": lambda: lambda: attention_fp8(q, k, v, causal=causal),
        "attnlib bf16": lambda: lambda: attention(q, k, v, causal=causal),
        "fa3 fp8": lambda: fp8_peers.fa3_fp8(q, k, v, causal),
        "fa3 fp8, vLLM": lambda: fp8_peers.vllm_fp8(q, k, v, causal),
        "fa3 bf16": lambda: fp8_peers.fa3_bf16(q, k, v, causal),
        "cudnn fp8": lambda: fp8_peers.cudnn_fp8(q, k, v, causal),
    }
    runs = [Run(name, shape, make, judge) for name, make in makes.items()]
    runs.append(Run(OURS, shape, makes[OURS], judge, control=True))
    harness.time_rounds(runs, None, setting, lambda text: None)
    yield from (run.row for run in runs)


def copying(moved: int) -> Function:
    source, target = (torch.empty(moved // 2, dtype=torch.int8, device=DEVICE) for _ in range(2))
    return lambda: target.copy_(source)


def quantizing_rows(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    x, _, _ = make_inputs(shape, device=DEVICE)
    moved, runs = x.numel() * (x.element_size() + 1), []
    for number, ((role, scaling), recipe) in enumerate([*RECIPES.items(), *list(RECIPES.items())[:1]]):
        name = f"attnlib {role}, {scaling}"
        call = lambda role=role, recipe=recipe: (  # noqa: E731
            quantize_fp8(x, role, **recipe._asdict()).data
        )
        runs.append(Run(name, shape, lambda call=call: call, None, number == len(RECIPES), moved))
    copy = Run("copy", shape, lambda: copying(moved), None, moved=moved)
    runs.append(copy)
    harness.time_rounds(runs, None, setting, lambda text: None)
    for run in runs:
        if "gb_per_s" in run.row:
            run.row["percent_of_copy"] = 100 * run.row["gb_per_s"] / copy.row["gb_per_s"]
        yield run.row


def mean_rows(head_dim: int) -> Iterator[dict[str, Any]]:
    """RMS errors with values of a mean, centered and not, beside the RMS (`size`) of the output without that
    mean. FP8's outputs are float32, so that only the products err."""
    for seqlen, mean, causal in product((1024, 16384), (0.0, 1.0, 10.0), (True, False)):
        shape = Shape(1, 2, seqlen, head_dim, causal, "bfloat16")
        q, k, v = make_inputs(shape, device=DEVICE)
        size = attention_fp64(*(x[:, :1] for x in (q, k, v)), causal=causal)[0].square().mean().sqrt().item()
        v = v + mean
        truth = attention_fp64(*(x[:, :1] for x in (q, k, v)), causal=causal)[0]
        told = {"causal": causal, "out_dtype": torch.float32}
        outs = {
            OURS: attention_fp8(q, k, v, **told),
            f"{OURS}, not centered": attention_fp8(q, k, v, **told, center=False),
            "attnlib bf16": attention(q, k, v, causal=causal),
        }
        for name, out in outs.items():
            error = max_and_rms(out[:, :1].double() - truth)[1]
            found = {"mean": mean, "rms_error": error, "size": size, "status": "ok"}
            yield {"impl": name, **shape.to_dict(), **found}


def values_rows(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    """The pass over values, centered and not, beside a copy."""
    x = make_inputs(shape, device=DEVICE)[2]
    calls = {
        "attnlib v": lambda: quantize_fp8(x, "v").data,
        "attnlib v, not centered": lambda: quantize_fp8(x, "v", center=False).data,
    }
    moved = x.numel() * (x.element_size() + 1)
    runs = [Run(name, shape, lambda call=call: call, None, moved=moved) for name, call in calls.items()]
    runs.append(Run("attnlib v", shape, lambda: calls["attnlib v"], None, True, moved))
    runs.append(Run("copy", shape, lambda: copying(moved), None, moved=moved))
    harness.time_rounds(runs, None, setting, lambda text: None)
    for run in runs:
        if "gb_per_s" in run.row:
            run.row["percent_of_copy"] = 100 * run.row["gb_per_s"] / runs[-1].row["gb_per_s"]
        yield run.row


def whole_rows(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    """Whole calls, with the quantizing pass, beside bfloat16."""
    q, k, v = tensors = make_inputs(shape, device=DEVICE)
    judge = Judge(tensors, shape.causal)
    calls = {
        f"{OURS}, with the pass": lambda: attention_fp8(q, k, v, causal=shape.causal),
        "attnlib bf16": lambda: attention(q, k, v, causal=shape.causal),
    }
    runs = [Run(name, shape, lambda call=call: call, judge) for name, call in calls.items()]
    runs.append(Run("attnlib bf16", shape, lambda: calls["attnlib bf16"], judge, control=True))
    harness.time_rounds(runs, None, setting, lambda text: None)
    yield from (run.row for run in runs)


def values(setting: Setting) -> bool:
    """Whether all ran and was right; the most important first."""
    right = True
    for shapes, rows in ((WHOLE, whole_rows), (QUANTIZED, values_rows)):
        for shape in shapes:
            for row in rows(shape, setting):
                print(show(row), flush=True)
                right &= row["status"] == "ok"
            torch.cuda.empty_cache()
    return right


def tune(setting: Setting) -> None:
    """The quantizing kernels with other numbers of programs and blocks."""
    before = launch_quantize.ROWS_PROGRAMS, launch_quantize.VALUES, launch_quantize.SPAN
    for programs, span in product((4, 8, 16, 32), (1, 4, 16)):
        launch_quantize.ROWS_PROGRAMS = dict.fromkeys(WIDTHS, programs)
        launch_quantize.VALUES = programs
        launch_quantize.SPAN = span
        launch_quantize.prepare.cache_clear()
        for shape in QUANTIZED:
            found = {row["impl"]: row.get("percent_of_copy", 0) for row in quantizing_rows(shape, setting)}
            shares = "  ".join(
                f"{name.removeprefix('attnlib ')} {share:.0f}%"
                for name, share in found.items()
            )
            print(f"programs {programs:2} span {span:2} D{shape.head_dim:3}: {shares}", flush=True)
    launch_quantize.ROWS_PROGRAMS, launch_quantize.VALUES, launch_quantize.SPAN = before


def show(row: dict[str, Any]) -> str:
    where = f"D{row['head_dim']} S{row['seqlen']} {'causal' if row['causal'] else 'dense'}"
    if "mean" in row:
        return f"{where:20} {row['impl']:32} V of mean {row['mean']:g}: {row['rms_error'] / row['size']:.3%}"
    if "gb_per_s" in row:
        speed = f"{row['gb_per_s']:6.0f} GB/s {row['percent_of_copy']:5.1f}% of copy"
    elif "tflops" in row:
        speed = f"{row['tflops']:6.0f} TFLOP/s, RMS error {row['rms_error']:.2e}"
    else:
        speed = f"{row['status']} {row.get('reason', '')}"
    return f"{where:20} {row['impl']:32} {speed}" + (f"  {row['ms']:.4f} ms" if "ms" in row else "")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time FP8 attention on this GPU.")
    parser.add_argument("--values", action="store_true", help="the pass over values, whole calls; no record")
    parser.add_argument("--tune", action="store_true", help="time the quantizing kernels alone, no record")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/fp8.json)")
    args = parser.parse_args(argv)
    if no_hopper():
        return 2
    if args.values:
        return int(not values(SWEEP))
    if args.tune:
        tune(SWEEP)
        return 0
    header = records.provenance(harness.method(SWEEP, OURS) | {"bytes": "2 read, 1 written for an element"})
    path = records.report_path("fp8", header, args.out)
    plan = [("quantizing", QUANTIZED, quantizing_rows), ("attention", SHAPES, attention_rows)]
    plan.append(("mean", [128], lambda head_dim, setting: mean_rows(head_dim)))
    ours = []
    for table, calls, rows in plan:
        found = []
        for call in calls:
            for row in rows(call, SWEEP):
                print(show(row), flush=True)
                found.append(row)
            torch.cuda.empty_cache()
        records.add_table(path, header, table, found)
        ours += [row for row in found if row["impl"].startswith("attnlib")]
    print(path)
    return int(any(row["status"] != "ok" for row in ours))


if __name__ == "__main__":
    sys.exit(main())

"""Time Block-Sparse FlashAttention on this GPU beside dense attention, over the number of blocks kept.

    python tests/gpu/time_bsfa.py                 about two minutes; figures/data/<gpu>/bsfa.json
    python tests/gpu/time_bsfa.py --rounds 9      more rounds than the 3 of a sweep
    python tests/gpu/time_bsfa.py --only 32768    some lengths; no record
    python tests/gpu/time_bsfa.py --tune          configurations beside each other; no record

B1 H8 D128, float16, causal. A table for each kind of inputs: `structured` with a sink, recency and needles
(`attnlib.bench.structured`), `iid` N(0, 1). Thresholds are calibrated on one draw and used on another one:
`asked` is how many blocks a block of queries was to keep beside those that are always kept, `kept` the share
that was kept of the blocks in sight. The Hopper kernel for all numbers, the portable one for one,
nvidia-modelopt's skip-softmax where ATTNLIB_PEERS has it, and attnlib's dense kernel, in the same shuffled
rounds, cold L2, with a control row. `difference` is the RMS difference from the dense kernel's output over
its RMS; `ceiling` is 2 / (1 + kept), `of_ceiling` what of it was reached. Outputs are judged twice:
the last 128 queries of the first and the last head against attention in fp64 to the blocks that were kept.
TFLOP/s count what dense attention needs.
The record is written after each length. Status 0 when all of attnlib's were right, 1 otherwise, 2 without a
GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention, attention_bsfa, bsfa_threshold  # noqa: E402
from attnlib.bench import bsfa_peers, harness, peers, records  # noqa: E402
from attnlib.bench.oracle import Oracle, make_inputs  # noqa: E402
from attnlib.bench.setting import SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.bench.structured import structured  # noqa: E402
from attnlib.kernels.bsfa import hopper  # noqa: E402
from attnlib.kernels.bsfa.configs import HopperBsfaConfig, hopper_bsfa_config  # noqa: E402
from attnlib.kernels.common.bsfa import KEYS, always_kept, element_mask  # noqa: E402
from attnlib.params import BsfaParams  # noqa: E402

DEVICE, DENSE = "cuda", "attnlib, dense"
LENGTHS, KINDS = (32768, 65536, 131072), ("structured", "iid")
ALL = 1 << 20
"""Blocks: more than there are."""
ASKED = {"structured": (0, 4, 8, 16, 32, 64, 128, ALL), "iid": (16, 64, 128)}
PORTABLE = 16
"""Blocks for which the portable kernel is timed."""
SKIPS = None, 1e-3, 1e-2
"""Thresholds of skip-softmax; None is its dense kernel."""
JUDGED = 128
"""Queries of two heads that are judged."""
TUNED, TUNED_FOR = 65536, (16, 128)


def shape_of(length: int) -> Shape:
    return Shape(1, 8, length, 128, True, "float16")


def inputs_of(kind: str, length: int, seed: int) -> tuple[torch.Tensor, ...]:
    if kind == "structured":
        return structured(shape_of(length), seed, DEVICE)
    return make_inputs(shape_of(length), "normal", seed, DEVICE)


def thresholds_of(kind: str, length: int, asked: Sequence[int]) -> dict[int, torch.Tensor]:
    """Calibrated on inputs of their own, for these numbers of blocks."""
    q, k, _ = inputs_of(kind, length, seed=1)
    return {count: bsfa_threshold(q, k, kept=count) for count in asked}


def called(kernel: str, count: int) -> str:
    return f"{kernel}, {'all' if count == ALL else count} blocks"


def kept_share(kept: torch.Tensor, rows: int, keys: int) -> float:
    """Of the blocks in sight."""
    _, end = always_kept(rows, keys, True)
    return kept.sum().item() / (int(end.sum()) * kept.shape[0] * kept.shape[1])


def ceiling(kept: float) -> float:
    """How many times faster than dense attention a kernel can be that computes all scores."""
    return 2 / (1 + kept)


class Judge:
    """fp64 attention of the last queries of two heads to the blocks that were kept; None: to all."""

    def __init__(self, tensors: Sequence[torch.Tensor], kept: torch.Tensor | None) -> None:
        q, k, v = (x[:, [0, -1]] for x in tensors)
        rows, keys = min(JUDGED, q.shape[2]), k.shape[2]
        blocks = -(-keys // KEYS)
        if kept is None:
            kept = torch.ones(1, 2, 2, blocks, dtype=torch.bool, device=q.device)
        else:
            kept = kept[:, [0, -1], -2:]
        mask = element_mask(kept, rows, keys, True)
        self.rows, self.oracle = rows, Oracle(q[:, :, -rows:], k, v, mask=mask)

    def judge(self, out: torch.Tensor):
        return self.oracle.judge(out[:, [0, -1], -self.rows :])


class Run(harness.Run):
    """One implementation. make: gives the call; what: of the row."""

    def __init__(self, name: str, length: int, make: Callable[[], Callable], what: dict[str, Any],
                 control: bool = False) -> None:  # fmt: skip
        super().__init__(name, shape_of(length), control)
        self.is_peer = not name.startswith(("attnlib", "bsfa"))
        self.row |= what
        self.oracle: Judge | None = None
        self.attempt(lambda: self._make(make))

    def _make(self, make: Callable[[], Callable]) -> None:
        try:
            self.call = make()
            self.call()
            torch.cuda.synchronize()
        except ImportError as error:
            self.stop("not installed", peers.brief(error))

    def difference(self, dense: torch.Tensor) -> None:
        """Keep how far it is from the dense kernel's output."""
        apart = (self.call().float() - dense.float()).square().mean().sqrt()
        self.row["difference"] = (apart / dense.float().square().mean().sqrt()).item()

    def gate(self, oracle: None) -> None:
        """By a judge of its own; a peer has none, as it decides by another rule."""
        super().gate(self.oracle)


def bsfa_call(tensors: Sequence[torch.Tensor], threshold: torch.Tensor, impl: str) -> Callable:
    return lambda: attention_bsfa(*tensors, threshold=threshold, impl=impl)


def bsfa_run(name: str, length: int, tensors: Sequence[torch.Tensor], threshold: torch.Tensor, impl: str,
             what: dict[str, Any]) -> Run:  # fmt: skip
    _, kept = attention_bsfa(*tensors, threshold=threshold, return_kept=True, impl=impl)
    share = kept_share(kept, length, length)
    run = Run(name, length, lambda: bsfa_call(tensors, threshold, impl),
              what | {"kept": share, "ceiling": ceiling(share)})  # fmt: skip
    run.oracle = Judge(tensors, kept)
    return run


def compare(runs: Sequence[Run], dense: torch.Tensor, setting: Setting) -> None:
    """Judge all, and time those that are right; the first one is the dense kernel, `dense` its output."""
    for run in runs:
        if run.ok:
            run.attempt(lambda run=run: run.difference(dense))
            run.attempt(lambda run=run: run.gate(None))
    harness.time_rounds(runs, None, setting, lambda text: None)
    took = runs[0].row.get("ms", math.nan)
    for run in runs:
        if "ms" in run.row:
            run.row["speedup"] = took / run.row["ms"]
            if "ceiling" in run.row:
                run.row["of_ceiling"] = run.row["speedup"] / run.row["ceiling"]


def rows_of(kind: str, length: int, setting: Setting) -> Iterator[dict[str, Any]]:
    """Times of all implementations for one kind of inputs, in the same rounds."""
    limits, tensors = thresholds_of(kind, length, ASKED[kind]), inputs_of(kind, length, seed=0)
    what, runs = {"inputs": kind}, []
    for second in (False, True):
        make = lambda: lambda: attention(*tensors, causal=True)  # noqa: E731
        run = Run(DENSE, length, make, what | {"kept": 1.0}, second)
        run.oracle = Judge(tensors, None)
        runs.append(run)
    for count, limit in limits.items():
        asked = what | {"asked": count}
        runs.append(bsfa_run(called("bsfa", count), length, tensors, limit, "hopper", asked))
        if count == PORTABLE:
            runs.append(bsfa_run(called("bsfa triton", count), length, tensors, limit, "triton", asked))
    for skip in SKIPS if kind == "structured" else ():
        name = "modelopt, dense" if skip is None else f"modelopt, skip-softmax {skip:g}"
        runs.append(Run(name, length, lambda skip=skip: bsfa_peers.skip_softmax(*tensors, skip), what))
    compare(runs, attention(*tensors, causal=True), setting)
    yield from (run.row for run in runs)


def variants() -> dict[str, HopperBsfaConfig]:
    """The usual configuration and its neighbors, each once."""
    own = hopper_bsfa_config(128)
    changes: list[dict[str, Any]] = [{"q_columns": n} for n in (0, 64, 128) if n != own.q_columns]
    changes += [{"l2_bytes": n << 20} for n in (16, 64)]
    return {"as it is": own} | {
        ", ".join(f"{name} {value}" for name, value in change.items()): replace(own, **change)
        for change in changes
    }


def tune_rows(setting: Setting) -> Iterator[dict[str, Any]]:
    tensors = inputs_of("structured", TUNED, seed=0)
    dense = attention(*tensors, causal=True)
    for count, limit in thresholds_of("structured", TUNED, TUNED_FOR).items():
        _, kept = attention_bsfa(*tensors, threshold=limit, return_kept=True, impl="hopper")
        share, judge = kept_share(kept, TUNED, TUNED), Judge(tensors, kept)
        runs = [Run(DENSE, TUNED, lambda: lambda: attention(*tensors, causal=True), {"kept": 1.0})]
        runs[0].oracle = Judge(tensors, None)
        for name, config in variants().items():
            params = BsfaParams(limit[None], True, 128**-0.5, config=config)
            run = Run(f"{called('bsfa', count)}, {name}", TUNED,
                      lambda params=params: lambda: hopper.forward(*tensors, params)[0],
                      {"kept": share, "ceiling": ceiling(share)})  # fmt: skip
            run.oracle = judge
            runs.append(run)
        compare(runs, dense, setting)
        yield from sorted((run.row for run in runs), key=lambda row: row.get("ms", 1e9))


def show(row: dict[str, Any]) -> str:
    where = f"N {row['seqlen']:6} {row.get('inputs', ''):10} {row['impl']:56}"
    if "ms" not in row:
        return f"{where} {row['status']} {row.get('reason', '')}"
    text = f"{where} {row['ms']:8.3f} ms {row['tflops']:6.0f} TFLOP/s"
    if "difference" in row:
        text += f"  {row['speedup']:.2f}x, difference {row['difference']:.1e}"
    if "of_ceiling" in row:
        text += f", kept {row['kept']:.1%}, {row['of_ceiling']:.0%} of {row['ceiling']:.2f}x"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time Block-Sparse FlashAttention on this GPU.")
    parser.add_argument("--tune", action="store_true", help="time configurations; write no record")
    parser.add_argument("--only", type=int, nargs="+", help="some lengths; write no record")
    parser.add_argument("--rounds", type=int, default=SWEEP.rounds, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/bsfa.json)")
    args = parser.parse_args(argv)
    setting = replace(SWEEP, rounds=args.rounds)
    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 2
    if args.tune:
        print(*map(show, tune_rows(setting)), sep="\n", flush=True)
        return 0
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    counted = {"flops": "of dense attention", "kept": "of the blocks of 64 x 128 scores in sight"}
    header = records.provenance(harness.method(setting, DENSE) | counted)
    path = records.report_path("bsfa", header, args.out)
    for length in args.only or LENGTHS:
        for kind in KINDS:
            rows = list(rows_of(kind, length, setting))
            print(*map(show, rows), "", sep="\n", flush=True)
            found[kind] += rows
            torch.cuda.empty_cache()
            if not args.only:
                tables = {name: {"rows": some} for name, some in found.items() if some}
                records.write_report(path, {"notebook": "bsfa", **header}, tables)
    ours = [row for rows in found.values() for row in rows if row["impl"].startswith(("attnlib", "bsfa"))]
    wrong = [row for row in ours if row["status"] != "ok"]
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

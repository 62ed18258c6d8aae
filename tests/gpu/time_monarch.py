"""Time MonarchAttention on this GPU beside dense attention, from 256 to 65536 tokens.

    python tests/gpu/time_monarch.py             about a minute; figures/data/<gpu>/monarch.json
    python tests/gpu/time_monarch.py --tune      other tiles beside the chosen ones, 40 seconds; no record
    python tests/gpu/time_monarch.py --only 4096   some numbers of tokens; no record
    python tests/gpu/time_monarch.py --vision    chapter 35's small model alone, 20 seconds; table `vision`

Table `sweep`: one sequence, 12 heads of 64 columns, float16, blocks of the default size, one to three
rounds; attnlib's dense kernel and SDPA's backends. Every call is replayed from a CUDA graph, so that what a
call of two short kernels takes is not the time of its launches. All that is compared is timed in the same
shuffled rounds, cold L2, with a control row. Outputs are judged before and after: of Monarch the first
and the last head against its model in fp64, of the others the last 256 queries of those heads against softmax
in fp64.
Table `vision`, likewise: attention of a layer of chapter 35's small model over 1000 pictures, with blocks of
each size of its table of accuracies.
TFLOP/s count what is computed: 4 * N * N * D for a dense head, and of Monarch the products of all rounds.
First one process for each number of tokens compiles, side by side.
Status 0 when all of attnlib's were right, 1 otherwise, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention, attention_monarch  # noqa: E402
from attnlib.bench import harness, monarch_quality, records  # noqa: E402
from attnlib.bench.oracle import Budget, Judgement, make_inputs, max_and_rms, over_budget  # noqa: E402
from attnlib.bench.setting import SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels import monarch  # noqa: E402
from attnlib.kernels.monarch.configs import MonarchConfig, Tile, monarch_config  # noqa: E402
from attnlib.kernels.reference import monarch as model  # noqa: E402
from attnlib.kernels.reference.dense import attention_fp64  # noqa: E402
from attnlib.params import MonarchParams, default_block  # noqa: E402

DEVICE = "cuda"
OURS, DENSE = "monarch, {} rounds", "attnlib"
ROUNDS = 1, 2, 3
TOKENS = 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536
TUNED = 256, 4096, 16384, 65536
PICTURES = Shape(1000, 4, monarch_quality.PICTURE_TOKENS, monarch_quality.CHANNELS // 4, False, "float16")
PICTURE_BLOCKS = 4, 12, 36
JUDGED = 256
"""Queries of a dense head that are judged."""
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
_BOTH = [(64, 64, 4, 2), (64, 128, 8, 2), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (32, 64, 4, 2)]
_CENTERS = [(64, 64, 4, 2), (128, 64, 4, 2), (128, 32, 8, 2), (256, 32, 8, 2), (64, 32, 4, 2)]
TILES = {"r_step": _BOTH, "l_step": _BOTH, "center_step": _CENTERS}
"""Rows, columns, warps and stages beside the chosen ones, each cut down to the blocks there are."""

Function = Callable[[], torch.Tensor]


def shape_of(tokens: int) -> Shape:
    return Shape(1, 12, tokens, 64, False, "float16")


def params_of(
    shape: Shape, steps: int, config: MonarchConfig | None = None, block: int | None = None
) -> MonarchParams:
    return MonarchParams(block or default_block(shape.seqlen), steps, 0, shape.head_dim**-0.5, None, config)


def monarch_flops(shape: Shape, steps: int, block: int | None = None) -> float:
    """Each round has two products of N x B scores with D columns and two of N x M; the last one has another,
    of values."""
    block = block or default_block(shape.seqlen)
    blocks = -(-shape.seqlen // block)
    scores = steps * (4 * block + 4 * blocks) + 2 * block
    return shape.batch * shape.heads * shape.seqlen * shape.head_dim * scores


class Judge:
    """What the first and the last head should be, and the errors that their roundings allow."""

    def __init__(self, tensors: Sequence[torch.Tensor], steps: int | None, block: int | None = None) -> None:
        """steps: rounds of Monarch; None for softmax. block: None for the default."""
        ends = [x[:, [0, -1]] for x in tensors]
        self.rows = slice(None) if steps else slice(-JUDGED, None)
        if steps:
            params = params_of(
                Shape(1, 2, tensors[0].shape[2], tensors[0].shape[3], False), steps, block=block
            )
            self.truth = model.output(*ends, params)
            usual = model.output(*ends, params, ends[0].dtype).double() - self.truth
        else:
            ends[0] = ends[0][:, :, self.rows]
            self.truth = attention_fp64(*ends)[0]
            weights = F.scaled_dot_product_attention(*[x.float() for x in ends])
            usual = weights.to(ends[0].dtype).double() - self.truth
        last = max_and_rms(self.truth.to(ends[0].dtype).double() - self.truth)
        self.budget = Budget(*(3 * (a + b) for a, b in zip(max_and_rms(usual), last, strict=True)))

    def judge(self, out: torch.Tensor) -> Judgement:
        error, rms = max_and_rms(out[:, [0, -1], self.rows].double() - self.truth)
        fault = over_budget(error, rms, self.budget)
        return Judgement(error, rms, self.budget, not fault, fault)


def captured(call: Function) -> Function:
    """The call as a CUDA graph, whose replays return the same tensor."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


class Run(harness.Run):
    """One implementation, replayed from a graph. steps: rounds of Monarch, None for dense attention."""

    def __init__(self, name: str, shape: Shape, make: Callable[[], Function], judge: Judge, steps: int | None,
                 control: bool = False, block: int | None = None) -> None:  # fmt: skip
        super().__init__(name, shape, control)
        self.judge, self.steps, self.is_peer = judge, steps, name in PEERS
        self.row |= {"steps": steps, "block": (block or default_block(shape.seqlen)) if steps else None}
        self.attempt(lambda: self._make(make))
        self.attempt(lambda: self.gate(None))

    def _make(self, make: Callable[[], Function]) -> None:
        self.call = captured(make())

    @property
    def flops(self) -> float:
        if self.steps is None:
            return super().flops
        return monarch_flops(self.shape, self.steps, self.row["block"])

    def finish(self, oracle: None) -> None:
        super().finish(oracle)
        for name in ("registers", "spills", "shared_bytes", "num_warps", "peak_bytes"):
            self.row.pop(name, None)  # a replay allocates nothing and shows no kernels

    def gate(self, oracle: None) -> None:
        out = self.call()
        torch.cuda.synchronize()
        verdict = self.judge.judge(out)
        self.row |= {"max_error": verdict.max_error, "rms_error": verdict.rms_error}
        if not verdict.ok:
            self.stop("wrong", verdict.reason)


def sdpa(tensors: Sequence[torch.Tensor], backend: SDPBackend) -> Function:
    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*tensors)

    return call


def configured(tensors: Sequence[torch.Tensor], params: MonarchParams) -> Function:
    return lambda: monarch.forward(*tensors, params)


def sweep_rows(tokens: int, setting: Setting) -> Iterator[dict[str, Any]]:
    shape = shape_of(tokens)
    tensors = make_inputs(shape, device=DEVICE)
    block, runs = default_block(tokens), []
    for steps in (*ROUNDS, ROUNDS[0]):
        make = lambda steps=steps: lambda: attention_monarch(*tensors, block=block, steps=steps)  # noqa: E731
        name, second = OURS.format(steps), len(runs) == len(ROUNDS)
        runs.append(Run(name, shape, make, Judge(tensors, steps), steps, second))
    runs += dense_runs(shape, tensors)
    harness.time_rounds(runs, None, setting, lambda text: None)
    yield from (run.row for run in runs)


def dense_runs(shape: Shape, tensors: Sequence[torch.Tensor]) -> list[Run]:
    judge = Judge(tensors, None)
    ours = Run(DENSE, shape, lambda: lambda: attention(*tensors), judge, None)
    return [ours] + [Run(name, shape, lambda b=b: sdpa(tensors, b), judge, None) for name, b in PEERS.items()]


def vision_rows(setting: Setting) -> Iterator[dict[str, Any]]:
    tensors, runs = make_inputs(PICTURES, device=DEVICE), []
    cases = [(block, steps) for block in PICTURE_BLOCKS for steps in ROUNDS]
    for block, steps in (*cases, cases[0]):
        params = params_of(PICTURES, steps, block=block)
        name, judge = f"{OURS.format(steps)}, block {block}", Judge(tensors, steps, block)
        make = lambda params=params: configured(tensors, params)  # noqa: E731
        runs.append(Run(name, PICTURES, make, judge, steps, len(runs) == len(cases), block))
    runs += dense_runs(PICTURES, tensors)
    harness.time_rounds(runs, None, setting, lambda text: None)
    yield from (run.row for run in runs)


def variants(tokens: int) -> dict[str, MonarchConfig]:
    """Configurations with one other tile, each once."""
    block = default_block(tokens)
    blocks = -(-tokens // block)
    own = monarch_config(block, blocks, 64, 2)
    found = {"chosen": own}
    for kernel, tiles in TILES.items():
        size = max(16, 1 << ((block if kernel == "r_step" else blocks) - 1).bit_length())
        for rows, columns, warps, stages in tiles:
            tile = Tile(min(rows, size), min(columns, size), warps, stages)
            config = replace(own, **{kernel: tile})
            if config not in found.values():
                found[f"{kernel} {tile.rows} x {tile.columns}, {warps} warps, {stages} stages"] = config
    return found


def tune_rows(tokens: int, setting: Setting) -> Iterator[dict[str, Any]]:
    """Of two rounds, which have all kernels."""
    shape = shape_of(tokens)
    tensors = make_inputs(shape, device=DEVICE)
    judge, runs = Judge(tensors, 2), []
    for name, config in variants(tokens).items():
        params = params_of(shape, 2, config)
        runs.append(Run(name, shape, lambda params=params: configured(tensors, params), judge, 2))
    harness.time_rounds(runs, None, setting, lambda text: None)
    yield from sorted((run.row for run in runs), key=lambda row: row.get("ms", 1e9))


def compile_vision(block: int) -> None:
    """Call its kernels once."""
    tensors = make_inputs(PICTURES, device=DEVICE)
    for steps in ROUNDS:
        monarch.forward(*tensors, params_of(PICTURES, steps, block=block))
    torch.cuda.synchronize()


def compile_all(tokens: int, tune: bool) -> None:
    """Call all kernels once."""
    tensors = make_inputs(shape_of(tokens), device=DEVICE)
    configs = variants(tokens).values() if tune else (None,)
    for config in configs:
        for steps in (2,) if tune else ROUNDS:
            monarch.forward(*tensors, params_of(shape_of(tokens), steps, config))
    torch.cuda.synchronize()


def show(row: dict[str, Any]) -> str:
    where = f"N {row['seqlen']:6} {row['impl']:40}"
    if "ms" not in row:
        return f"{where} {row['status']} {row.get('reason', '')}"
    return f"{where} {row['ms'] * 1e3:9.1f} us {row['tflops']:6.0f} TFLOP/s  RMS error {row['rms_error']:.1e}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time MonarchAttention on this GPU.")
    parser.add_argument("--tune", action="store_true", help="time other tiles; write no record")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of tokens; write no record")
    parser.add_argument("--vision", action="store_true", help="the small model's layer alone")
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/monarch.json)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("needs a CUDA GPU", file=sys.stderr)
        return 2
    if args.compile:
        compile_vision(args.compile) if args.vision else compile_all(args.compile, args.tune)
        return 0
    if args.vision:
        return vision(args.out)
    some = args.only or (TUNED if args.tune else TOKENS)
    compile_in_children(some, *["--tune"] * args.tune)
    found: list[dict[str, Any]] = []
    for tokens in some:
        rows = list((tune_rows if args.tune else sweep_rows)(tokens, SWEEP))
        print(*map(show, rows), "", sep="\n", flush=True)
        found += rows
        torch.cuda.empty_cache()
    if not args.tune and not args.only:
        keep("sweep", found, OURS.format(ROUNDS[0]), args.out)
        return max(any_wrong(found), vision(args.out))
    return any_wrong(found)


def vision(out: Path | None) -> int:
    compile_in_children(PICTURE_BLOCKS, "--vision")
    found = list(vision_rows(SWEEP))
    print(*map(show, found), sep="\n", flush=True)
    keep("vision", found, found[0]["impl"], out)
    return any_wrong(found)


def compile_in_children(some: Sequence[int], *options: str) -> None:
    command = [sys.executable, __file__, *options, "--compile"]
    for process in [subprocess.Popen([*command, str(one)]) for one in some]:
        process.wait()


def any_wrong(rows: list[dict[str, Any]]) -> int:
    return int(any(row["status"] != "ok" and row["impl"] not in PEERS for row in rows))


def keep(table: str, rows: list[dict[str, Any]], control: str, out: Path | None) -> None:
    """A table of the record, beside the other one."""
    counted = {"flops": "of what is computed", "calls": "replayed from CUDA graphs"}
    header = records.provenance(harness.method(SWEEP, control) | counted)
    path = records.report_path("monarch", header, out)
    records.add_table(path, {"notebook": "monarch", **header}, table, rows)
    print(path)


if __name__ == "__main__":
    sys.exit(main())

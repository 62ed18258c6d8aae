"""Time SeerAttention on this Hopper GPU: its ground truth, its gate, sparse prefill and sparse decoding.

    python tests/gpu/time_seer.py                    a minute and a half; figures/data/<gpu>/seer.json
    python tests/gpu/time_seer.py --tables quality   some tables
    python tests/gpu/time_seer.py --only 8192        some lengths, no record

Five tables, all causal, of 1 sequence, 32 heads of 128 columns, float16, but for the last two. `pooled`:
attention that also gives the pooled map, by maxima that the forward kernel keeps and by Q K^T a second time,
beside the dense kernel; and up to 32768 tokens that forward kernel alone. `prefill`: the block-sparse engine
under random causal masks of 128 x 128 blocks, and what its copies take alone (`attnlib.bench.copies_alone`);
at one sparsity also blocks of 64 x 64; `whole, 0.9` begins with queries and keys: gate, choice, mask,
attention. `parts`: what gate, choice and lists take by themselves. `decode`: one token, 32 heads on 8 key
heads, against blocks of 64 that each key head chose, and against the whole cache. `quality`: a small model
that copies, its gates, recall and loss (`attnlib.bench.seer_quality`).
`share` is the part of the causal blocks that are kept.
The record has one table more, which is not made again: `pooled_scores`, `pooled` of 2026-11-26, when the
forward kernel took maxima of scores for the map.

All that is compared is timed in the same shuffled rounds, cold L2, with a control row. What has many short
kernels (`whole`, `parts`, `decode`) is replayed from CUDA graphs. Outputs are judged
before and after against fp64: of the first and the last head the last 256 rows. Maps likewise.
Status 0 when all were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import BlockMask, attention, attention_decode, attention_pooled  # noqa: E402
from attnlib.bench import copies_alone, harness, records, seer_quality, timing  # noqa: E402
from attnlib.bench.oracle import Oracle, make_inputs  # noqa: E402
from attnlib.bench.setting import SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels import KEEPS_MAXIMA, LISTERS  # noqa: E402
from attnlib.params import Params, mask_window  # noqa: E402
from attnlib.seer import SeerGate, decode_chosen, mask_of, top, top_of_density  # noqa: E402

DEVICE, DENSE = "cuda", "attnlib"
HEADS, WIDTH, BLOCK = 32, 128, 128
LENGTHS = 8192, 32768, 131072
SPARSITIES = 0.5, 0.7, 0.9
FINE = 0.9  # at which blocks of 64 are timed, too
WHOLE = 0.5, 0.9
CACHES = (1, 32768), (1, 131072), (16, 32768)  # sequences, tokens
KEY_HEADS, PAGE = 8, 64
JUDGED = 256  # rows

Function = Callable[[], Any]


def shape_of(length: int) -> Shape:
    return Shape(1, HEADS, length, WIDTH, True, "float16")


def random_blocks(length: int, block: int, sparsity: float) -> torch.Tensor:
    """Bool (1, HEADS, n, n): of each row as many blocks as the triangle's share allows, any but its own."""
    n = -(-length // block)
    scores = torch.rand(1, HEADS, n, n, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(n))
    below = torch.ones(n, n, dtype=torch.bool, device=DEVICE).tril()
    return top(scores.masked_fill(~below, -torch.inf), top_of_density(n, 1 - sparsity)) & below


def share(blocks: torch.Tensor) -> float:
    n = blocks.shape[-1]
    return blocks.sum().item() / (blocks.shape[0] * blocks.shape[1] * n * (n + 1) / 2)


class Judge:
    """The truth of the last rows of two heads, under blocks or all keys; and of the last row of the pooled
    map, of lengths that whole blocks make."""

    def __init__(self, q, k, v, blocks: torch.Tensor | None = None, block: int = BLOCK) -> None:
        length = q.shape[2]
        self.rows, heads = slice(length - JUDGED, length), [0, q.shape[1] - 1]
        self.heads = heads
        q, k, v = q[:, heads, self.rows], k[:, heads], v[:, heads]
        place = torch.arange(length, device=DEVICE)
        mask = place[self.rows, None] >= place
        if blocks is not None:
            own = blocks[:, heads][:, :, place[self.rows] // block][..., place // block]
            mask = mask & own
        self.oracle = Oracle(q, k, v, mask=mask.expand(1, 2, JUDGED, length))
        scores = q[:, :, -BLOCK:].double() @ k.double().mT * WIDTH**-0.5
        scores = scores.masked_fill(~mask[..., -BLOCK:, :], -torch.inf)
        self.map = torch.softmax(scores, -1).unflatten(3, (-1, BLOCK)).amax((2, 4))

    def reason(self, found: Any) -> str | None:
        """What is wrong with an output, or with (output, map)."""
        out, pooled = found if isinstance(found, tuple) else (found, None)
        verdict = self.oracle.judge(out[:, self.heads, self.rows].contiguous())
        if not verdict.ok:
            return verdict.reason
        if pooled is not None:
            error = (pooled[:, self.heads, -1].double() - self.map).abs() - 2e-3 * self.map
            if not error.max().item() <= 1e-6:
                return f"map: beyond its tolerance by {error.max().item():.1e}"
        return None


class Run(harness.Run):
    """One call. part: of the FLOPs of the shape that are computed."""

    def __init__(self, name: str, shape: Shape, call: Function, judge: Judge | None, part: float = 1.0,
                 control: bool = False) -> None:  # fmt: skip
        super().__init__(name, shape, control)
        self.judge, self.part, self.call = judge, part, call
        self.row["share"] = part
        self.attempt(lambda: self.gate(None))

    @property
    def flops(self) -> float:
        return super().flops * self.part

    def gate(self, oracle: None) -> None:
        found = self.call()
        torch.cuda.synchronize()
        reason = self.judge.reason(found) if self.judge is not None else None
        if reason:
            self.stop("wrong", reason)


def timed(runs: Sequence[Run], setting: Setting) -> Iterator[dict[str, Any]]:
    harness.time_rounds(list(runs), None, setting, lambda text: None)
    yield from (run.row for run in runs)


def captured(call: Function) -> Function:
    """A call as a CUDA graph, whose replays return the same tensors: what has many short kernels would else
    be timed as long as the host takes to launch them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = call()

    def replay() -> Any:
        graph.replay()
        return found

    return replay


def pooled_rows(length: int, setting: Setting) -> Iterator[dict[str, Any]]:
    shape = shape_of(length)
    q, k, v = make_inputs(shape, device=DEVICE)
    judge = Judge(q, k, v)
    calls = {
        DENSE: lambda: attention(q, k, v, causal=True),
        "pooled": lambda: attention_pooled(q, k, v, causal=True, block=BLOCK),
        "pooled, QK^T twice": lambda: attention_pooled(q, k, v, causal=True, block=BLOCK, impl="triton"),
    }
    if length <= 32768:  # the maxima of all heads at once
        params = Params(mask_window(True, None), WIDTH**-0.5, return_lse=True)
        calls["forward that keeps maxima"] = lambda: KEEPS_MAXIMA["hopper"].forward(q, k, v, params)[0]
    else:
        del calls["pooled, QK^T twice"]
    runs = [Run(name, shape, call, judge) for name, call in calls.items()]
    yield from timed([*runs, Run(DENSE, shape, calls[DENSE], judge, control=True)], setting)


def prefill_rows(length: int, setting: Setting) -> Iterator[dict[str, Any]]:
    shape = shape_of(length)
    q, k, v = make_inputs(shape, device=DEVICE)
    runs = [Run(DENSE, shape, lambda: attention(q, k, v, causal=True), Judge(q, k, v))]
    for sparsity in SPARSITIES:
        for block in (BLOCK, BLOCK // 2) if sparsity == FINE else (BLOCK,):
            blocks = random_blocks(length, block, sparsity)
            mask = BlockMask.from_chosen(blocks, length, block_size=block, density=1 - sparsity)
            name = f"sparse, {sparsity}" + (", blocks of 64" if block != BLOCK else "")
            judge = Judge(q, k, v, blocks, block)
            call = lambda mask=mask: attention(q, k, v, block_mask=mask)  # noqa: E731
            runs.append(Run(name, shape, call, judge, share(blocks)))
            if block == BLOCK:
                copies = copies_alone.call_of(q, k, v, mask)
                runs.append(Run(f"copies, {sparsity}", shape, copies, None, share(blocks)))
    gate = gate_of(length)
    for sparsity in WHOLE:
        count = top_of_density(-(-length // BLOCK), 1 - sparsity)

        def call(count: int = count, sparsity: float = sparsity) -> torch.Tensor:
            with torch.no_grad():
                blocks = top(gate(q, k), count)
                return attention(q, k, v, block_mask=mask_of(blocks, length, BLOCK, 1 - sparsity))

        with torch.no_grad():
            chosen = top(gate(q, k), count)
            n = chosen.shape[-1]
            chosen &= torch.ones(n, n, dtype=torch.bool, device=DEVICE).tril()
        runs.append(Run(f"whole, {sparsity}", shape, captured(call), Judge(q, k, v, chosen), share(chosen)))
    runs.append(Run(DENSE, shape, runs[0].call, runs[0].judge, control=True))
    yield from timed(runs, setting)


def gate_of(length: int) -> SeerGate:
    """Not trained: its time does not depend on that."""
    torch.manual_seed(length)
    return SeerGate(HEADS, HEADS, WIDTH, block=BLOCK).to(DEVICE, torch.float16)


@torch.no_grad()
def part_rows(length: int, setting: Setting) -> Iterator[dict[str, Any]]:
    q, k, _ = make_inputs(shape_of(length), device=DEVICE)
    gate, n = gate_of(length), -(-length // BLOCK)
    scores = gate(q, k)
    count = top_of_density(n, 0.1)
    blocks = top(scores, count)
    parts = {
        "gate": lambda: gate(q, k),
        "choice": lambda: top(scores, count),
        "lists": lambda: LISTERS.lists_of_chosen(blocks, length, BLOCK // 64, 128),
    }
    for name, part in parts.items():
        call = captured(part)
        ms, low, high = timing.time_ms(call, setting=setting)
        yield {"seqlen": length, "part": name, "ms": ms, "ms_p20": low, "ms_p80": high, "status": "ok"}


@torch.no_grad()
def decode_rows(case: tuple[int, int], setting: Setting) -> Iterator[dict[str, Any]]:
    B, length = case
    shape = Shape(B, HEADS, 1, WIDTH, True, "float16", KEY_HEADS, length)
    q, k, v = make_inputs(shape, device=DEVICE)
    n, runs = length // PAGE, []
    scores = torch.rand(B, KEY_HEADS, n, device=DEVICE)
    dense = DecodeJudge(q, k, v, None)
    runs.append(Run(DENSE, shape, captured(lambda: attention_decode(q, k, v)), dense))
    for sparsity in WHOLE:
        count = round((1 - sparsity) * n)
        chosen = scores.clone()
        chosen[..., -1] = torch.inf
        blocks = chosen >= chosen.topk(count, -1).values[..., -1:]
        call = lambda count=count: decode_chosen(q, k, v, scores, count)  # noqa: E731
        runs.append(
            Run(f"chosen, {sparsity}", shape, captured(call), DecodeJudge(q, k, v, blocks), count / n)
        )
    gate = SeerGate(HEADS, KEY_HEADS, WIDTH, block=PAGE, decode=True).to(DEVICE, torch.float16)
    keys = gate.keys(k)
    call = captured(lambda: gate.queries(q, length - 1) @ keys.mT)
    runs.append(Run("scores", shape, call, None, 0.0))
    runs.append(Run(DENSE, shape, runs[0].call, dense, control=True))
    for row in timed(runs, setting):
        row.pop("tflops", None)  # bytes are what it takes
        yield row | {"cache_bytes": 2 * B * KEY_HEADS * length * WIDTH * 2 * row["share"]}


class DecodeJudge(Judge):
    """Of one token of the first and the last sequence; blocks: bool (B, KEY_HEADS, n)."""

    def __init__(self, q, k, v, blocks: torch.Tensor | None) -> None:
        self.places = [0, q.shape[0] - 1][: q.shape[0]]
        q, k, v = (x[self.places] for x in (q, k, v))
        mask = torch.ones(len(self.places), HEADS, 1, k.shape[2], dtype=torch.bool, device=DEVICE)
        if blocks is not None:
            own = blocks[self.places].repeat_interleave(PAGE, -1)
            mask = own.repeat_interleave(HEADS // KEY_HEADS, 1)[:, :, None]
        self.oracle = Oracle(q, k, v, mask=mask)

    def reason(self, found: torch.Tensor) -> str | None:
        verdict = self.oracle.judge(found[self.places].contiguous())
        return None if verdict.ok else verdict.reason


def quality_rows(_: Any, setting: Setting) -> Iterator[dict[str, Any]]:
    for row in seer_quality.quality(
        seer_quality.Setup(), DEVICE, lambda text: print("   ", text, flush=True)
    ):
        yield row | {"status": "ok" if row["loss"] == row["loss"] else "wrong"}


TABLES: dict[str, tuple[Callable, Sequence]] = {
    "pooled": (pooled_rows, LENGTHS), "prefill": (prefill_rows, LENGTHS), "parts": (part_rows, LENGTHS),
    "decode": (decode_rows, CACHES), "quality": (quality_rows, (0,)),
}  # fmt: skip


def show(table: str, row: dict[str, Any]) -> str:
    where = f"{table:8} S {row.get('seqlen_k', row['seqlen']):6} {row.get('impl', row.get('part', '')):28}"
    if "loss" in row:
        more = "".join(f" {name} {row[name]:.3f}" for name in ("kept", "found", "mass") if name in row)
        return f"{where} {row['choice']:8} density {row['density']:.2f} loss {row['loss']:.3f}{more}"
    if "ms" not in row:
        return f"{where} {row['status']} {row.get('reason', '')}"
    kept = f" share {row['share']:.3f}" if "share" in row else ""
    return f"{where} {row['ms']:9.3f} ms {row.get('tflops', 0):6.0f} TFLOP/s{kept}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time SeerAttention on this GPU.")
    parser.add_argument("--tables", default=",".join(TABLES), help="(default: %(default)s)")
    parser.add_argument("--only", type=int, nargs="+", help="lengths; write no record")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/seer.json)")
    args = parser.parse_args(argv)
    if no_hopper():
        return 2
    if not set(args.tables.split(",")) <= set(TABLES):
        parser.error(f"--tables: expected some of {', '.join(TABLES)}, got {args.tables}")
    header = records.provenance(harness.method(SWEEP, DENSE) | {"flops": "of the blocks that are kept"})
    path, good = records.report_path("seer", header, args.out), True
    for name in args.tables.split(","):
        make, cases = TABLES[name]
        rows: list[dict[str, Any]] = []
        for case in cases:
            if args.only and (case[1] if isinstance(case, tuple) else case) not in args.only:
                continue
            for row in make(case, SWEEP):
                print(show(name, row), flush=True)
                rows.append(row)
                good &= row["status"] == "ok"
            torch.cuda.empty_cache()
        if not args.only:
            records.add_table(path, header, name, rows)
    if not args.only:
        print(path)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())

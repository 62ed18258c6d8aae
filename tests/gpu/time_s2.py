"""Time S2-Attention on this Hopper GPU beside our own dense kernel, from 1024 to 131072 tokens.

    python tests/gpu/time_s2.py                   a minute and a half; figures/data/<gpu>/s2.json
    python tests/gpu/time_s2.py --tables backward some tables; each length is in the record when it is done
    python tests/gpu/time_s2.py --only 4096       some lengths, no record

Three tables, of 4 sequences and 16 heads of 128 columns in bfloat16, causal, under the published pattern:
blocks of 64, 8 near ones, a stride of 16. `forward` and `backward`: the block-sparse engine, the same with
two dense heads at some lengths, what its copies take alone (`attnlib.bench.copies_alone`), forward without
`leaves_out`, the kernel of chapter 33 at two of them, and dense attention; of the backward pass also what it
was made of: keys in order, the first queries first, long columns where their section has them, and programs
of one column.
`decode`: one token against a cache that keeps what the pattern needs, and against one that keeps all. `share`
is the part of causal attention's blocks that a pattern keeps, `mask_ms` what making the mask and its lists
takes.

All that is compared is timed in the same shuffled rounds, cold L2, with a control row. Outputs and gradients
are judged before and after against fp64, of the first and the last head: the last rows of out and dq, and the
last keys of dk and dv, which only those rows see; of up to 2048 tokens that is all of them.
Status 0 when all were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import BlockMask, S2Pattern, attention, attention_decode, dispatch  # noqa: E402
from attnlib.bench import backward, copies_alone, harness, records, sources  # noqa: E402
from attnlib.bench.gradient_oracle import GradientOracle  # noqa: E402
from attnlib.bench.oracle import Oracle, make_inputs  # noqa: E402
from attnlib.bench.setting import SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.block_mask.lists import lists_of  # noqa: E402
from attnlib.kernels.common.signature import signature  # noqa: E402
from attnlib.kernels.sparse import hopper  # noqa: E402
from attnlib.kernels.sparse.configs_hopper import hopper_sparse_backward_config  # noqa: E402
from attnlib.params import MaskWindow, Params  # noqa: E402

DEVICE = "cuda"
OURS, HYBRID, STEP, DENSE = "S2", "S2, 2 dense heads", "33_s2", "attnlib"
COPIES, WHOLE = "S2, copies", "S2, no step left out"
IN_ORDER, FIRST_FIRST = "S2, keys in order", "S2, first queries first"
LATE, LEAVES = "S2, long columns late", "S2, programs of a column"
BATCH, HEADS, WIDTH = 4, 16, 128
LENGTHS = tuple(1024 << i for i in range(8))
HYBRID_LENGTHS = 16384, 65536
STEP_LENGTHS = 4096, 16384
CACHES = 16384, 65536, 131072
PATTERN = S2Pattern(HEADS)
PATTERNS = {
    OURS: PATTERN, WHOLE: PATTERN, STEP: PATTERN, IN_ORDER: PATTERN, FIRST_FIRST: PATTERN, LATE: PATTERN,
    LEAVES: PATTERN,
    HYBRID: S2Pattern(HEADS, dense_heads=2),
    DENSE: S2Pattern(HEADS, dense_heads=HEADS),
}  # fmt: skip
JUDGED, JUDGED_DENSE = 2048, 256
"""Last rows that are judged: so many under a pattern, and of a head that sees all keys."""

Tensors = Sequence[torch.Tensor]
Function = Callable[[], Any]


def shape_of(length: int) -> Shape:
    return Shape(BATCH, HEADS, length, WIDTH, True, "bfloat16")


def seen_by(pattern: S2Pattern, head: int, rows: torch.Tensor, length: int) -> torch.Tensor:
    """Bool (rows, length), by the definition and not by the mask."""
    keys, size = torch.arange(length, device=rows.device), pattern.block_size
    i, j = rows[:, None] // size, keys // size
    seen = (i - j < pattern.local_blocks) | (j % pattern.stride == pattern.first(head))
    return (seen | pattern.is_dense(head)) & (rows[:, None] >= keys)


class Judge:
    """The truth of one head: of its last rows, against the keys that they see."""

    def __init__(self, tensors: Tensors, pattern: S2Pattern, head: int, gradients: bool) -> None:
        """tensors: q, k, v and the gradient of the output."""
        length = tensors[0].shape[2]
        rows = min(length, JUDGED_DENSE if pattern.is_dense(head) else JUDGED)
        self.place = slice(head, head + 1)
        self.rows = slice(length - rows, length)
        mask = seen_by(pattern, head, torch.arange(length, device=tensors[0].device)[self.rows], length)
        keys = mask.any(0).nonzero().flatten()
        own = [x[-1:, self.place] for x in tensors]
        q, d_out = (own[i][:, :, self.rows] for i in (0, 3))
        k, v = (own[i][:, :, keys] for i in (1, 2))
        mask = mask[None, None, :, keys]
        self.oracle, self.gradients = Oracle(q, k, v, mask=mask), None
        if gradients:
            self.gradients = GradientOracle(d_out, q, k, v, mask=mask)
            last = int((keys >= length - rows).sum())  # only these rows see them
            for name in ("dk", "dv"):
                self.gradients.truth[name] = self.gradients.truth[name][:, :, -last:]

    def verdicts(self, found: torch.Tensor | Tensors) -> Iterator:
        """Of an output, or of three gradients."""
        tensors = (found,) if isinstance(found, torch.Tensor) else found
        own = [x[-1:, self.place, self.rows].contiguous() for x in tensors]
        yield from [self.oracle.judge(*own)] if len(own) == 1 else self.gradients.judge(*own).values()


class Run(harness.Run):
    """One call. share: of the FLOPs of `shape` that are computed, times what a backward pass has more."""

    def __init__(self, name: str, shape: Shape, make: Callable[[], Function], judges: Sequence[Judge],
                 share: float, control: bool = False) -> None:  # fmt: skip
        super().__init__(name, shape, control)
        self.judges, self.share = judges, share
        self.attempt(lambda: setattr(self, "call", make()))
        self.attempt(lambda: self.gate(None))

    @property
    def flops(self) -> float:
        return super().flops * self.share

    def gate(self, oracle: None) -> None:
        out = self.call()
        torch.cuda.synchronize()
        for judge in self.judges:
            for verdict in judge.verdicts(out):
                if not verdict.ok:
                    self.stop("wrong", verdict.reason)


def judges_of(tensors: Tensors, pattern: S2Pattern, gradients: bool) -> list[Judge]:
    heads = sorted({0, HEADS - 1 - pattern.dense_heads, HEADS - 1} & set(range(HEADS)))
    return [Judge(tensors, pattern, head, gradients) for head in heads]


def made(pattern: S2Pattern, length: int) -> tuple[Any, dict[str, float]]:
    """A mask, and the ms that it takes with its lists, forward and backward, when it is made again."""
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        mask = pattern.mask(length, DEVICE)
        mask.lists(64), mask.lists(64, columns=True)
        if mask.gathered is not None:
            mask.gathered.lists(64, columns=True)
        torch.cuda.synchronize()
        taken = 1e3 * (time.perf_counter() - start)
    return mask, {"mask_ms": taken}


def before(length: int) -> dict[str, BlockMask]:
    """Masks that have the kernel of the backward pass walk as it did before keys were gathered, and before
    it began with the last queries; none where keys are not gathered."""
    mask, step = PATTERN.mask(length, DEVICE), hopper_sparse_backward_config(WIDTH).block_m
    if mask.gathered is None:
        return {}
    mask.gathered._lists[step, True, 128] = lists_of(mask.gathered.tiles, step, columns=True)
    return {IN_ORDER: BlockMask(mask.tiles, mask._grid), FIRST_FIRST: mask}


def calls_of(length: int, backward_too: bool) -> dict[str, tuple[Callable, dict[str, float]]]:
    """Name -> (call of q, k, v, more of its row)."""
    calls: dict[str, tuple[Callable, dict[str, float]]] = {}
    for name in (OURS, HYBRID):
        if name == OURS or length in HYBRID_LENGTHS:
            mask, more = made(PATTERNS[name], length)
            calls[name] = (lambda q, k, v, m=mask: attention(q, k, v, block_mask=m)), more
        if name == OURS and not backward_too:
            calls[WHOLE] = in_form(mask, shape_of(length), leaves_out=False), {}
    if length in STEP_LENGTHS and not backward_too:
        step = sources.load_step(STEP)
        calls[STEP] = (lambda q, k, v: step.attention(q, k, v, True, None)), {}
    for name, mask in before(length).items() if backward_too else ():
        calls[name] = (lambda q, k, v, m=mask: attention(q, k, v, block_mask=m)), {}
    calls[DENSE] = (lambda q, k, v: attention(q, k, v, causal=True)), {}
    return calls


def in_form(mask: BlockMask, shape: Shape, **changes: Any) -> Callable:
    """S2 by a kernel whose configuration is another one, with its launch prepared as that of a call."""
    like = torch.empty(shape.batch, shape.heads, shape.seqlen, shape.head_dim, device=DEVICE).bfloat16()
    params = Params(MaskWindow(None, None), WIDTH**-0.5, block_mask=mask)
    config = replace(hopper.configuration(like, like, like, params), **changes)
    params = params._replace(config=config)
    params = params._replace(plan=hopper.prepare(signature(params, *5 * [like])))
    return lambda q, k, v: hopper.forward(q, k, v, params)[0]


def differentiated(call: Callable, tensors: Tensors) -> Function:
    """Its backward pass alone."""
    leaves = [x.detach().requires_grad_() for x in tensors[:3]]
    out = call(*leaves)
    return lambda: torch.autograd.grad(out, leaves, tensors[3], retain_graph=True)


def backward_in_form(tensors: Tensors, leads: bool, **changes: Any) -> Function:
    """The backward pass with its launches prepared as those of a call; leads: whether long columns come
    first. changes: of its configuration."""
    (q, k, v, d_out), mask = tensors, PATTERN.mask(tensors[0].shape[2], DEVICE)
    params = Params(MaskWindow(None, None), WIDTH**-0.5, return_lse=True, block_mask=mask)
    out, lse = dispatch.forward(q, k, v, params)
    own = params._replace(config=replace(hopper.configuration(q, k, v, params, True), **changes))
    call = signature(own, q, k, d_out, q, k, v, out)
    if not leads:
        last = call.mask._replace(leading=0)
        gathered = last.gathered and last.gathered._replace(leading=0)
        call = call._replace(mask=last._replace(gathered=gathered))
    own = own._replace(plan=hopper.prepare(call, backward=True))
    return lambda: hopper.backward(d_out, q, k, v, out, lse, own)


def prefill_rows(length: int, gradients: bool, setting: Setting) -> Iterator[dict[str, Any]]:
    shape = shape_of(length)
    tensors = [*make_inputs(shape, device=DEVICE), make_inputs(shape, seed=1, device=DEVICE)[0]]
    runs, factor = [], backward.FLOPS if gradients else 1.0
    named = [(name, *call) for name, call in calls_of(length, gradients).items()]
    judged = {p: judges_of(tensors, p, gradients) for p in {PATTERNS[name] for name, *_ in named}}
    for name, call, more in [*named, named[0]]:
        pattern = PATTERNS[name]
        judges, share = judged[pattern], pattern.share(length)
        make = lambda call=call: (  # noqa: E731
            differentiated(call, tensors) if gradients else lambda: call(*tensors[:3])
        )
        runs.append(Run(name, shape, make, judges, share * factor, control=len(runs) == len(named)))
        runs[-1].row |= {"share": share, **more}
    if not gradients:
        make = lambda: copies_alone.call_of(*tensors[:3], PATTERN.mask(length, DEVICE))  # noqa: E731
        runs.append(Run(COPIES, shape, make, [], PATTERN.share(length)))
    else:
        forms = {LATE: (False, {}), LEAVES: (True, {"persistent": False, "alternate": False})}
        for name, (leads, changes) in forms.items():
            make = lambda leads=leads, changes=changes: backward_in_form(tensors, leads, **changes)  # noqa: E731
            runs.append(Run(name, shape, make, judged[PATTERN], PATTERN.share(length) * factor))
    harness.time_rounds(runs, None, setting, lambda text: None)
    yield from (run.row for run in runs)


def decode_rows(length: int, setting: Setting) -> Iterator[dict[str, Any]]:
    """One token of each sequence, whose key and value are in the cache."""
    shape = Shape(BATCH, HEADS, 1, WIDTH, True, "bfloat16", seqlen_k=length)
    q, k, v = make_inputs(shape, device=DEVICE)
    heads, runs = (BATCH * HEADS, 1, 1, WIDTH), []
    pages = PATTERN.paged(k, v)
    told = {"lengths": pages.lengths, "page_table": pages.page_table}

    def kept() -> torch.Tensor:
        return attention_decode(q.view(heads), pages.k_cache, pages.v_cache, **told).view(q.shape)

    calls = {OURS: kept, DENSE: lambda: attention_decode(q, k, v)}
    for name in (OURS, DENSE, OURS):
        mask = torch.stack([seen_by(PATTERNS[name], h, torch.tensor([length - 1], device=DEVICE), length)
                            for h in range(HEADS)])[None].expand(BATCH, -1, -1, -1)  # fmt: skip
        judge = DecodeJudge(Oracle(q, k, v, mask=mask))
        make = lambda name=name: calls[name]  # noqa: E731
        run = Run(name, shape, make, [judge], PATTERNS[name].share(length), control=len(runs) == 2)
        run.row["cache_bytes"] = BATCH * PATTERNS[name].cache_bytes(length, WIDTH)
        runs.append(run)
    harness.time_rounds(runs, None, setting, lambda text: None)
    for run in runs:
        run.row.pop("tflops", None)  # bytes are what it takes
        yield run.row


class DecodeJudge:
    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle

    def verdicts(self, out: torch.Tensor) -> Iterator:
        yield self.oracle.judge(out)


def show(table: str, row: dict[str, Any]) -> str:
    where = f"{table:9} S {row.get('seqlen_k', row['seqlen']):6} {row['impl']:20}"
    if "ms" not in row:
        return f"{where} {row['status']} {row.get('reason', '')}"
    mask = f"  mask {row['mask_ms']:.0f} ms" if "mask_ms" in row else ""
    return f"{where} {row['ms']:9.3f} ms {row.get('tflops', 0):6.0f} TFLOP/s{mask}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time S2-Attention on this GPU.")
    parser.add_argument("--tables", default="forward,decode,backward", help="(default: %(default)s)")
    parser.add_argument("--only", type=int, nargs="+", help="lengths; write no record")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/s2.json)")
    args = parser.parse_args(argv)
    if no_hopper():
        return 2
    makers = {
        "forward": lambda n: prefill_rows(n, False, SWEEP), "decode": lambda n: decode_rows(n, SWEEP),
        "backward": lambda n: prefill_rows(n, True, SWEEP),
    }  # fmt: skip
    if not set(args.tables.split(",")) <= set(makers):
        parser.error(f"--tables: expected some of {', '.join(makers)}, got {args.tables}")
    header = records.provenance(harness.method(SWEEP, OURS) | {"flops": "of the blocks that are kept"})
    path, good = records.report_path("s2", header, args.out), True
    for name in args.tables.split(","):
        rows: list[dict[str, Any]] = []
        for length in args.only or (CACHES if name == "decode" else LENGTHS):
            for row in makers[name](length):
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

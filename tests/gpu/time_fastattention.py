"""Time what chapter 40 takes from FastAttention: masks, decoding with the CPU, AllReduce in chunks.

    python tests/gpu/time_fastattention.py                    what this machine has the GPUs for
    python tests/gpu/time_fastattention.py --tables mask,cooperative      one GPU, under a minute
    python tests/gpu/time_fastattention.py --tables all_reduce            two GPUs, under a minute
    --short       fewer sizes, no record;  --out FILE     elsewhere than figures/data/<gpu>/fastattention.json

`mask`: causal attention, bfloat16 B1 H16 D128, by the chapter's kernel with three kinds of mask and with all
tiles or only those that are seen, by attnlib, and by PyTorch's backends with a mask tensor and with
is_causal; cold L2, judged against fp64. `cooperative`: wall time of one layer's decoding, 32 query and 8 key
heads of 128 columns: cache on the GPU, cache uploaded from pinned memory, cache in host memory and attention
there; and rates of the bus and of host memory. `step`: eight such layers one after the other, some of them
on the host. `all_reduce`: `attnlib.distributed.row_parallel_output` of a layer with 64 query and 8 key heads
over all GPUs, by number and size of chunks, its parts alone beside it; `timeline`: rank 0's kernels of one
of three calls.

All that is compared takes turns, in an order that changes from round to round; a time is the median of the
rounds, and one implementation runs twice, as a control. Status 0 when all results were right, 1 otherwise, 2
without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hopper_only import no_hopper
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention, attention_decode  # noqa: E402
from attnlib.bench import harness, ranks, records, sources  # noqa: E402
from attnlib.bench.host import cores, cpu_name  # noqa: E402
from attnlib.bench.names import CONTROL  # noqa: E402
from attnlib.bench.oracle import Oracle  # noqa: E402
from attnlib.bench.setting import SWEEP  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.book.cooperative import HostLayer  # noqa: E402
from attnlib.distributed import output, row_parallel_output  # noqa: E402
from attnlib.distributed.links import CTAS, links_of  # noqa: E402
from attnlib.distributed.rotation import SPARE  # noqa: E402
from attnlib.params import MaskWindow, Params  # noqa: E402

RECORD = "fastattention"
Call = Callable[[], Any]
Rows = list[dict[str, Any]]

# ---------------------------------------------------------------- masks

MASK_LENGTHS = 1024, 4096, 16384, 32768


def mask_shape(length: int) -> Shape:
    return Shape(1, 16, length, 128, True, "bfloat16")


def sdpa(backend: SDPBackend, mask: torch.Tensor | None) -> harness.Attention:
    def call(q, k, v, causal, scale):
        with sdpa_kernel(backend):
            how = {"attn_mask": mask, "is_causal": mask is None, "scale": scale}
            return F.scaled_dot_product_attention(q, k, v, **how)

    return call


def mask_calls(length: int) -> dict[str, tuple[harness.Attention, int]]:
    """Name -> (function, bytes of the mask that it is given)."""
    step = sources.load_step("40_fastattention")
    held = {name: step.mask_for(length, name, "cuda") for name in ("comparison", "pattern", "tensor")}
    added = torch.zeros(length, length, device="cuda", dtype=torch.bfloat16)
    added.masked_fill_(~held["tensor"], float("-inf"))

    def chapter(mask: str, classes: bool) -> tuple[harness.Attention, int]:
        def call(q, k, v, causal, scale):
            return step.attention(q, k, v, causal, scale, mask, classes, held[mask])

        return call, 0 if mask == "comparison" else held[mask].nbytes

    efficient, cudnn = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
    whole, extra = held["tensor"], added.nbytes
    return {
        "attnlib": (lambda q, k, v, causal, scale: attention(q, k, v, causal=causal, sm_scale=scale), 0),
        "mask tensor, all tiles": chapter("tensor", False),
        "comparisons, all tiles": chapter("comparison", False),
        "mask tensor": chapter("tensor", True),
        "tiling-mask": chapter("pattern", True),
        "comparisons": chapter("comparison", True),
        "efficient, bool mask": (sdpa(efficient, whole[None, None]), whole.nbytes),
        "efficient, bf16 mask": (sdpa(efficient, added[None, None]), extra),
        "efficient, is_causal": (sdpa(efficient, None), 0),
        "cudnn, bf16 mask": (sdpa(cudnn, added[None, None]), extra),
        "cudnn, is_causal": (sdpa(cudnn, None), 0),
    }


def mask_rows(short: bool) -> Iterator[dict[str, Any]]:
    for length in MASK_LENGTHS[: 2 if short else None]:
        calls = mask_calls(length)
        functions = {name: call for name, (call, _) in calls.items()}
        for row in harness.collect(functions, [mask_shape(length)], setting=SWEEP, control="tiling-mask"):
            yield row | {"mask_bytes": calls[row.get("control_of", row["impl"])][1]}
        torch.cuda.empty_cache()


# ---------------------------------------------------------------- wall time in rounds


WINDOW_MS = 30


def wall_ms(call: Call, count: int) -> float:
    """ms of a call that waits for the one before, until the GPU has nothing left to do."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        call()
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count * 1e3


def in_rounds(calls: Mapping[str, Any], window: Callable[[Any, int], float], rounds: int,
              most: int = 50) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Times of each in windows of about `WINDOW_MS`, `most` calls at most, all of them in each round, in a
    new order."""
    counts = {}
    for name, call in calls.items():
        window(call, 2)
        counts[name] = max(1, min(most, round(WINDOW_MS / max(window(call, 1), 1e-3))))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name in random.Random(i).sample(list(calls), len(calls)):
            taken[name].append(window(calls[name], counts[name]))
    return {
        name: {"ms": statistics.median(ms), "ms_low": min(ms), "ms_high": max(ms), "round_ms": ms}
        for name, ms in taken.items()
    }


# ---------------------------------------------------------------- decoding with the CPU

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CACHES = (1, 1024), (1, 4096), (1, 16384), (1, 65536), (8, 4096), (8, 16384)
OF_EACH_DTYPE = 1, 16384
GPU, UPLOAD, CPU, CPU_WHOLE = "gpu", "upload", "cpu", "cpu, whole heads"
APART = 256 << 20
"""Bytes of keys and values in the layers that take turns, so that no cache has what is read next; two layers
at least and 32 at most."""


class Caches:
    """Layers with the same number of keys, on the host and on the GPU."""

    def __init__(self, batch: int, keys: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape = batch, KV_HEADS, keys, HEAD_DIM
        self.q = torch.randn(batch, HEADS, 1, HEAD_DIM, device="cuda").to(dtype)
        self.on_gpu = [
            tuple(torch.randn(self.shape, device="cuda").to(dtype) for _ in range(2)) for _ in range(layers)
        ]
        self.on_host = []
        for k, v in self.on_gpu:
            self.on_host.append(HostLayer(self.shape, dtype))
            self.on_host[-1].append(k, v)
        self.room = tuple(torch.empty(self.shape, device="cuda", dtype=dtype) for _ in range(2))

    @property
    def bytes(self) -> int:
        """Of one layer."""
        return 2 * self.room[0].nbytes

    def gpu(self, i: int, q: torch.Tensor) -> torch.Tensor:
        return attention_decode(q, *self.on_gpu[i])

    def bus(self, i: int, q: torch.Tensor) -> None:
        layer = self.on_host[i]
        for room, x in zip(self.room, (layer.k, layer.v), strict=True):
            room.copy_(x, non_blocking=True)

    def upload(self, i: int, q: torch.Tensor) -> torch.Tensor:
        self.bus(i, q)
        return attention_decode(q, *self.room)

    def host_read(self, i: int, q: torch.Tensor) -> None:
        for x in (self.on_host[i].k, self.on_host[i].v):
            x.view(torch.int64).sum()

    def cpu(self, i: int, q: torch.Tensor, parts: int | None = None) -> torch.Tensor:
        layer = self.on_host[i]
        kept, layer.parts = layer.parts, parts or layer.parts
        out = layer.attend(q)
        layer.parts = kept
        return out

    def in_turn(self, way: Callable[[int, torch.Tensor], Any]) -> Call:
        """Calls of the layers one after the other."""
        turn = iter(range(1 << 60))
        return lambda: way(next(turn) % len(self.on_host), self.q)

    def wrong(self, way: Callable[[int, torch.Tensor], torch.Tensor]) -> str:
        out = way(0, self.q)
        torch.cuda.synchronize()
        verdict = Oracle(self.q, *self.on_gpu[0], causal=False).judge(out)
        return "" if verdict.ok else verdict.reason


def decode_row(name: str, caches: Caches, control: bool = False) -> dict[str, Any]:
    batch, _, keys, _ = caches.shape
    shape = Shape(batch, HEADS, 1, HEAD_DIM, False, str(caches.q.dtype)[6:], KV_HEADS, keys)
    row = {"impl": name, **shape.to_dict(), "bytes": caches.bytes, "threads": torch.get_num_threads()}
    return row | ({"control_of": name.removesuffix(CONTROL)} if control else {})


def cooperative_rows(short: bool) -> Iterator[dict[str, Any]]:
    for batch, keys in CACHES[: 3 if short else None]:
        layers = max(2, min(32, APART // (4 * batch * keys * KV_HEADS * HEAD_DIM)))
        caches = Caches(batch, keys, layers)
        whole = functools.partial(caches.cpu, parts=1)
        ways = {GPU: caches.gpu, UPLOAD: caches.upload, CPU: caches.cpu, CPU_WHOLE: whole,
                CPU + CONTROL: caches.cpu}  # fmt: skip
        wrong = {name: caches.wrong(way) for name, way in ways.items()}
        calls = {name: caches.in_turn(way) for name, way in ways.items()}
        calls |= {"bus": caches.in_turn(caches.bus), "host read": caches.in_turn(caches.host_read)}
        for name, times in in_rounds(calls, wall_ms, 5).items():
            yield _judged(decode_row(name, caches, name.endswith(CONTROL)), wrong.get(name, ""), times)
        del caches, ways, calls, whole
        torch.cuda.empty_cache()
    for dtype in (torch.float16, torch.float32):
        caches = Caches(*OF_EACH_DTYPE, 2, dtype)
        wrong, name = caches.wrong(caches.cpu), f"cpu, {str(dtype)[6:]}"
        times = in_rounds({name: caches.in_turn(caches.cpu)}, wall_ms, 3)[name]
        yield _judged(decode_row(name, caches), wrong, times)


def _judged(row: dict[str, Any], wrong: str, times: dict[str, Any]) -> dict[str, Any]:
    if wrong:
        return row | {"status": "wrong", "reason": wrong}
    return row | {"status": "ok", **times, "gb_per_s": row["bytes"] / times["ms"] / 1e6}


LAYERS, STEP_KEYS = 8, 16384


def step_rows(short: bool) -> Iterator[dict[str, Any]]:
    """A step's attention: the output of a layer is the query of the next. The last layers are on the host."""
    caches = Caches(1, 4096 if short else STEP_KEYS, LAYERS)

    def step(host_layers: int, host: Callable[[int, torch.Tensor], torch.Tensor]) -> None:
        q = caches.q
        for i in range(LAYERS):
            q = host(i, q) if i >= LAYERS - host_layers else caches.gpu(i, q)

    calls = {(CPU, 0): functools.partial(step, 0, caches.gpu)}
    for count in (1, 2, 4, 8):
        for name, way in ((CPU, caches.cpu), (UPLOAD, caches.upload)):
            calls[name, count] = functools.partial(step, count, way)
    for (name, count), times in in_rounds(calls, wall_ms, 5).items():
        row = {"impl": name, "host_layers": count, "layers": LAYERS, "keys": caches.shape[2]}
        yield row | {"status": "ok", "bytes": caches.bytes, **times}


# ---------------------------------------------------------------- AllReduce in chunks

LAYER_HEADS, LAYER_KV_HEADS, OUTPUTS = 64, 8, 8192
LAYER_LENGTHS = 2048, 8192, 32768
CHUNKS = 1, 2, 4, 8, 16, 32
UNEVEN = {"4 chunks, first large": (10, 2, 2, 2), "4 chunks, last small": (6, 5, 4, 1),
          "4 chunks, first small": (1, 5, 5, 5)}  # fmt: skip
"""Sixteenths of the rows."""
COMPUTE, ALONE = "no AllReduce", "AllReduce alone"
IMPL = None
"""The kernels' choice; the tests have theirs."""
MOST_CALLS = 6
"""Of a window: the driver's queue has room for some thousand launches."""
PAUSE = 20_000
"""Clocks, some 10 µs, for which the caller's stream waits after each AllReduce was started."""
ROUNDING = 2.3e-3
"""Relative RMS difference that a rounding to bfloat16 is allowed; on average it is 1.7e-3."""


def tolerance(count: int) -> float:
    """Relative RMS difference from all heads on one GPU: roundings of that result, of the parts of so many
    ranks, and of the sum of two of them, of three and so on, each as large as its share of the whole."""
    return ROUNDING * (2 + sum(range(2, count + 1)) / count) ** 0.5


class NoSum:
    """In the place of links: nothing is sent."""

    def sum(self, x: torch.Tensor) -> NoSum:
        return self

    def wait(self) -> None:
        pass


class Paused:
    """Links after whose `sum` the caller's stream waits."""

    def __init__(self, links: Any) -> None:
        self.links = links

    def sum(self, x: torch.Tensor) -> Any:
        flight = self.links.sum(x)
        if x.is_cuda:
            torch.cuda._sleep(PAUSE)
        return flight


def layer_inputs(length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """q, k, v and weight of all heads, equal on all ranks, and of this rank's."""
    where = ranks.device()
    generator = torch.Generator(where).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=where, dtype=torch.bfloat16)

    heads = LAYER_HEADS, LAYER_KV_HEADS, LAYER_KV_HEADS
    whole = [drawn(1, length, h, HEAD_DIM).transpose(1, 2) for h in heads]
    whole.append(drawn(OUTPUTS, LAYER_HEADS * HEAD_DIM) * (LAYER_HEADS * HEAD_DIM) ** -0.5)
    rank, count = dist.get_rank(), dist.get_world_size()
    parts = [x.chunk(count, 1)[rank] for x in whole]
    own = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts[:3]] + [parts[3].contiguous()]
    return whole, own


def layer_calls(length: int, own: list[torch.Tensor], short: bool) -> dict[str, Call]:
    links = links_of(dist.group.WORLD, own[0].device, 120.0, "time_fastattention")
    params = Params(MaskWindow(None, 0), HEAD_DIM**-0.5, return_lse=True, impl=IMPL)

    def call(chunks: int | Sequence[int], through: Any = links, spare: int = 0) -> Call:
        layer = output.Layer(through, params, output.spans_of(chunks, length), spare)
        return lambda: output.forward(*own, layer)[0]

    def name(count: int) -> str:
        return f"{count} chunk" + "s" * (count > 1)

    result = torch.zeros(length, 1, OUTPUTS, device=ranks.device(), dtype=torch.bfloat16)
    calls = {COMPUTE: call(1, NoSum()), ALONE: lambda: links.sum(result).wait()}
    for count in CHUNKS[: 3 if short else None]:
        calls[name(count)] = call(count)
        if count > 1:
            calls[f"{COMPUTE}, {name(count)}"] = call(count, NoSum())
    calls |= {key: call([length * part // 16 for part in parts]) for key, parts in UNEVEN.items()}
    calls |= {f"{name(4)}, a pause": call(4, Paused(links)), name(4) + CONTROL: call(4)}
    calls[f"{name(4)}, room for NCCL"] = call(4, spare=SPARE)
    calls["row_parallel_output"] = lambda: row_parallel_output(*own, causal=True, chunks=4, impl=IMPL)
    return calls


def layer_errors(length: int, whole: list[torch.Tensor], calls: Mapping[str, Call]) -> dict[str, float]:
    """Of the results, from all heads on one GPU."""
    q, k, v, weight = whole
    expected = attention(q, k, v, causal=True, impl=IMPL).transpose(1, 2).flatten(2) @ weight.t()
    expected = expected.view(length, 1, OUTPUTS)
    found = {}
    for name, call in calls.items():
        if COMPUTE not in name and name != ALONE:
            y = call().view(length, 1, OUTPUTS)
            found[name] = ranks.worst_error(y, expected)
    return found


def queued(call: Call, count: int) -> float:
    """ms of a call on the slowest rank, all calls of the window queued before the GPU begins."""
    ranks.wait()
    begin = time.perf_counter()
    call()
    host = torch.tensor([time.perf_counter() - begin], device=ranks.device())
    dist.all_reduce(host, op=dist.ReduceOp.MAX)
    clocks = int(2e9 * (1.5 * host.item() * count + 1e-3))  # at some 2 GHz
    return ranks.window_ms(call, count, clocks=clocks)


def host_ms(call: Call) -> float:
    """ms for which a call keeps the host busy: the median of five, the queue empty."""
    taken = []
    for _ in range(5):
        ranks.wait()
        begin = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begin) * 1e3)
    ranks.wait()
    return statistics.median(taken)


def layer_rows(length: int, short: bool) -> Rows:
    whole, own = layer_inputs(length)
    calls = layer_calls(length, own, short)
    errors = layer_errors(length, whole, calls)
    del whole
    empty_cache()
    shape = Shape(1, LAYER_HEADS, length, HEAD_DIM, True, "bfloat16", LAYER_KV_HEADS)
    times = in_rounds(calls, queued, 3 if short else 5, MOST_CALLS)
    found = []
    for name, taken in times.items():
        row = {"impl": name, **shape.to_dict(), "outputs": OUTPUTS, "gpus": dist.get_world_size(),
               "sum_bytes": 2 * OUTPUTS * length, "status": "ok", **taken, "host_ms": host_ms(calls[name])}
        row["exposed_ms"] = taken["ms"] - times[COMPUTE]["ms"]
        if name in errors:
            row["rms_from_one_gpu"] = errors[name]
            right = errors[name] <= tolerance(dist.get_world_size())
            row["status"] = "ok" if right else "wrong"  # NaN is wrong
        found.append(row | ({"control_of": name.removesuffix(CONTROL)} if name.endswith(CONTROL) else {}))
    return found


KINDS = {"nccl": "AllReduce", "attention_forward": "attention", "gemm": "projection",
         "nvjet": "projection", "cutlass": "projection"}  # fmt: skip


def empty_cache() -> None:
    if ranks.device().type == "cuda":
        torch.cuda.empty_cache()


def work(rank: int, count: int, args: argparse.Namespace, where: str) -> int:
    """The tables of several GPUs. Each length is written when it is there, the middle one first."""
    ranks.join(rank, count, where)
    header = records.provenance({
        "gpus": count, "nccl_programs": CTAS, "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE"),
        "link": "NCCL " + ".".join(map(str, torch.cuda.nccl.version())) if args.device == "cuda" else "gloo",
        "timed": "windows of calls that were queued before, slowest rank, median of rounds",
    })  # fmt: skip
    header["gpu"]["name"] = header["gpu"]["name"] or "cpu"
    path, rows = records.report_path(ranks.record_name(RECORD, count), header, args.out), []

    def write(table: str, found: Rows) -> None:
        if rank == 0 and not args.short:
            records.add_table(path, header, table, found)
            print(path, flush=True)

    first = LAYER_LENGTHS[len(LAYER_LENGTHS) // 2]
    for length in sorted(LAYER_LENGTHS[: 2 if args.short else None], key=lambda length: length != first):
        found = layer_rows(length, args.short)
        rows += found
        if rank == 0:
            print(*(show("all_reduce", row) for row in found), sep="\n", flush=True)
        write("all_reduce", rows)
        if length == first:
            write("timeline", timeline(length))
        empty_cache()
    dist.barrier()
    return int(any(row["status"] != "ok" for row in rows))


def timeline(length: int) -> Rows:
    """Kernels of the last of three calls with four chunks, of this rank."""
    call = layer_calls(length, layer_inputs(length)[1], True)["4 chunks"]
    for _ in range(3):
        ranks.window_ms(call, 1)
    last = ranks.kernels_of_calls(call, KINDS)[-1:]
    return [{"seqlen": length, "impl": "4 chunks", **event} for kernels in last for event in kernels]


# ---------------------------------------------------------------- the run


def show(table: str, row: dict[str, Any]) -> str:
    where = f"S {row.get('seqlen_k') or row.get('seqlen') or row.get('keys')}"
    head = f"{table:12} B {row.get('batch', 1)} {where:9} {row['impl']:32}"
    if "ms" not in row:
        return f"{head} {row['status']} {row.get('reason', '')}"
    more = {"host_layers": "{} on the host", "gb_per_s": "{:.1f} GB/s", "tflops": "{:.0f} TFLOP/s",
            "peak_bytes": "peak {:.3g} B", "exposed_ms": "exposed {:.3f} ms", "host_ms": "host {:.3f} ms",
            "rms_from_one_gpu": "off by {:.1e}"}  # fmt: skip
    told = ", ".join(text.format(row[key]) for key, text in more.items() if row.get(key) is not None)
    return f"{head} {row['ms']:9.4f} ms  {told}"


ON_ONE_GPU = {"mask": mask_rows, "cooperative": cooperative_rows, "step": step_rows}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time FastAttention's ideas.")
    everything = "mask,cooperative" + (",all_reduce" if torch.cuda.device_count() > 1 else "")
    parser.add_argument("--tables", default=everything, help="(default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="fewer sizes; write no record")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for the tests")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/fastattention.json)")
    args = parser.parse_args(argv)
    args.tables = args.tables.split(",")
    if not set(args.tables) <= {*ON_ONE_GPU, "all_reduce"}:
        parser.error(f"--tables: expected some of {', '.join(ON_ONE_GPU)}, all_reduce, got {args.tables}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    asked = args.tables
    if no_hopper():
        return 2
    if "all_reduce" in asked and torch.cuda.device_count() < 2:
        print("all_reduce needs two GPUs", file=sys.stderr)
        return 2
    if "cooperative" in asked and "step" not in asked:
        asked.insert(asked.index("cooperative") + 1, "step")
    good = True
    torch.set_num_threads(cores())
    header = records.provenance({
        "gpus": 1, "mask": harness.method(SWEEP, "tiling-mask"), "cpu": cpu_name(), "threads": cores(),
        "cooperative": "wall time, median of 5 rounds of windows of some 30 ms",
    })  # fmt: skip
    for name in asked:
        if name not in ON_ONE_GPU:
            continue
        begin, rows = time.monotonic(), []
        for row in ON_ONE_GPU[name](args.short):
            rows.append(row)
            print(show(name, row), flush=True)
            good &= row["status"] == "ok" or row["impl"].startswith(("cudnn", "efficient"))
        if not args.short:
            path = records.report_path(RECORD, header, args.out)
            records.add_table(path, header, name, rows)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    status = ranks.on_all_gpus(work, args) if "all_reduce" in asked else 0
    return max(int(not good), status)


if __name__ == "__main__":
    sys.exit(main())

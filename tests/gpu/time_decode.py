"""Time decoding on this GPU: few queries to a long KV cache, beside the peers and a copy.

    python tests/gpu/time_decode.py                  about 150 seconds; figures/data/<gpu>/decode.json
    python tests/gpu/time_decode.py --fp8            the table `fp8` alone, into the record that is there
    python tests/gpu/time_decode.py --host           the table `host` alone, likewise
    python tests/gpu/time_decode.py --clean          the table `clean`, likewise: about 40 seconds
    python tests/gpu/time_decode.py --tune           configurations of attnlib beside each other; no record
    python tests/gpu/time_decode.py --only ragged    calls whose label has this in it; no record

Four tables. `calls`: one new token for caches of different lengths, of attnlib with each split, with lengths,
which a call with pages has too, with pages of 16 and 64 keys and with its merge in the same launch, of the
peers, and of device copies: one of 1 GiB, and one that moves as many bytes as the call reads. `pairs`:
numbers of sequences times key/value heads around the number of multiprocessors. `fp8`: caches in FP8, with
a scale for each sequence or page and head, beside caches in 16 bits that hold the same numbers. `host`: what
a call keeps the host busy. And a fifth that is measured when it is asked for, `clean`: some of `calls` with
nothing in L2 that has to be written back.
Peers: cuDNN, FlashAttention-2 and 3, FlashInfer's decoding, persistent and XQA kernels. ATTNLIB_FA3 names
FlashAttention-3's library, ATTNLIB_PEERS a folder with the packages flashinfer and cudnn (NVIDIA's frontend);
what is missing is "not installed".
GB/s are of keys and values read, of copies of what is read and written; % are of the copy of 1 GiB. All that
is compared is timed in the same shuffled rounds, cold L2, with a control row; every output is judged against
fp64 before and after.
Status 0 when all of attnlib's were right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hopper_only import no_hopper
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib import attention, attention_decode, node  # noqa: E402
from attnlib.bench import decode_peers, harness, peers, records, timing  # noqa: E402
from attnlib.bench.oracle import Judgement, Oracle  # noqa: E402
from attnlib.bench.setting import BOOK, SWEEP, Setting  # noqa: E402
from attnlib.bench.shapes import Shape  # noqa: E402
from attnlib.kernels import DECODERS  # noqa: E402
from attnlib.kernels.common import device  # noqa: E402
from attnlib.kernels.decode.configs import DecodeConfig  # noqa: E402
from attnlib.kernels.decode.launch import call_of, configuration  # noqa: E402
from attnlib.params import DecodeParams, mask_window  # noqa: E402

RAGGED = (1024, 1024, 2048, 2048, 4096, 4096, 32768, 65536)
PAGES = 16, 64
COPIED = 1 << 30
DEVICE = "cuda"
OURS, OURS_FP8 = "attnlib", "attnlib fp8"
FP8, SCALES = torch.float8_e4m3fn, (2**-6, 2**-5)
"""Of keys and of values: powers of two, so that what 16 bits hold is what FP8 does."""


@dataclass(frozen=True)
class Call:
    """One new token for each of these sequences."""

    lengths: tuple[int, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "float16"

    @property
    def ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    @property
    def label(self) -> str:
        return self.shape.label.removesuffix(" dense fp16") + (" ragged" if self.ragged else "")

    @property
    def shape(self) -> Shape:
        """Of a cache with room for the longest."""
        B, longest = len(self.lengths), max(self.lengths)
        return Shape(B, self.heads, 1, self.head_dim, False, self.dtype, self.kv_heads, longest)

    @property
    def bytes(self) -> int:
        """Of all keys and values."""
        return 2 * sum(self.lengths) * self.kv_heads * self.head_dim * self.shape.itemsize


CALLS = [
    Call((8192,)),
    Call((65536,)),
    Call((131072,)),
    Call((524288,)),
    Call((8192,) * 16),
    Call((40000,) * 7),
    Call((32768,) * 4, 32, 32, 64),
    Call(RAGGED),
]
TUNED = [CALLS[i] for i in (0, 2, 4, 6, 7)] + [Call((16384,), 4, 1), Call((16384,) * 132, 4, 1)]
TUNED_SIZES = [(1, 2, 2), (1, 2, 3), (1, 3, 1), (1, 3, 2), (1, 3, 3), (1, 4, 2)]
TUNED_SIZES += [(2, 2, 1), (2, 2, 2), (2, 3, 1), (2, 4, 1)]
"""Times as many keys as usual, stages, programs of an SM."""
PAIRS = [Call((16384,) * pairs, 4, 1) for pairs in (1, 8, 56, 132, 133, 200)]


CLEAN_TIMER = "CUDA events around each call, 256 MiB written and then 256 MiB read before it to flush L2"
CLEAN = [CALLS[1], CALLS[-1], CALLS[2], CALLS[0]]


class Inputs(NamedTuple):
    """q (B, H, 1, D), caches (B, Hkv, S, D), lengths (B) or None where they are full."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor | None


def make_inputs(call: Call, where: str) -> Inputs:
    generator = torch.Generator(where).manual_seed(0)
    shape, dtype = call.shape, call.shape.torch_dtype
    B, S, D = shape.batch, shape.keys, call.head_dim

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=where, dtype=dtype)

    q = randn(B, call.heads, 1, D)
    k, v = (randn(B, call.kv_heads, S, D) for _ in range(2))
    lengths = torch.tensor(call.lengths, dtype=torch.int32, device=where) if call.ragged else None
    return Inputs(q, k, v, lengths)


def make_fp8_inputs(call: Call, where: str) -> Inputs:
    """The same with keys and values that FP8 and 16 bits both have."""
    inputs = make_inputs(call, where)
    k, v = ((x / scale).to(FP8).to(x.dtype) * scale for x, scale in zip(inputs[1:3], SCALES, strict=True))
    return inputs._replace(k=k, v=v)


class Judge:
    """The fp64 oracle of all sequences, each alone."""

    def __init__(self, call: Call, inputs: Inputs) -> None:
        def joined(cache: torch.Tensor) -> torch.Tensor:
            return torch.cat([cache[b, :, :n].transpose(0, 1) for b, n in enumerate(call.lengths)])

        ends = torch.tensor([0, *call.lengths]).cumsum(0)
        rows = torch.arange(len(call.lengths) + 1)
        tensors = inputs.q[:, :, 0], joined(inputs.k), joined(inputs.v)
        self.oracle = Oracle(*tensors, cu_seqlens=(rows, ends))

    def judge(self, out: torch.Tensor) -> Judgement:
        return self.oracle.judge(out[:, :, 0])


# ---------------------------------------------------------------- who is timed

Function = Callable[[], torch.Tensor]


def ours(inputs: Inputs, split: str | None = None) -> Function:
    q, k, v, lengths = inputs
    return lambda: attention_decode(q, k, v, lengths=lengths, split=split)


def dispatched(inputs: Inputs) -> Function:
    """What `attention` does of its own accord."""
    q, k, v, _ = inputs
    return lambda: attention(q, k, v)


def paged(inputs: Inputs, page: int, split: str | None = None) -> Function:
    k, v, table, lengths = paged_caches(inputs, page)
    return lambda: attention_decode(inputs.q, k, v, lengths=lengths, page_table=table, split=split)


def paged_caches(inputs: Inputs, page: int) -> tuple[torch.Tensor, ...]:
    """(keys, values, table, lengths): pages in a random order, (pages, Hkv, page size, D)."""
    q, k, v, lengths = inputs
    whole = [F.pad(x, (0, 0, 0, -x.shape[2] % page)) for x in (k, v)]
    k, v, table, _ = decode_peers.in_pages(*whole, None, page)
    k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    if lengths is None:  # the last page may be a part of one
        lengths = torch.full((len(q),), inputs.k.shape[2], dtype=torch.int32, device=q.device)
    return k, v, table, lengths


def configured(inputs: Inputs, change: Callable[[DecodeConfig], DecodeConfig]) -> Function:
    """attnlib in another configuration than its own."""
    q, k, v, lengths = inputs
    params = DecodeParams(mask_window(True, None), q.shape[-1] ** -0.5, lengths)
    params = params._replace(config=change(configuration(call_of(q, k, v, None, params))))
    return lambda: DECODERS["triton"].forward(q, k, v, params)[0]


def sdpa(inputs: Inputs, backend: SDPBackend) -> Function:
    q, k, v, _ = inputs

    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

    return call


def fa3(inputs: Inputs) -> Function:
    """FlashAttention-3, which chooses how often it splits; caches (B, S, Hkv, D)."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs[:3])
    forward, scale = peers.fa3_decode(), q.shape[-1] ** -0.5
    return lambda: forward(q, k, v, scale, inputs.lengths).transpose(1, 2)


def implementations(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    """Name -> what makes the call that is timed; it may raise. Those that know no lengths are for full
    caches."""
    found = {
        OURS: lambda: ours(inputs),
        "attnlib, fixed": lambda: ours(inputs, "fixed"),
        "attnlib, none": lambda: ours(inputs, "none"),
        "attnlib, same launch": lambda: configured(inputs, lambda c: replace(c, same_launch=True)),
        **{f"attnlib, pages of {page}": lambda page=page: paged(inputs, page) for page in PAGES},
        "attnlib, pages of 16, none": lambda: paged(inputs, PAGES[0], "none"),
        "cudnn, lengths": lambda: decode_peers.cudnn(*inputs[:3], lengths_of(inputs)),
        **{f"cudnn, pages of {page}": lambda page=page: decode_peers.cudnn(*inputs, page) for page in PAGES},
        "fa3": lambda: fa3(inputs),
        "flashinfer": lambda: decode_peers.flashinfer_decode(*inputs),
        "flashinfer, persistent": lambda: decode_peers.flashinfer_persistent(*inputs),
        "flashinfer, xqa": lambda: decode_peers.flashinfer_xqa(*inputs),
    }
    if inputs.lengths is None:
        found["attnlib.attention"] = lambda: dispatched(inputs)
        found["attnlib, lengths"] = lambda: ours(inputs._replace(lengths=lengths_of(inputs)))
        found["cudnn"] = lambda: sdpa(inputs, SDPBackend.CUDNN_ATTENTION)
        found["flash"] = lambda: sdpa(inputs, SDPBackend.FLASH_ATTENTION)
    return found


def lengths_of(inputs: Inputs) -> torch.Tensor:
    """On the device, of full caches too."""
    if inputs.lengths is not None:
        return inputs.lengths
    return torch.full((len(inputs.q),), inputs.k.shape[2], dtype=torch.int32, device=inputs.q.device)


def in_fp8(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    """Caches in FP8, whole and in pages, beside caches in 16 bits, that hold the same."""
    q, k, v, lengths = inputs

    def scaled(caches: Sequence[torch.Tensor], **named: Any) -> Function:
        k, v = ((x / scale).to(FP8) for x, scale in zip(caches, SCALES, strict=True))
        k_scale, v_scale = (torch.full(k.shape[:2], scale, device=k.device) for scale in SCALES)
        return lambda: attention_decode(q, k, v, k_scale=k_scale, v_scale=v_scale, **named)

    def in_pages(page: int) -> Function:
        k, v, table, used = paged_caches(inputs, page)
        return scaled((k, v), lengths=used, page_table=table)

    return {
        OURS: lambda: ours(inputs),
        OURS_FP8: lambda: scaled((k, v), lengths=lengths),
        **{f"attnlib, pages of {page}": lambda page=page: paged(inputs, page) for page in PAGES},
        **{f"{OURS_FP8}, pages of {page}": lambda page=page: in_pages(page) for page in PAGES},
    }


def readers(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    every = implementations(inputs)
    names = OURS, "attnlib, pages of 64", "fa3", "cudnn", "flashinfer", "flashinfer, xqa"
    return {name: every[name] for name in names if name in every}


def splits(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    every = implementations(inputs)
    return {name: every[name] for name in (OURS, "attnlib, fixed", "cudnn", "fa3", "flashinfer")}


def variants(inputs: Inputs) -> dict[str, Callable[[], Function]]:
    """Configurations beside the one that is chosen."""
    params = DecodeParams(mask_window(True, None), 1.0, inputs.lengths)
    own = configuration(call_of(*inputs[:3], None, params))
    sms = device.num_sms(inputs.q.get_device())
    every = implementations(inputs)
    found = {name: every[name] for name in (OURS, "cudnn", "fa3") if name in every}
    plans = [(*sizes, 4, "") for sizes in TUNED_SIZES]
    plans += [(1, 3, 2, 8, ""), (2, 3, 1, 8, ""), (1, 3, 1, 4, "same launch"), (1, 3, 2, 4, "same launch")]
    plans += [(1, 3, 2, 4, "no prefetch"), (2, 3, 1, 4, "no prefetch")]
    plans += [(*sizes, "none") for sizes in ((1, 4, 1, 4), (2, 3, 1, 4), (2, 4, 1, 4), (2, 3, 1, 8))]
    for keys, stages, per_sm, warps, more in plans:
        config = replace(own, block_n=own.block_n * keys, num_stages=stages, num_warps=warps,
                         split="stream_k", shares=sms * per_sm, same_launch=more == "same launch",
                         prefetch=own.prefetch and more != "no prefetch", registers=None)  # fmt: skip
        if more == "none":
            config = replace(config, split="none", shares=1)
        name = f"{OURS}, {config.block_n} keys, {stages} stages, {per_sm} per SM, {warps} warps"
        name += f", {more}" * bool(more)
        found[name] = lambda config=config: configured(inputs, lambda _: config)
    return found


# ---------------------------------------------------------------- timing


class Run(harness.Run):
    """One implementation of a call."""

    def __init__(self, impl: str, call: Call, control: bool = False) -> None:
        super().__init__(impl, call.shape, control)
        self.bytes = call.bytes // (2 if impl.startswith(OURS_FP8) else 1)
        self.row |= {"call": call.label, "lengths": list(call.lengths) if call.ragged else None}
        self.is_peer = not impl.startswith(OURS)

    def prepare(self, make: Callable[[], Function]) -> None:
        try:
            self.call = make()
        except ImportError as error:
            self.stop("not installed", peers.brief(error))

    def finish(self, oracle: Judge | None) -> None:
        super().finish(oracle)
        if self.ok:
            del self.row["tflops"]  # of a copy there are none
            self.row["gb_per_s"] = self.bytes / self.row["ms"] * 1e-6


class Copy(Run):
    """A device copy of so many bytes, which is judged by nobody."""

    def __init__(self, name: str, call: Call, size: int) -> None:
        super().__init__(name, call)
        self.bytes = 2 * size
        source, target = (torch.empty(size, dtype=torch.int8, device=DEVICE) for _ in range(2))
        self.call = lambda: target.copy_(source)

    def gate(self, oracle: Judge | None) -> None:
        pass


def rows(call: Call, make: Callable, setting: Setting, fp8: bool = False) -> Iterator[dict[str, Any]]:
    """Times of all implementations of a call, in the same rounds. fp8: on numbers that FP8 has."""
    inputs, control = (make_fp8_inputs if fp8 else make_inputs)(call, DEVICE), OURS_FP8 if fp8 else OURS
    judge = Judge(call, inputs)
    runs: list[Run] = []
    made = make(inputs)
    for name, second in [*((name, False) for name in made), (control, True)]:
        run = Run(name, call, second)
        run.attempt(lambda run=run, name=name: run.prepare(made[name]))
        run.attempt(lambda run=run: run.gate(judge))
        runs.append(run)
    copy = Copy("copy", call, COPIED)
    runs += [copy, Copy("copy of as much", call, call.bytes // 2)]
    harness.time_rounds(runs, judge, setting, lambda text: None)
    for run in runs:
        if "gb_per_s" in run.row:
            run.row["percent_of_copy"] = 100 * run.row["gb_per_s"] / copy.row["gb_per_s"]
        yield run.row


def host_rows() -> Iterator[dict[str, Any]]:
    """Medians over shuffled rounds: a processor's clock changes, and all have to see all of its clocks."""
    call = Call((512,) * 2)
    inputs = make_inputs(call, DEVICE)
    node.wait()  # or calls would go through Python while it is being compiled
    calls, rows = {}, {}
    for name, make in implementations(inputs).items():
        rows[name] = {"call": call.label, "impl": name}
        try:
            function = make()
            function()
            calls[name] = function
        except Exception as error:
            rows[name]["status"] = peers.brief(error)
    found: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(BOOK.rounds):
        for name in order.sample(list(calls), len(calls)):
            found[name].append(timing.host_us(calls[name]))
    for name, times in found.items():
        rows[name] |= {"host_us": statistics.median(times), "round_us": times}
    yield from rows.values()


def show(row: dict[str, Any]) -> str:
    if "host_us" in row:
        return f"{row['call']:32} {row['impl']:44} {row['host_us']:8.1f} us of the host"
    if "gb_per_s" not in row:
        return f"{row['call']:32} {row['impl']:44} {row['status']} {row.get('reason', '')}"
    low, high = row["ms_p20"], row["ms_p80"]
    times = f"{row['ms']:.4f} ms ({low:.4f} to {high:.4f})"
    speed = f"{row['gb_per_s']:6.0f} GB/s {row['percent_of_copy']:5.1f}%"
    return f"{row['call']:32} {row['impl']:44} {speed}  {times}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time decoding on this GPU.")
    parser.add_argument("--tune", action="store_true", help="time configurations of attnlib; write no record")
    parser.add_argument("--fp8", action="store_true", help="time the table `fp8` alone")
    parser.add_argument("--host", action="store_true", help="time the table `host` alone")
    parser.add_argument("--clean", action="store_true", help="time the table `clean` alone")
    parser.add_argument("--only", default="", help="calls whose label has this in it; write no record")
    parser.add_argument("--out", type=Path, help="(default: figures/data/<gpu>/decode.json)")
    args = parser.parse_args(argv)
    if no_hopper():
        return 2
    fp8 = ("fp8", CALLS, in_fp8, SWEEP)
    plan = [("calls", CALLS, implementations, BOOK), ("pairs", PAIRS, splits, SWEEP), fp8]
    part = args.fp8 or args.host or args.clean
    if part:
        plan = [fp8] * args.fp8 + [("clean", CLEAN, readers, BOOK)] * args.clean
    if args.tune:
        plan = [("tune", TUNED, variants, SWEEP)]
    tables: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name, calls, make, setting in plan:
        found = tables.setdefault(name, {"rows": []})["rows"]
        for call in [call for call in calls if args.only in call.label]:
            with timing.clean_l2() if name == "clean" else nullcontext():
                some = list(rows(call, make, setting, make is in_fp8))
            shown = sorted(some, key=lambda row: row.get("ms", 1e9)) if args.tune else some
            print(*map(show, shown), "", sep="\n", flush=True)
            found += some
            gc.collect()
            torch.cuda.empty_cache()
    own = [row for table in tables.values() for row in table["rows"] if row["impl"].startswith(OURS)]
    wrong = [row for row in own if row["status"] != "ok"]
    if args.tune or args.only:
        return int(bool(wrong))
    if not part or args.host:
        tables["host"] = {"rows": list(host_rows())}
        print(*map(show, tables["host"]["rows"]), sep="\n")
    counted = {"bytes": "keys and values read; of the copy read and written"}
    header = records.provenance(harness.method(BOOK, OURS) | counted)
    path = records.report_path("decode", header, args.out)
    for name, table in tables.items():
        read = {"method": header["method"] | {"timer": CLEAN_TIMER}} if name == "clean" else {}
        records.add_table(path, {"notebook": "decode", **header, **read}, name, table["rows"])
    print(path)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

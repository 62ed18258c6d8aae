"""The calls that `attention_decode` is judged on, and the judgement."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from attnlib import attention_decode
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.kernels import decode
from attnlib.kernels.decode.launch import call_of, configuration
from attnlib.kernels.reference.decode import held
from attnlib.params import DecodeParams, mask_window


@dataclass(frozen=True)
class DecodeCase:
    """One call. lengths: of the keys; None for caches that are full, of `room` keys for `batch` sequences.
    page: keys of a page. scales: caches are in FP8, and what has a scale: "nothing", "all", "heads", or
    "pairs":
    a sequence, or a page, and a head. same_launch, idle_tiles: of the `DecodeConfig`.
    """

    name: str
    lengths: tuple[int, ...] | None
    heads: int = 4
    kv_heads: int = 2
    queries: int = 1
    head_dim: int = 64
    dtype: str = "float16"
    room: int = 0
    batch: int = 0
    page: int | None = None
    causal: bool = True
    window: tuple[int, int] | None = None
    sm_scale: float | None = None
    kind: str = "normal"
    split: str | int | None = None
    same_launch: bool = False
    starts: tuple[int, ...] | None = None
    scales: str | None = None
    idle_tiles: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return (self.room,) * self.batch if self.lengths is None else self.lengths


class Inputs(NamedTuple):
    """What a call gets, and the same queries and keys one sequence after the other for the oracle."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor | None
    table: torch.Tensor | None
    starts: torch.Tensor | None
    varlen: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def make(case: DecodeCase, device: str) -> Inputs:
    """Caches that hold NaN wherever no key is that counts, and page tables with numbers of no page."""
    counts, D = case.counts, case.head_dim
    B, total = len(counts), sum(counts)
    shape = Shape(1, case.heads, B * case.queries, D, False, case.dtype, case.kv_heads, max(total, 1))
    q, k, v = (x[0] for x in make_inputs(shape, case.kind, device=device))
    k, v = k[:, :total], v[:, :total]  # (Hkv, keys of all sequences, D)
    varlen = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    q = q.unflatten(1, (B, case.queries)).transpose(0, 1).contiguous()  # (B, H, Sq, D)
    lengths = None if case.lengths is None else torch.tensor(case.lengths, dtype=torch.int32, device=device)
    room = case.room or max(max(counts), 1)
    table = None
    if case.page is None:
        caches = [k.new_full((B, case.kv_heads, room, D), math.nan) for _ in range(2)]
    else:
        pages = -(-room // case.page)
        size = (B * pages + 1, case.kv_heads, case.page, D)
        caches = [k.new_full(size, math.nan) for _ in range(2)]
        numbers = torch.randperm(B * pages + 1, generator=torch.Generator().manual_seed(1))[: B * pages]
        table = numbers.view(B, pages).int().to(device)
    end = 0
    for i_b, count in enumerate(counts):
        begin, end = end, end + count
        for cache, x in zip(caches, (k, v), strict=True):
            if case.page is None:
                cache[i_b, :, :count] = x[:, begin:end]
                continue
            for first in range(0, count, case.page):
                some = x[:, begin + first : min(begin + first + case.page, end)]
                cache[int(table[i_b, first // case.page]), :, : some.shape[1]] = some
        if case.starts is not None and case.page is None:
            for cache in caches:
                cache[i_b, :, : case.starts[i_b]] = math.nan
        if case.page is not None and lengths is not None:
            table[i_b, -(-count // case.page) :] = 1 << 30
    starts = None
    if case.starts is not None:
        starts = torch.tensor(case.starts, dtype=torch.int32, device=device)
        ends = [sum(counts[: i + 1]) for i in range(B)]
        seen = [range(end - n + start, end) for end, n, start in zip(ends, counts, case.starts, strict=True)]
        rows = torch.tensor([i for keys in seen for i in keys], device=device, dtype=torch.int64)
        varlen = varlen[0], varlen[1][rows], varlen[2][rows]
    inputs = Inputs(q, *caches, lengths, table, starts, varlen)
    return inputs if case.scales is None else in_fp8(case, inputs)


def in_fp8(case: DecodeCase, inputs: Inputs) -> Inputs:
    """The same with caches in FP8, whose scales are powers of two: then keys and values times their scales
    are numbers of the dtype of q, as the oracle takes them."""
    q, k, v, lengths, table, starts, _, *_ = inputs
    shape = {"nothing": (), "all": (), "heads": (1, case.kv_heads), "pairs": k.shape[:2]}[case.scales]
    generator, scales, caches = torch.Generator().manual_seed(2), [], []
    for cache in (k, v):
        scale = torch.randint(-6, -3, shape, generator=generator).to(q.device).exp2()
        scale = torch.ones_like(scale) if case.scales == "nothing" else scale
        of_row = scale[..., None, None] if shape else scale
        caches.append((cache.float() / of_row).clamp(-448, 448).to(torch.float8_e4m3fn))
        scales.append(scale.expand(k.shape[:2]) if shape else scale)
    given = [None, None] if case.scales == "nothing" else scales
    params = DecodeParams(mask_window(True, None), 1.0, lengths, table, starts=starts, k_scale=given[0],
                          v_scale=given[1])  # fmt: skip
    parts = zip(*held(*caches, params, len(q)), strict=True)
    keys, values = (torch.cat(list(some), 1).to(q.dtype).transpose(0, 1) for some in parts)
    return Inputs(q, *caches, lengths, table, starts, (inputs.varlen[0], keys, values), *given)


def run(case: DecodeCase, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the call; in the family's configuration with the merge in the same launch where the case
    asks for that."""
    q, k, v, lengths, table, starts, _, k_scale, v_scale = inputs
    if not case.same_launch and not case.idle_tiles:
        return attention_decode(
            q, k, v, lengths=lengths, page_table=table, causal=case.causal, window=case.window,
            sm_scale=case.sm_scale, return_lse=True, split=case.split, starts=starts, k_scale=k_scale,
            v_scale=v_scale,
        )  # fmt: skip
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    seen = mask_window(case.causal, case.window)
    params = DecodeParams(seen, scale, lengths, table, True, case.split, None, starts, k_scale, v_scale)
    config = configuration(call_of(q, k, v, table, params))
    config = replace(config, same_launch=case.same_launch, idle_tiles=case.idle_tiles)
    return decode.forward(q, k, v, params._replace(config=config))


def judge(case: DecodeCase, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """AssertionError unless they are what fp64 says of each sequence alone."""
    q = inputs.q
    rows = torch.arange(len(q) + 1, device=q.device, dtype=torch.int32) * case.queries
    first = case.starts or (0,) * len(case.counts)
    seen = [max(0, n - start) for n, start in zip(case.counts, first, strict=True)]
    ends = torch.tensor([0, *seen], device=q.device).cumsum(0).int()
    oracle = Oracle(*inputs.varlen, case.causal, case.sm_scale, window=case.window, cu_seqlens=(rows, ends))
    assert out.shape == q.shape and lse.shape == q.shape[:3], f"{case.name} is wrong: shapes"
    out = out.transpose(1, 2).reshape(-1, case.heads, case.head_dim)
    oracle.judge(out, lse.transpose(0, 1).reshape(case.heads, -1)).raise_if_bad(case.name)
    # A budget would let small values pass where exactly 0 is promised.
    empty = (oracle.lse == -math.inf).T
    assert not out[empty].any(), f"{case.name} is wrong: a row that sees no key is not 0"


def check(case: DecodeCase, device: str) -> None:
    """AssertionError unless output and LSE are within the error budget, and no input changed."""
    inputs = make(case, device)
    before = [x.clone() for x in inputs[:3]]
    judge(case, inputs, *run(case, inputs))
    for name, now, then in zip("qkv", inputs, before, strict=False):
        same = torch.equal(now.view(torch.int8), then.view(torch.int8))
        assert same, f"{case.name} is wrong: {name} was written to"


ODD = (0, 1, 15, 16, 17, 1000)
MANY = tuple(37 * i % 130 for i in range(33))
SPLITS = ("none", "fixed", "stream_k", 2, 7)


def _cases() -> list[DecodeCase]:
    cases = []

    def add(name: str, lengths: tuple[int, ...] | None, **options) -> None:
        cases.append(DecodeCase(name, lengths, **options))

    for split in SPLITS:
        for page in (None, 16):
            paged = "" if page is None else " paged"
            add(f"odd lengths{paged}, {split}", ODD, split=split, page=page)
        add(f"a full cache, {split}", None, room=300, batch=2, split=split)
    for split in SPLITS[1:]:
        add(f"odd lengths, {split}, merged in the same launch", ODD, split=split, same_launch=True)
    for split in ("fixed", "stream_k"):
        add(f"1 pair, {split}", (1000,), heads=2, kv_heads=1, split=split)
        add(f"8 pairs, {split}", (300, 700), heads=8, kv_heads=4, split=split)
        add(f"33 pairs, {split}", MANY, heads=1, kv_heads=1, head_dim=16, split=split)
    add("130 sequences", tuple(13 * i % 70 for i in range(130)), heads=1, kv_heads=1, head_dim=16,
        split="stream_k")  # fmt: skip
    for same_launch in (False, True):
        more = ", same launch" * same_launch
        add(f"idle tiles{more}", ODD, split="stream_k", same_launch=same_launch, idle_tiles=2)
        add(f"more idle tiles than others{more}", (1, 20, 0, 300), split="stream_k", same_launch=same_launch,
            idle_tiles=9, queries=3, window=(100, 0))  # fmt: skip
    add("idle tiles, full pages", None, room=96, batch=2, page=32, split="stream_k", idle_tiles=3)
    add("few keys in a large cache", (200,), room=2000, heads=2, kv_heads=1, split="stream_k")
    add("2 queries", (0, 1, 2, 3, 290), queries=2, split="stream_k")
    add("16 queries", (5, 16, 17, 300), queries=16, heads=2, split="stream_k")
    add("16 queries, a tile of 32 rows", (5, 300), queries=16, split="stream_k")
    add("three tiles of rows", (5, 300), queries=16, heads=9, kv_heads=1, split="stream_k")
    add("three tiles of rows, same launch", (5, 300), queries=16, heads=9, kv_heads=1, split="stream_k",
        same_launch=True)  # fmt: skip
    add("dense", (1, 3, 300), queries=4, causal=False, split="stream_k")
    for split in ("none", "fixed", "stream_k"):
        add(f"window, {split}", (0, 1, 60, 400), queries=3, window=(100, 0), split=split)
    add("window paged", (0, 1, 60, 400), queries=3, window=(100, 0), page=32, split="stream_k")
    add("window to both sides", (3, 400), queries=8, causal=False, window=(150, 2), split="stream_k")
    add("window of one key", (0, 1, 300), window=(0, 0), split="stream_k")
    for dtype in ("float16", "bfloat16", "float32"):
        for head_dim in (8, 40, 128, 256):
            add(f"D {head_dim} {dtype}", (17, 150), head_dim=head_dim, dtype=dtype, split="stream_k")
        for kind in ("large", "outlier", "constant", "sink"):
            add(f"{kind} {dtype}", (40, 300), dtype=dtype, kind=kind, split="stream_k")
    for scale in (0.0, -0.5, 30.0):
        add(f"scale {scale}", (40, 300), sm_scale=scale, split="stream_k")
    add("pages of 64", (1, 64, 65, 300), page=64, split="fixed")
    for split in SPLITS:
        add(f"starts, {split}", (0, 50, 60, 400, 300), starts=(0, 3, 60, 333, 0), queries=3, split=split)
    add("starts paged", (0, 50, 60, 400), starts=(0, 17, 60, 333), page=16, split="stream_k")
    add("starts in a full cache", None, room=300, batch=3, starts=(0, 299, 130), split="stream_k")
    add("starts and a window", (400, 400, 60), starts=(350, 9, 50), window=(99, 0), queries=4,
        split="stream_k")  # fmt: skip
    add("starts of many sequences", tuple(13 * i % 70 for i in range(130)), heads=1, kv_heads=1, head_dim=16,
        starts=tuple(13 * i % 70 * (i % 3) // 2 for i in range(130)), split="stream_k")  # fmt: skip
    for scales in ("nothing", "all", "heads", "pairs"):
        add(f"FP8, scales of {scales}", ODD, scales=scales, split="stream_k")
        add(f"FP8 paged, scales of {scales}", ODD, scales=scales, page=16, split="fixed")
    for dtype in ("float16", "bfloat16"):
        for head_dim in (8, 40, 128, 256):
            add(f"FP8, D {head_dim} {dtype}", (17, 150), head_dim=head_dim, dtype=dtype, scales="pairs",
                split="stream_k")  # fmt: skip
        add(f"FP8, sink {dtype}", (40, 300), dtype=dtype, kind="sink", scales="pairs", split="none")
    add("FP8, 16 queries", (5, 300), queries=16, scales="pairs", page=32, split="stream_k")
    add("FP8, a full cache", None, room=300, batch=2, scales="pairs", same_launch=True, split="fixed")
    add("FP8, starts and a window", (400, 400, 60), starts=(350, 9, 50), window=(99, 0), queries=4,
        scales="pairs", split="stream_k")  # fmt: skip
    add("FP8, a negative scale", (40, 300), sm_scale=-0.5, scales="pairs", split="stream_k")
    add("full pages", None, room=96, batch=2, page=32, split="stream_k")
    add("the default", ODD)
    return cases


CASES: dict[str, DecodeCase] = {case.name: case for case in _cases()}

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
from attnlib.kernels.decode.launch import call_of, configuration, prepare
from attnlib.params import DecodeParams, mask_window

FP8 = torch.float8_e4m3fn
TOGETHER = 1 << 26
"""Numbers of keys that the oracle looks at together, in fp64 half a gibibyte."""


@dataclass(frozen=True)
class DecodeCase:
    """One call. lengths: of the keys; None for caches that are full, of `room` keys for `batch` sequences.
    page: keys of a page. scales: caches are in FP8, and what has a scale: "nothing", "all", "heads", or
    "pairs": a sequence, or a page, and a head. same_launch, idle_tiles, merge_columns, and where they are not
    None whole and shares: of the `DecodeConfig`. unlike: values have other strides than keys. in_parts:
    whether some pair is split; None for either.
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
    merge_columns: int | None = None
    unlike: bool = False
    whole: int | None = None
    shares: int | None = None
    in_parts: bool | None = None
    seed: int = 0

    @property
    def counts(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return (self.room,) * self.batch if self.lengths is None else self.lengths


class Inputs(NamedTuple):
    """What a call gets; and for the oracle keys and values (B, Hkv, S, D) without pages, in the dtype of q,
    in which those that do not count are 0."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor | None
    table: torch.Tensor | None
    starts: torch.Tensor | None
    plain: tuple[torch.Tensor, torch.Tensor]
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def make(case: DecodeCase, device: str) -> Inputs:
    """Caches that hold NaN wherever no key is that counts, and page tables with numbers of no page."""
    counts, B, page = case.counts, len(case.counts), case.page
    room = case.room or max(max(counts), 1)
    lengths, starts = (
        None if x is None else torch.tensor(x, dtype=torch.int32, device=device)
        for x in (case.lengths, case.starts)
    )
    table = None
    if page is not None:
        pages = -(-room // page)
        room = pages * page
        order = torch.randperm(B * pages + 1, generator=torch.Generator().manual_seed(1)).to(device)
        table = order[:-1].view(B, pages).int()
    shape = Shape(B, case.heads, case.queries, case.head_dim, False, case.dtype, case.kv_heads, room)
    q, k, v = make_inputs(shape, case.kind, case.seed, device)
    hidden = ~counting(case, room, device)[:, None, :, None]
    plain, caches, scales = [], [], []
    for x, shift in ((k, 0), (v, 1)):
        scale, of_key = scales_of(case, table, room, device, shift)
        x = x.masked_fill(hidden, math.nan)
        if case.scales is not None:
            x = x.float().div_(of_key).clamp_(-448, 448).to(FP8)
            plain.append(x.float().mul_(of_key).to(q.dtype).nan_to_num_())
        else:
            plain.append(x.nan_to_num())
        x = x if page is None else in_pages(x, order, page)
        if case.unlike and shift:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        caches.append(x)
        scales.append(scale)
    if table is not None and lengths is not None:
        beyond = torch.arange(pages, device=device) >= (lengths[:, None] + page - 1) // page
        table = table.masked_fill(beyond, 1 << 30)
    return Inputs(q, *caches, lengths, table, starts, tuple(plain), *scales)


def counting(case: DecodeCase, room: int, device: str) -> torch.Tensor:
    """Which keys of each sequence count, [B, room] bool."""
    at = torch.arange(room, device=device)
    ends, starts = (
        torch.tensor(x, device=device)[:, None] for x in (case.counts, case.starts or (0,) * len(case.counts))
    )
    return (at >= starts) & (at < ends)


def in_pages(x: torch.Tensor, order: torch.Tensor, page: int) -> torch.Tensor:
    """Keys or values (B, Hkv, S, D) as (pages, Hkv, page size, D): page i of all stands at order[i], and the
    last place of the order has a page of NaN."""
    pages = x.view(torch.uint8).unflatten(2, (-1, page)).transpose(1, 2).flatten(0, 1)
    none = torch.full(x[:1, :, :page].shape, math.nan, device=x.device).to(x.dtype).view(torch.uint8)
    return torch.cat([pages, none])[order.argsort()].view(x.dtype)


def scales_of(case: DecodeCase, table, room: int, device: str, shift: int):
    """(what the call gets as the scale of keys, or with `shift` of values, the same for each key, to be
    multiplied with (B, Hkv, S, D)). Powers of two: keys and values are so numbers of the dtype of q."""
    if case.scales in (None, "nothing"):
        return None, 1.0
    B, size = len(case.counts), (len(case.counts), case.kv_heads)
    if table is not None:
        size = table.numel() + 1, case.kv_heads
    shape = {"all": (), "heads": (1, case.kv_heads), "pairs": size}[case.scales]
    scale = torch.randint(-6, -3, shape, generator=torch.Generator().manual_seed(2 + shift)).to(device).exp2()
    if not shape:
        return scale, scale
    scale = scale.expand(size)
    if table is None:
        return scale, scale[:, :, None, None]
    of_key = scale[table.long()].transpose(1, 2)  # [B, Hkv, pages of a sequence]
    return scale, of_key.repeat_interleave(room // table.shape[1], 2).view(B, case.kv_heads, room, 1)


def run(case: DecodeCase, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the call; in the family's configuration with what the case changes of it."""
    q, k, v, lengths, table, starts, _, k_scale, v_scale = inputs
    if not changes_of(case):
        return attention_decode(
            q, k, v, lengths=lengths, page_table=table, causal=case.causal, window=case.window,
            sm_scale=case.sm_scale, return_lse=True, split=case.split, starts=starts, k_scale=k_scale,
            v_scale=v_scale,
        )  # fmt: skip
    return decode.forward(q, k, v, params_of(case, inputs))


def changes_of(case: DecodeCase) -> dict[str, object]:
    """What the case changes of the family's configuration."""
    changes = {name: getattr(case, name) for name in ("same_launch", "idle_tiles", "merge_columns")}
    changes = {name: value for name, value in changes.items() if value}
    chosen = {"whole": case.whole, "shares": case.shares}
    return changes | {name: value for name, value in chosen.items() if value is not None}


def params_of(case: DecodeCase, inputs: Inputs) -> DecodeParams:
    """What the family gets, its configuration included."""
    q, k, v, lengths, table, starts, _, k_scale, v_scale = inputs
    scale = case.head_dim**-0.5 if case.sm_scale is None else case.sm_scale
    seen = mask_window(case.causal, case.window)
    params = DecodeParams(seen, scale, lengths, table, True, case.split, None, starts, k_scale, v_scale)
    config = configuration(call_of(q, k, v, table, params))
    return params._replace(config=replace(config, **changes_of(case)))


def splits_a_pair(case: DecodeCase, inputs: Inputs) -> bool:
    """Whether programs leave partial results to the second launch."""
    q, k, v, lengths, table, starts, _, *scales = inputs
    plan = prepare(call_of(q, k, v, table, params_of(case, inputs)))
    parts = q.new_full([plan.scratch], math.nan, dtype=torch.float32)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    plan.launches(q, k, v, torch.empty_like(q), lse, parts, lengths, starts, table, *scales, None)
    return not parts.isnan().all()


def judge(case: DecodeCase, inputs: Inputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    """AssertionError unless they are what fp64 says: of all sequences at once where these fit in TOGETHER
    numbers of keys, or of some after the other."""
    q, (k, v) = inputs.q, inputs.plain
    assert out.shape == q.shape and lse.shape == q.shape[:3], f"{case.name} is wrong: shapes"
    seen = in_sight(case, k.shape[2], q.device)
    for some in torch.arange(len(q)).split(max(1, TOGETHER // k[0].numel())):
        part = slice(int(some[0]), int(some[-1]) + 1)
        keys = slice(max(1, max(case.counts[part])))
        oracle = Oracle(
            q[part], k[part, :, keys], v[part, :, keys], sm_scale=case.sm_scale, mask=seen[part, :, :, keys]
        )
        oracle.judge(out[part], lse[part]).raise_if_bad(case.name)
        # A budget would let small values pass where exactly 0 is promised.
        empty = oracle.lse == -math.inf
        assert not out[part][empty].any(), f"{case.name} is wrong: a row that sees no key is not 0"


def in_sight(case: DecodeCase, room: int, device) -> torch.Tensor:
    """Which keys each row sees, [B, 1, Sq, room] bool."""
    at, rows = torch.arange(room, device=device), torch.arange(case.queries, device=device)
    ends = torch.tensor(case.counts, device=device)[:, None, None]
    distance = at - (rows[:, None] + ends - case.queries)  # [B, Sq, room]
    left, right = mask_window(case.causal, case.window)
    seen = counting(case, room, device)[:, None].expand(distance.shape)
    seen = seen if left is None else seen & (distance >= -left)
    return (seen if right is None else seen & (distance <= right))[:, None]


def check(case: DecodeCase, device: str) -> None:
    """AssertionError unless output and LSE are within the error budget, and no input changed."""
    inputs = make(case, device)
    before = [x.clone() for x in inputs[:3]]
    judge(case, inputs, *run(case, inputs))
    if case.in_parts is not None:
        split = splits_a_pair(case, inputs)
        assert split == case.in_parts, f"{case.name} is wrong: {'a' if split else 'no'} pair is split"
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
    for page, starts in ((128, None), (256, (0, 17, 130, 250))):
        add(f"tiles in pages of {page}", (0, 128, 129, 300), page=page, starts=starts, split="stream_k")
        add(f"tiles in pages of {page}, FP8", (0, 128, 129, 300), page=page, starts=starts, scales="pairs",
            split="stream_k")  # fmt: skip
    # Page sizes that are no powers of two: tiles reach over the ends of pages, or a page has several.
    for split, page in (("stream_k", 48), ("fixed", 80)):
        ends = (0, 1, page - 1, page, page + 1, 300)
        add(f"pages of {page}, {split}", ends, page=page, split=split)
        add(f"pages of {page}, {split}, FP8", ends, page=page, scales="pairs", split=split)
    add("pages of 48, starts and a window, stream_k", (0, 100, 97, 400), starts=(0, 17, 47, 333), queries=3,
        window=(100, 0), page=48, split="stream_k")  # fmt: skip
    add("full pages of 80, stream_k", None, room=240, batch=2, page=80, split="stream_k")
    for scales in (None, "pairs"):
        add(f"tiles in pages of 96{', FP8' * bool(scales)}", (0, 96, 97, 300), page=96, head_dim=256,
            starts=(0, 17, 96, 250), scales=scales, split="stream_k")  # fmt: skip
    add("tiles in pages, window", (60, 400), queries=3, window=(100, 0), page=128, split="fixed")
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
    near, three = (300, 290), (300, 290, 300)
    add("whole pairs", three, split="stream_k", whole=6, shares=7, in_parts=False)
    add("a longer pair", (300, 290, 400), split="stream_k", whole=6, shares=7, in_parts=True)
    add("whole pairs, four of six programs", near, split="stream_k", whole=4, in_parts=False)
    add("whole pairs, fewer programs", three, split="stream_k", whole=6, shares=5, in_parts=True)
    add("whole pairs, same launch", near, split="stream_k", whole=4, same_launch=True)
    add("whole pairs, no keys", (0, 1, 0), split="stream_k", whole=6, in_parts=False)
    add("whole pairs, idle tiles", near, split="stream_k", whole=4, idle_tiles=2, in_parts=False)
    add("whole pairs, full", None, room=300, batch=2, split="stream_k", whole=4, in_parts=False)
    add("whole pairs, window", (60, 400), queries=3, window=(100, 0), split="stream_k", whole=3,
        in_parts=False)  # fmt: skip
    add("whole pairs, starts", (400, 300), starts=(150, 20), split="stream_k", whole=4, in_parts=False)
    add("whole pairs, 16 queries", near, queries=16, heads=9, kv_heads=1, split="stream_k", whole=6,
        in_parts=False)  # fmt: skip
    for page in (None, 16):
        add(f"whole pairs, FP8, pages {page}", near, page=page, scales="pairs", split="stream_k", whole=4,
            in_parts=False)  # fmt: skip
    add("whole pairs paged", near, page=16, split="stream_k", whole=4, in_parts=False)
    ends = tuple(290 + i % 10 for i in range(130))
    for name, first in (("whole pairs", 300), ("a longer pair", 600)):
        add(f"{name} of 130 sequences", (first, *ends[1:]), heads=1, kv_heads=1, head_dim=16, whole=124,
            split="stream_k", shares=140, in_parts=first > 300)  # fmt: skip
    add("merges of whole rows", ODD, head_dim=128, split="stream_k", merge_columns=128)
    for page in (None, 16, 128):
        add(f"values laid out unlike keys, pages {page}", (17, 290), page=page, unlike=True, split="stream_k")
    add("full pages", None, room=96, batch=2, page=32, split="stream_k")
    add("the default", ODD)
    return cases


CASES: dict[str, DecodeCase] = {case.name: case for case in _cases()}

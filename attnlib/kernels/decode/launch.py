"""Launch the decoding kernels."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.arguments.decode import FP8
from attnlib.kernels.common import device
from attnlib.kernels.common.counters import counter
from attnlib.kernels.common.descriptors import strides_like
from attnlib.kernels.common.distr import contiguous
from attnlib.kernels.common.launcher import LIMIT, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED, exp2_scale
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.decode.configs import (
    FEW,
    MANY,
    DecodeConfig,
    Split,
    Work,
    decode_config,
    merge_config,
)
from attnlib.params import DecodeParams, MaskWindow

TENSORS = "q", "k", "v", "out", "lse", "parts", "lengths", "starts", "page_table"
TENSORS += "k_scale", "v_scale", "arrived"
"""What launches call their tensors; `node.cpp` knows the order."""
FP8_CAPABILITY = 8, 9
MODULE = "attnlib.kernels.decode.decode_kernels"
INTERPRETED_SMS = 3
"""That the interpreter is taken to have: few programs, as it runs them one by one."""

Strides = tuple[int, ...]


class Call(NamedTuple):
    """A call without its addresses: what its launches depend on.

    q, cache: shapes (B, H, Sq, D) and (B, Hkv, S, D), paged (pages, Hkv, page size, D). table: shape of the
    page table, None without one; table_stride: that of its rows. ragged, starting: there are lengths, and
    starts. aligned: which caches begin at a multiple of 16 bytes. dtype: of q, and of caches unless they are
    in FP8. scales: strides of k_scale and v_scale by sequence, or by page, and head; None for no scale.
    """

    q: torch.Size
    cache: torch.Size
    strides: tuple[Strides, Strides, Strides]
    table: torch.Size | None
    table_stride: int
    ragged: bool
    starting: bool
    aligned: tuple[bool, bool]
    dtype: torch.dtype
    device: int
    window: MaskWindow
    sm_scale: float
    return_lse: bool
    split: Split | int | None
    config: DecodeConfig | None
    fp8: bool = False
    scales: tuple[tuple[int, int] | None, tuple[int, int] | None] = (None, None)

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for."""
        return self.cache[2] if self.table is None else self.table[1] * self.cache[2]

    @property
    def rows(self) -> int:
        """Query rows that share a key/value head; 1 where there is no head."""
        return max(1, self.q[1] // max(1, self.cache[1]) * self.q[2])


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: DecodeParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `decode_kernels.attention_decode` on valid arguments, of which none is empty; see
    `attnlib.attention_decode`. Returns (out, lse); lse is None unless it was asked for. ValueError if the
    grid is beyond 2^31, or the GPU is too old for caches in FP8."""
    if device.widened(q.dtype):
        k, v = (x.float() if x.dtype == torch.bfloat16 else x for x in (k, v))
        out, lse = forward(q.float(), k, v, params)
        return out.bfloat16(), lse
    q, others = _as_kernels_take_it(q, params)
    return run(prepare(call_of(q, k, v, others[2], params)), q, k, v, others)


def prepared(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: DecodeParams) -> "Plan | None":
    """The launches with which `forward` runs these tensors; None where one has to be copied first."""
    given = q, params.lengths, params.starts, params.page_table
    taken, others = _as_kernels_take_it(q, params)
    if any(x is not y for x, y in zip(given, (taken, *others[:3]), strict=True)):
        return None
    return without_counter(prepare(call_of(q, k, v, params.page_table, params)))


def without_counter(plan: "Plan") -> "Plan | None":
    """The plan, if its launches need no more than the tensors of a call: for `node.cpp`, which counts no
    arrivals."""
    return None if plan.same_launch else plan


def _as_kernels_take_it(q: torch.Tensor, params: DecodeParams) -> tuple[torch.Tensor, tuple]:
    """(q, (lengths, starts, page table, k_scale, v_scale)), copied where kernels could not read them: the
    very objects that were given, but for that."""
    if q.stride(-1) != 1 or q.data_ptr() % 16:
        q = q.clone(memory_format=torch.contiguous_format)  # a few rows
    _, _, lengths, table, _, _, _, starts, k_scale, v_scale = params
    if lengths is not None and not lengths.is_contiguous():
        lengths = lengths.contiguous()
    if starts is not None and not starts.is_contiguous():
        starts = starts.contiguous()
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    return q, (lengths, starts, table, k_scale, v_scale)


def run(
    plan: "Plan",
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    others: tuple[torch.Tensor | None, ...] = (None,) * 5,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch what was prepared for such tensors. others: lengths, starts, page table,
    k_scale, v_scale."""
    out = q.new_empty_strided(q.shape, plan.out)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if plan.return_lse else None
    parts = torch.empty(plan.scratch, dtype=torch.float32, device=q.device) if plan.scratch else None
    arrived = None
    if plan.same_launch:
        index, size = q.get_device(), plan.pairs
        arrived = counter(index, size) if q.is_cuda else torch.zeros(size, dtype=torch.int32)
    plan.launches(q, k, v, out, lse, parts, *others, arrived)
    return out, lse


def call_of(q, k, v, table: torch.Tensor | None, params: DecodeParams) -> Call:
    aligned = k.data_ptr() % 16 == 0, v.data_ptr() % 16 == 0
    return Call(
        q.shape, k.shape, (q.stride(), k.stride(), v.stride()), None if table is None else table.shape,
        0 if table is None else table.stride(0), params.lengths is not None, params.starts is not None,
        aligned, q.dtype, q.get_device(), params.window, params.sm_scale, params.return_lse, params.split,
        params.config, k.dtype is FP8, tuple([_scale_strides(x) for x in params[-2:]]),
    )  # fmt: skip


def _scale_strides(scale: torch.Tensor | None) -> tuple[int, int] | None:
    """Of a sequence or page, and of a head. 0 where all have the same."""
    if scale is None:
        return None
    return _used(scale.shape, scale.stride()) if scale.dim() else (0, 0)


class Plan(NamedTuple):
    """The launches of a call; the strides of its output; float32 numbers of memory for partial results, pairs
    that count them."""

    launches: Launches
    out: Strides
    scratch: int
    pairs: int
    same_launch: bool
    return_lse: bool
    counted = False  # as of a `ForwardPlan`: no counter in the place of `parts`


def sms_of(index: int) -> int:
    """Multiprocessors of a device."""
    return INTERPRETED_SMS if device.interpreted() else device.num_sms(index)


def _by_page(call: Call) -> bool:
    """Whether pages have scales of their own."""
    return call.table is not None and any(strides and strides[0] for strides in call.scales)


def _check_capability(index: int) -> None:
    """ValueError where Triton has no numbers in FP8 (e4m3)."""
    if not device.interpreted() and device.capability(index) < FP8_CAPABILITY:
        wanted, found = (".".join(map(str, x)) for x in (FP8_CAPABILITY, device.capability(index)))
        raise ValueError(f"k_cache: {FP8} needs a GPU of compute capability {wanted} or more, got {found}")


def work_of(call: Call) -> Work:
    """What a call has to read, and who reads it."""
    left, keys = call.window.left, call.capacity
    dtype = str(call.dtype).removeprefix("torch.")
    seen = keys if left is None else min(keys, left + call.q[2])
    equal = not call.table and (call.q[0] == 1 or not (call.ragged or call.starting))
    return Work(call.rows, call.q[-1], dtype, call.q[0] * call.cache[1], seen, sms_of(call.device), equal,
                call.fp8, _by_page(call), device.bandwidth(call.device))  # fmt: skip


def configuration(call: Call) -> DecodeConfig:
    """How the kernels are compiled and launched for a call."""
    return decode_config(work_of(call), call.split)


@lru_cache(PREPARED)
def prepare(call: Call) -> Plan:
    """The launches of all calls that differ in addresses only. ValueError if the call is too large, or the
    GPU too old."""
    if call.fp8:
        _check_capability(call.device)
    B, H, S_q, D = call.q
    H_kv = call.cache[1]
    config = call.config or configuration(call)
    if call.capacity > LIMIT - config.block_n:  # a tile's end is an int32 too
        raise ValueError(
            f"k_cache: expected room for at most {LIMIT - config.block_n} keys of a sequence, got "
            f"{call.capacity}"
        )
    blocks, width = -(-call.rows // config.block_m), block_d(D)
    pairs, stream_k = B * H_kv * blocks, config.split == "stream_k"
    tiles = -(-call.capacity // config.block_n) + (config.idle_tiles if stream_k else 0)
    grid = config.shares * (1 if stream_k else pairs)
    merged_rows = pairs * min(config.block_m, call.rows)
    most = min(config.shares, tiles)
    merge = merge_config(merged_rows, width, most, sms_of(call.device), config.merge_columns)
    merging = merged_rows * (width // merge.columns)
    if max(pairs * tiles, grid, merging) >= LIMIT:
        raise ValueError(
            f"q, k_cache: expected fewer than 2^31 programs of two launches and tiles of {config.block_n} "
            f"keys over all heads, got {grid}, {merging} and {pairs * tiles}"
        )
    slots = 0 if config.split == "none" else config.shares * (2 if stream_k else pairs)
    same_launch = config.same_launch and slots > 0
    overlaps = slots > 0 and not same_launch and device.overlaps(call.device)
    left, right = call.window.clipped(S_q, call.capacity)
    item = call.dtype.itemsize
    out = strides_like(call.q, call.strides[0])
    if out[-1] != 1:  # rows of q overlap; those of the output are written in one piece
        out = contiguous(call.q)
    q_strides, k_strides, v_strides = (
        _used(shape, strides)
        for shape, strides in zip((call.q, call.cache, call.cache), call.strides, strict=True)
    )
    out_strides = _used(call.q, out)
    unit_q = _unit(16 // item, q_strides, out_strides)
    unit_kv = _unit(16 // (1 if call.fp8 else item), k_strides, v_strides)
    if call.fp8 and unit_kv == 1:  # a head dimension that is an odd multiple of 8
        unit_kv = _unit(8, k_strides, v_strides)
    prefetch = config.prefetch and unit_kv > 1 and not device.interpreted()
    rows = slots * config.block_m
    outputs = {"out_ptr": Part("out"), "lse_ptr": Part("lse")}
    partial = {
        "part_o": Part("parts"),
        "part_m": Part("parts", rows * width),
        "part_l": Part("parts", rows * width + rows),
    }
    o_b, o_h, o_s = (stride // unit_q for stride in out_strides[:3])
    sizes = {"B": B, "S": call.capacity, "H_kv": H_kv, "left": left, "shares": config.shares}
    sizes |= {"o_b": o_b, "o_h": o_h, "o_s": o_s}
    constants = {
        "D": D,
        "S_Q": S_q,
        "GROUP": H // H_kv,
        "BLOCKS": blocks,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_D": width,
        "PARTS": merge.parts,
        "SLICE": merge.columns,
        "STREAM_K": stream_k,
        "WHOLE": config.whole if stream_k and pairs <= config.shares else 0,
        "IDLE": config.idle_tiles if stream_k else 0,
        "AT_ONCE": FEW if B <= FEW else MANY,
        "OVERLAPS": overlaps,
        "UNIT_Q": unit_q,
        "STORE_LSE": call.return_lse,
    }
    decode = Launch(
        f"{MODULE}.attention_decode",
        (grid, 1, 1),
        descriptors={},
        pointers={
            "q_ptr": Part("q"),
            "k_ptr": Part("k"),
            "v_ptr": Part("v"),
            **outputs,
            **partial,
            "arrived": Part("arrived"),
            "lengths": Part("lengths"),
            "starts": Part("starts"),
            "page_table": Part("page_table"),
            "k_scale": Part("k_scale"),
            "v_scale": Part("v_scale"),
        },
        scalars={
            "qk_scale": exp2_scale(call.sm_scale),
            **sizes,
            "right": right,
            **{f"q_{name}": stride // unit_q for name, stride in zip("bhs", q_strides[:3], strict=True)},
            **_cache_strides("k", k_strides, unit_kv),
            **_cache_strides("v", v_strides, unit_kv),
            "table_b": call.table_stride,
            **_scale_scalars("k", call.scales[0], call.table is not None),
            **_scale_scalars("v", call.scales[1], call.table is not None),
        },
        constants={
            **constants,
            "PAGE": None if call.table is None else call.cache[2],
            "ALIGNED": call.aligned,
            "UNIT_KV": unit_kv,
            "WIDE": max(_reach(call, strides) for strides in (k_strides, v_strides)) >= LIMIT * unit_kv,
            "ALIKE": k_strides == v_strides,
            "PREFETCH": prefetch,
            "PREFETCH_NEXT": prefetch and config.prefetch_next,
            "FLIP": call.sm_scale < 0,
            "NUM_STAGES": config.num_stages,
            "PRECISION": "ieee" if call.dtype == torch.float32 else "tf32",
            "FP8": call.fp8,
            "PAIRS": call.fp8 and all(call.aligned) and unit_kv > 1 and width >= 32,
            "PTX": not device.interpreted(),
            "LATE_SUMS": config.late_sums,
        }
        | ({} if same_launch else {"PARTS": None, "SLICE": None}),  # or each number of parts is compiled
        options={"num_warps": config.num_warps, "num_stages": config.num_stages}
        | ({} if config.registers is None else {"maxnreg": config.registers}),
    )
    launches = [decode]
    if slots and not same_launch:
        merge = Launch(
            f"{MODULE}.attention_merge",
            (merging, 1, 1),
            descriptors={},
            pointers={**outputs, **partial, "lengths": Part("lengths"), "starts": Part("starts")},
            scalars=sizes,
            constants=constants,
            options={"num_warps": 4} | device.begins_early(overlaps),
        )
        launches.append(merge)
    scratch = rows * (width + 2)
    return Plan(Launches(launches, call.device, TENSORS), out, scratch, pairs, same_launch, call.return_lse)


def _used(shape: torch.Size, strides: Strides) -> Strides:
    """The strides; 0 where a dimension of size 1 may have any."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(shape, strides, strict=True))


def _reach(call: Call, strides: Strides) -> int:
    """Elements from the first key of a head to the end of the last one that is read."""
    if call.table is None:
        return call.cache[2] * strides[2]
    return call.cache[0] * strides[0] + call.cache[2] * strides[2]


def _unit(unit: int, *tensors: Strides) -> int:
    """`unit` elements, 16 bytes or 8, where all these tensors have contiguous rows that begin at multiples of
    it, or else 1. The kernel multiplies strides with it, so that the compiler knows the rows for aligned."""
    whole = all(strides[-1] == 1 and not any(stride % unit for stride in strides[:-1]) for strides in tensors)
    return unit if whole else 1


def _cache_strides(name: str, strides: Strides, unit: int) -> dict[str, int | None]:
    b, h, s, d = strides
    return {
        f"{name}_b": b // unit,
        f"{name}_h": h // unit,
        f"{name}_s": s // unit,
        f"{name}_d": None if d == 1 else d,
    }


def _scale_scalars(name: str, strides: tuple[int, int] | None, paged: bool) -> dict[str, int | None]:
    first, head = strides or (0, 0)
    by_page = paged and first != 0  # else all pages have the same, or there are none
    return {
        f"{name}_scale_b": 0 if paged else first,
        f"{name}_scale_h": head,
        f"{name}_scale_page": first if by_page else None,
    }

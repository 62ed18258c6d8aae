"""Launch the Hopper backward kernel, the pass before it, and the conversion of its sums to dQ."""

from dataclasses import replace
from functools import lru_cache

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.backward_plan import TENSORS, BackwardPlan, gradients_like, run
from attnlib.kernels.common.descriptors import Window, columns_of, given
from attnlib.kernels.common.hopper_gpu import HALF
from attnlib.kernels.common.launch_postprocess import LINE, postprocess
from attnlib.kernels.common.launch_preprocess import CHUNK, Preprocess, preprocess
from attnlib.kernels.common.launcher import LIMIT, Descriptor, Launch, Launches, Part
from attnlib.kernels.common.signature import LOG2_E, PREPARED, Signature
from attnlib.kernels.hopper import sharing
from attnlib.kernels.hopper.configs_backward import (
    HopperBackwardConfig,
    Keys96BackwardConfig,
    OwnValuesBackwardConfig,
)
from attnlib.params import Params

KERNEL = "attnlib.kernels.hopper.backward_kernel.attention_backward_hopper"
WIDE_KERNEL = "attnlib.kernels.hopper.backward_wide_kernel.attention_backward_hopper_wide"
KEYS_96_KERNEL = "attnlib.kernels.hopper.backward_keys96_kernel.attention_backward_hopper_keys96"


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    params: Params,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of attention on a GPU of compute capability 9.x, none of the arguments empty.

    q: (B, H, Sq, D); k: (B, Hkv, Sk, D); v: (B, Hkv, Sk, Dv); d_out, out: (B, H, Sq, Dv); lse: (B, H, Sq)
    float32, contiguous, as `forward` returned it. With `params.varlen` q: (Tq, H, D); k: (Tk, Hkv, D), the
    others likewise; lse: (H, Tq).
    Returns (dq, dk, dv), with a deterministic configuration the same in every run. Else dq is so up to the
    order of a sum, and so are dk and dv where programs that share a key head add to one sum (`added`);
    elsewhere dk and dv are the same in every run. ValueError if a length or the tiles are beyond 2^30.
    """
    return run(prepare, (d_out, q, k, v, out), lse, params)


@lru_cache(PREPARED)
def prepare(call: Signature) -> BackwardPlan | None:
    """None if an input has to be copied."""
    windows = given(call, call.out, call.q, call.k, call.v, call.out)
    if windows is None:
        return None
    d_out, q, k, v, out = windows
    dq, dk, dv = gradients_like(call)
    B, H, H_kv, S_q, S_k = call.dimensions()
    config: HopperBackwardConfig = call.config
    width, values = config.widths(call.head_dim, call.value_dim)
    widest = max(width, values)
    keys = 96 if isinstance(config, Keys96BackwardConfig) else 64 if widest > 128 else 128
    if config.block_n != keys:
        raise ValueError(f"block_n: expected {keys} for {widest} columns, got {config.block_n}")
    first = preprocess(call, d_out, out, config.block_m, width, turns=config.deterministic)
    heads, padded = first.heads, first.padded
    left, right = call.window.clipped(S_q, S_k)
    heads_kv, num_n = H_kv if call.varlen else B * H_kv, sharing.key_blocks(call)
    visited = sharing.query_heads(call)
    keys = sharing.SharedKeys(call, H // H_kv // visited, heads_kv, num_n * config.block_n)
    shared = keys.share > 1
    # A tile of a batch has two steps or more, see `backward_persistent`.
    persistent = config.persistent and (not config.deterministic if call.varlen else padded > config.block_m)
    sums = keys.elements if shared else 0
    counted = CHUNK if persistent else 0  # a counter of tiles before the sums
    if shared or persistent:
        first = first.followed_by(counted + sums, zeros=counted + (sums if config.added else 0))
    keys_ptr = first.following._replace(start=first.following.start + counted)
    heads_kv *= keys.share
    tiles = num_n * heads_kv
    programs = min(tiles, device.num_sms(call.device)) if persistent else tiles
    most = max(tiles, heads * (padded // 64), S_q * (H // H_kv))
    if max(most, S_k) >= LIMIT // 2:
        raise ValueError(
            "q, k: expected fewer than 2^30 keys, rows of a group, and tiles or blocks of 64 rows over all "
            f"heads, got {S_q} rows and {S_k} keys of a head, and {most} tiles, blocks or rows of a group"
        )
    sections = sharing.sections(call, visited)
    overlaps = device.overlaps(call.device)
    made = () if shared else (dk.window, dv.window)
    mask = {"causal": right is not None, "shifted": bool(right), "left": left is not None}
    mask["tail"] = right != 0 and (call.varlen or S_k % config.block_n != 0)
    form = replace(config, rotated=config.rotated and visited == 1)
    launch = Launch(
        kernel_of(config),
        (programs, 1, 1),
        descriptors=descriptors((q, k, v, d_out, *made), first, width, call),
        pointers={
            "dq_ptr": Part("buffer"), "cu_q": Part("cu_q"), "cu_k": Part("cu_k"), "turns_ptr": first.turns,
            **({"keys_ptr": keys_ptr} if shared else {}),
            **({"counter_ptr": first.following} if persistent else {}),
        },  # fmt: skip
        scalars={
            "qk_scale": call.sm_scale * LOG2_E,
            "sm_scale": call.sm_scale,
            "S_q": S_q,
            "S_k": S_k,
            "H": H,
            "GROUP": visited,
            "HEADS_KV": heads_kv,
            "SECTION": sections.size,
            "LAST": sections.last,
            "num_m": padded // config.block_m,
            "num_n": num_n,
            "right": right or None,
            "left": left,
            "B": B if call.varlen else None,
            **({"SHARE": keys.share} if shared else {}),
            **({"tiles": tiles} if persistent else {}),
        },
        constants={
            "plan": make_plan(width, form, mask, call.varlen, shared, persistent),
            "OVERLAPS": overlaps,
            **({"desc_dk": None, "desc_dv": None} if shared else {}),
        },
        options={"num_warps": 4, "maxnreg": config.max_registers, **device.begins_early(overlaps)},
    )
    launches = [first.launch, launch, postprocess(call, dq.window, first, width)]
    if shared:
        launches += keys.conversions(keys_ptr.start, dk.window, dv.window)
    return BackwardPlan(Launches(launches, call.device, TENSORS), first.elements, dq, dk, dv)


def kernel_of(config: HopperBackwardConfig) -> str:
    return {64: WIDE_KERNEL, 96: KEYS_96_KERNEL, 128: KERNEL}[config.block_n]


def make_plan(
    width: int,
    config: HopperBackwardConfig,
    mask: dict[str, bool],
    varlen: bool,
    shared: bool = False,
    persistent: bool = False,
):
    """The kernel's constants; `mask` are those of `plan.BackwardMask`."""
    from attnlib.kernels.common.pipeline import Registers, WideRegisters
    from attnlib.kernels.hopper.plan import (
        BackwardMask,
        BackwardPlan,
        Keys96BackwardPlan,
        OwnValuesBackwardPlan,
        OwnValuesWidePlan,
        SplitBackwardPlan,
        WideBackwardPlan,
    )

    kept = config.consumer_registers, config.producer_registers
    if isinstance(config, Keys96BackwardConfig):
        registers = WideRegisters(*kept, config.dq_registers)
        how = varlen, BackwardMask(**mask), registers, config.early_mask
        how += -(-config.value_columns // 64), shared, shared and config.added, width, config.pause_every
        return Keys96BackwardPlan(config.block_m, *how, config.deterministic)
    parts = {"shared": shared, "added": shared and config.added}
    parts |= {"early_mask": config.early_mask, "pause_every": config.pause_every}
    own = isinstance(config, OwnValuesBackwardConfig)
    if own:
        parts["own_values"] = config.value_columns
    if config.block_n == 64:
        registers = WideRegisters(*kept, config.dq_registers)
        how = config.block_m, varlen, BackwardMask(**mask), registers, config.deterministic
        if own:
            return OwnValuesWidePlan(width, *how, **parts)
        return WideBackwardPlan(width, *how, **parts)
    how = config.block_m, config.half_p, config.stagger, varlen, BackwardMask(**mask), Registers(*kept)
    how += config.deterministic, config.alternate
    hidden = mask["causal"] or mask["left"]
    parts["tail_apart"] = config.tail_apart and mask["tail"] and not hidden
    parts["rotated"] = config.rotated and not hidden and not config.deterministic
    parts |= {"bulk": config.bulk, "masked_stagger": config.masked_stagger, "persistent": persistent}
    if config.columns:
        left, right = config.columns
        return SplitBackwardPlan(left, *how, **parts, right=right, held=config.held)
    if own:
        return OwnValuesBackwardPlan(width, *how, **parts)
    return BackwardPlan(width, *how, **parts)


def descriptors(
    windows: tuple[Window, ...], rows: Preprocess, width: int, call: Signature
) -> dict[str, Descriptor]:
    """Of Q, K, V, dO, and of dK and dV where they are given, and of LSE and delta: what one copy moves."""
    from triton.experimental.gluon import language as gl

    ones, config = (1, 1, 1) if call.varlen else (1, 1), call.config
    sizes = {"q": config.block_m, "k": 64, "v": 64, "do": config.block_m, "dk": 64, "dv": 64}
    element, values = getattr(gl, HALF[call.dtype]), config.value_width(call.widest)
    found = {}
    for (name, size), whole in zip(sizes.items(), windows, strict=False):
        if isinstance(config, Keys96BackwardConfig):  # three copies along the columns, of keys two of rows
            tensor = Part("d_out" if name == "do" else name)
            for suffix, rows_of_copy in zip(
                ("", "_few"), (64,) if name in ("q", "do") else (64, 32), strict=False
            ):
                block = (*ones, rows_of_copy, 64)
                # Products take 32 columns of a part of a tile of 160: a swizzle does not reach beyond them.
                layout = gl.NVMMASharedLayout(128 if width == 192 else 64, 16, len(block))
                found[f"desc_{name}{suffix}"] = Descriptor(tensor, whole, block, layout)
            continue
        start, parts = 0, config.columns or (values if name in ("v", "do", "dv") else width,)
        for suffix, columns in zip(("", "_right"), parts, strict=False):
            block = (*ones, size, columns)
            window = columns_of(whole, start, columns) if config.columns else whole
            layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
            if name == "k" and config.block_n == 128 and config.block_m == 64 and columns > 16:
                # Each consumer reads half of these columns for dQ: a swizzle does not reach beyond them.
                layout = gl.NVMMASharedLayout(columns, 16, len(block))
            tensor = Part("d_out" if name == "do" else name, start)
            found[f"desc_{name}{suffix}"] = Descriptor(tensor, window, block, layout)
            start += columns
    found["desc_rows"] = rows.gluon_descriptor(config.block_m)
    return found | (_sums(rows, config, width) if config.bulk else {})


def _sums(rows: Preprocess, config: HopperBackwardConfig, width: int) -> dict[str, Descriptor]:
    """Of the sums of dQ: what a consumer adds of each part at a time. Of 128 rows it has half of the rows, of
    64 half of the columns, where these are more than 16."""
    from triton.experimental.gluon import language as gl

    found, as_it_is = {}, gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    for suffix, columns in zip(("", "_right"), config.columns or (width,), strict=False):
        own = columns if config.block_m == 128 or columns == 16 else columns // 2
        window = (rows.heads * rows.padded * width // LINE, LINE), (LINE, 1)
        found[f"desc_sums{suffix}"] = Descriptor(Part("buffer"), window, (64 * own // LINE, LINE), as_it_is)
    return found

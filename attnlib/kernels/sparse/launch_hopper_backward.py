"""Launch the Hopper backward kernel under a block mask, the pass before it, and the conversion of sums to
dQ."""

from functools import lru_cache

import torch

from attnlib.kernels.common import backward_plan, device, l2_sections
from attnlib.kernels.common.backward_plan import BackwardPlan, gradients_like
from attnlib.kernels.common.descriptors import Window, given
from attnlib.kernels.common.hopper_gpu import HALF
from attnlib.kernels.common.launch_postprocess import postprocess
from attnlib.kernels.common.launch_preprocess import CHUNK, Preprocess, preprocess
from attnlib.kernels.common.launcher import LIMIT, Descriptor, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED, Signature
from attnlib.kernels.common.tiles import tile_width
from attnlib.kernels.sparse.configs_hopper import HopperBiasConfig, HopperSparseBackwardConfig
from attnlib.kernels.sparse.hopper_bias import bias_descriptor, bias_plan, bias_scalars, bias_window
from attnlib.kernels.sparse.launch_backward import (
    COLUMNS,
    GRADIENTS,
    TILES,
    score_tensors,
    sinks_gradient,
    tiles_of,
)
from attnlib.kernels.sparse.launch_bias import bias_gradient
from attnlib.kernels.sparse.launch_forward import TILE, bias_part, mask_strides
from attnlib.kernels.sparse.launch_hopper import scales, words_descriptor
from attnlib.kernels.sparse.launch_hopper_bias import hopper_bias_gradient
from attnlib.params import Params
from attnlib.scores import ScoreForm

TENSORS = (*backward_plan.TENSORS, *COLUMNS, *TILES, *GRADIENTS, "units")
KERNELS = {
    128: "attnlib.kernels.sparse.hopper_backward_kernel.attention_sparse_backward_hopper",
    64: "attnlib.kernels.sparse.hopper_backward_wide_kernel.attention_sparse_backward_hopper_wide",
}
"""By keys of a program."""


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    params: Params,
) -> tuple[torch.Tensor | None, ...]:
    """(dq, dk, dv) on a GPU of compute capability 9.x, none of the arguments empty. dk and dv are the same in
    every run, dq up to the order of a sum. With a score also (dsinks, dbias)."""
    mask, config = params.block_mask, params.config
    mask = mask.gathered if config.gathered else mask
    lists = mask.lists(config.block_m, columns=True, rows=config.block_n)
    short = config.word_bits == 16
    words = mask.short_words_of_columns if short else mask.words_of(config.block_m, columns=True)
    score = score_tensors(params)
    more = *lists, words, *tiles_of(params), *score, mask.units if config.gathered else None
    found = backward_plan.run(prepare, (d_out, q, k, v, out), lse, params, more)
    return found if params.score is None else (*found, *score[3:])


@lru_cache(PREPARED)
def prepare(call: Signature) -> BackwardPlan | None:
    """None if an input has to be copied."""
    windows = given(call, call.q, call.q, call.k, call.k, call.q)
    if windows is None:
        return None
    d_out, q, k, v, out = windows
    dq, dk, dv = gradients_like(call)
    B, H, H_kv, S_q, S_k = call.dimensions()
    config: HopperSparseBackwardConfig = call.config
    width = tile_width(call.head_dim)
    first = preprocess(call, d_out, out, TILE, width)  # lists may name queries up to a whole tile
    mask = call.mask.gathered if config.gathered else call.mask
    bias = bias_window(call.score, S_q, S_k) if config.copies_bias else None
    plan = make_plan(width, config, mask.partial, call.score, bias is not None)
    own_bias, persistent = isinstance(config.bias, HopperBiasConfig), plan.persistent.value
    if own_bias or persistent:
        first = first.followed_by(CHUNK, zeros=CHUNK)  # a counter
    num_n = -(-S_k // TILE) * (TILE // config.block_n)
    columns = num_n * B * H_kv
    leading = l2_sections.leading_programs(B * H_kv, num_n, mask.leading) if persistent else 0
    if max(columns, first.heads * (first.padded // 64), S_k) >= LIMIT // 2:
        raise ValueError(
            f"q, k: expected fewer than 2^30 rows, keys and tiles over all heads, got {S_q} and {S_k}"
        )
    scale, inner, after = scales(call)
    score, alibi = call.score, call.score is not None and call.score.alibi
    overlaps = device.overlaps(call.device)
    launch = Launch(
        KERNELS[config.block_n],
        (min(columns, device.num_sms(call.device)) if persistent else columns, 1, 1),
        descriptors=descriptors((q, k, v, d_out, dk.window, dv.window), mask.slots, first, call, bias),
        pointers={"dq_ptr": Part("buffer")}
        | {f"{name}_ptr": Part(f"column_{name}") for name in ("starts", "steps", "bits", "order")}
        | {"alibi_ptr": Part("alibi"), "bias_ptr": bias_part(call), "units_ptr": Part("units")}
        | ({"counter_ptr": first.following} if persistent else {}),
        scalars={
            "qk_scale": scale,
            "inner": inner,
            "after": after,
            "sm_scale": call.sm_scale,
            "place": S_k - S_q if alibi else None,
            **bias_scalars(call),
            "S_q": S_q,
            "H": H,
            "GROUP": H // H_kv,
            "HEADS_KV": B * H_kv,
            "SECTION": config.heads_per_section(B * H_kv, num_n, S_q, width),
            "num_m": first.padded // config.block_m,
            "num_n": num_n,
            **mask_strides(call),
            **({"columns": columns, "LEADING": leading} if persistent else {}),
        },
        constants={
            "plan": plan,
            "FUNCTION": None if score is None else score.function,
            "DERIVATIVE": None if score is None else score.derivative,
            "OVERLAPS": overlaps,
        },
        options={"num_warps": 4, "maxnreg": config.max_registers, **device.begins_early(overlaps)},
    )
    launches = [first.launch, launch, postprocess(call, dq.window, first, width)]
    launches += sinks_gradient(call, first)
    at = {"d_out": d_out, "q": q, "k": k, "v": v}
    launches += [hopper_bias_gradient(call, at, first)] if own_bias else bias_gradient(call, at, first)
    return BackwardPlan(Launches(launches, call.device, TENSORS), first.elements, dq, dk, dv)


def make_plan(
    width: int, config: HopperSparseBackwardConfig, partial: bool, score: ScoreForm | None = None,
    copies_bias: bool = False,
):  # fmt: skip
    """The kernel's constants."""
    from attnlib.kernels.common.pipeline import Registers, WideRegisters
    from attnlib.kernels.sparse.plan import SparseBackwardPlan, WideSparseBackwardPlan

    kind, registers = SparseBackwardPlan, Registers(config.consumer_registers, config.producer_registers)
    if config.block_n == 64:
        kind = WideSparseBackwardPlan
        registers = WideRegisters(config.consumer_registers, config.producer_registers, config.dq_registers)
    cap, alibi = (None, False) if score is None else score[:2]
    function = score is not None and score.function is not None
    half_p = config.half_p and cap is None and not function
    bias = bias_plan(score, copies_bias)
    persistent = config.persistent and not (bias["bias"] or function)
    return kind(
        width, config.block_m, half_p, partial, registers, cap is not None, alibi,
        diagonal=score is not None and score.diagonal, function=function, gathered=config.gathered,
        alternate=config.alternate, persistent=persistent, pause_every=config.pause_every, **bias,
    )  # fmt: skip


def descriptors(
    windows: tuple, slots: int, rows: Preprocess, call: Signature, bias: Window | None = None
) -> dict[str, Descriptor]:
    """Of Q, K, V, dO, dK, dV, of LSE and delta, of words, and of a bias of this window: what one copy of each
    moves."""
    from triton.experimental.gluon import language as gl

    block_m, width = call.config.block_m, tile_width(call.head_dim)
    queries, keys = (1, 1, block_m, width), (1, 1, 64, width)
    names = "q", "k", "v", "do", "dk", "dv"
    blocks = queries, keys, keys, queries, keys, keys
    element = getattr(gl, HALF[call.dtype])
    found = {
        f"desc_{name}": Descriptor(
            Part("d_out" if name == "do" else name), window, block,
            gl.NVMMASharedLayout.get_default_for(list(block), element),
        )
        for name, window, block in zip(names, windows, blocks, strict=True)
    }
    if bias is not None:
        found["desc_bias"] = bias_descriptor(bias, call.score.bias, block_m, 64)
    return found | {
        "desc_rows": rows.gluon_descriptor(block_m),
        "desc_words": words_descriptor("column_words", slots, block_m, call.config.word_bits),
    }

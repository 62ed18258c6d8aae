"""Launch the Hopper forward kernel under a block mask."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import counters, device
from attnlib.kernels.common.descriptors import Made, Window, given, lse_for, made_like
from attnlib.kernels.common.hopper_gpu import HALF
from attnlib.kernels.common.launcher import Descriptor, Launch, Launches, Part, check_size
from attnlib.kernels.common.signature import LOG2_E, PREPARED, Signature, exp2_scale, signature
from attnlib.kernels.common.tiles import tile_width
from attnlib.kernels.sparse.configs_hopper import HopperSparseConfig
from attnlib.kernels.sparse.hopper_bias import bias_descriptor, bias_plan, bias_scalars, bias_window
from attnlib.kernels.sparse.launch_forward import (
    LISTS,
    SCORES,
    TILE,
    bias_part,
    mask_strides,
    tensors_of,
)
from attnlib.params import Params
from attnlib.scores import ScoreForm

TENSORS = ("q", "k", "v", "out", "lse", "counter", *LISTS, *SCORES)
KERNEL = "attnlib.kernels.sparse.hopper_kernel.attention_sparse_forward_hopper"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `hopper_kernel.attention_sparse_forward_hopper` on a call that it supports, no argument empty.

    Returns (out, lse); lse is None unless it was asked for. ValueError if a length or the tiles are beyond
    2^31.
    """
    plan = params.plan or prepare(signature(params, q, k, q, k, v))
    out, lse = plan.out.like(q), lse_for(q, params)
    mask, step = params.block_mask, params.config.block_n
    marked = leaves_out(params.config, mask.form.partial_rows, params.score)
    lists = *(mask.marked_lists if marked else mask.lists(step)), mask.words_of(step)
    plan.launches(q, k, v, out, lse, counters.counter(q.get_device()), *lists, *tensors_of(params))
    return out, lse


def leaves_out(config: HopperSparseConfig, partial: bool, score: object | None) -> bool:
    """Whether a kernel with this configuration walks along marked lists."""
    return config.leaves_out and partial and score is None


class Plan(NamedTuple):
    """The launch of a call, and the layout of its output."""

    launches: Launches
    out: Made


@lru_cache(PREPARED)
def prepare(call: Signature) -> Plan:
    B, H, H_kv, S_q, S_k = call.dimensions()
    config: HopperSparseConfig = call.config
    width = tile_width(call.head_dim)
    num_m = -(-S_q // TILE)
    tiles = num_m * B * H
    check_size(call, tiles)
    out = made_like(call, call.q, call.strides[0])
    windows = *given(call, call.q, call.k, call.k), out.window
    score = call.score
    bias = None
    if config.copies_bias and (window := bias_window(score, S_q, S_k)) is not None:
        bias = window, score.bias
    scale, inner, after = scales(call)
    launch = Launch(
        KERNEL,
        (min(-(-tiles // config.pairs), device.num_sms(call.device)), 1, 1),
        descriptors=descriptors(windows, call.mask.slots, width, config, call.dtype, bias),
        pointers={"lse_ptr": Part("lse"), "counter_ptr": Part("counter")}
        | {f"{name}_ptr": Part(name) for name in LISTS if name != "words"}
        | {"alibi_ptr": Part("alibi"), "sinks_ptr": Part("sinks"), "bias_ptr": bias_part(call)},
        scalars={
            "qk_scale": exp2_scale(call.sm_scale) if inner is None else scale,
            "inner": inner,
            "after": after,
            "place": S_k - S_q,
            **bias_scalars(call),
            "S_q": S_q,
            "H": H,
            "GROUP": H // H_kv,
            "HEADS": B * H,
            "SECTION": config.heads_per_section(B * H, H // H_kv, S_k, width),
            "num_m": num_m,
            "tiles": tiles,
            **mask_strides(call),
        },
        constants={
            "plan": make_plan(
                width, config, call.sm_scale < 0 and inner is None, call.return_lse, call.mask.partial_rows,
                score, bias is not None,
            ),
            "FUNCTION": None if score is None else score.function,
        },
        options={"num_warps": 4, "maxnreg": config.max_registers},
    )
    return Plan(Launches([launch], call.device, TENSORS), out)


def scales(call: Signature) -> tuple[float, float | None, float | None]:
    """(qk_scale with its sign, inner, after), see the kernel's arguments."""
    cap, function = (None, None) if call.score is None else (call.score.soft_cap, call.score.function)
    scale = (call.sm_scale if cap is None else cap) * LOG2_E
    if function is None:
        return scale, None if cap is None else call.sm_scale / cap, None
    return (cap or 1) * LOG2_E, call.sm_scale, None if cap is None else 1 / cap


def make_plan(
    width: int, config: HopperSparseConfig, flip: bool, store_lse: bool, partial: bool,
    score: ScoreForm | None = None, copies_bias: bool = False,
):  # fmt: skip
    """The kernel's constants."""
    from attnlib.kernels.common.pipeline import Pipeline, Registers
    from attnlib.kernels.sparse.plan import SparsePlan

    own = bias_plan(score, copies_bias)
    edge = own["bias_n"] == 1 and score.sizes[3] % TILE != 0
    return SparsePlan(
        d=width, block_n=config.block_n, q_columns=config.q_columns, o_columns=config.o_columns, flip=flip,
        store_lse=store_lse, partial=partial, pairs=config.pairs,
        pipeline=Pipeline(
            2, config.stages, config.joint, config.named, config.late_wait, config.pin, config.keep_shift
        ),
        registers=Registers(config.consumer_registers, config.producer_registers),
        q_buffers=config.q_buffers, leaves_out=leaves_out(config, partial, score),
        soft_cap=score is not None and score.soft_cap is not None, alibi=score is not None and score.alibi,
        sinks=score is not None and score.sinks, bias_edge=edge,
        function=score is not None and score.function is not None, **own,
    )  # fmt: skip


def descriptors(
    windows: tuple, slots: int, width: int, config: HopperSparseConfig, dtype: torch.dtype,
    bias: tuple[Window | None, torch.dtype] | None = None,
) -> dict[str, Descriptor]:  # fmt: skip
    """Of Q, K, V, the output, the words of steps, and a bias of this window and dtype: what one copy of each
    moves."""
    from triton.experimental.gluon import language as gl

    keys = (1, 1, config.block_n, width)
    blocks = (1, 1, 64, width), keys, keys, (1, 1, 64, config.o_columns)
    element = getattr(gl, HALF[dtype])
    found = {
        f"desc_{letter}": Descriptor(
            Part(name), window, block, gl.NVMMASharedLayout.get_default_for(list(block), element)
        )
        for letter, name, window, block in zip("qkvo", TENSORS, windows, blocks, strict=False)
    }
    if bias is not None:
        found["desc_bias"] = bias_descriptor(*bias, 64, config.block_n)
    return found | {"desc_words": words_descriptor("words", slots, config.block_n)}


def words_descriptor(name: str, slots: int, step: int, bits: int = 32) -> Descriptor:
    """Of the words of steps of 64 or 128, for 64 rows a copy. Of steps of half a tile there are twice as many
    as slots."""
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=3)
    window = (slots * (TILE // step), 2, 256), (512, 256, 1)
    return Descriptor(Part(name), window, (1, 1, 256), layout)

"""Launch the Hopper kernel that makes the gradient of a bias, behind the other gradients' kernels."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import Window
from attnlib.kernels.common.hopper_gpu import HALF
from attnlib.kernels.common.launch_preprocess import Preprocess
from attnlib.kernels.common.launcher import Descriptor, Launch, Part, check_size
from attnlib.kernels.common.signature import LOG2_E, Signature
from attnlib.kernels.common.tiles import tile_width
from attnlib.kernels.sparse.configs_hopper import HopperBiasConfig
from attnlib.kernels.sparse.hopper_bias import bias_scalars
from attnlib.kernels.sparse.launch_forward import TILE, bias_part, mask_strides
from attnlib.scores import ScoreForm

KERNEL = "attnlib.kernels.sparse.hopper_bias_kernel.attention_sparse_bias_gradient_hopper"


def hopper_bias_gradient(call: Signature, windows: Mapping[str, Window], rows: Preprocess) -> Launch:
    """The launch, for a bias as `hopper_bias.adds_alone` says. windows: of d_out, q, k and v; rows: of LSE
    and delta, followed by a counter that is 0."""
    score, config = call.score, call.config.bias
    B, H, H_kv, S_q, S_k = call.dimensions()
    down, across, width = -(-S_q // TILE), -(-S_k // TILE), tile_width(call.head_dim)
    batches, heads = score.sizes[:2]
    items = (down + across - 1 if score.diagonal else down * across) * batches * heads
    check_size(call, items)
    return Launch(
        KERNEL,
        (min(items, device.num_sms(call.device)), 1, 1),
        descriptors=descriptors(windows, rows, width, call.dtype),
        pointers={
            "counter_ptr": rows.following,
            "kinds_ptr": Part("kinds"), "slots_ptr": Part("slots"), "words_ptr": Part("words"),
            "bias_ptr": bias_part(call), "dbias_ptr": bias_part(call, "dbias"),
        },
        scalars={
            "qk_scale": call.sm_scale * LOG2_E, **bias_scalars(call), "S_q": S_q, "B": B, "H": H,
            "GROUP": H // H_kv, "down": down, "across": across, **mask_strides(call),
            "dbias_own": S_q + S_k - 1, "items": items,
        },
        constants={"plan": make_plan(config, call.mask.partial, score, B, H)},
        options={"num_warps": 4, "maxnreg": config.max_registers},
    )  # fmt: skip


def descriptors(
    windows: Mapping[str, Window], rows: Preprocess, width: int, dtype: torch.dtype
) -> dict[str, Descriptor]:
    """Of Q, dO, K and V, and of LSE and delta: what one copy of each moves."""
    from triton.experimental.gluon import language as gl

    found = {}
    for name, letter in (("q", "q"), ("d_out", "do"), ("k", "k"), ("v", "v")):
        block = 1, 1, TILE if name in "kv" else 64, width
        layout = gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, HALF[dtype]))
        found[f"desc_{letter}"] = Descriptor(Part(name), windows[name], block, layout)
    return found | {"desc_rows": rows.gluon_descriptor(64)}


def make_plan(config: HopperBiasConfig, partial: bool, score: ScoreForm, B: int, H: int):
    """The kernel's constants."""
    from triton.experimental.gluon import language as gl

    from attnlib.kernels.common.pipeline import Pipeline, Registers
    from attnlib.kernels.sparse.plan import HopperBiasPlan

    batches, heads = score.sizes[0] == B, score.sizes[1] == H
    bias_type = getattr(gl, str(score.bias).removeprefix("torch."))
    return HopperBiasPlan(
        partial, score.diagonal, batches, heads, score.sizes[3] % 4 == 0, bias_type,
        Pipeline(2, config.stages, joint=True, named=True, late_wait=False, pin=False),
        Registers(config.consumer_registers, config.producer_registers),
    )  # fmt: skip

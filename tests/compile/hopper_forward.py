"""The Hopper forward kernel compiled for sm_90 with the constants of a plan, and no tensors."""

from __future__ import annotations

from gluon_kernels import compile_kernel

from attnlib.bench.inspect_sm90 import Stats
from attnlib.kernels.hopper.configs import HopperConfig

SCALES = "q_scale", "k_scale", "v_scale"
OPTIONS = {  # of what a call asks -> the arguments that it has then
    "LSE": ("lse_ptr",),
    "varlen": ("cu_q", "cu_k", "T_q", "B"),
    "left": ("left",),
    "shifted": ("right",),
    "fp8": ("k_scale", "v_scale", "k_scale_h", "k_scale_n", "v_scale_h"),
    "fp8 queries": ("q_scale", "q_scale_h", "q_scale_n"),
    "own keys": ("shared_rows", "key_blocks"),
    "fp8 batch": ("k_scale_b", "v_scale_b"),
    "fp8 queries, batch": ("q_scale_b",),
    "centered": ("v_mean", "v_mean_b"),
    "pooled": ("maxima",),
    "diagonal": ("LAST",),
    "into": ("into_ptr", "into_lse_ptr", "into_b", "into_h", "into_m", "into_lse_b", "into_lse_h"),
}


def compile_forward(plan, descriptors: dict[str, str], options: set[str], config: HopperConfig) -> Stats:
    """descriptors: their types; options: those of `OPTIONS` that the call has, but for "diagonal", which
    follows from its mask."""
    from attnlib.kernels.hopper.forward_kernel import attention_forward_hopper

    if plan.mask.causal and not plan.mask.left and not plan.varlen and config.last_waves:
        options = {*options, "diagonal"}

    types = {"counter_ptr": "*i32", "qk_scale": "fp32", "lse_ptr": "*fp32", "cu_q": "*i32", "cu_k": "*i32"}
    types |= {"maxima": "*fp32", "into_lse_ptr": "*fp32"}
    types |= dict.fromkeys((*SCALES, "v_mean"), "*fp32") | descriptors
    absent = [name for option, names in OPTIONS.items() if option not in options for name in names]
    names = attention_forward_hopper.arg_names
    absent += [name for name in names if name.startswith("desc_") and name not in descriptors]
    aligned = ("counter_ptr", *(["into_ptr"] if "into" in options else []))
    return compile_kernel(attention_forward_hopper, plan, types, absent, aligned, config.max_registers)[0]

"""The Hopper forward kernel compiled for sm_90 with the constants of a plan, and no tensors."""

from __future__ import annotations

import contextlib
import io

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import Stats

SCALES = "q_scale", "k_scale", "v_scale"
OPTIONS = {  # of what a call asks -> the arguments that it has then
    "LSE": ("lse_ptr",),
    "varlen": ("cu_q", "cu_k", "T_q", "B"),
    "left": ("left",),
    "shifted": ("right",),
    "fp8": (*SCALES, "q_scale_h", "q_scale_n", "k_scale_h", "k_scale_n", "v_scale_h"),
    "own keys": ("shared_rows", "key_blocks"),
    "fp8 batch": tuple(f"{name}_b" for name in SCALES),
    "centered": ("v_mean", "v_mean_b"),
    "pooled": ("maxima",),
}


def compile_forward(plan, descriptors: dict[str, str], options: set[str], max_registers: int) -> Stats:
    """descriptors: their types; options: those of `OPTIONS` that the call has."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from attnlib.kernels.hopper.forward_kernel import attention_forward_hopper

    types = {"counter_ptr": "*i32", "qk_scale": "fp32", "lse_ptr": "*fp32", "cu_q": "*i32", "cu_k": "*i32"}
    types["maxima"] = "*fp32"
    types |= dict.fromkeys((*SCALES, "v_mean"), "*fp32") | descriptors
    absent = [name for option, names in OPTIONS.items() if option not in options for name in names]
    names = attention_forward_hopper.arg_names
    absent += [name for name in names if name.startswith("desc_") and name not in descriptors]
    signature = {name: types.get(name, "i32") for name in names}
    signature |= dict.fromkeys([*absent, "plan"], "constexpr")
    constants = {(names.index("plan"),): plan} | {(names.index(name),): None for name in absent}
    divisible = {(names.index("counter_ptr"),): [["tt.divisibility", 16]]}
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(
            GluonASTSource(attention_forward_hopper, signature, constants, divisible),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": 4, "maxnreg": max_registers},
        )
    return inspect_sm90.stats_of(compiled, log.getvalue())

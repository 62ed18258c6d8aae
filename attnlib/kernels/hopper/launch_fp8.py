"""Launch the FP8 forward kernel."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.counters import counter
from attnlib.kernels.common.descriptors import Window, legal, lse_for, readable, varlen_window
from attnlib.kernels.common.fp8 import GROUP, ROWS, Fp8
from attnlib.kernels.common.hopper_gpu import HALF
from attnlib.kernels.common.launcher import Descriptor, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED, VARLEN_ROWS, Signature, signature
from attnlib.kernels.hopper.configs import HopperConfig
from attnlib.kernels.hopper.configs_fp8 import fp8_config
from attnlib.kernels.hopper.launch import KERNEL, mask_of, plan_fields, shared_out
from attnlib.params import MaskWindow, Params

TENSORS = "q", "k", "v", "out", "lse", "counter", "cu_q", "cu_k", "q_scale", "k_scale", "v_scale", "v_mean"
ELEMENTS = HALF | {torch.float32: "float32"}
"""Of the output -> their names in Gluon."""
KINDS = {MaskWindow(None, None): "dense", MaskWindow(None, 0): "causal"}
"""Windows of batches that `fp8_config` knows."""


class Call(NamedTuple):
    """What a launch depends on.

    plain: what any call of attention has. Its q, k and strides are those of their data, its dtype is that of
    the output. v: shape and strides of V's data. scales: strides of the scales of q, k and v. center: V is
    without its mean. queries: the dtype of queries that the kernel quantizes, which have no scale; None where
    they are `Fp8`. rotated: queries and keys are.
    """

    plain: Signature
    v: Window
    scales: tuple[tuple[int, ...], ...]
    center: bool
    queries: torch.dtype | None
    rotated: bool

    @property
    def width(self) -> int:
        return self.plain.k[-1]


def forward(
    q: Fp8 | torch.Tensor, k: Fp8, v: Fp8, params: Params, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of quantized operands, no argument empty: (out, lse), with the shapes of what was quantized.

    q: a tensor where `common.fp8.scaled_by_row` says so; it is rotated if k is. out: (B, H, Sq, D), varlen
    (Tq, H, D), with the head dimension before padding. lse: of the scores of what the operands hold; None
    unless `params.return_lse`. ValueError as `launch.forward`, and for blocks of several scales.
    """
    queries, scale, dtype = (q.data, q.scale, None) if isinstance(q, Fp8) else (readable(q), None, q.dtype)
    if params.config is None:
        kind = KINDS.get(params.window) if params.varlen is None else None
        own_queries = dtype is not None
        crowded = own_queries and out_dtype == torch.float32
        params = params._replace(config=fp8_config(k.width, kind, own_queries, crowded))
    plain = signature(params, queries, k.data)
    plain = plain._replace(strides=(queries.stride(), k.data.stride()), dtype=out_dtype)
    scales = scale, k.scale, v.scale
    call = Call(
        plain, (tuple(v.data.shape), v.data.stride()), tuple(() if x is None else x.stride() for x in scales),
        v.centered, dtype, k.rotated,
    )  # fmt: skip
    out = torch.empty((*queries.shape[:-1], k.width), dtype=out_dtype, device=q.device)
    lse = lse_for(queries, params)
    cu_q, cu_k = (None, None) if params.varlen is None else (x.contiguous() for x in params.varlen[:2])
    prepare(call)(queries, k.data, v.data, out, lse, counter(plain.device), cu_q, cu_k, *scales, v.mean)
    return out[..., : v.head_dim], lse


@lru_cache(PREPARED)
def prepare(call: Call) -> Launches:
    plain, config = call.plain, call.plain.config
    _, _, H_kv, _, S_k = plain.dimensions()
    programs, numbers = shared_out(plain, call.width // 2)  # half as many bytes
    if config.block_n > ROWS["k"] and call.scales[1][-1] and S_k > ROWS["k"]:
        raise ValueError(
            f"config: expected blocks of at most {ROWS['k']} keys, which have a scale, got {config.block_n}"
        )
    early = call.queries is not None and device.overlaps(plain.device)  # it waits for the launch before
    names = "q_b q_h q_n", "k_b k_h k_n", "v_b v_h"
    scales = dict.fromkeys(("q_scale_b", "q_scale_h", "q_scale_n", "k_scale_b", "v_scale_b"))
    for letters, strides in zip(names, call.scales, strict=True):
        if not strides:
            continue
        # of varlen sequences there is no batch
        letters = letters.split()[1:] if plain.varlen else letters.split()
        scales |= {f"{x[0]}_scale_{x[2]}": n for x, n in zip(letters, strides, strict=True)}
    launch = Launch(
        KERNEL,
        (programs, 1, 1),
        descriptors=descriptors(call),
        pointers={
            "lse_ptr": Part("lse"), "counter_ptr": Part("counter"),
            "cu_q": Part("cu_q"), "cu_k": Part("cu_k"),
            "q_scale": Part("q_scale"), "k_scale": Part("k_scale"), "v_scale": Part("v_scale"),
            "v_mean": Part("v_mean"),
        },  # fmt: skip
        scalars=numbers | scales | {"v_mean_b": H_kv if call.center else None},
        constants={"plan": plan_of(call)},
        options={"num_warps": 4, "maxnreg": config.max_registers, **device.begins_early(early)},
    )
    return Launches([launch], plain.device, TENSORS)


def plan_of(call: Call):
    """The kernel's constants for a call."""
    plain = call.plain
    _, _, _, S_q, S_k = plain.dimensions()
    mask = mask_of(plain.window, S_q, S_k, plain.config, plain.varlen)
    fields = plan_fields(call.width, plain.config, mask, plain.sm_scale < 0, plain.return_lse, plain.varlen)
    quantizes = call.queries is not None
    return make_plan(fields, call.center, quantizes, quantizes and call.rotated)


def make_plan(fields: dict, center: bool, quantizes: bool = False, rotates: bool = False):
    """The kernel's constants; `fields` are those of `plan.ForwardPlan`."""
    from attnlib.kernels.hopper.plan import Fp8Plan

    return Fp8Plan(**fields, center=center, quantizes=quantizes, rotates=rotates)


def descriptors(call: Call) -> dict[str, Descriptor]:
    """Of Q, K, V^T and the output: what one copy of each moves."""
    plain = call.plain
    shape = *plain.q[:-1], call.width
    out = shape, torch.empty(shape, device="meta").stride()
    q, k = plain.strides
    if call.queries is not None:
        q = legal(plain.q, q, call.queries)
    tensors = (tuple(plain.q), q), (tuple(plain.k), k), call.v, out
    if plain.varlen:
        of = varlen_window, varlen_window, transposed_window, varlen_window
        windows = [window(*tensor) for window, tensor in zip(of, tensors, strict=True)]
    else:
        windows = tensors
    return described(windows, call.width, plain.config, plain.dtype, plain.varlen, call.queries)


def described(
    windows, width: int, config: HopperConfig, dtype: torch.dtype, varlen: bool,
    queries: torch.dtype | None = None,
) -> dict[str, Descriptor]:
    """The same with these windows."""
    from triton.experimental.gluon import language as gl

    ones = (1, 1, 1) if varlen else (1, 1)
    rows = (64, width), (config.block_n, width), (width, config.block_n), (64, config.o_columns)
    elements = [gl.float8e4nv] * 3 + [getattr(gl, ELEMENTS[dtype])]
    if queries is not None:
        elements[0] = getattr(gl, HALF[queries])
    described = {}
    for letter, name, window, block, element in zip("qkvo", TENSORS, windows, rows, elements, strict=False):
        layout = gl.NVMMASharedLayout.get_default_for([*ones, *block], element)
        described[f"desc_{letter}"] = Descriptor(Part(name), window, (*ones, *block), layout)
    return described


def transposed_window(shape: tuple[int, ...], strides: tuple[int, ...]) -> Window:
    """Shape and strides of the descriptor of varlen V^T (H, D, T16), with which the hardware checks bounds
    at the end of any sequence, which is a multiple of 16.

    As in `varlen_window`, position i of a sequence of n positions is addressed as VARLEN_ROWS - n + i, and
    two dimensions more take that back: one counts groups of 16 positions, and its coordinate is the
    sequence's end; the other has a stride of 2^38 - 16 bytes and the coordinate VARLEN_ROWS / 16:

        VARLEN_ROWS / 16 * (2^38 - 16) = -VARLEN_ROWS  (mod 2^64)
    """
    (heads, width, positions), (head, column, _) = shape, strides
    groups = VARLEN_ROWS // GROUP
    return (groups + 1, positions // GROUP + 1, heads, width, VARLEN_ROWS), (
        (1 << 38) - GROUP, GROUP, head, column, 1,
    )  # fmt: skip

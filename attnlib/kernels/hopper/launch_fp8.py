"""Launch the FP8 forward kernel."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.counters import counter
from attnlib.kernels.common.descriptors import Window, legal, readable, varlen_window
from attnlib.kernels.common.fp8 import GROUP, ROWS, Fp8
from attnlib.kernels.common.hopper_gpu import HALF
from attnlib.kernels.common.launcher import LIMIT, Descriptor, Launch, Launches, Part
from attnlib.kernels.common.signature import PREPARED, VARLEN_ROWS, Lengths, exp2_scale
from attnlib.kernels.hopper.configs_fp8 import Fp8Config, fp8_config
from attnlib.kernels.hopper.launch import KERNEL, mask_of, plan_fields
from attnlib.params import MaskWindow, Params

TENSORS = "q", "k", "v", "out", "lse", "counter", "cu_q", "cu_k", "q_scale", "k_scale", "v_scale", "v_mean"
ELEMENTS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
"""Of the output -> their names in Gluon."""


class Call(NamedTuple):
    """What a launch depends on.

    q, k, v: shapes of their data. strides: of the data of q, k and v, and of their scales. window, sm_scale,
    return_lse: as in `Params`. lengths: of varlen sequences. dtype: of the output. center: V has no mean.
    queries: the dtype of queries that the kernel quantizes, which have no scale; None where they are `Fp8`.
    rotated: queries and keys are.
    """

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    window: MaskWindow
    sm_scale: float
    return_lse: bool
    lengths: Lengths | None
    dtype: torch.dtype
    device: int
    config: Fp8Config
    center: bool
    queries: torch.dtype | None
    rotated: bool

    @property
    def width(self) -> int:
        return self.k[-1]

    def dimensions(self) -> tuple[int, int, int, int, int]:
        """(B, H, H_kv, S_q, S_k); of varlen sequences their number and the longest lengths."""
        if self.lengths is None:
            return self.q[0], self.q[1], self.k[1], self.q[2], self.k[2]
        return self.lengths.sequences, self.q[1], self.k[1], self.lengths.max_q, self.lengths.max_k


def forward(
    q: Fp8 | torch.Tensor, k: Fp8, v: Fp8, params: Params, out_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of quantized operands, no argument empty: (out, lse), both as if nothing were quantized.

    q: a tensor where `common.fp8.scaled_by_row` says so; it is rotated if k is. out: (B, H, Sq, D), varlen
    (Tq, H, D), with the head dimension before padding. lse: of the scores of what the operands hold; None
    unless `params.return_lse`.
    """
    index = k.device.index if k.data.is_cuda else -1
    varlen, lengths = params.varlen, None
    if varlen is not None:
        lengths = Lengths(varlen.cu_seqlens_q.shape[0] - 1, varlen.max_seqlen_q, varlen.max_seqlen_k)
    dense = lengths is None and params.window == MaskWindow(None, None)
    queries, scale, dtype = (q.data, q.scale, None) if isinstance(q, Fp8) else (readable(q), None, q.dtype)
    crowded = dtype is not None and out_dtype == torch.float32
    tensors = queries, k.data, v.data, scale, k.scale, v.scale
    call = Call(
        tuple(queries.shape), tuple(k.data.shape), tuple(v.data.shape),
        tuple(() if x is None else x.stride() for x in tensors),
        params.window, params.sm_scale, params.return_lse, lengths, out_dtype, index,
        params.config or fp8_config(k.width, dense, crowded), v.centered, dtype, k.rotated,
    )  # fmt: skip
    out = torch.empty((*queries.shape[:-1], k.width), dtype=out_dtype, device=q.device)
    lse = None
    if params.return_lse:
        shape = queries.shape[:3] if varlen is None else queries.shape[1::-1]
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    cu_q, cu_k = (None, None) if varlen is None else varlen[:2]
    prepare(call)(queries, k.data, v.data, out, lse, counter(index), cu_q, cu_k, *tensors[3:], v.mean)
    return out[..., : v.head_dim], lse


@lru_cache(PREPARED)
def prepare(call: Call) -> Launches:
    B, H, H_kv, S_q, S_k = call.dimensions()
    config, varlen = call.config, call.lengths is not None
    block_m = 64 * config.warpgroups
    blocks_m = -(-S_q // block_m)
    tiles, heads = blocks_m * B * H, B * H
    if varlen:  # the kernel counts them; so many at most: each sequence may end with a part of one
        tiles, heads = (call.q[0] // block_m + B) * H, H
    if max(tiles, S_q, S_k) >= LIMIT:
        raise ValueError(
            f"q, k: expected fewer than 2^31 rows, keys and tiles of {block_m} rows over all heads, "
            f"got {S_q}, {S_k} and {tiles}"
        )
    if config.block_n > ROWS["k"] and call.strides[4][-1] and S_k > ROWS["k"]:
        raise ValueError(
            f"config: expected blocks of at most {ROWS['k']} keys, which have a scale, got {config.block_n}"
        )
    early = call.queries is not None and device.overlaps(call.device)  # it waits for the launch before
    left, right = call.window.clipped(S_q, S_k)
    names = "q_b q_h q_n", "k_b k_h k_n", "v_b v_h"
    scales = dict.fromkeys(("q_scale_h", "q_scale_n"))
    for letters, strides in zip(names, call.strides[3:], strict=True):
        if not strides:
            continue
        # of varlen sequences there is no batch
        letters = letters.split()[1:] if varlen else letters.split()
        scales |= {f"{x[0]}_scale_{x[2]}": n for x, n in zip(letters, strides, strict=True)}
    launch = Launch(
        KERNEL,
        (min(tiles, device.num_sms(call.device)), 1, 1),
        descriptors=descriptors(call),
        pointers={
            "lse_ptr": Part("lse"), "counter_ptr": Part("counter"),
            "cu_q": Part("cu_q"), "cu_k": Part("cu_k"),
            "q_scale": Part("q_scale"), "k_scale": Part("k_scale"), "v_scale": Part("v_scale"),
            "v_mean": Part("v_mean"),
        },  # fmt: skip
        scalars={
            "qk_scale": exp2_scale(call.sm_scale),
            "S_q": S_q,
            "S_k": S_k,
            "H": H,
            "GROUP": H // H_kv,
            "HEADS": B * H,
            # half as many bytes as its arithmetic is for
            "SECTION": config.heads_per_section(heads, H // H_kv, S_k, call.width // 2),
            "num_m": blocks_m,
            "tiles": tiles,
            "right": right or None,
            "left": left,
            "T_q": call.q[0] if varlen else None,
            "B": B if varlen else None,
            **dict.fromkeys(("q_scale_b", "k_scale_b", "v_scale_b")),
            **scales,
            "v_mean_b": H_kv if call.center else None,
        },
        constants={"plan": plan_of(call)},
        options={"num_warps": 4, "maxnreg": config.max_registers, **({"launch_pdl": True} if early else {})},
    )
    return Launches([launch], call.device, TENSORS)


def plan_of(call: Call):
    """The kernel's constants for a call."""
    _, _, _, S_q, S_k = call.dimensions()
    mask = mask_of(call.window, S_q, S_k, call.config, bool(call.lengths))
    fields = plan_fields(
        call.width, call.config, mask, call.sm_scale < 0, call.return_lse, bool(call.lengths)
    )
    quantizes = call.queries is not None
    return make_plan(fields, call.center, quantizes, quantizes and call.rotated)


def make_plan(fields: dict, center: bool, quantizes: bool = False, rotates: bool = False):
    """The kernel's constants; `fields` are those of `plan.ForwardPlan`."""
    from attnlib.kernels.hopper.plan import Fp8Plan

    return Fp8Plan(**fields, center=center, quantizes=quantizes, rotates=rotates)


def descriptors(call: Call) -> dict[str, Descriptor]:
    """Of Q, K, V^T and the output: what one copy of each moves."""
    varlen = call.lengths is not None
    shape = *call.q[:-1], call.width
    out = shape, torch.empty(shape, device="meta").stride()
    q = call.strides[0]
    if call.queries is not None:
        q = legal(call.q, q, call.queries)
    tensors = (call.q, q), (call.k, call.strides[1]), (call.v, call.strides[2]), out
    if varlen:
        of = varlen_window, varlen_window, transposed_window, varlen_window
        windows = [window(*tensor) for window, tensor in zip(of, tensors, strict=True)]
    else:
        windows = tensors
    return described(windows, call.width, call.config, call.dtype, varlen, call.queries)


def described(
    windows, width: int, config: Fp8Config, dtype: torch.dtype, varlen: bool,
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

"""Launch the Hopper backward kernel: whether it can run a call, its constants, and what goes around it."""

from dataclasses import fields
from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common.launcher import Launcher
from attnlib.kernels.common.tiles import tile_width
from attnlib.kernels.hopper import launch as launch_hopper
from attnlib.kernels.hopper.configs_backward import MAX_HEAD_DIM, HopperBackwardConfig, hopper_backward_config
from attnlib.kernels.portable.launch import (
    LIMIT,
    LOG2_E,
    PREPARED,
    Lengths,
    clipped,
    dimensions,
    lengths_of,
    readable,
)
from attnlib.kernels.portable.launch_backward import (
    Launch,
    Layouts,
    gradients,
    layouts,
    misaligned,
    rows_launch,
    run,
)
from attnlib.params import Band, Packed

_HALF = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

_compiled: dict[tuple, tuple | Launcher] = {}
"""What a kind of call needs -> (launcher of the compiled kernel, its plan); (device, dtype, width, rank) ->
the launcher of what makes dQ of its sums."""


def unsupported(q: torch.Tensor, deterministic: bool = False) -> str | None:
    """What the kernel needs and a call with valid arguments does not have; None if it has all.

    Layouts that TMA can't read are no reason: `backward` copies them.
    """
    lacks = launch_hopper.unsupported_here(q)
    if lacks is not None:
        return lacks
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"needs a head dimension of at most {MAX_HEAD_DIM} for the backward pass; q has {q.shape[-1]}"
    if deterministic:
        return "adds up dq in an order that changes; deterministic=True is asked for"
    return None


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    band: Band,
    sm_scale: float,
    packed: Packed | None = None,
    deterministic: bool = False,
    config: HopperBackwardConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run `kernels.hopper_backward`, or `hopper_backward_wide`, on a call with no argument empty.

    d_out, q, out: (B, H, Sq, D); k, v: (B, Hkv, Sk, D); lse: (B, H, Sq) float32, contiguous. With `packed`
    d_out, q, out: (Tq, H, D); k, v: (Tk, Hkv, D); lse: (H, Tq). `config` replaces the one that
    `hopper_backward_config` chooses. Returns (dq, dk, dv). dk and dv are the same in every run, dq up to the
    order of a sum. ValueError if a length or the tiles are beyond 2^30.
    """
    device = q.get_device()
    if device != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(device):
            return backward(d_out, q, k, v, out, lse, band, sm_scale, packed, deterministic, config)
    strides = d_out.stride(), q.stride(), k.stride(), v.stride(), out.stride()
    lengths = packed and lengths_of(packed)
    call = _prepare(q.shape, k.shape, strides, q.dtype, device, band, sm_scale, lengths, config)
    if call.layouts is None or misaligned(d_out, q, k, v, out):
        d_out, q, k, v, out = (readable(x) for x in (d_out, q, k, v, out))
        return backward(d_out, q, k, v, out, lse, band, sm_scale, packed, deterministic, config)
    at = call.layouts
    dq, dk, dv = gradients(q, k, v, at)
    cu = (None, None) if packed is None else packed[:2]
    rows = torch.empty(call.rows_shape, dtype=torch.float32, device=q.device)
    sums = torch.empty(call.sums, dtype=torch.float32, device=q.device)
    run(call.rows_launch, device, (out, d_out), (at.out, at.d_out), (lse, rows, sums, cu[0]))
    tensors = q, k, v, d_out, dk, dv, rows
    windows = at.q, at.k, at.v, at.d_out, at.dk, at.dv, call.rows_window
    last = *call.bounds, *cu, call.sequences
    found = _compiled.get(call.kind)
    if found is None:
        kernel, plan = _first_launch(tensors, windows, sums, last, call)
        if kernel is not None:  # the emulator compiles nothing
            _compiled[call.kind] = Launcher(kernel), plan
    else:
        launcher, plan = found
        launcher.launch((call.programs, 1, 1), device, tensors, windows, (sums, *call.scalars, plan, *last))
    _convert(sums, dq, cu[0], call)
    return dq, dk, dv


class Call(NamedTuple):
    """What calls share that differ in nothing but addresses.

    kind: what the compiled code depends on; scalars, bounds, sequences: the kernel's arguments before and
    after its plan, up to the offsets of packed sequences, and how many of these there are; layouts: None if
    an input has to be copied; rows_shape, rows_window: of the memory for lse2 and delta; sums: elements of
    the buffer for dQ; conversion: the grid of what makes dQ of it, its scalars and its constants.
    """

    kind: tuple
    programs: int
    scalars: tuple
    bounds: tuple
    sequences: int | None
    layouts: Layouts | None
    rows_shape: tuple[int, int, int]
    rows_window: tuple
    rows_launch: Launch
    sums: int
    conversion: tuple[tuple[int, int, int], tuple]


@lru_cache(PREPARED)
def _prepare(
    q_shape, k_shape, strides, dtype, device: int, band: Band, sm_scale: float, lengths: Lengths | None,
    config,
) -> Call:
    B, H, H_kv, S_q, S_k = dimensions(q_shape, k_shape, lengths)
    D, packed = q_shape[-1], lengths is not None
    if config is None:
        config = hopper_backward_config(D)
    width = tile_width(D)
    rows, rows_shape, rows_window = rows_launch(q_shape, dtype, device, lengths, config.block_m, width)
    heads, padded = rows_shape[1:]
    num_m, blocks = padded // config.block_m, padded // 64
    if packed:  # sequence b begins with block cu_seqlens_k[b] // block_n + b, whatever the lengths are
        heads_kv, num_n = H_kv, k_shape[0] // config.block_n + B
    else:
        heads_kv, num_n = B * H_kv, -(-S_k // config.block_n)
    tiles = blocks if packed else -(-S_q // 64)  # of 64 rows, of a head, that are converted
    programs = num_n * heads_kv
    if max(programs, heads * blocks, S_q * (H // H_kv), S_k) >= LIMIT // 2:
        raise ValueError(
            f"q, k: expected fewer than 2^30 rows, keys and tiles over all heads, got {S_q} and {S_k}"
        )
    section = config.heads_per_section(heads_kv, H // H_kv, S_q, width)
    left, right = clipped(band, S_q, S_k)
    tail = right != 0 and (packed or S_k % config.block_n != 0)
    asked = bool(right), left is not None, packed  # what a plan calls shifted, left, packed
    kind = (device, dtype, width, right is not None, tail, config, *asked)
    scalars = (
        sm_scale * LOG2_E, sm_scale, S_q, S_k, H, H // H_kv, heads_kv, section, num_m, num_n,
    )  # fmt: skip
    conversion = (tiles * heads, 1, 1), (sm_scale, H, B, blocks, tiles, width, config.block_m)
    found = layouts(q_shape, k_shape, strides, dtype, packed)
    return Call(
        kind, programs, scalars, (right or None, left), B if packed else None, found, rows_shape,
        rows_window, rows, heads * padded * width, conversion,
    )  # fmt: skip


def _first_launch(
    tensors: tuple[torch.Tensor, ...], windows: tuple, sums: torch.Tensor, last: tuple, call: Call
) -> tuple:
    """Compile, launch, and return the compiled kernel and its plan."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _, dtype, width, causal, tail, config, *asked = call.kind
    plan, function = kernel_for(width, causal, tail, config, *asked)
    blocks = blocks_of(width, config, asked[2])
    descriptors = [
        TensorDescriptor(tensor, list(shape), list(strides), block, shared_layout(gl, block, dtype))
        for tensor, (shape, strides), block in zip(tensors, windows, blocks, strict=True)
    ]
    kernel = function[(call.programs,)](
        *descriptors, sums, *call.scalars, plan, *last, num_warps=4, maxnreg=config.max_registers
    )
    return kernel, plan


def shared_layout(gl, block: list[int], dtype: torch.dtype):
    """How a tile lies in shared memory: swizzled, or, one row of float32, as it is."""
    if len(block) == 3:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return gl.NVMMASharedLayout.get_default_for(block, getattr(gl, _HALF[dtype]))


def blocks_of(width: int, config: HopperBackwardConfig, packed: bool = False) -> tuple[list[int], ...]:
    """What one copy of Q, K, V, dO, dK, dV, and LSE2 or delta moves."""
    one = [1, 1, 1] if packed else [1, 1]
    queries, keys = [*one, config.block_m, width], [*one, 64, width]
    return queries, keys, keys, queries, keys, keys, [1, 1, config.block_m]


def kernel_for(
    width: int, causal: bool, tail: bool, config: HopperBackwardConfig,
    shifted: bool = False, left: bool = False, packed: bool = False,
) -> tuple:  # fmt: skip
    """(the kernel's constants, the kernel)."""
    if width > 128:
        from attnlib.kernels.hopper.backward_wide import Plan
        from attnlib.kernels.hopper.backward_wide import attention_backward_hopper_wide as kernel
    else:
        from attnlib.kernels.hopper.backward import Plan
        from attnlib.kernels.hopper.backward import attention_backward_hopper as kernel
    names = [field.name for field in fields(Plan) if hasattr(config, field.name)]
    chosen = {name: getattr(config, name) for name in names}
    return Plan(width, causal, tail, **chosen, shifted=shifted, left=left, packed=packed), kernel


def _convert(sums: torch.Tensor, dq: torch.Tensor, cu_q: torch.Tensor | None, call: Call) -> None:
    """dq from its sums."""
    device, dtype, width = call.kind[:3]
    grid, scalars = call.conversion
    arguments, window = (sums, cu_q, *scalars), call.layouts.dq
    kind = device, dtype, *scalars[-2:], len(window[0])
    launcher = _compiled.get(kind)
    if launcher is not None:
        launcher.launch(grid, device, (dq,), (window,), arguments)
        return
    from triton.tools.tensor_descriptor import TensorDescriptor

    from attnlib.kernels.hopper.backward_passes import attention_backward_dq

    shape, strides = (list(part) for part in window)
    descriptor = TensorDescriptor(dq, shape, strides, [1] * (len(shape) - 2) + [64, width])
    # 32 sums a thread, eight loads of 16 bytes.
    compiled = attention_backward_dq[grid](descriptor, *arguments, num_warps=width // 16)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[kind] = Launcher(compiled)

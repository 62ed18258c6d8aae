"""Launch the Hopper backward kernel: whether it can run a call, its constants, and what goes around it."""

from dataclasses import fields
from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib import launch_hopper
from attnlib.band import Band, Packed
from attnlib.configs import block_d
from attnlib.configs_backward_hopper import (
    MAX_HEAD_DIM,
    HopperBackwardConfig,
    hopper_backward_config,
)
from attnlib.launch import LIMIT, LOG2_E, PREPARED, describable, legal, readable
from attnlib.launch_backward import PADDING, ROWS, Launch, _launch, _like
from attnlib.launcher import Launcher

_HALF = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

_compiled: dict[tuple, tuple | Launcher] = {}
"""What a kind of call needs -> (launcher of the compiled kernel, its plan); (device, dtype, width) -> the
launcher of what makes dQ of its sums."""


def unsupported(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    band: Band,
    packed: Packed | None = None,
    deterministic: bool = False,
) -> str | None:
    """What the kernel needs and a call with valid arguments does not have; None if it has all.

    Layouts that TMA can't read are no reason: `backward` copies them.
    """
    # Of shape and dtype, but contiguous: what the forward's kernel says of anything but layouts.
    stand_in = q if describable(q) else q.new_empty(1, 1, 1, q.shape[-1])
    lacks = launch_hopper.unsupported(stand_in, stand_in, stand_in)
    if lacks is not None:
        return lacks
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"needs a head dimension of at most {MAX_HEAD_DIM} for the backward pass; q has {q.shape[-1]}"
    if packed is not None:
        return "has no backward pass for packed sequences"
    if band.left is not None or band.right not in (None, 0):
        return f"has no backward pass for a window; this one is {tuple(band)}"
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

    d_out, q, out: (B, H, Sq, D); k, v: (B, Hkv, Sk, D); lse: (B, H, Sq) float32, contiguous. `config`
    replaces the one that `hopper_backward_config` chooses. Returns (dq, dk, dv). dk and dv are the same in
    every run, dq up to the order of a sum. ValueError if a length or the tiles are beyond 2^31.
    """
    device = q.get_device()
    if device != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(device):
            return backward(d_out, q, k, v, out, lse, band, sm_scale, packed, deterministic, config)
    d_out, q, k, v, out = (readable(x) for x in (d_out, q, k, v, out))
    dq, dk, dv = (_like(x) for x in (q, k, v))
    call = _prepare(q.shape, k.shape, q.dtype, device, band, sm_scale, config)
    rows = torch.empty(call.rows_shape, dtype=torch.float32, device=q.device)
    _launch(call.rows_launch, device, (out, d_out), (lse, rows, None))
    sums = torch.zeros(call.sums, dtype=torch.float32, device=q.device)
    tensors = q, k, v, d_out, dk, dv, rows
    windows = tuple((tuple(x.shape), legal(x.shape, x.stride(), x.dtype)) for x in tensors)
    found = _compiled.get(call.kind)
    if found is None:
        kernel, plan = _first_launch(tensors, windows, sums, call)
        if kernel is not None:  # the emulator compiles nothing
            _compiled[call.kind] = Launcher(kernel), plan
    else:
        launcher, plan = found
        launcher.launch((call.programs, 1, 1), device, tensors, windows, (sums, *call.scalars, plan))
    _convert(sums, dq, sm_scale, call)
    return dq, dk, dv


class Call(NamedTuple):
    """What calls share that differ in nothing but addresses.

    kind: what the compiled code depends on; rows_shape: of the memory for lse2 and delta; sums: elements of
    the buffer for dQ; blocks: of 64 rows that a head has in it.
    """

    kind: tuple
    programs: int
    scalars: tuple
    rows_shape: tuple[int, int, int]
    rows_launch: Launch
    sums: int
    blocks: int


@lru_cache(PREPARED)
def _prepare(q_shape, k_shape, dtype, device: int, band: Band, sm_scale: float, config) -> Call:
    B, H, S_q, D = q_shape
    _, H_kv, S_k, _ = k_shape
    if config is None:
        config = hopper_backward_config(D)
    width, padded = max(64, block_d(D)), -(-S_q // PADDING) * PADDING
    num_m, num_n = -(-S_q // config.block_m), -(-S_k // config.block_n)
    programs = num_n * B * H_kv
    if max(programs, B * H * padded // 64, S_q * (H // H_kv), S_k) >= LIMIT // 2:
        raise ValueError(
            f"q, k: expected fewer than 2^30 rows, keys and tiles over all heads, got {S_q} and {S_k}"
        )
    section = config.heads_per_section(B * H_kv, H // H_kv, S_q, width)
    causal = band.right is not None
    kind = (device, dtype, width, causal, not causal and S_k % config.block_n != 0, config)
    scalars = (
        sm_scale * LOG2_E, sm_scale, S_q, S_k, H, H // H_kv, B * H_kv, section, num_m, num_n,
    )  # fmt: skip
    rows = Launch(
        "attention_backward_rows", device, dtype, False, (padded // ROWS * B * H, 1, 1),
        ((1, 1, ROWS, block_d(D)),) * 2, (S_q, None, H, B, padded), (ROWS, block_d(D)), (("num_warps", 4),),
    )  # fmt: skip
    blocks = num_m * config.block_m // 64
    return Call(kind, programs, scalars, (2, B * H, padded), rows, B * H * blocks * 64 * width, blocks)


def _first_launch(tensors: tuple[torch.Tensor, ...], windows: tuple, sums: torch.Tensor, call: Call) -> tuple:
    """Compile, launch, and return the compiled kernel and its plan."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    _, dtype, width, causal, tail, config = call.kind
    plan, function = kernel_for(width, causal, tail, config)
    descriptors = [
        TensorDescriptor(tensor, list(shape), list(strides), block, shared_layout(gl, block, dtype))
        for tensor, (shape, strides), block in zip(tensors, windows, blocks(width, config), strict=True)
    ]
    kernel = function[(call.programs,)](
        *descriptors, sums, *call.scalars, plan, num_warps=4, maxnreg=config.max_registers
    )
    return kernel, plan


def shared_layout(gl, block: list[int], dtype: torch.dtype):
    """How a tile lies in shared memory: swizzled, or, one row of float32, as it is."""
    if len(block) == 3:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return gl.NVMMASharedLayout.get_default_for(block, getattr(gl, _HALF[dtype]))


def blocks(width: int, config: HopperBackwardConfig) -> tuple[list[int], ...]:
    """What one copy of Q, K, V, dO, dK, dV, and LSE2 or delta moves."""
    queries, keys = [1, 1, config.block_m, width], [1, 1, 64, width]
    return queries, keys, keys, queries, keys, keys, [1, 1, config.block_m]


def kernel_for(width: int, causal: bool, tail: bool, config: HopperBackwardConfig) -> tuple:
    """(the kernel's constants, the kernel)."""
    if width > 128:
        from attnlib.kernels.hopper_backward_wide import Plan
        from attnlib.kernels.hopper_backward_wide import attention_backward_hopper_wide as kernel
    else:
        from attnlib.kernels.hopper_backward import Plan
        from attnlib.kernels.hopper_backward import attention_backward_hopper as kernel
    names = [field.name for field in fields(Plan) if hasattr(config, field.name)]
    return Plan(width, causal, tail, **{name: getattr(config, name) for name in names}), kernel


def _convert(sums: torch.Tensor, dq: torch.Tensor, sm_scale: float, call: Call) -> None:
    """dq from its sums."""
    B, H, S_q, _ = dq.shape
    device, dtype, width = call.kind[:3]
    tiles = -(-S_q // 64)
    grid, arguments = (tiles * B * H, 1, 1), (sums, sm_scale, H, call.blocks, tiles, width)
    shape, strides = tuple(dq.shape), legal(dq.shape, dq.stride(), dq.dtype)
    launcher = _compiled.get((device, dtype, width))
    if launcher is not None:
        launcher.launch(grid, device, (dq,), ((shape, strides),), arguments)
        return
    from triton.tools.tensor_descriptor import TensorDescriptor

    from attnlib.kernels.hopper_backward_passes import attention_backward_dq

    descriptor = TensorDescriptor(dq, list(shape), list(strides), [1, 1, 64, width])
    # 32 sums a thread, eight loads of 16 bytes.
    compiled = attention_backward_dq[grid](descriptor, *arguments, num_warps=width // 16)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[device, dtype, width] = Launcher(compiled)

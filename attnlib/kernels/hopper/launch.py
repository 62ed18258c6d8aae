"""Launch the Hopper kernel: whether it can run a call, its constants, and a launch in little host time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common.launcher import Launcher, current_stream
from attnlib.kernels.common.tiles import tile_width
from attnlib.kernels.hopper.configs import HopperConfig, hopper_config
from attnlib.kernels.portable.launch import (
    LIMIT,
    PREPARED,
    Layouts,
    Lengths,
    capability,
    clipped,
    describable,
    dimensions,
    exp2_scale,
    interpreted,
    layouts,
    lengths_of,
    mean_keys,
    outputs,
)
from attnlib.params import Band, Packed

TRITON_VERSION = "3.6."
_HALF = {torch.float16: "float16", torch.bfloat16: "bfloat16"}

_compiled: dict[tuple, tuple] = {}
"""What a kind of call needs -> (launcher of the compiled kernel, its plan)."""
_counters: dict[tuple[int, int], torch.Tensor] = {}
"""(device, stream) -> the counter that its launches draw tiles from; 0 between launches."""


def unsupported(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str | None:
    """What the Hopper kernel needs and a call with valid arguments does not have; None if it has all."""
    lacks = unsupported_here(q)
    if lacks is not None:
        return lacks
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not describable(tensor):
            return (
                f"needs layouts that TMA can read (last dimension contiguous, the address and other strides "
                f"positive multiples of 16 bytes); {name} has strides {tuple(tensor.stride())} and "
                f"address {tensor.data_ptr() % 16} mod 16"
            )
    return None


def unsupported_here(q: torch.Tensor) -> str | None:
    """The same for what does not depend on layouts: where `q` is, and of what dtype."""
    if not q.is_cuda:
        return f"needs CUDA tensors; q is on {q.device}"
    if interpreted():
        return "needs compiled kernels; TRITON_INTERPRET=1 is set, and Gluon has no interpreter"
    major, minor = capability(q.get_device())
    if major != 9:
        return f"needs a GPU of compute capability 9.x; {q.device} has {major}.{minor}"
    if q.dtype not in _HALF:
        return f"needs float16 or bfloat16; q is {str(q.dtype).removeprefix('torch.')}"
    return _gluon_amiss()


@cache
def _gluon_amiss() -> str | None:
    """What is wrong with this Triton's Gluon, which is experimental and changes from version to version."""
    import triton

    if not triton.__version__.startswith(TRITON_VERSION):
        return f"needs the Gluon of triton {TRITON_VERSION}x; this is triton {triton.__version__}"
    return None


@cache
def _num_sms(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    band: Band,
    sm_scale: float,
    return_lse: bool,
    packed: Packed | None = None,
    config: HopperConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `kernels.hopper.attention_forward_hopper` on a call that it supports, no argument empty.

    q: (B, H, Sq, D); k, v: (B, Hkv, Sk, D). With `packed` q: (Tq, H, D); k, v: (Tk, Hkv, D), of which single
    sequences may be empty. `config` replaces the one that `hopper_config` chooses. Returns (out, lse); lse is
    None unless it was asked for. ValueError if a length or the tiles are beyond 2^31, or there are more than
    2^30 packed rows.
    """
    device = q.get_device()
    if device != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(device):
            return forward(q, k, v, band, sm_scale, return_lse, packed, config)
    call = _prepare(
        q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, device,
        band, sm_scale, return_lse, packed and lengths_of(packed), config,
    )  # fmt: skip
    windows, out_strides = call.layouts
    out, lse = outputs(q, out_strides, return_lse, packed is not None)
    tensors = q, k, v, out
    first = lse, _counter(device), *call.scalars
    last = call.bounds
    if packed is not None:
        last = *last, packed.cu_seqlens_q, packed.cu_seqlens_k, q.shape[0], packed.cu_seqlens_q.shape[0] - 1
    found = _compiled.get(call.kind)
    if found is None:
        kernel, plan = _first_launch(tensors, first, last, call)
        if kernel is not None:  # the emulator compiles nothing
            _compiled[call.kind] = Launcher(kernel), plan
    else:
        launcher, plan = found
        launcher.launch((call.programs, 1, 1), device, tensors, windows, (*first, plan, *last))
    return out, lse


class Call(NamedTuple):
    """What calls share that differ in nothing but addresses.

    kind: what the compiled code depends on; scalars, bounds: the kernel's arguments before and after its
    plan, up to those of packed sequences.
    """

    kind: tuple
    programs: int
    scalars: tuple
    bounds: tuple
    layouts: Layouts


@lru_cache(PREPARED)
def _prepare(
    q_shape, k_shape, q_strides, k_strides, v_strides, dtype, device: int,
    band: Band, sm_scale, return_lse, lengths: Lengths | None, config,
) -> Call:  # fmt: skip
    B, H, H_kv, S_q, S_k = dimensions(q_shape, k_shape, lengths)
    D, packed = q_shape[-1], lengths is not None
    if config is None:
        config = configuration(q_shape, k_shape, band, device, lengths)
    width = tile_width(D)
    block_m = 64 * config.warpgroups
    blocks_m = -(-S_q // block_m)
    # Packed, the kernel counts them; so many at most: each sequence may end with a part of one.
    tiles, heads = ((q_shape[0] // block_m + B) * H, H) if packed else (blocks_m * B * H, B * H)
    if max(tiles, S_q, S_k) >= LIMIT:
        raise ValueError(
            f"q, k: expected fewer than 2^31 rows, keys and tiles of {block_m} rows over all heads, "
            f"got {S_q}, {S_k} and {tiles}"
        )
    section = config.heads_per_section(heads, H // H_kv, S_k, width)
    left, right = clipped(band, S_q, S_k)
    masked, skip = (1 if right is None else 2, True) if packed else _masks(right, S_q, S_k, config)
    asked = bool(right), left is not None, packed  # what a plan calls shifted, left, packed
    kind = (device, dtype, width, right is not None, masked, skip, sm_scale < 0, return_lse, config, *asked)
    scalars = (exp2_scale(sm_scale), S_q, S_k, H, H // H_kv, B * H, section, blocks_m, tiles)
    bounds = right or None, left
    found = layouts(q_shape, k_shape, q_strides, k_strides, v_strides, dtype, packed)
    # The last four are those of packed sequences.
    bounds = bounds if packed else (*bounds, None, None, None, None)
    return Call(kind, min(tiles, _num_sms(device)), scalars, bounds, found)


def configuration(
    q_shape: torch.Size, k_shape: torch.Size, band: Band, device: int, lengths: Lengths | None = None
) -> HopperConfig:
    """What `forward` chooses for queries and keys of these shapes; packed sequences count as the longest."""
    B, H, _, S_q, S_k = dimensions(q_shape, k_shape, lengths)
    windowed = band.left is not None or band.right
    keys, seen = (None, None) if windowed else (S_k, mean_keys(S_q, S_k, band))
    return hopper_config(q_shape[-1], S_q, B * H, _num_sms(device), keys, seen)


def _masks(right: int | None, S_q: int, S_k: int, config: HopperConfig) -> tuple[int, bool]:
    """(blocks at the end of a row that need a mask, whether the warpgroups of a tile may visit different
    numbers of blocks), with a bound on the right or none."""
    if right is None:
        # In the last tile of a head, warpgroups that lie beyond the last row have nothing to visit.
        idle = 0 < S_q % (64 * config.warpgroups) <= 64 * (config.warpgroups - 1)
        return int(S_k % config.block_n != 0), idle
    # The diagonal enters a block at a corner of 64 rows, or crosses from one block to the next within them.
    diagonal, block_m = S_k - S_q + right, 64 * config.warpgroups
    return 1 + (diagonal % 64 != 0), not (block_m == config.block_n and diagonal % block_m == 0)


class _Thread(threading.local):
    own_counters = False


_thread = _Thread()


@contextmanager
def own_counters() -> Iterator[None]:
    """Launches leave no tensor behind. For code that a compiler may run to prepare a CUDA graph: it counts
    what is allocated meanwhile, and takes what stays for a leak."""
    before, _thread.own_counters = _thread.own_counters, True
    try:
        yield
    finally:
        _thread.own_counters = before


def _counter(device: int) -> torch.Tensor:
    """An int32 that is 0, for one launch after another.

    Launches on one stream share it, because each leaves it at 0. A captured launch has one of its own, set to
    0 by the graph: nobody knows on which streams, beside which launches, a graph will be replayed. And so has
    one within `own_counters`.
    """
    if _thread.own_counters or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")
    key = device, current_stream(device)
    found = _counters.get(key)
    if found is None:
        found = _counters[key] = torch.zeros(1, dtype=torch.int32, device=f"cuda:{device}")
    return found


def _first_launch(tensors: tuple[torch.Tensor, ...], first: tuple, last: tuple, call: Call) -> tuple:
    """Compile, launch, and return the compiled kernel and its plan."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from attnlib.kernels.hopper.forward import Plan, attention_forward_hopper

    _, dtype, width, causal, masked, skip, flip, store_lse, config, *asked = call.kind
    plan = make_plan(Plan, width, causal, masked, skip, flip, store_lse, config, *asked)
    element = getattr(gl, _HALF[dtype])
    descriptors = []
    for tensor, (shape, strides), block in zip(
        tensors, call.layouts.windows, blocks(width, config, asked[2]), strict=True
    ):
        layout = gl.NVMMASharedLayout.get_default_for(block, element)
        descriptors.append(TensorDescriptor(tensor, list(shape), list(strides), block, layout))
    kernel = attention_forward_hopper[(call.programs,)](
        *descriptors, *first, plan, *last, num_warps=4, maxnreg=config.max_registers
    )
    return kernel, plan


def blocks(width: int, config: HopperConfig, packed: bool = False) -> tuple[list[int], ...]:
    """What one copy of Q, K, V and the output moves."""
    one = [1, 1, 1] if packed else [1, 1]
    keys = [*one, config.block_n, width]
    return [*one, 64, width], keys, keys, [*one, 64, config.o_columns]


def make_plan(
    plan_class, width, causal, masked, skip, flip, store_lse, config: HopperConfig,
    shifted=False, left=False, packed=False,
):  # fmt: skip
    """The kernel's constants."""
    return plan_class(
        d=width, causal=causal, masked=masked, skip=skip, flip=flip, store_lse=store_lse,
        block_n=config.block_n, warpgroups=config.warpgroups, stages=config.stages,
        q_columns=config.q_columns, o_columns=config.o_columns, late_wait=config.late_wait, pin=config.pin,
        tree=config.tree, joint=config.joint, named=config.named,
        consumer_registers=config.consumer_registers, producer_registers=config.producer_registers,
        shifted=shifted, left=left, packed=packed,
    )  # fmt: skip

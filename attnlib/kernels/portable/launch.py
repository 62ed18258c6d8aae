"""Launch the portable forward kernel: describe the tensors, compile once, then launch in little host time.

`kernel[grid](...)` of Triton binds and hashes every argument at every call, which takes longer than all the
rest. The compiled kernel that it returns launches without that. So the first call of a kind goes the long
way, and later ones go straight to what it compiled (notebook 08 has the times). What follows from the shapes
alone is computed once for each.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common.launcher import Launcher
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.portable.configs import ForwardConfig, forward_config, upwards
from attnlib.params import Band, Packed

LOG2_E = 1.4426950408889634
LIMIT = 2**31  # numbers of blocks, rows and keys are int32
GRID_YZ = 65535  # programs that a grid may have along y and z
RAGGED = 1 << 30  # rows of packed sequences, at most; see `ragged`
PREPARED = 1024
"""Shapes or layouts whose launches stay prepared: lengths may change from call to call without an end."""

_compiled: dict[tuple, Launcher] = {}
"""(device, dtype, constants, configuration) -> launcher of the compiled kernel."""


@cache
def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def capability(device_index: int) -> tuple[int, int]:
    """CUDA compute capability of a device, such as (9, 0)."""
    return torch.cuda.get_device_capability(device_index)


class Lengths(NamedTuple):
    """What of packed sequences a launch depends on."""

    sequences: int
    max_q: int
    max_k: int


def lengths_of(packed: Packed) -> Lengths:
    """Reads no number from the device."""
    return Lengths(packed.cu_seqlens_q.shape[0] - 1, packed.max_seqlen_q, packed.max_seqlen_k)


def dimensions(q_shape, k_shape, lengths: Lengths | None) -> tuple[int, int, int, int, int]:
    """(B, H, H_kv, S_q, S_k) of a call; the longest lengths of packed sequences."""
    if lengths is None:
        return q_shape[0], q_shape[1], k_shape[1], q_shape[2], k_shape[2]
    if max(q_shape[0], k_shape[0]) > RAGGED:
        raise ValueError(
            f"q, k: expected at most 2^30 packed rows and keys, got {q_shape[0]} and {k_shape[0]}"
        )
    return lengths.sequences, q_shape[1], k_shape[1], lengths.max_q, lengths.max_k


class Layouts(NamedTuple):
    """(shape, strides) of Q, K, V and the output as descriptors take them, and the strides of the output."""

    windows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    out_strides: tuple[int, ...]


def layouts(
    q_shape, k_shape, q_strides, k_strides, v_strides, dtype: torch.dtype, packed: bool = False
) -> Layouts | None:
    """Layouts of a call; None if a descriptor can't express one of its inputs.

    The output is laid out as `torch.empty_like(q)` where a descriptor can express that, else contiguously.
    """
    like = torch.empty_like(torch.empty_strided(q_shape, q_strides, dtype=dtype, device="meta"))
    if legal(like.shape, like.stride(), dtype) is None:  # a copy of q's odd layout
        like = torch.empty(q_shape, dtype=dtype, device="meta")
    tensors = (q_shape, q_strides), (k_shape, k_strides), (k_shape, v_strides), (q_shape, like.stride())
    windows = tuple((tuple(shape), legal(shape, strides, dtype)) for shape, strides in tensors)
    if any(strides is None for _, strides in windows):
        return None
    return Layouts(tuple(ragged(*window) for window in windows) if packed else windows, like.stride())


def ragged(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the descriptor of packed sequences (T, H, D), with which the hardware checks
    bounds at the end of any sequence.

    A descriptor has one bound for a dimension: here that of the rows is RAGGED, more than there are. Row i of
    a sequence of S rows is told as RAGGED - S + i, so that i = S is the first that is out of bounds. This is
    RAGGED - S rows too far. Two dimensions more take that back: one counts rows, and stands at the sequence's
    end; the other has a stride that is minus that of a row, plus 2^34 elements, and stands at RAGGED. Its
    2^64 elements are the addresses' whole range, so nothing is left of them:

        RAGGED * (2^34 - row) + end * row + (RAGGED - S + i) * row = (end - S + i) * row  (mod 2^64)
    """
    (rows, heads, columns), (row, head, _) = shape, strides
    return (RAGGED + 1, rows + 1, heads, RAGGED, columns), ((1 << 34) - row, row, head, row, 1)


def outputs(
    q: torch.Tensor, strides: tuple[int, ...], lse: bool, packed: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memory for out, as q, and for the LSE if asked: (B, H, Sq), packed (H, Tq)."""
    shape, device = q.shape, q.device
    out = torch.empty_strided(shape, strides, dtype=q.dtype, device=device)
    if not lse:
        return out, None
    return out, torch.empty(shape[1::-1] if packed else shape[:3], dtype=torch.float32, device=device)


def exp2_scale(sm_scale: float) -> float:
    """What the kernels multiply scores with before exp2: |sm_scale| * log2(e), positive. Zero would turn a
    masked score, -inf, into NaN; a factor as small as this one leaves every weight at exactly 1."""
    return max(abs(sm_scale) * LOG2_E, 2.0**-100)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    band: Band,
    sm_scale: float,
    return_lse: bool,
    packed: Packed | None = None,
    config: ForwardConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `kernels.forward.attention_forward` on valid arguments, none of them empty; see `attention`.

    q: (B, H, Sq, D); k, v: (B, Hkv, Sk, D). With `packed` q: (Tq, H, D); k, v: (Tk, Hkv, D), of which single
    sequences may be empty. `config` replaces the one that `forward_config` chooses; its order is replaced by
    one that can have a left edge, where the band does. Returns (out, lse); lse is None unless it was asked
    for. ValueError if a length or the grid is beyond 2^31, or there are more than 2^30 packed rows.
    """
    if q.dtype == torch.bfloat16 and interpreted():  # its bfloat16 dot is wrong (triton 3.6)
        out, lse = forward(q.float(), k.float(), v.float(), band, sm_scale, return_lse, packed, config)
        return out.bfloat16(), lse
    device = q.get_device()
    if q.is_cuda and device != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(device):
            return forward(q, k, v, band, sm_scale, return_lse, packed, config)
    call = _prepare(
        q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, device,
        band, sm_scale, return_lse, packed and lengths_of(packed), config,
    )  # fmt: skip
    if call.layouts is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        q, k, v = (readable(tensor) for tensor in (q, k, v))
        return forward(q, k, v, band, sm_scale, return_lse, packed, config)
    windows, out_strides = call.layouts
    out, lse = outputs(q, out_strides, return_lse, packed is not None)
    tensors = q, k, v, out
    pointers = (lse, None, None) if packed is None else (lse, packed.cu_seqlens_q, packed.cu_seqlens_k)
    launcher = _compiled.get(call.kind)
    if launcher is not None:
        launcher.launch(call.grid, device, tensors, windows, (*pointers, *call.arguments))
    else:
        kernel = _first_launch(tensors, pointers, call)
        if kernel is not None:  # the interpreter compiles nothing
            _compiled[call.kind] = Launcher(kernel)
    return out, lse


class Call(NamedTuple):
    """What calls share that differ in nothing but addresses.

    kind: what the compiled code depends on; arguments: scalars and constants, in the order of the kernel's;
    layouts: None if an input has to be copied.
    """

    kind: tuple
    grid: tuple[int, int, int]
    arguments: tuple
    layouts: Layouts | None
    config: ForwardConfig


@lru_cache(PREPARED)
def _prepare(
    q_shape, k_shape, q_strides, k_strides, v_strides, dtype, device: int,
    band: Band, sm_scale, return_lse, lengths: Lengths | None, config,
) -> Call:  # fmt: skip
    B, H, H_kv, S_q, S_k = dimensions(q_shape, k_shape, lengths)
    D, packed = q_shape[-1], lengths is not None
    if config is None:
        config = _choose(D, dtype, device, band, mean_keys(S_q, S_k, band))
    elif band.left is not None:
        config = upwards(config)
    width = block_d(D)
    blocks = -(-S_q // config.block_m)
    programs = blocks * B * H
    if max(programs, S_q, S_k) >= LIMIT:
        raise ValueError(
            f"q, k: expected fewer than 2^31 rows, keys and blocks of {config.block_m} rows over all heads, "
            f"got {S_q}, {S_k} and {programs}"
        )
    left, right = clipped(band, S_q, S_k)
    section = max(n for n in range(1, config.heads_per_section + 1) if H % n == 0)
    grid = (blocks * section, H // section, B)
    flat = max(grid[1:]) > GRID_YZ
    shift = S_k - S_q + (right or 0)
    scalars = (
        exp2_scale(sm_scale),
        S_q,
        S_k,
        q_shape[0] if packed else None,  # T_q
        H,
        left,
        right or None,
    )
    constants = (
        H // H_kv,  # GROUP
        config.block_m,
        config.block_n,
        width,
        right is not None,  # DIAGONAL
        right is None and (packed or S_k % config.block_n != 0),  # HAS_TAIL: the mask of a diagonal covers it
        right is not None and not packed and config.block_m == config.block_n and shift % config.block_n == 0,
        packed or (right is not None and shift < 0),  # EMPTY_ROWS
        sm_scale < 0,  # FLIP
        return_lse,
        config.order,
        config.q_in_registers,
        section,
        flat,
        config.num_stages,
        "ieee" if dtype == torch.float32 else "tf32",
    )
    found = layouts(q_shape, k_shape, q_strides, k_strides, v_strides, dtype, packed)
    grid = (programs, 1, 1) if flat else grid
    kind = (device, dtype, packed, left is None, not right, constants, config)
    return Call(kind, grid, (*scalars, *constants), found, config)


def clipped(band: Band, S_q: int, S_k: int) -> Band:
    """The same keys in bounds whose sums with a length are int32: beyond a length they bound nothing."""
    left, right = band
    return Band(None if left is None else min(left, S_k), None if right is None else min(right, S_q))


def mean_keys(S_q: int, S_k: int, band: Band) -> int:
    """Keys that a query sees on average, about: exactly without a left bound."""
    left, right = band
    seen = S_k
    if right is not None:
        seen -= max(0, min(S_q, S_k) - right) // 2
    return seen if left is None else min(seen, left + 1 + (seen if right is None else right))


def configuration(
    q: torch.Tensor, k: torch.Tensor, band: Band, packed: Packed | None = None
) -> ForwardConfig:
    """What `forward` chooses for queries and keys like these."""
    _, _, _, S_q, S_k = dimensions(q.shape, k.shape, packed and lengths_of(packed))
    return _choose(q.shape[-1], q.dtype, q.get_device(), band, mean_keys(S_q, S_k, band))


def _choose(head_dim: int, dtype: torch.dtype, device_index: int, band: Band, keys: int) -> ForwardConfig:
    arch = None if interpreted() else capability(device_index)
    config = forward_config(head_dim, str(dtype).removeprefix("torch."), arch, keys)
    return config if band.left is None else upwards(config)


def _first_launch(tensors: tuple[torch.Tensor, ...], pointers: tuple, call: Call):
    """Compile, launch, and return the compiled kernel."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from attnlib.kernels.portable.forward import attention_forward

    config = call.config
    rows = (config.block_m, config.block_n, config.block_n, config.block_m)
    width = block_d(tensors[0].shape[-1])
    descriptors = [
        TensorDescriptor(tensor, list(shape), list(strides), [1] * (len(shape) - 2) + [n, width])
        for tensor, (shape, strides), n in zip(tensors, call.layouts.windows, rows, strict=True)
    ]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    return attention_forward[call.grid](*descriptors, *pointers, *call.arguments, **options)


def describable(tensor: torch.Tensor) -> bool:
    """Whether a TMA descriptor can express this (B, H, S, D) or (T, H, D) layout. The hardware wants
    addresses in multiples of 16 bytes."""
    return tensor.data_ptr() % 16 == 0 and legal(tensor.shape, tensor.stride(), tensor.dtype) is not None


@lru_cache(PREPARED)
def legal(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...] | None:
    """The hardware wants the last dimension contiguous, and the other strides in multiples of 16 bytes. The
    stride of a dimension of size 1 may be anything: it is never used, and becomes a legal one."""
    unit = 16 // dtype.itemsize
    legal = -(-shape[-1] // unit) * unit
    outer = [stride if size > 1 else legal for size, stride in zip(shape[:-1], strides[:-1], strict=True)]
    if strides[-1] != 1 or any(stride % unit or stride <= 0 for stride in outer):
        return None
    return (*outer, 1)


def readable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a descriptor can express it: where it lies, or a copy, laid out alike if that can be."""
    if not describable(tensor):
        tensor = tensor.clone()
    if not describable(tensor):
        tensor = tensor.contiguous()
    return tensor

"""Launch the portable backward kernels: three or four, no atomics, memory of the order of the inputs."""

from functools import lru_cache
from typing import NamedTuple

import torch

from attnlib.kernels.common.launcher import Launcher
from attnlib.kernels.common.tiles import block_d
from attnlib.kernels.portable.configs_backward import BackwardConfig, Tile, backward_config
from attnlib.kernels.portable.launch import (
    GRID_YZ,
    LIMIT,
    PREPARED,
    Lengths,
    capability,
    dimensions,
    exp2_scale,
    interpreted,
    legal,
    lengths_of,
    ragged,
    readable,
)
from attnlib.params import Band, Packed

ROWS = 64
"""Rows of a block of `attention_backward_rows`, at most."""

_compiled: dict[tuple, Launcher] = {}
"""(device, dtype, kernel, constants, options) -> launcher of the compiled kernel."""


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
    config: BackwardConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of attention, the kernels of `kernels.backward`, on valid arguments, none of them empty.

    d_out, q, out: (B, H, Sq, D); k, v: (B, Hkv, Sk, D); lse: (B, H, Sq) float32, contiguous, as `forward`
    returned it. With `packed` d_out, q, out: (Tq, H, D); k, v: (Tk, Hkv, D); lse: (H, Tq). Returns (dq, dk,
    dv), laid out like q, k, v where a descriptor can express that. The result is always deterministic.
    `config` replaces what `backward_config` chooses.
    """
    if q.dtype == torch.bfloat16 and interpreted():  # its bfloat16 dot is wrong (triton 3.6)
        tensors = (x.float() for x in (d_out, q, k, v, out))
        found = backward(*tensors, lse, band, sm_scale, packed, deterministic, config)
        return tuple(x.bfloat16() for x in found)
    device = q.get_device()
    if q.is_cuda and device != torch.cuda.current_device():  # Triton launches on the current device
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
    cu = (None, None) if packed is None else (packed.cu_seqlens_q, packed.cu_seqlens_k)
    rows = torch.empty(call.rows_shape, dtype=torch.float32, device=q.device)
    run(call.rows_launch, device, (out, d_out), (at.out, at.d_out), (lse, rows, None, cu[0]))
    windows = at.q, at.d_out, at.k, at.v, at.dk, at.dv, call.rows_window
    for keys in call.keys_launches:
        run(keys, device, (q, d_out, k, v, dk, dv, rows), windows, cu)
    windows = at.q, at.d_out, at.dq, at.k, at.v, call.rows_window
    run(call.queries_launch, device, (q, d_out, dq, k, v, rows), windows, cu)
    return dq, dk, dv


class Layouts(NamedTuple):
    """(shape, strides) of each tensor as descriptors take them; and the strides of dq, dk and dv."""

    d_out: tuple
    q: tuple
    k: tuple
    v: tuple
    out: tuple
    dq: tuple
    dk: tuple
    dv: tuple
    strides: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def layouts(q_shape, k_shape, strides, dtype, packed: bool) -> Layouts | None:
    """Layouts of a call with these strides of d_out, q, k, v and out; None if a descriptor can't express one
    of them. Gradients are laid out like the inputs, as `torch.empty_like` does it, where a descriptor can
    express that, else contiguously."""
    given = list(zip((q_shape, q_shape, k_shape, k_shape, q_shape), strides, strict=True))
    if any(legal(*tensor, dtype) is None for tensor in given):
        return None
    own = tuple(_like(*tensor, dtype) for tensor in given[1:4])
    made = zip((q_shape, k_shape, k_shape), own, strict=True)
    windows = ((tuple(shape), legal(shape, strides, dtype)) for shape, strides in (*given, *made))
    return Layouts(*(ragged(*window) if packed else window for window in windows), own)


def _like(shape, strides, dtype) -> tuple[int, ...]:
    like = torch.empty_like(torch.empty_strided(shape, strides, dtype=dtype, device="meta"))
    if legal(shape, like.stride(), dtype) is None:
        like = torch.empty(shape, dtype=dtype, device="meta")
    return like.stride()


def misaligned(*tensors: torch.Tensor) -> bool:
    """Whether one of them is at an address that a descriptor can't have."""
    addresses = 0
    for tensor in tensors:
        addresses |= tensor.data_ptr()
    return bool(addresses % 16)


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: Layouts) -> tuple[torch.Tensor, ...]:
    """Memory for dq, dk and dv."""
    return tuple(
        torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)
        for x, strides in zip((q, k, v), at.strides, strict=True)
    )


class Launch(NamedTuple):
    """One kernel's launch. blocks: of each descriptor; options: of the compiler."""

    kernel: str
    device: int
    dtype: torch.dtype
    packed: bool
    grid: tuple[int, int, int]
    blocks: tuple[tuple[int, ...], ...]
    scalars: tuple
    constants: tuple
    options: tuple[tuple[str, int], ...]


class Call(NamedTuple):
    """What calls share that differ in nothing but addresses.

    layouts: None if an input has to be copied; rows_shape, rows_window: of the memory for lse2 and delta.
    """

    layouts: Layouts | None
    rows_shape: tuple[int, int, int]
    rows_window: tuple
    rows_launch: Launch
    keys_launches: tuple[Launch, ...]
    queries_launch: Launch


@lru_cache(PREPARED)
def _prepare(
    q_shape, k_shape, strides, dtype, device: int, band: Band, sm_scale: float, lengths: Lengths | None,
    config,
) -> Call:
    B, H, H_kv, S_q, S_k = dimensions(q_shape, k_shape, lengths)
    D, packed = q_shape[-1], lengths is not None
    if config is None:
        arch = None if interpreted() else capability(device)
        config = backward_config(D, str(dtype).removeprefix("torch."), arch)
    width = block_d(D)
    padding = padding_of(config)
    rows, rows_shape, rows_window = rows_launch(q_shape, dtype, device, lengths, padding)
    precision = "ieee" if dtype == torch.float32 else "tf32"
    if max(rows.grid[0], rows_shape[2], B * H_kv * S_k // 16, S_k) >= LIMIT:
        raise ValueError(
            f"q, k: expected fewer than 2^31 rows, keys and blocks of {rows.constants[0]} rows over all "
            f"heads, got {S_q}, {S_k} and {rows.grid[0]}"
        )
    scales = (exp2_scale(sm_scale), sm_scale)
    # Beyond these a bound bounds nothing; and int32 holds their sums with a length.
    bounds = (min(band.right or 0, S_q), min(band.left or 0, S_k))
    has_bounds = (band.right is not None, band.left is not None)
    keys_hidden = band.right == 0  # by the right bound: keys past S_k

    def launch(kernel, tile: Tile, tiled: int, heads: int, blocks, scalars, before, after) -> Launch:
        section = max(n for n in range(1, tile.heads_per_section + 1) if heads % n == 0)
        grid = (tiled * section, heads // section, B)
        flat = max(grid[1:]) > GRID_YZ
        constants = (
            H // H_kv, padding, tile.block_m, tile.block_n, width, *before, *after, sm_scale < 0, section,
            flat, tile.num_stages, precision,
        )  # fmt: skip
        options = (("num_warps", tile.num_warps), ("num_stages", tile.num_stages))
        if tile.max_registers is not None:
            options += (("maxnreg", tile.max_registers),)
        grid = (tiled * heads * B, 1, 1) if flat else grid
        return Launch(kernel, device, dtype, packed, grid, blocks, scalars, constants, options)

    def tiles(tile: Tile, which: str) -> tuple[tuple[int, ...], ...]:
        """Blocks of the descriptors: "m" of queries, "n" of keys, "r" of a vector with a value per query."""
        ones = (1, 1, 1) if packed else (1, 1)
        m, n = tile.block_m, tile.block_n
        rows = {"m": (*ones, m, width), "n": (*ones, n, width), "r": (1, 1, m)}
        return tuple(rows[letter] for letter in which)

    def keys(tile: Tile, dk: bool, dv: bool) -> Launch:
        return launch(
            "attention_backward_keys", tile, -(-S_k // tile.block_n), H_kv, tiles(tile, "mmnnnnr"),
            (*scales, S_q, S_k, H_kv, *bounds), has_bounds, (dk, dv),
        )  # fmt: skip

    both = [keys(config.keys, True, config.values is None)]
    if config.values is not None:
        both.append(keys(config.values, False, True))
    tile = config.queries
    tail = (packed or S_k % tile.block_n != 0) and not keys_hidden
    queries = launch(
        "attention_backward_queries", tile, -(-S_q // tile.block_m), H, tiles(tile, "mmmnnr"),
        (*scales, S_q, S_k, H, *bounds), has_bounds, (tail,),
    )  # fmt: skip
    found = layouts(q_shape, k_shape, strides, dtype, packed)
    return Call(found, rows_shape, rows_window, rows, tuple(both), queries)


def padding_of(config: BackwardConfig) -> int:
    """What the rows of a sequence are padded to a multiple of: all tiles of queries divide it."""
    return max(tile.block_m for tile in (config.keys, config.queries, config.values) if tile is not None)


def rows_launch(
    q_shape, dtype, device: int, lengths: Lengths | None, padding: int, sums_width: int = 0
) -> tuple[Launch, tuple[int, int, int], tuple]:
    """The launch that computes lse2 and delta, the shape of the memory for them, and its window.

    They are kept for rows that are padded to a multiple of `padding`, so that tiles of that many read them
    without a mask. With a `sums_width` the launch also sets so many float32 for each of these rows to 0.
    """
    B, H, _, S_q, _ = dimensions(q_shape, q_shape, lengths)
    packed = lengths is not None
    rows = min(ROWS, padding)
    # Packed sequence b begins with tile cu_seqlens_q[b] // padding + b, whatever the lengths are.
    heads, tiles = (H, q_shape[0] // padding + B) if packed else (B * H, -(-S_q // padding))
    shape = 2, heads, tiles * padding
    block = (*((1, 1, 1) if packed else (1, 1)), rows, block_d(q_shape[-1]))
    launch = Launch(
        "attention_backward_rows", device, dtype, packed, (shape[1] * shape[2] // rows, 1, 1),
        (block, block), (S_q, q_shape[0] if packed else None, H, B, shape[2]),
        (rows, block[-1], padding, sums_width), (("num_warps", 4),),
    )  # fmt: skip
    return launch, shape, (shape, (shape[1] * shape[2], shape[2], 1))


def run(
    launch: Launch, device: int, tensors: tuple[torch.Tensor, ...], windows: tuple, pointers: tuple
) -> None:
    """windows: (shape, strides) of each of `tensors`, for their descriptors."""
    kind = (launch.kernel, device, launch.dtype, launch.packed, launch.constants, launch.options)
    rest = (*pointers, *launch.scalars, *launch.constants)
    launcher = _compiled.get(kind)
    if launcher is not None:
        launcher.launch(launch.grid, device, tensors, windows, rest)
        return
    from triton.tools.tensor_descriptor import TensorDescriptor

    from attnlib.kernels.portable import backward as kernels

    descriptors = [
        TensorDescriptor(tensor, list(shape), list(strides), list(block))
        for tensor, (shape, strides), block in zip(tensors, windows, launch.blocks, strict=True)
    ]
    compiled = getattr(kernels, launch.kernel)[launch.grid](*descriptors, *rest, **dict(launch.options))
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[kind] = Launcher(compiled)

"""Launch the portable forward kernel: describe the tensors, compile once, then launch in little host time.

`kernel[grid](...)` of Triton binds and hashes every argument at every call, which takes longer than all the
rest. The compiled kernel that it returns launches without that. So the first call of a kind goes the long
way, and later ones go straight to what it compiled (notebook 07 has the times). What follows from the shapes
alone is computed once for each.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch

from attnlib.configs import ForwardConfig, block_d, forward_config
from attnlib.launcher import Launcher

LOG2_E = 1.4426950408889634
LIMIT = 2**31  # numbers of blocks, rows and keys are int32
GRID_YZ = 65535  # programs that a grid may have along y and z
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


class Layouts(NamedTuple):
    """(shape, strides) of Q, K, V and the output as descriptors take them, and the strides of the output."""

    windows: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    out_strides: tuple[int, ...]


def layouts(q_shape, k_shape, q_strides, k_strides, v_strides, dtype: torch.dtype) -> Layouts | None:
    """Layouts of a call; None if a descriptor can't express one of its inputs.

    The output is laid out as `torch.empty_like(q)` where a descriptor can express that, else contiguously.
    """
    like = torch.empty_like(torch.empty_strided(q_shape, q_strides, dtype=dtype, device="meta"))
    if legal(like.shape, like.stride(), dtype) is None:  # a copy of q's odd layout
        like = torch.empty(q_shape, dtype=dtype, device="meta")
    tensors = (q_shape, q_strides), (k_shape, k_strides), (k_shape, v_strides), (q_shape, like.stride())
    windows = tuple((tuple(shape), legal(shape, strides, dtype)) for shape, strides in tensors)
    return None if any(strides is None for _, strides in windows) else Layouts(windows, like.stride())


def outputs(q: torch.Tensor, strides: tuple[int, ...], lse: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memory for out, (B, H, Sq, D), and for the LSE if asked."""
    shape, device = q.shape, q.device
    out = torch.empty_strided(shape, strides, dtype=q.dtype, device=device)
    return out, torch.empty(shape[:3], dtype=torch.float32, device=device) if lse else None


def exp2_scale(sm_scale: float) -> float:
    """What the kernels multiply scores with before exp2: |sm_scale| * log2(e), positive. Zero would turn a
    masked score, -inf, into NaN; a factor as small as this one leaves every weight at exactly 1."""
    return max(abs(sm_scale) * LOG2_E, 2.0**-100)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    sm_scale: float,
    return_lse: bool,
    config: ForwardConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `kernels.forward.attention_forward` on valid arguments, none of them empty; see `attention`.

    q: (B, H, Sq, D); k, v: (B, Hkv, Sk, D). `config` replaces the one that `forward_config` chooses. Returns
    (out, lse); lse is None unless it was asked for. ValueError if a length or the grid is beyond 2^31.
    """
    if q.dtype == torch.bfloat16 and interpreted():  # its bfloat16 dot is wrong (triton 3.6)
        out, lse = forward(q.float(), k.float(), v.float(), causal, sm_scale, return_lse, config)
        return out.bfloat16(), lse
    device = q.get_device()
    if q.is_cuda and device != torch.cuda.current_device():  # Triton launches on the current device
        with torch.cuda.device(device):
            return forward(q, k, v, causal, sm_scale, return_lse, config)
    call = _prepare(
        q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, device,
        causal, sm_scale, return_lse, config,
    )  # fmt: skip
    if call.layouts is None or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        q, k, v = (readable(tensor) for tensor in (q, k, v))
        return forward(q, k, v, causal, sm_scale, return_lse, config)
    windows, out_strides = call.layouts
    out, lse = outputs(q, out_strides, return_lse)
    tensors = q, k, v, out
    launcher = _compiled.get(call.kind)
    if launcher is not None:
        launcher.launch(call.grid, device, tensors, windows, (lse, *call.arguments))
    else:
        kernel = _first_launch(tensors, lse, call)
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
    causal, sm_scale, return_lse, config,
) -> Call:  # fmt: skip
    B, H, S_q, D = q_shape
    _, H_kv, S_k, _ = k_shape
    if config is None:
        config = _choose(D, dtype, device, mean_keys(S_q, S_k, causal))
    width = block_d(D)
    blocks = -(-S_q // config.block_m)
    programs = blocks * B * H
    if max(programs, S_q, S_k) >= LIMIT:
        raise ValueError(
            f"q, k: expected fewer than 2^31 rows, keys and blocks of {config.block_m} rows over all heads, "
            f"got {S_q}, {S_k} and {programs}"
        )
    section = max(n for n in range(1, config.heads_per_section + 1) if H % n == 0)
    grid = (blocks * section, H // section, B)
    flat = max(grid[1:]) > GRID_YZ
    scalars = (exp2_scale(sm_scale), S_q, S_k, H)
    constants = (
        H // H_kv,  # GROUP
        config.block_m,
        config.block_n,
        width,
        causal,
        not causal and S_k % config.block_n != 0,  # HAS_TAIL: the causal mask covers it
        causal and config.block_m == config.block_n and (S_k - S_q) % config.block_n == 0,  # ONE_MASKED_TILE
        causal and S_q > S_k,  # EMPTY_ROWS
        sm_scale < 0,  # FLIP
        return_lse,
        config.order,
        config.q_in_registers,
        section,
        flat,
        config.num_stages,
        "ieee" if dtype == torch.float32 else "tf32",
    )
    found = layouts(q_shape, k_shape, q_strides, k_strides, v_strides, dtype)
    grid = (programs, 1, 1) if flat else grid
    return Call((device, dtype, constants, config), grid, (*scalars, *constants), found, config)


def mean_keys(S_q: int, S_k: int, causal: bool) -> int:
    """Keys that a query sees on average."""
    return S_k - min(S_q, S_k) // 2 if causal else S_k


def configuration(q: torch.Tensor, k: torch.Tensor, causal: bool) -> ForwardConfig:
    """What `forward` chooses for queries and keys like these."""
    return _choose(q.shape[-1], q.dtype, q.get_device(), mean_keys(q.shape[2], k.shape[2], causal))


def _choose(head_dim: int, dtype: torch.dtype, device_index: int, keys: int) -> ForwardConfig:
    arch = None if interpreted() else capability(device_index)
    return forward_config(head_dim, str(dtype).removeprefix("torch."), arch, keys)


def _first_launch(tensors: tuple[torch.Tensor, ...], lse, call: Call):
    """Compile, launch, and return the compiled kernel."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from attnlib.kernels.forward import attention_forward

    config = call.config
    rows = (config.block_m, config.block_n, config.block_n, config.block_m)
    width = block_d(tensors[0].shape[-1])
    descriptors = [
        TensorDescriptor(tensor, list(shape), list(strides), [1, 1, n, width])
        for tensor, (shape, strides), n in zip(tensors, call.layouts.windows, rows, strict=True)
    ]
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.max_registers is not None:
        options["maxnreg"] = config.max_registers
    return attention_forward[call.grid](*descriptors, lse, *call.arguments, **options)


def describable(tensor: torch.Tensor) -> bool:
    """Whether a TMA descriptor can express this (B, H, S, D) layout. The hardware wants addresses in
    multiples of 16 bytes."""
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

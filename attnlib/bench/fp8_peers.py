"""FP8 attention of others, to be timed beside ours: q, k and v are (B, H, S, D) tensors on an H200.

Each function quantizes and prepares, and returns what is timed. It raises ImportError where its library is
not there: two builds of FlashAttention-3 (libraries that register `torch.ops.fa3_fwd.fwd` and
`torch.ops._vllm_fa3_C.fwd`) are looked for as fa3_fwd.so and vllm_fa3.so in the folder ATTNLIB_FA3_FP8,
cuDNN's package `cudnn`, NVIDIA's frontend, also in ATTNLIB_PEERS.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from attnlib.api import quantize_fp8
from attnlib.bench.decode_peers import package

Function = Callable[[], torch.Tensor]
P_SCALE = 256.0
"""What cuDNN multiplies P with before it rounds it."""


@cache
def _forward(library: str, operators: str):
    """The forward operator of one of FlashAttention-3's builds."""
    folder = os.environ.get("ATTNLIB_FA3_FP8")
    path = Path(folder or ".") / f"{library}.so"
    if folder is None or not path.exists():
        raise ImportError(f"ATTNLIB_FA3_FP8 names no folder with {path.name}")
    for runtime in Path(folder).glob("libcudart.so.12*"):
        ctypes.CDLL(str(runtime), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(path))
    return getattr(torch.ops, operators).fwd


def _fa3():
    return _forward("fa3_fwd", "fa3_fwd")


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous()


def _scaled(x: torch.Tensor, scaling: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 as x is laid out, one scale for each head): our quantizing, not rotated."""
    x8 = quantize_fp8(x, "k", scaling=scaling, rotate=False)
    return x8.data, x8.scale[..., 0].contiguous()


def fa3_fp8(q, k, v, causal: bool) -> Function:
    """One scale for each batch element and head; output bfloat16."""
    forward = _fa3()
    data, scales = zip(*(_scaled(x, "head") for x in (q, k, v)), strict=True)
    data = [_tokens_first(x) for x in data]
    options = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    options |= {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal, "num_splits": 1}
    return lambda: forward(*data, **options)[0].transpose(1, 2)


_VLLM = dict.fromkeys(
    ("k_new", "v_new", "q_v", "out", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table",
     "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "scheduler_metadata",
     "pack_gqa", "s_aux", "cp_tot_seqused_k")
)  # fmt: skip
_VLLM |= {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True}
_VLLM |= {"num_splits": 1, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}
"""Arguments of that operator, none of which has a default."""


def vllm_fp8(q, k, v, causal: bool) -> Function:
    """vLLM's build, which adds FP8 products in two levels; as varlen sequences, the only form that it has."""
    forward = _forward("vllm_fa3", "_vllm_fa3_C")
    data, scales = zip(*(_scaled(x, "head") for x in (q, k, v)), strict=True)
    data = [_tokens_first(x).flatten(0, 1) for x in data]
    options = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    for name, x in (("q", q), ("k", k)):
        B, _, S, _ = x.shape
        options[f"cu_seqlens_{name}"] = torch.arange(B + 1, device=x.device, dtype=torch.int32) * S
        options[f"max_seqlen_{name}"] = S
    options |= {**_VLLM, "softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal}
    B, H, S, D = q.shape
    return lambda: forward(*data, **options)[0].view(B, S, H, D).transpose(1, 2)


def fa3_bf16(q, k, v, causal: bool) -> Function:
    """The same build in bfloat16."""
    forward = _fa3()
    data = [_tokens_first(x.bfloat16()) for x in (q, k, v)]
    options = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal, "num_splits": 1}
    return lambda: forward(*data, **options)[0].transpose(1, 2)


def cudnn_fp8(q, k, v, causal: bool) -> Function:
    """One scale for each tensor; output e4m3 with a scale of its own, which a first run finds. What is timed
    returns it as it is; its attribute `finish` turns it into numbers."""
    cudnn = package("cudnn")
    run, out, factor = _cudnn_graph(cudnn, q, k, v, causal, 1.0)
    largest = run()
    factor = 448.0 / max(float(largest), 1e-6)
    run, out, _ = _cudnn_graph(cudnn, q, k, v, causal, factor)

    def call() -> torch.Tensor:
        run()
        return out

    call.finish = lambda x: x.float() / factor
    return call


def _cudnn_graph(cudnn, q, k, v, causal: bool, factor: float):
    """(what runs it and returns the largest output before its scale, its output, the scale)."""
    e4m3, real, device = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT, q.device
    handle = cudnn.create_handle()
    cudnn.set_stream(handle, torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(
        handle=handle, io_data_type=e4m3, intermediate_data_type=real, compute_data_type=real
    )
    memory, nodes = {}, {}
    numbers = {"scale_s": P_SCALE, "descale_s": 1 / P_SCALE, "scale_o": factor}
    for name, x in (("q", q), ("k", k), ("v", v)):
        data, scale = _scaled(x, "tensor")
        data = _tokens_first(data).transpose(1, 2)
        nodes[name] = graph.tensor(
            name=name, dim=tuple(data.shape), stride=tuple(data.stride()), data_type=e4m3
        )
        memory[nodes[name]] = data
        numbers[f"descale_{name}"] = float(scale.flatten()[0])
    for name, value in numbers.items():
        nodes[name] = graph.tensor(name=name, dim=(1, 1, 1, 1), stride=(1, 1, 1, 1), data_type=real)
        memory[nodes[name]] = torch.full((1, 1, 1, 1), value, device=device)
    mask = {}
    if causal:
        mask = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": 0}
    o, _, amax_s, amax_o = graph.sdpa_fp8(
        **nodes, attn_scale=q.shape[-1] ** -0.5, generate_stats=False, **mask
    )
    out = torch.empty_like(memory[nodes["q"]])
    o.set_output(True).set_dim(tuple(out.shape)).set_stride(tuple(out.stride())).set_data_type(e4m3)
    memory[o] = out
    for amax in (amax_s, amax_o):
        amax.set_output(True).set_dim((1, 1, 1, 1)).set_stride((1, 1, 1, 1)).set_data_type(real)
        memory[amax] = torch.zeros(1, 1, 1, 1, device=device)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    space = torch.empty(max(1, graph.get_workspace_size()), device=device, dtype=torch.uint8)

    def run() -> torch.Tensor:
        graph.execute(memory, space, handle=handle)
        return memory[amax_o]

    return run, out, factor

"""Other decoding kernels, to time beside attnlib's: FlashInfer's three, and cuDNN through its frontend, which
takes lengths and pages where PyTorch's attention passes neither.

Each function takes q (B, H, 1, D), caches (B, Hkv, S, D) and lengths (B) int32 or None for full caches; it
copies the caches into the peer's own layout, plans, and returns what is to be timed. ImportError: the peer is
not there. Packages may lie in a folder that ATTNLIB_PEERS names.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

Function = Callable[[], Tensor]
FOLDER = "ATTNLIB_PEERS"
WORKSPACE = 256 << 20  # bytes that FlashInfer is given


class NotInstalled(ImportError):
    """Which package a peer lacks."""


def package(name: str) -> ModuleType:
    folder = os.environ.get(FOLDER)
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package may be there and not fit this one's Python or CUDA
        raise NotInstalled(f"{name}: {error}") from error


class Pages(NamedTuple):
    """Caches (pages, page size, Hkv, D), in a random order, their table (B, N), and the keys of each
    sequence."""

    k: Tensor
    v: Tensor
    table: Tensor
    used: Tensor


def in_pages(k: Tensor, v: Tensor, lengths: Tensor | None, page: int) -> Pages:
    B, Hkv, S, D = k.shape
    if S % page:
        raise ValueError(f"k: expected a multiple of {page} keys, got {S}")
    order = torch.randperm(B * S // page, device=k.device)
    paged = []
    for cache in (k, v):
        to = torch.empty(B * S // page, page, Hkv, D, device=k.device, dtype=k.dtype)
        to[order] = cache.transpose(1, 2).reshape(-1, page, Hkv, D)
        paged.append(to)
    return Pages(*paged, order.int().view(B, -1), _used(k, lengths))


def _used(k: Tensor, lengths: Tensor | None) -> Tensor:
    if lengths is not None:
        return lengths
    return torch.full((len(k),), k.shape[2], dtype=torch.int32, device=k.device)


def _listed(pages: Pages, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """(where each sequence's pages begin (B + 1), the pages of all, keys in the last page of each), as
    FlashInfer is told."""
    counts = (pages.used + page - 1) // page
    begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    listed = torch.cat([row[:n] for row, n in zip(pages.table, counts.tolist(), strict=True)])
    return begins, listed, (pages.used - 1) % page + 1


def flashinfer_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, page: int = 16) -> Function:
    """BatchDecodeWithPagedKVCacheWrapper; on tensor cores where heads share keys."""
    flashinfer = package("flashinfer")
    grouped, pages = q.shape[1] != k.shape[1], in_pages(k, v, lengths, page)
    space = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        space, "NHD", use_tensor_cores=grouped, backend="fa2" if grouped else "auto"
    )
    wrapper.plan(
        *_listed(pages, page), q.shape[1], k.shape[1], q.shape[-1], page,
        q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    rows = q[:, :, 0].contiguous()
    return lambda: wrapper.run(rows, (pages.k, pages.v))[:, :, None]


def flashinfer_persistent(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, page: int = 16
) -> Function:
    """BatchAttention: persistent programs with equal shares of all keys, then a merge."""
    attention = package("flashinfer.attention")
    B, H, _, D = q.shape
    pages, wrapper = in_pages(k, v, lengths, page), attention.BatchAttention("NHD", str(q.device))
    begins, listed, _ = _listed(pages, page)
    rows = torch.arange(B + 1, dtype=torch.int32, device=q.device)
    wrapper.plan(
        rows, begins, listed, pages.used, H, k.shape[1], D, D, page,
        causal=False, sm_scale=D**-0.5, q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    tokens = q[:, :, 0].contiguous()
    return lambda: wrapper.run(tokens, (pages.k, pages.v))[0][:, :, None]


def flashinfer_xqa(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, page: int = 64) -> Function:
    """TensorRT-LLM's XQA kernel."""
    xqa = package("flashinfer.xqa").xqa
    pages, token = in_pages(k, v, lengths, page), q.transpose(1, 2).contiguous()
    out, used = torch.empty_like(token), pages.used.view(torch.uint32).view(-1, 1)
    space = torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device)
    flags = torch.zeros(8 << 20, dtype=torch.uint8, device=q.device).view(torch.uint32)

    def call() -> Tensor:
        xqa(token, pages.k, pages.v, pages.table, used, out, space, flags, k.shape[1], page, kv_layout="NHD")
        return out.transpose(1, 2)

    return call


def cudnn(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None, page: int = 0) -> Function:
    """cuDNN's attention with the lengths on the device; with pages of `page` keys, if there are any."""
    library = package("cudnn")
    B, H, _, D = q.shape
    element = {torch.float16: library.data_type.HALF, torch.bfloat16: library.data_type.BFLOAT16}[q.dtype]
    whole, number = library.data_type.INT32, library.data_type.FLOAT
    handle = library.create_handle()
    library.set_stream(handle, torch.cuda.current_stream().cuda_stream)
    graph = library.pygraph(
        handle=handle, io_data_type=element, intermediate_data_type=number, compute_data_type=number
    )
    given = {}

    def tensor(name: str, x: Tensor, dtype):
        made = graph.tensor(name=name, dim=tuple(x.shape), stride=tuple(x.stride()), data_type=dtype)
        given[made] = x
        return made

    options, used = {}, _used(k, lengths)
    if page:
        pages = in_pages(k, v, used, page)
        table = pages.table.view(B, 1, -1, 1)
        caches = pages.k.transpose(1, 2), pages.v.transpose(1, 2)
        options = {
            "paged_attention_k_table": tensor("k_table", table, whole),
            "paged_attention_v_table": tensor("v_table", table.clone(), whole),
            "paged_attention_max_seq_len_kv": k.shape[2],
        }
    else:
        caches = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    if page or lengths is not None:
        ones = torch.ones(B, 1, 1, 1, dtype=torch.int32, device=q.device)
        options |= {
            "use_padding_mask": True,
            "seq_len_q": tensor("length_q", ones, whole),
            "seq_len_kv": tensor("length_kv", used.view(B, 1, 1, 1), whole),
        }
    named = {name: tensor(name, x, element) for name, x in zip("qkv", (q, *caches), strict=True)}
    result, _ = graph.sdpa(**named, attn_scale=D**-0.5, generate_stats=False, **options)
    out = torch.empty(B, H, 1, D, dtype=q.dtype, device=q.device)
    result.set_output(True).set_dim(tuple(out.shape)).set_stride(tuple(out.stride())).set_data_type(element)
    given[result] = out
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([library.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    space = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)

    def call() -> Tensor:
        graph.execute(given, space, handle=handle)
        return out

    return call

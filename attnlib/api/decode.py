"""`attention_decode()`: check the arguments, then run; for inference, so without a gradient."""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch.autograd import forward_ad

from attnlib.arguments.decode import DecodeOptions, check_decode
from attnlib.arguments.tangents import check_tangents
from attnlib.kernels import DECODERS
from attnlib.params import DecodeParams, mask_window

__all__ = ["attention_decode"]


@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[False] = False,
    split: Literal["none", "fixed", "stream_k"] | int | None = None,
) -> torch.Tensor: ...
@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[True],
    split: Literal["none", "fixed", "stream_k"] | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_decode(
    q, k_cache, v_cache, *,
    lengths=None, page_table=None, causal=True, window=None, sm_scale=None, return_lse=False, split=None,
):  # fmt: skip
    """`attention` of a few new queries to the keys and values in a cache: decoding with a language model.

    The rows of all query heads that share a key/value head form one tile, so that the cache is read once, and
    the keys of a sequence are split over many programs, whose results are merged. Nothing is read from the
    GPU by the host, and the grid does not depend on the values in `lengths` and `page_table`: a captured CUDA
    graph may be replayed after they have changed. Equal calls have equal bits. Scores, running row maximum,
    row sum and output are accumulated in float32. A cache is read where it lies, whatever its strides are;
    fast are those whose last dimension is contiguous and whose other strides and address are multiples of 16
    bytes.

    Inference only: no gradient, no torch.compile, no torch.func. `torch.autocast` has no effect.

    Args:
        q: (B, H, Sq, D), Sq from 1 to 16, the newest tokens of each sequence; float16, bfloat16 or float32;
            D a multiple of 8 up to 256.
        k_cache: (B, Hkv, S, D), in which the keys of the new tokens are already; same dtype and device as
            `q`. Hkv divides H: query heads h*H/Hkv ... share key head h. With `page_table` (pages, Hkv, page
            size, D), the page size a power of two from 16 on. A cache in another order is given as a view,
            such as `cache.transpose(1, 2)`.
        v_cache: like `k_cache`.
        lengths: (B) int32 on the device of `q`: how many keys each sequence has, the new ones among them,
            from 0 on; None where they fill the cache. Read on the device, where they count as at least 0 and
            at most what the cache has room for; those of CPU tensors are checked.
        page_table: (B, N) int32 on the device of `q`: the pages in which sequence b has its keys, in order;
            those beyond its length may be anything. A page may belong to several sequences. Wrong numbers
            are undefined behavior on a GPU; those of CPU tensors are checked.
        causal: query i of sequence b attends to keys 0 .. i + lengths[b] - Sq: the last query stands at the
            last key.
        window: (left, right), as in `attention`: query i, at position p = i + lengths[b] - Sq, attends to
            keys p - left .. p + right only; -1 is no bound. With `causal` the right bound is 0.
        sm_scale: factor on the scores, default 1/sqrt(D), from -1e26 to 1e26.
        return_lse: also return log(sum(exp(sm_scale * Q K^T))) of each row, natural logarithm. With it,
            results over parts of the keys can be merged.
        split: how keys are shared out: "stream_k", each program the same number of tiles over all sequences
            and heads (LeanAttention, arXiv 2405.10480); "fixed", each sequence and head split alike into a
            number that fills the GPU; an int, that number; "none"; or None for what is thought best. All give
            the same result up to rounding; CPU tensors without Triton's interpreter are not split.

    Returns:
        out, (B, H, Sq, D) in the dtype of `q`; with `return_lse` the pair (out, lse), lse (B, H, Sq) float32.
        A row with nothing to attend to gives output 0 and LSE -inf. Keys beyond a length, or out of sight of
        all rows, are not read.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit.
        RuntimeError: a derivative was asked for.
        NotImplementedError: a compiler, a dispatch mode or a transformation of torch.func looks on.

    Example:
        >>> q = torch.randn(2, 32, 1, 128, device="cuda", dtype=torch.float16)
        >>> k, v = (torch.randn(2, 8, 4096, 128, device="cuda", dtype=torch.float16) for _ in range(2))
        >>> lengths = torch.tensor([4096, 1000], dtype=torch.int32, device="cuda")
        >>> out = attention_decode(q, k, v, lengths=lengths)
    """
    if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        _refuse("torch.compile, torch.export or a dispatch mode")
    if torch._C._are_functorch_transforms_active():
        _refuse("torch.func")
    options = DecodeOptions(lengths, page_table, causal, window, sm_scale, return_lse, split)
    check_decode(q, k_cache, v_cache, options)
    if q.is_meta:
        _refuse('device "meta"')
    if torch.is_grad_enabled():
        for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            if tensor.requires_grad:
                raise RuntimeError(
                    f"{name}: expected a tensor that does not require grad, or torch.no_grad(), got one that "
                    "does: attention_decode has no gradient; attention has one"
                )
    if forward_ad._current_level >= 0:
        check_tangents(q, k_cache, v_cache)
    if q.is_neg() or k_cache.is_neg() or v_cache.is_neg():  # a sign that is not in memory, where kernels read
        q, k_cache, v_cache = (x.resolve_neg() for x in (q, k_cache, v_cache))
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    params = DecodeParams(mask_window(causal, window), scale, lengths, page_table, return_lse, split)
    room = k_cache.numel() if page_table is None else k_cache.numel() and page_table.numel()
    if not q.numel() or not room:  # no row, or none with anything to attend to
        out = torch.zeros_like(q)
        lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
    else:
        family = next(family for family in DECODERS.values() if family.unsupported(q, params) is None)
        out, lse = family.forward(q, k_cache, v_cache, params)
    return (out, lse) if return_lse else out


def _refuse(what: str) -> None:
    raise NotImplementedError(
        f"attention_decode under {what}: not supported; call it outside, as in a function with "
        "torch.compiler.disable"
    )

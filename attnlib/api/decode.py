"""`attention_decode()`: check the arguments, then run; for inference, so without a gradient."""

from __future__ import annotations

from typing import Literal, overload

import torch

from attnlib import dispatch, node, torch_ops
from attnlib.api.exact import plain
from attnlib.api.modes import symbolic
from attnlib.arguments.decode import DecodeOptions, check_decode
from attnlib.params import DecodeParams, mask_window

__all__ = ["attention_decode"]


@overload
def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
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
    starts: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[True],
    split: Literal["none", "fixed", "stream_k"] | int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_decode(
    q, k_cache, v_cache, *,
    lengths=None, starts=None, page_table=None, k_scale=None, v_scale=None, causal=True, window=None,
    sm_scale=None, return_lse=False, split=None,
):  # fmt: skip
    """`attention` of a few new queries to the keys and values in a cache: decoding with a language model.

    The rows of all query heads that share a key/value head form one tile, so that the cache is read once, and
    the keys of a sequence are split over many programs, whose results are merged. Nothing is read from the
    GPU by the host, and the grid does not depend on the values in `lengths` and `page_table`: a captured CUDA
    graph may be replayed after they have changed. Equal calls have equal bits. Scores, running row maximum,
    row sum and output are accumulated in float32. A cache is read where it lies, whatever its strides are;
    fast are those whose last dimension is contiguous and whose other strides and address are multiples of 16
    bytes.

    A cache in float8_e4m3fn is half as many bytes to read. Its elements become numbers of the dtype of `q`
    without rounding, and are multiplied in it; the scales are applied in float32, to scores and to sums of
    values. So the only error is that of the cache itself, whose elements have 3 bits after the leading one:
    `(k / k_scale[..., None, None]).clamp(-448, 448).to(torch.float8_e4m3fn)` with k_scale = max|k| / 448 of
    a sequence and head is off by at most 1/16 of each element.

    Memory is halved in every form, time is not: on an H200 one scale for each sequence and head is faster
    than 16 bits. With a scale for each page, pages of 64 keys are faster than the same pages in 16 bits but
    for D = 64, and pages of 16 keys are slower, but for the shortest call that was timed. Chapter 23 has the
    times.

    Inference only: no gradient, no torch.func. `torch.compile(fullgraph=True)` and `torch.export` see it as
    the operator `torch.ops.attnlib.attention_decode`. `torch.autocast` has no effect.

    Args:
        q: (B, H, Sq, D), Sq from 1 to 16, the newest tokens of each sequence; float16, bfloat16 or float32;
            D a multiple of 8 up to 256.
        k_cache: (B, Hkv, S, D), in which the keys of the new tokens are already; on the device of `q`, in
            its dtype, or in float8_e4m3fn beside a `q` in float16 or bfloat16. Hkv divides H: query heads
            h*H/Hkv ... share key head h. With `page_table` (pages, Hkv, page size, D), the page size a
            multiple of 16. A cache in another order is given as a view, such as `cache.transpose(1, 2)`.
        v_cache: like `k_cache`, in the same dtype.
        lengths: (B) int32 on the device of `q`: how many keys each sequence has, the new ones among them,
            from 0 on; None where they fill the cache. Read on the device, where they count as at least 0 and
            at most what the cache has room for; those of CPU tensors are checked.
        starts: (B) int32 on the device of `q`: how many keys at the beginning of each sequence are hidden, as
            where batches are padded on the left; None for 0. They count in `lengths`, and are not read. Their
            values are treated as those of `lengths`.
        page_table: (B, N) int32 on the device of `q`: the pages in which sequence b has its keys, in order;
            those beyond its length may be anything. A page may belong to several sequences. Wrong numbers
            are undefined behavior on a GPU; those of CPU tensors are checked. A tile of keys, whose size is a
            power of two, looks up one page if the page size is a multiple of its own, else one for each key.
        k_scale: of keys in float8_e4m3fn: a key is its elements times this, float32 on the device of `q`; one
            number, shape (), or one for each sequence and head, (B, Hkv), with `page_table` for each page and
            head, (pages, Hkv), which is slower. One for each head alone is a view, such as
            `scale.expand(B, Hkv)`. None for 1.
        v_scale: the same of values.
        causal: query i of sequence b attends to keys 0 .. i + lengths[b] - Sq: the last query stands at the
            last key.
        window: (left, right), as in `attention`: query i, at position p = i + lengths[b] - Sq, attends to
            keys p - left .. p + right only; -1 is no bound. With `causal` the right bound is 0.
        sm_scale: factor on the scores, default 1/sqrt(D), from -1e26 to 1e26.
        return_lse: also return log(sum(exp(sm_scale * Q K^T))) of each row, natural logarithm. With it,
            results over parts of the keys can be merged.
        split: how keys are shared out: "stream_k", each program the same number of tiles over all sequences
            and heads (LeanAttention, arXiv 2405.10480); "fixed", each sequence and head split alike into a
            number that fills the GPU; an int from 1 on, that number; "none"; or None: the library chooses.
            It splits nothing where sequences fill the GPU and are of nearly the same length, which is seen in
            `lengths` on the device. All give the same result up to rounding; CPU tensors without Triton's
            interpreter are not split.

    Returns:
        out, (B, H, Sq, D) in the dtype of `q`; with `return_lse` the pair (out, lse), lse (B, H, Sq) float32.
        A row with nothing to attend to gives output 0 and LSE -inf. Keys beyond a length, or out of sight of
        all rows, are not read.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit.
        RuntimeError: a derivative was asked for.
        NotImplementedError: it is called under `torch.jit.trace` or a transformation of torch.func.

    Example:
        >>> q = torch.randn(2, 32, 1, 128, device="cuda", dtype=torch.float16)
        >>> k, v = (torch.randn(2, 8, 4096, 128, device="cuda", dtype=torch.float16) for _ in range(2))
        >>> lengths = torch.tensor([4096, 1000], dtype=torch.int32, device="cuda")
        >>> out = attention_decode(q, k, v, lengths=lengths)
    """
    tensors = q, k_cache, v_cache, lengths, starts, page_table, k_scale, v_scale
    asked = causal, window, sm_scale, return_lse, False, split
    if not torch.compiler.is_dynamo_compiling():
        results = node.shortcut(*tensors, asked)
        if results is not None:
            return results
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("attention_decode under torch.func: not supported")
    symbols = symbolic()
    options = DecodeOptions(
        lengths, page_table, causal, window, sm_scale, return_lse, split, starts, k_scale, v_scale
    )
    check_decode(q, k_cache, v_cache, options, symbols)
    if torch.is_grad_enabled():
        for name, tensor in zip(_NAMES, tensors, strict=True):
            if tensor is not None and tensor.requires_grad:
                raise RuntimeError(
                    f"{name}: expected a tensor that does not require grad, or torch.no_grad(), got one that "
                    "does: attention_decode has no gradient; attention has one"
                )
    seen = mask_window(causal, window)
    if symbols or not plain(*(x for x in tensors if x is not None)):
        scale = None if sm_scale is None else float(sm_scale)
        # A range has numbers: dynamo puts the value in the place of a symbol, of which it makes no string.
        told = str(range(split).stop) if isinstance(split, int) else split
        given = (lengths, page_table, *seen, scale, return_lse, told, starts, k_scale, v_scale)
        out, lse = torch_ops.attention_decode(q, k_cache, v_cache, *given)
    else:
        scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
        params = DecodeParams(
            seen, scale, lengths, page_table, return_lse, split, None, starts, k_scale, v_scale
        )
        out, lse = dispatch.decode(q, k_cache, v_cache, params)
        node.keep(tensors, asked, params, out)
    return (out, lse) if return_lse else out


_NAMES = "q", "k_cache", "v_cache", "lengths", "starts", "page_table", "k_scale", "v_scale"

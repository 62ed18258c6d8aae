"""`attention_fp8()` and `attention_fp8_varlen()`, and `quantize_fp8()` which makes what they read. For
inference, so without a gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, overload

import torch

from attnlib.api.inference import refuse_derivatives, refuse_transformations
from attnlib.arguments.fp8 import Options, check_fp8, check_offsets_since, check_quantize
from attnlib.arguments.offsets import check_offsets_of
from attnlib.dispatch import first_of
from attnlib.kernels import FP8, QUANTIZERS
from attnlib.kernels.common.fp8 import Fp8, Recipe, Role, Scaling, scaled_by_row
from attnlib.params import Params, Varlen, mask_window

__all__ = ["Fp8", "attention_fp8", "attention_fp8_varlen", "quantize_fp8"]
Operand = torch.Tensor | Fp8


def quantize_fp8(
    x: torch.Tensor,
    role: Role,
    *,
    scaling: Scaling = "block",
    rotate: bool = True,
    center: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> Fp8:
    """A tensor as `attention_fp8` reads it, in float8_e4m3fn: made once for several calls.

    Queries and keys are rotated, as in FlashAttention-3 (arXiv 2407.08608): their rows are multiplied by an
    orthogonal matrix, random signs times a Hadamard matrix over sqrt(D). This leaves Q K^T as it is and
    spreads large entries over the row. Then each block of 64 queries or 128 keys, each head or the tensor is
    divided by a scale that makes its largest magnitude 448, and rounded to the nearest. Values are not
    rotated, and have a scale for each head or one for all; they are transposed.

    Values are centered: their mean over the keys, of each head and column, is subtracted first. The tensor
    cores add up products of FP8 in few bits, which costs most where they have a common part; and what is left
    needs a smaller scale. `attention_fp8` adds the mean to the output, whose weights sum to 1.

    On a GPU of compute capability 8.9 or later and in Triton's interpreter that is one Triton kernel for
    scales of blocks, two where a largest magnitude has to be found first, three for centered values; on other
    devices PyTorch. But for the order of sums in a rotation and a mean both give the same bits. No gradient.

    Args:
        x: (B, H, S, D), or (T, H, D) with `cu_seqlens`; float16, bfloat16 or float32; D a multiple of 8 up to
            256, which is padded with zeros to 64, 128 or 256. An element that is not finite becomes NaN, with
            its row if that is rotated, and takes no part in a scale.
        role: "q", "k" or "v": the operand that it becomes.
        scaling: "block", "head" (of varlen sequences over all of them) or "tensor".
        rotate: whether queries and keys are rotated; both or neither.
        center: whether values are centered; of varlen sequences each by its own mean.
        cu_seqlens, max_seqlen: of varlen sequences, as in `attention_varlen`; the very tensor with which
            `attention_fp8_varlen` is called later.

    Returns:
        an `Fp8`, on the device of `x`: the numbers in float8_e4m3fn, their scales in float32, and the means
        of centered values. Its `shape` and `dtype` are those of `x`.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RuntimeError: a derivative was asked for.
        NotImplementedError: it is called under a compiler, a dispatch mode or a transformation of torch.func.

    Example:
        >>> k8, v8 = quantize_fp8(k, "k"), quantize_fp8(v, "v")
        >>> outs = [attention_fp8(q, k8, v8) for q in queries]
    """
    refuse_transformations("quantize_fp8")
    check_quantize(x, role, Recipe(scaling, rotate, center), cu_seqlens, max_seqlen)
    refuse_derivatives("quantize_fp8", x=x)
    found = None if cu_seqlens is None else check_offsets_of("x", len(x), cu_seqlens, max_seqlen)
    made = _quantized(x, role, Recipe(scaling, rotate, center), cu_seqlens, max_seqlen)
    return made if found is None else replace(made, fingerprint=found.fingerprint)


@overload
def attention_fp8(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[False] = False,
    scaling: Scaling = "block",
    rotate: bool = True,
    center: bool = True,
    out_dtype: torch.dtype | None = None,
    impl: Literal["hopper", "reference"] | None = None,
) -> torch.Tensor: ...
@overload
def attention_fp8(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[True],
    scaling: Scaling = "block",
    rotate: bool = True,
    center: bool = True,
    out_dtype: torch.dtype | None = None,
    impl: Literal["hopper", "reference"] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_fp8(
    q, k, v, *,
    causal=False, window=None, sm_scale=None, return_lse=False, scaling="block", rotate=True, center=True,
    out_dtype=None, impl=None,
):  # fmt: skip
    """`attention` whose two products are of numbers in float8_e4m3fn: faster, and with their rounding errors.

    Tensors are quantized by `quantize_fp8` first, which costs time that grows with S, not S^2; prepared
    operands are taken as they are, in any mix with tensors. Queries of 16 bits with D up to 128 and scaling
    "block" need no such pass: the kernel itself rotates and rounds them, and each row has a scale of its own,
    where a prepared operand has one for 64. The weights P are rounded to float8_e4m3fn as
    well, as 2^offset * P with as large an offset as their range allows. Scores, row maximum, row sum (of the
    weights before rounding) and output are float32. docs/lab/fp8.md has the errors by kinds of input.

    The tensor cores add the products of a sum with about 14 bits. That costs little where terms have both
    signs, and much where they do not: with values of mean 1 and standard deviation 1, 16384 keys and
    `center=False`, the error is 19% of the output (chapter 22, on an H200). Therefore values are centered.
    An error remains where the mean changes along the keys, and under a causal mask or a window, where the
    values that a row sees have another mean than all values, which is the one subtracted (docs/lab/fp8.md).

    Inference only: no gradient, no torch.compile, no torch.func. `torch.autocast` has no effect.

    Args:
        q: (B, H, Sq, D), float16, bfloat16 or float32, D a multiple of 8 up to 256; or an `Fp8` of role "q".
        k: (B, Hkv, Sk, D), or an `Fp8` of role "k". Tensors have the same dtype. Hkv divides H: query heads
            h*H/Hkv ... share key head h.
        v: like `k`, of role "v".
        causal, window, sm_scale, return_lse: as in `attention`.
        scaling, rotate, center: how tensors are quantized, as in `quantize_fp8`. If one of q and k is
            prepared, the other is rotated or not as that one was, whatever `rotate` is.
        out_dtype: of the output; None for that of `q`, or of what `q` was quantized from.
        impl: "hopper" (compute capability 9.x, triton 3.6 to 3.9), "reference" (a model in PyTorch, float64
            but for the same roundings, on any device), or None for "hopper". There is no fallback.

    Returns:
        out, (B, H, Sq, D); with `return_lse` the pair (out, lse), lse (B, H, Sq) float32, of the scores of
        the quantized q and k. A row with nothing to attend to gives output 0 and LSE -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices, operands or options do not fit, or this device can't run it.
        RuntimeError: a derivative was asked for.
        NotImplementedError: it is called under a compiler, a dispatch mode or a transformation of torch.func.

    Example:
        >>> q, k, v = (torch.randn(2, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        >>> out = attention_fp8(q, k, v, causal=True)
    """
    refuse_transformations("attention_fp8")
    options = Options(causal, window, sm_scale, return_lse, scaling, rotate, center, out_dtype, impl)
    check_fp8(q, k, v, options)
    refuse_derivatives("attention_fp8", **_tensors(q=q, k=k, v=v))
    return _call(q, k, v, None, options)


@overload
def attention_fp8_varlen(
    q: Operand,
    k: Operand,
    v: Operand,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[False] = False,
    scaling: Scaling = "block",
    rotate: bool = True,
    center: bool = True,
    out_dtype: torch.dtype | None = None,
    impl: Literal["hopper", "reference"] | None = None,
) -> torch.Tensor: ...
@overload
def attention_fp8_varlen(
    q: Operand,
    k: Operand,
    v: Operand,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[True],
    scaling: Scaling = "block",
    rotate: bool = True,
    center: bool = True,
    out_dtype: torch.dtype | None = None,
    impl: Literal["hopper", "reference"] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_fp8_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *,
    causal=False, window=None, sm_scale=None, return_lse=False, scaling="block", rotate=True, center=True,
    out_dtype=None, impl=None,
):  # fmt: skip
    """`attention_fp8` of sequences of different lengths that lie one after the other, without padding.

    Tensors are (Tq, H, D) and (Tk, Hkv, D), and `cu_seqlens_*` and `max_seqlen_*` as in `attention_varlen`,
    whose rules for the values in `cu_seqlens_*` hold here too. A prepared operand was quantized with the very
    tensor that is given here, which has not changed since. The other arguments are those of `attention_fp8`.

    Returns:
        out, (Tq, H, D); with `return_lse` the pair (out, lse), lse (H, Tq) float32.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as `attention_fp8`; and ValueError as
            `attention_varlen`.

    Example:
        >>> offsets = torch.tensor([0, 100, 1024], dtype=torch.int32, device="cuda")
        >>> q, k, v = (torch.randn(1024, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        >>> out = attention_fp8_varlen(q, k, v, offsets, offsets, 924, 924, causal=True)
    """
    refuse_transformations("attention_fp8_varlen")
    options = Options(causal, window, sm_scale, return_lse, scaling, rotate, center, out_dtype, impl)
    varlen = Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_fp8(q, k, v, options, varlen)
    refuse_derivatives("attention_fp8_varlen", **_tensors(q=q, k=k, v=v))
    found_q = check_offsets_of("q", q.shape[0], cu_seqlens_q, max_seqlen_q)
    found_k = check_offsets_of("k", k.shape[0], cu_seqlens_k, max_seqlen_k)
    check_offsets_since(q, k, v, found_q, found_k)
    return _call(q, k, v, varlen, options)


def _call(q: Operand, k: Operand, v: Operand, varlen: Varlen | None, options: Options):
    """A call with valid arguments."""
    causal, window, sm_scale, return_lse, scaling, rotate, center, out_dtype, impl = options
    family = FP8[impl or next(iter(FP8))]
    lacks = family.unsupported(q.device)
    if lacks is not None:
        name = "attention_fp8" if varlen is None else "attention_fp8_varlen"
        what = f"q: {name}" if impl is None else f"impl: {impl!r}"
        raise ValueError(f"{what} {lacks}; impl='reference' runs on any device")
    out_dtype = out_dtype or q.dtype
    head_dim = q.shape[-1]
    rows, keys = (q.shape[2], k.shape[2]) if varlen is None else varlen.longest(q, k)
    if not math.prod(q.shape) or not math.prod(k.shape):  # no row, or none with anything to attend to
        lse_shape = q.shape[:3] if varlen is None else q.shape[1::-1]
        out = torch.zeros(q.shape, dtype=out_dtype, device=q.device)
        lse = torch.full(lse_shape, -math.inf, dtype=torch.float32, device=q.device)
        return (out, lse) if return_lse else out
    rotate = next((x.rotated for x in (q, k) if isinstance(x, Fp8)), rotate)
    recipe = Recipe(scaling, rotate, center)
    of_q, of_k = ((None, None),) * 2 if varlen is None else (varlen[0::2], varlen[1::2])
    q = _plain(q) if scaled_by_row(q, scaling) else _prepared(q, "q", recipe, of_q)
    k, v = _prepared(k, "k", recipe, of_k), _prepared(v, "v", recipe, of_k)
    scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
    seen = mask_window(causal, window).clipped(rows, keys)
    params = Params(seen, scale, varlen, return_lse, impl=impl)
    out, lse = family.forward(q, k, v, params, out_dtype)
    return (out, lse) if return_lse else out


def _tensors(**operands: Operand) -> dict[str, torch.Tensor]:
    """What a derivative may be asked of: tensors, and those of a prepared operand, which its user may have
    replaced."""
    found: dict[str, torch.Tensor] = {}
    for name, x in operands.items():
        if isinstance(x, Fp8):
            parts = ("data", "scale", "mean") if x.centered else ("data", "scale")
            found |= {f"{name}.{part}": getattr(x, part) for part in parts}
        else:
            found[name] = x
    return found


def _prepared(x: Operand, role: Role, recipe: Recipe, lengths: tuple) -> Fp8:
    return x if isinstance(x, Fp8) else _quantized(x, role, recipe, *lengths)


def _quantized(x: torch.Tensor, role: Role, recipe: Recipe, cu_seqlens, max_seqlen) -> Fp8:
    family = first_of(QUANTIZERS, None, x.device)
    return family.quantize(_plain(x), role, recipe, cu_seqlens, max_seqlen)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor as they lie in memory."""
    return x.detach().resolve_neg()

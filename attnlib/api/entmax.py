"""`attention_entmax()`: check the arguments, then run, differentiably and for compilers."""

from __future__ import annotations

from typing import Literal, overload

import torch

from attnlib import torch_ops
from attnlib.api.exact import plain
from attnlib.api.modes import symbolic
from attnlib.arguments.entmax import EntmaxOptions, check_entmax
from attnlib.arguments.offsets import check_offsets
from attnlib.params import Varlen

__all__ = ["attention_entmax", "attention_entmax_varlen"]


@overload
def attention_entmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    alpha: float = 1.5,
    causal: bool = False,
    sm_scale: float | None = None,
    return_tau: Literal[False] = False,
    impl: Literal["triton", "reference"] | None = None,
) -> torch.Tensor: ...
@overload
def attention_entmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    alpha: float = 1.5,
    causal: bool = False,
    sm_scale: float | None = None,
    return_tau: Literal[True],
    impl: Literal["triton", "reference"] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_entmax(
    q, k, v, *, alpha=1.5, causal=False, sm_scale=None, return_tau=False, impl=None
):  # fmt: skip
    """entmax(sm_scale * Q K^T) V: attention whose weights are exactly 0 where scores are low.

    The weights of a row are p_j = [(alpha - 1) z_j - tau]_+^(1 / (alpha - 1)), where z are its scaled scores
    and tau is the threshold that makes their sum 1. alpha = 2 is sparsemax, and for alpha -> 1 the weights
    tend to those of softmax. Two passes over Q K^T find the keys that can have weight; all that follows, in
    the backward pass too, goes by lists of these (AdaSplash, arXiv 2502.12082, walks along blocks of keys).
    Nothing is read from the GPU by the host: CUDA graphs may capture it.

    Differentiable, in q, k and v, once; equal bits from run to run. `torch.compile(fullgraph=True)` sees it
    as the operator `torch.ops.attnlib.attention_entmax`. `torch.autocast` has no effect. For the backward
    pass `out` and S_q * S_k / 256 bytes a head are kept. Sequences of different lengths in one tensor:
    `attention_entmax_varlen`.

    Args:
        q: (B, H, Sq, D), float16, bfloat16 or float32; D a multiple of 8 up to 256.
        k: (B, Hkv, Sk, D), same dtype and device as `q`. Hkv divides H: query heads h*H/Hkv ... share key
            head h.
        v: like `k`.
        alpha: from 1 + 2^-10 to 2; a Python number. 1.5 and 2 have closed forms and are faster.
        causal: query i attends to keys 0 .. i + Sk - Sq: the last query stands at the last key.
        sm_scale: factor on the scores, default 1/sqrt(D), from -1e26 to 1e26.
        return_tau: also return the threshold of each row.
        impl: "triton"; "reference", bisection in fp64; None: "triton" where it runs, on CUDA tensors, or with
            TRITON_INTERPRET=1 set before triton is imported, else "reference".

    Returns:
        out, (B, H, Sq, D) in the dtype of `q`; with `return_tau` the pair (out, tau), tau (B, H, Sq) float32,
        through which no gradient flows. A row with nothing to attend to gives output 0 and tau +inf.

    NaN or infinity in a key reaches output, tau and gradient of the rows that see it, and no other; gradients
    of keys and values leave such rows out. tau is a float32 at most 1 below the highest (alpha - 1) *
    sm_scale * q.k of a row: where that is beyond 1e5 results lose digits, beyond 1e6 by percents, and from
    some 1e7 on a row may have no threshold between two numbers, and is NaN.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or `impl` can't run the call.
        RuntimeError: a second or a forward-mode derivative was asked for.
        NotImplementedError: it is called under a transformation of torch.func.

    Example:
        >>> q, k, v = (torch.randn(1, 16, 4096, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        >>> out = attention_entmax(q, k, v, causal=True)
    """
    options = EntmaxOptions(alpha, causal, sm_scale, return_tau, impl)
    return _call("attention_entmax", q, k, v, options)


@overload
def attention_entmax_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    alpha: float = 1.5,
    causal: bool = False,
    sm_scale: float | None = None,
    return_tau: Literal[False] = False,
    impl: Literal["triton", "reference"] | None = None,
) -> torch.Tensor: ...
@overload
def attention_entmax_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    alpha: float = 1.5,
    causal: bool = False,
    sm_scale: float | None = None,
    return_tau: Literal[True],
    impl: Literal["triton", "reference"] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_entmax_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *,
    alpha=1.5, causal=False, sm_scale=None, return_tau=False, impl=None,
):  # fmt: skip
    """`attention_entmax` of sequences of different lengths that lie one after the other, without padding.

    Tensors are (Tq, H, D) and (Tk, Hkv, D), and `cu_seqlens_*` and `max_seqlen_*` as in `attention_varlen`,
    whose rules for the values in `cu_seqlens_*` hold here too. All that `attention_entmax` says holds for
    each sequence, with Sq and Sk its own lengths. For the backward pass `out` and some (Tq * max_seqlen_k +
    Tk * max_seqlen_q) / 512 bytes a head are kept: the longest lengths and no more take the least memory.

    Returns:
        out, (Tq, H, D) in the dtype of `q`; with `return_tau` the pair (out, tau), tau (H, Tq) float32.

    Raises:
        TypeError, ValueError, RuntimeError, NotImplementedError: as `attention_entmax`; and ValueError as
            `attention_varlen`.

    Example:
        >>> offsets = torch.tensor([0, 100, 1024], dtype=torch.int32, device="cuda")
        >>> q, k, v = (torch.randn(1024, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        >>> out = attention_entmax_varlen(q, k, v, offsets, offsets, 924, 924, causal=True)
    """
    options = EntmaxOptions(alpha, causal, sm_scale, return_tau, impl)
    varlen = Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _call("attention_entmax_varlen", q, k, v, options, varlen)


def _call(name: str, q, k, v, options: EntmaxOptions, varlen: Varlen | None = None):
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError(f"{name} under torch.func: not supported; use torch.autograd")
    check_entmax(q, k, v, options, symbolic(), varlen)
    if varlen is not None and not torch.compiler.is_dynamo_compiling() and plain(q, k, v, *varlen[:2]):
        check_offsets(q, k, varlen)
    alpha, causal, sm_scale, return_tau, impl = options
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    scale = None if sm_scale is None else float(sm_scale)
    out, tau, _ = torch_ops.attention_entmax(
        q, k, v, float(alpha), causal, scale, wanted, impl, *(varlen or (None, None, 0, 0))
    )
    return (out, tau) if return_tau else out

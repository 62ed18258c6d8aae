"""`attention()` and `attention_varlen()`: check the arguments, then run, differentiably and for compilers.
`explain()`: what runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, overload

import torch

from attnlib import dispatch, node, torch_ops
from attnlib.api.modes import symbolic
from attnlib.arguments.common import type_name
from attnlib.arguments.exact import Options, check, check_varlen
from attnlib.arguments.offsets import check_offsets
from attnlib.autograd import Asked, Attention
from attnlib.block_mask import BlockMask
from attnlib.block_mask.of_torch import of_torch
from attnlib.dispatch import Choice
from attnlib.params import Implementation, MaskWindow, Params, Varlen, mask_window
from attnlib.scored_call import masked, refuse_functions, run
from attnlib.scores import Score, given_parts, parts_of

__all__ = ["Choice", "Window", "attention", "attention_varlen", "explain"]
Window = tuple[int, int]


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[False] = False,
    block_mask: BlockMask | torch.nn.attention.flex_attention.BlockMask | None = None,
    score: Score | None = None,
    deterministic: bool = False,
    impl: Implementation | None = None,
) -> torch.Tensor: ...
@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[True],
    block_mask: BlockMask | torch.nn.attention.flex_attention.BlockMask | None = None,
    score: Score | None = None,
    deterministic: bool = False,
    impl: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q, k, v, *, causal=False, window=None, sm_scale=None, return_lse=False, block_mask=None, score=None,
    deterministic=False, impl=None,
):  # fmt: skip
    """Exact scaled dot-product attention, softmax(sm_scale * Q K^T) V, forward and backward.

    Scores, running row maximum, row sum and output are accumulated in float32. On Hopper, inputs whose layout
    TMA cannot read (last dimension not contiguous, another stride or the address not a multiple of 16 bytes,
    an expanded dimension) are computed by the portable kernel, which copies them once. Give grouped heads as
    they are, not expanded.

    It works with: gradients of q, k and v (first derivatives; the memory for them grows with S, not S^2);
    `torch.compile(fullgraph=True)` and `torch.export`, with dynamic shapes, as the operator
    `torch.ops.attnlib.attention_forward`, with a score `attention_scored`; `torch.autocast`, which casts the
    inputs as it does for PyTorch's own attention; `torch.utils.checkpoint`, `torch.func.grad` and
    `torch.vmap`; CUDA graphs; tensors on device "meta", for which it computes shapes.

    Args:
        q: (B, H, Sq, D); float16, bfloat16 or float32; D a multiple of 8 up to 256. Any Sq from 0 on.
        k: (B, Hkv, Sk, D), same dtype and device as `q`. Hkv divides H: query heads h*H/Hkv ... share key
            head h.
        v: (B, Hkv, Sk, Dv); Dv a multiple of 8 up to 256: D in most models, 128 beside a D of 192 in those
            with latent attention. With a `block_mask` or a `score` it is D.
        causal: query i attends to keys 0 .. i + Sk - Sq (aligned at the bottom right, as in FlashAttention
            2.1 on).
        window: (left, right): query i, at position p = i + Sk - Sq, attends to keys p - left .. p + right
            only. -1 is no bound on that side. With `causal` the right bound is 0.
        sm_scale: factor on the scores, default 1/sqrt(D), from -1e26 to 1e26: within that, scores of finite
            float16 q and k are finite in float32, in which they are computed. A score that is not, as larger
            q and k can make it, counts as infinite. The backward pass computes the weights from the LSE, with
            a relative error of about 1e-7 times the magnitude of the scores: beyond 1e4 it begins to matter.
        return_lse: also return log(sum(exp(sm_scale * Q K^T))) of each row, natural logarithm. No gradient
            flows through it.
        block_mask: an `attnlib.BlockMask`: query i sees key j where the mask says so, and only if `causal`
            and `window` allow it too. The work is proportional to the blocks that are seen. The first call
            with a mask and a window makes the mask of both, which waits for the GPU and is kept. Or a
            `torch.nn.attention.flex_attention.BlockMask`, as FlexAttention takes it: the first call with it
            makes an `attnlib.BlockMask` of it, which is kept with it. Under `torch.compile` a graph breaks
            there; with `fullgraph=True` and in `torch.export` it is refused.
        score: an `attnlib.Score`: a soft cap, ALiBi, attention sinks, a bias, a function of your own. Such a
            call runs in the kernels for block masks. It has gradients of sinks and bias, too, and no
            `torch.vmap`. A compiled graph takes a function of your own in a score that is made outside of it.
            The LSE includes the sink; a row that sees nothing has the sink's alone.
        deterministic: gradients that are equal bit by bit from run to run; so they are too where
            `torch.use_deterministic_algorithms` is on. The forward pass always is. On Hopper the backward
            pass then takes more time, and causal calls with grouped heads of 512 rows and more take about
            8 * B * H * S_k * D bytes more memory. A learned bias that queries or keys share, or a learned
            `relative`, has no fast kernel: the backward pass runs in PyTorch in float64, with memory for all
            scores.
        impl: "decode" (1 to 16 queries, no block mask, the forward pass alone; the keys are split over the
            whole GPU), "hopper" (float16 or bfloat16 on a GPU of compute capability 9.x, in layouts that TMA
            can read; triton 3.6 to 3.9), "triton" (a CUDA GPU, or a CPU with TRITON_INTERPRET=1), "reference"
            (PyTorch in float64, any device), or None: the first of these that can run the call, but "decode"
            only for so many keys that it is faster, and not "hopper" for the shortest sequences. An explicit
            choice never falls back to another. `explain` tells what a call would run.

    Returns:
        out, (B, H, Sq, Dv) in the dtype of `q`; with `return_lse` the pair (out, lse), lse (B, H, Sq)
        float32. A row with nothing to attend to gives output 0, LSE -inf and gradient 0. NaN or infinity in q
        or k reaches the rows that see it and no others. In v it reaches its column in the rows that see it,
        and may put NaN into this column of other rows that are computed in one block with them (0 * inf is
        NaN; PyTorch's dense computation does that to every row). Gradients of any row of the head may be NaN
        then.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices, `window`, `block_mask`, `score`, `sm_scale` or `impl` do not fit.
        RuntimeError: a second or a forward-mode derivative was asked for; or one by `torch.func` within
            `torch.compile` or a dispatch mode, as FLOP counters are.
        NotImplementedError: it is called under `torch.jit.trace`; under `torch.vmap` with a score, or with a
            block mask for each batch element; under `torch.func.functionalize` together with `torch.func`'s
            `grad`, `vjp` or `jvp`; or a compiled graph makes a score with a function of your own.

    Example:
        >>> q, k, v = (torch.randn(2, 16, 1024, 128, device="cuda", dtype=torch.float16) for _ in range(3))
        >>> out = attention(q, k, v, causal=True)
    """
    asked = causal, window, sm_scale, return_lse, deterministic, impl
    if block_mask is None and score is None and not torch.compiler.is_dynamo_compiling():
        results = node.shortcut(q, k, v, asked)
        if results is not None:
            return results
    if torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q, k, v)
    symbols = symbolic()
    options = Options(*asked, of_torch(block_mask, q), score)
    check(q, k, v, options, symbols, own_values=True)
    if symbols or not plain(q, k, v, *_parts(score)):
        return _operator(q, k, v, None, options)
    return _call(q, k, v, None, options)


@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[False] = False,
    deterministic: bool = False,
    impl: Implementation | None = None,
) -> torch.Tensor: ...
@overload
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Window | None = None,
    sm_scale: float | None = None,
    return_lse: Literal[True],
    deterministic: bool = False,
    impl: Implementation | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *,
    causal=False, window=None, sm_scale=None, return_lse=False, deterministic=False, impl=None,
):  # fmt: skip
    """`attention` of sequences of different lengths that lie one after the other, without padding.

    Rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q attend to rows cu_seqlens_k[b] ..
    cu_seqlens_k[b + 1] - 1 of k and v, and to no others. All that `attention` says holds for each sequence,
    with Sq and Sk its own lengths. Not under `torch.vmap`.

    The values in `cu_seqlens_*` are checked. On a GPU that means to read them, and so to wait for the GPU, at
    the first call with a tensor and after each change of it (at every call, if it was made under
    `torch.inference_mode`): use a batch's two tensors for all layers. Inside of `torch.compile` and while a
    CUDA graph is captured values on a GPU can't be read, and wrong ones are undefined behavior.

    Args:
        q: (Tq, H, D), the queries of all sequences; dtypes and D as in `attention`.
        k: (Tk, Hkv, D).
        v: (Tk, Hkv, Dv).
        cu_seqlens_q: (B + 1) int32, on the device of `q`: 0, then the running sum of the lengths, up to Tq. A
            length may be 0.
        cu_seqlens_k: (B + 1) int32, likewise up to Tk.
        max_seqlen_q: the length of the longest sequence of queries, or more.
        max_seqlen_k: the same of keys.
        causal, window, sm_scale, return_lse, deterministic, impl: as in `attention`.

    Returns:
        out, (Tq, H, Dv) in the dtype of `q`; with `return_lse` the pair (out, lse), lse (H, Tq) float32.

    Raises:
        TypeError, ValueError, RuntimeError: as `attention`; and ValueError if `cu_seqlens_*` do not start at
            0, go down, do not end at the number of tokens, or have a longer sequence than `max_seqlen_*`.
        NotImplementedError: as `attention`; and under `torch.vmap`.

    Example:
        >>> offsets = torch.tensor([0, 100, 1024], dtype=torch.int32, device="cuda")
        >>> q, k, v = (torch.randn(1024, 16, 128, device="cuda", dtype=torch.float16) for _ in range(3))
        >>> out = attention_varlen(q, k, v, offsets, offsets, 924, 924, causal=True)
    """
    if torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q, k, v)
    symbols = symbolic()
    options = Options(causal, window, sm_scale, return_lse, deterministic, impl)
    varlen = Varlen(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    check_varlen(q, k, v, varlen, options, symbols)
    if torch.compiler.is_dynamo_compiling() or not plain(q, k, v, *varlen[:2]):
        return _operator(q, k, v, varlen, options)
    if symbols:
        check_offsets(q, k, varlen)
        return _operator(q, k, v, varlen, options)
    return _call(q, k, v, varlen, options)


def _call(q, k, v, varlen: Varlen | None, options: Options):
    """A call with tensors that have memory, differentiated or not."""
    functorch = torch._C._are_functorch_transforms_active()
    if functorch and _functionalized():
        return _operator(q, k, v, varlen, options)
    cu_seqlens_q = cu_seqlens_k = lengths = None
    if varlen is not None:
        check_offsets(q, k, varlen)
        cu_seqlens_q, cu_seqlens_k = (x.resolve_neg().contiguous() for x in varlen[:2])
        lengths = varlen[2:]
    return_lse, impl, score = options.return_lse, options.impl, options.score
    if score is not None:
        results = run(q, k, v, score, _params(q, k, options, return_lse))
        return results if return_lse else results[0]
    differentiable = functorch or _differentiable(q, k, v)
    params = _params(q, k, options, return_lse or differentiable)
    asked = Asked(params, lengths)
    if not differentiable:
        results = dispatch.forward(q, k, v, asked.of(cu_seqlens_q, cu_seqlens_k))
    else:
        if impl is not None and not functorch:  # an error now rather than in the backward pass
            dispatch.resolve(q, k, v, asked.of(cu_seqlens_q, cu_seqlens_k), backward=True)
        # A mask's tensors are not among those that `node.cpp` launches with.
        attend = Attention.apply if functorch or params.block_mask is not None else node.attend
        results = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, asked)
    if varlen is None and params.block_mask is None and not functorch:
        node.keep((q, k, v), options[:-2], asked, results[0])
    return results if return_lse else results[0]


def _params(q, k, options: Options, return_lse: bool) -> Params:
    """What a call asks for, but for its offsets and the parts of its score. A call with a score gets a block
    mask if it has none, and where there is one the window is part of it."""
    seen, mask = mask_window(options.causal, options.window), options.block_mask
    if options.score is not None:
        mask = masked(mask, seen, q, k)
    elif mask is not None:
        mask = mask.within(seen)
    if mask is not None:
        seen = MaskWindow(None, None)
    sm_scale = q.shape[-1] ** -0.5 if options.sm_scale is None else float(options.sm_scale)
    return Params(seen, sm_scale, None, return_lse, options.deterministic, options.impl, block_mask=mask)


# ---------------------------------------------------------------- the ways of a call


def autocast(*tensors) -> tuple:
    """The tensors as PyTorch's own attention would get them under `torch.autocast`."""
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return tensors  # `check` raises the error
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype, keep = torch.get_autocast_dtype(kind), torch.float64
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != keep else x for x in tensors)


def plain(first: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether all of them, on one device, have memory of their own that a kernel can read: not on device
    "meta", not of a class that stands for other tensors (FakeTensor, DTensor)."""
    if first.is_meta:
        return False
    for x in (first, *others):
        if type(x) is not torch.Tensor and type(x).__torch_dispatch__ is not _NO_DISPATCH:
            return False
    return True


def _parts(score: Score | None) -> tuple[torch.Tensor, ...]:
    """The tensors of a score."""
    parts = () if score is None else (score.alibi, score.sinks, score.bias, score.relative)
    return tuple(part for part in parts if part is not None)


_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


def _differentiable(*tensors: torch.Tensor) -> bool:
    """Whether autograd has to record a call with these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _functionalized() -> bool:
    """Whether `torch.func.functionalize` is among the transformations that are on: it has a rule for
    operators and none for functions of autograd."""
    kinds, kind = {level.key() for level in torch._C._functorch.get_interpreter_stack()}, _TransformType
    if kind.Functionalize in kinds and not kinds.isdisjoint((kind.Grad, kind.Jvp)):
        raise NotImplementedError(
            "attention under torch.func.functionalize together with torch.func.grad, vjp or jvp: not "
            "supported; leave functionalize out"
        )
    return kind.Functionalize in kinds


_TransformType = torch._C._functorch.TransformType


def _operator(q, k, v, varlen: Varlen | None, options: Options):
    """The call as the one operator that compilers, exporters and dispatch modes see."""
    causal, window, sm_scale, return_lse, deterministic, impl, mask, score = options
    learned = () if score is None else (x for x in (score.sinks, score.bias, score.relative) if x is not None)
    lse_needed = return_lse or _differentiable(q, k, v, *learned)
    scale = None if sm_scale is None else float(sm_scale)
    handle = None if mask is None else mask.handle
    asked = *mask_window(causal, window), scale, handle, lse_needed, deterministic, impl
    if score is not None:
        refuse_functions(score)
        parts = given_parts(score, q, k)
        given = parts.alibi, parts.sinks, parts.bias, parts.soft_cap, parts.diagonal, score.functions
        out, lse = torch_ops.attention_scored(q, k, v, *given, *asked)
    else:
        out, lse = torch_ops.attention_forward(q, k, v, *(varlen or (None, None, 0, 0)), *asked)
    return (out, lse) if return_lse else out


# ---------------------------------------------------------------- what runs


def explain(
    q, k, v, *, causal=False, window=None, sm_scale=None, return_lse=False, block_mask=None, score=None,
    deterministic=False, impl=None,
) -> Choice:  # fmt: skip
    """Which kernel `attention` would run with these arguments, with which configuration, and why.

    Nothing is computed or compiled. Arguments and errors are those of `attention`; tensors without memory
    run nowhere, and are refused. Under `torch.autocast` it is of the dtype that a call gets there.

    Returns:
        an `attnlib.api.Choice`: the kernel, its configuration, the reason, and the window without bounds that
        no row reaches. It is of the forward pass.

    Raises:
        TypeError, ValueError: as `attention`; ValueError for tensors without memory.
        NotImplementedError: it is called under torch.compile.

    Example:
        >>> print(explain(*torch.zeros(3, 1, 1, 64, 128)))
        reference: triton needs CUDA tensors, or TRITON_INTERPRET=1 set before triton is imported; q is on cpu
    """
    if torch.compiler.is_dynamo_compiling():
        raise NotImplementedError("explain under torch.compile: not supported; call it outside")
    asked = causal, window, sm_scale, return_lse, deterministic, impl
    options = Options(*asked, of_torch(block_mask, q), score)
    if torch._C._is_any_autocast_enabled():
        q, k, v = autocast(q, k, v)
    check(q, k, v, options, own_values=True)
    if not plain(q, k, v):
        got = "meta" if q.is_meta else type_name(q)
        raise ValueError(f"q: expected a device on which kernels run, got {got}")
    params = _params(q, k, options, return_lse)
    if score is not None:
        params = params._replace(score=parts_of(score, q, k))
    choice = dispatch.resolve(q, k, v, params)
    if impl is not None and score is None and _differentiable(q, k, v):
        dispatch.resolve(q, k, v, params, backward=True)  # the error that `attention` raises
    if dispatch.nothing_to_do(q, k):
        choice = replace(choice, reason=f"{choice.reason}; nothing to compute, so nothing is launched")
    return choice

"""`attention_bsfa()` and `bsfa_threshold()`: check the arguments, then run; for inference, so without a
gradient."""

from __future__ import annotations

from typing import Literal

import torch

from attnlib import dispatch, torch_ops
from attnlib.api.exact import plain
from attnlib.api.inference import refuse_derivatives, refuse_transformations
from attnlib.api.modes import symbolic
from attnlib.arguments.bsfa import BsfaOptions, check_bsfa, check_bsfa_threshold, check_finite
from attnlib.kernels import BSFA
from attnlib.kernels.common.bsfa import always_kept
from attnlib.params import BsfaParams

__all__ = ["attention_bsfa", "bsfa_threshold"]


def attention_bsfa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    threshold: float | torch.Tensor,
    causal: bool = True,
    sm_scale: float | None = None,
    return_lse: bool = False,
    return_kept: bool = False,
    impl: Literal["hopper", "triton", "reference"] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attention to the blocks of keys that have a high score (Block-Sparse FlashAttention, arXiv 2512.07011).

    All scores sm_scale * Q K^T are computed, in blocks of 64 queries and 128 keys. A block whose largest
    score is below the threshold is skipped: no exponential, no values, no second product. The softmax is that
    over the keys of kept blocks, so skipped keys are not in its sum either. The blocks that hold the last key
    of one of their queries are always kept. At most half of the work of both products is saved.

    With a threshold of -inf it is `attention`, and with +inf each query sees its last block alone. Between
    the two the error depends on the inputs, and chapter 31 measures it: where few blocks have high scores it
    is small; of N(0, 1) scores all blocks are alike, and there is nothing to skip. `bsfa_threshold` finds
    thresholds for a number of kept blocks.

    Inference only: no gradient, no torch.func. `torch.compile(fullgraph=True)` sees it as the operator
    `torch.ops.attnlib.attention_bsfa`. `torch.autocast` has no effect. Equal calls have equal bits, nothing
    is read by the host, and CUDA graphs can capture a call.

    Args:
        q: (B, H, Sq, D), float16 or bfloat16; D 64 or 128.
        k: (B, Hkv, Sk, D), same dtype and device as `q`. Hkv divides H: query heads h*H/Hkv ... share key
            head h.
        v: like `k`.
        threshold: in units of scaled scores: one number, or float32 on the device of `q`: (H), a number for
            each head; (H, N), for each block of 64 queries, the last one for all blocks after it; or
            (B, H, N). A threshold of NaN skips nothing.
        causal: query i attends to keys 0 .. i + Sk - Sq: the last query stands at the last key.
        sm_scale: factor on the scores, default 1/sqrt(D), from -1e26 to 1e26.
        return_lse: also return log(sum(exp(sm_scale * Q K^T))) of each row over the keys of kept blocks.
        return_kept: also return which blocks were kept.
        impl: "hopper", a kernel for compute capability 9.x; "triton", which runs on every GPU and in Triton's
            interpreter; "reference", which is PyTorch in fp64 with memory for all scores; None for the first
            that can run the call.

    Returns:
        out, (B, H, Sq, D) in the dtype of `q`; with `return_lse` or `return_kept` a tuple (out, lse), (out,
        kept) or (out, lse, kept): lse (B, H, Sq) float32, kept (B, H, ceil(Sq / 64), ceil(Sk / 128)) bool. A
        row with nothing to attend to gives output 0 and LSE -inf. Keys that are NaN count in a block's
        maximum only if all of its scores are.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit, or `impl` can't run the call.
        RuntimeError: a derivative was asked for.
        NotImplementedError: it is called under a transformation of torch.func.

    Example:
        >>> q, k, v = (torch.randn(1, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        >>> threshold = bsfa_threshold(q, k, kept=8)
        >>> out = attention_bsfa(q, k, v, threshold=threshold)
    """
    if torch._C._are_functorch_transforms_active():
        raise NotImplementedError("attention_bsfa under torch.func: not supported")
    symbols = symbolic()
    check_bsfa(q, k, v, BsfaOptions(threshold, causal, sm_scale, return_lse, return_kept, impl), symbols)
    for name, x in (("q", q), ("k", k), ("v", v), ("threshold", threshold)):
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name}: expected a tensor that does not require grad, or torch.no_grad(), got one that "
                "does: attention_bsfa has no gradient; attention has one"
            )
    limits = _limits(threshold, q)
    if symbols or not plain(q, k, v, limits):
        scale = None if sm_scale is None else float(sm_scale)
        asked = (limits, causal, scale, return_lse, return_kept, impl)
        out, lse, kept = torch_ops.attention_bsfa(q, k, v, *asked)
    else:
        scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
        params = BsfaParams(limits, causal, scale, return_lse, return_kept)
        out, lse, kept = dispatch.bsfa(q, k, v, params, impl)
    found = (out, *((lse,) if return_lse else ()), *((kept,) if return_kept else ()))
    return found if len(found) > 1 else out


def _limits(threshold: float | torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(B or 1, H or 1, N)."""
    if not isinstance(threshold, torch.Tensor):
        return q.new_full((1, 1, 1), threshold, dtype=torch.float32)
    if threshold.dim() == 1:
        return threshold[None, :, None]
    return threshold[None] if threshold.dim() == 2 else threshold


def bsfa_threshold(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    kept: int | float,
    causal: bool = True,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """Thresholds for `attention_bsfa`, of one batch of examples.

    For each head and block of 64 queries: the mean, over the examples of the batch, of the number halfway
    between the largest score of the last block to be kept and that of the first to be skipped. Blocks that
    are always kept do not count. Inputs with other scores keep other numbers of blocks; `return_kept` of
    `attention_bsfa` tells how many.

    Args:
        q: (B, H, Sq, D), as in `attention_bsfa`.
        k: (B, Hkv, Sk, D).
        kept: how many of the blocks that can be skipped a block of queries is to keep: an int, that number
            (fewer where there are fewer); a float from 0 to 1, that share of them, rounded to the nearest
            whole number.
        causal, sm_scale: as in `attention_bsfa`.

    Returns:
        (H, ceil(Sq / 64)) float32: -inf where all blocks are to be kept, +inf where none is.

    Raises:
        TypeError, ValueError, RuntimeError: as `attention_bsfa`.
        ValueError: an example has a NaN or an infinity in q or k, whose scores have no order.
        NotImplementedError: it is called under torch.compile, or under a transformation of torch.func.
    """
    refuse_transformations("bsfa_threshold")
    check_bsfa_threshold(q, k, kept, causal, sm_scale)
    refuse_derivatives("bsfa_threshold", q=q, k=k)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    params = BsfaParams(torch.empty(0), causal, scale)
    (B, H, S_q, _), S_k = q.shape, k.shape[2]
    first, _ = always_kept(S_q, S_k, causal, q.device)
    if not q.numel() or not k.numel():
        return torch.full((H, len(first)), -torch.inf, dtype=torch.float32, device=q.device)
    check_finite(q=q, k=k)
    runs = BSFA["triton"].unsupported(q, k, k, params) is None
    found = BSFA["triton" if runs else "reference"].maxima(q, k, params)
    count = first.clamp(max=min(kept, 2**31)) if isinstance(kept, int) else (first * kept).round().long()
    ends = torch.full((*found.shape[:3], 1), torch.inf, dtype=found.dtype, device=found.device)
    found = torch.cat([ends, found.sort(-1, descending=True).values, -ends], -1)
    count = count.expand(B, H, -1)[..., None]
    above, below = found.gather(-1, count), found.gather(-1, count + 1)
    halfway = torch.where(count < first[:, None], (above + below) / 2, -torch.inf)
    return halfway[..., 0].mean(0).float()

"""`attention_distr()`: attention whose scores are sums over fewer columns. An approximation, for inference,
so without a gradient."""

from __future__ import annotations

from typing import Literal

import torch

from attnlib.api.inference import refuse_derivatives, refuse_transformations
from attnlib.arguments.distr import DistrOptions, check_distr
from attnlib.dispatch import first_of, nothing_to_do
from attnlib.kernels import DISTR, GROUPERS
from attnlib.kernels.common.distr import Grouping, Hashed
from attnlib.params import Params, mask_window

__all__ = ["attention_distr"]


def attention_distr(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: int,
    causal: bool = False,
    seed: int = 0,
    sm_scale: float | None = None,
    hashed: Hashed = "k",
    rows: int | None = None,
    impl: Literal["hopper", "triton", "reference"] | None = None,
) -> torch.Tensor:
    """DistrAttention (arXiv 2507.17245): `attention` whose Q K^T has D / group columns.

    The columns of Q and K are hashed by random projections, sorted by their hashes and taken in groups. Of
    each group Q keeps the sum of its columns and K the first one, so a score is exact as far as K's columns
    within a group are equal. That holds for few inputs: chapter 36 has the errors, which for N(0, 1) are
    about as large as the output. Q and K are rounded to their dtype once more; softmax and P V are those of
    `attention`.

    On one H200, causal, it takes less time than `attention` at D = 128 with 16384 keys or more, and is level
    with it at D = 64. With 4096 keys or fewer it is slower: grouping costs more than the products save. Where
    it is faster, `attention_fp8` is about as fast, and for N(0, 1) its error is a sixteenth or less.

    A row's groups depend on all rows that are hashed with it, later ones too, even with `causal`.

    Inference only: no gradient, no torch.compile, no torch.func. `torch.autocast` has no effect.

    Args:
        q: (B, H, Sq, D), float16, bfloat16 or float32; D a multiple of 8 up to 128.
        k, v: (B, Hkv, Sk, D). Hkv divides H: query heads h*H/Hkv ... share key head h.
        group: columns of a group, 1 to 16, which divides D. 1 is exact.
        causal, sm_scale: as in `attention`.
        seed: of the projections, 0 to 2^31 - 1.
        hashed: "k": columns of the keys, one order of columns for a key head. "q": columns of the queries,
            as published, though it is the keys of which columns are dropped.
        rows: with hashed="q", queries that have an order of columns of their own, a multiple of 128 (as
            published: 128); None for all of a head. Each part has its own copy of the keys' columns:
            B * H * ceil(Sq / rows) * Sk * D / group elements of memory.
        impl: "hopper" (half precision, compute capability 9.x, triton 3.6 to 3.9), "triton", "reference" (a
            model in PyTorch, fp64, on any device), or None for the first of them that can run the call. An
            explicit choice never falls back to another.

    Returns:
        out, (B, H, Sq, D), contiguous. A row with nothing to attend to is 0.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or options do not fit, or `impl` can't run the call.
        RuntimeError: a derivative was asked for.
        NotImplementedError: it is called under a compiler, a dispatch mode or a transformation of torch.func.

    Example:
        >>> q, k, v = (torch.randn(2, 16, 8192, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        >>> out = attention_distr(q, k, v, group=2, causal=True)
    """
    refuse_transformations("attention_distr")
    check_distr(q, k, v, DistrOptions(group, causal, seed, sm_scale, hashed, rows, impl))
    refuse_derivatives("attention_distr", q=q, k=k, v=v)
    family = first_of(DISTR, impl, q)
    if nothing_to_do(q, k):
        return torch.zeros_like(q, memory_format=torch.contiguous_format)
    q, k, v = (x.detach().resolve_neg() for x in (q, k, v))
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    grouper = GROUPERS["reference" if family is DISTR["reference"] else "triton"]
    if rows is not None and rows >= q.shape[2]:
        rows = None  # one part has all queries
    grouped = grouper.group(q, k, Grouping(group, hashed, rows, seed), causal)
    return family.forward(grouped, v, Params(mask_window(causal, None), scale))

"""`Score`: what becomes of the scores before the softmax, for `attention(..., score=)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from attnlib.arguments import scores as checks


@dataclass(frozen=True, eq=False)
class Score:
    """What becomes of the scores s = sm_scale * Q K^T before the softmax, in this order; None for nothing::

        s = soft_cap * tanh(s / soft_cap)
        s = s - alibi[h] * |i + Sk - Sq - j|
        s = s + bias[b, h, i, j]

    and the softmax of a row divides by exp(sinks[h]) + sum of exp(s) over the keys that it sees.

    Attributes:
        soft_cap: a number from 1e-6 to 1e6, as in Gemma 2 (arXiv 2408.00118).
        alibi: (H), float: slopes, as in ALiBi (arXiv 2108.12409). They have no gradient.
        sinks: (H), float: a logit for each query head that takes part in its softmax and has no value, as in
            GPT-OSS. Differentiable.
        bias: float, of a shape that broadcasts to (B, H, Sq, Sk). Differentiable. -inf hides a key.

    Tensors are float16, bfloat16 or float32, on the device of the queries, and are used in float32.

    Raises:
        TypeError, ValueError: a part has the wrong type, dtype or value, or there is none.

    Example:
        >>> gemma = Score(soft_cap=50.0)
        >>> gpt_oss = Score(sinks=torch.zeros(64, device="cuda", requires_grad=True))
    """

    soft_cap: float | None = None
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        checks.check_parts(self.soft_cap, self.alibi, self.sinks, self.bias)


class ScoreForm(NamedTuple):
    """What launches depend on of a score: the cap; whether there are slopes and sinks; of a bias its dtype,
    its strides as (B, H, Sq, Sk), and its own sizes there, 1 where it broadcasts; whether its gradient is
    asked for."""

    soft_cap: float | None
    alibi: bool
    sinks: bool
    bias: torch.dtype | None
    strides: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    bias_gradient: bool


class ScoreParts(NamedTuple):
    """A score as kernels take it: alibi and sinks (H) float32, contiguous; bias (B, H, Sq, Sk), expanded, and
    the shape (4 sizes) that it had before; whether the gradient of the bias is asked for."""

    soft_cap: float | None = None
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sizes: tuple[int, ...] | None = None
    bias_gradient: bool = False

    @property
    def changes_scores(self) -> bool:
        """Whether it is more than sinks, which only the sum of a row has to do with."""
        return self.soft_cap is not None or self.alibi is not None or self.bias is not None

    @property
    def form(self) -> ScoreForm:
        bias = self.bias
        about = (None, None) if bias is None else (bias.dtype, bias.stride())
        parts = self.soft_cap, self.alibi is not None, self.sinks is not None
        return ScoreForm(*parts, *about, self.sizes, self.bias_gradient)


def parts_of(score: Score, q: torch.Tensor, k: torch.Tensor, bias_gradient: bool = False) -> ScoreParts:
    """A score that was checked, for queries (B, H, Sq, D) and keys (B, Hkv, Sk, D)."""
    alibi, sinks = (
        None if x is None else x.detach().resolve_neg().float().contiguous()
        for x in (score.alibi, score.sinks)
    )
    bias, sizes = score.bias, None
    if bias is not None:
        bias = bias.detach().resolve_neg()
        sizes = (1,) * (4 - bias.dim()) + tuple(bias.shape)
        bias = bias.reshape(sizes).expand(*q.shape[:3], k.shape[2])
    cap = None if score.soft_cap is None else float(score.soft_cap)
    return ScoreParts(cap, alibi, sinks, bias, sizes, bias_gradient)

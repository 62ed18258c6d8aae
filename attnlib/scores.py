"""`Score`: what becomes of the scores before the softmax, for `attention(..., score=)`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from attnlib.arguments import scores as checks


class Functions(NamedTuple):
    """The functions of a score that its user wrote; see `Score`."""

    function: Any = None
    derivative: Any = None
    reference: Callable | None = None


_numbers: dict[Functions, int] = {}  # in their order
_numbering = threading.Lock()


def by_number(number: int | None) -> Functions:
    """The functions with this number: operators of PyTorch take numbers and tensors only. ValueError if no
    score of this process has them."""
    if number is None:
        return Functions()
    if not 0 <= number < len(_numbers):
        raise ValueError(f"functions: expected those of a score of this process, got number {number}")
    return list(_numbers)[number]


@dataclass(frozen=True, eq=False)
class Score:
    """What becomes of the scores s = sm_scale * Q K^T before the softmax, in this order; a part that is None
    is left out::

        s = function(s, i, j, h, b)
        s = soft_cap * tanh(s / soft_cap)
        s = s - alibi[h] * |i + Sk - Sq - j|
        s = s + bias[b, h, i, j]
        s = s + relative[h, L + clip(j - (i + Sk - Sq), -L, L)]

    and the softmax of a row divides by exp(sinks[h]) + sum of exp(s) over the keys that it sees.

    Attributes:
        soft_cap: a number from 1e-6 to 1e6, as in Gemma 2 (arXiv 2408.00118).
        alibi: (H), float: slopes, as in ALiBi (arXiv 2108.12409). They have no gradient.
        sinks: (H), float: a logit for each query head that takes part in its softmax and has no value, as in
            GPT-OSS. Differentiable. From -2.3e38 to 2.3e38: beyond, a GPU's result is -inf or NaN.
        bias: float, of a shape that broadcasts to (B, H, Sq, Sk). Differentiable. -inf hides a key. On a GPU
            numbers below -2.3e38 do, too, such as the least one of float32: a row that has no other gives 0,
            where PyTorch's SDPA gives the mean of the values.
        relative: (H, 2L + 1), float: a bias by how far a key stands behind its query, as in T5 (arXiv
            1910.10683); beyond L it is that of L. Differentiable. -inf hides a key. Not together with bias.
        function: your own, a `@triton.jit` function of a float32 score and the numbers of its query, key,
            query head and batch element. It is called for tiles: s is (m, n) or (n, m), i and j broadcast to
            that, h and b are single numbers. It may use what works element by element, with no pointer and no
            tile of its own, and is called for places behind the last row and key, too, where it may be
            anything. -inf hides a key, but not beside a soft cap, which comes after it.
        derivative: likewise, of function by s, finite where function is, elsewhere anything; gradients need
            it.
        reference: likewise in PyTorch, with tensors for all five. `impl="reference"` needs it, and takes its
            derivative from autograd. A tensor of its own that requires grad gets no gradient.

    Tensors are float16, bfloat16 or float32, on the device of the queries, and are used in float32.

    Raises:
        TypeError, ValueError: a part has the wrong type, dtype or value, or there is none.

    Example:
        >>> gemma = Score(soft_cap=50.0)
        >>> gpt_oss = Score(sinks=torch.zeros(64, device="cuda", requires_grad=True))
        >>> @triton.jit
        ... def softsign(s, i, j, h, b):
        ...     return s / (1 + tl.abs(s))
        >>> @triton.jit
        ... def softsign_derivative(s, i, j, h, b):
        ...     return 1 / ((1 + tl.abs(s)) * (1 + tl.abs(s)))
        >>> own = Score(function=softsign, derivative=softsign_derivative)
    """

    soft_cap: float | None = None
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    relative: torch.Tensor | None = None
    function: Any = None
    derivative: Any = None
    reference: Callable | None = None
    # Of `by_number`; None for a score that is made inside of a compiled graph, which can't take functions.
    functions: int | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.check_parts(self)
        if self.function is not None and not torch.compiler.is_compiling():
            own = Functions(self.function, self.derivative, self.reference)
            with _numbering:
                number = _numbers.setdefault(own, len(_numbers))
            object.__setattr__(self, "functions", number)


class ScoreForm(NamedTuple):
    """All of a score that launches depend on: the cap; whether there are slopes and sinks; of a bias its
    dtype, its strides as (B, H, Sq, Sk), and its own sizes there, 1 where it broadcasts; whether its gradient
    is asked for; whether it is of diagonals, see `ScoreParts`; whether it lies at a multiple of 16 bytes; the
    functions."""

    soft_cap: float | None
    alibi: bool
    sinks: bool
    bias: torch.dtype | None
    strides: tuple[int, ...] | None
    sizes: tuple[int, ...] | None
    bias_gradient: bool
    diagonal: bool
    aligned: bool
    function: Any
    derivative: Any


class ScoreParts(NamedTuple):
    """A score as kernels take it: alibi and sinks (H) float32, contiguous; bias (B, H, Sq, Sk), expanded, and
    the shape (4 sizes) that it had before; whether the gradient of the bias is asked for.

    diagonal: the bias is (H, Sq + Sk - 1) float32, that of query i and key j at [h, Sq - 1 - i + j]: to a
    kernel a bias like others, whose stride along queries is -1."""

    soft_cap: float | None = None
    alibi: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sizes: tuple[int, ...] | None = None
    bias_gradient: bool = False
    diagonal: bool = False
    function: Any = None
    derivative: Any = None
    reference: Callable | None = None

    @property
    def form(self) -> ScoreForm:
        dtype = None if self.bias is None else self.bias.dtype
        parts = self.soft_cap, self.alibi is not None, self.sinks is not None
        aligned = self.bias is not None and self.bias.data_ptr() % 16 == 0
        bias = dtype, self.strides, self.sizes, self.bias_gradient, self.diagonal, aligned
        return ScoreForm(*parts, *bias, self.function, self.derivative)

    @property
    def strides(self) -> tuple[int, ...] | None:
        """Of the bias, as (B, H, Sq, Sk)."""
        if self.diagonal:
            return 0, self.bias.shape[1], -1, 1
        return None if self.bias is None else self.bias.stride()

    @property
    def places_shared(self) -> bool:
        """Whether an element of the bias belongs to several queries or keys of a head."""
        return self.bias is not None and (self.diagonal or self.sizes[2:] != self.bias.shape[2:])

    def memory_of_bias(self, zeros: bool = True) -> torch.Tensor:
        """Memory for the gradient of the bias, float32, in its own sizes; of 0, or of anything."""
        make, sizes = torch.zeros if zeros else torch.empty, self.bias.shape if self.diagonal else self.sizes
        return make(sizes, dtype=torch.float32, device=self.bias.device)

    def bias_of(self, rows: slice) -> torch.Tensor:
        """(B or 1, H, rows, Sk), not broadcast in memory where the bias is not of diagonals."""
        if not self.diagonal:
            return self.bias[:, :, rows]
        S_q, S_k = self.sizes[2:]
        i = torch.arange(rows.start, rows.stop, device=self.bias.device)[:, None]
        return self.bias[:, S_q - 1 - i + torch.arange(S_k, device=self.bias.device)][None]

    def prepared(self, q: torch.Tensor, k: torch.Tensor) -> ScoreParts:
        """These parts as kernels take them, from tensors as a caller gave them."""
        alibi, sinks = (
            None if x is None else x.detach().resolve_neg().float().contiguous()
            for x in (self.alibi, self.sinks)
        )
        bias, sizes, full = self.bias, None, (*q.shape[:3], k.shape[2])
        if bias is not None:
            bias = bias.detach().resolve_neg()
            sizes = (1, *full[1:]) if self.diagonal else (1,) * (4 - bias.dim()) + tuple(bias.shape)
        if bias is not None and not self.diagonal:
            bias = bias.reshape(sizes).expand(full)
        return self._replace(alibi=alibi, sinks=sinks, bias=bias, sizes=sizes)


def diagonals(relative: torch.Tensor, S_q: int, S_k: int) -> torch.Tensor:
    """The bias of diagonals, as in `ScoreParts`, of a table (H, 2L + 1); differentiable."""
    reach = relative.shape[1] // 2
    distance = torch.arange(max(0, S_q + S_k - 1), device=relative.device) - (S_k - 1)
    return relative.float()[:, distance.clamp(-reach, reach) + reach]


def parts_of(score: Score, q: torch.Tensor, k: torch.Tensor, bias_gradient: bool = False) -> ScoreParts:
    """A score that was checked, for queries (B, H, Sq, D) and keys (B, Hkv, Sk, D)."""
    return given_parts(score, q, k)._replace(bias_gradient=bias_gradient).prepared(q, k)


def given_parts(score: Score, q: torch.Tensor, k: torch.Tensor) -> ScoreParts:
    """The same with tensors as they were given, not `prepared`; differentiable. A table becomes a bias of
    diagonals here."""
    bias, diagonal = score.bias, score.relative is not None
    if diagonal:
        bias = diagonals(score.relative, q.shape[2], k.shape[2])
    cap = None if score.soft_cap is None else float(score.soft_cap)
    own = score.function, score.derivative, score.reference
    return ScoreParts(cap, score.alibi, score.sinks, bias, None, False, diagonal, *own)

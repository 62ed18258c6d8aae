"""The fp64 oracle, the error budget, and the inputs that kernels are judged on.

A kernel passes when its largest and its RMS error against dense attention in fp64 both stay within

    2 x (error of PyTorch's same-dtype dense path + one rounding of the output dtype)

The rule is relative, so it needs no tolerance per shape or dtype: where fp16 arithmetic itself is inaccurate
the kernel may be too, and where it is accurate the kernel must be. In float32 the rounding is that of a sum
of D products in another order, sqrt(D) ulp. Output that is not finite fails, because every comparison is
written `not (error <= budget)`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from attnlib.band import Band, band
from attnlib.shapes import Shape

INPUTS = ("normal", "large", "outlier", "constant", "sink")
"""Kinds of input, see `make_inputs`."""

_BLOCK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}


def _shape_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Shape:
    """Validate q, k, v and describe them as a Shape."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name}: expected 4 dimensions (B, H, S, D), got shape {tuple(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name}: expected {q.dtype} on {q.device} like q, got {x.dtype} on {x.device}")
    if k.shape != v.shape:
        raise ValueError(f"v: expected the shape of k {tuple(k.shape)}, got {tuple(v.shape)}")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k: expected batch {q.shape[0]} and head_dim {q.shape[3]} like q, got shape {tuple(k.shape)}"
        )
    batch, heads, seqlen, head_dim = q.shape
    dtype = str(q.dtype).removeprefix("torch.")
    return Shape(batch, heads, seqlen, head_dim, causal, dtype, k.shape[1], k.shape[2])


def _row_blocks(
    shape: Shape, seen: Band, device: torch.device, itemsize: int
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, end row, first key, end key): blocks of query rows whose scores fit in a fixed number
    of bytes, and the keys that some row of a block sees.

    Rows that see no key are not yielded: with a bound on the right, the first S_q - S_k - right.
    """
    shift = shape.keys - shape.seqlen
    first = 0 if seen.right is None else max(0, -(shift + seen.right))
    row_bytes = shape.batch * shape.heads * shape.keys * itemsize
    rows = max(1, min(shape.seqlen, _BLOCK_BYTES.get(device.type, _BLOCK_BYTES["cpu"]) // row_bytes))
    for start in range(first, shape.seqlen, rows):
        end = min(start + rows, shape.seqlen)
        left = 0 if seen.left is None else max(0, start + shift - seen.left)
        right = shape.keys if seen.right is None else min(shape.keys, end + shift + seen.right)
        yield start, end, left, right


def _grouped(x: torch.Tensor, shape: Shape) -> torch.Tensor:
    """(B, H, rows, D) -> (B, H_kv, H/H_kv * rows, D): heads that share a kv head become one matrix."""
    return x.reshape(shape.batch, shape.kv_heads, -1, shape.head_dim)


def _hide(
    scores: torch.Tensor, shape: Shape, seen: Band, start: int, end: int, left: int
) -> torch.Tensor | None:
    """Write -inf to the scores [B, H_kv, H/H_kv * rows, keys] of rows start..end-1 and keys from `left` on
    wherever a row does not see a key. Returns what they see, [H/H_kv * rows, keys] bool; None for all."""
    if seen == Band(None, None):
        return None
    place = torch.arange(start, end, device=scores.device)[:, None] + (shape.keys - shape.seqlen)
    keys = torch.arange(left, left + scores.shape[-1], device=scores.device)[None, :]
    visible = torch.ones(end - start, scores.shape[-1], dtype=torch.bool, device=scores.device)
    if seen.right is not None:
        visible &= keys <= place + seen.right
    if seen.left is not None:
        visible &= keys >= place - seen.left
    visible = visible.repeat(shape.heads // shape.kv_heads, 1)
    scores.masked_fill_(~visible, -math.inf)
    return visible


def _weighted(p: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """P V, [B, H_kv, rows, keys] x [B, H_kv, keys, D], to which values that a row does not see add nothing:
    not even those that are infinite or NaN, of which 0 times as much would be NaN.
    """
    if visible is None or bool(v.isfinite().all()):
        return p @ v
    out = p @ v.masked_fill(~v.isfinite(), 0.0)

    def meet(rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Where a row of `rows` has a key in common with a column of `values`, both bool."""
        return rows.to(p.dtype) @ values.to(p.dtype) > 0

    some = p > 0
    out = out.masked_fill(meet(some, v == math.inf), math.inf)
    out = out + torch.zeros_like(out).masked_fill_(meet(some, v == -math.inf), -math.inf)
    undefined = meet(visible, v.isnan()) | meet(visible & (p == 0), v.isinf())
    return out.masked_fill(undefined, math.nan)


@torch.no_grad()
def attention_fp64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention in fp64, the truth of every test.

    q is (B, H, Sq, D); k and v are (B, H_kv, Sk, D), H a multiple of H_kv; any float dtype. `sm_scale`
    defaults to 1/sqrt(D). Query i stands at p = i + Sk - Sq and sees, with window=(left, right), the keys
    p - left .. p + right; -1 is no bound, and `causal` bounds the right at 0. Returns out (B, H, Sq, D) and
    the natural-log LSE (B, H, Sq), both fp64. A row that sees no key has out 0 and LSE -inf, and what a row
    does not see does not reach it, not even NaN. Works over blocks of query rows: about 1 GiB of scratch on a
    GPU.
    """
    shape, seen = _shape_of(q, k, v, causal), band(causal, window)
    scale = shape.head_dim**-0.5 if sm_scale is None else sm_scale
    k64, v64 = k.double(), v.double()
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64, device=q.device)
    for start, end, left, right in _row_blocks(shape, seen, q.device, 8):
        b_q = _grouped(q[:, :, start:end].double() * scale, shape)
        scores = b_q @ k64[:, :, left:right].transpose(-1, -2)  # [B, H_kv, H/H_kv * rows, keys]
        visible = _hide(scores, shape, seen, start, end, left)
        m = scores.amax(-1, keepdim=True)
        p = scores.sub_(m).exp_()
        l = p.sum(-1, keepdim=True)  # noqa: E741  (m and l are the names used through the book)
        rows = (shape.batch, shape.heads, end - start)
        out[:, :, start:end] = (_weighted(p, v64[:, :, left:right], visible) / l).view(*rows, shape.head_dim)
        lse[:, :, start:end] = (m + l.log()).view(rows)
    return out, lse


@torch.no_grad()
def attention_math(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
) -> torch.Tensor:
    """Dense attention as plain PyTorch computes it in the dtype of the inputs: the yardstick of the error
    budget.

    Scores, softmax and the product with V are each rounded to the input dtype, as eager code does. (SDPA's
    own math backend works in fp32 inside since torch 2.5, which would make the budget a single rounding.)
    Arguments as `attention_fp64`; returns out (B, H, Sq, D) in the input dtype. Works over blocks of query
    rows, which changes no result because rows are independent.
    """
    shape, seen = _shape_of(q, k, v, causal), band(causal, window)
    scale = shape.head_dim**-0.5 if sm_scale is None else sm_scale
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for start, end, left, right in _row_blocks(shape, seen, q.device, 4):
        b_q = _grouped(q[:, :, start:end] * scale, shape)
        scores = b_q @ k[:, :, left:right].transpose(-1, -2)
        visible = _hide(scores, shape, seen, start, end, left)
        p = torch.softmax(scores, -1)
        b_out = _weighted(p, v[:, :, left:right], visible)
        out[:, :, start:end] = b_out.view(shape.batch, shape.heads, end - start, shape.head_dim)
    return out


def sequences(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor
) -> Iterator[tuple[slice, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Yield (rows, (q, k, v)) of each of the packed sequences that has queries and keys: q as (1, H, Sq, D),
    k and v as (1, H_kv, Sk, D)."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for rows, keys in zip(*(map(slice, ends, ends[1:]) for ends in (ends_q, ends_k)), strict=True):
        if rows.start < rows.stop and keys.start < keys.stop:
            parts = (x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys)))
            yield rows, tuple(parts)


@torch.no_grad()
def attention_varlen_fp64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_fp64` of packed sequences, one after the other.

    q is (Tq, H, D), k and v are (Tk, H_kv, D); rows cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1 of q belong to
    sequence b, and likewise keys. Returns out (Tq, H, D) and LSE (H, Tq), both fp64. Rows of a sequence
    without keys have out 0 and LSE -inf.
    """
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64, device=q.device)
    for rows, parts in sequences(q, k, v, cu_seqlens_q, cu_seqlens_k):
        b_out, b_lse = attention_fp64(*parts, causal=causal, window=window, sm_scale=sm_scale)
        out[rows], lse[:, rows] = b_out[0].transpose(0, 1), b_lse[0]
    return out, lse


def _varlen_math(q, k, v, cu_seqlens_q, cu_seqlens_k, **arguments) -> torch.Tensor:
    """`attention_math` of packed sequences."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    for rows, parts in sequences(q, k, v, cu_seqlens_q, cu_seqlens_k):
        out[rows] = attention_math(*parts, **arguments)[0].transpose(0, 1)
    return out


@dataclass(frozen=True)
class Budget:
    """The largest absolute error and the largest RMS error that a kernel may have."""

    max: float
    rms: float


@dataclass(frozen=True)
class Verdict:
    """What the oracle says of one output: its errors, the budget they had to meet, and why it failed."""

    max_error: float
    rms_error: float
    budget: Budget
    ok: bool
    reason: str = ""

    def raise_if_bad(self, name: str) -> None:
        """AssertionError that names the kernel, the errors and the budget, unless the output is good."""
        if not self.ok:
            raise AssertionError(f"{name} is wrong: {self.reason}")


def _max_rms(error: torch.Tensor) -> tuple[float, float]:
    """Largest absolute value and root mean square; `error` is overwritten."""
    largest = error.abs_().max().item()
    return largest, error.square_().mean().sqrt().item()


class Oracle:
    """The truth and the budget of one input, computed once, to judge many outputs.

        oracle = Oracle(q, k, v, causal=True)
        oracle.judge(attention(q, k, v, causal=True)).raise_if_bad("my kernel")

    With cu_seqlens=(cu_seqlens_q, cu_seqlens_k) the input is packed sequences, see `attention_varlen_fp64`.

    Attributes: `out` (B, H, Sq, D) and `lse` (B, H, Sq) in fp64, or (Tq, H, D) and (H, Tq), `budget`,
    `lse_tolerance` (absolute).
    """

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        sm_scale: float | None = None,
        *,
        window: tuple[int, int] | None = None,
        cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        self.dtype = q.dtype
        truth, yardstick = attention_fp64, attention_math
        if cu_seqlens is not None:
            truth, yardstick = attention_varlen_fp64, _varlen_math
        tensors = q, k, v, *(cu_seqlens or ())
        how = {"causal": causal, "window": window, "sm_scale": sm_scale}
        self.out, self.lse = truth(*tensors, **how)
        plain = yardstick(*tensors, **how).double().sub_(self.out)
        math_max, math_rms = _max_rms(plain)
        rounding = self.out.to(self.dtype).double().sub_(self.out)
        round_max, round_rms = _max_rms(rounding)
        # Kernels accumulate in fp32, and two orders of adding D products differ by about sqrt(D) roundings.
        # That much is granted where a rounding of the output is less: in fp32, and where the truth happens
        # to be representable (S = 1: out = v). In fp16 and bf16 it is hundreds of times smaller than one.
        order = math.sqrt(q.shape[-1]) * torch.finfo(torch.float32).eps
        truth_max, truth_rms = _max_rms(self.out.clone())
        self.budget = Budget(
            max=2 * (math_max + max(round_max, order * truth_max)),
            rms=2 * (math_rms + max(round_rms, order * truth_rms)),
        )
        seen = self.lse[self.lse.isfinite()]
        # The LSE is fp32 in every kernel; this separates fp32 arithmetic (1e-6) from a wrong base or a lost
        # scale.
        self.lse_tolerance = 1e-4 * max(1.0, seen.abs().max().item() if seen.numel() else 0.0)

    @torch.no_grad()
    def judge(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> Verdict:
        """Compare an output, and its natural-log LSE when given, with the truth.

        Never raises for a wrong result: shape, dtype, non-finite values and errors above the budget all give
        a Verdict with ok=False and a reason.
        """
        if not isinstance(out, torch.Tensor):
            return self._bad(f"expected a torch.Tensor, got {type(out).__name__}")
        if out.shape != self.out.shape or out.dtype != self.dtype:
            return self._bad(
                f"expected shape {tuple(self.out.shape)} {self.dtype}, got {tuple(out.shape)} {out.dtype}"
            )
        if out.device != self.out.device:
            return self._bad(f"expected the output on {self.out.device}, got {out.device}")
        max_error, rms_error = _max_rms(out.double() - self.out)
        broken = out.numel() - int(out.isfinite().sum())
        if broken:
            reason = f"{broken} of {out.numel()} values are not finite"
            return Verdict(max_error, rms_error, self.budget, False, reason)
        if not (max_error <= self.budget.max and rms_error <= self.budget.rms):
            reason = (
                f"max error {max_error:.2e} (budget {self.budget.max:.2e}), "
                f"RMS error {rms_error:.2e} (budget {self.budget.rms:.2e})"
            )
            return Verdict(max_error, rms_error, self.budget, False, reason)
        reason = "" if lse is None else self._lse_fault(lse)
        return Verdict(max_error, rms_error, self.budget, not reason, reason)

    def _bad(self, reason: str) -> Verdict:
        return Verdict(math.nan, math.nan, self.budget, False, reason)

    def _lse_fault(self, lse: torch.Tensor) -> str:
        """What is wrong with an LSE; empty when nothing is."""
        if lse.shape != self.lse.shape:
            return f"LSE: expected shape {tuple(self.lse.shape)}, got {tuple(lse.shape)}"
        empty = self.lse == -math.inf
        if not bool((lse[empty] == -math.inf).all()):
            return "LSE: expected -inf where a row sees no key"
        error = (lse.double() - self.lse)[~empty].abs()
        largest = error.max().item() if error.numel() else 0.0
        if not (largest <= self.lse_tolerance):
            return f"LSE: max error {largest:.2e}, tolerance {self.lse_tolerance:.2e}"
        return ""


def error_budget(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
) -> Budget:
    """The budget for these inputs; an `Oracle` gives it together with the truth."""
    return Oracle(q, k, v, causal, sm_scale, window=window).budget


def check(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    lse: torch.Tensor | None = None,
) -> Verdict:
    """Judge one output; use an `Oracle` for several outputs of the same input."""
    return Oracle(q, k, v, causal, sm_scale, window=window).judge(out, lse)


@contextlib.contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within the block `torch.empty` and its relatives return NaN instead of whatever the memory held.

    A kernel that leaves part of its output unwritten then fails, rather than passing on what a good call
    left behind. Integer tensors stay as they are.
    """
    functions = {
        torch: ("empty", "empty_like", "empty_strided"),
        torch.Tensor: ("new_empty", "new_empty_strided"),
    }
    originals = [(owner, name, getattr(owner, name)) for owner, names in functions.items() for name in names]

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: object, **kwargs: object) -> torch.Tensor:
            x = allocate(*args, **kwargs)
            return x.fill_(math.nan) if x.is_floating_point() else x

        return wrapper

    try:
        for owner, name, original in originals:
            setattr(owner, name, poisoned(original))
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def make_inputs(
    shape: Shape, kind: str = "normal", seed: int = 0, device: str | torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q (B, H, Sq, D), k and v (B, H_kv, Sk, D), contiguous, in `shape.dtype`; on the GPU when there
    is one.

    normal    N(0, 1)
    large     q is 20 times larger: scores far beyond what exp takes without a running max
    outlier   N(0, 1) + N(0, 100) * Bernoulli(0.001), the mix of the FlashAttention-3 paper (arXiv 2407.08608)
    constant  all keys are the same vector: the scores of a row tie, and out is the mean of the visible values
    sink      key 0 draws most of the weight of every row, so the running max is found at once and stays
    """
    if kind not in INPUTS:
        raise ValueError(f"kind: expected one of {', '.join(INPUTS)}, got {kind!r}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)

    def randn(heads: int, length: int) -> torch.Tensor:
        size = (shape.batch, heads, length, shape.head_dim)
        x = torch.randn(size, generator=generator, device=device)
        if kind == "outlier":
            hit = torch.rand(size, generator=generator, device=device) < 0.001
            x += 10 * torch.randn(size, generator=generator, device=device) * hit
        return x

    q = randn(shape.heads, shape.seqlen)
    k, v = randn(shape.kv_heads, shape.keys), randn(shape.kv_heads, shape.keys)
    if kind == "large":
        q *= 20
    elif kind == "constant":
        k[:] = k[:, :, :1].clone()
    elif kind == "sink":
        # q.k0/sqrt(D) is about log(Sk) + 3, while exp of the other scores sums to about e * Sk: 9 tenths of
        # the weight.
        q += 1
        k[:, :, 0] = (math.log(shape.keys) + 3) * shape.head_dim**-0.5
    return q.to(shape.torch_dtype), k.to(shape.torch_dtype), v.to(shape.torch_dtype)

"""Which kernel runs a call, and the call: forward and backward, on arguments that were checked."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from attnlib.arguments.decode import check_decode_values
from attnlib.arguments.existing import check_existing
from attnlib.arguments.tangents import check_tangents
from attnlib.kernels import BSFA, DECODERS, ENTMAX, FAMILIES, FOR_FEW_CALLS, MASKED
from attnlib.kernels.common.backward_plan import BackwardPlan
from attnlib.kernels.common.bsfa import grid_of
from attnlib.kernels.common.descriptors import output_like
from attnlib.kernels.common.signature import PREPARED, Signature, signature
from attnlib.params import (
    BsfaParams,
    DecodeParams,
    EntmaxParams,
    Existing,
    Implementation,
    MaskWindow,
    Params,
    Varlen,
)


@dataclass(frozen=True)
class Choice:
    """What a call of `attention` runs.

    Attributes:
        kernel: "decode", "hopper", "triton" or "reference", as in `impl`.
        configuration: how the kernel is compiled and launched; None for the reference.
        reason: why this kernel.
        window: the keys that a query sees, without bounds that no row reaches.
    """

    kernel: Implementation
    configuration: Any
    reason: str
    window: MaskWindow

    def __str__(self) -> str:
        how = "" if self.configuration is None else f"\n  with {self.configuration}"
        return f"{self.kernel}: {self.reason}{how}"


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, LSE): out has the rows of q and the columns of v; the LSE is (B, H, Sq) or (H, Tq) float32, and
    may be None unless it is asked for."""
    if forward_ad._current_level >= 0:  # the fastest way to ask PyTorch for it
        check_tangents("attention", q, k, v)
    if q.is_neg() or k.is_neg() or v.is_neg():  # a negation that PyTorch has not applied in memory yet
        q, k, v = (x.resolve_neg() for x in (q, k, v))
    road = _road(params, False, q, k, v, q, k, v)
    if nothing_to_do(q, k):  # no row, or none with anything to attend to
        lse = torch.full(lse_shape(q), -math.inf, dtype=torch.float32, device=q.device)
        if params.score is not None and params.score.sinks is not None:
            lse = params.score.sinks[:, None].expand(q.shape[:3]).clone()
        return output_like(q, v).zero_(), lse
    return road.family.forward(q, k, v, road.resolved(params))


def accumulate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, into: Existing, params: Params
) -> None:
    """Merge attention to these keys into `into`, the result of other keys, in place: afterwards it is
    attention to all of them. A row without any key has output 0 and LSE -inf. TypeError, ValueError: see
    `arguments.existing`."""
    check_existing(q, v, into, params)
    if nothing_to_do(q, k):
        into.out.masked_fill_((into.lse == -math.inf)[..., None], 0)
        return
    forward(q, k, v, params._replace(return_lse=True, into=into))


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: DecodeParams
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Like `forward`, for `attention_decode`. ValueError: see `check_decode_values`."""
    check_decode_values(k, params)
    if forward_ad._current_level >= 0:
        scales = (x for x in (params.k_scale, params.v_scale) if x is not None)
        check_tangents("attention_decode", q, k, v, *scales)
    if q.is_neg() or k.is_neg() or v.is_neg():
        q, k, v = (x.resolve_neg() for x in (q, k, v))
    if params.k_scale is not None or params.v_scale is not None:
        k_scale, v_scale = (x if x is None else x.resolve_neg() for x in params[-2:])
        params = params._replace(k_scale=k_scale, v_scale=v_scale)
    if _nothing_to_decode(q, k, params):
        lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
        return torch.zeros_like(q), lse
    return first_of(DECODERS, None, q, params).forward(q, k, v, params)


def prepared_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: DecodeParams) -> Any:
    """Like `prepared_forward`, for `attention_decode`."""
    if _nothing_to_decode(q, k, params) or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    return first_of(DECODERS, None, q, params).prepared(q, k, v, params)


def _nothing_to_decode(q: torch.Tensor, k: torch.Tensor, params: DecodeParams) -> bool:
    return nothing_to_do(q, k) or (params.page_table is not None and not params.page_table.numel())


def entmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: EntmaxParams
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, tau, flags) of `attention_entmax`. ValueError if an implementation is asked for that can't run
    it."""
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    family = first_of(ENTMAX, params.impl, q)
    if nothing_to_do(q, k):
        tau = torch.full(lse_shape(q), math.inf, dtype=torch.float32, device=q.device)
        words = entmax_flags(q, k, params.impl, params.varlen)
        return torch.zeros_like(q), tau, q.new_zeros(words, dtype=torch.int32)
    return family.forward(q, k, v, params)


class SavedEntmax(NamedTuple):
    """What `entmax` leaves to its backward pass."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    tau: torch.Tensor
    flags: torch.Tensor


def entmax_backward(
    d_out: torch.Tensor, saved: SavedEntmax, params: EntmaxParams
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v from what `entmax` gave and the gradient of `out`."""
    q, k, v, out, tau, flags = saved
    d_out, q, k, v, out = (x.resolve_neg() for x in (d_out.to(q.dtype), q, k, v, out))
    if nothing_to_do(q, k):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    return first_of(ENTMAX, params.impl, q).backward(d_out, q, k, v, out, tau, flags, params)


def entmax_flags(q: torch.Tensor, k: torch.Tensor, impl: str | None, varlen: Varlen | None = None) -> int:
    """How many int32 words of flags `entmax` leaves for the backward pass."""
    return first_of(ENTMAX, impl, q).flags_size(q.shape, k.shape, varlen)


def first_of(families: Mapping[str, Any], impl: str | None, *call: Any) -> Any:
    """The first of these families that can run a call, or the one that was asked for. ValueError if that
    can't."""
    for name, family in families.items():
        if impl in (None, name):
            why_not = family.unsupported(*call)
            if why_not is None:
                return family
            if impl is not None:
                raise ValueError(f"impl: {impl!r} {why_not}")
    raise AssertionError("the last family runs every call")


def bsfa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: BsfaParams, impl: str | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(out, lse, kept) of `attention_bsfa`; lse and kept may be None unless asked for. ValueError if an
    implementation is asked for that can't run it."""
    if forward_ad._current_level >= 0:
        check_tangents("attention_bsfa", q, k, v, params.threshold)
    if q.is_neg() or k.is_neg() or v.is_neg():
        q, k, v = (x.resolve_neg() for x in (q, k, v))
    if nothing_to_do(q, k):
        lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float32, device=q.device)
        kept = torch.zeros(bsfa_blocks(q, k), dtype=torch.bool, device=q.device)
        return torch.zeros_like(q), lse, kept
    return first_of(BSFA, impl, q, k, v, params).forward(q, k, v, params)


def bsfa_blocks(q: torch.Tensor, k: torch.Tensor) -> tuple[int, ...]:
    """The shape of `kept` as `bsfa` returns it."""
    return *q.shape[:2], *grid_of(q.shape[2], k.shape[2])


def prepared_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params) -> Any:
    """The launches with which `forward` runs these tensors, a `ForwardPlan` or the plan of a decoding call;
    None where there are none, or a tensor has to be converted first."""
    if nothing_to_do(q, k) or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    return _road(params, False, q, k, v, q, k, v).plan


class Saved(NamedTuple):
    """What the forward pass leaves to the backward pass: q and out are (B, H, Sq, D), k and v (B, Hkv, Sk,
    D), lse (B, H, Sq) float32; varlen (Tq, H, D), (Tk, Hkv, D), (H, Tq). out and v may have a D of their
    own."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def backward(d_out: torch.Tensor, saved: Saved, params: Params) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v, in their dtype, from the result of `forward` and the gradient of `out`. With a
    score also those of its sinks (H) and its bias, in float32: None where it has no such part, or the
    gradient is not asked for."""
    if forward_ad._current_level >= 0:
        check_tangents("attention", d_out, *saved[:3])
    if nothing_to_do(saved.q, saved.k):
        q, k, v = (x.resolve_neg() for x in saved[:3])
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), *_no_gradients(params)
    d_out, q, k, v, out, lse, params = _as_kernels_take_it(d_out, saved, params)
    road = _road(params, True, q, k, v, d_out, q, k, v, out)
    return road.family.backward(d_out, q, k, v, out, lse, road.resolved(params))


def prepared_backward(d_out: torch.Tensor, saved: Saved, params: Params) -> BackwardPlan | None:
    """The launches with which `backward` runs these tensors; None where there are none, or a tensor has to be
    converted first."""
    given = d_out, *saved, params
    if nothing_to_do(saved.q, saved.k):
        return None
    if any(x is not y for x, y in zip(given, _as_kernels_take_it(d_out, saved, params), strict=True)):
        return None
    q, k, v, out, _ = saved
    return _road(params, True, q, k, v, d_out, q, k, v, out).plan


def _as_kernels_take_it(d_out: torch.Tensor, saved: Saved, params: Params) -> tuple:
    """(d_out, q, k, v, out, lse, params) with negations applied, d_out in the dtype of q, and `deterministic`
    set if PyTorch's own switch is on. What needs no change is the object that was given."""
    q, k, v, out, lse = saved
    if d_out.is_neg() or q.is_neg() or k.is_neg() or v.is_neg() or out.is_neg():
        d_out, q, k, v, out = (x.resolve_neg() for x in (d_out, q, k, v, out))
    if d_out.dtype != q.dtype:
        d_out = d_out.to(q.dtype)
    if torch.are_deterministic_algorithms_enabled():
        params = params._replace(deterministic=True)
    return d_out, q, k, v, out, lse, params


class _Road:
    """What all calls with one signature have in common: the family that runs them, the choice that led there,
    and the launches, which are prepared when the first of them runs."""

    __slots__ = ("_call", "backward", "choice", "family", "plan")

    def __init__(self, choice: Choice, family: ModuleType, call: Signature | None, backward: bool) -> None:
        self.choice, self.family, self.backward = choice, family, backward
        self._call, self.plan = call, None

    def resolved(self, params: Params) -> Params:
        """The params of a call with the window, the configuration and the launches that were chosen for
        it."""
        call = self._call
        if call is not None:  # another thread may do the same meanwhile; the results are equal
            self.plan = self.family.prepare(call, self.backward)
            self._call = None
        _, sm_scale, varlen, return_lse, deterministic, impl, _, _, mask, score, into, spare = params
        choice = self.choice
        return Params(
            choice.window, sm_scale, varlen, return_lse, deterministic, impl, choice.configuration, self.plan,
            mask, score, into, spare,
        )  # fmt: skip


_roads: dict[tuple, _Road] = {}
"""All that a choice depends on -> the choice and its launches."""


def resolve(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Params, backward: bool = False
) -> Choice:
    """The kernel and the configuration of a call with valid arguments, or of its backward pass. ValueError if
    an implementation is asked for that can't run it."""
    return _road(params, backward, q, k, v, q, k, v).choice


def _road(params: Params, backward: bool, q, k, v, *strided: torch.Tensor) -> _Road:
    """The only place where the choice is made. strided: the tensors that the launches read."""
    call = signature(params, q, k, *strided)
    addresses = tuple([x.data_ptr() % 16 for x in strided])
    key = call, addresses, q.is_cuda, params.impl, params.deterministic, backward
    found = _roads.get(key)
    if found is None:
        choice = _choose(q, k, v, params, backward)
        call = call._replace(window=choice.window, config=choice.configuration)
        if len(_roads) >= PREPARED:
            _roads.clear()
        family = _families(params)[choice.kernel]
        found = _roads[key] = _Road(choice, family, None if any(addresses) else call, backward)
    return found


def _families(params: Params) -> dict[str, ModuleType]:
    return FAMILIES if params.block_mask is None else MASKED


def _choose(q, k, v, params: Params, backward: bool) -> Choice:
    rows, keys = (q.shape[2], k.shape[2]) if params.varlen is None else params.varlen.longest(q, k)
    params = params._replace(window=params.window.tightened(rows, keys))
    asked, reason = params.impl, None
    for name, family in _families(params).items():
        if asked not in (None, name):
            continue
        why_not = family.unsupported(q, k, v, params, backward)
        if asked is not None and why_not is not None:
            only_backward = backward and family.unsupported(q, k, v, params) is None
            rest = "; leave impl out, or call it without grad" if only_backward else ""
            raise ValueError(f"impl: {name!r} {why_not}{rest}")
        if why_not is not None and name in FOR_FEW_CALLS:
            continue
        why_not = why_not or (None if asked else family.slower(q, k, params, backward))
        if why_not is None:
            reason = "asked for" if asked else reason or family.FITS
            return Choice(name, family.configuration(q, k, v, params, backward), reason, params.window)
        reason = f"{name} {why_not}"
    raise AssertionError("the last family runs every call")


def _no_gradients(params: Params) -> tuple:
    """Gradients of a score's sinks and bias where there is nothing to compute."""
    score = params.score
    if score is None:
        return ()
    bias = score.memory_of_bias() if score.bias_gradient else None
    return None if score.sinks is None else torch.zeros_like(score.sinks), bias


def nothing_to_do(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether there is no query, or no key at all."""
    return q.numel() == 0 or k.numel() == 0


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    """(B, H, Sq), or (H, Tq) of varlen sequences."""
    return q.shape[:3] if q.dim() == 4 else (q.shape[1], q.shape[0])

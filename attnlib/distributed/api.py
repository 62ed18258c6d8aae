"""`attention()` of a sequence that is spread over ranks, and what spreads and joins it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from attnlib import api as single
from attnlib.api.exact import autocast
from attnlib.arguments import distributed as arguments
from attnlib.arguments.exact import Options
from attnlib.distributed import rotation
from attnlib.distributed.function import Attention
from attnlib.distributed.groups import Group, Ranks, ranks_of
from attnlib.distributed.heads import ToHeads, ToRows, differentiated
from attnlib.distributed.layout import is_zigzag, parts_of, pieces_of, rows_divisor, take
from attnlib.distributed.links import Links, agree_on_all, linked
from attnlib.distributed.order import Moved
from attnlib.distributed.tensors import check_for_all, check_placed
from attnlib.params import Implementation, MaskWindow, Params, mask_window

__all__ = ["attention", "positions", "shard", "unshard"]
Method = Literal["ring", "all_gather", "ulysses", "auto"]
ROWS_PER_SHIFT = 6000
"""With "auto", rows of a rank from which its own attention takes longer than the keys and values of one
more rank take to come, if all heads have their own: 4 * H * S^2 * D / 2 causal FLOPs at 700 TFLOP/s against
4 * H * S * D bytes at 250 GB/s, as H200s and NVLink have them."""


class Way(NamedTuple):
    """`method` and `in_order`, as `attention` takes them."""

    method: Method = "auto"
    in_order: bool | None = None


@torch.compiler.disable
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Group = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    method: Method = "auto",
    in_order: bool | None = None,
    impl: Implementation | None = None,
    timeout: float = 120.0,
):
    """`attnlib.attention` of one sequence whose positions are spread over the ranks of a group.

    Each rank gives its rows of q, k and v, as `shard` made them, and gets its rows of the output. The result
    is that of one process up to rounding, and so are the gradients. Every rank has to call it, with equal
    shapes and options, and to go backward through it if one does, to the same inputs, and through several
    calls in the same order.
    `torch.autocast` casts the inputs as for `attnlib.attention`. Under `torch.compile` a graph breaks at it:
    what is before and after it is compiled. With `fullgraph=True` PyTorch refuses it.

    A rank computes attention to its own keys while those of others come, then to those. Each call merges its
    result into that of the calls before, in the kernel, by their LSE. The backward pass sends keys and values
    again, and gradients back to whose they are. Rows lie so that all ranks have the same to do: see
    `positions`.

    Args:
        q: (B, H, S / ranks, D), this rank's rows.
        k: (B, Hkv, S / ranks, D). Sent without a copy where B is 1 and memory has the order (B, S, H, D).
        v: (B, Hkv, S / ranks, D).
        group: a process group; None for all ranks; or a DeviceMesh. A mesh of two dimensions (r, u) is the
            hybrid: u ranks next to each other share out the heads as "ulysses" does, and `method` is what the
            r do with the keys. DTensors with Shard(2) bring their mesh along. Threads that call at the same
            time need groups of their own.
        causal, window, sm_scale, deterministic, impl: as in `attnlib.attention`, of the whole sequence. With
            a left bound only the keys within it are sent.
        return_lse: also return the LSE of this rank's rows. No gradient flows through it.
        method: how keys reach all rows.
            "all_gather": those that a rank needs come at once; memory for up to a sequence of k and v.
            "ring": round by round, from the rank one place before, then two; memory for two ranks' k and v,
            however many ranks there are.
            "ulysses": instead of rows of all heads a rank computes all rows of some heads. H and Hkv have to
            be multiples of the ranks.
            "auto": "all_gather" where it is no slower or needs no more memory, else "ring".
        in_order: whether rows lie in order, rank r with the r-th piece of the sequence, instead of as
            `positions` says; the output lies as q. It matters under a causal mask without a left bound: rows
            are then sent to where all ranks have the same to do, and the output back, which nothing hides
            ("ulysses" takes them as they are). Not with a mesh of two dimensions. None is False; but
            DTensors under such a mask need a word: True for those of `distribute_tensor`, False for those
            whose local parts `shard` has made.
        timeout: seconds that this rank waits for the others, forward and backward; it may differ between
            ranks. A mistake in `group` itself is told on its own rank only: a rank without the group of the
            others can't reach them. They wait for `timeout`, and can't use their group for later calls.

    Returns:
        out, (B, H, S / ranks, D); with `return_lse` the pair (out, lse), lse (B, H, S / ranks) float32.

    Raises:
        TypeError, ValueError: an argument does not fit, here; or options or shapes differ between ranks, on
            all of them. With heads shared out, or `in_order`, q, k and v have to require gradients alike on
            all ranks.
        RuntimeError: another rank had an error, died, or did not come within `timeout`; torch.distributed is
            not initialized; or a second derivative was asked for. On GPUs, a rank that dies while keys are on
            their way ends the others by NCCL's watchdog after `timeout`.

    Example, under torchrun:
        >>> q, k, v = (shard(x, causal=True) for x in (q, k, v))
        >>> out = unshard(attention(q, k, v, causal=True), causal=True)
    """
    if any(isinstance(x, DTensor) for x in (q, k, v)):
        return _dtensors(q, k, v, group, {
            "causal": causal, "window": window, "sm_scale": sm_scale, "return_lse": return_lse,
            "deterministic": deterministic, "method": method, "in_order": in_order, "impl": impl,
            "timeout": timeout,
        })  # fmt: skip
    outer, inner, error = linked(q, ranks_of(group), timeout, "attention")
    q, k, v = autocast(q, k, v)
    options = Options(causal, window, sm_scale, return_lse, deterministic, impl)
    way = Way(method, in_order)
    _agree((q, k, v), options, way, outer, inner, error)
    asked = mask_window(causal, window)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    params = Params(asked, scale, None, True, deterministic, impl)
    if inner is not None:
        pieces = pieces_of(inner.ranks, q.shape[2])
        q, k, v = (ToHeads.apply(x, inner, pieces, name) for name, x in zip("qkv", (q, k, v), strict=True))
    out, lse = _between_ranks(q, k, v, params, outer, way)
    if inner is not None:
        out = ToRows.apply(out, inner, pieces, next(inner.calls))
        lse = ToRows.apply(lse[..., None], inner, pieces)[..., 0]
    return (out, lse.detach()) if return_lse else out


def _between_ranks(q, k, v, params: Params, links: Links, way: Way):
    window = params.window
    pieces = pieces_of(links.ranks, q.shape[2])
    parts = tuple(parts_of(rank, links.ranks, q.shape[2], window) for rank in range(links.ranks))
    if links.ranks > 1 and way.method != "ulysses":
        job = rotation.Job(links, params, _decided(way.method, q, k, links.ranks, window), next(links.calls))
        if not way.in_order or parts == pieces:
            return Attention.apply(q, k, v, job, rotation)
        q, k, v = (
            Moved.apply(x, links, pieces, parts, f"gradient of {name}")
            for name, x in zip("qkv", (q, k, v), strict=True)
        )
        out, lse = Attention.apply(q, k, v, job, rotation)
        out, lse = (
            Moved.apply(x, links, parts, pieces, f"gradient of the output of call {job.number}")
            for x in (out, lse[..., None])
        )
        return out, lse[..., 0]
    if way.in_order:
        parts = pieces
    if links.ranks > 1:
        q, k, v = (ToHeads.apply(x, links, parts, name) for name, x in zip("qkv", (q, k, v), strict=True))
    bounds = tuple(-1 if bound is None else bound for bound in window)
    out, lse = single.attention(
        q, k, v, window=bounds, sm_scale=params.sm_scale, return_lse=True,
        deterministic=params.deterministic, impl=params.impl,
    )  # fmt: skip
    if links.ranks > 1:
        out = ToRows.apply(out, links, parts, next(links.calls))
        lse = ToRows.apply(lse[..., None], links, parts)[..., 0]
    return out, lse


def _agree(
    tensors: tuple, options: Options, way: Way, outer: Links, inner: Links | None,
    error: Exception | None = None,
) -> None:  # fmt: skip
    """Check the arguments here, if nothing is wrong yet, and compare them with those of the other ranks."""
    q, k, v = tensors

    def stated() -> dict:
        shares = 1 if inner is None else inner.ranks
        divisor = rows_divisor(outer.ranks, shares, _window_of(options.causal, options.window))
        if way.in_order and way.method == "ulysses":  # which needs no rows of both halves
            divisor = 1
        arguments.check_distributed(q, k, v, options, divisor)
        arguments.check_heads(q.shape[1], k.shape[1], shares)
        arguments.check_method(way.method, q.shape[1], k.shape[1], outer.ranks * shares)
        arguments.check_in_order(way.in_order, shares)
        each = way.method == "ulysses" or inner is not None or bool(way.in_order)
        return {
            "q": f"shape {tuple(q.shape)} of {str(q.dtype).removeprefix('torch.')}",
            "k": f"shape {tuple(k.shape)}",
            **options._asdict(),
            "method": way.method,
            "in_order": bool(way.in_order),
            "requires_grad": differentiated((q, k, v), each),
            "step": "forward",
        }

    agree_on_all(filter(None, (inner, outer)), stated, error)


def _window_of(causal, window) -> MaskWindow:
    arguments.check_mask(causal, window)
    return mask_window(causal, window)


def _decided(method: Method, q, k, ranks: int, window: MaskWindow) -> str:
    if method != "auto":
        return method
    if ranks == 2 or window.left is not None:  # one round either way, or what is near
        return "all_gather"
    needed = (ranks - 1) * ROWS_PER_SHIFT * k.shape[1] / max(1, q.shape[1])
    return "all_gather" if ranks <= 8 and q.shape[2] >= needed else "ring"


def _dtensors(q: DTensor, k: DTensor, v: DTensor, group: Group, options: dict):
    """The same of DTensors, sharded in dimension 2."""

    def check() -> None:
        check_placed({"q": (q, 2), "k": (k, 2), "v": (v, 2)}, group)
        if options["in_order"] is None and is_zigzag(_window_of(options["causal"], options["window"])):
            raise ValueError(
                "in_order: expected True or False with DTensors under a causal mask, True where rows lie in "
                "order, as distribute_tensor leaves them, False where shard made the local parts; got None"
            )

    first = next(x for x in (q, k, v) if isinstance(x, DTensor))
    check_for_all(check, first, options["timeout"], "attention")
    found = attention(*(x.to_local() for x in (q, k, v)), group=q.device_mesh, **options)
    if not options["return_lse"]:
        return DTensor.from_local(found, q.device_mesh, q.placements)
    return tuple(DTensor.from_local(x, q.device_mesh, q.placements) for x in found)


# ---------------------------------------------------------------- a sequence and its parts


def positions(
    rows: int, *, group: Group = None, causal: bool = False, window: tuple[int, int] | None = None
) -> torch.Tensor:
    """(rows) int64 on the CPU: where in the sequence the rows of this rank stand, as rotary embeddings need.

    A causal sequence is cut into two parts for each rank, and rank r of n holds parts r and 2n - 1 - r: late
    rows see more keys, and so all ranks have the same to do. With a left bound in `window`, or without a
    mask, a rank holds one piece. The order does not depend on the method. (With `in_order` calls take rows
    in order instead, and move them themselves.) ValueError for an odd number of causal rows.
    """
    arguments.check_mask(causal, window)
    ranks, asked = ranks_of(group), mask_window(causal, window)
    arguments.check_rows(rows, ranks.rows_divisor(asked))
    parts = ranks.parts(rows, asked)
    return torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in parts])


def shard(
    x: torch.Tensor, *, dim: int = 2, group: Group = None, causal: bool = False,
    window: tuple[int, int] | None = None,
) -> torch.Tensor:  # fmt: skip
    """This rank's part of a tensor that has the whole sequence in dimension `dim`, in the order of
    `positions`. It depends on the mask and the ranks, and is the same for every `method` of `attention`. No
    DTensor: `distribute_tensor` makes those, with rows in order. ValueError if the length is no multiple of
    the ranks, of twice the ranks if causal."""
    arguments.check_mask(causal, window)
    ranks, asked = ranks_of(group), mask_window(causal, window)
    arguments.check_whole(x, dim, ranks.divisor(asked))
    return take(x, ranks.parts(x.shape[dim] // _count(ranks), asked), dim)


@torch.no_grad()
def unshard(
    x: torch.Tensor, *, dim: int = 2, group: Group = None, causal: bool = False,
    window: tuple[int, int] | None = None, timeout: float = 120.0,
) -> torch.Tensor:  # fmt: skip
    """The whole sequence from the ranks' parts, in order, on every rank. No gradient flows through it.
    No DTensor: `x.full_tensor()` joins one whose rows lie in order; of one whose parts `shard` made, give
    `x.to_local()`.
    ValueError if shapes or masks differ between ranks, on all of them; `group`, `timeout` and RuntimeError as
    in `attention`."""
    ranks = ranks_of(group)
    outer, inner, error = linked(x, ranks, timeout, "unshard")
    groups = [links for links in (inner, outer) if links is not None]
    asked = rows = None

    def stated() -> dict:
        nonlocal asked, rows
        arguments.check_mask(causal, window)
        asked = mask_window(causal, window)
        arguments.check_whole(x, dim, ranks.rows_divisor(asked), "")
        rows = x.movedim(dim, 0).contiguous().resolve_conj().resolve_neg()
        return {
            "x": f"shape {tuple(x.shape)} of {x.dtype}", "dim": dim, "causal": causal, "window": window,
            "step": "unshard",
        }  # fmt: skip

    agree_on_all(groups, stated, error)
    for links in groups:
        each = torch.empty(links.ranks, *rows.shape, dtype=rows.dtype, device=rows.device)
        each[links.rank] = rows
        others = [rank for rank in range(links.ranks) if rank != links.rank]
        links.start([(rank, rows) for rank in others], [(rank, each[rank]) for rank in others]).wait()
        if links is not groups[-1]:
            rows = each.flatten(0, 1)
            continue
        whole = torch.empty_like(each.flatten(0, 1))
        for rank in range(links.ranks):
            parts = parts_of(rank, links.ranks, len(rows), asked)
            for part, piece in zip(parts, each[rank].split([len(p) for p in parts]), strict=True):
                whole[part.start : part.stop] = piece
        rows = whole
    return rows.movedim(0, dim)


def _count(ranks: Ranks) -> int:
    return torch.distributed.get_world_size(ranks.outer) * ranks.shares

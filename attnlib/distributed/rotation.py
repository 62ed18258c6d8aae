"""Attention of a rank's rows to the keys of all ranks, forward and backward: its own keys at once, the others
round by round as they come.

The heads are computed in two groups, so that there is work of the rank's own at both ends: own keys, first
heads, while keys come | keys of others, all heads | own keys, the other heads, which if causal end with short
tiles. In the forward pass each group has a stream; in the backward pass own keys have one and keys of others
the other one, and the gradients of keys go back under the last of the three.
"""

from typing import NamedTuple

import torch

from attnlib import dispatch
from attnlib.distributed.links import CTAS, Links, Sent, Transfer
from attnlib.distributed.pieces import as_slice, nothing_seen, overlap, part_of, summed
from attnlib.distributed.schedule import Call, Method, Round, rounds
from attnlib.distributed.streams import Streams
from attnlib.params import Existing, Params

ALL = slice(None)
SPARE = CTAS
"""Multiprocessors that own keys leave to the first transfer: both begin at once on an idle GPU, and the
kernel of attention keeps all that it gets until it ends. Where it came first, keys came only then."""


class Job(NamedTuple):
    """A call besides its tensors. `params.window` is that of the whole sequence. number: among the calls of
    the links."""

    links: Links
    params: Params
    method: Method
    number: int = 0

    def rounds(self, q: torch.Tensor) -> tuple[Round, ...]:
        return rounds(self.links.rank, self.links.ranks, q.shape[2], self.params.window, self.method)


def packed(x: torch.Tensor) -> torch.Tensor:
    """(B, H, S, D) as (S, B, H, D), contiguous: rows of it are one piece, and those of several ranks are one
    tensor. No copy of a (1, S, H, D) tensor that was transposed."""
    return x.permute(2, 0, 1, 3).contiguous()


def unpacked(x: torch.Tensor) -> torch.Tensor:
    """The (B, H, S, D) view of it."""
    return x.permute(1, 2, 0, 3)


class KeyBuffers:
    """Where keys and values of others come to: two pairs of buffers, so that one round's come while those of
    the round before are used."""

    def __init__(self, job: Job, plan: tuple[Round, ...], k: torch.Tensor, v: torch.Tensor) -> None:
        self.job, self.plan, self.own = job, plan, (packed(k), packed(v))
        keys = max((each.keys for each in plan), default=0)
        shape = min(2, len(plan)), 2, keys, *self.own[0].shape[1:]
        self.buffers = job.links.room(shape, k)
        self.flights: list[Transfer] = []

    def __enter__(self) -> "KeyBuffers":
        return self

    def __exit__(self, kind, *_) -> None:
        """Where a call fails, as with an `impl` that can't run it, let come and go what was started: others
        have started it too, and the next call's would take its place."""
        if kind is not None and not self.job.links.broken:
            for flight in self.flights:
                flight.wait()

    def start(self, i: int) -> None:
        """Round i's, once what the current stream has so far is done."""
        each, slot = self.plan[i], self.buffers[i % 2]
        sent = [(peer, x[as_slice(rows)]) for peer, rows in each.sent for x in self.own]
        received, at = [], 0
        for piece in each.pieces:
            end = at + len(piece.rows)
            received += [(piece.source, buffer[at:end]) for buffer in slot]
            at = end
        self.flights.append(self.job.links.start(sent, received))

    def wait(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Round i's keys and values, (B, Hkv, keys, D), for the current stream."""
        self.flights[i].wait()
        k, v = self.buffers[i % 2][:, : self.plan[i].keys]
        return unpacked(k), unpacked(v)


def head_groups(q: torch.Tensor, k: torch.Tensor, shared: bool = False) -> list[tuple[slice, slice]]:
    """Two groups of query heads with their key heads. Of one key head: one, or if shared two that both have
    it."""
    kv_heads, group = k.shape[1], q.shape[1] // max(1, k.shape[1])
    if not kv_heads or (kv_heads == 1 and (group == 1 or not shared)):
        return [(ALL, ALL)]
    half = -(-kv_heads // 2)
    if kv_heads == 1:
        return [(slice(0, group // 2), ALL), (slice(group // 2, None), ALL)]
    return [(slice(0, half * group), slice(0, half)), (slice(half * group, None), slice(half, None))]


class _Heads:
    """A group of heads on a stream of its own: q and the result so far, into which calls merge theirs, one
    after the other."""

    def __init__(self, q: torch.Tensor, whole: Existing, group: tuple[slice, slice], params: Params) -> None:
        heads, self.kv_heads = group
        self.q, self.result, self.params = q[:, heads], part_of(whole, heads), params

    def own(self, k: torch.Tensor, v: torch.Tensor, spare: int = 0) -> None:
        """Attention to the rank's own keys, on all multiprocessors but `spare`."""
        kv, params = self.kv_heads, self.params._replace(spare=spare)
        dispatch.accumulate(self.q, k[:, kv], v[:, kv], self.result, params)

    def others(self, keys: tuple[torch.Tensor, torch.Tensor], calls: tuple[Call, ...]) -> None:
        """Attention to the keys of a round."""
        for rows, seen, window in calls:
            here, part = as_slice(rows), as_slice(seen)
            k, v = (x[:, self.kv_heads, part] for x in keys)
            asked = self.params._replace(window=window)
            dispatch.accumulate(self.q[:, :, here], k, v, part_of(self.result, ALL, here), asked)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE) of a rank's rows. q (B, H, S, D); k, v (B, Hkv, S, D).

    Each call merges its result into that of the calls before, so those of one head follow each other. The
    first heads begin with own keys, while keys come, the others end with them.
    """
    plan = job.rounds(q)
    whole = nothing_seen(q, overlap([call.rows for each in plan for call in each.calls]))
    groups = [_Heads(q, whole, group, job.params) for group in head_groups(q, k, shared=True)]
    first, last = groups[0], groups[-1] if len(groups) > 1 else None
    with KeyBuffers(job, plan, k, v) as keys:
        streams = Streams(q.device)
        keys.start(0)
        with streams.side():
            first.own(k, v, SPARE)
        used = []  # ends of the calls that read the buffers which are filled next
        for i, each in enumerate(plan):
            with streams.transfers():
                found = keys.wait(i)
                there = streams.mark()
                if i + 1 < len(plan):
                    streams.wait(*used)
                    keys.start(i + 1)
            streams.wait(there)
            if last:
                last.others(found, each.calls)
            used = [streams.mark()]
            with streams.side():
                streams.wait(there)
                first.others(found, each.calls)
                used.append(streams.mark())
        if last:
            last.own(k, v)
    streams.join()
    return whole.out.to(q.dtype), whole.lse


def backward(
    d_out: torch.Tensor, saved: dispatch.Saved, job: Job
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) of a rank's rows, from the output and the LSE over all keys."""
    q, k, v, out, lse = saved
    plan = job.rounds(q)
    streams, groups = Streams(q.device), head_groups(q, k)

    def own(heads: slice, kv_heads: slice) -> tuple[torch.Tensor, ...]:
        given = dispatch.Saved(
            q[:, heads], k[:, kv_heads], v[:, kv_heads], out[:, heads], lse[:, heads].contiguous()
        )
        return dispatch.backward(d_out[:, heads], given, job.params)

    dq_parts: list[tuple[range, torch.Tensor]] = []
    returns: list[Returned] = []
    with KeyBuffers(job, plan, k, v) as keys:
        keys.start(0)
        results = [own(*groups[0])]
        with streams.side():
            for i, each in enumerate(plan):
                if i + 1 < len(plan):
                    keys.start(i + 1)
                b_k, b_v = keys.wait(i)
                given = saved._replace(k=b_k, v=b_v)
                gradient = _KeyGradient(each.keys)
                for call in each.calls:
                    dq, dk, dv = _gradient(d_out, given, call, job.params)
                    dq_parts.append((call.rows, dq))
                    gradient.add(call.keys, dk, dv)
                returns.append(_give_back(job.links, each, gradient.whole(k), k))
        # Beside the last round they would keep the multiprocessors that its gradients, and their way back,
        # need.
        streams.join()
        results += [own(*group) for group in groups[1:]]
    for each in returns:
        each.transfer.wait()
    others = [[(rows, unpacked(x[which])) for each in returns for rows, x in each.parts] for which in (0, 1)]
    heads, kv_heads = ([group[which] for group in groups] for which in (0, 1))
    dq = summed(q, [(h, found[0]) for h, found in zip(heads, results, strict=True)], dq_parts)
    dk = summed(k, [(h, found[1]) for h, found in zip(kv_heads, results, strict=True)], others[0])
    dv = summed(v, [(h, found[2]) for h, found in zip(kv_heads, results, strict=True)], others[1])
    return dq, dk, dv


def _gradient(d_out: torch.Tensor, given: dispatch.Saved, call, params: Params) -> tuple[torch.Tensor, ...]:
    rows, keys = as_slice(call.rows), as_slice(call.keys)
    q, k, v, out, lse = given
    part = dispatch.Saved(
        q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows].contiguous()
    )
    return dispatch.backward(d_out[:, :, rows], part, params._replace(window=call.window))


class _KeyGradient:
    """(dK, dV) of the keys of a round, from calls that each see some of them."""

    def __init__(self, keys: int) -> None:
        self.keys, self.found = keys, []

    def add(self, keys: range, dk: torch.Tensor, dv: torch.Tensor) -> None:
        self.found.append((keys, (packed(dk), packed(dv))))

    def whole(self, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys, B, Hkv, D) each."""
        B, H, _, D = k.shape
        self.found.sort(key=lambda part: -len(part[0]))
        if self.found and len(self.found[0][0]) == self.keys:
            (_, whole), *rest = self.found
        else:
            rest = self.found
            whole = tuple(torch.zeros(self.keys, B, H, D, dtype=k.dtype, device=k.device) for _ in "kv")
        for keys, parts in rest:
            for x, part in zip(whole, parts, strict=True):
                x[as_slice(keys)] += part
        return whole


class Returned(NamedTuple):
    """Gradients of own keys that come back from others: (own rows, (dK, dV))."""

    transfer: Transfer
    parts: list[tuple[range, torch.Tensor]]


def _give_back(
    links: Links, each: Round, gradient: tuple[torch.Tensor, torch.Tensor], k: torch.Tensor
) -> Returned:
    B, H, _, D = k.shape
    sent: Sent = []
    at = 0
    for piece in each.pieces:
        end = at + len(piece.rows)
        sent += [(piece.source, x[at:end]) for x in gradient]
        at = end
    parts = [
        (rows, torch.empty(2, len(rows), B, H, D, dtype=k.dtype, device=k.device)) for _, rows in each.sent
    ]
    received = [(peer, x) for (peer, _), (_, both) in zip(each.sent, parts, strict=True) for x in both]
    return Returned(links.start(sent, received), parts)

"""`attention_varlen` of sequences whose tokens are spread over ranks, which share out the heads as Ulysses
does, or keep their tokens and get the keys of others."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.distributed.tensor import Shard

from attnlib import api as single
from attnlib import dispatch
from attnlib.api.exact import autocast
from attnlib.arguments import distributed as arguments
from attnlib.arguments.exact import Options
from attnlib.arguments.offsets import check_offsets_of
from attnlib.distributed import cut
from attnlib.distributed.function import Attention
from attnlib.distributed.groups import Group, ranks_in_a_row
from attnlib.distributed.heads import ToHeads, ToRows, differentiated
from attnlib.distributed.layout import pieces_of
from attnlib.distributed.links import Links, agree_on_all, linked
from attnlib.distributed.tensors import local_parts
from attnlib.params import Implementation, Params, Varlen, mask_window

__all__ = ["attention_varlen"]
Method = Literal["ulysses", "all_gather", "auto"]


class Call(NamedTuple):
    """What ranks have to have in common, besides shapes."""

    varlen: Varlen
    options: Options
    method: Method

    def params(self, q: torch.Tensor) -> Params:
        """The same for the kernels."""
        _, _, sm_scale, _, deterministic, impl, *_ = self.options
        scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
        return Params(mask_window(*self.options[:2]), scale, self.varlen, True, deterministic, impl)

    def decided(self, q: torch.Tensor, k: torch.Tensor, ranks: int) -> str:
        """The method, where it is left to the library."""
        if self.method != "auto":
            return self.method
        return "all_gather" if q.shape[1] % ranks or k.shape[1] % ranks else "ulysses"


@torch.compiler.disable
def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    *,
    group: Group = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    method: Method = "auto",
    impl: Implementation | None = None,
    timeout: float = 120.0,
):
    """`attnlib.attention_varlen` of sequences that lie one after the other in tensors of tokens, which are
    cut into equal pieces for the ranks of a group, wherever sequences end.

    The result is that of one process up to rounding, and so are the gradients. Every rank has to call it, and
    to go backward through it if one does, as with `attention`. What is sent is not hidden. Under
    `torch.compile` a graph breaks at it: what is before and after it is compiled. With `fullgraph=True`
    PyTorch refuses it.

    Args:
        q: (T / ranks, H, D), this rank's piece of the tokens, as `shard(x, dim=0)` takes it.
        k: (T / ranks, Hkv, D), in the dtype of q.
        v: (T / ranks, Hkv, Dv), in the dtype of q. All three may be DTensors with Shard(0), which bring their
            mesh along, and so are then the results.
        cu_seqlens: (B + 1) int32, on the device of q, the same on all ranks, which is checked: 0, then the
            running sum of the lengths of all sequences, up to T.
        max_seqlen: the length of the longest sequence, or more.
        group: a process group, a DeviceMesh of one dimension, or None for all ranks.
        causal, window, sm_scale, return_lse, deterministic, impl: as in `attnlib.attention_varlen`.
        method: what ranks send each other.
            "ulysses": they change from some tokens of all heads to all tokens of some heads, compute these,
            and change back: (n - 1) / n of a rank's q, k, v and output are sent. All ranks have the same to
            do, whatever the lengths and the mask are. H and Hkv have to be multiples of the ranks.
            "all_gather": a rank keeps its tokens, of all heads, and gets the keys and values that they see of
            the ranks that have them, again in the backward pass, where their gradients go back. Any number of
            heads will do. Memory for k and v of all sequences that a rank has tokens of, as far as the mask
            reaches: up to the whole k and v. Ranks have unequal work where lengths or a causal mask make it
            so: late tokens of a sequence see more keys. Not while a CUDA graph is captured, as `cu_seqlens`
            can't be read then.
            "auto": "ulysses" where H and Hkv are multiples of the ranks, else "all_gather".
        timeout: seconds that this rank waits for the others, as in `attention`.

    Returns:
        out, (T / ranks, H, Dv); with `return_lse` the pair (out, lse), lse (H, T / ranks) float32.

    Raises:
        TypeError, ValueError, RuntimeError: as `attention`; and as `attnlib.attention_varlen` for the values
            in `cu_seqlens`, on all ranks. ValueError for another method, and for "ulysses" with heads that
            are no multiples of the ranks.

    Example, under torchrun:
        >>> q, k, v = (shard(x, dim=0) for x in (q, k, v))
        >>> out = attention_varlen(q, k, v, cu_seqlens, longest, causal=True)
    """
    local = local_parts({"q": (q, 0), "k": (k, 0), "v": (v, 0)}, group, timeout, "attention_varlen")
    q, k, v = local.tensors
    links, _, error = linked(q, ranks_in_a_row(local.group), timeout, "attention_varlen")
    q, k, v = autocast(q, k, v)
    options = Options(causal, window, sm_scale, return_lse, deterministic, impl)
    call = Call(Varlen(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), options, method)
    ends = _agree((q, k, v), call, links, error)
    if call.decided(q, k, links.ranks) == "all_gather":
        job = cut.job_of(links, next(links.calls), len(q), ends, call.params(q))
        out, lse = Attention.apply(q, k, v, job, cut)
    else:
        out, lse = _by_heads((q, k, v), call, links)
    out = local.joined(out, Shard(0))
    return (out, local.joined(lse.detach(), Shard(1))) if return_lse else out


def _by_heads(tensors: tuple, call: Call, links: Links) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out, LSE) of this rank's rows. The LSE, which is sent for itself, only where it is asked for."""
    pieces = pieces_of(links.ranks, len(tensors[0]))
    whole = (
        ToHeads.apply(x.transpose(0, 1)[None], links, pieces, name)[0].transpose(0, 1)
        for name, x in zip("qkv", tensors, strict=True)
    )
    options = call.options
    out, lse = single.attention_varlen(
        *whole, *call.varlen, causal=options.causal, window=options.window, sm_scale=options.sm_scale,
        return_lse=True, deterministic=options.deterministic, impl=options.impl,
    )  # fmt: skip
    out = ToRows.apply(out.transpose(0, 1)[None], links, pieces, next(links.calls))[0].transpose(0, 1)
    if not options.return_lse:
        return out, None
    return out, ToRows.apply(lse.detach()[None, ..., None], links, pieces)[0, ..., 0]


def _agree(tensors: tuple, call: Call, links: Links, error: Exception | None) -> cut.Ends | None:
    """Check the arguments here, if nothing is wrong yet, and compare them with those of the other ranks. The
    values in `cu_seqlens`; None if they can't be known."""
    q, k, v = tensors
    varlen, options, method = call
    ends = None

    def stated() -> dict:
        nonlocal ends
        arguments.check_distributed_varlen(q, k, v, varlen, options)
        arguments.check_varlen_method(method, q.shape[1], k.shape[1], links.ranks)
        found = check_offsets_of("q", len(q) * links.ranks, *varlen[::2])
        ends = None if found is None else found.values
        heads = call.decided(q, k, links.ranks) == "ulysses"
        if not heads:
            _check_rows_stay(tensors, call, ends)
        return {
            "q": f"shape {tuple(q.shape)} of {str(q.dtype).removeprefix('torch.')}",
            "k": f"shape {tuple(k.shape)}",
            "v": f"shape {tuple(v.shape)}",
            "cu_seqlens": f"{len(varlen.cu_seqlens_q)} entries"
            + ("" if found is None else f", whose values hash to {found.fingerprint}"),
            "max_seqlen": varlen.max_seqlen_q,
            **options._asdict(),
            "method": method,
            "requires_grad": differentiated(tensors, heads),
            "step": "attention_varlen",
        }

    agree_on_all((links,), stated, error)
    return ends


def _check_rows_stay(tensors: tuple, call: Call, ends: cut.Ends | None) -> None:
    """What "all_gather" needs besides, before a key is sent."""
    if ends is None:
        raise RuntimeError(
            "method: 'all_gather' reads cu_seqlens, which can't be done while a CUDA graph is captured; "
            "'ulysses' does not"
        )
    if call.options.impl is not None:  # an error now, rather than in the backward pass
        params = call.params(tensors[0])
        dispatch.resolve(*tensors, params, backward=differentiated(tensors, each=False))

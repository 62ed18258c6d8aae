"""`attention_varlen` of sequences whose tokens are spread over ranks, which share out the heads as Ulysses
does."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard

from attnlib import api as single
from attnlib.api.exact import autocast
from attnlib.arguments import distributed as arguments
from attnlib.arguments.exact import Options
from attnlib.arguments.offsets import check_offsets_of
from attnlib.distributed.groups import Group, ranks_in_a_row
from attnlib.distributed.heads import ToHeads, ToRows, differentiated
from attnlib.distributed.layout import pieces_of
from attnlib.distributed.links import Links, agree_on_all, linked
from attnlib.distributed.tensors import local_parts
from attnlib.params import Implementation, Varlen

__all__ = ["attention_varlen"]


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
    impl: Implementation | None = None,
    timeout: float = 120.0,
):
    """`attnlib.attention_varlen` of sequences that lie one after the other in tensors of tokens, which are
    cut into equal pieces for the ranks of a group, wherever sequences end.

    Ranks change from some tokens of all heads to all tokens of some heads, compute these, and change back. So
    all of them have the same to do, whatever the lengths and the mask are. What is sent, (n - 1) / n of a
    rank's q, k, v and output, is not hidden. Under `torch.compile` a graph breaks at it: what is before and
    after it is compiled. With `fullgraph=True` PyTorch refuses it.

    Args:
        q: (T / ranks, H, D), this rank's piece of the tokens, as `shard(x, dim=0)` takes it.
        k, v: (T / ranks, Hkv, D). H and Hkv have to be multiples of the ranks. All three may be DTensors with
            Shard(0), which bring their mesh along, and so are then the results.
        cu_seqlens: (B + 1) int32, on the device of q, the same on all ranks, which is checked: 0, then the
            running sum of the lengths of all sequences, up to T.
        max_seqlen: the length of the longest sequence, or more.
        group: a process group, a DeviceMesh of one dimension, or None for all ranks.
        causal, window, sm_scale, return_lse, deterministic, impl: as in `attnlib.attention_varlen`.
        timeout: seconds that this rank waits for the others, as in `attention`.

    Returns:
        out, (T / ranks, H, D); with `return_lse` the pair (out, lse), lse (H, T / ranks) float32.

    Raises:
        TypeError, ValueError, RuntimeError: as `attention`; and as `attnlib.attention_varlen` for the values
            in `cu_seqlens`, on all ranks.

    Example, under torchrun:
        >>> q, k, v = (shard(x, dim=0) for x in (q, k, v))
        >>> out = attention_varlen(q, k, v, cu_seqlens, longest, causal=True)
    """
    local = local_parts({"q": (q, 0), "k": (k, 0), "v": (v, 0)}, group, timeout, "attention_varlen")
    q, k, v = local.tensors
    links, _, error = linked(q, ranks_in_a_row(local.group), timeout, "attention_varlen")
    q, k, v = autocast(q, k, v)
    options = Options(causal, window, sm_scale, return_lse, deterministic, impl)
    _agree((q, k, v), Varlen(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen), options, links, error)
    pieces = pieces_of(links.ranks, len(q))
    whole = (
        ToHeads.apply(x.transpose(0, 1)[None], links, pieces, name)[0].transpose(0, 1)
        for name, x in zip("qkv", (q, k, v), strict=True)
    )
    out, lse = single.attention_varlen(
        *whole, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=causal, window=window,
        sm_scale=sm_scale, return_lse=True, deterministic=deterministic, impl=impl,
    )  # fmt: skip
    out = ToRows.apply(out.transpose(0, 1)[None], links, pieces, next(links.calls))[0].transpose(0, 1)
    out = local.joined(out, Shard(0))
    if not return_lse:
        return out
    lse = ToRows.apply(lse.detach()[None, ..., None], links, pieces)[0, ..., 0]
    return out, local.joined(lse, Shard(1))


def _agree(
    tensors: tuple, varlen: Varlen, options: Options, links: Links, error: Exception | None
) -> None:
    """Check the arguments here, if nothing is wrong yet, and compare them with those of the other ranks."""
    q, k, v = tensors

    def stated() -> dict:
        arguments.check_distributed_varlen(q, k, v, varlen, options, links.ranks)
        found = check_offsets_of("q", len(q) * links.ranks, *varlen[::2])
        return {
            "q": f"shape {tuple(q.shape)} of {str(q.dtype).removeprefix('torch.')}",
            "k": f"shape {tuple(k.shape)}",
            "v": f"shape {tuple(v.shape)}",
            "cu_seqlens": f"{len(varlen.cu_seqlens_q)} entries"
            + ("" if found is None else f", whose values hash to {found.fingerprint}"),
            "max_seqlen": varlen.max_seqlen_q,
            **options._asdict(),
            "requires_grad": differentiated(tensors),
            "step": "attention_varlen",
        }

    agree_on_all((links,), stated, error)

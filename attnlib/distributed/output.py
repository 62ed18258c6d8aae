"""Tensor-parallel attention: each rank has some of the heads and their columns of the output projection. The
projections are summed over the ranks in chunks of rows, one chunk's sum under the next chunk's work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate

from attnlib import dispatch
from attnlib.api.exact import autocast
from attnlib.arguments import distributed as arguments
from attnlib.arguments.exact import Options
from attnlib.autograd import Computed
from attnlib.distributed.groups import Group, ranks_in_a_row
from attnlib.distributed.links import Links, agree_on_all, linked
from attnlib.distributed.pieces import as_slice
from attnlib.distributed.tensors import local_parts
from attnlib.params import Implementation, MaskWindow, Params, mask_window

__all__ = ["row_parallel_output"]

MOST_CHUNKS, LEAST_ROWS = 4, 1024
"""With chunks=None: so many, as long as each has so many rows."""


class Layer(NamedTuple):
    """A call besides its tensors. spans: the rows of each chunk, in order. `params.window` is that of the
    whole sequence. spare: multiprocessors that attention of each chunk after the first leaves to the
    AllReduce that was started before it, as `rotation.SPARE` does for keys; not timed yet."""

    links: Links
    params: Params
    spans: tuple[range, ...]
    spare: int = 0


@torch.compiler.disable
def row_parallel_output(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: Group = None,
    chunks: int | Sequence[int] | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    sm_scale: float | None = None,
    deterministic: bool = False,
    impl: Implementation | None = None,
    timeout: float = 120.0,
) -> torch.Tensor:
    """Attention of this rank's heads, projected by this rank's columns of the output weight (row parallel,
    as Megatron calls it), and added up over the ranks of a group: the output of a tensor-parallel layer.

    Rows are taken in chunks. The AllReduce of a chunk runs while attention and projection of the next are
    computed, and only that of the last chunk is exposed. Every rank has to call it, with as many rows and the
    same options; ranks may have different numbers of heads.

    The gradients of q, k, v and `weight` are this rank's own and need no communication: the gradient of the
    result has to be the same on all ranks, as it is where they all compute the same loss from it.

    Under `torch.compile` a graph breaks at it: what is before and after it is compiled. With `fullgraph=True`
    PyTorch refuses it.

    Args:
        q: (B, H, S, D), this rank's heads. No copy is made for the projection where memory has the order
            (B, S, H, D).
        k, v: (B, Hkv, Sk, D), Sk at least S: the last query stands at the last key.
        weight: (outputs, H * D), this rank's columns of the weight of an `nn.Linear`. A bias is the caller's
            to add, to the result. It may be a DTensor with Shard(1), as RowwiseParallel makes one; so may all
            of q, k and v, whose Shard(1) are heads. DTensors bring their mesh along.
        group: a process group, a DeviceMesh of one dimension, or None for all ranks.
        chunks: how many, of rows that differ by at most one; or the rows of each, in order; None for 4, or
            fewer of at least 1024 rows.
        causal, window, sm_scale, deterministic, impl: as in `attnlib.attention`, of the whole sequence.
        timeout: seconds that this rank waits for the others, as in `attention`.

    Returns:
        (B, S, outputs), the same on all ranks, a DTensor that says so if q is one; in memory (S, B, outputs).
        Each rank's part is rounded to the dtype of `q` before it is added.

    Raises:
        TypeError, ValueError: an argument does not fit, here; or options or shapes differ between ranks, on
            all of them.
        RuntimeError: another rank had an error, died, or did not come within `timeout`; torch.distributed
            is not initialized; or a second derivative was asked for.

    Example, under torchrun:
        >>> y = row_parallel_output(q, k, v, projection.weight, causal=True)
    """
    name = "row_parallel_output"
    heads = local_parts({"q": (q, 1), "k": (k, 1), "v": (v, 1)}, group, timeout, name)
    same_mesh = heads.mesh is not None and isinstance(weight, DTensor)
    beside = {"q": (q, 1)} if same_mesh else {}
    columns = local_parts({**beside, "weight": (weight, 1)}, heads.group, timeout, name)
    (q, k, v), weight = heads.tensors, columns.tensors[-1]
    links, _, error = linked(q, ranks_in_a_row(columns.group), timeout, name)
    q, k, v, weight = autocast(q, k, v, weight)
    options = Options(causal, window, sm_scale, False, deterministic, impl)
    _agree((q, k, v, weight), options, chunks, links, error)
    scale = q.shape[-1] ** -0.5 if sm_scale is None else float(sm_scale)
    params = Params(mask_window(causal, window), scale, None, True, deterministic, impl)
    y = _Output.apply(q, k, v, weight, Layer(links, params, spans_of(chunks, q.shape[2])))
    return heads.joined(y.transpose(0, 1), Replicate())


def spans_of(chunks: int | Sequence[int] | None, rows: int) -> tuple[range, ...]:
    """The rows of each chunk."""
    if chunks is None:
        chunks = max(1, min(MOST_CHUNKS, rows // LEAST_ROWS))
    if isinstance(chunks, int):
        chunks = [rows * (i + 1) // chunks - rows * i // chunks for i in range(chunks)]
    ends = [sum(chunks[: i + 1]) for i in range(len(chunks))]
    return tuple(range(end - size, end) for size, end in zip(chunks, ends, strict=True))


def seen_by(span: range, rows: int, keys: int, window: MaskWindow) -> tuple[range, MaskWindow]:
    """The keys that these rows see, of `rows` whose last stands at the last of `keys`; and the window among
    them, in which the span's last row stands at the last of these keys."""
    left, right = window
    here = range(span.start + keys - rows, span.stop + keys - rows)
    start = 0 if left is None else max(0, here.start - left)
    stop = keys if right is None else min(keys, here.stop + right)
    beyond = stop - here.stop  # keys after the span's last row
    return range(start, stop), MaskWindow(
        None if left is None else left + beyond, None if right is None else right - beyond
    )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, layer: Layer
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """(S, B, outputs), and the output and LSE of attention of each chunk."""
    B, H, S, D = q.shape
    y = q.new_empty(S, B, len(weight))
    outs, lses, flights = [], [], []
    for span in layer.spans:
        keys, window = seen_by(span, S, k.shape[2], layer.params.window)
        part = q[:, :, as_slice(span)], k[:, :, as_slice(keys)], v[:, :, as_slice(keys)]
        spare = layer.spare if flights else 0
        out, lse = dispatch.forward(*part, layer.params._replace(window=window, spare=spare))
        chunk = y[as_slice(span)]
        rows = out.permute(2, 0, 1, 3).reshape(len(span) * B, H * D)
        torch.mm(rows, weight.t(), out=chunk.view(len(span) * B, len(weight)))
        flights.append(layer.links.sum(chunk))
        outs.append(out)
        lses.append(lse)
    for flight in flights:
        flight.wait()
    return y, outs, lses


class _Output(torch.autograd.Function):
    """(S, B, outputs). The backward pass takes the rows in one piece: nothing of it waits for other ranks."""

    @staticmethod
    def forward(ctx, q, k, v, weight, layer: Layer):
        y, outs, lses = forward(q, k, v, weight, layer)
        ctx.layer = layer
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(q, k, v, weight, torch.cat(outs, 2), torch.cat(lses, 2))
        return y

    @staticmethod
    def backward(ctx, d_y):
        return *Computed.within_backward(partial(_gradients, ctx), d_y, *ctx.saved_tensors), None


def _gradients(ctx, d_y: torch.Tensor, *saved: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Those of q, k, v and the weight."""
    q, k, v, weight, out, lse = saved
    B, H, S, D = q.shape
    d_rows, d_weight = d_y.reshape(S * B, len(weight)), None
    if ctx.needs_input_grad[3]:
        d_weight = d_rows.t() @ out.permute(2, 0, 1, 3).reshape(S * B, H * D)
    if not any(ctx.needs_input_grad[:3]):
        return None, None, None, d_weight
    d_out = torch.empty_like(out)
    d_out.permute(2, 0, 1, 3).copy_((d_rows @ weight).view(S, B, H, D))
    return *dispatch.backward(d_out, dispatch.Saved(q, k, v, out, lse), ctx.layer.params), d_weight


def _agree(tensors: tuple, options: Options, chunks, links: Links, error: Exception | None) -> None:
    """Check the arguments here, if nothing is wrong yet, and compare them with those of the other ranks."""
    q, k, v, weight = tensors

    def stated() -> dict:
        arguments.check_row_parallel(q, k, v, weight, options)
        arguments.check_chunks(chunks, q.shape[2])
        return {
            "q": f"batch {q.shape[0]}, {q.shape[2]} rows of {str(q.dtype).removeprefix('torch.')}",
            "k": f"{k.shape[2]} rows",
            "weight": f"{len(weight)} outputs",
            **options._asdict(),
            "chunks": [len(span) for span in spans_of(chunks, q.shape[2])],
            "step": "row_parallel_output",
        }

    agree_on_all((links,), stated, error)

"""FLOPs of the operators, for `torch.utils.flop_counter.FlopCounterMode`."""

import importlib.util
import sys
from collections.abc import Iterable
from importlib.abc import MetaPathFinder

import torch

from attnlib.block_mask.mask import by_handle

COUNTER = "torch.utils.flop_counter"


def register_when_counted() -> None:
    """Tell PyTorch's FLOP counter of the operators, now or as soon as it is imported.

    Importing it here would import triton, and a notebook could no longer choose triton's interpreter.
    """
    if COUNTER in sys.modules:
        _register(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _Watch())


def _register(counter) -> None:
    formulas = {
        "attention_forward": forward_flops,
        "attention_backward": backward_flops,
        "attention_scored": scored_flops,
        "attention_scored_backward": scored_backward_flops,
        "attention_decode": decode_flops,
        "attention_bsfa": bsfa_flops,
        "attention_entmax": entmax_flops,
        "attention_entmax_backward": entmax_backward_flops,
    }
    for name, formula in formulas.items():
        counter.register_flop_formula(getattr(torch.ops.attnlib, name), get_raw=True)(formula)


class _Watch(MetaPathFinder):
    """Sees the counter being imported, once."""

    def find_spec(self, name, path=None, target=None):
        if name != COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = exec_module
        return spec


def forward_flops(q, k, v, *options, **named) -> int:
    """2 * H * (D + Dv) * Sq * Sk of each sequence, Dv columns of values. As for PyTorch's own attention, a
    causal mask halves nothing here; a window of left + right + 1 keys does count, because work grows with it,
    and so do the blocks of a block mask."""
    given = dict(zip(_OPTIONS, options, strict=False)) | named
    left, right = given.get("left"), given.get("right")
    width = None if left is None or right is None else left + right + 1
    pairs = sum(
        rows * (keys if width is None else min(keys, width)) for rows, keys in _lengths(q, k, given)
    )
    flops = 2 * q.shape[1] * (q.shape[-1] + v.shape[-1]) * pairs
    handle = given.get("block_mask")
    return flops if handle is None else round(flops * by_handle(handle).density())


_OPTIONS = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "left", "right", "sm_scale", "block_mask",
)  # fmt: skip
"""The options of the operators, in their order."""


def backward_flops(d_out, q, k, v, out, lse, *options, **named) -> int:
    """Of five products where the forward pass has two: three as large as Q K^T, two as large as P V."""
    forward, own, values = forward_flops(q, k, v, *options, **named), q.shape[-1], v.shape[-1]
    return forward * (3 * own + 2 * values) // (own + values)


def scored_flops(q, k, v, *options, **named) -> int:
    """Of the products alone, as without a score."""
    given = dict(zip(_SCORED_OPTIONS, options, strict=False)) | named
    return forward_flops(q, k, v, **{name: given.get(name) for name in ("left", "right", "block_mask")})


_SCORED_OPTIONS = (
    "alibi", "sinks", "bias", "soft_cap", "diagonal", "functions", "left", "right", "sm_scale", "block_mask",
)  # fmt: skip


def scored_backward_flops(d_out, q, k, v, out, lse, *options, **named) -> int:
    return scored_flops(q, k, v, *options, **named) * 5 // 2


def bsfa_flops(q, k, v, *_, **__) -> int:
    """Of all blocks: the host does not know which ones are kept."""
    return forward_flops(q, k, v)


def entmax_flops(q, k, v, *options, **named) -> int:
    """Of all keys: the host does not know which ones have weight."""
    return _entmax_flops(q, k, v, dict(zip(_ENTMAX_OPTIONS, options, strict=False)) | named)


def entmax_backward_flops(d_out, q, k, v, *options, **named) -> int:
    names = ["out", "tau", "flags", *(name for name in _ENTMAX_OPTIONS if name != "flags")]
    return _entmax_flops(q, k, v, dict(zip(names, options, strict=False)) | named) * 5 // 2


def _entmax_flops(q, k, v, given: dict) -> int:
    return forward_flops(q, k, v, **{name: given[name] for name in _ENTMAX_OPTIONS[-4:] if name in given})


_ENTMAX_OPTIONS = (
    "alpha", "causal", "sm_scale", "flags", "impl",
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k",
)  # fmt: skip


def decode_flops(q, k, v, *options, **named) -> int:
    """4 * H * D * Sq * S of each sequence, S its length without the keys that `starts` hides, or the size of
    the cache where lengths are not known. A window counts as in `forward_flops`."""
    given = dict(zip(_DECODE_OPTIONS, options, strict=False)) | named
    lengths, page_table, left, right, *_, starts = map(given.get, _DECODE_OPTIONS)
    room = k.shape[2] if page_table is None else page_table.shape[1] * k.shape[2]
    counts = [min(max(n, 0), room) for n in _values(lengths)] or [room] * q.shape[0]
    hidden = _values(starts) or [0] * q.shape[0]
    counts = [max(0, n - max(start, 0)) for n, start in zip(counts, hidden, strict=True)]
    if left is not None and right is not None:
        counts = [min(n, left + right + 1) for n in counts]
    return 4 * q.shape[1] * q.shape[-1] * q.shape[2] * sum(counts)


_DECODE_OPTIONS = "lengths", "page_table", "left", "right", "sm_scale", "lse", "split", "starts"


def _values(tensor) -> list[int]:
    """Of a tensor that is there and has values; none else."""
    unknown = tensor is None or tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor)
    return [] if unknown else tensor.tolist()


def _lengths(q, k, given: dict) -> Iterable[tuple[int, int]]:
    """(Sq, Sk) of each sequence of a batch."""
    cu_seqlens_q, cu_seqlens_k = given.get("cu_seqlens_q"), given.get("cu_seqlens_k")
    if cu_seqlens_q is None:
        return [(q.shape[2], k.shape[2])] * q.shape[0]
    if cu_seqlens_q.is_meta or isinstance(cu_seqlens_q, torch._subclasses.FakeTensor):
        longest = given.get("max_seqlen_q", 0), given.get("max_seqlen_k", 0)
        return [longest] * (len(cu_seqlens_q) - 1)  # the lengths are not known
    return zip(*(x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k)), strict=True)

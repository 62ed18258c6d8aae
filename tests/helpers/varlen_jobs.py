"""What ranks do in tests of `attnlib.distributed.attention_varlen` whose ranks keep their tokens."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from distributed_jobs import told
from torch.distributed.device_mesh import init_device_mesh

from attnlib import attention_varlen
from attnlib import distributed as cp
from attnlib.distributed import cut, varlen

TOKENS = 42


class Cut(NamedTuple):
    """A varlen call over ranks. ends: the values of `cu_seqlens`."""

    ends: tuple[int, ...] = (0, 9, 9, 10, 31, TOKENS)
    causal: bool = False
    window: tuple[int, int] | None = None
    method: str = "all_gather"
    heads: int = 3
    kv_heads: int = 1
    head_dim_v: int = 16
    impl: str | None = "reference"
    deterministic: bool = False
    scale: float | None = None

    @property
    def offsets(self) -> torch.Tensor:
        return torch.tensor(self.ends, dtype=torch.int32)

    @property
    def longest(self) -> int:
        return max(b - a for a, b in zip(self.ends, self.ends[1:], strict=False))

    @property
    def options(self) -> dict:
        return {
            "causal": self.causal, "window": self.window, "sm_scale": self.scale,
            "deterministic": self.deterministic, "impl": self.impl,
        }  # fmt: skip

    def inputs(self) -> list[torch.Tensor]:
        """q, k, v and the gradient of the output, of all tokens."""
        generator = torch.Generator().manual_seed(5)
        sizes = (self.heads, 16), (self.kv_heads, 16), (self.kv_heads, self.head_dim_v)
        sizes += ((self.heads, self.head_dim_v),)
        return [torch.randn(self.ends[-1], *size, generator=generator) for size in sizes]


def one_process(case: Cut) -> list[torch.Tensor]:
    """out, LSE, dq, dk, dv of one process."""
    *given, d_out = case.inputs()
    given = [x.requires_grad_() for x in given]
    lengths = case.offsets, case.offsets, case.longest, case.longest
    out, lse = attention_varlen(*given, *lengths, return_lse=True, **case.options | {"impl": "reference"})
    out.backward(d_out)
    return [out.detach(), lse, *(x.grad for x in given)]


def over_ranks(case: Cut, placed: bool = False) -> list[torch.Tensor]:
    """The same of this rank. placed: from DTensors that `distribute_tensor` makes."""
    from torch.distributed.tensor import Shard, distribute_tensor

    *given, d_out = (cp.shard(x, dim=0) for x in case.inputs())
    if placed:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        given = [distribute_tensor(x, mesh, [Shard(0)]) for x in case.inputs()[:3]]
    given = [x.detach().clone().requires_grad_() for x in given]
    out, lse = cp.attention_varlen(
        *given, case.offsets, case.longest, return_lse=True, method=case.method, timeout=200, **case.options
    )
    assert not lse.requires_grad
    if placed:
        assert out.placements == (Shard(0),) and lse.placements == (Shard(1),)
        out, lse = out.to_local(), lse.to_local()
    out.backward(d_out)
    return [out.detach(), lse, *(x.grad.to_local() if placed else x.grad for x in given)]


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest from what one process has for this rank's tokens, as a part of the largest number or of 1.
    Infinite for a NaN."""
    off = [
        ((x - cp.shard(y, dim=dim)).abs().max() / y.abs().max().clamp_min(1)).nan_to_num(torch.inf).item()
        for x, y, dim in zip(found, expected, (0, 1, 0, 0, 0), strict=True)
    ]
    return max(off)


def errors(cases: list[Cut], placed: bool = False) -> list[float]:
    return [difference(over_ranks(case, placed), one_process(case)) for case in cases]


def ways(heads: list[tuple[int, int]]) -> list[str]:
    """What "auto" becomes with so many heads of q and of k."""
    own, kept = cut.forward, []

    def counted(*args):
        kept.append(True)
        return own(*args)

    found = []
    cut.forward = counted
    try:
        for q_heads, kv_heads in heads:
            kept.clear()
            over_ranks(Cut(heads=q_heads, kv_heads=kv_heads, method="auto"))
            found.append("all_gather" if kept else "ulysses")
    finally:
        cut.forward = own
    return found


def elements_sent(case: Cut) -> dict[str, int]:
    """How many numbers this rank sends to others, forward and backward, and receives."""
    *given, d_out = (cp.shard(x, dim=0).clone().requires_grad_() for x in case.inputs())
    links = varlen.Links
    own, counts = links.start, {"sent": 0, "received": 0}

    def counted(self, sent, received):
        counts["sent"] += sum(x.numel() for _, x in sent)
        counts["received"] += sum(x.numel() for _, x in received)
        return own(self, sent, received)

    links.start, found = counted, {}
    try:
        out = cp.attention_varlen(
            *given, case.offsets, case.longest, method=case.method, timeout=200, **case.options
        )
        found["forward"] = dict(counts)
        out.backward(d_out)
        found["both"] = dict(counts)
    finally:
        links.start = own
    return found


def wrong(what: str) -> str:
    """The error of a call: all ranks make the same mistake, or rank 1 has something else."""
    second = dist.get_rank() == 1
    case = Cut()
    q, k, v, _ = (cp.shard(x, dim=0).contiguous() for x in case.inputs())
    options = {"method": "all_gather", "impl": "reference", "timeout": 20}
    if what == "ulysses":
        options["method"] = "ulysses"
    elif what == "another method":
        options["method"] = "ring"
    elif what == "no method":
        options["method"] = None
    elif what == "unlike":
        options["method"] = "auto" if second else "all_gather"
    elif what == "gradients":
        if second:
            q.requires_grad_()
    elif what in ("decode", "hopper"):
        options["impl"] = what
        q.requires_grad_()
    call = partial(cp.attention_varlen, q, k, v, case.offsets, case.longest, **options)
    if what != "captured":
        return told(call)
    known = varlen.check_offsets_of
    varlen.check_offsets_of = lambda *_: None  # as while a CUDA graph is captured
    try:
        return told(call)
    finally:
        varlen.check_offsets_of = known


def crossed() -> str:
    """Two calls, of which each rank goes backward through another one: the error."""
    case = Cut()
    q, k, v, _ = (cp.shard(x, dim=0).clone().requires_grad_() for x in case.inputs())
    call = partial(cp.attention_varlen, method="all_gather", impl="reference", timeout=200)
    found = [call(q * factor, k, v, case.offsets, case.longest) for factor in (1, 2)]
    return told(lambda: found[dist.get_rank()].sum().backward())


def second_derivative() -> str:
    case = Cut()
    q, k, v, _ = (cp.shard(x, dim=0).clone().requires_grad_() for x in case.inputs())
    out = cp.attention_varlen(
        q, k, v, case.offsets, case.longest, method="all_gather", impl="reference", timeout=200
    )
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    return told(lambda: (gradient.square().sum() + q.sum()).backward())


def of_different_inputs() -> float:
    """Rank 0 asks for the gradient of q, the others for that of k; and offsets change before they do."""
    case = Cut(causal=True)
    *given, d_out = (cp.shard(x, dim=0).clone().requires_grad_() for x in case.inputs())
    offsets, which = case.offsets, min(dist.get_rank(), 1)
    out = cp.attention_varlen(*given, offsets, case.longest, method="all_gather", timeout=200, **case.options)
    offsets.zero_()
    (gradient,) = torch.autograd.grad(out, given[which], d_out)
    expected = cp.shard(one_process(case)[2 + which], dim=0)
    return (gradient - expected).abs().max().item()


def without_elements() -> list[tuple[int, ...]]:
    """The shapes of outputs and LSEs of no token and of no heads."""
    found = []
    for tokens, heads in ((0, 3), (4, 0)):
        given = [torch.randn(tokens, heads, 16, requires_grad=True) for _ in range(3)]
        whole = tokens * dist.get_world_size()
        offsets = torch.tensor([0, 0, whole, whole], dtype=torch.int32)
        out, lse = cp.attention_varlen(
            *given, offsets, whole, causal=True, return_lse=True, method="all_gather", impl="reference",
            timeout=200,
        )  # fmt: skip
        out.sum().backward()
        found += [tuple(out.shape), tuple(lse.shape), tuple(given[1].grad.shape)]
    return found

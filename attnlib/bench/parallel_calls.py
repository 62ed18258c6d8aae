"""Attention of one sequence over ranks, as it is timed: attnlib's ways beside one GPU, and the peers. For
tests/gpu/time_distributed.py; every rank makes the same calls in the same order."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from attnlib import attention
from attnlib import distributed as cp
from attnlib.bench import ranks
from attnlib.bench.names import CONTROL
from attnlib.bench.shapes import Shape
from attnlib.distributed import api, links, rotation
from attnlib.distributed.function import Attention
from attnlib.distributed.groups import Group
from attnlib.params import MaskWindow, Params

DTYPE = torch.bfloat16
ONE, EACH, OURS = "attnlib, one GPU", "attnlib, one GPU, on each", "attnlib"
APART, ULYSSES = "attnlib, without transfers", "attnlib, ulysses"
IN_ORDER = "attnlib, rows in order"
"""Each rank has a piece of the sequence, and the call moves rows to where a causal mask gives all ranks the
same to do; the other ways find them there."""
RING, GATHER, HYBRID = "attnlib, ring", "attnlib, all_gather", "attnlib, hybrid"
"""Beside "auto", with more than two GPUs. The hybrid's ranks share out the heads by twos."""
OF_TORCH, ON_OURS = "torch context_parallel, cuDNN, alltoall", "torch context_parallel, attnlib, alltoall"
RING_FA3 = {True: "ring-flash-attn, FA3, zigzag", False: "ring-flash-attn, FA3, ring"}
"""By whether a call is causal."""


def several_ways() -> bool:
    """Whether the methods differ, and two dimensions of ranks are possible."""
    return dist.get_world_size() > 2 and dist.get_world_size() % 2 == 0


class Case(NamedTuple):
    length: int
    causal: bool
    heads: int = 16
    head_dim: int = 128
    impl: str | None = None

    def flops(self, which: str) -> float:
        whole = 4 * self.heads * self.head_dim * self.length**2 / (2 if self.causal else 1)
        return whole * (2.5 if which == "backward" else 1)

    @property
    def label(self) -> str:
        return f"S{self.length} {'causal' if self.causal else 'dense'}"

    @property
    def shape(self) -> Shape:
        dtype = str(DTYPE).removeprefix("torch.")
        return Shape(1, self.heads, self.length, self.head_dim, self.causal, dtype)


class Timed(NamedTuple):
    """forward() -> this rank's output; inputs: of which the backward pass gives gradients; leave(): undo what
    making it did; alone: on the first rank only; whole: its rows are those of the whole sequence; group:
    whose rows they are otherwise, and in_order: whether they are a piece of the sequence."""

    forward: Callable[[], torch.Tensor]
    inputs: Sequence[torch.Tensor]
    leave: Callable[[], None] = lambda: None
    alone: bool = False
    whole: bool = False
    group: Group = None
    in_order: bool = False


def whole(case: Case) -> list[torch.Tensor]:
    """q, k, v and d_out of the whole sequence, equal on all ranks."""
    where = ranks.device()
    generator = torch.Generator(where).manual_seed(0)
    shape = 1, case.length, case.heads, case.head_dim
    return [
        torch.randn(shape, generator=generator, device=where, dtype=DTYPE).transpose(1, 2) for _ in range(4)
    ]


def own(x: torch.Tensor, case: Case, group: Group = None, in_order: bool = False) -> torch.Tensor:
    """This rank's rows, in memory as (B, S, H, D)."""
    rows = cp.shard(x, causal=case.causal and not in_order, group=group)
    return rows.transpose(1, 2).contiguous().transpose(1, 2)


@functools.cache
def by_twos() -> DeviceMesh:
    return init_device_mesh(ranks.device().type, (dist.get_world_size() // 2, 2))


def one_gpu(case: Case, tensors: list[torch.Tensor], alone: bool = True) -> Timed:
    inputs = [x.detach().requires_grad_() for x in tensors[:3]]
    return Timed(
        lambda: attention(*inputs, causal=case.causal, impl=case.impl), inputs, alone=alone, whole=True
    )


def ours(
    case: Case, tensors: list[torch.Tensor], method: str = "auto", group: Group = None, in_order: bool = False
) -> Timed:
    inputs = [own(x, case, group, in_order).requires_grad_() for x in tensors[:3]]
    options = {"causal": case.causal, "method": method, "impl": case.impl, "group": group}
    options["in_order"] = in_order
    return Timed(lambda: cp.attention(*inputs, **options), inputs, group=group, in_order=in_order)


class NoLinks:
    """In the place of links: others' keys are there already, random ones, and nothing is sent."""

    broken = None

    def __init__(self) -> None:
        self.rank, self.ranks, self.kept = dist.get_rank(), dist.get_world_size(), {}

    def room(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        if shape not in self.kept:
            self.kept[shape] = torch.randn(shape, dtype=like.dtype, device=like.device)
        return self.kept[shape]

    def start(self, sent: links.Sent, received: links.Sent) -> links.Transfer:
        return links.Transfer([], [], self)

    def agree(self, options, error=None) -> None:
        pass


def without_transfers(case: Case, tensors: list[torch.Tensor]) -> Timed:
    inputs = [own(x, case).requires_grad_() for x in tensors[:3]]
    window = MaskWindow(None, 0 if case.causal else None)
    params = Params(window, case.head_dim**-0.5, return_lse=True, impl=case.impl)
    method = api._decided("auto", *inputs[:2], dist.get_world_size(), window)
    job = rotation.Job(NoLinks(), params, method)
    return Timed(lambda: Attention.apply(*inputs, job, rotation)[0], inputs)


def of_torch(case: Case, tensors: list[torch.Tensor], ours: bool = False) -> Timed:
    """PyTorch's context_parallel, which balances head and tail of causal calls, and of no others."""
    from torch.distributed.tensor.experimental import _attention
    from torch.nn import attention as backends

    mesh = init_device_mesh(ranks.device().type, (dist.get_world_size(),))
    inputs = [x.detach().contiguous().clone() for x in tensors[:3]]
    _attention._cp_options.enable_load_balance = case.causal
    _attention.set_rotate_method("alltoall")
    inside = _attention.context_parallel(
        mesh, buffers=inputs, buffer_seq_dims=[2] * 3, no_restore_buffers=set(inputs)
    )
    inside.__enter__()
    for x in inputs:
        x.requires_grad_()
    kernels = backends.SDPBackend.FLASH_ATTENTION if ours else backends.SDPBackend.CUDNN_ATTENTION

    def forward() -> torch.Tensor:
        _attention._cp_options.enable_load_balance = case.causal
        with backends.sdpa_kernel(kernels):
            return torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=case.causal)

    return Timed(forward, inputs, lambda: inside.__exit__(None, None, None))


def on_attnlib(case: Case, tensors: list[torch.Tensor]) -> Timed:
    """The same with attnlib's kernels in the place of PyTorch's FlashAttention."""
    from torch.nn import attention as backends

    from attnlib import sdpa

    sdpa.register()
    backends.activate_flash_attention_impl(sdpa.NAME)
    timed = of_torch(case, tensors, ours=True)

    def leave() -> None:
        timed.leave()
        backends.restore_flash_attention_impl()

    return timed._replace(leave=leave)


def ring_flash_attn(case: Case, tensors: list[torch.Tensor]) -> Timed:
    """Its zigzag ring where a call is causal, which that needs, else its plain one."""
    file = os.environ.get("ATTNLIB_PEERS_EXTRA")
    if not file:
        raise ImportError("ATTNLIB_PEERS_EXTRA names no file")
    spec = importlib.util.spec_from_file_location("peers_extra", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install_flash_attn_shim()
    call = module.make_ring_flash_attn(*(own(x, case) for x in tensors[:3]))
    inside = inspect.getclosurevars(call).nonlocals
    inputs = [inside[name].requires_grad_() for name in ("qq", "kk", "vv")]
    if not case.causal:
        plain = importlib.import_module("ring_flash_attn.ring_flash_attn").ring_flash_attn_func
        return Timed(lambda: plain(*inputs, causal=False).transpose(1, 2), inputs)
    return Timed(call, inputs)


MAKERS: dict[str, Callable[[Case, list[torch.Tensor]], Timed]] = {
    ONE: one_gpu,
    EACH: lambda case, tensors: one_gpu(case, tensors, alone=False),
    OURS: ours,
    OURS + CONTROL: ours,
    APART: without_transfers,
    IN_ORDER: lambda case, tensors: ours(case, tensors, in_order=True),
    ULYSSES: lambda case, tensors: ours(case, tensors, "ulysses"),
    RING: lambda case, tensors: ours(case, tensors, "ring"),
    GATHER: lambda case, tensors: ours(case, tensors, "all_gather"),
    HYBRID: lambda case, tensors: ours(case, tensors, "auto", by_twos()),
    OF_TORCH: of_torch,
    ON_OURS: on_attnlib,
    RING_FA3[True]: ring_flash_attn,
    RING_FA3[False]: ring_flash_attn,
}

"""A model of attention to one sequence over many GPUs: arithmetic of FLOPs, bytes and rates, which are the
caller's. Nothing here is measured or fitted; chapter 42 holds it against two GPUs and draws it up to 1024."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["ring", "all_gather", "ulysses", "hybrid"]
Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class Cluster:
    """GPUs and links, all rates of one GPU in one direction.

    Attributes:
        tflops: what the attention kernel computes, forward and backward, 1e12 FLOPs a second.
        near: GB/s between GPUs of a node; 450 is NVLink 4 as published (900 both ways).
        far: GB/s between nodes; 50 is one port of InfiniBand NDR as published (400 Gb/s).
        node: GPUs of a node.
        memory: GB/s of the GPU's memory, for what is merged and copied; 4800 is an H200's as published, which
            no copy exceeds.
        held: the share of its multiprocessors that NCCL holds while it sends, 16 of 132 in the package.
    """

    tflops: tuple[float, float]
    near: float = 450.0
    far: float = 50.0
    node: int = 8
    memory: float = 4800.0
    held: float = 16 / 132

    def link(self, gpus: int) -> float:
        """What limits a step in which all of so many GPUs send to others: one pair between two nodes."""
        return self.near if gpus <= self.node else self.far


@dataclass(frozen=True)
class Call:
    """A call (B = 1) in a two-byte dtype, tokens shared out evenly."""

    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    causal: bool = True

    @property
    def flops(self) -> float:
        return (2 if self.causal else 4) * self.heads * self.head_dim * self.tokens**2

    def bytes_of(self, rows: float, heads: float) -> float:
        """Of one tensor."""
        return 2 * rows * heads * self.head_dim


@dataclass(frozen=True)
class Estimate:
    """Seconds of a pass, and of its kernels alone; bytes that a GPU holds besides its own rows meanwhile."""

    seconds: float
    kernels: float
    bytes: float

    @property
    def efficiency(self) -> float:
        return self.kernels / self.seconds


def estimate(
    call: Call, gpus: int, method: Method, cluster: Cluster, which: Pass = "forward"
) -> Estimate | None:
    """None where the method can't share out the heads. The hybrid shares out heads within a node."""
    backward = which == "backward"
    kernels = call.flops * (2.5 if backward else 1) / gpus / cluster.tflops[backward] / 1e12
    if gpus == 1:
        return Estimate(kernels, kernels, 0)
    if method in ("ring", "all_gather"):
        return _rotated(call, gpus, 1, kernels, cluster, backward, method == "all_gather")
    shares = gpus if method == "ulysses" else min(gpus, cluster.node)
    if gpus % shares or call.kv_heads % shares:
        return None
    held, seconds = _exchanged(call, gpus, shares, cluster)
    if shares == gpus:
        return Estimate(kernels + seconds, kernels, held)
    rest = _rotated(call, gpus // shares, shares, kernels, cluster, backward, False)
    return Estimate(rest.seconds + seconds, kernels, rest.bytes + held)


def _exchanged(call: Call, gpus: int, shares: int, cluster: Cluster) -> tuple[float, float]:
    """(bytes, seconds) of the exchange of rows for heads between `shares` GPUs, and back; nothing hides it.
    Forward these are q, k, v and the output. Backward they are the gradients of the four: q, k, v and the
    output are still there as they were exchanged. A tensor is copied once as a whole, before it is sent, into
    pieces for each GPU, or after it came, out of them; and the piece that stays is copied to its place. A
    copy reads and writes."""
    each = call.bytes_of(call.tokens / gpus, 2 * (call.heads + call.kv_heads))
    sent, copied = each * (shares - 1) / shares, 2 * each * (1 + 1 / shares)
    return each, (sent / cluster.link(shares) + copied / cluster.memory) / 1e9


def _rotated(
    call: Call, ranks: int, shares: int, kernels: float, cluster: Cluster, backward: bool, at_once: bool
) -> Estimate:
    """Keys and values of `ranks` go round; each rank is `shares` GPUs, which have a share of the heads each.
    Every rank sends each other one the keys that it needs, all of its own, or three quarters on average over
    the ranks of a zig-zag; and takes back gradients of them."""
    rows, kv_heads = call.tokens / ranks, call.kv_heads / shares
    keys, seen = 2 * call.bytes_of(rows, kv_heads), 0.75 if call.causal else 1.0
    step = seen * keys / cluster.link(ranks * shares) / 1e9 * (2 if backward else 1)
    own, other = kernels / ranks, kernels / ranks  # zig-zag: a round is as much as what is one's own
    # Forward, the epilogue reads an existing output and writes it again: 2 bytes a number both ways, or 4 in
    # the float32 of several rounds. Backward, two parts of each gradient are read and their sum is written.
    rows_q, rows_k = (call.bytes_of(rows, n / shares) / 2 for n in (call.heads, call.kv_heads))
    merged = 6 * (rows_q + 2 * rows_k) if backward else (4 if ranks == 2 or at_once else 8) * rows_q
    merge = merged / cluster.memory / 1e9 * (1 if at_once else ranks - 1)
    lost = merge + cluster.held * (ranks - 1) * step
    if at_once:  # half of one's own covers the way there, the other half the way back
        seconds = max(own, (ranks - 1) * step) + (ranks - 1) * other
        return Estimate(seconds + lost, kernels, (ranks - 1) * keys * seen)
    seconds = max(own, step) + (ranks - 2) * max(other, step) + other
    return Estimate(seconds + lost, kernels, 2 * keys)

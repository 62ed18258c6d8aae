"""Decoding with the keys and values of the last layers in host memory, where the CPU computes their
attention: the cache of such a layer, and how many layers stay on the GPU. Chapter 40 measures it.

It is the book's and not the package's: no kernel of the package is in it, and which layers of a model decode
where is for the program that serves it to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""What scaled_dot_product_attention runs on a CPU, with the LSE."""


def host_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """(B, Hkv, G, D), attention of a token's G query heads for each key head to all keys, on the CPU.

    q is (B, Hkv, G, D); k and v are (B, Hkv, S, D), a slice of a cache's first S rows. PyTorch gives a thread
    whole heads. So the keys are cut into `parts`, which become heads without a copy, and whose results are
    merged by their LSE."""
    B, H, G, D = q.shape
    size = k.shape[2] // parts
    whole = size * parts
    pieces = [x[:, :, :whole].unflatten(2, (parts, size)).flatten(0, 1) for x in (k, v)]  # [B*H, parts, ...]
    rows = q.reshape(B * H, 1, G, D)
    found = [_flash_on_cpu(rows.expand(-1, parts, -1, -1), *pieces)] if size else []
    if whole < k.shape[2]:
        found.append(_flash_on_cpu(rows, *(x[:, :, whole:].flatten(0, 1)[:, None] for x in (k, v))))
    outs, lses = (torch.cat(each, 1) for each in zip(*found, strict=True))
    weights = torch.softmax(lses, 1)[..., None]  # [B*H, parts, G, 1]
    return (weights * outs).sum(1).to(q.dtype).view(B, H, G, D)


class HostLayer:
    """The keys and values of one layer in host memory, pinned where there is a GPU.

    k and v are (B, Hkv, capacity, D), of which the first `length` are there. `parts`: see `host_attention`;
    by default so many that every thread has work."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, parts: int | None = None) -> None:
        pinned = torch.cuda.is_available()
        self.k, self.v = (torch.empty(shape, dtype=dtype, pin_memory=pinned) for _ in range(2))
        self.length = 0
        self.parts = parts or max(1, -(-torch.get_num_threads() // (shape[0] * shape[1])))
        self._pinned, self._staging = pinned, {}

    def append(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keys and values (B, Hkv, new, D) of new tokens, from any device."""
        B, H, capacity, D = self.k.shape
        new = k.shape[2]
        if k.shape != v.shape or k.shape != (B, H, new, D):
            raise ValueError(f"k, v: expected ({B}, {H}, new, {D}), got {tuple(k.shape)}, {tuple(v.shape)}")
        if self.length + new > capacity:
            raise ValueError(f"k: expected at most {capacity - self.length} new tokens, got {new}")
        for cache, x in ((self.k, k), (self.v, v)):
            cache[:, :, self.length : self.length + new].copy_(x)
        self.length += new

    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """(B, H, 1, D) on the device of q, attention of the newest token's heads: q comes down, the CPU
        computes, the output goes up."""
        B, kv_heads, _, D = self.k.shape
        if q.dim() != 4 or q.shape[0] != B or q.shape[1] % kv_heads or q.shape[2:] != (1, D):
            raise ValueError(f"q: expected ({B}, a multiple of {kv_heads}, 1, {D}), got {tuple(q.shape)}")
        if not self.length:
            raise ValueError("q: expected keys to attend to, got a cache of length 0")
        down, up = self._staged(q)
        down.copy_(q, non_blocking=True)
        if q.is_cuda:
            torch.cuda.current_stream(q.device).synchronize()  # the CPU is about to read it
        seen = (x[:, :, : self.length] for x in (self.k, self.v))
        up.copy_(host_attention(down.view(B, kv_heads, -1, D), *seen, self.parts).view(q.shape))
        return up.to(q.device, non_blocking=True) if q.is_cuda else up.clone()

    def _staged(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where q comes to, and the output goes from. The next call's synchronization guards both."""
        if q.shape not in self._staging:
            self._staging[q.shape] = tuple(
                torch.empty(q.shape, dtype=q.dtype, pin_memory=self._pinned) for _ in range(2)
            )
        return self._staging[q.shape]


@dataclass(frozen=True)
class Plan:
    """Which layers of a model keep their keys and values where: the first `gpu_layers` on the GPU."""

    gpu_layers: int
    host_layers: int
    gpu_bytes: int
    host_bytes: int

    def step_ms(self, gpu_ms: float, host_ms: float) -> float:
        """Of the attention of all layers in a step, one after the other, from the ms of one on either."""
        return self.gpu_layers * gpu_ms + self.host_layers * host_ms


def layer_bytes(tokens: int, kv_heads: int, head_dim: int, itemsize: int = 2) -> int:
    """Keys and values of one layer, of all sequences together."""
    return 2 * tokens * kv_heads * head_dim * itemsize


def plan_layers(free: int, layers: int, per_layer: int, host_free: int | None = None) -> Plan:
    """As many layers on the GPU as fit into its `free` bytes, which weights and activations leave; the rest
    in host memory, of which `host_free` bytes may be pinned (None: no limit).

    ValueError if an argument makes no sense, or if the rest does not fit into host memory."""
    for name, value, least in (("free", free, 0), ("layers", layers, 1), ("per_layer", per_layer, 1)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    here = min(layers, free // per_layer)
    there = layers - here
    if host_free is not None and there * per_layer > host_free:
        raise ValueError(
            f"host_free: expected at least {there * per_layer} bytes for {there} of {layers} layers, got "
            f"{host_free}"
        )
    return Plan(here, there, here * per_layer, there * per_layer)

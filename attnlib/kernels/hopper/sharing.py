"""Grouped heads, backward: how many of a group's query heads a program visits, and where programs that share
a key head leave dK and dV."""

from __future__ import annotations

from typing import NamedTuple

from attnlib.kernels.common.descriptors import Window
from attnlib.kernels.common.launch_postprocess import Sums, conversion
from attnlib.kernels.common.launch_preprocess import Preprocess
from attnlib.kernels.common.launcher import Launch, Part
from attnlib.kernels.common.signature import Signature


def query_heads(call: Signature) -> int:
    """Of a group, that one program visits.

    Raises:
        ValueError: the configuration says a number that does not divide the group.
    """
    _, H, H_kv, _, _ = call.dimensions()
    group, visited = H // H_kv, call.config.visited
    if visited is None:
        return group
    if visited < 1 or group % visited:
        raise ValueError(f"visited: expected a divisor of the group of {group} query heads, got {visited}")
    return visited


class SharedKeys(NamedTuple):
    """`share` programs for each block of keys of a key head, and the sums that they leave in the buffer:
    float32 of dK, then of dV. heads: B * H_kv, varlen H_kv; padded: keys of one, with those that fill blocks
    up."""

    call: Signature
    share: int
    heads: int
    padded: int

    @property
    def _parts(self) -> int:
        """Sums for each head."""
        return 1 if self.call.config.added else self.share

    def _elements(self, width: int) -> int:
        return self.heads * self._parts * self.padded * width

    @property
    def elements(self) -> int:
        return sum(map(self._elements, self._widths))

    @property
    def _widths(self) -> tuple[int, int]:
        config, head_dim = self.call.config, self.call.head_dim
        return config.width(head_dim), config.value_width(head_dim)

    def pointers(self, memory: Preprocess) -> dict[str, Part]:
        """Of the kernel; `memory` is followed by the sums."""
        start = memory.following.start
        second = start + self._elements(self._widths[0])
        return {"dk_ptr": Part("buffer", start), "dv_ptr": Part("buffer", second)}

    def conversions(self, memory: Preprocess, dk: Window, dv: Window) -> list[Launch]:
        """What makes dK and dV of the sums."""
        places, scales = self.pointers(memory), (self.call.sm_scale, 1.0)
        found = []
        for name, gradient, width, scale in zip(("dk", "dv"), (dk, dv), self._widths, scales, strict=True):
            start = places[f"{name}_ptr"].start
            block_n = self.call.config.block_n
            sums = Sums(name, start, self.heads, self.padded, block_n, width, scale, self._parts)
            found.append(conversion(self.call, gradient, sums))
        return found

"""Grouped heads, backward: how many of a group's query heads a program visits, and where programs that share
a key head leave dK and dV."""

from __future__ import annotations

from typing import NamedTuple

from attnlib.kernels.common.descriptors import Window
from attnlib.kernels.common.launch_postprocess import Sums, conversion
from attnlib.kernels.common.launcher import Launch
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
    """`share` programs for each block of keys of a key head, and the float32 sums that they leave in the
    buffer: for 64 keys those of dK, then those of dV. heads: B * H_kv, varlen H_kv; padded: keys of one, with
    those that fill blocks up."""

    call: Signature
    share: int
    heads: int
    padded: int

    @property
    def _parts(self) -> int:
        """Sums for each head."""
        return 1 if self.call.config.added else self.share

    @property
    def _widths(self) -> tuple[int, int]:
        config, head_dim = self.call.config, self.call.head_dim
        return config.width(head_dim), config.value_width(head_dim)

    @property
    def elements(self) -> int:
        return self.heads * self._parts * self.padded * sum(self._widths)

    def conversions(self, start: int, dk: Window, dv: Window) -> list[Launch]:
        """What makes dK and dV of the sums, which begin at element `start`."""
        config, (width, values) = self.call.config, self._widths

        def sums(name: str, start: int, width: int, others: int, scale: float) -> Sums:
            more = width, scale, self._parts, others
            return Sums(name, start, self.heads, self.padded, config.block_n, *more)

        return [
            conversion(self.call, dk, sums("dk", start, width, values, self.call.sm_scale)),
            conversion(self.call, dv, sums("dv", start + 64 * width, values, width, 1.0)),
        ]

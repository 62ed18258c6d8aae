"""Launch what every backward pass begins with, and the memory that it fills."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from attnlib.kernels.common.descriptors import Window
from attnlib.kernels.common.launcher import Descriptor, Launch, Part
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.common.tiles import block_d

KERNEL = "attnlib.kernels.common.preprocess.attention_backward_preprocess"
ROWS = 64
"""Rows of a block, at most."""
CHUNK = 1024
"""Elements that a program sets to 0 at a time, where there are more."""
TURNS = 16
"""Words of 32 bits for as many rows: a counter, see `turns`, and what keeps it apart from the next one."""


class Preprocess(NamedTuple):
    """The launch that computes the LSE in base 2 and delta of every row, and the memory that it fills: part
    of a buffer of float32 of so many `elements`, at the end of which are (2, heads, padded) for the two,
    `padded` being rows padded to whole tiles. Before them may be sums of dQ, as many rows of `sums_width`
    columns; then the counters of `turns`, where there are any, and at the very end what `followed_by`
    adds."""

    launch: Launch
    heads: int
    padded: int
    sums_width: int
    counters: int = 0  # for 64 rows
    more: int = 0

    @property
    def rows(self) -> Part:
        return Part("buffer", self.heads * self.padded * self.sums_width)

    @property
    def elements(self) -> int:
        return self.following.start + self.more

    @property
    def following(self) -> Part:
        return Part("buffer", self._counters_start + self.heads * self.padded // 64 * self.counters)

    @property
    def _counters_start(self) -> int:
        return self.rows.start + 2 * self.heads * self.padded

    @property
    def turns(self) -> Part:
        return Part("buffer", self._counters_start) if self.counters else Part("none")

    def followed_by(self, elements: int, zeros: bool) -> Preprocess:
        """With so many more, a multiple of CHUNK, which the launch sets to 0 where they are to be `zeros`."""
        launch = self.launch
        if zeros:
            launch = replace(
                launch,
                pointers={**launch.pointers, "more_ptr": self.following},
                scalars={**launch.scalars, "more": elements // CHUNK},
                constants={**launch.constants, "CHUNK": CHUNK},
            )
        return self._replace(launch=launch, more=elements)

    def descriptor(self, block_m: int, layout=None) -> Descriptor:
        """Of one of the two, for tiles of `block_m` rows."""
        window = (2, self.heads, self.padded), (self.heads * self.padded, self.padded, 1)
        return Descriptor(self.rows, window, (1, 1, block_m), layout)


def preprocess(
    call: Signature, d_out: Window, out: Window, padding: int, sums_width: int = 0, turns: bool = False
) -> Preprocess:
    """Rows are kept padded to a multiple of `padding`, so that tiles of that many read them without a mask.
    With a `sums_width` the launch also sets so many float32 for each of these rows to 0, and with `turns` the
    counters of who adds to them."""
    B, H, _, S_q, _ = call.dimensions()
    rows, width = min(ROWS, padding), block_d(call.value_dim)
    # Varlen sequence b begins with tile cu_seqlens_q[b] // padding + b, whatever the lengths are.
    heads, tiles = (H, call.q[0] // padding + B) if call.varlen else (B * H, -(-S_q // padding))
    padded = tiles * padding
    block = (*((1, 1, 1) if call.varlen else (1, 1)), rows, width)
    memory = Preprocess(None, heads, padded, sums_width, TURNS if turns else 0)
    launch = Launch(
        KERNEL,
        (heads * padded // rows, 1, 1),
        descriptors={
            "desc_o": Descriptor(Part("out"), out, block),
            "desc_do": Descriptor(Part("d_out"), d_out, block),
        },
        pointers={
            "lse_ptr": Part("lse"),
            "rows_ptr": memory.rows,
            "sums_ptr": Part("buffer" if sums_width else "none"),
            "turns_ptr": memory.turns,
            "more_ptr": Part("none"),
            "cu_q": Part("cu_q"),
        },
        scalars={
            "S_q": S_q, "T_q": call.q[0] if call.varlen else None, "H": H, "B": B, "padded": padded,
            "more": None,
        },  # fmt: skip
        constants={
            "BLOCK_M": rows, "BLOCK_D": width, "PADDING": padding, "SUMS_D": sums_width,
            "TURNS": memory.counters, "CHUNK": 0,
        },  # fmt: skip
        options={"num_warps": 4},
    )
    return memory._replace(launch=launch)

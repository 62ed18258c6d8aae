"""Launch the kernel that every backward pass begins with, and lay out the memory that it fills."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import Window, heads_are_close
from attnlib.kernels.common.launcher import Descriptor, Launch, Part
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.common.tiles import block_d

KERNEL = "attnlib.kernels.common.preprocess.attention_backward_preprocess"
ROWS = 64
"""Rows of a block, at most."""
CHUNK = 1024
"""Elements that a program sets to 0 at a time, where there are more."""
TURNS = 16
"""Words of 32 bits for each 64 rows: a counter, see `turns`, and padding up to the next one."""


class Preprocess(NamedTuple):
    """The launch that computes the LSE in base 2 and delta of every row, and the float32 buffer that it
    fills.

    The buffer holds, in this order: the sums of dQ (heads, padded, sums_width), if there are any; LSE and
    delta (2, heads, padded); counters for `turns`, if there are any; and what `followed_by` adds.

    Attributes:
        padded: rows of a head, padded to whole tiles.
        sums_width: columns of the sums of dQ, 0 for none.
        counters: words of counters for each 64 rows, 0 for none.
        more: elements that `followed_by` has added.
    """

    launch: Launch
    heads: int
    padded: int
    sums_width: int
    counters: int = 0
    more: int = 0

    @property
    def rows(self) -> Part:
        """LSE and delta."""
        return Part("buffer", self.heads * self.padded * self.sums_width)

    @property
    def deltas(self) -> Part:
        """Delta alone."""
        return Part("buffer", self.rows.start + self.heads * self.padded)

    @property
    def elements(self) -> int:
        """Of the whole buffer."""
        return self.following.start + self.more

    @property
    def following(self) -> Part:
        """What `followed_by` adds."""
        return Part("buffer", self._counters_start + self.heads * self.padded // 64 * self.counters)

    @property
    def _counters_start(self) -> int:
        return self.rows.start + 2 * self.heads * self.padded

    @property
    def turns(self) -> Part:
        return Part("buffer", self._counters_start) if self.counters else Part("none")

    def followed_by(self, elements: int, zeros: int) -> Preprocess:
        """The same with more elements at the end. zeros: so many of them, from the first on, the launch sets
        to 0; a multiple of CHUNK."""
        launch = self.launch
        if zeros:
            launch = replace(
                launch,
                pointers={**launch.pointers, "more_ptr": self.following},
                scalars={**launch.scalars, "more": zeros // CHUNK},
                constants={**launch.constants, "CHUNK": CHUNK},
            )
        return self._replace(launch=launch, more=elements)

    def descriptor(self, block_m: int) -> Descriptor:
        """Of LSE or delta, for tiles of `block_m` rows."""
        window = (2, self.heads, self.padded), (self.heads * self.padded, self.padded, 1)
        return Descriptor(self.rows, window, (1, 1, block_m))

    def gluon_descriptor(self, block_m: int) -> Descriptor:
        """The same for a kernel in Gluon, which has rows in shared memory as they are in global memory."""
        from triton.experimental.gluon import language as gl

        as_it_is = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
        return self.descriptor(block_m)._replace(layout=as_it_is)


def preprocess(
    call: Signature, d_out: Window, out: Window, padding: int, sums_width: int = 0, turns: bool = False
) -> Preprocess:
    """The launch for a call. Rows are padded to a multiple of `padding`, so that tiles of that many read them
    without a mask. sums_width: columns of the sums of dQ that the launch sets to 0. turns: whether it sets
    the counters of `turns` to 0, too."""
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
            "TURNS": memory.counters, "CHUNK": 0, "OVERLAPS": device.overlaps(call.device),
            "CLOSE": heads_are_close(call, d_out),
        },  # fmt: skip
        options={"num_warps": 4},
    )
    return memory._replace(launch=launch)

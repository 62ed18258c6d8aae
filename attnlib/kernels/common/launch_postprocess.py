"""Launch the kernel that converts float32 sums to gradients, after a Hopper backward kernel."""

from typing import NamedTuple

from attnlib.kernels.common import device
from attnlib.kernels.common.descriptors import Window, heads_are_close
from attnlib.kernels.common.launch_preprocess import Preprocess
from attnlib.kernels.common.launcher import Descriptor, Launch, Part
from attnlib.kernels.common.signature import Signature

KERNEL = "attnlib.kernels.common.postprocess.attention_backward_postprocess"
LINE = 256
"""Sums in a row of the descriptor through which they are added to, where a descriptor is needed."""


class Sums(NamedTuple):
    """Where the float32 sums of a gradient lie in the buffer, and what is done with them.

    Attributes:
        gradient: "dq", "dk" or "dv".
        start: the first element.
        heads: B * H, varlen H; of dk and dv with H_kv.
        padded: rows of a head in memory, whole tiles; of varlen sequences the rows of all.
        padding: rows of a tile.
        width: columns.
        scale: what the sums are multiplied with.
        parts: sums of each head, one after the other, which are added up.
        others: columns of other sums that lie behind each 64 rows of these.
        keys: of sums of transposed gradients, whose columns are keys, keys of a block of them.
    """

    gradient: str
    start: int
    heads: int
    padded: int
    padding: int
    width: int
    scale: float
    parts: int = 1
    others: int = 0
    keys: int = 0


def postprocess(call: Signature, dq: Window, rows: Preprocess, width: int) -> Launch:
    """The launch that converts the sums of dQ."""
    sums = Sums("dq", 0, rows.heads, rows.padded, call.config.block_m, width, call.sm_scale)
    return conversion(call, dq, sums)


def conversion(call: Signature, gradient: Window, sums: Sums) -> Launch:
    """The launch that converts the sums of a gradient, 64 rows a program, or 32 keys."""
    rows = 32 if sums.keys else 64
    B, H, H_kv, S_q, S_k = call.dimensions()
    of_queries = sums.gradient == "dq"
    blocks = sums.padded // rows  # of a head
    # Blocks of a head that are converted: those that have a row, of varlen sequences all.
    tiles = blocks if call.varlen else -(-(S_q if of_queries else S_k) // rows)
    ones = (1, 1, 1) if call.varlen else (1, 1)
    # Columns at a time, a power of two as sizes of tiles are; transposed gradients lie in parts of 64.
    columns = 64 if sums.keys else sums.width & -sums.width
    heads = H if of_queries else H_kv
    overlaps = device.overlaps(call.device)
    return Launch(
        KERNEL,
        (tiles * sums.heads, 1, 1),
        descriptors={"desc_dq": Descriptor(Part(sums.gradient), gradient, (*ones, rows, columns))},
        pointers={"sums_ptr": Part("buffer", sums.start), "cu_q": Part("cu_q" if of_queries else "cu_k")},
        scalars={"sm_scale": sums.scale, "H": heads, "B": B, "num_m": blocks, "tiles": tiles},
        constants={
            "BLOCK_D": sums.width, "PADDING": sums.padding, "OTHERS": sums.others, "PARTS": sums.parts,
            "KEYS": sums.keys, "OVERLAPS": overlaps, "CLOSE": heads_are_close(call, gradient),
        },  # fmt: skip
        # 32 sums a thread, eight loads of 16 bytes, or fewer
        options={"num_warps": max(4, columns // 16), **device.begins_early(overlaps)},
    )

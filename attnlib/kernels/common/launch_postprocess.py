"""Launch what makes gradients of their sums, after a Hopper backward kernel."""

from typing import NamedTuple

from attnlib.kernels.common.descriptors import Window
from attnlib.kernels.common.launch_preprocess import Preprocess
from attnlib.kernels.common.launcher import Descriptor, Launch, Part
from attnlib.kernels.common.signature import Signature

KERNEL = "attnlib.kernels.common.postprocess.attention_backward_postprocess"
LINE = 256
"""Sums in a row of the descriptor through which they are added to, where a descriptor is needed."""


class Sums(NamedTuple):
    """Those of a gradient, dq, dk or dv: where they begin in the buffer, and `parts` of `width` columns for
    each of its heads, which are B * H, varlen H. A head has `padded` rows in memory, whole tiles of
    `padding`, of varlen sequences all together."""

    gradient: str
    start: int
    heads: int
    padded: int
    padding: int
    width: int
    scale: float
    parts: int = 1
    others: int = 0  # columns of other sums that lie behind those of 64 rows


def postprocess(call: Signature, dq: Window, rows: Preprocess, width: int) -> Launch:
    """What makes dQ of its sums."""
    sums = Sums("dq", 0, rows.heads, rows.padded, call.config.block_m, width, call.sm_scale)
    return conversion(call, dq, sums)


def conversion(call: Signature, gradient: Window, sums: Sums) -> Launch:
    """What makes a gradient of its sums, 64 rows a program."""
    B, H, H_kv, S_q, S_k = call.dimensions()
    of_queries = sums.gradient == "dq"
    blocks = sums.padded // 64  # of a head
    tiles = blocks if call.varlen else -(-(S_q if of_queries else S_k) // 64)  # of a head, that are converted
    ones = (1, 1, 1) if call.varlen else (1, 1)
    columns = sums.width & -sums.width  # at a time: a tile has a power of two
    heads = H if of_queries else H_kv
    return Launch(
        KERNEL,
        (tiles * sums.heads, 1, 1),
        descriptors={"desc_dq": Descriptor(Part(sums.gradient), gradient, (*ones, 64, columns))},
        pointers={"sums_ptr": Part("buffer", sums.start), "cu_q": Part("cu_q" if of_queries else "cu_k")},
        scalars={"sm_scale": sums.scale, "H": heads, "B": B, "num_m": blocks, "tiles": tiles},
        constants={
            "BLOCK_D": sums.width, "PADDING": sums.padding, "OTHERS": sums.others, "PARTS": sums.parts,
        },  # fmt: skip
        options={"num_warps": max(4, columns // 16)},  # 32 sums a thread, eight loads of 16 bytes, or fewer
    )

"""Launch what makes dQ of its sums, after a Hopper backward kernel."""

from attnlib.kernels.common.descriptors import Window
from attnlib.kernels.common.launch_preprocess import Preprocess
from attnlib.kernels.common.launcher import Descriptor, Launch, Part
from attnlib.kernels.common.signature import Signature

KERNEL = "attnlib.kernels.common.postprocess.attention_backward_postprocess"


def postprocess(call: Signature, dq: Window, rows: Preprocess, width: int) -> Launch:
    """What makes dQ of its sums, 64 rows a program."""
    B, H, _, S_q, _ = call.dimensions()
    blocks = rows.padded // 64  # of a head
    tiles = blocks if call.varlen else -(-S_q // 64)  # of a head, that are converted
    ones = (1, 1, 1) if call.varlen else (1, 1)
    columns = width & -width  # at a time: a tile has a power of two
    return Launch(
        KERNEL,
        (tiles * rows.heads, 1, 1),
        descriptors={"desc_dq": Descriptor(Part("dq"), dq, (*ones, 64, columns))},
        pointers={"sums_ptr": Part("buffer"), "cu_q": Part("cu_q")},
        scalars={"sm_scale": call.sm_scale, "H": H, "B": B, "num_m": blocks, "tiles": tiles},
        constants={"BLOCK_D": width, "PADDING": call.config.block_m},
        options={"num_warps": max(4, columns // 16)},  # 32 sums a thread, eight loads of 16 bytes, or fewer
    )

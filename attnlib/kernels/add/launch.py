"""Launch the kernel that adds parts of a gradient."""

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.tiles import block_d

BLOCK_M = 16


def add(first: torch.Tensor, second: torch.Tensor, result: torch.Tensor, start: int = 0) -> None:
    """Write to `result` the sum of two tensors (B, H, S, D) of any strides, formed in float32 and rounded
    once. `second` may have fewer rows, those from `start` on; the other rows are those of `first`."""
    from attnlib.kernels.add.add_kernel import add_rows

    B, H, S, D = result.shape
    if not result.numel():
        return
    if device.widened(result.dtype):
        wide = torch.empty_strided(result.shape, result.stride(), dtype=torch.float32)
        add(first, second, wide, start)
        result.copy_(wide)
        return
    tensors = first, second, result
    with torch.cuda.device_of(result):
        add_rows[(-(-S // BLOCK_M), B * H)](
            *tensors, *(x.stride() for x in tensors), H, S, start, second.shape[2], D, BLOCK_M, block_d(D),
            num_warps=4,
        )  # fmt: skip

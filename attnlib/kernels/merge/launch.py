"""Launch the kernels that join two parts of a result, the second of which may have some of the rows only."""

import torch

from attnlib.kernels.common import device
from attnlib.kernels.common.tiles import block_d

BLOCK_M = 16


def merge(
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    result: tuple[torch.Tensor, torch.Tensor],
    start: int = 0,
) -> None:
    """Write to `result` the attention to the keys of both `first` and `second`.

    Each is (out (B, H, S, D), LSE (B, H, S) float32), of any strides; `result` may be `first`. `second` may
    have fewer rows, those from `start` on; the other rows are those of `first`. A row that has no key in
    either gets output 0 and LSE -inf.
    """
    from attnlib.kernels.merge.merge_kernel import merge_rows

    pairs = first, second, result
    tensors = [x for pair in pairs for x in pair]
    strides = [pair[i].stride() for i in (0, 1) for pair in pairs]
    _launch(merge_rows, tensors, strides, (result[0], second[0]), start)


def add(first: torch.Tensor, second: torch.Tensor, result: torch.Tensor, start: int = 0) -> None:
    """Write to `result` the sum of two tensors (B, H, S, D) of any strides, formed in float32 and rounded
    once. `second` may have fewer rows, those from `start` on; the other rows are those of `first`."""
    from attnlib.kernels.merge.merge_kernel import add_rows

    tensors = first, second, result
    _launch(add_rows, tensors, [x.stride() for x in tensors], (result, second), start)


def _launch(kernel, tensors, strides, sizes: tuple[torch.Tensor, torch.Tensor], start: int) -> None:
    """sizes: the result and the part that may have fewer rows."""
    whole, part = sizes
    B, H, S, D = whole.shape
    if not whole.numel():
        return
    if whole.dtype == torch.bfloat16 and device.interpreted():  # it rounds toward zero there (triton 3.6)
        wide = torch.empty_strided(whole.shape, whole.stride(), dtype=torch.float32).copy_(whole)
        _launch(kernel, [wide if x is whole else x for x in tensors], strides, (wide, part), start)
        whole.copy_(wide)
        return
    with torch.cuda.device_of(whole):
        kernel[(-(-S // BLOCK_M), B * H)](
            *tensors, *strides, H, S, start, part.shape[2], D, BLOCK_M, block_d(D), num_warps=4,
        )  # fmt: skip

"""Launch the kernel that joins attention to two disjoint sets of keys."""

import torch

from attnlib.kernels.common.tiles import block_d

BLOCK_M = 16


def merge(
    first: tuple[torch.Tensor, torch.Tensor],
    second: tuple[torch.Tensor, torch.Tensor],
    result: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Write to `result` the attention to the keys of both `first` and `second`.

    Each is (out (B, H, S, D), LSE (B, H, S) float32), of any strides; `result` may be one of the two. A row
    that has no key in either gets output 0 and LSE -inf.
    """
    from attnlib.kernels.merge.merge_kernel import merge_rows

    B, H, S, D = result[0].shape
    if not result[0].numel():
        return
    pairs = first, second, result
    with torch.cuda.device_of(result[0]):
        merge_rows[(-(-S // BLOCK_M), B * H)](
            *(x for pair in pairs for x in pair), *(pair[0].stride() for pair in pairs),
            *(pair[1].stride() for pair in pairs), H, S, D, BLOCK_M, block_d(D), num_warps=4,
        )  # fmt: skip

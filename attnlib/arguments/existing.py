"""The result that a call is merged into: which tensors it may have, and which calls have one."""

import torch

from attnlib.arguments.common import check_forms
from attnlib.params import UNIT, Existing, Params


def check_existing(q: torch.Tensor, v: torch.Tensor, into: Existing, params: Params) -> None:
    """TypeError or ValueError unless attention of q to keys with the values v can be merged into it."""
    if params.varlen is not None or params.block_mask is not None:
        what = "varlen sequences" if params.varlen is not None else "a block mask"
        raise ValueError(f"into: expected None beside {what}, got an existing result")
    out, lse = into
    check_forms({"into.out": out}, "(B, H, Sq, D)", 4)
    check_forms({"into.lse": lse}, "(B, H, Sq)", 3)
    if out.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"into.out: expected dtype {q.dtype} as q has, or torch.float32, got {out.dtype}")
    if lse.dtype != torch.float32:
        raise TypeError(f"into.lse: expected dtype torch.float32, got {lse.dtype}")
    rows = tuple(q.shape[:3])
    for name, tensor, shape in (("out", out, (*rows, v.shape[-1])), ("lse", lse, rows)):
        if tensor.device != q.device:
            raise ValueError(f"into.{name}: expected device {q.device} as q has, got {tensor.device}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"into.{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    if out.data_ptr() % 16 or not _apart(out, UNIT):
        raise ValueError(
            f"into.out: expected the last dimension contiguous, other strides positive multiples of {UNIT} "
            f"and an address of 16 bytes, got strides {tuple(out.stride())} and address "
            f"{out.data_ptr() % 16} mod 16"
        )
    if not _apart(lse, 1):
        raise ValueError(
            f"into.lse: expected the last dimension contiguous and other strides positive, got strides "
            f"{tuple(lse.stride())}"
        )


def _apart(tensor: torch.Tensor, unit: int) -> bool:
    """Whether rows are contiguous and begin at multiples of `unit`, and no two are the same memory."""
    *outer, (columns, last) = zip(tensor.shape, tensor.stride(), strict=True)
    return (columns == 1 or last == 1) and all(
        size == 1 or (stride > 0 and stride % unit == 0) for size, stride in outer
    )

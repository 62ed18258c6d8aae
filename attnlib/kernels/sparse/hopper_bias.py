"""A bias as the Hopper kernels under a block mask take it: copied by TMA, or loaded from where it is."""

from __future__ import annotations

import torch

from attnlib.kernels.common.descriptors import Window, legal
from attnlib.kernels.common.hopper_gpu import HALF
from attnlib.kernels.common.launcher import Descriptor, Part
from attnlib.kernels.common.signature import Signature
from attnlib.scores import ScoreForm


def bias_window(score: ScoreForm | None, S_q: int, S_k: int) -> Window | None:
    """Of a bias that TMA can read: of two bytes an element, with queries and keys of its own, that lies as a
    descriptor can express it. None for others, and without one."""
    if score is None or score.bias not in HALF or score.diagonal or not score.aligned:
        return None
    if tuple(score.sizes[2:]) != (S_q, S_k):
        return None
    strides = legal(torch.Size(score.sizes), score.strides, score.bias)
    return None if strides is None else (tuple(score.sizes), strides)


def adds_alone(score: ScoreForm, S_q: int, S_k: int) -> bool:
    """Whether a bias is all that is done to a product of a query and a key, and is one of diagonals, or has
    queries and keys of its own, these side by side: the Hopper kernel makes the gradient of such a one."""
    own = score.diagonal or (tuple(score.sizes[2:]) == (S_q, S_k) and score.strides[3] == 1)
    return own and score.soft_cap is None and not score.alibi and score.function is None


def bias_descriptor(window: Window | None, dtype: torch.dtype, rows: int, keys: int) -> Descriptor:
    """For copies of so many rows and keys."""
    from triton.experimental.gluon import language as gl

    block = 1, 1, rows, keys
    layout = gl.NVMMASharedLayout.get_default_for(list(block), getattr(gl, HALF[dtype]))
    return Descriptor(Part("bias"), window, block, layout)


def bias_scalars(call: Signature) -> dict[str, int | None]:
    """Strides of a bias, and how many keys it has, which the kernels need to know for nothing else."""
    strides = None if call.score is None else call.score.strides
    found = dict(zip(("bias_b", "bias_h", "bias_m"), strides or (None,) * 3, strict=False))
    return found | {"S_k": call.dimensions()[4] if strides else None}


def bias_plan(score: ScoreForm | None, copied: bool) -> dict[str, bool | int]:
    """What the kernels are compiled for."""
    bias = score is not None and score.bias is not None
    batches, heads = (copied and size > 1 for size in (score.sizes[:2] if bias else (1, 1)))
    return {
        "bias": bias, "bias_n": score.strides[3] if bias else 0, "copies_bias": copied,
        "bias_batches": batches, "bias_heads": heads,
    }  # fmt: skip

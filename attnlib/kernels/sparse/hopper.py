"""The family for Hopper under a block mask, in Gluon, forward and backward."""

from dataclasses import replace

from attnlib.kernels.common import hopper_gpu
from attnlib.kernels.common.backward_plan import BackwardPlan
from attnlib.kernels.common.descriptors import describable
from attnlib.kernels.common.signature import Signature
from attnlib.kernels.sparse import launch_hopper, launch_hopper_backward
from attnlib.kernels.sparse.configs_hopper import (
    HopperSparseBackwardConfig,
    HopperSparseConfig,
    hopper_bias_config,
    hopper_sparse_backward_config,
    hopper_sparse_config,
)
from attnlib.kernels.sparse.hopper_bias import adds_alone, bias_window
from attnlib.kernels.sparse.launch_hopper import forward
from attnlib.kernels.sparse.launch_hopper_backward import backward
from attnlib.params import Params

__all__ = ["FITS", "backward", "configuration", "forward", "prepare", "slower", "unsupported"]
FITS = "compute capability 9.x, a half precision, layouts that TMA can read"


def unsupported(q, k, v, params: Params, backward: bool = False) -> str | None:
    """What the kernels need and a call with valid arguments does not have; None if it has all.

    The backward pass copies layouts that TMA can't read, and sums dQ in an order that changes.
    """
    lacks = hopper_gpu.unsupported_here(q)
    if lacks is not None:
        return lacks
    score = params.score
    if score is not None:
        if score.bias is not None and score.strides[3] not in (0, 1):
            return f"needs a bias whose keys follow each other in memory; their stride is {score.strides[3]}"
        added = score.alibi is not None or score.bias is not None
        scaled = score.soft_cap is None and score.function is None
        if added and scaled and abs(params.sm_scale) < 1e-15:
            return f"needs an sm_scale of 1e-15 or more under ALiBi or a bias; it is {params.sm_scale}"
    if backward:
        if params.deterministic:
            return "adds up dq in an order that changes; deterministic=True is asked for"
        return None
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not describable(tensor):
            return f"needs layouts that TMA can read; {name} has strides {tuple(tensor.stride())}"
    return None


def slower(q, k, params: Params, backward: bool = False) -> None:
    """Where it runs, it is preferred."""


def configuration(
    q, k, v, params: Params, backward: bool = False
) -> HopperSparseConfig | HopperSparseBackwardConfig:
    """How the kernels are compiled and launched for queries and a mask like these."""
    score, head_dim = params.score, q.shape[-1]
    bias = score is not None and score.bias is not None
    own = score is not None and score.function is not None
    # Scores that do not depend on the place of a key.
    alike = not (bias or own or (score is not None and score.alibi is not None))
    form = params.block_mask.form
    if backward:
        capped = score is not None and score.soft_cap is not None
        chosen = hopper_sparse_backward_config(head_dim, capped, bias or own)
        gathered = form.gathered is not None and alike and chosen.block_n == 128
        if score is not None and score.bias_gradient and adds_alone(score.form, q.shape[2], k.shape[2]):
            own = hopper_bias_config(head_dim, score.bias.element_size())
            chosen = replace(chosen, bias=own or chosen.bias)
        return replace(chosen, gathered=gathered)
    copied = bias and bias_window(score.form, q.shape[2], k.shape[2]) is not None
    short = form.short and score is None
    return hopper_sparse_config(head_dim, form.coarse, bias or own, copied, alike, short)


def prepare(call: Signature, backward: bool = False) -> launch_hopper.Plan | BackwardPlan | None:
    """The launches of all calls with this signature; None if an input has to be copied."""
    return launch_hopper_backward.prepare(call) if backward else launch_hopper.prepare(call)

"""The first product of a forward kernel for Hopper, Q K^T. Chapter 15 says what Q in registers is for."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.jit
def start_scores(q_left, q, k, plan: gl.constexpr):
    """Start Q K^T, [64, D] x [D, BLOCK_N], both in shared memory. The first Q_COLUMNS columns of Q come from
    registers, `q_left`, which halves the shared memory that their product reads."""
    D: gl.constexpr = k.shape[1]
    zero = gl.zeros([64, plan.block_n], gl.float32, plan.s_layout)
    if plan.q_columns == 0:
        return warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    elif plan.q_columns == D:
        return warpgroup_mma(q_left, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        rest: gl.constexpr = D - plan.q_columns
        k_left = k.slice(0, plan.q_columns, 1).permute((1, 0))
        k_right = k.slice(plan.q_columns, rest, 1).permute((1, 0))
        part = warpgroup_mma(q_left, k_left, zero, use_acc=False, is_async=True)
        return warpgroup_mma(q.slice(plan.q_columns, rest, 1), k_right, part, is_async=True)


@gluon.constexpr_function
def products_of_scores(plan):
    """How many products `start_scores` starts."""
    return 2 if 0 < plan.q_columns < plan.d else 1

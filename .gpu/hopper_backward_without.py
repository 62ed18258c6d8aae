"""Functions of the Hopper backward kernel that do nothing: the difference is what the real ones cost."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnlib.kernels import hopper_backward as kernels
from attnlib.kernels.hopper_backward import _add_asm, _add_constraints

WITHOUT = {
    "all": set(),
    "no add": {"_add_dq"},
    "no add, no dS barriers": {"_add_dq", "_await_ds", "_tell_ds"},
}


@gluon.jit
def _add_dq(dq_ptr, block, dq, wanted, WG: gl.constexpr, plan: gl.constexpr):
    # The product stays: for all that the compiler knows, there may be 2^30 blocks, and then it is added.
    n: gl.constexpr = plan.dq_columns // 2
    address = (dq_ptr + block).to(gl.int64)
    wanted = (wanted & (block > (1 << 30))).to(gl.int32)
    gl.inline_asm_elementwise(
        _add_asm(n), _add_constraints(n), [dq, address, wanted], dtype=gl.int8,
        is_pure=False, pack=n,
    )  # fmt: skip


@gluon.jit
def _await_ds(j, WG: gl.constexpr):
    pass


@gluon.jit
def _tell_ds(j, WG: gl.constexpr):
    pass


def leave_out(label):
    for function in (_add_dq, _await_ds, _tell_ds):
        if function.__name__ in WITHOUT[label]:
            setattr(kernels, function.__name__, function)

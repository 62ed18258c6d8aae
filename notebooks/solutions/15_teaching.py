"""Solutions of the exercises of chapter 15; kernels are functions that take the place of the kernel's own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def store_output(o_desc, o, mem, i_h, row, W: gl.constexpr, plan: gl.constexpr):
    if plan.o_columns == plan.d:
        send(o_desc, o, mem, i_h, row, 0, W)
    else:
        left, right = halves(o)
        if 2 * plan.o_columns == plan.d:
            send(o_desc, left, mem, i_h, row, 0, W)
            send(o_desc, right, mem, i_h, row, plan.o_columns, W)
        else:
            first, second = halves(left)
            third, fourth = halves(right)
            send(o_desc, first, mem, i_h, row, 0, W)
            send(o_desc, second, mem, i_h, row, plan.o_columns, W)
            send(o_desc, third, mem, i_h, row, 2 * plan.o_columns, W)
            send(o_desc, fourth, mem, i_h, row, 3 * plan.o_columns, W)


in_four_goes = [store_output]


def fits(d, block_n, stages, o_columns, q_columns, warpgroups):
    used = 2 * (64 * warpgroups * (d + o_columns) + 2 * stages * block_n * d) + 1024
    consumers = (65536 - 4 * 32 * 24) // (128 * warpgroups)
    own = min(240, consumers // 8 * 8)
    return used <= 232448 and d // 2 + block_n // 2 + block_n // 4 + q_columns // 4 + 32 <= own

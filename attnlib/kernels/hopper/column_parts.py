"""A head dimension that is no power of two, in parts that are: 192 columns as 128 and 64. Chapter 19 measures
it.

Sizes of tiles in Gluon are powers of two. Padded to the next one, 192 columns are 256, a third of them zeros
that are copied and multiplied all the same. In parts, each of Q, K, V and the output has a descriptor and a
buffer for each part, Q K^T is the sum of a product for each, and each part of the output has an accumulator:

    S = Q_left K_left^T + Q_right K_right^T        O_left += P V_left, O_right += P V_right

The descriptors of a part see a tensor of its own, which begins at the part's first column. So coordinates are
the same for all parts, and only what the last part has beyond the head dimension (8 columns at D = 72) is
filled with zeros.

The backward kernels do the same with K, V, Q, dO and with dK, dV, dQ.

Everything that there is for each part is a tuple here. Where the columns are in one piece it has one element,
and the compiler makes of it what it would make without tuples.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnlib.kernels.common import memory, softmax, tma
from attnlib.kernels.common import tile_scheduler as tiling
from attnlib.kernels.common.memory import matrix
from attnlib.kernels.common.ring import as_parts


@gluon.jit
def together(left, right):
    """The parts of something; `right` is None where there is one."""
    if right is None:
        return (left,)
    else:
        return left, right


# ---------------------------------------------------------------- copies
#
# Where part i begins is written out in both directions: from triton 3.8 on a function can't return a tuple
# that has a number in it, as the last coordinate may be.


@gluon.jit
def buffers(descs, N: gl.constexpr):
    """N buffers for the copies of each part."""
    found = ()
    for i in gl.static_range(len(descs)):
        found = found + (memory.buffers(descs[i], N),)
    return found


@gluon.constexpr_function
def nbytes(descs):
    """What one copy of each part moves together."""
    return sum(desc.block_type.nbytes for desc in descs)


@gluon.jit
def copy(descs, place, bar, buffers, b, STEP: gl.constexpr = 0):
    """Start to copy each part to its buffer number b; the columns of part i begin STEP * i behind `place`."""
    for i in gl.static_range(len(descs)):
        at = place[:-1] + (place[-1] + i * STEP,)
        tma.async_copy_global_to_shared(descs[i], at, bar, buffers[i].index(b))


@gluon.jit
def store(descs, place, buffers, b, FIRST: gl.constexpr, N: gl.constexpr, STEP: gl.constexpr):
    """Start to copy N parts out of their buffers number b, from part FIRST on."""
    for i in gl.static_range(FIRST, FIRST + N):
        at = place[:-1] + (place[-1] + i * STEP,)
        tma.async_copy_shared_to_global(descs[i], at, buffers[i].index(b))


@gluon.jit
def store_output(descs, o, mem, at, row, WG: gl.constexpr, plan: gl.constexpr):
    """Through shared memory, the first part at once or in two halves; the copies of the tile before must have
    left it."""
    o_left, out = o[0].to(mem.o[0].dtype), mem.o[0].index(WG)
    if plan.o_columns == plan.d:
        tma.store_wait(0)
        matrix(mem.o[0], WG).store(o_left)
        _store_others(o, mem, WG)
        fence_async_shared()
        tma.async_copy_shared_to_global(descs[0], tiling.coordinates(at, row, 0), out)
        _copy_others(descs, at, row, mem, WG)
    else:
        left, right = softmax.halves(o_left)
        tma.store_wait(0)
        matrix(mem.o[0], WG).store(left)
        _store_others(o, mem, WG)
        fence_async_shared()
        tma.async_copy_shared_to_global(descs[0], tiling.coordinates(at, row, 0), out)
        _copy_others(descs, at, row, mem, WG)
        tma.store_wait(0)
        matrix(mem.o[0], WG).store(right)
        fence_async_shared()
        tma.async_copy_shared_to_global(descs[0], tiling.coordinates(at, row, plan.o_columns), out)


@gluon.jit
def await_stored():
    """Until all copies of the output are done."""
    tma.store_wait(0)


@gluon.jit
def _store_others(o, mem, WG: gl.constexpr):
    for i in gl.static_range(1, len(o)):
        matrix(mem.o[i], WG).store(o[i].to(mem.o[i].dtype))


@gluon.jit
def _copy_others(descs, at, row, mem, WG: gl.constexpr):
    for i in gl.static_range(1, len(descs)):
        tma.async_copy_shared_to_global(descs[i], tiling.coordinates(at, row, 0), mem.o[i].index(WG))


# ---------------------------------------------------------------- products and accumulators


@gluon.jit
def matrices(buffers, b):
    """Buffer b of each part, without its leading dimensions of 1."""
    found = ()
    for i in gl.static_range(len(buffers)):
        found = found + (matrix(buffers[i], b),)
    return found


@gluon.jit
def add_scores(token, mem, b_q, b_k):
    """A product of the scores in flight, which is that of the first part: on with those of the others."""
    for i in gl.static_range(1, len(mem.q)):
        k = matrix(mem.k[i], b_k)  # [BLOCK_N, columns]
        token = warpgroup_mma(matrix(mem.q[i], b_q), k.permute((1, 0)), token, is_async=True)
    return token


@gluon.jit
def start_output(p, acc, mem, b):
    """Start acc += P V for each part, V in buffer b: [64, BLOCK_N] x [BLOCK_N, columns]."""
    return start_update(p, matrices(mem.v, b), acc)


@gluon.jit
def start_update(a, b, acc):
    """Start acc += a b for each part of b and of acc."""
    tokens = ()
    for i in gl.static_range(len(acc)):
        tokens = tokens + (warpgroup_mma(a, b[i], acc[i], is_async=True),)
    return tokens


@gluon.jit
def await_parts(tokens, LATER: gl.constexpr):
    """Wait for the products of all parts, after which so many were started."""
    return as_parts(warpgroup_mma_wait(LATER, deps=tokens), len(tokens))


@gluon.jit
def zeros(layout: gl.constexpr, plan: gl.constexpr):
    """An accumulator for each part [64, columns], of the first one with this layout."""
    left = gl.zeros([64, plan.d], gl.float32, layout)
    if plan.right == 0:
        return (left,)
    else:
        return left, gl.zeros([64, plan.right], gl.float32, plan.right_layout)


@gluon.jit
def scaled(acc, factor):
    """Each row times its factor [64]."""
    found = ()
    for i in gl.static_range(len(acc)):
        found = found + (acc[i] * softmax.rows_of_o(factor, acc[i]),)
    return found

"""Buffers and mbarriers in shared memory, as all Hopper kernels lay them out. Chapter 10 introduces both."""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(N: gl.constexpr, ARRIVALS: gl.constexpr):
    """N mbarriers, each of which completes a phase after ARRIVALS arrivals.

    Make none that a plan does not use: its memory would go to another buffer without having been invalidated,
    see `bench.reused_barriers`."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def buffers(desc, N: gl.constexpr):
    """N buffers, each for one copy of a descriptor of rank 4: [N, 1, 1, rows, columns], of rank 5 with one
    more 1."""
    rows: gl.constexpr = desc.block_shape[-2]
    columns: gl.constexpr = desc.block_shape[-1]
    if len(desc.block_shape) == 4:
        return gl.allocate_shared_memory(desc.dtype, [N, 1, 1, rows, columns], desc.layout)
    else:
        return gl.allocate_shared_memory(desc.dtype, [N, 1, 1, 1, rows, columns], desc.layout)


@gluon.jit
def matrix(buffers, i):
    """Buffer i without its leading dimensions of 1."""
    rows: gl.constexpr = buffers.shape[-2]
    columns: gl.constexpr = buffers.shape[-1]
    return buffers.index(i).reshape([rows, columns])


NAMED_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
"""Triton 3.9 calls `_reinterpret` so."""


@gluon.constexpr_function
def _as_blocks(buffers, block):
    """As many blocks as fill a buffer, of these shapes: since Triton 3.8 both have to have one size."""
    number, rest = divmod(math.prod(buffers[1:]), math.prod(block))
    if rest or not number:
        raise TypeError(f"expected a buffer of a whole number of {list(block)}, got {list(buffers[1:])}")
    return [number, *block]


@gluon.jit
def room(buffers, i, desc):
    """The start of buffer i as room for one copy of a descriptor; a whole number of them fills the buffer."""
    shape: gl.constexpr = _as_blocks(buffers.shape, desc.block_shape)
    if NAMED_REINTERPRET:
        return buffers.index(i).reinterpret(desc.dtype, shape, desc.layout).index(0)
    else:
        return buffers.index(i)._reinterpret(desc.dtype, shape, desc.layout).index(0)

"""Addition to global memory from shared memory, by the unit that copies: `cp.reduce.async.bulk.tensor`.

Triton 3.6 compiles it, and its Gluon has no function for it.
"""

from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """As `tma.async_copy_shared_to_global`, but adds to what is there. `tma.store_wait` waits for it, too,
    until it has read shared memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)

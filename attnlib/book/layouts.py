"""Which thread holds which element of a tile, as Triton lays it out: asked of the compiler, not typed."""

import numpy as np
from triton._C.libtriton import gluon_ir, ir

ROWS = 64
"""Of a tile that a warpgroup holds."""


def columns_of(layout: object, columns: int, row: int = 0) -> np.ndarray:
    """The columns of one row of a tile [64, columns] that each of its threads holds: [threads, columns of a
    thread], in the order of the threads and of their registers.

    layout: of registers, such as `gl.NVMMADistributedLayout` or `gl.DotOperandLayout`. ValueError for a row
    that no thread of the first warp holds.
    """
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    linear = builder.to_linear_layout(layout._to_ir(builder), [ROWS, columns])
    lanes, registers = _places(linear.lane_bases), _places(linear.reg_bases)
    places = lanes[:, None] + registers[None, :]  # [lanes, registers, (row, column)]
    found = [columns_[rows_ == row] for rows_, columns_ in (place.T for place in places)]
    held = [of_lane for of_lane in found if len(of_lane)]
    if not held:
        raise ValueError(f"row: expected one that the first warp holds, got {row}")
    return np.array(held)


def _places(bases: list[list[int]]) -> np.ndarray:
    """[2^bases, (row, column)]: place n is the sum of the bases of its bits."""
    places = np.zeros((1, 2), int)
    for base in bases:
        places = np.concatenate([places, places + np.array(base)])
    return places

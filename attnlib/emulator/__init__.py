"""Run Gluon kernels for Hopper on a CPU, one warpgroup at a time, and look for what a GPU would not tell.

Triton's interpreter does not know Gluon. This emulator runs the same source: it calls the Python functions
under `@gluon.jit` with stand-ins for the language. Registers become CPU tensors; the partitions of
`warp_specialize` become threads, of which one runs at a time; copies by TMA and products by wgmma take place
some time between the line that starts them and the line that waits for them. When exactly is drawn from a
seed, so one kernel can be run in many orders, and each of them again.

It knows what is fast no more than a compiler does, and nothing of layouts: a tile is a matrix. It checks
what can go wrong with memory that is written behind one's back:

- a read of shared memory while a copy writes it, and a copy over what a product or another copy still reads;
- a product, or a copy out, of what was stored without a fence between;
- a product's result used before it was waited for, an address outside of its tensor, an int32 that overflows;
- a deadlock: who waits for what.

`run(kernel, grid, *args)` is `kernel[grid](*args)`.
"""

from attnlib.emulator.errors import Deadlock, Race
from attnlib.emulator.run import Emulated, Report, run

__all__ = ["Deadlock", "Emulated", "Race", "Report", "run"]

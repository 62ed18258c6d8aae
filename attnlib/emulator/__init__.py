"""Run Gluon kernels for Hopper on a CPU, one warpgroup at a time, and look for what a GPU would not tell.

Triton's interpreter does not know Gluon. This emulator runs the same source: it calls the Python functions
under `@gluon.jit` with stand-ins for the language. Registers become CPU tensors; the partitions of
`warp_specialize` become threads, of which one runs at a time; copies by TMA and products by wgmma take place
some time between the line that starts them and the line that waits for them. When exactly is drawn from a
seed, so one kernel can be run in many orders, and each of them again.

It checks what can go wrong with memory that is written behind one's back:

- a use of shared memory that another partition, a copy or a product writes or reads, where no barrier says
  that it is over: by what each partition has seen (see `clocks`), so in any order of a run;
- a product, or a copy, of what was stored without a fence between; a copy over what was loaded without one;
- a product's result used before it was waited for, an address outside of its tensor, an int32 that overflows;
- more arrivals than a barrier counts; a deadlock: who waits for what.

It knows nothing of layouts, registers and time: a tile is a matrix, the threads of a partition go in step. Of
global memory it checks addresses, not who has seen what. Programs run a few at a time, as on a small GPU.
They may wait for each other's counts in global memory (`in_order`, see `machine`); a wait that cannot end is
a deadlock as any other. Assembly on a scalar runs once for all warps of a partition, not once for each.

`run(kernel, grid, *args)` is `kernel[grid](*args)`; within `emulated(vars(module))` a module's own launcher
does that.
"""

from attnlib.emulator.errors import Deadlock, Race
from attnlib.emulator.run import Emulated, Report, run
from attnlib.emulator.stand_in import emulated

__all__ = ["Deadlock", "Emulated", "Race", "Report", "emulated", "run"]

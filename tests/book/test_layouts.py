"""attnlib.book.layouts, thread_map and memory_chart: which thread holds what, and the pictures of it."""

import numpy as np
import pytest
from triton.experimental.gluon import language as gl

from attnlib.bench import compiler, sources
from attnlib.book import layouts
from attnlib.book.memory_chart import Memory, in_units, memory_chart
from attnlib.book.thread_map import thread_map

ACCUMULATOR = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def double(x_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    o_x = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(y_ptr + o_x, 2 * tl.load(x_ptr + o_x))
"""


def test_accumulator_as_ptx_defines_it() -> None:
    """PTX ISA, wgmma.m64nNk16: row 16 w + t / 4 (+ 8), columns 8 j + 2 (t % 4) + {0, 1} of thread t."""
    warps, threads = layouts.owners(ACCUMULATOR, (64, 32))
    rows, columns = np.indices((64, 32))
    assert (warps == rows // 16).all()
    assert (threads == rows % 8 * 4 + columns % 8 // 2).all()


def test_columns_of_a_row_agree_with_the_owners() -> None:
    _, threads = layouts.owners(ACCUMULATOR, (64, 32))
    for row in (0, 13):
        held = layouts.columns_of(ACCUMULATOR, 32, row)
        for thread, columns in zip(np.unique(threads[row]), held, strict=True):
            assert (np.flatnonzero(threads[row] == thread) == columns).all()
    with pytest.raises(ValueError, match="^row: expected one that the first warp holds, got 16"):
        layouts.columns_of(ACCUMULATOR, 32, 16)


def test_an_element_that_several_threads_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="expected one thread for each element"):
        layouts.owners(gl.BlockedLayout([1, 8], [8, 4], [2, 1], [1, 0]), (8, 32))


def test_the_layout_of_a_load_is_the_compilers(monkeypatch) -> None:
    """Each is compiled in a fork of one server, since it imports the compiler once."""
    monkeypatch.setenv(compiler.SERVER, compiler.serve())
    kernel = sources.load_source("double", KERNEL).double
    tensors, size = {"x_ptr": "*fp16:16", "y_ptr": "*fp16:16"}, {"ROWS": 16, "COLUMNS": 32}
    found = layouts.layout_of_load(kernel, tensors, size, num_warps=2)
    assert found == gl.BlockedLayout([1, 8], [8, 4], [2, 1], [1, 0])  # 8 halves are the 16 bytes of a load
    unaligned = layouts.layout_of_load(kernel, {"x_ptr": "*fp16", "y_ptr": "*fp16"}, size, num_warps=2)
    assert unaligned.size_per_thread[1] < 8
    with pytest.raises(RuntimeError, match="compiling double for sm_90 failed:\n(.|\n)*y_ptr"):
        layouts.layout_of_load(kernel, {"x_ptr": "*fp16"}, size, num_warps=2)


def test_a_text_without_a_load_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a load of a tile"):
        layouts.first_load("#blocked = #ttg.blocked<{sizePerThread = [1, 8]}>\n")


def test_thread_map_writes_each_run_once() -> None:
    warps, threads = (found[:16] for found in layouts.owners(ACCUMULATOR, (64, 32)))
    figure = thread_map({"warp 0": (warps, threads)}, marked=5)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.count("5") == 8 and texts.count("warp 0") == 1 and len(texts) == 16 * 16 + 1
    with pytest.raises(ValueError, match="held by one warp"):
        thread_map({"columns": (warps.T + np.arange(16), threads.T)}, marked=0)


def test_memory_chart_says_what_is_not_known() -> None:
    levels = [Memory("L2", "60 MiB", 0.8, None, 9e12), Memory("HBM", "141 GB", 1, 4.8e12, 4.26e12)]
    texts = [text.get_text() for text in memory_chart(levels).axes[1].texts]
    assert texts == ["not documented", "9 TB/s, measured", "4.8 TB/s, documented", "4.26 TB/s, measured"]
    assert [in_units(size) for size in (4.258e12, 3.2e9, 12)] == ["4.26 TB", "3.2 GB", "0.012 KB"]

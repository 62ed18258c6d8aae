"""Which thread holds which element of a tile, as Triton lays it out: asked of the compiler, not typed."""

import inspect
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from triton._C.libtriton import gluon_ir, ir

from attnlib.bench import compiler
from attnlib.bench.inspect_sm90 import Job, compiled_here, last_lines

ROWS = 64
"""Of a tile that a warpgroup holds."""


def columns_of(layout: object, columns: int, row: int = 0) -> np.ndarray:
    """The columns of one row of a tile [64, columns] that each of its threads holds: [threads, columns of a
    thread], in the order of the threads and of their registers.

    layout: of registers, such as `gl.NVMMADistributedLayout` or `gl.DotOperandLayout`. ValueError for a row
    that no thread of the first warp holds.
    """
    linear = _linear(layout, (ROWS, columns))
    lanes, registers = _places(linear.lane_bases), _places(linear.reg_bases)
    places = lanes[:, None] + registers[None, :]  # [lanes, registers, (row, column)]
    found = [columns_[rows_ == row] for rows_, columns_ in (place.T for place in places)]
    held = [of_lane for of_lane in found if len(of_lane)]
    if not held:
        raise ValueError(f"row: expected one that the first warp holds, got {row}")
    return np.array(held)


def owners(layout: object, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The warp of each element of a tile, and the thread of this warp that holds it: two arrays [rows,
    columns].

    layout: of registers, for a tile of two dimensions. ValueError if several threads hold the same element.
    """
    linear = _linear(layout, shape)
    bases = linear.warp_bases, linear.lane_bases, linear.reg_bases
    warps, lanes, registers = (_places(found) for found in bases)
    places = warps[:, None, None] + lanes[:, None] + registers  # [warps, lanes, registers, (row, column)]
    count = np.prod(places.shape[:-1])
    if count != np.prod(shape) or len(np.unique(places.reshape(-1, 2), axis=0)) != count:
        raise ValueError(f"layout: expected one thread for each element of a tile {shape}, got {layout}")
    warp_of, lane_of = np.empty(shape, int), np.empty(shape, int)
    rows, columns = places[..., 0], places[..., 1]
    warp_of[rows, columns] = np.arange(len(warps))[:, None, None]
    lane_of[rows, columns] = np.arange(len(lanes))[:, None]
    return warp_of, lane_of


def layout_of_load(
    kernel: object, signature: Mapping[str, str], constexprs: Mapping[str, object], num_warps: int
) -> object:
    """The layout, a `gl.BlockedLayout`, that Triton's compiler gives to what a kernel loads first, on Hopper.

    kernel: a `@triton.jit` function of a notebook or a file that uses nothing but `triton` and `tl`, compiled
    in a process of its own, with or without a GPU. signature, constexprs, num_warps: as in
    `inspect_sm90.Job`. RuntimeError with the compiler's message.
    """
    source = "import triton\nimport triton.language as tl\n\n\n" + inspect.getsource(kernel.fn)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.py"
        path.write_text(source, encoding="utf-8")
        job = {"kernel_file": str(path), "kernel_name": kernel.fn.__name__, "num_warps": num_warps}
        job |= {"signature": dict(signature), "constexprs": dict(constexprs)}
        with (Path(folder) / "request").open("w+") as request, (Path(folder) / "errors").open("w+") as errors:
            json.dump(job, request)
            request.seek(0)
            with compiler.start("attnlib.book.layouts", request, errors) as child:
                ttgir = child.stdout.read().decode()
            errors.seek(0)
            said = last_lines(errors.read())
    if child.returncode:
        raise RuntimeError(f"compiling {kernel.fn.__name__} for sm_90 failed:\n{said}")
    return first_load(ttgir)


def first_load(ttgir: str) -> object:
    """The blocked layout of the first load in a kernel's text in Triton's GPU dialect; ValueError if there
    is none."""
    from triton.experimental.gluon import language as gl

    loaded = re.search(r"= tt\.load .*?tensor<[^>]*>, (#\w+)>", ttgir)
    defined = loaded and re.search(rf"^{loaded[1]} = #ttg\.blocked<{{(.*)}}>$", ttgir, re.MULTILINE)
    if not defined:
        raise ValueError("ttgir: expected a load of a tile in a blocked layout, found none")
    fields = {name: json.loads(value) for name, value in re.findall(r"(\w+) = (\[[^\]]*\])", defined[1])}
    names = "sizePerThread", "threadsPerWarp", "warpsPerCTA", "order"
    return gl.BlockedLayout(*(fields[name] for name in names))


def _linear(layout: object, shape: tuple[int, int]) -> object:
    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    return builder.to_linear_layout(layout._to_ir(builder), list(shape))


def _places(bases: list[list[int]]) -> np.ndarray:
    """[2^bases, (row, column)]: place n is the sum of the bases of its bits."""
    places = np.zeros((1, 2), int)
    for base in bases:
        places = np.concatenate([places, places + np.array(base)])
    return places


if __name__ == "__main__":
    print(compiled_here(Job(**json.load(sys.stdin)))[0].asm["ttgir"])

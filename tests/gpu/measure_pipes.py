"""Clocks that the instructions of a softmax in FP8 take on this GPU, alone and together.

    python tests/gpu/measure_pipes.py     ten seconds; pipes.json in $OUT, or where --out says

One program on each SM runs a loop of independent instructions in 1, 2 or 3 warps for each of the SM's four
schedulers. A row says how many clocks a scheduler needs for one instruction of a warp; of `softmax`, for one
score of a thread: maximum, scale and shift, exp2, sum, conversion to e4m3. Status 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
import triton.language as tl
from hopper_only import no_hopper

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from attnlib.bench import records  # noqa: E402

ROUNDS = 256
N = 16  # values of a thread in flight


def each(text: str) -> str:
    """An instruction for each value: {i} is its number, {j} that of another one."""
    return " ".join(text.format(i=i, j=(i + 5) % N) for i in range(N))


def words(text: str, size: int) -> str:
    """The same for groups of `size` neighbors {a} {b} {c} {d}."""
    names = [dict(zip("abcd", range(i, i + size), strict=False)) for i in range(0, N, size)]
    return " ".join(text.format(**group) for group in names)


E4M3 = (
    "cvt.rn.satfinite.e4m3x2.f32 lo, v{b}, v{a}; cvt.rn.satfinite.e4m3x2.f32 hi, v{d}, v{c}; "
    "mov.b32 w, {{lo, hi}}; xor.b32 w{a}, w{a}, w;"
)
BODIES: dict[str, tuple[str, int]] = {
    "ex2": (each("ex2.approx.ftz.f32 v{i}, v{i};"), N),
    "ex2.f16": (each("ex2.approx.f16x2 w{i}, w{i};"), 2 * N),
    "max": (each("max.f32 v{i}, v{i}, v{j};"), N),
    "add": (each("add.f32 v{i}, v{i}, v{j};"), N),
    "fma": (each("fma.rn.f32 v{i}, v{i}, v{j}, v{i};"), N),
    "to fp16": (words("cvt.rn.f16x2.f32 w, v{b}, v{a}; xor.b32 w{a}, w{a}, w;", 2), N // 2),
    "to e4m3": (words(E4M3, 4), N // 2),
    "ex2, to e4m3": (each("ex2.approx.ftz.f32 v{i}, v{i};") + words(E4M3, 4), N),
    "softmax": (
        each("max.f32 m{i}, m{i}, v{i};") + each("fma.rn.f32 v{i}, v{i}, v0, v1;")
        + each("ex2.approx.ftz.f32 v{i}, v{i};") + each("add.f32 s{i}, s{i}, v{i};") + words(E4M3, 4),
        N,
    ),
    "softmax in fp16": (
        each("max.f32 m{i}, m{i}, v{i};") + each("fma.rn.f32 v{i}, v{i}, v0, v1;")
        + each("ex2.approx.ftz.f32 v{i}, v{i};") + each("add.f32 s{i}, s{i}, v{i};")
        + words("cvt.rn.f16x2.f32 w, v{b}, v{a}; xor.b32 w{a}, w{a}, w;", 2),
        N,
    ),
}  # fmt: skip
"""What the loop holds, and how many instructions, or scores, a row counts."""


def asm(body: str) -> str:
    start = " ".join(
        f"cvt.rn.f32.s32 v{i}, $1; add.f32 v{i}, v{i}, 0f3F8{i:X}0000; mov.f32 m{i}, v{i}; "
        f"mov.f32 s{i}, v{i}; mov.b32 w{i}, v{i};"
        for i in range(N)
    )
    end = " ".join(
        f"mov.b32 w, v{i}; xor.b32 t, t, w; mov.b32 w, m{i}; xor.b32 t, t, w; mov.b32 w, s{i}; "
        f"xor.b32 t, t, w; xor.b32 t, t, w{i};"
        for i in range(N)
    )
    return f"""{{ .reg .pred p; .reg .b32 n, w, t, c, w<{N}>; .reg .b16 lo, hi;
        .reg .f32 v<{N}>, m<{N}>, s<{N}>;
        {start} mov.b32 n, {ROUNDS}; mov.b32 t, 0; bar.sync 0;
        mov.u32 c, %clock; mov.b32 $0, c;
        LOOP: {body} sub.s32 n, n, 1; setp.ne.s32 p, n, 0; @p bra LOOP;
        mov.u32 c, %clock; sub.s32 $0, c, $0; {end}
        setp.eq.b32 p, t, 123456789; @p mov.b32 $0, t; }}"""


def kernel_of(body: str) -> Callable:
    text = tl.constexpr(asm(body))

    @triton.jit
    def clocks(out, THREADS: tl.constexpr, TEXT: tl.constexpr):
        lanes = tl.arange(0, THREADS)
        found = tl.inline_asm_elementwise(TEXT, "=r,r", [lanes], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(out + tl.program_id(0) * THREADS + lanes, found)

    return lambda out, threads, grid: clocks[(grid,)](out, threads, text, num_warps=threads // 32)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Clocks of the instructions of a softmax in FP8.")
    parser.add_argument("--out", type=Path, help="(default: pipes.json in $OUT, or in build/)")
    args = parser.parse_args(argv)
    if no_hopper():
        return 2
    grid = torch.cuda.get_device_properties(0).multi_processor_count
    table = []
    for name, (body, counted) in BODIES.items():
        run, row = kernel_of(body), {"name": name}
        for warps in (1, 2, 4):  # of a scheduler
            out = torch.empty(grid, 128 * warps, dtype=torch.int32, device="cuda")
            for _ in range(3):
                run(out, 128 * warps, grid)
            torch.cuda.synchronize()
            row[f"warps {warps}"] = out.amax(1).float().median().item() / (ROUNDS * counted * warps)
        table.append(row)
        print(f"{name:16}", *(f"{value:7.2f}" for key, value in row.items() if key != "name"), flush=True)
    path = args.out or Path(os.environ.get("OUT", ROOT / "build")) / "pipes.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    records.write_json(path, records.rounded({**records.provenance({}), "rows": table}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What the compiler made of a Triton kernel on Hopper: registers, spills, shared memory, SASS counts.

Works with and without a GPU: Triton's wheel carries ptxas, cuobjdump and nvdisasm, and a target can be named
by hand. Each batch of kernels is compiled in one child process, because a kernel that Triton's interpreter
has taken over (TRITON_INTERPRET=1, as in a notebook on a machine without a GPU) can't be compiled in the same
process. Results are kept in the system's temporary folder, so that a second run of a notebook compiles
nothing. The name of a result is a hash of the kernel's text, of all files and kernel cells that it builds on,
and of what it was compiled with.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attnlib.bench import compiler, imports, sass, sources
from attnlib.bench.files import write_atomically
from attnlib.bench.paths import ROOT
from attnlib.bench.reused_barriers import reused_barriers
from attnlib.kernels.common.launcher import FUSED

# Limits of sm_90, from the tables "Technical Specifications per Compute Capability" and "Throughput of Native
# Arithmetic Instructions" of the CUDA C++ Programming Guide.
SMEM_LIMIT = 232_448  # bytes of shared memory that one CTA may use (227 KiB)
_SMEM_PER_SM = 233_472  # 228 KiB, of which every CTA costs 1 KiB on top of its own
_REGISTERS_PER_SM = 65_536
_WARPS_PER_SM, _CTAS_PER_SM = 64, 32
_SCHEDULERS = 4  # per SM; each issues at most one warp instruction per clock
_TENSOR_FLOP = 4096  # dense fp16 FLOP per clock and SM
_MUFU_CLOCKS = 8  # 32 lanes at 16 results per clock and SM, a quarter of them for each scheduler
_ALU_CLOCKS = 2  # compares, selects, min and max, integer adds, logic, conversions: 64 per clock and SM
_ALU = "ISETP FSETP FSEL SEL FMNMX VIMNMX IADD3 VIADD LEA LOP3 PLOP3 SHF F2FP".split()
KERNEL_SECONDS = 600
"""How long one kernel may take to compile; usual are 0.5 to 2 s, tens of them on a busy machine."""

_VERSION = 11  # part of the cache key: raise it when the meaning of Stats changes


@dataclasses.dataclass(frozen=True)
class Job:
    """One kernel to compile.

    Attributes:
        kernel_file: path of a .py file that defines it, importable on its own; a module made by
            `lesson.load_kernel` has this path as `__file__`.
        kernel_name: name of the `@triton.jit` or `@gluon.jit` function in that file.
        signature: argument name -> Triton type, e.g. ``"*fp16"``, ``"fp32"``, ``"i32"``; a suffix ``":16"``
            promises divisibility by 16, as the launcher finds for pointers from PyTorch and for most lengths.
            A tensor descriptor is ``"tensordesc<fp16[1, 64, 128]>"``, with the shape of its tile; for Gluon,
            whose tiles have a layout, see `gluon_descriptor`. Constexpr arguments are left out.
        constexprs: argument name -> value.
        num_warps, num_stages: launch options.
        max_registers: Triton's maxnreg, None for no bound.
    """

    kernel_file: str
    kernel_name: str
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int = 4
    num_stages: int = 3
    max_registers: int | None = None

    def key(self) -> str:
        """Name of its result in the cache: a hash of all that the result depends on."""
        file = Path(self.kernel_file)
        others = imports.reach([file], _builds_on) - {file}
        fields = [_VERSION, sys.version_info[:2], _triton_version()]
        fields += [_text(file), sorted((other.name, _text(other)) for other in others)]
        fields += [self.kernel_name, self.signature, self.constexprs, self.num_warps, self.num_stages]
        fields += [self.max_registers]
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _builds_on(file: Path) -> set[Path]:
    """What a kernel's file is made of besides itself: files of this project that it imports, and notebooks
    whose kernel cells it loads. Of a notebook, its kernel cell counts."""
    steps = re.findall(r'load_step\("(\w+)"\)', _text(file))
    return imports.imported_files(file, _text(file), ROOT) | {sources.notebook_of(step) for step in steps}


def _text(file: Path) -> str:
    return sources.kernel_source(file) if file.suffix == ".ipynb" else file.read_text(encoding="utf-8")


@dataclasses.dataclass(frozen=True)
class Stats:
    """A compiled kernel in numbers.

    name: of its function. registers: 32-bit registers per thread. spills: stack frame per thread in
    4-byte words, the figure that Triton calls n_spills. shared_bytes: shared memory per CTA. opcodes:
    SASS opcode -> count in the whole kernel. loops: the same for each innermost loop that holds a
    tensor-core instruction, in program order; a loop that the compiler could prove to run once is no loop
    and is not listed. Opcodes are cut at the first dot, except MUFU, whose second part says which
    function (MUFU.EX2). The counts are per warp: one instruction works on 32 lanes. loop_listings: the
    instructions of each of `loops` as text, in program order; loop_stalls: the clocks after each, until
    its warp may issue the next, as the assembler has set them; listing: those of the whole kernel.
    warnings: what ptxas remarked, such as "(C7510) Potential Performance Loss: wgmma.mma_async
    instructions are serialized ...", and what `reused_barriers` found.
    """

    name: str
    registers: int
    spills: int
    shared_bytes: int
    num_warps: int
    opcodes: dict[str, int]
    loops: tuple[dict[str, int], ...]
    loop_listings: tuple[tuple[str, ...], ...]
    loop_stalls: tuple[tuple[int, ...], ...]
    listing: tuple[str, ...]
    warnings: tuple[str, ...]

    def __getattr__(self, name: str) -> Any:
        """Of a kernel that `stats_of` has not read yet: it is read now."""
        if name not in sass.Sass._fields:
            raise AttributeError(f"Stats has no {name}")
        _read_all()
        return vars(self)[name]

    def __getstate__(self) -> dict[str, Any]:
        """For another process: with everything."""
        return dataclasses.asdict(self)

    @property
    def loop(self) -> dict[str, int]:
        """The first innermost tensor-core loop (the hot loop of a one-loop kernel); empty if none."""
        return self.loops[0] if self.loops else {}

    def order(self, loop: int = -1) -> str:
        """What happens in which order in one of `loops` (default: the last): runs of tensor-core and exp2
        instructions and waits for the tensor cores, such as "8 HGMMA, wait 0, 34 EX2, 4 HGMMA, wait 0".
        "wait n" waits until at most n batches of HGMMA are unfinished; other instructions are left out."""
        runs: list[list] = []
        for text in self.loop_listings[loop]:
            opcode = sass.opcode(text)
            name = {"HGMMA": "HGMMA", "QGMMA": "QGMMA", "HMMA": "HMMA", "MUFU.EX2": "EX2"}.get(opcode)
            if opcode == "WARPGROUP" and "DEPBAR" in text:
                name = f"wait {int(text.split(',')[-1], 16)}"
            if name and runs and runs[-1][1] == name and not name.startswith("wait"):
                runs[-1][0] += 1
            elif name:
                runs.append([1, name])
        return ", ".join(name if name.startswith("wait") else f"{count} {name}" for count, name in runs)

    @property
    def loop_size(self) -> int:
        """Instructions in `loop`."""
        return sum(self.loop.values())

    @property
    def ctas_per_sm(self) -> int:
        """CTAs that one SM holds at a time; 0 if none fits."""
        return ctas_per_sm(self.registers, self.num_warps, self.shared_bytes)

    def tile_clocks(self, block_m: int, block_n: int, head_dim: int) -> dict[str, float]:
        """Clocks for which one tile of attention (one trip of `loop`) keeps each unit of an SM busy.

        tensor: the two products, 4*BLOCK_M*BLOCK_N*D FLOP. issue: one instruction per clock and scheduler.
        alu: compares, selects, maxima, integer work, at half rate. exp: MUFU.EX2, at an eighth of the rate.
        From published throughputs, so a lower bound: latency, barriers and memory come on top.
        """
        rounds = self.num_warps / _SCHEDULERS
        return {
            "tensor": 4 * block_m * block_n * head_dim / _TENSOR_FLOP,
            "issue": rounds * self.loop_size,
            "alu": rounds * _ALU_CLOCKS * sum(self.loop.get(op, 0) for op in _ALU),
            "exp": rounds * _MUFU_CLOCKS * self.loop.get("MUFU.EX2", 0),
        }

    @property
    def fits(self) -> bool:
        """True if the shared memory fits one sm_90 CTA: otherwise the launch fails with "out of resource"."""
        return self.shared_bytes <= SMEM_LIMIT


def ctas_per_sm(registers: int, num_warps: int, shared_bytes: int) -> int:
    """CTAs that one sm_90 SM holds at a time, limited by registers, shared memory and warps; 0 if none fits.

    registers: of a thread. shared_bytes: of a CTA.
    """
    per_warp = -(-registers // 8) * 8 * 32  # a warp gets registers in units of 256
    by_registers = _REGISTERS_PER_SM // (per_warp * num_warps)
    by_shared = _SMEM_PER_SM // (shared_bytes + 1024) if shared_bytes <= SMEM_LIMIT else 0
    return min(by_registers, by_shared, _WARPS_PER_SM // num_warps, _CTAS_PER_SM)


def compile(
    kernel_file: str,
    kernel_name: str,
    signature: dict[str, str],
    constexprs: dict[str, object],
    num_warps: int = 4,
    num_stages: int = 3,
) -> Stats:
    """Compile one kernel for sm_90a; arguments as in `Job`. RuntimeError with the compiler's message."""
    return compile_all([Job(str(kernel_file), kernel_name, signature, constexprs, num_warps, num_stages)])[0]


def compile_all(jobs: Iterable[Job]) -> list[Stats]:
    """Compile several kernels in a child process (its start-up costs seconds, a kernel 0.5 to 2 s), or in
    some side by side where there are the cores.

    Returns one Stats per job, in order. Raises RuntimeError naming the kernel if one does not compile, if it
    takes more than `KERNEL_SECONDS`, or if a file that it is made of changed meanwhile.
    """
    files = [(_cache_file(job), job) for job in jobs]
    found = {file: _read(file) for file, _ in files}
    missing = {file: job for file, job in files if found[file] is None}
    if missing:
        _compile_in_children(list(missing.values()))
        found |= {file: _read(file) for file in missing}
    for file, job in missing.items():
        if found[file] is None:  # the child has stored it under the key that it has now
            name = job.kernel_name
            raise RuntimeError(f"compiling {name} for sm_90: a file that it is made of changed meanwhile")
    return [found[file] for file, _ in files]


def last_lines(errors: str) -> str:
    """The end of what a compiler said, which has the reason."""
    return "\n".join(errors.strip().splitlines()[-15:])


def _compile_in_children(jobs: list[Job]) -> None:
    """In as many children as half of the cores, since each has a process of ptxas beside it; two kernels or
    more for each. The first failure is raised when all have ended."""
    count = max(1, min((os.cpu_count() or 1) // 2, len(jobs) // 2))
    with ThreadPoolExecutor(count) as pool:
        running = [pool.submit(_compile_in_child, jobs[i::count]) for i in range(count)]
    for child in running:
        child.result()


def _compile_in_child(jobs: list[Job]) -> None:
    with tempfile.TemporaryFile("w+") as request, tempfile.TemporaryFile("w+") as errors:
        json.dump([dataclasses.asdict(job) for job in jobs], request)
        request.seek(0)
        finished, status = _follow(compiler.start(__name__, request, errors), KERNEL_SECONDS)
        if status == 0:
            return
        errors.seek(0)
        tail = last_lines(errors.read())
    name, count = jobs[min(finished, len(jobs) - 1)].kernel_name, f"after {finished} of {len(jobs)} kernels"
    what = f"took more than {KERNEL_SECONDS} s" if status is None else "failed"
    raise RuntimeError(f"compiling {name} for sm_90 {what} ({count}):\n{tail}")


def _follow(child: subprocess.Popen | compiler.Fork, seconds: float) -> tuple[int, int | None]:
    """Follow a process that writes one byte to its standard output for each piece of work that it finishes.

    `seconds` limits the time of one piece, not of all: on a busy machine every piece is slow, and a process
    that makes progress is not ended. Returns the number of finished pieces and the exit status, which is None
    where a piece took longer and the process was killed.
    """
    finished, ended = 0, False
    with child:
        try:
            while not ended and select.select([child.stdout], [], [], seconds)[0]:
                marks = child.stdout.read(4096)
                finished, ended = finished + len(marks), not marks
        finally:
            if not ended:
                child.kill()
    return finished, child.returncode if ended else None


def gluon_descriptor(tile: Iterable[int], dtype: str = "fp16") -> str:
    """The type of a Gluon tensor descriptor whose tiles, of this shape, have the default swizzled layout.

    dtype: "fp16", "bf16" or "fp8e4nv" (e4m3).
    """
    from triton.experimental.gluon import language as gl

    element = {"fp16": gl.float16, "bf16": gl.bfloat16, "fp8e4nv": gl.float8e4nv}[dtype]
    tile = list(tile)
    return f"tensordesc<{dtype}{tile},{gl.NVMMASharedLayout.get_default_for(tile, element)!r}>"


def compile_here(job: Job) -> Stats:
    """Compile one kernel in this process and read what came out; see `compiled_here`."""
    return stats_of(*compiled_here(job))


def compile_into_cache(jobs: Iterable[Job], done: Callable[[], object] = lambda: None) -> None:
    """Compile kernels in this process, as `compile_here`, for `compile_all` to find; after each one, done().

    Where one fails, those before it are kept."""
    made: list[tuple[Job, Stats]] = []
    try:
        for job in jobs:
            made.append((job, compile_here(job)))
            done()
    finally:
        for job, stats in made:
            write_atomically(_cache_file(job), json.dumps(dataclasses.asdict(stats)))


def compiled_here(job: Job) -> tuple[Any, str]:
    """One kernel, compiled by Triton in this process, and what ptxas said of it.

    The process must not be in Triton's interpreter mode; no cache is used. ValueError for an argument of the
    kernel that the job has no type and no value for."""
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    kernel = getattr(_import_file(job.kernel_file), job.kernel_name)
    while not hasattr(kernel, "arg_names") or hasattr(kernel, "configs"):  # unwrap @triton.autotune
        kernel = kernel.fn
    names = kernel.arg_names
    unknown = [name for name in names if name not in job.signature and name not in job.constexprs]
    if unknown:
        raise ValueError(f"{job.kernel_name}: no type or value for argument(s) {', '.join(unknown)}")
    signature, divisible = {}, {}
    for index, name in enumerate(names):
        if name in job.constexprs:
            signature[name] = "constexpr"
            continue
        signature[name], _, hint = job.signature[name].partition(":")
        if hint == "16":
            divisible[(index,)] = [["tt.divisibility", 16]]
    constexprs = {(names.index(name),): value for name, value in job.constexprs.items() if name in names}
    is_gluon = isinstance(kernel, GluonJITFunction)
    source = (GluonASTSource if is_gluon else ASTSource)(kernel, signature, constexprs, divisible)
    stages = {} if is_gluon else {"num_stages": job.num_stages}
    return compile_source(source, num_warps=job.num_warps, maxnreg=job.max_registers, **stages)


def compile_source(source: Any, **options: Any) -> tuple[Any, str]:
    """What Triton makes of a kernel for sm_90, without a cache, and what ptxas says. options: Triton's.

    The process must not be in Triton's interpreter mode."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    # A kernel from Triton's cache has no log of ptxas; our own cache is the one that counts.
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options | FUSED)
    return compiled, log.getvalue()


def stats_of(compiled: Any, log: str) -> Stats:
    """Stats of a kernel of `compile_source`, and `log`, what ptxas said.

    Its machine code is read when it is first asked for, together with that of all kernels that wait then."""
    cubin = compiled.asm["cubin"]
    resources = sass.resources(cubin)
    stats = object.__new__(Stats)
    vars(stats).update(
        name=compiled.metadata.name,
        registers=int(re.search(r"REG:(\d+)", resources)[1]),
        spills=int(re.search(r"STACK:(\d+)", resources)[1]) // 4,
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        warnings=(
            *re.findall(r"\(C\d+\).*|(?<=warning : ).*", log),
            *reused_barriers(compiled.asm["ttgir"]),
        ),
    )
    _unread.append((stats, sass.code_of(cubin)))
    return stats


_unread: list[tuple[Stats, bytes]] = []
"""Kernels whose machine code nobody has asked for yet, and that code."""


def _read_all() -> None:
    waiting = list(_unread)
    for (stats, _), found in zip(waiting, sass.disassemble([code for _, code in waiting]), strict=True):
        vars(stats).update(found._asdict())
    _unread.clear()


def _import_file(path: str):
    import importlib.util

    name = "kernel_" + hashlib.sha256(path.encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _triton_version() -> str:
    from importlib.metadata import version

    return version("triton")


def _cache_file(job: Job) -> Path:
    folder = Path(tempfile.gettempdir()) / f"attnlib-sm90-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{job.key()}.json"


def _read(path: Path) -> Stats | None:
    """What is in the cache; None where that is nothing, or no Stats: then it is compiled again."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields |= {name: tuple(fields[name]) for name in ("loops", "listing", "warnings")}
        fields |= {name: tuple(map(tuple, fields[name])) for name in ("loop_listings", "loop_stalls")}
        return Stats(**fields)
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _main() -> None:
    """The child: jobs come through standard input, results go to the cache. See `_follow` for its output."""
    parser = argparse.ArgumentParser(
        prog="python -m attnlib.bench.inspect_sm90",
        description="Compile kernels for sm_90a into the cache that `compile_all` reads. Standard input is a "
        "JSON list of jobs, see `Job`.",
    )
    parser.parse_args()
    compiler.collect_seldom()
    progress = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a kernel's file prints is no progress
    jobs = [Job(**fields) for fields in json.load(sys.stdin)]
    compile_into_cache(jobs, lambda: os.write(progress, b"."))


if __name__ == "__main__":
    _main()

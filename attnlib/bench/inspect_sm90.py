"""What the compiler made of a Triton kernel on Hopper: registers, spills, shared memory, SASS counts.

Works with and without a GPU: Triton's wheel carries ptxas, cuobjdump and nvdisasm, and a target can be named
by hand. Each batch of kernels is compiled in one child process, because a kernel that Triton's interpreter
has taken over (TRITON_INTERPRET=1, as in a notebook on a machine without a GPU) can't be compiled in the same
process. Results are kept in the system's temporary folder: the second run of a notebook costs nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attnlib.bench import sources
from attnlib.bench.paths import ROOT

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
_TENSOR_CORE = ("HGMMA", "HMMA")  # Hopper's warpgroup instruction, and the older one Triton falls back to
_VERSION = 6  # part of the cache key: raise it when the meaning of Stats changes


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

    def _key(self) -> str:
        text = Path(self.kernel_file).read_text()
        steps = re.findall(r'load_step\("(\w+)"\)', text)  # kernel cells that this one builds on
        fields = [_VERSION, text, *map(_step_source, steps), sys.version_info[:2], _triton_version()]
        if "from attnlib.kernels" in text:  # a kernel made of functions in more than one file
            fields += [path.read_text() for path in sorted(Path(self.kernel_file).parent.glob("*.py"))]
        fields += [self.kernel_name, self.signature, self.constexprs, self.num_warps, self.num_stages]
        fields += [self.max_registers]
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:24]


@dataclasses.dataclass(frozen=True)
class Stats:
    """A compiled kernel in numbers.

    registers: 32-bit registers per thread. spills: stack frame per thread in 4-byte words, the figure that
    Triton calls n_spills. shared_bytes: shared memory per CTA. opcodes: SASS opcode -> count in the whole
    kernel. loops: the same for each innermost loop that holds a tensor-core instruction, in program order; a
    loop that the compiler could prove to run once is no loop and is not listed. Opcodes are cut at the first
    dot, except MUFU, whose second part says which function (MUFU.EX2). The counts are per warp: one
    instruction works on 32 lanes. loop_listings: the instructions of each of `loops` as text, in program
    order; listing: those of the whole kernel. warnings: what ptxas
    remarked, such as "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized ...".
    """

    registers: int
    spills: int
    shared_bytes: int
    num_warps: int
    opcodes: dict[str, int]
    loops: tuple[dict[str, int], ...]
    loop_listings: tuple[tuple[str, ...], ...]
    listing: tuple[str, ...]
    warnings: tuple[str, ...]

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
            opcode = _opcode(text)
            name = {"HGMMA": "HGMMA", "HMMA": "HMMA", "MUFU.EX2": "EX2"}.get(opcode)
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
    """Compile several kernels in one child process (its start-up costs seconds, a kernel 0.5 to 2 s).

    Returns one Stats per job, in order. Raises RuntimeError naming the kernel if one does not compile.
    """
    jobs = list(jobs)
    missing = {job._key(): job for job in jobs if not _cache_file(job).exists()}
    if missing:
        _run_child(list(missing.values()))
    return [_read(_cache_file(job)) for job in jobs]


def _run_child(jobs: list[Job]) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    request = json.dumps([dataclasses.asdict(job) for job in jobs])
    child = subprocess.run(
        [sys.executable, "-m", __name__], input=request, capture_output=True, text=True, env=env, timeout=600
    )
    if child.returncode != 0:
        tail = "\n".join((child.stderr or child.stdout).strip().splitlines()[-15:])
        names = ", ".join(sorted({job.kernel_name for job in jobs}))
        raise RuntimeError(f"compiling {names} for sm_90 failed:\n{tail}")


def gluon_descriptor(tile: Iterable[int], dtype: str = "fp16") -> str:
    """The type of a Gluon tensor descriptor whose tiles, of this shape, have the default swizzled layout.

    dtype: "fp16" or "bf16".
    """
    from triton.experimental.gluon import language as gl

    element = {"fp16": gl.float16, "bf16": gl.bfloat16}[dtype]
    tile = list(tile)
    return f"tensordesc<{dtype}{tile},{gl.NVMMASharedLayout.get_default_for(tile, element)!r}>"


def compile_here(job: Job) -> Stats:
    """Compile in this process, which must not be in interpreter mode."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
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
    # A kernel from Triton's cache has no log of ptxas; our own cache is the one that counts.
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    is_gluon = isinstance(kernel, GluonJITFunction)
    options = {"num_warps": job.num_warps, "maxnreg": job.max_registers}
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = triton.compile(
            (GluonASTSource if is_gluon else ASTSource)(kernel, signature, constexprs, divisible),
            target=GPUTarget("cuda", 90, 32),
            options=options if is_gluon else options | {"num_stages": job.num_stages},
        )
    return stats_of(compiled, log.getvalue())


def stats_of(compiled: Any, log: str) -> Stats:
    """Stats of a kernel that Triton compiled; `log`: what ptxas said, under knobs.nvidia.dump_ptxas_log."""
    resources, sass = _disassemble(compiled.asm["cubin"])
    opcodes, loops, loop_listings, listing = read_sass(sass)
    return Stats(
        registers=int(re.search(r"REG:(\d+)", resources)[1]),
        spills=int(re.search(r"STACK:(\d+)", resources)[1]) // 4,
        shared_bytes=compiled.metadata.shared,
        num_warps=compiled.metadata.num_warps,
        opcodes=opcodes,
        loops=loops,
        loop_listings=loop_listings,
        listing=listing,
        warnings=tuple(re.findall(r"\(C\d+\).*|(?<=warning : ).*", log)),
    )


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """(resource usage, SASS) of a cubin, from the tools in Triton's wheel."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def tool(program: str, *options: str) -> str:
            command = [program, *options, str(path)]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        return (
            tool(knobs.nvidia.cuobjdump.path, "--dump-resource-usage"),
            tool(knobs.nvidia.nvdisasm.path, "-c"),
        )


def read_sass(
    sass: str,
) -> tuple[dict[str, int], tuple[dict[str, int], ...], tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """(opcodes, loops, loop_listings, listing) of the text that `nvdisasm -c` prints, as in `Stats`.

    A loop is a branch back to an earlier label; it is innermost if it holds no other loop of the kind. Behind
    the kernel's EXIT stand the slow paths, such as waiting for a barrier, which branch back and are no loops.
    """
    listing: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(listing)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+([^;]*?)\s*;", line):
            listing.append(instruction[1])
    opcodes = [_opcode(text) for text in listing]
    branches = [(at, re.search(r"\.L_\w+", listing[at])) for at, op in enumerate(opcodes) if op == "BRA"]
    spans = {(labels[to[0]], at) for at, to in branches if to and labels.get(to[0], at + 1) <= at}
    spans = {span for span in spans if "EXIT" not in listing[span[0] : span[1]]}
    hot = [span for span in spans if any(op in _TENSOR_CORE for op in opcodes[span[0] : span[1] + 1])]
    inner = [a for a in hot if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in hot)]
    loops = tuple(_count(opcodes[start : end + 1]) for start, end in sorted(inner))
    texts = tuple(_without_padding(listing[start : end + 1]) for start, end in sorted(inner))
    return _count(opcodes), loops, texts, _without_padding(listing)


def _without_padding(listing: list[str]) -> tuple[str, ...]:
    return tuple(text for text in listing if text != "NOP")


def _opcode(text: str) -> str:
    parts = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")  # without the predicate
    return ".".join(parts[:2]) if parts[0] == "MUFU" else parts[0]


def _count(opcodes: list[str]) -> dict[str, int]:
    counts = Counter(op for op in opcodes if op != "NOP")  # padding behind the last instruction
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


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


def _step_source(step: str) -> str:
    return sources.kernel_source(sources.notebooks_dir() / f"{step}.ipynb")


def _cache_file(job: Job) -> Path:
    return Path(tempfile.gettempdir()) / f"attnlib-sm90-{os.getuid()}" / f"{job._key()}.json"


def _read(path: Path) -> Stats:
    fields = json.loads(path.read_text())
    fields |= {name: tuple(fields[name]) for name in ("loops", "listing", "warnings")}
    fields["loop_listings"] = tuple(tuple(texts) for texts in fields["loop_listings"])
    return Stats(**fields)


def _main() -> None:
    for fields in json.load(sys.stdin):
        job = Job(**fields)
        path = _cache_file(job)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(dataclasses.asdict(compile_here(job))))
        draft.replace(path)  # atomic: another notebook may be reading


if __name__ == "__main__":
    _main()

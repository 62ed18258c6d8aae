"""mbarriers of a compiled kernel whose shared memory is also used for something else.

Triton gives the memory of a buffer to another one when nothing uses it any more. For an mbarrier that is
not enough: its memory may be used for something else only after `mbarrier.invalidate` (PTX ISA,
"mbarrier.inval"). A kernel that forgets this is right in nearly every run. On an H200 the first words of a
buffer that had a barrier's memory were overwritten when several processes shared the GPU, and in no run of
one process alone (docs/lab/hopper-backward.md, "Other bits, found").

Triton's own pass says where things lie, so this needs no GPU.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

_BITS = {"f8E4M3FN": 8, "f8E5M2": 8}
_SHAPE = r"(?P<shape>(?:\d+x)+)(?P<dtype>\w+)"


class _Place(NamedTuple):
    """What lies in shared memory, from byte `start` to byte `end`."""

    name: str
    start: int
    end: int


def reused_barriers(ttgir: str) -> list[str]:
    """A sentence for each array of mbarriers that are not all invalidated and whose memory is used for
    something else, or that no one waits for and none arrives at. ttgir: text of a compiled kernel
    (`asm["ttgir"]`)."""
    if "ttng.init_barrier" not in ttgir:
        return []
    text = _allocated(ttgir)
    buffers, others = _places(text)
    found = []
    for name, used in _uses(text, buffers).items():
        if used["ttng.inval_barrier"] >= used["ttng.init_barrier"]:  # loops over barriers are unrolled
            continue
        barrier = buffers[name]
        if used.keys() <= {"ttng.init_barrier"}:
            found.append(f"mbarrier %{name} is made and never used")
        for place in (*buffers.values(), *others):
            if place is not barrier and barrier.start < place.end and place.start < barrier.end:
                found.append(f"mbarrier %{name} shares its memory with {place.name} and is not invalidated")
    return found


def _allocated(ttgir: str) -> str:
    """The kernel with an `allocation.offset` at all that lies in shared memory."""
    from triton._C.libtriton import ir, nvidia
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    context = ir.context()
    ir.load_dialects(context)
    CUDABackend(GPUTarget("cuda", 90, 32)).load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ttgir")
        file.write_text(ttgir)
        module = ir.parse_mlir_module(str(file), context)
    module.context = context
    passes = ir.pass_manager(context)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(passes, 90, 80)
    passes.run(module, "allocate")
    return str(module)


def _places(text: str) -> tuple[dict[str, _Place], list[_Place]]:
    """Buffers by name, and what else has memory: of what is kept while a layout changes at most the tensor,
    of other operations, whose size the text does not tell, the first byte."""
    buffers, others = {}, []
    for line in text.splitlines():
        if not (offset := re.search(r"allocation\.offset = (\d+)", line)):
            continue
        start = int(offset[1])
        if alloc := re.search(r"%(\w+) = ttg\.local_alloc", line):
            kind = re.search(_SHAPE, line[line.rindex("!ttg.memdesc<") :])
            place = _Place(f"%{alloc[1]} ({kind[0]})", start, start + _nbytes(kind))
            buffers[alloc[1]] = place
            continue
        operation = re.search(r"\b(?:ttn?g|tt)\.\w+", line)
        name = operation[0] if operation else line.strip()[:40]
        tensor = re.search(f"tensor<{_SHAPE}", line) if name == "ttg.convert_layout" else None
        others.append(_Place(name, start, start + (_nbytes(tensor) if tensor else 1)))
    return buffers, others


def _nbytes(kind: re.Match[str]) -> int:
    """Of a shape and a dtype that `_SHAPE` has found."""
    bits = _BITS.get(kind["dtype"]) or int(re.sub(r"\D", "", kind["dtype"]))
    return math.prod(map(int, kind["shape"][:-1].split("x"))) * bits // 8


def _uses(text: str, buffers: dict[str, _Place]) -> dict[str, Counter[str]]:
    """How often each operation has each buffer that is initialised as a barrier, or as an array of them."""
    root = {name: name for name in buffers}  # of a part of a buffer
    used: dict[str, Counter[str]] = {name: Counter() for name in buffers}
    for line in text.splitlines():
        if not (operation := re.search(r"\b(?:ttn?g|nvws)\.\w+", line)):
            continue
        roots = {root[name] for name in re.findall(r"%([\w#]+)", line) if name in root}
        part = re.match(r"\s*%(\w+) = ttg\.memdesc_", line)
        for name in roots:
            if part:
                root[part[1]] = name
            elif operation[0] != "ttg.local_alloc":
                used[name][operation[0]] += 1
    return {name: operations for name, operations in used.items() if operations["ttng.init_barrier"]}

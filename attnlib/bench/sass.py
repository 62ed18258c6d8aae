"""Machine code of a compiled kernel as text: its instructions, how often each occurs, and its inner loops."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

STALL = 41
"""The bit of the upper half of an instruction where four begin that say how long its warp waits."""
_TENSOR_CORE = ("HGMMA", "QGMMA", "HMMA")  # Hopper's, with 16 and 8 bits, and the older one


class Sass(NamedTuple):
    """Instructions of a kernel, as `inspect_sm90.Stats` has them; padding (NOP) is left out.

    opcodes: opcode -> count in the whole kernel. loops: the same for each innermost loop that holds a
    tensor-core instruction, in program order. loop_listings: the instructions of each of `loops`.
    loop_stalls: the clocks until the warp may issue the instruction after each of them, as the assembler has
    set them; empty if the text has no machine words. listing: the instructions of the whole kernel.
    """

    opcodes: dict[str, int]
    loops: tuple[dict[str, int], ...]
    loop_listings: tuple[tuple[str, ...], ...]
    loop_stalls: tuple[tuple[int, ...], ...]
    listing: tuple[str, ...]


def disassemble(cubin: bytes) -> tuple[str, str]:
    """(resource usage, SASS) of a cubin, as text from the tools in Triton's wheel."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def tool(program: str, *options: str) -> str:
            command = [program, *options, str(path)]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        return (
            tool(knobs.nvidia.cuobjdump.path, "--dump-resource-usage"),
            # Following branches through registers takes a third of its time and adds only a remark to them.
            tool(knobs.nvidia.nvdisasm.path, "-c", "-hex", "--no-dataflow"),
        )


def read_sass(sass: str) -> Sass:
    """The text that `nvdisasm -c -hex` prints, counted and cut into loops.

    A loop is a branch back to an earlier label. It is innermost if it holds no other loop with a tensor-core
    instruction. Behind the kernel's EXIT stand the slow paths, such as waiting for a barrier, which branch
    back and are no loops.
    """
    listing: list[str] = []
    stalls: list[int] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(listing)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+([^;]*?)\s*;", line):
            listing.append(instruction[1])
        elif word := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$", line):  # the upper half of an instruction
            stalls.append(int(word[1], 16) >> STALL & 15)
    opcodes = [opcode(text) for text in listing]
    branches = [(at, re.search(r"\.L_\w+", listing[at])) for at, op in enumerate(opcodes) if op == "BRA"]
    spans = {(labels[to[0]], at) for at, to in branches if to and labels.get(to[0], at + 1) <= at}
    spans = {span for span in spans if "EXIT" not in listing[span[0] : span[1]]}
    hot = [span for span in spans if any(op in _TENSOR_CORE for op in opcodes[span[0] : span[1] + 1])]
    inner = [a for a in hot if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in hot)]
    loops = tuple(_count(opcodes[start : end + 1]) for start, end in sorted(inner))
    texts = tuple(_without_padding(listing[start : end + 1]) for start, end in sorted(inner))
    waits = tuple(
        tuple(stalls[at] for at in range(start, end + 1) if stalls and opcodes[at] != "NOP")
        for start, end in sorted(inner)
    )
    return Sass(_count(opcodes), loops, texts, waits, _without_padding(listing))


def _without_padding(listing: list[str]) -> tuple[str, ...]:
    return tuple(text for text in listing if text != "NOP")


def opcode(text: str) -> str:
    """The name of an instruction up to its first dot, such as HGMMA; MUFU keeps its function: MUFU.EX2."""
    parts = re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")  # without the predicate
    return ".".join(parts[:2]) if parts[0] == "MUFU" else parts[0]


def _count(opcodes: list[str]) -> dict[str, int]:
    counts = Counter(op for op in opcodes if op != "NOP")  # padding behind the last instruction
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

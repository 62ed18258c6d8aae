"""Machine code of a compiled kernel as text: its instructions, how often each occurs, and its inner loops."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

STALL = 41
"""The bit of the upper half of an instruction where four begin that say how long its warp waits."""
_BYTES = 16  # of an instruction
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


def resources(cubin: bytes) -> str:
    """What `cuobjdump` says of a cubin: registers, stack, shared memory."""
    from triton import knobs

    return _run(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", data=cubin)


def code_of(cubin: bytes) -> bytes:
    """The machine code in a cubin, an ELF file of 64 bits: its sections `.text.*`."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + number * size) for number in range(count)]
    names = headers[of_names][4]
    found = [
        cubin[start : start + length]
        for name, _, _, _, start, length in headers
        if cubin.startswith(b".text.", names + name)
    ]
    if not found:
        raise ValueError("a cubin without machine code")
    return b"".join(found)


def disassemble(codes: Sequence[bytes]) -> list[Sass]:
    """Several kernels' machine code, read at once: `nvdisasm` builds its tables for as long as Triton takes
    for half of a small kernel."""
    from triton import knobs

    path = knobs.nvidia.nvdisasm.path
    text = _run(path, "--binary", "SM90a", "-hex", "--no-dataflow", data=b"".join(codes))
    ends = list(accumulate(map(len, codes)))
    instructions: list[list[_Instruction]] = [[] for _ in codes]
    number = 0
    for instruction in _instructions(text):
        while instruction.address >= ends[number]:
            number += 1
        instructions[number].append(instruction)
    if [len(own) * _BYTES for own in instructions] != [len(code) for code in codes]:
        raise RuntimeError("nvdisasm left out instructions")
    return [_read(own, end - len(code)) for own, end, code in zip(instructions, ends, codes, strict=True)]


def read_sass(sass: str) -> Sass:
    """The text that `nvdisasm -hex` prints of a kernel's machine code, counted and cut into loops.

    A loop is a branch back to an earlier address. It is innermost if it holds no other loop with a
    tensor-core instruction. Behind the kernel's EXIT stand the slow paths, such as waiting for a barrier,
    which branch back and are no loops.
    """
    return _read(_instructions(sass), 0)


class _Instruction(NamedTuple):
    address: int
    text: str
    stall: int | None


def _run(program: str, *options: str, data: bytes) -> str:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        command = [program, *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _instructions(text: str) -> list[_Instruction]:
    found: list[_Instruction] = []
    for line in text.splitlines():
        if instruction := re.match(r"\s*/\*([0-9a-f]+)\*/\s+([^;]*?)\s*;", line):
            found.append(_Instruction(int(instruction[1], 16), instruction[2], None))
        elif word := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$", line):  # the upper half of an instruction
            found[-1] = found[-1]._replace(stall=int(word[1], 16) >> STALL & 15)
    return found


def _read(instructions: list[_Instruction], begin: int) -> Sass:
    """begin: address of the kernel. In its listing addresses count from there."""
    stalls = [instruction.stall for instruction in instructions]
    place = {instruction.address - begin: at for at, instruction in enumerate(instructions)}
    listing, targets = [], []
    for instruction in instructions:
        text, target = instruction.text, None
        if jump := re.fullmatch(r"(.*\b(?:BRA|BSSY|CALL|RET)\b.* )0x([0-9a-f]+)", text):
            target = int(jump[2], 16) - begin
            text = f"{jump[1]}{target:#x}"
        listing.append(text)
        targets.append(place.get(target))
    opcodes = [opcode(text) for text in listing]
    branches = [(at, targets[at]) for at, op in enumerate(opcodes) if op == "BRA"]
    spans = {(to, at) for at, to in branches if to is not None and to <= at}
    spans = {span for span in spans if "EXIT" not in listing[span[0] : span[1]]}
    hot = [span for span in spans if any(op in _TENSOR_CORE for op in opcodes[span[0] : span[1] + 1])]
    inner = [a for a in hot if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in hot)]
    loops = tuple(_count(opcodes[start : end + 1]) for start, end in sorted(inner))
    texts = tuple(_without_padding(listing[start : end + 1]) for start, end in sorted(inner))
    waits = tuple(
        tuple(stalls[at] for at in range(start, end + 1) if stalls[at] is not None and opcodes[at] != "NOP")
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

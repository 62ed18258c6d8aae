"""Clocks for which a trip through the hot loop of a Hopper kernel keeps each unit of an SM busy.

Each consumer has one warp on each of the SM's four schedulers, so one scheduler stands for all: what a warp
of one consumer asks of it, for 64 rows and BLOCK_N keys, adds up over the consumers. The counts are those of
the machine code, the rates are published; nothing is measured here.
"""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass

from attnlib.bench.inspect_sm90 import Stats
from attnlib.bench.sass import opcode

EXP2 = 8
"""Clocks of a scheduler's share of the exponential unit for an instruction of a warp: 32 lanes, 4 a clock."""
ALU = 2
"""The same for maxima, compares, shifts, logic and conversions: 16 lanes a clock."""
ON_ALU = "FMNMX FSETP FSEL ISETP SEL VIADD IADD3 LEA LOP3 SHF PRMT F2FP VIMNMX".split()
SHARED_BYTES = 128
"""That shared memory delivers in a clock."""


@dataclass(frozen=True)
class Budget:
    """Clocks of a scheduler for one trip of a warp: tensor cores, issue slots, exponential unit, the pipe of
    maxima and conversions; and of the SM's shared memory for the products' operands and the copies."""

    tensor: float
    issue: float
    exp: float
    alu: float
    shared: float

    def scaled(self, factor: float) -> Budget:
        return Budget(*(factor * clocks for clocks in astuple(self)))


def walked(stats: Stats, loop: int = 0) -> list[str]:
    """Instructions of a hot loop, without the multiplications of O, which warps jump over by a vote nearly
    always."""
    return [stats.loop_listings[loop][number] for number in _walked(stats, loop)]


def _walked(stats: Stats, loop: int) -> list[int]:
    found, voted, skipping = [], False, False
    for number, text in enumerate(stats.loop_listings[loop]):
        kind = opcode(text)
        skipping = skipping and kind == "FMUL"
        if not skipping:
            found.append(number)
        if voted and kind == "BRA":
            voted, skipping = False, True
        voted = voted or kind == "VOTE"
    return found


def path(stats: Stats, loop: int = 0) -> int:
    """Clocks from the first of these instructions to the last for a warp that has the SM for itself, as the
    assembler has set them: without what it waits for at run time, products, memory, exchanges, barriers."""
    return sum(stats.loop_stalls[loop][number] for number in _walked(stats, loop))


def product(text: str) -> tuple[float, int]:
    """Clocks of the tensor cores for an HGMMA of 64 x N x 16, and the bytes that it reads from shared memory:
    16 x N numbers, and 64 x 16 more where the first operand lies there too."""
    n = int(re.search(r"64x(\d+)x16", text)[1])
    first_in_registers = re.match(r"(?:@\S+ )?HGMMA\S+ R\d+, R\d+, gdesc", text)
    return n / 2, 32 * n + (0 if first_in_registers else 2048)


def budget(stats: Stats, copied: float) -> Budget:
    """Of a hot loop; copied: bytes that copies write into shared memory for one consumer's trip."""
    found = walked(stats)
    kinds = [opcode(text) for text in found]
    products = [product(text) for text, kind in zip(found, kinds, strict=True) if kind == "HGMMA"]
    read = sum(size for _, size in products)
    return Budget(
        tensor=sum(clocks for clocks, _ in products), issue=len(found), exp=EXP2 * kinds.count("MUFU.EX2"),
        alu=ALU * sum(kind in ON_ALU for kind in kinds), shared=(read + copied) / SHARED_BYTES,
    )  # fmt: skip

"""A Gluon kernel of the package, compiled for sm_90 with the constants of a plan, and no tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import Stats


def tile_types(descriptors: Mapping[str, Any], dtype: str, **others: str) -> dict[str, str]:
    """Types of tensor descriptors, `common.descriptors.Made`; others: of those that do not hold dtype."""
    return {
        name: f"tensordesc<{others.get(name, dtype)}{list(made.block)},{made.layout!r}>"
        for name, made in descriptors.items()
    }


def compile_kernel(
    kernel: Any, plan: Any, types: Mapping[str, str], absent: Collection[str], aligned: Collection[str],
    max_registers: int, more: Mapping[str, Any] | None = None,
) -> tuple[Stats, Any]:  # fmt: skip
    """The compiled kernel in numbers, and what Triton made of it.

    types: of arguments that are no i32; absent: arguments that a call of this plan does without; aligned:
    pointers that are divisible by 16; more: constants beside the plan."""
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {name: types.get(name, "i32") for name in names}
    constants = dict.fromkeys(absent) | {"plan": plan} | (more or {})
    signature |= dict.fromkeys(constants, "constexpr")
    constants = {(names.index(name),): value for name, value in constants.items()}
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = GluonASTSource(kernel, signature, constants, divisible)
    compiled, log = inspect_sm90.compile_source(source, num_warps=4, maxnreg=max_registers)
    check_assembly(compiled.asm["ptx"])
    return inspect_sm90.stats_of(compiled, log), compiled


def tritons_barriers(compiled: Any) -> set[int]:
    """The hardware's named barriers that Triton itself uses: PTX has them as constants, and a kernel's own in
    registers."""
    found = re.findall(r"\bbar(?:rier)?\.(?:cta\.)?(?:sync|arrive|red)\S*\s+(\d+)", compiled.asm["ptx"])
    return set(map(int, found))


def check_assembly(ptx: str) -> None:
    """Inline assembly that branches to DONE: what it reads behind the branch was not overwritten before it.

    The compiler may give a result the register of an operand, unless a constraint forbids it ("=&f"). No
    emulator shows that: there each has a register of its own."""
    for block in re.findall(r"^.*@!q bra DONE;.*$", ptx, re.MULTILINE):
        before, behind = block.split("@!q bra DONE;")
        if "ex2.approx" in behind:  # kept_shift: old shifts and sums are needed for the new ones
            assert not re.search(r"(mov\.b32|add\.f32) (%\w+), \2[,;]", before), "a shift or a sum is lost"
        else:  # softmax.rescale
            results = set(re.findall(r"mul\.f32 (%\w+),", behind))
            assert results.isdisjoint(re.findall(r"(%\w+);", behind)), "a factor is lost"
            written = set()
            for result, element in re.findall(r"mov\.b32 (%\w+), (%\w+)", before):
                assert element not in written, "an element is lost"
                written.add(result)

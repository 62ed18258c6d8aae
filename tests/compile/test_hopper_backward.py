"""The Hopper backward kernel compiled for sm_90 in every configuration, and what makes dQ of its sums."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import NamedTuple

import pytest
import side_by_side
import torch
from chosen import in_turn, with_more
from gluon_kernels import compile_kernel, tile_types, tritons_barriers
from triton.experimental import gluon

from attnlib.bench import inspect_sm90
from attnlib.bench.inspect_sm90 import SMEM_LIMIT, Job, Stats
from attnlib.kernels.common import postprocess
from attnlib.kernels.common import preprocess as preprocess_kernel
from attnlib.kernels.common.backward_pair import START
from attnlib.kernels.common.launch_preprocess import Preprocess, preprocess
from attnlib.kernels.common.launcher import Launch
from attnlib.kernels.common.signature import Lengths, Signature
from attnlib.kernels.hopper import (
    backward_kernel,
    launch_backward,
    sharing,
)
from attnlib.kernels.hopper.backward_persistent import TOLD
from attnlib.kernels.hopper.backward_wide_kernel import END
from attnlib.kernels.hopper.configs_backward import (
    DENSE,
    SPLIT,
    BackwardKind,
    HopperBackwardConfig,
    backward_config,
    hopper_backward_config,
)
from attnlib.params import MaskWindow


class Kind(NamedTuple):
    """What a plan is told of a call."""

    causal: bool
    tail: bool
    shifted: bool = False
    left: bool = False
    varlen: bool = False


KINDS = {
    "causal": Kind(True, False),
    "dense": Kind(False, False),
    "tail": Kind(False, True),
    "window": Kind(True, False, left=True),
    "both sides": Kind(True, True, True, True),
    "varlen": Kind(True, False, varlen=True),
    "varlen dense": Kind(False, True, varlen=True),
    "varlen window": Kind(True, True, True, True, True),
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
WIDTHS = 64, 128, 256
PAIR = "192/128"
"""Columns of queries and of values."""
KEYS_96 = 160, 192, PAIR
"""With 96 keys a program."""
OWN_VALUES = "64/128", "128/64"
KEYS_128 = 64, 80, 96, 128, *OWN_VALUES
"""With 128 keys."""
WIDE_VALUES = "64/256", "128/256"
"""With 64, as at 256."""
SPLIT_SPILLS = {
    (80, "causal"): 6, (96, "causal"): 4, (96, "varlen window"): 6,
}  # fmt: skip
"""The kinds that are compiled of each width in two parts, and what `SPILLS` says of the others."""
OPTION_SPILLS = {
    (64, "deterministic causal"): 6, (64, "deterministic dense"): 0,
    (64, "deterministic varlen window"): 2, (64, "ordered turns bulk whole causal"): 6,
    (64, "ordered turns bulk whole both sides"): 4, (64, "ordered turns bulk whole apart causal"): 2,
    (64, "ordered turns bulk dense"): 4, (64, "ordered persistent bulk dense"): 6,
    (96, "ordered turns early causal"): 16, (96, "ordered turns early both sides"): 18,
    (96, "ordered turns early apart causal"): 10, (128, "ordered turns causal"): 6,
    (128, "ordered turns dense"): 4, (128, "ordered turns both sides"): 6,
    (128, "ordered turns apart causal"): 8, (256, "ordered apart causal"): 0,
    (128, "deterministic causal"): 10,
    (128, "deterministic dense"): 2, (128, "deterministic varlen window"): 20,
    (96, "deterministic causal"): 10, (256, "deterministic causal"): 2,
    (256, "deterministic dense"): 2, (256, "deterministic varlen window"): 4,
    (64, "shared causal"): 18, (64, "shared varlen window"): 16, (80, "shared causal"): 8,
    (96, "shared causal"): 16, (128, "shared causal"): 10, (128, "shared dense"): 8,
    (128, "shared varlen window"): 10, (128, "apart causal"): 10, (256, "shared causal"): 2,
    (256, "shared dense"): 0, (256, "shared varlen window"): 10, (256, "apart causal"): 2,
    (64, "alternate causal"): 12, (64, "alternate dense"): 4, (128, "alternate causal"): 6,
    (64, "bulk causal"): 2, (64, "bulk dense"): 10, (80, "bulk causal"): 8, (96, "bulk dense"): 8,
    (128, "bulk causal"): 2, (128, "bulk varlen window"): 4, (64, "early causal"): 8,
    (128, "pauses causal"): 8,
    (64, "persistent early causal"): 14, (64, "persistent dense"): 14, (80, "persistent causal"): 16,
    (96, "persistent bulk dense"): 12, (128, "persistent early causal"): 8, (128, "persistent dense"): 8,
    (128, "persistent window"): 10, (64, "persistent bulk dense"): 6, (64, "persistent early both sides"): 8,
    (80, "persistent bulk causal"): 14, (96, "persistent causal"): 20, (96, "persistent both sides"): 20,
    (128, "persistent causal"): 10, (128, "persistent both sides"): 10,
    (64, "persistent bulk shared dense"): 0, (64, "persistent early shared causal"): 2,
    (80, "persistent bulk shared causal"): 6, (96, "persistent shared causal"): 12,
    (128, "persistent shared causal"): 8, (128, "persistent shared dense"): 4,
    (128, "persistent shared both sides"): 6,
    (64, "turns bulk whole causal"): 4, (64, "turns bulk dense"): 6, (64, "turns bulk whole both sides"): 6,
    (64, "turns bulk whole shared causal"): 0, (64, "turns bulk shared dense"): 0,
    (64, "turns bulk whole varlen"): 4, (96, "turns two loops tail"): 12,
    (64, "turns bulk whole varlen window"): 6, (64, "turns bulk whole shared varlen"): 6,
    (80, "turns varlen"): 10, (80, "persistent varlen dense"): 8, (96, "turns varlen"): 14,
    (96, "persistent varlen dense"): 20, (96, "turns shared varlen"): 14, (96, "turns varlen window"): 16,
    (128, "turns varlen"): 8, (128, "turns varlen dense"): 16, (128, "turns varlen window"): 12,
    (128, "turns shared varlen"): 10,
    (80, "turns causal"): 16, (80, "turns dense"): 12, (80, "turns shared causal"): 10,
    (96, "turns causal"): 20, (96, "turns shared causal"): 12, (96, "turns both sides"): 20,
    (128, "turns causal"): 10, (128, "turns dense"): 6, (128, "turns shared causal"): 8,
    (128, "turns both sides"): 8,
    (64, "turns bulk late whole two loops rotated varlen dense"): 4, (80, "turns rotated dense"): 14,
    (80, "persistent rotated varlen dense"): 10, (96, "persistent rotated dense"): 14,
    (96, "turns two loops rotated tail"): 14, (128, "rotated dense"): 4, (128, "turns rotated dense"): 6,
    (128, "turns rotated varlen dense"): 8, (128, "turns rotated shared dense"): 6,
}  # fmt: skip
"""The kinds that are compiled with an option, and words that may spill there. Turns at a sum take more
numbers to keep."""
SPILLS_96 = {
    (192, "causal"): 6, (192, "dense"): 2, (192, "both sides"): 6, (192, "varlen window"): 4,
    (192, "third early causal"): 6, (192, "third early both sides"): 6,
    (192, "varlen"): 4, (192, "varlen dense"): 8, (192, "early causal"): 6, (192, "shared causal"): 4,
    (192, "apart causal"): 4, (192, "shared varlen"): 4, (192, "early both sides"): 6,
    (160, "causal"): 8, (160, "dense"): 6, (160, "both sides"): 10, (160, "varlen"): 4,
    (160, "varlen dense"): 4, (160, "shared causal"): 2, (160, "shared varlen"): 4,
    (PAIR, "dense"): 0, (PAIR, "early causal"): 2, (PAIR, "early both sides"): 4,
    (PAIR, "early varlen"): 2, (PAIR, "varlen dense"): 4,
    (192, "deterministic causal"): 4, (192, "deterministic dense"): 2,
    (192, "deterministic varlen window"): 4, (160, "deterministic causal"): 8,
    (PAIR, "deterministic causal"): 2, (192, "ordered apart causal"): 2, (160, "ordered apart causal"): 4,
}  # fmt: skip
"""Words that may spill there."""
SPILLS_OF_VALUES = {
    ("64/128", "causal"): 0, ("64/128", "both sides"): 0, ("64/128", "varlen"): 0,
    ("64/128", "varlen window"): 0, ("64/128", "turns causal"): 4, ("64/128", "turns dense"): 0,
    ("64/128", "turns both sides"): 2, ("64/128", "turns shared causal"): 4, ("64/128", "shared causal"): 0,
    ("64/128", "ordered turns causal"): 2, ("64/128", "ordered turns apart causal"): 2,
    ("64/128", "deterministic varlen window"): 0, ("64/128", "turns bulk causal"): 0,
    ("64/128", "persistent bulk dense"): 0, ("64/128", "turns varlen"): 4, ("128/64", "turns varlen"): 0,
    ("128/64", "dense"): 0, ("128/64", "window"): 0, ("128/64", "varlen dense"): 0,
    ("128/64", "varlen window"): 0, ("128/64", "turns causal"): 2, ("128/64", "turns dense"): 0,
    ("128/64", "turns both sides"): 2, ("128/64", "turns shared causal"): 0,
    ("128/64", "ordered turns causal"): 2, ("128/64", "ordered turns apart causal"): 0,
    ("128/64", "deterministic causal"): 0, ("128/64", "apart causal"): 0, ("128/64", "bulk causal"): 0,
    ("64/128", "turns rotated dense"): 2, ("128/64", "turns rotated dense"): 0,
    **dict.fromkeys(product(WIDE_VALUES, ("causal", "dense", "both sides", "varlen window")), 0),
    ("64/256", "shared causal"): 0, ("64/256", "deterministic causal"): 0, ("64/256", "early causal"): 0,
    ("128/256", "early both sides"): 2, ("128/256", "deterministic varlen window"): 0,
    ("128/256", "apart causal"): 0,
}  # fmt: skip
"""Words that may spill beside values with other columns."""
FIRST = [
    (64, "turns bulk whole causal"), (64, "persistent bulk dense"), (64, "turns bulk whole shared causal"),
    (64, "turns bulk whole varlen window"), (64, "turns bulk late varlen dense"), (128, "turns varlen"),
    (96, "turns two loops rotated tail"), (128, "turns rotated dense"), (80, "turns rotated dense"),
    (128, "turns shared varlen"), (96, "persistent varlen dense"), (80, "turns causal"), (96, "turns causal"),
    (128, "ordered turns causal"), (128, "ordered turns apart causal"), (128, "turns causal"),
    (128, "apart causal"), (128, "deterministic varlen window"),
    (192, "third early causal"), (192, "deterministic causal"), (256, "causal"), (256, "dense"),
    (64, "ordered turns bulk dense"),
    (256, "shared causal"), (256, "deterministic varlen window"), (192, "dense"),
    (192, "shared varlen"), (160, "causal"), (PAIR, "early both sides"),
    ("64/128", "turns causal"), ("128/64", "turns rotated dense"), ("64/128", "varlen window"),
    ("128/64", "turns shared causal"), ("64/256", "early causal"), ("128/256", "dense"),
]  # fmt: skip
"""What calls get by themselves, of each width and with each option."""
CASES = with_more(
    [*((*case, "fp16") for case in FIRST), (128, "causal", "bf16"),
     (64, "turns bulk late whole two loops varlen dense", "bf16")],
    [
        *product(WIDTHS, KINDS, ["fp16"]), (256, "causal", "bf16"), (192, "causal", "bf16"),
        *((*case, "fp16") for case in (*SPLIT_SPILLS, *SPILLS_96, *OPTION_SPILLS, *SPILLS_OF_VALUES)),
    ],
)  # fmt: skip
FORMS = {"alternate": ["alternate"], "early": ["early_mask"], "bulk": ["bulk", "early_mask"]}
FORMS |= {"alternate early": ["alternate", "early_mask"]}
FORMS |= {
    "persistent": ["persistent"],
    "persistent early": ["persistent", "early_mask"],
    "persistent bulk": ["persistent", "bulk", "early_mask"],
}
FORMS |= {f"turns{name.removeprefix('persistent')}": [*options, "alternate"]
          for name, options in FORMS.items() if name.startswith("persistent")}  # fmt: skip
FORMS = {name: dict.fromkeys(options, True) for name, options in FORMS.items()}
WHOLE = {"half_p": False}
FORMS |= {"turns bulk whole": FORMS["turns bulk"] | WHOLE, "bulk whole": FORMS["bulk"] | WHOLE}
LATE = {"early_mask": False}
FORMS |= {f"turns bulk late{name}": FORMS[f"turns bulk{name}"] | LATE for name in ("", " whole")}
APART = "turns", "turns bulk late whole"
FORMS |= {f"{name} two loops": FORMS[name] | {"tail_apart": True} for name in APART}
ROTATED = "turns", "persistent", "turns two loops", "turns bulk late whole two loops"
FORMS |= {f"{name} rotated": FORMS[name] | {"rotated": True} for name in ROTATED}
FORMS["rotated"] = {"rotated": True}
FORMS |= {f"{name} shared": form for name, form in FORMS.items() if form.get("persistent")}
FORMS["pauses"] = {"pause_every": 4}
FORMS["third early"] = {"pause_every": 3, "early_mask": True}
ORDERED = {"turns": {"pause_every": 4}}
ORDERED |= {"turns early": {}, "turns bulk whole": {}}
ORDERED |= dict.fromkeys(("turns bulk", "persistent bulk"), {"half_p": True})
FORMS |= {f"ordered {name}": FORMS[name] | {"deterministic": True} | more for name, more in ORDERED.items()}
FORMS |= {f"{name} apart": form for name, form in FORMS.items() if name.startswith("ordered")}
FORMS["ordered apart"] = {"deterministic": True}
OPTIONS = "deterministic", *FORMS, "shared", "apart"
"""Words before a kind: of the configuration; the last two, programs that share a key head."""
SHARED = "keys_ptr", "SHARE"
"""Arguments of a plan that is shared."""
DRAWN = "counter_ptr", "tiles"
"""And of one that is persistent."""
PLANTED = "dQ of every step goes to one block"

IN_A_STEP = {64: [32, 32], 80: [38, 38], 96: [44, 44], 128: [32, 32]}
IN_A_STEP |= dict.fromkeys(OWN_VALUES, [28, 28])
IN_A_STEP |= {256: [8, 24, 24], 192: [34, 40, 40], 160: [34, 36, 36], PAIR: [26, 32, 40]}
"""Products of each consumer in a step, sorted; beyond 128 columns one for dQ, one for dV, one for dK."""
AROUND = {64: 2 * (4 + 8), 80: 2 * (5 + 12), 96: 2 * (6 + 16), 128: 2 * (8 + 8)}
IN_A_STEP |= {"64/256": [4, 12, 20], "128/256": [4, 16, 20]}
AROUND |= {"64/256": 4 + 16, "128/256": 8 + 16}
AROUND |= {"64/128": 2 * (4 + 8), "128/64": 2 * (8 + 8)}
AROUND |= {256: 16 + 16, 192: 12 + 12, 160: 10 + 10, PAIR: 12 + 8}
"""Products around the loops: the first S, and dQ of the last block; beyond 128 columns the first S and dP."""
EX2 = dict.fromkeys(KEYS_128, [32, 32]) | {64: [64, 64]}
EX2 |= dict.fromkeys((256, *WIDE_VALUES), [0, 0, 32]) | dict.fromkeys(KEYS_96, [0, 0, 48])
"""Exponentials of a thread in a step, sorted."""
ADDITIONS = {64: [8, 8], 80: [6, 6], 96: [6, 6], 128: [8, 8], "64/128": [4, 4], "128/64": [8, 8]}
ADDITIONS |= {"64/256": [0, 0, 8], "128/256": [0, 0, 16]}
ADDITIONS |= {256: [0, 0, 32], 192: [0, 0, 24], 160: [0, 0, 20], PAIR: [0, 0, 24]}
"""Of 16 bytes, likewise."""
ADDED_TOGETHER = {256: [16, 16], 192: [8, 8, 8], PAIR: [8, 8, 8], 160: [8, 8, 4]}
"""Of those, behind a product each, where there are several; elsewhere all."""
SPILLS = {
    64: (10, 6, 8, 10, 12, 12, 4, 12),
    128: (6, 0, 0, 12, 4, 6, 4, 4),
    256: (0, 0, 0, 2, 2, 2, 2, 2),
}
"""32-bit words of a thread that may spill, kind by kind: addresses and counters; the registers are full of
accumulators."""
LOADS = dict.fromkeys((*OWN_VALUES, *WIDE_VALUES), 0)
LOADS |= {64: 10, 80: 0, 96: 1, 128: 9, 256: 0, 192: 2, 160: 2, PAIR: 0}
"""Loads of such words that the code of a step may have, those in the branch with the mask included."""
SHARED_LOADS = LOADS | {64: 18, 80: 7, 96: 15}
"""The same where programs share a key head, which keep an address of sums more."""
OWN_LOADS = {
    (96, "persistent varlen dense"): 5, (96, "turns varlen window"): 2, (256, "shared varlen window"): 5,
    (192, "varlen dense"): 6, (PAIR, "early varlen"): 1,
}  # fmt: skip
"""Of single kinds. No call gets (256, "shared
varlen window") by itself: such varlen calls visit all query heads of a group."""


def columns_of(
    name: int | str, deterministic: bool = False, kind: BackwardKind = DENSE
) -> tuple[int, int, HopperBackwardConfig]:
    """Those of queries and of values, and the configuration, which the kind decides where sums have an
    order."""
    kind = kind if deterministic else DENSE
    if isinstance(name, str):
        columns, values = map(int, name.split("/"))
        return columns, values, backward_config(columns, values, deterministic, kind)
    return name, name, hopper_backward_config(name, deterministic, kind=kind)


def call_of(
    name: int | str, dtype: str, varlen: bool, deterministic: bool = False
) -> tuple[Signature, Preprocess]:
    """A call of this kind, and what its backward pass begins with."""
    width, values, config = columns_of(name, deterministic)
    shape = (500, 4, width) if varlen else (3, 4, 200, width)
    lengths = Lengths(3, 200, 200) if varlen else None
    strides = torch.empty(shape, device="meta").stride()
    window, own = MaskWindow(None, None), None if values == width else values
    call = Signature(shape, shape, (strides,) * 5, DTYPES[dtype], 0, window, 1.0, lengths, False, config)
    call = call._replace(own_value_dim=own)
    out = call.out, torch.empty(call.out, device="meta").stride()
    return call, preprocess(call, out, out, config.block_m, width, deterministic)


def option_of(kind: str) -> tuple[str, str]:
    """(option or nothing, the kind without it)."""
    found = [option for option in OPTIONS if kind.startswith(f"{option} ")]
    option = max(found, key=len, default="")
    return option, kind.removeprefix(f"{option} ")


def is_in_order(option: str) -> bool:
    """Sums are."""
    return option == "deterministic" or option.startswith("ordered")


def is_shared(option: str) -> bool:
    """Programs share a key head."""
    return "shared" in option or "apart" in option


def kind_of(kind: str) -> BackwardKind:
    """A block that is filled up makes no mask."""
    told = KINDS[kind]
    return BackwardKind(told.causal or told.shifted or told.left, left_bound=told.left, varlen=told.varlen)


@gluon.jit
def _one_block(block, m, j, last, tile, gap, plan: gluon.language.constexpr):
    return tile.m_start


def compile_case(case: tuple[int, str, str] | str) -> tuple[Stats, list[bool], set[int]]:
    """A case, or `PLANTED`, in numbers; for each place in a loop that adds to dQ whether its address changes
    from step to step; and the named barriers that are Triton's own."""
    if case == PLANTED:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backward_kernel, "_before", _one_block)
            return compile_case((128, "causal", "fp16"))
    name, kind, dtype = case
    option, kind = option_of(kind)
    deterministic = is_in_order(option)
    columns, _, config = columns_of(name, deterministic, kind_of(kind))
    if option in FORMS:
        config = replace(config, **FORMS[option])
    told = KINDS[kind]
    mask = told._asdict()
    varlen = mask.pop("varlen")
    shared = is_shared(option)
    config = replace(config, added="apart" not in option)
    if not deterministic:  # which decides whether the kernel is given LAST
        of_kind = hopper_backward_config(columns, kind=kind_of(kind))
        config = replace(config, crowding=of_kind.crowding)
    plan = launch_backward.make_plan(columns, config, mask, varlen, shared, config.persistent)
    module, _, function = launch_backward.kernel_of(config).rpartition(".")
    kernel = getattr(importlib.import_module(module), function)
    types = dict.fromkeys(("dq_ptr", "turns_ptr", SHARED[0], DRAWN[0]), "*fp32")
    types |= {"qk_scale": "fp32", "sm_scale": "fp32"}
    call, rows = call_of(name, dtype, varlen, deterministic)
    call = call._replace(config=config)
    own, values = ((shape, call.strides[0]) for shape in (call.q, call.v))
    windows = own, own, values, values, own, values  # what is compiled depends on their columns alone
    found = launch_backward.descriptors(windows[: 4 if shared else 6], rows, columns, call)
    floats = "desc_rows", "desc_sums", "desc_sums_right"
    types |= tile_types(found, dtype, **dict.fromkeys(floats, "fp32"))
    names = kernel.arg_names
    absent = [name for name in names if name.startswith("desc_") and name not in types]
    wanted_by = {("right",): told.shifted, ("left",): told.left, ("cu_q", "cu_k", "B"): varlen}
    crowded = config.crowding is not None and not varlen
    wanted_by |= {SHARED: shared, DRAWN: config.persistent, ("LAST",): crowded}
    for given, wanted in (wanted_by | {("turns_ptr",): deterministic}).items():
        types |= {name: "*i32" for name in given if name.startswith("cu")}
        absent += [] if wanted else [name for name in given if name in names]
    aligned = "dq_ptr", *(("turns_ptr",) if deterministic else ()), *(SHARED[:1] if shared else ())
    aligned += DRAWN[:1] if config.persistent else ()
    more = {"OVERLAPS": True}
    stats, compiled = compile_kernel(kernel, plan, types, absent, aligned, config.max_registers, more)
    return stats, addresses_change(compiled.asm["ttgir"]), tritons_barriers(compiled)


def addresses_change(ttgir: str) -> list[bool]:
    """For each addition to memory in a loop: whether its address depends on a variable of the loop."""
    lines, found = ttgir.splitlines(), []
    for number, line in enumerate(lines):
        # A loop and what is in it are indented, and end with a brace where the loop begins.
        if "scf.for" not in line:
            continue
        indent = len(line) - len(line.lstrip())
        end = next(i for i in range(number + 1, len(lines)) if lines[i].startswith(" " * indent + "}"))
        carried = set(re.findall(r"scf\.for (%[\w$.-]+) =", line))
        carried |= set(re.findall(r"(%[\w$.-]+) = %", line.partition("iter_args(")[2]))
        for place in range(number + 1, end):
            if "red.global.add" in lines[place]:
                address = re.findall(r"%[\w$.-]+", lines[place].rpartition('" {')[2])[1]
                found.append(_depends(address, carried, lines[number + 1 : place]))
    return found


def _depends(value: str, carried: set[str], before: list[str]) -> bool:
    wanted = {value}
    for line in reversed(before):
        result, _, operation = line.partition(" = ")
        if result.strip().split(":")[0] in wanted:
            wanted |= set(re.findall(r"%[\w$.-]+", re.sub(r'"[^"]*"', "", operation)))
    return bool(wanted & carried)


@pytest.fixture(scope="module")
def compiled() -> dict[object, tuple[Stats, list[bool], set[int]]]:
    cases = [*CASES, PLANTED]
    return dict(zip(cases, side_by_side.run(compile_case, cases), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_configuration(compiled, case: tuple[int, str, str]) -> None:
    (stats, changes, barriers), (width, kind, _) = compiled[case], case
    print(f"{case}: {stats.registers} registers, {stats.spills} words, {stats.shared_bytes} bytes")
    assert stats.warnings == (), "wgmma serialized?"
    option, unmarked = option_of(kind)
    copies = 2 if "two loops" in option else 1  # of the loops
    products = copies * sum(IN_A_STEP[width]) + AROUND[width]
    assert stats.opcodes["HGMMA"] == products and not stats.opcodes.get("HMMA")
    shared = is_shared(option)
    assert stats.opcodes.get("UTMALDG") and bool(stats.opcodes.get("UTMASTG")) != shared, "no TMA"
    assert stats.opcodes.get("USETMAXREG"), "registers are not shared out anew"
    assert stats.shared_bytes <= SMEM_LIMIT
    ours = START if width in KEYS_128 else END
    if option.startswith(("persistent", "turns")) and "varlen" in unmarked:
        ours = TOLD
    assert {0, 1, 2} <= barriers <= set(range(ours.value)), "Triton and the kernel have a barrier in common"
    own = (SPLIT_SPILLS | OPTION_SPILLS | SPILLS_96 | SPILLS_OF_VALUES).get((width, kind))
    kind = unmarked
    deterministic = is_in_order(option)
    assert stats.spills <= (SPILLS[width][list(KINDS).index(kind)] if own is None else own)
    loops = stats.loops  # one for each consumer, or two
    assert sorted(loop["HGMMA"] for loop in loops) == sorted(copies * IN_A_STEP[width])
    assert sorted(loop.get("MUFU.EX2", 0) for loop in loops) == sorted(copies * EX2[width])
    assert copies == 1 or sorted(loop.get("FSEL", 0) > 0 for loop in loops) == [False, False, True, True]
    in_bulk = "bulk" in option or (deterministic and width == 64)
    added = "STS" if in_bulk else "REDG"
    additions = sorted(copies * ADDITIONS[width])
    assert sorted(loop.get(added, 0) for loop in loops) == additions, "16 bytes at a time"
    assert not in_bulk or not any(loop.get("REDG") for loop in loops)
    loads = OWN_LOADS.get(case[:2], (SHARED_LOADS if shared else LOADS)[width])
    for loop in loops:
        assert deterministic or loop.get("LDL", 0) <= loads
        assert not any(text.startswith(("ATOM", "LDG", "STG")) for text in loop), "turns have their own warp"
    moved = [sum("R2UR" in text for text in listing) for listing in stats.loop_listings]
    # Where programs of one tile share a key head, the second consumer has them: its sums of dK and dV are
    # added in the order of threads. So are those of dQ in a deterministic wide kernel.
    of_keys = width in KEYS_96
    stays = option.startswith(("persistent", "turns", "ordered turns", "ordered persistent"))
    uniform = (not shared or stays) if width in KEYS_128 else not deterministic
    assert not uniform or max(moved) <= 8, "addresses are taken for different in each thread"
    paused = [sum("NANOSLEEP" in text for text in listing) for listing in stats.loop_listings]
    every = columns_of(width, deterministic, kind_of(kind))[2].pause_every
    every = FORMS.get(option, {}).get("pause_every", every)
    parts = ADDED_TOGETHER.get(width, [max(ADDITIONS[width])])
    pauses = sum(-(-part // every) for part in parts) if every else 0
    assert paused == [pauses if loop.get("REDG") else 0 for loop in loops]
    two_parts = 2 if width in (80, 96) else 1
    places = 3 if of_keys else 1 if width in WIDE_VALUES else 2 * two_parts
    from_registers = 0 if in_bulk else places
    assert changes == [True] * copies * from_registers, "two places add to dQ, or two for each part, or one"
    # The last step of a tile, which reads of the next one, where there is no mask, or lengths differ.
    peeled = 2 if stays and in_bulk and (kind == "dense" or "varlen" in kind) else 1
    assert stats.opcodes.get("UTMAREDG", 0) == (places - from_registers) * peeled


def test_an_address_that_does_not_change_is_found(compiled) -> None:
    assert compiled[PLANTED][1] == [False, False]


def test_two_parts_are_compiled() -> None:
    """A line in `SPLIT` wants its kind of call here."""
    assert {width for width, _ in SPLIT_SPILLS} == {*SPLIT}


def test_the_program_fits_its_registers(compiled) -> None:
    """At the start all warps have max_registers; afterwards the consumers get what the producer gives up."""
    for case in CASES:
        assert compiled[case][0].registers == columns_of(case[0])[2].max_registers
    for width in (64, 80, 96, 128):
        config = hopper_backward_config(width)
        assert 3 * 128 * config.max_registers <= 65536
        assert 2 * config.consumer_registers + config.producer_registers <= 3 * config.max_registers
    for width in (256, *KEYS_96):
        _, _, config = columns_of(width)
        assert 4 * 128 * config.max_registers <= 65536
        kept = 2 * config.consumer_registers + config.dq_registers + config.producer_registers
        assert kept <= 4 * config.max_registers


def passes_around(width: int, dtype: str, varlen: bool) -> list[Job]:
    """What follows the kernel, and what precedes it."""
    call, rows = call_of(width, dtype, varlen)
    launch = launch_backward.postprocess(call, (call.q, call.strides[0]), rows, width)
    return [job(postprocess, launch, call), job(preprocess_kernel, rows.launch, call)]


def test_the_passes_around_two_parts() -> None:
    """A power of two of columns after the other: 16 bytes a load or store, and rows leave through TMA."""
    widths = 80, 192
    found = inspect_sm90.compile_all(x for width in widths for x in passes_around(width, "fp16", False))
    for width, after, before in zip(widths, found[::2], found[1::2], strict=True):
        sixteen_bytes = 64 * width // (4 * 128)  # of a thread
        loads = Counter("LDG.E.128" in text for text in after.listing if "LDG" in text)
        assert loads == {True: sixteen_bytes} and after.opcodes["UTMASTG"] == width // (width & -width)
        stores = Counter("STG.E.128" in text for text in before.listing if "STG" in text)
        assert stores == {True: sixteen_bytes, False: 2}, "and lse2 and delta"
        assert before.spills == after.spills == 0


@pytest.mark.parametrize(
    ("width", "way"), in_turn(WIDTHS, [("fp16", False), ("bf16", False), ("fp16", True)]), ids=str
)
def test_postprocess(width: int, way: tuple[str, bool]) -> None:
    """16 bytes a load, and rows leave through TMA. way: dtype, whether sequences have their own lengths."""
    dtype, varlen = way
    (stats,) = inspect_sm90.compile_all(passes_around(width, dtype, varlen)[:1])
    loads = Counter("LDG.E.128" in text for text in stats.listing if "LDG" in text)
    assert loads == ({True: 8, False: 3} if varlen else {True: 8}), "and offsets of sequences"
    assert stats.opcodes["UTMASTG"] == 1 and not stats.opcodes.get("STG")
    assert stats.spills == 0 and stats.ctas_per_sm * width // 16 >= 48, "warps to hide the latency of memory"


@pytest.mark.parametrize(("width", "varlen"), in_turn(WIDTHS, [False, True]))
def test_sums_of_dq_are_set_to_zero(width: int, varlen: bool) -> None:
    """16 bytes a store, in the pass that computes delta."""
    before = passes_around(width, "fp16", varlen)[1]
    (stats,) = inspect_sm90.compile_all([before])
    stores = Counter("STG.E.128" in text for text in stats.listing if "STG" in text)
    block_m = before.constexprs["BLOCK_M"]
    assert stores[True] == block_m * width // (4 * 128), "four columns of a row for each thread"
    assert stores[False] == 2 and stats.spills == 0, "lse2 and delta"


@pytest.mark.parametrize("added", [True, False], ids=["added", "apart"])
@pytest.mark.parametrize(("width", "keys_of_a_program"), [(64, 64), (192, 32), (256, 64)])
def test_sums_of_shared_key_heads(width: int, keys_of_a_program: int, added: bool) -> None:
    """They are set to zero, and read, by 16 bytes; those that lie apart are added up. Of 96 keys a program
    converts 32."""
    call, rows = call_of(width, "fp16", False)
    call = call._replace(config=replace(call.config, added=added))
    keys = sharing.SharedKeys(call, 2, 6, 256)
    rows = rows.followed_by(keys.elements, zeros=keys.elements if added else 0)
    made = keys.conversions(rows.following.start, *[(call.k, call.strides[1])] * 2)
    jobs = [job(preprocess_kernel, rows.launch, call), *(job(postprocess, one, call) for one in made)]
    before, *after = inspect_sm90.compile_all(jobs)
    stores = Counter("STG.E.128" in text for text in before.listing if "STG" in text)
    block_m = rows.launch.constants["BLOCK_M"]
    assert stores == {True: block_m * width // 512 + 2 * added, False: 2} and before.spills == 0
    for stats in after:
        loads = Counter("LDG.E.128" in text for text in stats.listing if "LDG" in text)
        columns = width & -width
        threads = 32 * max(4, columns // 16)
        of_one = keys_of_a_program * columns // (4 * threads) * (width // columns)
        assert loads == {True: of_one * (1 if added else 2)} and stats.spills == 0


def job(module: ModuleType, launch: Launch, call: Signature) -> Job:
    """A launch of plain Triton as the compiler gets it, with pointers to what PyTorch allocates."""
    name = launch.kernel.rpartition(".")[2]
    params = {param.name: param for param in getattr(module, name).params}
    dtype = {kind: name for name, kind in DTYPES.items()}[call.dtype]
    types = {place: f"tensordesc<{dtype}{list(d.block)}>" for place, d in launch.descriptors.items()}
    for place in launch.pointers:
        aligned = "" if params[place].do_not_specialize_on_alignment else ":16"
        types[place] = ("*i32" if place == "cu_q" else "*fp32") + aligned
    types |= {place: "fp32" if isinstance(x, float) else "i32" for place, x in launch.scalars.items()}
    absent = [place for place, value in launch.scalars.items() if value is None]
    absent += [place for place, part in launch.pointers.items() if part.name == "none"]
    absent += [] if call.varlen else ["cu_q"]
    signature = {place: types[place] for place in params if place in types and place not in absent}
    constants = dict.fromkeys(absent) | launch.constants
    return Job(module.__file__, name, signature, constants, launch.options["num_warps"])

"""Judge and time forms of the Hopper backward pass beside each other and FlashAttention-3 on this GPU.

    python tests/gpu/tune_backward.py steps                      some 200 s on 14 cores
    python tests/gpu/tune_backward.py steps --cells 64-causal-16384 96-dense-4096
    python tests/gpu/tune_backward.py persistent --rounds 5      some 140 s
    python tests/gpu/tune_backward.py grouped --seconds 200      begin no cell after so many
    python tests/gpu/tune_backward.py wide96 --rounds 4          some 90 s
    python tests/gpu/tune_backward.py wide160 --rounds 4         some 90 s
    python tests/gpu/tune_backward.py choices --rounds 4         some 80 s, and as long `narrow`
    python tests/gpu/tune_backward.py last --rounds 4            some 130 s
    python tests/gpu/tune_backward.py varlen96 --rounds 4        some 50 s
    python tests/gpu/tune_backward.py pauses --rounds 4          some 150 s

steps: forms of a step, as `STEP_FORMS` names them, of calls whose heads all have keys of their own.
persistent: one tile a program, or programs that stay on their SM ("stays").
later: programs that stay, whose second consumer begins later.
ordered: up to 128 columns, programs that stay and whose consumers alternate ("alternate"), of grouped heads
with the number of query heads that they visit; without a mask one tile a program with a delay, too. Varlen
sequences have one tile a program.
grouped: of grouped heads. "all", a program visits all query heads of a group, one after the other; "added n",
it visits n of them and adds dK and dV to float32 sums in memory; "apart n", it has sums of its own, added up
behind the kernel; "stays", programs stay on their SM.
wide96: 192 columns, 64 keys a program, and 96 ("96"); of grouped heads with one query head
("added 1") or two a program.
wide160: the same of 160 columns.
choices: beyond 160 columns, what the configuration can say and was not timed: query heads a program, and
how much of L2 the heads that advance together may take ("8 MB").
narrow: the same of up to 128 columns; "half": dS from P as it was rounded.
last: under a diagonal, how much of L2 the heads that advance together may take ("8 MB"), and a last section
that is like the others ("equal") or larger; of 96 keys also how P is masked, of grouped heads how many a
program visits.
pauses: how often a warpgroup that adds dQ from its registers pauses ("4": after every fourth addition); of 96
keys also P masked early, beyond 192 columns how much of L2 the heads that advance together may take, and of
grouped heads query heads a program.
varlen96: varlen sequences of 160 and 192 columns, 64 keys a program and 96; "96" is what calls get that have
96 keys, grouped heads as many a program as those.

A cell is D-kind-length, or D/Dv-kind-length, -float16 behind it or nothing for bfloat16; kinds and sizes are
those of the plane (`bench.plane`); of varlen sequences the average is about that long. FlashAttention-3 takes
part where ATTNLIB_FA3 names its library, but not beside varlen sequences. First, processes side by side
compile. The gradients of each form are judged: of the last key head (of the last sequence) against fp64, all
heads against the first form's. Nothing wrong is timed. Then shuffled rounds with cold L2. Tables on the
screen as they come and again at the end, no record: each form's time, and that of FlashAttention-3 over it,
without FlashAttention-3 that of the first form. "default" is the form that calls get. Status 0 when all were
right, 1 otherwise, 2 without a Hopper GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]

from time_plane import GradientSample  # noqa: E402

from attnlib.bench import peers, plane, timing  # noqa: E402
from attnlib.bench.backward import GRADIENTS, make_gradient  # noqa: E402
from attnlib.bench.oracle import make_inputs  # noqa: E402
from attnlib.bench.plane import ALL as KINDS  # noqa: E402
from attnlib.bench.plane import Cell  # noqa: E402
from attnlib.bench.setting import Setting  # noqa: E402
from attnlib.bench.verdict import Verdict  # noqa: E402
from attnlib.kernels import hopper  # noqa: E402
from attnlib.kernels.hopper import sharing  # noqa: E402
from attnlib.kernels.hopper.configs_backward import (  # noqa: E402
    KEYS_96,
    OWN_VALUES,
    SPLIT,
    BackwardKind,
    HopperBackwardConfig,
    Keys96BackwardConfig,
    hopper_backward_config,
    keys96_config,
)
from attnlib.params import Params, Varlen, mask_window  # noqa: E402

DEVICE, FA3, DEFAULT = "cuda", "fa3", "default"
SHORT = Setting("one short window", rounds=1, pause_ms=8, warmup_ms=2, rep_ms=4)
PROCESSES = 14

Tensor = torch.Tensor
Forms = dict[str, HopperBackwardConfig]

# ---------------------------------------------------------------- forms

STEPS = """
64-causal-16384 96-dense-4096 128-causal-4096 64-causal-4096 64-dense-4096 96-causal-4096 128-dense-4096
128-window-4096 64-causal-4096-float16 64-window-4096 128-causal-16384 64-dense-16384 192-causal-4096
80-causal-4096 64-causal-1024 128-causal-1024 256-causal-4096 96-dense-16384
""".split()
"""The most important ones first."""
PERSISTENT = """
128-window-4096 64-causal-4096 128-causal-4096 64-window-4096 96-dense-4096 96-causal-4096 128-causal-1024
64-causal-4096-float16 128-dense-4096 64-dense-4096 64-causal-1024 128-causal-512 128-window-16384
64-causal-16384 128-causal-16384 80-causal-4096 96-window-4096 96-dense-16384 128-gqa8-4096 64-gqa8-4096
112-causal-4096
""".split()
LATER = """
64-causal-4096 64-dense-4096 128-causal-4096 64-causal-16384 64-dense-16384 128-dense-4096 96-dense-4096
64-causal-4096-float16 64-window-4096 96-causal-4096 64-causal-1024 128-window-4096 64-dense-4096-float16
64-causal-16384-float16 64-dense-1024 128-dense-16384 80-dense-4096 112-dense-4096 128-gqa8-4096
""".split()
WIDE96 = """
192-causal-4096 192-dense-4096 192-gqa8-4096 192-causal-16384 192-gqa8-2048 192-dense-16384 192-causal-2048
192-gqa8-16384 192-dense-2048 192-window-4096 192/128-causal-4096 192-causal-4096-float16 192-gqa4-4096
192/128-dense-16384
""".split()
WIDE160 = """
160-causal-4096 160-dense-4096 160-gqa8-4096 160-gqa4-16384 160-causal-16384 160-dense-16384 160-causal-2048
160-gqa4-4096 160-gqa8-16384 160-window-4096 160-causal-4096-float16 144-causal-4096
""".split()
CHOICES = """
192-causal-4096 256-gqa4-4096 192-causal-2048 224-gqa4-4096 256-gqa8-4096 192-gqa8-1024 192-gqa4-1024
256-gqa4-16384 256-gqa8-16384 192-gqa8-512 192-gqa4-512 192/128-causal-4096 256-causal-4096
256-causal-16384 256-dense-4096
""".split()
NARROW = """
96-gqa8-16384 64-gqa8-16384 64-gqa4-16384 64-causal-16384 96-causal-4096 96-gqa4-16384 112-dense-16384
128-dense-4096 112-gqa8-16384 96-causal-16384 128-gqa8-16384 96-gqa8-4096
""".split()
VARLEN96 = """
192-varlen-1024 192-varlen-4096 192-varlendense-1024 192/128-varlen-1024 192-varlengqa8-1024 192-varlen-256
160-varlen-1024 192/128-varlendense-1024 192-varlengqa4-4096 192/128-varlen-4096 192-varlenwindow-4096
160-varlengqa8-1024 192-varlen-128 160-varlenwindow-4096 160-varlengqa8-4096
""".split()
ORDERED = """
128-causal-4096 128-dense-4096 64-causal-4096 64-dense-4096 96-causal-4096 96-dense-4096 128-window-4096
64-window-4096 128-gqa8-4096 64-gqa8-4096 96-gqa8-4096 64-causal-16384 128-causal-16384 64-causal-1024
128-varlen-1024 64-varlen-1024 128-varlendense-1024 128-varlen-4096 64-varlen-4096 64-varlendense-1024
128-varlenwindow-4096 64-varlenwindow-4096 128-varlengqa8-1024 64-varlengqa8-1024 96-varlen-1024
96-varlendense-4096 80-varlen-1024 128-gqa4-16384 128-dense-8192 128-gqa2-4096 64-gqa2-4096 96-gqa2-4096
128-gqa2-16384 64-dense-1024-float16 64-dense-16384-float16 64-gqa8-512 64-gqa4-512 96-gqa8-512 96-gqa4-512
128-gqa4-512 64-gqa8window-4096 96-gqa8window-4096 128-gqa8window-4096 64-gqa8dense-4096 96-gqa8dense-4096
128-gqa8dense-4096 80-gqa4-4096 128-gqa16-4096 64-gqa16-4096 80-window-4096 128-dense-2048 72-dense-4096
112-dense-4096 112-dense-16384 96-varlengqa8-4096 128-varlen-256 64-varlen-512
""".split()
LAST = """
192-causal-1024 192-causal-4096 192-causal-2048 192-causal-512 192-causal-16384 256-causal-1024
160-causal-1024 256-gqa8-4096 256-gqa4-16384 192-gqa8-1024 128-causal-512 96-causal-1024 128-causal-2048
64-causal-1024 256-gqa8-16384 96-causal-4096 192/128-causal-4096 256-causal-4096 96-gqa8-1024
""".split()
PAUSES = """
192-dense-4096 192/128-causal-4096 160-causal-4096 192-gqa8-4096 192-window-4096 192-varlen-1024
128-causal-1024
128-window-4096 128-gqa4-16384 256-gqa4-512 192/128-dense-4096 160-dense-4096 192-varlendense-1024
192/128-varlen-1024 160-varlen-1024 192-varlengqa8-1024 192-varlenwindow-4096 192-causal-1024 128-causal-16384
128-varlen-1024 128-varlengqa8-1024 96-gqa8-4096 80-gqa8-4096 80-causal-4096 128-causal-4096-float16
256-varlen-1024 256-gqa4-1024 256-gqa8-512 256-gqa4-2048 160-gqa8-4096 112-causal-4096 96-varlen-1024
""".split()
GROUPED = [
    f"{head_dim}-{kind}-{length}"
    for length in (4096, 1024, 16384, 2048, 512)
    for kind in ("gqa8", "gqa4") for head_dim in (128, 64, 96, 256, 192)
]  # fmt: skip


def step_forms(cell: Cell) -> Forms:
    """Of one call: dQ from registers or in bulk, P masked late or early, and a later second consumer."""
    masked = KINDS[cell.kind].causal
    config = hopper_backward_config(cell.shape.head_dim, kind=BackwardKind(masked))
    delay = "masked_stagger" if masked else "stagger"
    changes: dict[str, dict[str, object]] = {DEFAULT: {}}
    early = {"early_mask": True} if masked else {}
    if masked:
        changes["early"] = early
    if config.block_n == 128:
        changes["bulk"] = {"bulk": True}
        if masked:
            changes["bulk early"] = {"bulk": True, **early}
        for clocks in (0, 600, 1200, 2000):
            for bulk in (False, True):
                name = f"{'bulk ' * bulk}{'early ' * masked}{clocks}"
                changes[name] = {"bulk": bulk, **early, delay: clocks}
    found: Forms = {}
    for name, change in changes.items():
        form = replace(config, **change)
        if form not in found.values():
            found[name] = form
    return found


def persistent_forms(cell: Cell) -> Forms:
    """Of one call: programs of one tile, as they are and as they are best; programs that stay on their SM,
    with dQ from registers or in bulk, and with P masked late or early."""
    config, masked = hopper_backward_config(cell.shape.head_dim), KINDS[cell.kind].causal
    found = {DEFAULT: config}
    for bulk in (False, True):
        for early in (False, True)[: 1 + masked]:
            for persistent in (False, True):
                if persistent and bulk and cell.shape.head_dim > 96:  # no room in shared memory
                    continue
                name = f"{'stays ' * persistent}{'bulk ' * bulk}{'early ' * early}".strip()
                change = {"persistent": persistent, "bulk": bulk, "early_mask": early}
                found.setdefault(name or DEFAULT, replace(config, **change))
    return found


def later_forms(cell: Cell) -> Forms:
    """Of one call: programs that stay on their SM, with dQ from registers or in bulk where there is room, P
    masked early at D = 64, and a later second consumer."""
    config, masked = hopper_backward_config(cell.shape.head_dim), KINDS[cell.kind].causal
    delay, found = "masked_stagger" if masked else "stagger", {DEFAULT: config}
    early = [False, True] if masked and cell.shape.head_dim == 64 else [False]
    for bulk, masked_early in product((False, True)[: 1 + (cell.shape.head_dim <= 96)], early):
        for clocks in (0, 600, 1200, 2000):
            name = f"stays {'bulk ' * bulk}{'early ' * masked_early}{clocks}"
            change = {"persistent": True, "bulk": bulk, "early_mask": masked_early, delay: clocks}
            found[name] = replace(config, **change)
    return found


def ordered_forms(cell: Cell) -> Forms:
    """Of one call: what calls get, one tile a program with a later second consumer, and programs that stay on
    their SM with consumers that alternate, each form of them that fits."""
    head_dim, (_, masked, group, _, varlen) = cell.shape.head_dim, KINDS[cell.kind]
    kind = BackwardKind(masked)
    one, stays = (hopper_backward_config(head_dim, stays=s, kind=kind) for s in (False, True))
    found = {DEFAULT: default_of(cell), "stays": stays}
    if not masked:
        found |= {f"one tile, delay {clocks}": replace(one, stagger=clocks) for clocks in (600, 1200)}
    for bulk in (False, True)[: 1 + (head_dim <= 96)]:
        for early in (False, True)[: 1 + masked]:
            for half in (False, True):
                change = {"bulk": bulk, "early_mask": early, "half_p": half}
                for visited in sorted({1, max(1, group // 4), group}) if group > 1 and not varlen else [None]:
                    form = replace(stays, alternate=True, visited=visited, **change)
                    name = f"alternate{' bulk' * bulk}{' early' * early}{' half' * half}"
                    found[name + f" {visited}" * (visited is not None)] = form
    return found


def grouped_forms(cell: Cell) -> Forms:
    """Of one call: programs of one tile, and up to 128 columns such that stay on their SM, as calls have them
    with heads of their own."""
    head_dim, group, masked = cell.shape.head_dim, KINDS[cell.kind].group, KINDS[cell.kind].causal
    config = hopper_backward_config(head_dim, kind=BackwardKind(masked))
    stays = hopper_backward_config(head_dim, stays=True, kind=BackwardKind(masked))
    found = {"all": replace(config, visited=group), DEFAULT: config}
    found |= {f"added {n}": replace(config, visited=n) for n in sharing.divisors(group)[:-1]}
    if not stays.persistent:
        return found | {"apart 1": replace(config, visited=1, added=False)}
    return found | {f"stays, added {n}": replace(stays, visited=n) for n in sharing.divisors(group)[:-1]}


def wide96_forms(cell: Cell) -> Forms:
    """Of one call of 192 columns: 64 and 96 keys a program."""
    config, group, keys96 = SPLIT[192], KINDS[cell.kind].group, KEYS_96
    if cell.shape.head_dim_v is not None:
        config = OWN_VALUES
        keys96 = replace(keys96, value_columns=128)
    found = {"64": config, "96": keys96}
    if group > 1:
        found |= {"96 all": replace(KEYS_96, visited=group)}
        for n in (1, 2):
            found |= {f"added {n}": replace(config, visited=n), f"96 added {n}": replace(KEYS_96, visited=n)}
        return {name: form for name, form in found.items() if name != "96"}
    if KINDS[cell.kind].causal:
        found["96 early"] = replace(keys96, early_mask=True)
    return found


def default_of(cell: Cell) -> HopperBackwardConfig:
    """What calls get."""
    shape, dtype = cell.shape, getattr(torch, cell.shape.dtype)
    q = torch.empty(shape.batch, shape.heads, shape.seqlen, shape.head_dim, dtype=dtype, device="meta")
    k, v = (
        q.new_empty(shape.batch, shape.kv_heads, shape.seqlen, n) for n in (shape.head_dim, shape.value_dim)
    )
    params = Params(mask_window(shape.causal, KINDS[cell.kind].window), 1.0)
    return hopper.configuration(q, k, v, params, backward=True)


def wide160_forms(cell: Cell) -> Forms:
    """Of one call of up to 160 columns: 64 keys a program and 96."""
    kind, keys96 = KINDS[cell.kind], default_of(cell)
    found: Forms = {"64": SPLIT[160], DEFAULT: keys96}
    if kind.group > 1:
        found |= {f"added {n}": replace(keys96, visited=n) for n in (1, 2)}
        return found | {"all": replace(keys96, visited=kind.group)}
    if kind.causal:
        found["early"] = replace(keys96, early_mask=True)
        others = [megabytes for megabytes in (16, 64) if megabytes << 20 != keys96.l2_bytes]
        found |= {f"{megabytes} MB": replace(keys96, l2_bytes=megabytes << 20) for megabytes in others}
    return found


def choice_forms(cell: Cell) -> Forms:
    """Of one call beyond 160 columns: query heads a program, heads that advance together, and 64 keys."""
    config, group = default_of(cell), KINDS[cell.kind].group
    found = {DEFAULT: config}
    if isinstance(config, Keys96BackwardConfig) and group > 1:
        keys64 = SPLIT[192]
        for n, name in ((1, "added 1"), (2, "added 2"), (group, "all")):
            found |= {name: replace(config, visited=n), f"64, {name}": replace(keys64, visited=n)}
        return found
    if group == 1:
        first, prefix = config, ""
    else:
        found |= {f"added {n}": replace(config, visited=n) for n in (1, 2, 4) if n < group}
        found |= {"all": replace(config, visited=group)}
        for megabytes in (16, 64):
            found[f"added 2, {megabytes} MB"] = replace(config, visited=2, l2_bytes=megabytes << 20)
        first, prefix = replace(config, visited=1), "added 1, "
    for megabytes in (8, 16, 32, 64, 128):
        if megabytes << 20 == first.l2_bytes:
            continue
        found[f"{prefix}{megabytes} MB"] = replace(first, l2_bytes=megabytes << 20)
    if KINDS[cell.kind].causal:
        found[f"{prefix}early"] = replace(first, early_mask=True)
    return found


def narrow_forms(cell: Cell) -> Forms:
    """Of one call of up to 128 columns: heads that advance together, P as it was rounded, dQ in bulk where
    there is room, P masked early; of grouped heads how many a program that stays visits."""
    kind, head_dim = KINDS[cell.kind], cell.shape.head_dim
    config = default_of(cell)
    stays = config
    if not config.persistent:
        stays = hopper_backward_config(head_dim, stays=True, kind=BackwardKind(kind.causal))
    found = {DEFAULT: config}
    if kind.group > 1:
        found |= {f"stays, added {n}": replace(stays, visited=n) for n in (1, 2, 4) if n < kind.group}
        if not config.persistent:
            stays = replace(stays, visited=1)
    for megabytes in (8, 32, 64):
        found[f"{megabytes} MB"] = replace(stays, l2_bytes=megabytes << 20)
    found["whole P" if stays.half_p else "half"] = replace(stays, half_p=not stays.half_p)
    if head_dim <= 96:
        found["no bulk" if stays.bulk else "bulk"] = replace(stays, bulk=not stays.bulk)
    if kind.causal:
        found["late" if stays.early_mask else "early"] = replace(stays, early_mask=not stays.early_mask)
    return found


def last_forms(cell: Cell) -> Forms:
    """Of one causal call: sections of heads, the last one as large as the others or larger."""
    config, group = default_of(cell), KINDS[cell.kind].group
    found = {DEFAULT: config}
    beyond = cell.shape.head_dim > 128
    for visited in (1, 2) if group > 1 and beyond else (config.visited,):
        for megabytes in (8, 16, 40) if beyond else (16, 32):
            for waves in (0.0, 1.5, 2.5):
                name = f"{megabytes} MB" + {0.0: ", equal", 1.5: ", 1.5 waves", 2.5: ""}[waves]
                name += f", added {visited}" * (visited is not None)
                found[name] = replace(config, visited=visited, l2_bytes=megabytes << 20, last_waves=waves)
    if isinstance(config, Keys96BackwardConfig) and group == 1:
        found["late" if config.early_mask else "early"] = replace(config, early_mask=not config.early_mask)
    return found


def pause_forms(cell: Cell) -> Forms:
    """Of one call: how often a warpgroup that adds dQ pauses; of 96 keys with P masked early and late, beyond
    192 columns with sections of heads, of grouped heads with query heads a program."""
    config, kind = default_of(cell), KINDS[cell.kind]
    found = {DEFAULT: config}
    if isinstance(config, Keys96BackwardConfig):
        for early, every in product((False, True)[: 1 + kind.causal], (0, 1, 2, 4)):
            found[f"{'early ' * early}{every}"] = replace(config, early_mask=early, pause_every=every)
        return found
    if config.block_n == 128:
        return found | {str(every): replace(config, pause_every=every) for every in (0, 2, 4, 8)}
    found |= {str(every): replace(config, pause_every=every) for every in (0, 1, 2)}
    visits = sharing.divisors(kind.group) if kind.group > 1 and not kind.varlen else [config.visited]
    for visited, megabytes in product(visits, (8, 16, 40) if not kind.varlen else ()):
        name = f"1, {megabytes} MB" + f", visits {visited}" * (visited is not None)
        found[name] = replace(config, pause_every=1, visited=visited, l2_bytes=megabytes << 20)
    return found


def varlen96_forms(cell: Cell) -> Forms:
    """Of one call of varlen sequences: 64 keys a program and 96."""
    columns, group = (160 if cell.shape.head_dim <= 160 else 192), KINDS[cell.kind].group
    config, keys96 = SPLIT[columns], keys96_config(BackwardKind(varlen=True), columns)
    if cell.shape.head_dim_v is not None:
        config, keys96 = OWN_VALUES, keys96_config(BackwardKind(varlen=True), value_columns=128)
    found = {"64": config, "96": keys96}
    if KINDS[cell.kind].window is not None:
        found["96 early"] = replace(keys96, early_mask=True)
    if group > 1:
        found["96 all"] = replace(keys96, visited=group)
    for n in (1, 2) if group > 1 else ():
        found |= {f"64 added {n}": replace(config, visited=n), f"96 added {n}": replace(keys96, visited=n)}
    return found


SETS = {
    "steps": (step_forms, STEPS),
    "persistent": (persistent_forms, PERSISTENT),
    "later": (later_forms, LATER),
    "ordered": (ordered_forms, ORDERED),
    "grouped": (grouped_forms, GROUPED),
    "wide96": (wide96_forms, WIDE96),
    "wide160": (wide160_forms, WIDE160),
    "choices": (choice_forms, CHOICES),
    "narrow": (narrow_forms, NARROW),
    "last": (last_forms, LAST),
    "varlen96": (varlen96_forms, VARLEN96),
    "pauses": (pause_forms, PAUSES),
}


def cell_of(name: str) -> Cell:
    columns, kind, length, *dtype = name.split("-")
    head_dim, *values = map(int, columns.split("/"))
    cell = plane.cell(kind, head_dim, int(length), *dtype)
    return cell._replace(shape=replace(cell.shape, head_dim_v=values[0])) if values else cell


# ---------------------------------------------------------------- calls


def inputs(cell: Cell) -> tuple[Tensor, ...]:
    """d_out, q, k, v; of varlen sequences (1, H, T, D), one after the other."""
    if KINDS[cell.kind].varlen:
        cell = cell._replace(shape=replace(cell.shape, batch=1, seqlen=sum(cell.lengths)))
    return make_gradient(cell.shape, device=DEVICE), *make_inputs(cell.shape, device=DEVICE)


def calls_of(cell: Cell, forms: Forms, *tensors: Tensor) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    d_out, q, k, v = tensors
    window, varlen = mask_window(cell.shape.causal, KINDS[cell.kind].window), None
    if KINDS[cell.kind].varlen:
        d_out, q, k, v = (x[0].transpose(0, 1).contiguous() for x in tensors)
        ends = torch.tensor([0, *cell.lengths], device=q.device).cumsum(0).int()
        varlen = Varlen(ends, ends, max(cell.lengths), max(cell.lengths))
    params = Params(window, cell.shape.head_dim**-0.5, varlen, return_lse=True)
    forward = params._replace(config=hopper.configuration(q, k, v, params))
    out, lse = hopper.forward(q, k, v, forward)

    def one(config: HopperBackwardConfig) -> Callable[[], tuple[Tensor, ...]]:
        asked = params._replace(config=config)
        if varlen is None:
            return lambda: hopper.backward(d_out, q, k, v, out, lse, asked)
        made = d_out, q, k, v, out, lse, asked
        return lambda: tuple(x.transpose(0, 1)[None] for x in hopper.backward(*made))

    return {name: one(config) for name, config in forms.items()}


def add_peer(calls: dict[str, Callable], cell: Cell, *tensors: Tensor) -> None:
    """FlashAttention-3 beside them, where it is there; not beside varlen sequences."""
    kind = KINDS[cell.kind]
    peer = peers.fa3(kind.window)
    if not kind.varlen and not peer.available():
        calls[FA3] = peer.make_backward(*tensors, cell.shape.causal, cell.shape.head_dim**-0.5)


def compile_one(name: str, form: HopperBackwardConfig) -> str:
    """In a child: what it compiles stays in Triton's cache."""
    cell = cell_of(name)
    length = min(cell.shape.seqlen, 1152)  # beyond a window of the plane
    small = cell._replace(shape=replace(cell.shape, batch=1, seqlen=length))  # varlen of one sequence
    try:
        calls_of(small, {name: form}, *inputs(small))[name]()
        torch.cuda.synchronize()
    except Exception as error:  # it comes again where it is timed
        return f"{name} {form}: {peers.brief(error)}"
    return ""


def kernels_of(
    names: Sequence[str], forms_of: Callable[[Cell], Forms]
) -> list[tuple[str, HopperBackwardConfig]]:
    """Each kernel that has to be compiled: the name of a cell, and a form."""
    found = {}
    for name in names:
        cell = cell_of(name)
        for form in forms_of(cell).values():
            kind, shape = KINDS[cell.kind], cell.shape
            shared = form.visited is None and kind.group > 1, form.visited in (None, kind.group)
            made = replace(
                form, visited=None, l2_bytes=0, last_waves=0.0
            )  # what else decides is known when it is launched
            key = shape.head_dim, shape.head_dim_v, shape.dtype, kind._replace(label=""), shared, made
            found.setdefault(key, (name, form))
    return list(found.values())


def compile_all(names: Sequence[str], forms_of: Callable[[Cell], Forms]) -> list[str]:
    """In processes side by side; what failed."""
    jobs = kernels_of(names, forms_of)
    children = min(PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(children, multiprocessing.get_context("spawn")) as pool:
        return [reason for reason in pool.map(compile_one, *zip(*jobs, strict=True)) if reason]


# ---------------------------------------------------------------- judging and timing


class SequenceSample:
    """`GradientSample` of the last varlen sequence."""

    def __init__(self, cell: Cell, *tensors: Tensor) -> None:
        self.rows = cell.lengths[-1]
        self.sample = GradientSample(KINDS[cell.kind], None, *(x[:, :, -self.rows :] for x in tensors))

    def judge(self, *gradients: Tensor) -> dict[str, Verdict]:
        return self.sample.judge(*(x[:, :, -self.rows :] for x in gradients))


Sample = GradientSample | SequenceSample


def wrong(sample: Sample, first: tuple[Tensor, ...], gradients: tuple[Tensor, ...]) -> str:
    """Why gradients are wrong; empty when they are right."""
    found = sample.judge(*gradients)
    for name, mine, other in zip(GRADIENTS, gradients, first, strict=True):
        if not found[name].ok:
            return f"{name}: {found[name].reason}"
        away = (mine.float() - other.float()).square_().mean((2, 3)).sqrt_().max().item()
        if not away <= 2 * found[name].budget.rms:
            return f"{name}: a head is {away:.2e} from the first form's, budget {found[name].budget.rms:.2e}"
    return ""


def judge(name: str, calls: dict[str, Callable], sample: Sample, first: tuple[Tensor, ...]) -> list[str]:
    """What is wrong; the calls that are go."""
    bad = []
    for form in list(calls):
        try:
            reason = wrong(sample, first, calls[form]())
        except RuntimeError as error:
            reason = peers.brief(error)
        if reason:
            bad.append(f"WRONG {name} {form}: {reason}")
            del calls[form]
    return bad


def times(calls: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each in shuffled rounds."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        order = list(calls)
        random.Random(i).shuffle(order)
        for name in order:
            samples[name].append(timing.time_ms(calls[name], setting=SHORT).median)
    return samples


def row_of(cell: Cell, form: str, ms: list[float]) -> dict[str, Any]:
    """Of a record."""
    taken = statistics.median(ms)
    return {
        "kind": cell.kind, "form": form, **cell.shape.to_dict(), "ms": taken, "round_ms": ms,
        "tflops": cell.flops("backward") / taken * 1e-9,
    }  # fmt: skip


def rows(cell: Cell, forms: Forms, rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of a record for one call, all forms beside FlashAttention-3, and what is wrong."""
    tensors = inputs(cell)
    calls = calls_of(cell, forms, *tensors)
    first = calls[next(iter(forms))]()
    sample = GradientSample(KINDS[cell.kind], None, *tensors)
    bad = judge(cell.label, calls, sample, first)
    own = dict(calls)
    add_peer(calls, cell, *tensors)
    found = times(calls, rounds)
    bad += judge(cell.label, own, sample, first)
    return [row_of(cell, form, ms) for form, ms in found.items()], bad


def report(name: str, forms: Forms, rounds: int) -> tuple[str, list[str]]:
    """The lines of a cell, and what is wrong."""
    cell, bad = cell_of(name), []
    tensors = inputs(cell)
    calls = calls_of(cell, forms, *tensors)
    first_form = next(iter(forms))
    first = calls[first_form]()
    kind = KINDS[cell.kind]
    sample = SequenceSample(cell, *tensors) if kind.varlen else GradientSample(kind, None, *tensors)
    bad += judge(name, calls, sample, first)
    add_peer(calls, cell, *tensors)
    found = times(calls, rounds)
    calls.pop(FA3, None)
    bad += judge(name, calls, sample, first)  # after hundreds of launches
    D, values = cell.shape.head_dim, cell.shape.value_dim
    flops = cell.flops("backward") * (3 * D + 2 * values) / (5 * D)
    base = found.get(FA3) or found.get(first_form) or next(iter(found.values()))
    cells = []
    for form, taken in found.items():
        ratios = sorted(a / b for a, b in zip(base, taken, strict=True))
        ms = statistics.median(taken)
        cells.append(f"  {form:18} {ms:7.3f} ms {flops / ms * 1e-9:4.0f} TFLOP/s  "
                     f"{statistics.median(ratios):.3f} ({ratios[0]:.3f}-{ratios[-1]:.3f})")  # fmt: skip
    if kind.group > 1 and not kind.varlen:
        cells.append(f"  model: {visited_by_model(cell)}")
    best = min((form for form in found if form != FA3), key=lambda form: statistics.median(found[form]))
    return "\n".join([f"{name}: best {best}", *cells]), bad


def visited_by_model(cell: Cell) -> str:
    """Time of one program for a group over that of programs that visit fewer query heads, predicted."""
    shape, config = cell.shape, default_of(cell)
    widths = config.width(shape.head_dim), config.value_width(shape.head_dim)
    heads, group = shape.batch * shape.kv_heads, KINDS[cell.kind].group
    call = sharing.Launched(config, heads, group, shape.seqlen, shape.keys, *widths, shape.causal)
    ratios = (f"{n} {call.clocks(group) / call.clocks(n):.2f}" for n in sharing.divisors(group))
    return f"{', '.join(ratios)}; chosen {sharing.chosen(call)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time forms of the backward pass beside each other.")
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--cells", nargs="+", metavar="D-KIND-LENGTH", help="(default: the set's)")
    parser.add_argument("--forms", nargs="+", help="names of forms, the first one always (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=400, help="begin no cell after so many")
    args, begin = parser.parse_args(argv), time.monotonic()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x", file=sys.stderr)
        return 2
    all_forms, default_cells = SETS[args.set]
    names = args.cells or default_cells

    def forms_of(cell: Cell) -> Forms:
        forms = all_forms(cell)
        first = next(iter(forms))
        return {name: form for name, form in forms.items() if not args.forms or name in (first, *args.forms)}

    failed = compile_all(names, forms_of)
    print(f"compiled after {time.monotonic() - begin:.0f} s", *failed, sep="\n", flush=True)
    tables, bad, left_out = [], [], []
    for name in names:
        if time.monotonic() - begin > args.seconds:
            left_out.append(name)
            continue
        try:
            table, wrongs = report(name, forms_of(cell_of(name)), args.rounds)
        except RuntimeError as error:  # no memory for the oracle, say
            left_out.append(f"{name}: {peers.brief(error)}")
            continue
        tables.append(table)
        bad += wrongs
        print(table, *wrongs, sep="\n", flush=True)
        torch.cuda.empty_cache()
    seconds = f"{time.monotonic() - begin:.0f} s"
    print(f"\n{seconds}. Behind the times FlashAttention-3's over a form's:", *tables, sep="\n")
    if left_out:
        print(f"left out, as {args.seconds:g} s were over where no reason is told:", *left_out, sep="\n  ")
    print(*bad, sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())

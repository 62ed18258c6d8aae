"""Bugs planted in the real Hopper kernels: the emulator notices each of them, and says what is wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import first_of_each
from emulated import Call, check_backward, check_forward, mutate
from mutations import Mutation, check_places

from attnlib.emulator import Deadlock, Race
from attnlib.kernels.common import backward_pair, backward_ring, kept_shift, tile_scheduler, turns, words
from attnlib.kernels.common import ring as ring_module
from attnlib.kernels.hopper import (
    backward_bulk,
    backward_gradients,
    backward_kernel,
    backward_keys96_kernel,
    backward_persistent,
    backward_shared,
    backward_tiles,
    backward_turns,
    backward_wide_kernel,
    column_parts,
    forward_kernel,
)
from attnlib.kernels.hopper.configs import HopperConfig, SplitConfig
from attnlib.kernels.hopper.configs_backward import (
    KEYS_96,
    backward_config,
    hopper_backward_config,
)

pytestmark = INTERPRETER_REMARKS

JOINT = HopperConfig(64, 4, 4, 64, joint=True)
APART = HopperConfig(64, 2, 2, 64)
NAMED = HopperConfig(64, 2, 2, 64, joint=True, named=True)
SPLIT = SplitConfig(64, 2, 2, 64, named=True, columns=(64, 16))
FORWARD = {
    # Several tiles for each program; at the diagonal its warpgroups visit different numbers of blocks.
    "joint": Call(64, 3, 1, 300, 400, config=JOINT),
    "apart": Call(64, 3, 1, 300, 400, config=APART),
    "named": Call(64, 3, 1, 300, 400, config=NAMED),
    "halves": Call(128, 3, 1, 150, 150, config=HopperConfig(64, 2, 2, 64)),
    "short": Call(64, 8, 1, 60, 60, config=JOINT),
    # One warpgroup skips a block, and the tile ends in its slot.
    "skipped": Call(64, 3, 1, 128, 192, config=APART),
    "one tile": Call(64, 1, 1, 100, 300, config=APART),
    "Q in registers": Call(64, 3, 1, 150, 150, config=HopperConfig(64, 2, 2, 64, q_columns=32)),
    "varlen": Call(64, 2, 1, varlen=((40, 70), (150, 90), (10, 200)), config=JOINT),
    "two parts": Call(72, 3, 1, 150, 230, config=SPLIT),
    "two parts, large scores": Call(72, 1, 1, 70, 230, sm_scale=1.0, config=SPLIT),
    "kept": Call(64, 1, 1, 128, 320, False, sm_scale=2.0, config=replace(APART, keep_shift=True)),
    "kept, half way": Call(
        64, 1, 1, 128, 320, False, sm_scale=2.0, config=replace(APART, keep_shift=True, late_wait=True)
    ),
    "varlen, a program without rows": Call(64, 1, 1, varlen=((64, 70), (0, 70)), config=JOINT),
}
ONE_TILE = {D: hopper_backward_config(D) for D in (64, 72, 96, 128)}
ONE_TILE_64_128 = backward_config(64, 128)
PERSISTENT = {D: replace(hopper_backward_config(D), persistent=True, visited=1) for D in (64, 96, 128)}
# Five blocks of queries, or four heads of one each; of persistent programs three tiles each.
BACKWARD = {
    "64": Call(64, 4, 1, 70, 128, config=replace(hopper_backward_config(64), visited=4)),
    "128": Call(128, 1, 1, 320, 100, causal=False, config=ONE_TILE[128]),
    "256": Call(256, 1, 1, 320, 60, causal=False),
    "unseen": Call(64, 1, 1, 60, 300, window=(30, -1), config=ONE_TILE[64]),
    "64/128": Call(64, 1, 1, 150, 128, causal=False, D_v=128, config=ONE_TILE_64_128),
    "unseen, 64/128": Call(64, 1, 1, 60, 300, window=(30, -1), D_v=128, config=ONE_TILE_64_128),
    "unseen, 64/128, apart": Call(
        64, 2, 1, 60, 300, window=(30, -1), D_v=128, config=replace(ONE_TILE_64_128, visited=1, added=False)
    ),
    "in order": Call(128, 2, 1, 300, 400, deterministic=True, config=hopper_backward_config(128, True)),
    "in order, stays": Call(128, 2, 1, 300, 400, deterministic=True),
    "in order, two steps": Call(128, 1, 1, 128, 700, causal=False, deterministic=True),
    "bulk, in order": Call(64, 2, 1, 300, 400, deterministic=True),
    "256, in order": Call(256, 1, 1, 150, 200, causal=False, deterministic=True),
    "96 keys, in order": Call(192, 1, 1, 150, 300, causal=False, deterministic=True),
    "window, in order": Call(64, 1, 1, 400, 500, window=(200, -1), deterministic=True),
    "no right bound, in order": Call(64, 1, 1, 400, 500, False, window=(130, -1), deterministic=True),
    "alternate": Call(
        128, 1, 1, 320, 100, causal=False, config=replace(hopper_backward_config(128), alternate=True)
    ),
    "bulk": Call(
        128, 1, 1, 320, 100, causal=False, config=replace(hopper_backward_config(128), bulk=True)
    ),
    "bulk, 64": Call(64, 1, 1, 300, 100, config=replace(hopper_backward_config(64), bulk=True)),
    "early mask": Call(128, 1, 1, 70, 100, config=replace(hopper_backward_config(128), early_mask=True)),
    "persistent": Call(128, 1, 1, 150, 700, causal=False, config=PERSISTENT[128]),
    "alternate, persistent": Call(
        128, 1, 1, 150, 700, causal=False, config=replace(PERSISTENT[128], alternate=True)
    ),
    "persistent, two steps a tile": Call(64, 1, 1, 200, 200, B=3, config=PERSISTENT[64]),
    "persistent, two steps": Call(128, 1, 1, 100, 100, causal=False, config=PERSISTENT[128]),
    "persistent, two parts": Call(96, 1, 1, 150, 700, causal=False, config=PERSISTENT[96]),
    "persistent, bulk": Call(64, 3, 3, 200, 200, config=replace(PERSISTENT[64], bulk=True)),
    "persistent, bulk, three steps": Call(
        64, 2, 2, 300, 300, config=replace(PERSISTENT[64], bulk=True)
    ),
    "persistent, shared": Call(64, 2, 1, 150, 300, config=PERSISTENT[64]),
    "persistent, varlen": Call(128, 2, 2, varlen=((40, 170), (150, 290)), config=PERSISTENT[128]),
    "persistent, varlen, bulk": Call(
        64, 2, 2, varlen=((150, 170), (40, 290)), config=replace(PERSISTENT[64], bulk=True)
    ),
    "persistent, varlen, dense": Call(
        64, 2, 1, causal=False, varlen=((40, 170), (100, 290)), config=PERSISTENT[64]
    ),
    "rotated": Call(
        128, 1, 1, 320, 400, causal=False, B=2, config=replace(PERSISTENT[128], alternate=True, rotated=True)
    ),
    "rotated, one tile": Call(
        128, 1, 1, 320, 400, causal=False, B=2, config=replace(hopper_backward_config(128), rotated=True)
    ),
    "rotated, bulk": Call(
        64, 1, 1, 320, 400, causal=False, B=2, config=replace(PERSISTENT[64], bulk=True, rotated=True)
    ),
    "tail apart": Call(
        96, 1, 1, 130, 1, False, sm_scale=4.0,
        config=replace(PERSISTENT[96], alternate=True, tail_apart=True),
    ),
    "64 + 16": Call(72, 1, 1, 70, 70, config=ONE_TILE[72]),
    "64 + 32": Call(96, 1, 1, 70, 70, config=ONE_TILE[96]),
    "shared": Call(96, 4, 2, 70, 200, config=replace(hopper_backward_config(96), visited=1)),
    "256, shared": Call(256, 4, 2, 70, 70, config=replace(hopper_backward_config(256), visited=1)),
    "96 keys": Call(192, 1, 1, 320, 60, causal=False, config=KEYS_96),
    "96 keys, tail": Call(192, 1, 1, 70, 1, False, sm_scale=4.0, config=KEYS_96),
    "96 keys, causal": Call(192, 1, 1, 150, 200, config=KEYS_96),
    "96 keys, shared": Call(192, 4, 2, 70, 70, config=replace(KEYS_96, visited=1)),
    "160 columns, shared": Call(
        160, 2, 1, 70, 70, config=replace(KEYS_96, visited=1, query_columns=160, value_columns=160)
    ),
    "96 keys, apart": Call(192, 2, 1, 70, 200, config=replace(KEYS_96, visited=1, added=False)),
    "unseen, apart": Call(
        64, 2, 1, 60, 300, window=(30, -1), config=replace(hopper_backward_config(64), visited=1, added=False)
    ),
}  # fmt: skip
RUNS = [("eager", 0), ("late", 0), *(("random", seed) for seed in range(30))]


def forward(bug: str, call: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str]) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, forward_kernel)


def parts(bug: str, call: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str]) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, column_parts)


def telling(bug: str, call: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str]) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, words)


def kept(bug: str, edit: tuple[str, str], call: str = "kept") -> Mutation:
    return Mutation(bug, *edit, call, "AssertionError", module=kept_shift)


def drawing(bug: str, call: str, verdict: str, edit: tuple[str, str]) -> Mutation:
    return Mutation(bug, *edit, call, verdict, module=tile_scheduler)


def ring(bug: str, call: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str]) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, ring_module)


def turn(bug: str, verdict: str, edit: tuple[str, str], call: str = "in order") -> Mutation:
    return Mutation(bug, *edit, call, verdict, module=turns)


def tiles(bug: str, verdict: str, edit: tuple[str, str], call: str = "in order") -> Mutation:
    return Mutation(bug, *edit, call, verdict, module=backward_tiles)


def backward(
    bug: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str], call: str = "128"
) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, backward_kernel)


def leaving(
    bug: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str], call: str = "128"
) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, backward_gradients)


def shared(
    bug: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str], call: str = "128"
) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, backward_shared)


def keeping(bug: str, verdict: str, *edits: tuple[str, str], call: str) -> Mutation:
    return Mutation(bug, *edits[0], call, verdict, edits[1:], backward_turns)


def bulk(
    bug: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str], call: str = "bulk"
) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, backward_bulk)


def tile(bug: str, verdict: str, *edits: tuple[str, str], call: str = "persistent") -> Mutation:
    return Mutation(bug, *edits[0], call, verdict, edits[1:], backward_persistent)


def slots(
    bug: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str], call: str = "128"
) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, backward_ring)


def pair(
    bug: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str], call: str = "128"
) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, backward_pair)


def wide(
    bug: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str], call: str = "256"
) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, backward_wide_kernel)


def keys96(
    bug: str, verdict: str, edit: tuple[str, str], *more: tuple[str, str], call: str = "96 keys"
) -> Mutation:
    return Mutation(bug, *edit, call, verdict, more, backward_keys96_kernel)


def without(line: str, before: str = "", after: str = "") -> tuple[str, str]:
    return before + line + after, before + after


LANDING = r"Race: .* touches \S+: a copy writes it, which was not waited for"
STORED = r"Race: .* touches \S+: .* has stored to it, which was not waited for"
OVERWRITTEN = r"Race: .* overwrites \S+: .* has not said that it read"
LAST_PART = "            if part == parts - 1:\n"
READING = r"Race: .* overwrites \S+ while a product or copy out reads it"
TAKEN = f"{LANDING}|{OVERWRITTEN}|{READING}"  # memory is used before it is there, or after it was given back
COUNT = r"Race: \w+\[\d\]: \d arrivals in a phase of \d"
TWICE = r"Race: .* comes to barrier \d+ twice before the others have come"
DEADLOCK = r"Deadlock: .* waits for "
WAITS = r"Deadlock: .* waits for word \d+ of global memory, which is \d+"
BITS = "AssertionError: other bits than in another order"
PHASES = f"{BITS}|Deadlock: .* waits for turns_(granted|added), parity"
UNFENCED = r"Race: .* finds {}\[\d\] (stored|initialized) without fence_async_shared"
LOADED = r"Race: a copy of .* overwrites {}\[\d\]: .* loaded it without fence_async_shared"
GIVE_Q_BACK = "            mbarrier.arrive(mem.q_free.index(WG), count=1)\n"

OTHERS = "        _store_others(o, mem, WG)\n"

MUTATIONS = [
    forward("a slot is filled without asking", "joint", f"{TAKEN}|{COUNT}",
            without("        acquire(mem, c + i, plan)\n")),
    forward("the slot after a tile is filled without asking", "apart", f"{TAKEN}|{COUNT}",
            without("        acquire(mem, c, plan)\n")),
    forward("nobody speaks for the values of the first slot", "apart", f"{DEADLOCK}|{TAKEN}",
            ("mbarrier.arrive(mem.v_full.index(0), count=1)", "pass")),
    telling("one place for the next tile", "short", f"{OVERWRITTEN}|{COUNT}",
            ("mem.next_tile.index(b * COUNT + w)", "mem.next_tile.index(w)"),
            ("(number & 1) * COUNT", "0 * number")),
    forward("a slot is not released", "joint", DEADLOCK,
            ("    release(mem, c, plan)\n    acc, rescaled",
             "    if c != 3:\n        release(mem, c, plan)\n    acc, rescaled")),
    forward("wrong parity for Q", "joint", f"{TAKEN}|{DEADLOCK}",
            ("mem.q_full.index(WG), turn & 1", "mem.q_full.index(WG), (turn & 1) ^ 1")),
    ring("the parity of blocks stays 0", "joint", f"{TAKEN}|{COUNT}|{DEADLOCK}",
         ("(c >> _log2(plan.pipeline.stages)) & 1", "0 * c")),
    forward("an unseen block is released unseen", "joint", f"{TAKEN}|{DEADLOCK}",
            without("        wait_k(mem, i, plan)\n")),
    forward("values of a skipped block are not waited for", "skipped", LANDING,
            ("if start > c:\n                    wait_v(mem, start, plan)", "pass")),
    forward("released before P V is done", "named", f"{OVERWRITTEN}|{READING}",
            ("    acc = warpgroup_mma_wait(0, deps=o_token)  # [64, D]\n    release(mem, c, plan)",
             "    release(mem, c, plan)\n    acc = warpgroup_mma_wait(0, deps=o_token)")),
    forward("released before Q K^T is done", "named", f"{OVERWRITTEN}|{READING}",
            ("        s = warpgroup_mma_wait(0, deps=(s_token,))  # [64, BLOCK_N]\n"
             "        release(mem, start, plan)",
             "        release(mem, start, plan)\n        s = warpgroup_mma_wait(0, deps=(s_token,))")),
    forward("Q is never given back", "joint", DEADLOCK,
            without(GIVE_Q_BACK)),
    forward("Q is filled without asking", "joint", f"{TAKEN}|{COUNT}",
            without("        mbarrier.wait(mem.q_free.index(w), (turn & 1) ^ 1)\n")),
    forward("two tiles are told under one number", "varlen", f"{OVERWRITTEN}|{COUNT}",
            ("told.tell(mem, turn, number", "told.tell(mem, turn - 1, number")),
    forward("keys for a tile that is not there", "varlen, a program without rows",
            r"Race: the program ends, and nobody has waited for a copy into k\[0\]",
            ("    if number < end:\n        _copy_k(desc_k, mem, 0,",
             "    if True:\n        _copy_k(desc_k, mem, 0,")),
    forward("keys are not waited for", "joint", TAKEN,
            without("    wait_k(mem, c, plan)\n", "", "    s_token")),
    forward("values are not waited for", "apart", TAKEN,
            without("    if not plan.pipeline.joint:\n        wait_v(mem, c, plan)\n")),
    forward("the last values are not waited for", "apart", TAKEN,
            without("        wait_v(mem, c, plan)\n", "", "        if plan.keep_shift")),
    forward("Q is not waited for", "joint", TAKEN,
            without("        mbarrier.wait(mem.q_full.index(WG), turn & 1)\n")),
    telling("the first tile is not waited for", "varlen", f"{STORED}|{OVERWRITTEN}",
            without("    mbarrier.wait(mem.drawn.index(b), (number >> 1) & 1)\n")),
    forward("S is used with both products in flight", "joint",
            "Race: a product is used with 2 outstanding, it among them",
            ("warpgroup_mma_wait(len(acc), deps", "warpgroup_mma_wait(len(acc) + 1, deps")),
    forward("S is used with three products in flight", "two parts",
            "Race: a product is used with 3 outstanding, it among them",
            ("warpgroup_mma_wait(len(acc), deps", "warpgroup_mma_wait(len(acc) + 1, deps")),
    forward("the values' bytes are not expected", "joint", f"{TAKEN}|{DEADLOCK}",
            ("nbytes(desc_k) + (FOLLOWED_BY if plan.pipeline.joint else 0)", "nbytes(desc_k)")),
    forward("twice the bytes of Q are expected", "one tile", f"{DEADLOCK}.* 8192 bytes missing",
            ("mem.q_full.index(w), nbytes(desc_q)", "mem.q_full.index(w), 2 * nbytes(desc_q)")),
    forward("the barriers are not fenced", "one tile", UNFENCED.format(r"\w+"),
            without("    fence_async_shared()\n", "", "    if plan.quantizes:\n        await_launch")),
    parts("the output is not fenced", "one tile", UNFENCED.format("o"),
          without("        fence_async_shared()\n", f"store(o_left)\n{OTHERS}")),
    parts("half of the output is not fenced", "halves", UNFENCED.format("o"),
          without("        fence_async_shared()\n", "store(right)\n")),
    parts("the second part of the output is stored behind the fence", "two parts",
          UNFENCED.format("o_right"),
          (f"store(o_left)\n{OTHERS}        fence_async_shared()\n",
           f"store(o_left)\n        fence_async_shared()\n{OTHERS}")),
    parts("the second part of the output before has not left", "two parts", READING,
          (f"        tma.store_wait(0)\n        matrix(mem.o[0], WG).store(o_left)\n{OTHERS}",
           f"{OTHERS}        tma.store_wait(0)\n        matrix(mem.o[0], WG).store(o_left)\n")),
    parts("the bytes of the second part are not expected", "two parts", f"{TAKEN}|{DEADLOCK}",
          ("for desc in descs)", "for desc in descs[:1])")),
    parts("the second part is multiplied with the first of the keys", "two parts", "TypeError|AssertionError",
          ("k = matrix(mem.k[i], b_k)", "k = matrix(mem.k[0], b_k).slice(0, 16, 1)")),
    parts("the second part adds nothing to the scores", "two parts", "AssertionError",
          ("for i in gl.static_range(1, len(mem.q)):", "for i in gl.static_range(1, 1):")),
    forward("the second part is not rescaled", "two parts, large scores", "AssertionError",
            ("(softmax.rescale(acc[i], alpha, changed),)",
             "(softmax.rescale(acc[i], alpha, changed if i == 0 else 0 * changed),)")),
    kept("large weights stay", ("{(127 + softmax.LAZY.value) << 23:08X}", "7F800000")),
    kept("only the first row of a thread is looked at",
         ("q, {parts[1]}, {most}, q", "q, {parts[0]}, {most}, q")),
    kept("a thread's largest score is taken for the row's", ("for lanes in 1, 2:", "for lanes in (1,):")),
    kept("the last scores of a thread are not looked at",
         ("range(row + 2, m, 2)", "range(row + 2, m - 4, 2)")),
    kept("the sums before keep their units",
         ("mul.f32 {found[2 + row]}, {sums[row]}, {found[4 + row]}",
          "mov.b32 {found[2 + row]}, {sums[row]}")),
    kept("O keeps its units", ("softmax.rescale(acc[i], alpha, changed)",
                               "softmax.rescale(acc[i], alpha, 0 * changed)")),
    kept("new weights of a pair change places",
         ("_pack(dtype, words[i], names)", "_pack(dtype, words[i], names[::-1])")),
    kept("the weights of a pair change places", ("range(1, n + 1)])};", "range(n, 0, -1)])};")),
    kept("shifts of four threads are added", ("gl.max(shift, 1)", "gl.sum(shift, 1)")),
    kept("the second half is not looked at",
         ("parts += gl.convert_layout(more", "parts += 0 * gl.convert_layout(more"), "kept, half way"),
    forward("Q is loaded and not fenced before it is given back", "Q in registers", LOADED.format("q"),
            (f"                fence_async_shared()\n{GIVE_Q_BACK}", f"                pass\n{GIVE_Q_BACK}")),
    forward("Q is fenced after it is given back", "Q in registers", LOADED.format("q"),
            (f"                fence_async_shared()\n{GIVE_Q_BACK}",
             f"                pass\n{GIVE_Q_BACK}            fence_async_shared()\n")),
    parts("the output before has not left", "joint", READING,
          without("        tma.store_wait(0)\n", "", "        matrix(mem.o[0], WG).store(o_left)")),
    parts("the left half of the output has not left", "halves", READING,
          without("        tma.store_wait(0)\n", "", "        matrix(mem.o[0], WG).store(right)")),
    forward("the last output is not waited for", "one tile",
            "Race: .* ends and has not waited for its copies out",
            without("    column_parts.await_stored()", "row, WG, plan)\n")),
    forward("one arrival too few frees a slot", "joint", f"{TAKEN}|{COUNT}",
            ("barriers(plan.pipeline.stages, plan.pipeline.warpgroups)",
             "barriers(plan.pipeline.stages, plan.pipeline.warpgroups - 1)")),
    ring("threads are miscounted", "named", f"Race: barrier 8: 288 threads came|{DEADLOCK}",
         ("32 + 128 * plan.pipeline.warpgroups", "128 * plan.pipeline.warpgroups")),
    drawing("the counter is not set back", "joint", "AssertionError: the counter of tiles is not set back",
            ("if number == end - 1:", "if number == end:")),
    forward("the LSE of a row too many", "one tile", "IndexError: address outside of its tensor",
            ("mask=o_m < seq.S_q", "mask=o_m < seq.S_q + 1")),

    shared("Q is filled without asking", f"{TAKEN}|{COUNT}",
           without("        acquire(Q_FREE, j, plan.consumers)\n")),
    shared("dO is filled without asking", f"{TAKEN}|{COUNT}|{TWICE}",
             without("        acquire(DO_FREE, j, plan.consumers)\n")),
    backward("K is not waited for", TAKEN, without("    mbarrier.wait(mem.k_full, 0)\n")),
    backward("V is not waited for", TAKEN, without("    mbarrier.wait(mem.v_full, 0)\n")),
    backward("dO is not waited for", TAKEN,
             without("        mbarrier.wait(mem.do_full.index(slot), parity_of(i))\n", "",
                     "        dp_token")),
    backward("Q of the next block is not waited for", TAKEN,
             ("elif j + 1 < n:\n            mbarrier.wait(mem.q_full.index(next_slot), parity_of(i + 1))",
              "elif j + 1 < n:\n            pass")),
    backward("Q is released before dK is done", f"{OVERWRITTEN}|{READING}",
             ("        dk = await_parts(dk_token, parts)\n        release(Q_FREE, i)",
              "        release(Q_FREE, i)\n        dk = await_parts(dk_token, parts)")),
    backward("dK is not waited for", "Race: a product is used with 2 outstanding, it among them",
             ("dk = await_parts(dk_token, parts)", "dk = await_parts(dk_token, 2 * parts)")),
    backward("dO is not released", DEADLOCK, ("        release(DO_FREE, i)\n",
             "        if j != 2:\n            release(DO_FREE, i)\n")),
    backward("dS is not waited for", f"{STORED}|{OVERWRITTEN}|{READING}|{TWICE}",
             without("        await_ds(i - 1, WG)\n", "", "        dq_token")),
    backward("dS is written before the other's is there", f"{STORED}|{OVERWRITTEN}|{READING}|{TWICE}",
             without("        write_ds(mem, ds_half, i, WG)  # the fence in there is for both\n"),
             ("        await_ds(i - 1, WG)\n        dq_token",
              "        write_ds(mem, ds_half, i, WG)\n        await_ds(i - 1, WG)\n        dq_token")),
    pair("a buffer of dS too few", f"{STORED}|{OVERWRITTEN}|{READING}",
             ("ds_w = ds.index((j & 1) * 2 + w)", "ds_w = ds.index(w)"),
             ("mem.ds.index((j & 1) * 2 + WG).store", "mem.ds.index(WG).store")),
    pair("a consumer does not tell", DEADLOCK,
             ("    tell_ds(j, WG)\n", "    if j != 3:\n        tell_ds(j, WG)\n")),
    slots("the parity stays 0", f"{TAKEN}|{DEADLOCK}", ("return (j // SLOTS) & 1", "return 0 * j")),
    # One fence for what was stored and what was loaded.
    pair("dS is not fenced", f"{UNFENCED.format('ds')}|{LOADED.format('lse')}",
             without("    fence_async_shared()\n", "", "    tell_ds")),
    leaving("dK and dV are not fenced", UNFENCED.format("v"),
             without("    fence_async_shared()\n", "dtype))\n")),
    leaving("dV has not left", READING,
            without("    if plan.own_values == 0:\n        tma.store_wait(0)\n")),
    pair("consumer 0 does not tell that it has started", DEADLOCK,
             ("    elif j + WG < n:  #", "    elif j + WG < n * WG:  #"), call="alternate"),
    pair("consumer 0 starts without being told", TWICE,
             ("    if j + WG > 0:\n", "    if WG > 0:\n"), call="alternate"),
    pair("consumer 1 does not tell in the last step of a tile", DEADLOCK,
             ("    if plan.persistent:\n", "    if plan.persistent & (WG == 0):\n"),
             call="alternate, persistent"),
    backward("dK is not waited for at the end", "Race: .* ends and has not waited for its copies out",
             without("        tma.store_wait(0)\n", "mem, 0, WG, at, row, plan)\n",
                     "\n\n@gluon.jit\ndef _visit_tiles")),
    leaving("the zeros of keys that nobody sees are not waited for", "Race: .* waited for its copies out",
            without("        tma.store_wait(0)\n", "", "\n\n@gluon.jit\ndef leave("), call="unseen"),
    leaving("both consumers have one place for zeros of dK", STORED,
            ("mem.dk, WG, at, row)\n        tma", "mem.dk, 0, at, row)\n        tma"), call="unseen, 64/128"),
    leaving("both consumers have one place for dK", STORED,
            ("        store(descs, dk, mem.dk, WG, at, row)", "        store(descs, dk, mem.dk, 0, at, row)"),
            call="64/128"),
    leaving("sums of own values begin behind their own columns", "AssertionError|TypeError",
            ("leave(sums, zero_values(plan), 64 * plan.width, plan)",
             "leave(sums, zero_values(plan), 64 * plan.own_values, plan)"), call="unseen, 64/128, apart"),
    shared("the bytes of LSE are not expected", f"{TAKEN}|{DEADLOCK}|Race: the program ends",
             ("q_bytes: gl.constexpr = nbytes(desc_q) + desc_rows.block_type.nbytes",
              "q_bytes: gl.constexpr = nbytes(desc_q)")),
    backward("the barriers are not fenced", UNFENCED.format(r"\w+").replace(r"\[\d\]", r"\S*"),
             without("    fence_async_shared()\n", "", "    if OVERLAPS")),
    backward("dQ of the first step, of nothing, is added", "AssertionError|IndexError: address outside",
             ("plan), dq, i > 0, WG", "plan), dq, i >= 0, WG")),
    backward("keys that don't exist are taken for keys that do", "AssertionError",
             ("elif tile.start + (WG + 1) * 64 <= tile.S_k:", "elif tile.start + WG * 64 < tile.S_k:"),
             call="tail apart"),
    backward("dQ of the last step is lost", "AssertionError", ("dq, n > 0, WG", "dq, n < 0, WG")),
    pair("the halves of dQ change places", "AssertionError",
             ("ds_w = ds_w.slice(WG * 64, 64, 1)", "ds_w = ds_w.slice(64 - WG * 64, 64, 1)"), call="64"),
    shared("the second part adds nothing to S and dP", "AssertionError|Race: a product is used with",
           ("for part in gl.static_range(len(b)):", "for part in gl.static_range(1):"), call="64 + 32"),
    shared("the second part takes the place of the first in S and dP", "AssertionError",
           ("use_acc=part > 0", "use_acc=False"), call="64 + 32"),
    shared("the second part of a column of S is that of other rows", "AssertionError",
           ("else i + opaque_zero(j)", "else 1 - i + opaque_zero(j)"), call="64 + 32"),
    backward("V is loaded into registers before it is there", TAKEN,
             without("    mbarrier.wait(mem.v_full, 0)\n"), call="64 + 16"),
    backward("16 columns of dQ are formed from the other's keys", "AssertionError",
             ("k = matrix(mem.k[1], first + WG + opaque", "k = matrix(mem.k[1], first + 1 - WG + opaque"),
             call="64 + 16"),
    bulk("16 columns of dQ are added where halves would be", "AssertionError|IndexError: address outside",
         ("    if part == 1 and plan.own_right:\n        return 64 * plan.d\n", ""), call="64 + 16"),
    bulk("the second part of dQ is added where the first one is", "AssertionError",
         ("(part * plan.d + WG *", "(WG *"), call="64 + 32"),
    bulk("dQ is written where it is still read", f"{READING}|{OVERWRITTEN}",
         ("    if j > 1:\n        mbarrier.wait(mem.sums_free.index(WG), j & 1)\n", "")),
    bulk("the parity of what has been read stays 0", f"{READING}|{OVERWRITTEN}|{DEADLOCK}",
         ("sums_free.index(WG), j & 1)", "sums_free.index(WG), 0 * j)")),
    bulk("dQ is said to have been read when it is not", f"{READING}|{OVERWRITTEN}",
         ("                tma.store_wait((plan.writers - 1 - w) * parts)\n", ""),
         ("            block += 1\n", "            tma.store_wait(0)\n            block += 1\n")),
    bulk("of the first consumer, too few additions are waited for", f"{READING}|{OVERWRITTEN}",
         ("tma.store_wait((plan.writers - 1 - w) * parts)", "tma.store_wait((plan.writers - w) * parts)"),
         ("            block += 1\n", "            tma.store_wait(0)\n            block += 1\n")),
    bulk("additions before their turn", BITS,
         ("                await_turn(work.turns_ptr, block, tiling.turn(tile, m, work, plan), plan, True)\n",
          "                block += 0\n"), call="bulk, in order"),
    bulk("what a tile has added is not counted", WAITS,
         ("                end_turn(work.turns_ptr, block, plan, True)\n", "                block += 0\n"),
         call="bulk, in order"),
    bulk("a turn is ended that was another block's", f"{WAITS}|{BITS}",
         ("end_turn(work.turns_ptr, block, plan, True)", "end_turn(work.turns_ptr, block * 0, plan, True)"),
         call="bulk, in order"),
    bulk("a consumer does not tell that it has written dQ", DEADLOCK,
         ("    if j > 0:\n", "    if (j > 0) & (j != 3):\n")),
    bulk("dQ of the first step, of nothing, is added in bulk", f"{OVERWRITTEN}|{READING}|{TWICE}|{STORED}",
         ("    if j > 0:\n", "    if j >= 0:\n")),
    bulk("the consumers' halves of dQ change places", "AssertionError",
         ("* LINE // 64, w, plan)", "* LINE // 64, 1 - w, plan)"), call="bulk, 64"),
    bulk("dQ is not in the order of registers", "AssertionError",
         (".permute((3, 0, 2, 4, 1, 5))", ".permute((3, 0, 2, 1, 4, 5))")),
    backward("the last dQ is not fenced", UNFENCED.format("sums"),
             ("        write_sums(mem, dq, n, WG)\n        fence_async_shared()\n",
              "        write_sums(mem, dq, n, WG)\n"), call="bulk"),
    backward("dQ is told of before it is fenced", UNFENCED.format("sums"),
             ("        write_ds(mem, ds_half, i, WG)  # the fence in there is for both\n",
              "        if plan.bulk:\n            tell_sums(i, WG)\n        write_ds(mem, ds_half, i, WG)\n"),
             ("        if plan.bulk:\n            tell_sums(i, WG)\n        else:\n",
              "        if not plan.bulk:\n"),
             call="bulk"),
    tile("the first Q of a tile is copied without asking, and K", f"{TAKEN}|{COUNT}|{TWICE}",
         ("            acquire(Q_FREE, i)\n", "            if j > 0:\n                acquire(Q_FREE, i)\n")),
    tile("one place for the number of a tile", f"{OVERWRITTEN}|{STORED}|{DEADLOCK}|{TWICE}|AssertionError",
         ("(t & 1) * plan.words + w", "w"), call="persistent, bulk"),
    tile("one place for the words of a varlen tile", f"{OVERWRITTEN}|{STORED}|{DEADLOCK}|{TWICE}|Assertion",
         ("(t & 1) * plan.words + w", "w"), call="persistent, varlen, bulk"),
    tile("who adds does not wait for the first tile", f"{STORED}|{OVERWRITTEN}|IndexError|{DEADLOCK}",
         ('            named_barrier("sync", TOLD, 64)\n', "            pass\n"),
         call="persistent, varlen, bulk"),
    tile("who adds is not told of the first tile", DEADLOCK,
         ('            named_barrier("arrive", TOLD, 64)\n', "            pass\n"),
         call="persistent, varlen, bulk"),
    tile("consumers do not wait for the first tile", f"{STORED}|{OVERWRITTEN}|IndexError|{TAKEN}",
         ("            mbarrier.wait(mem.q_full.index(0), 0)\n", "            pass\n"),
         call="persistent, varlen"),
    tiles("what is behind a sequence counts", "AssertionError|IndexError",
          ("        return m * plan.block_m >= tile.S_q\n", "        return m < 0\n"),
          call="persistent, varlen, dense"),
    tiles("sums go on behind the last block", "AssertionError|IndexError",
          ("return tile.m_start - tile.m_end\n", "return tile.m_end * 0\n"), call="rotated"),
    tiles("sums begin with the first block", "AssertionError",
          ("work.GROUP) * work.num_m + tile.m_first", "work.GROUP) * work.num_m + tile.m_start"),
          call="rotated, bulk"),
    tile("copies begin with the first block", "AssertionError",
         ("m = tile.m_first", "m = tile.m_start"), call="rotated"),
    tiles("copies go on with the next head", "AssertionError",
          ("g += 0 if plan.rotated else 1", "g += 1"), call="rotated"),
    tiles("copies of one tile go on with the next head", "AssertionError",
          ("g += 0 if plan.rotated else 1", "g += 1"), call="rotated, one tile"),
    bulk("sums are added from the first block on", "AssertionError",
         ("m = tile.m_first", "m = tile.m_start"), call="rotated, bulk"),
    backward("the block before the first one is that of the head before", "AssertionError|IndexError",
             ("gl.where(m == tile.m_start, gap, 0)", "0 * gap"), call="rotated"),
    tiles("varlen tiles of one step", f"{DEADLOCK}|{TAKEN}|{COUNT}|AssertionError",
          ("plan.mask.left or plan.varlen:\n", "plan.mask.left:\n"), call="persistent, varlen, dense"),
    tile("gradients are overwritten while they leave", READING,
         ("        tma.store_wait(0)\n", "        pass\n")),
    tile("one set of K and V", f"{TAKEN}|{TWICE}",
         ("return 2 * (t & 1)", "return 0 * t"), ("return 2 - first", "return first")),
    tile("the bytes of K are not expected", f"{TAKEN}|{DEADLOCK}|Race: the program ends",
         ("copy_keys(desc_k, tile, bar, q_bytes,", "copy_keys(desc_k, tile, bar, 0,")),
    tile("the bytes of V are not expected", f"{TAKEN}|{DEADLOCK}|Race: the program ends",
         ("copy_keys(desc_v, tile, bar, do_bytes,", "copy_keys(desc_v, tile, bar, 0,")),
    tile("nobody speaks of the end", DEADLOCK,
         ("    mbarrier.arrive(mem.q_full.index(slot_of(i)), count=1)\n", "")),
    tile("the end is told over blocks that are not done", f"{COUNT}|{DEADLOCK}|{STORED}|{TAKEN}",
         without("    acquire(Q_FREE, i)\n", "", "    _tell(mem, t, (-1,), plan)"),
         call="persistent, two steps"),
    tile("every other tile is left out", "AssertionError",
         ("counter_ptr, tiles, 1)", "counter_ptr, tiles, 1) + 1")),
    bulk("who adds reads of the next tile too early",
         f"{STORED}|{OVERWRITTEN}|{TWICE}|{DEADLOCK}|IndexError",
         ("                if j + 1 == n:\n", "                if j == 0:\n"),
         call="persistent, bulk, three steps"),
    bulk("the last additions of a tile are not told", DEADLOCK,
         ("if (j + 1 < n) | (following >= 0):", "if j + 1 < n:"), call="persistent, bulk"),
    backward("V is given back while gradients leave from there", READING,
             without("        if plan.persistent:\n            await_gradients(i, j)\n"),
             ("        block += 1\n",
              "        if plan.persistent:\n            await_gradients(i, j)\n        block += 1\n"),
             call="persistent, two steps a tile"),
    backward("the next tile's Q is not waited for", TAKEN,
             ("or the end\n            mbarrier.wait(mem.q_full.index(next_slot), parity_of(i + 1))",
              "or the end\n            pass"), call="persistent"),
    tile("the last dQ of a tile is formed from the next one's K", f"AssertionError|{TAKEN}",
         ("gl.where(j == 0, _other_set(first), first)", "first")),
    tile("the first S of a tile is formed from the K before", "AssertionError",
         ("gl.where(j == n - 1, _other_set(first), first)", "first")),
    backward("K in registers is the tile's before", "AssertionError|Race",
             ("k = held(mem.k, first + WG, plan)", "k = held(mem.k, WG, plan)"),
             call="persistent, two parts"),
    backward("V in registers is not waited for", TAKEN,
             without("        mbarrier.wait(mem.do_full.index(slot), parity_of(i))\n", "",
                     "        return k"),
             call="persistent, two parts"),
    backward("the last dQ of a tile is added to the next one's", "AssertionError|IndexError",
             ("found = gl.where(j == 0, last, found)", "found = found"), call="persistent"),
    backward("dV of a tile has not left when dK comes", READING,
             without("            await_room(plan)\n"), call="persistent"),
    backward("the last dK is not waited for", "Race: .* ends and has not waited for its copies out",
             without("    tma.store_wait(0)\n", "", "\n\n@gluon.jit\ndef _begin_tile"), call="persistent"),
    tiles("tiles of one step", f"{DEADLOCK}|{TAKEN}",
          ("m_start, m_end = _two_blocks(m_start, m_end, plan)", "pass"),
          call="persistent, two steps a tile"),
    slots("threads add in another order", "AssertionError",
          ("(row & 7) * 4", "(row & 7) * 4 % 28"), call="persistent"),
    tiles("hidden scores are 0 before their exponentials", "AssertionError",
          ('float("-inf") if plan.early_mask else 0.0', "0.0"), call="early mask"),
    backward("a product of dQ too few is waited for", "Race: a product is used with 4 outstanding",
             ("await_parts(dv_token, plan.dq_products)", "await_parts(dv_token, plan.dq_products + 1)"),
             call="64 + 16"),
    leaving("the second part of dK and dV stays in shared memory", "AssertionError",
             ("gl.static_range(len(descs)):\n        tma", "gl.static_range(1):\n        tma"),
             call="64 + 32"),
    shared("in the wide kernel: Q is filled without asking", f"{TAKEN}|{COUNT}",
             without("        acquire(Q_FREE, j, plan.consumers)\n"), call="256"),
    shared("in the wide kernel: dO is filled without asking", f"{TAKEN}|{COUNT}|{TWICE}",
             without("        acquire(DO_FREE, j, plan.consumers)\n"), call="256"),
    slots("in the wide kernel: the parity stays 0", f"{TAKEN}|{DEADLOCK}|{TWICE}",
             ("return (j // SLOTS) & 1", "return 0 * j"), call="256"),

    wide("Q of the next block is not waited for", TAKEN,
         ("mbarrier.wait(mem.q_full.index(next_slot), parity_of(j + 1))", "pass")),
    wide("dO of dV is not waited for", TAKEN,
         without("        mbarrier.wait(mem.do_full.index(slot), parity_of(j))\n")),
    wide("dO of the next block is not waited for", TAKEN,
         ("mbarrier.wait(mem.do_full.index(next_slot), parity_of(j + 1))", "pass")),
    wide("Q is released before dK is done", TAKEN,
         ("        tokens = _issue_update(d", "        release(Q_FREE, j)\n        tokens = _issue_update(d"),
         without("        release(Q_FREE, j)\n", "", "        dp = warp")),
    wide("dO is released before dV is done", f"{OVERWRITTEN}|{READING}",
         without("        release(DO_FREE, j)\n", "", "        s = warp"),
         ("        dv = await", "        release(DO_FREE, j)\n        dv = await")),
    wide("P is not waited for", f"{STORED}|{OVERWRITTEN}",
         without('        named_barrier("sync", P_FULL + slot, 256)\n'),
         without('        named_barrier("arrive", P_FULL + slot, 256)\n')),
    wide("P is told before it is there", f"{STORED}|{OVERWRITTEN}",
         ('        mem.p.index(slot).store(p_half)\n        named_barrier("arrive", P_FULL + slot, 256)\n',
          '        named_barrier("arrive", P_FULL + slot, 256)\n        mem.p.index(slot).store(p_half)\n')),
    wide("one buffer of P", f"{STORED}|{OVERWRITTEN}",
         ("mem.p.index(slot).store", "mem.p.index(0).store"),
         ("mem.p.index(slot).load", "mem.p.index(0).load")),
    wide("dS is written without asking", f"{OVERWRITTEN}|{READING}|{TWICE}",
         ('named_barrier("sync", DS_FREE + slot, 256)', "pass")),
    wide("dS is released before dQ is done", f"{OVERWRITTEN}|{READING}",
         without(f'{LAST_PART}                named_barrier("arrive", DS_FREE + slot, 256)\n',
                 "", "            # The condition"),
         ("            dq = warpgroup_mma_wait(0, deps=(dq,))",
          f'{LAST_PART}                named_barrier("arrive", DS_FREE + slot, 256)\n'
          "            dq = warpgroup_mma_wait(0, deps=(dq,))")),
    wide("dS is not told", DEADLOCK,
         ('        named_barrier("arrive", DS_FULL + slot, 256)\n',
          '        if j != 3:\n            named_barrier("arrive", DS_FULL + slot, 256)\n')),
    wide("dV does not wait for the end", f"{STORED}|{OVERWRITTEN}|{READING}",
         without('        named_barrier("sync", END, 256)\n')),
    wide("dS is not fenced", UNFENCED.format("ds"),
         without("        fence_async_shared()\n", "store(ds_half)\n")),
    wide("LSE is loaded and not fenced before Q is given back", LOADED.format("lse"),
         ("fence_async_shared()  # between the load of LSE", "pass  # between the load of LSE")),
    wide("dK and dV are not fenced", UNFENCED.format(r"(v|do)"),
         without("    fence_async_shared()\n", ".store(x[i])\n")),
    wide("dK and dV are not waited for", "Race: .* ends and has not waited for its copies out",
         without("    tma.store_wait(0)\n", "place, buffer)\n")),
    wide("V is not waited for", TAKEN, without("    mbarrier.wait(mem.v_full, 0)\n")),
    wide("the second half of dV is that of the first columns", "AssertionError",
         ("_part(b[0], i, acc[i].shape[1])", "_part(b[0], 0, acc[i].shape[1])")),
    wide("the second half of dQ is added where the first one is", "AssertionError",
         ("part * 64 * plan.part", "0 * plan.part")),
    shared("of 96 keys: Q is filled without asking", f"{TAKEN}|{COUNT}|{TWICE}",
           without("        acquire(Q_FREE, j, plan.consumers)\n"), call="96 keys"),
    shared("of 96 keys: the bytes of 32 are not expected", f"{TAKEN}|{DEADLOCK}|{COUNT}",
           ("nbytes(desc.most) + nbytes(desc.few) + MORE", "nbytes(desc.most) + MORE"), call="96 keys"),
    shared("of 96 keys: all parts of Q are copied from the first columns", "AssertionError",
           ("bar, buffers, slot, plan.step)", "bar, buffers, slot)"), call="96 keys"),
    keys96("the parts of dK and dV of few keys are stored to the first columns", "AssertionError",
           ("buffers.few, 0, FIRST, parts, plan.step)", "buffers.few, 0, FIRST, parts, 0)"),
           call="96 keys, causal"),
    keys96("Q of the next block is not waited for", TAKEN,
           ("mbarrier.wait(mem.q_full.index(next_slot), parity_of(j + 1))", "pass")),
    keys96("dO of the next block is not waited for", TAKEN,
           ("mbarrier.wait(mem.do_full.index(next_slot), parity_of(j + 1))", "pass")),
    keys96("dO of dV is not waited for", TAKEN,
           without("        mbarrier.wait(mem.do_full.index(slot), parity_of(j))\n", "",
                   "        do = _columns(mem.do, slot, 0")),
    keys96("V is not waited for", TAKEN, without("    mbarrier.wait(mem.v_full, 0)\n")),
    keys96("Q is released before the last part of dK is done", f"{OVERWRITTEN}|{READING}",
           without("        release(Q_FREE, j, plan.consumers)\n", "", "        # As much"),
           ("        dk_tokens", "        release(Q_FREE, j, plan.consumers)\n        dk_tokens")),
    keys96("P is not waited for by warpgroup 1", f"{STORED}|{OVERWRITTEN}",
           without("        mbarrier.wait(mem.p_full.index(slot), parity_of(j))\n", "", "        _diff")),
    keys96("P is not waited for by warpgroup 2", f"{STORED}|{OVERWRITTEN}|{UNFENCED.format('p_most')}",
           without("            mbarrier.wait(mem.p_full.index(slot), parity_of(j))\n", "",
                   "            dv_tokens")),
    keys96("P of few keys is told before it is there",
           f"{STORED}|{OVERWRITTEN}|{UNFENCED.format('p_(most|few)')}",
           without("        mbarrier.arrive(mem.p_full.index(slot), count=1)\n"),
           ("        p_few = _p",
            "        mbarrier.arrive(mem.p_full.index(slot), count=1)\n        p_few = _p")),
    keys96("P is not fenced", UNFENCED.format("p_(most|few)"),
           without("        fence_async_shared()\n", "", "        mbarrier.arrive(mem.p_full")),
    keys96("dS is not fenced", UNFENCED.format("ds_(most|few)"),
           without("        fence_async_shared()\n", "", '        named_barrier("arrive", DS_FULL')),
    keys96("dS is written without asking", f"{OVERWRITTEN}|{READING}|{TWICE}",
           ('named_barrier("sync", DS_FREE + slot, 256)', "pass")),
    keys96("dS is released before dQ is done", f"{OVERWRITTEN}|{READING}",
           without('            if part == PARTS - 1:\n'
                   '                named_barrier("arrive", DS_FREE + slot, 256)\n'),
           ("        # As much of",
            '        named_barrier("arrive", DS_FREE + slot, 256)\n        # As much of')),
    keys96("dS is not told", DEADLOCK,
           ('        named_barrier("arrive", DS_FULL + slot, 256)\n',
            '        if j != 3:\n            named_barrier("arrive", DS_FULL + slot, 256)\n')),
    keys96("gradients do not wait for the end", f"{STORED}|{OVERWRITTEN}|{READING}",
           ('"sync", END, 384)\n    return dv\n', '"arrive", END, 384)\n    return dv\n')),
    keys96("dK and dV are not fenced", UNFENCED.format(r"[kv]_\w+"),
           without("    fence_async_shared()\n", "", "    at = tiling.keys")),
    keys96("dV is not waited for", "Race: .* ends and has not waited for its copies out",
           without("    tma.store_wait(0)\n", "mem.v, plan.block_n * PARTS * 64, 0, tile, work, plan)\n")),
    keys96("few keys are masked as the first ones", "AssertionError",
           ("tile.start + 64, m, tile", "tile.start, m, tile"), call="96 keys, causal"),
    keys96("the parts of dQ are added to the first one", "AssertionError",
           ("part * 64 * 64, plan, True", "0, plan, True")),
    keys96("the sums of few keys are where those of others are", "AssertionError",
           ("((FIRST + i) * plan.block_n + 64) * 64", "((FIRST + i) * plan.block_n) * 64"),
           call="96 keys, shared"),
    keys96("the sums of dV are where those of dK are", "AssertionError",
           ("mem.v, plan.block_n * PARTS * 64, 0, tile", "mem.v, 0, 0, tile"), call="96 keys, shared"),
    keys96("the sums of dV begin behind 160 columns of dK", "AssertionError",
           ("mem.v, plan.block_n * PARTS * 64, 0, tile", "mem.v, plan.block_n * plan.width, 0, tile"),
           call="160 columns, shared"),
    keys96("dQ of part 2 takes the columns that are zeros", "AssertionError",
           ("x.slice(0, plan.last, 1)", "x.slice(64 - plan.last, plan.last, 1)"), call="160 columns, shared"),
    tiles("blocks of 96 keys are counted as blocks of 64", "AssertionError|IndexError",
          ("plan.block_n if plan.few else 64", "64"), call="96 keys, apart"),
    tiles("the last keys are not masked", "AssertionError",
          ("            p = _mask_keys(p, 0, 0, keys_left, plan)", "            pass"), call="96 keys, tail"),
    turn("the sum is counted before it is complete", BITS, ("fence.acq_rel.gpu; ", "")),
    turn("the sum is counted before it is complete", BITS, ("fence.acq_rel.gpu; ", ""), call="256, in order"),
    turn("additions in bulk are counted before they are made", BITS, ("cp.async.bulk.wait_group 0; ", ""),
         call="bulk, in order"),
    turn("nobody waits", BITS, ("@q bra AGAIN; ", "")),
    turn("nobody waits", BITS, ("@q bra AGAIN; ", ""), call="bulk, in order"),
    turn("nobody waits", BITS, ("@q bra AGAIN; ", ""), call="256, in order"),
    turn("nobody counts", WAITS, ("@q red.relaxed.gpu.global.add.u32 [$1], 1; ", "")),
    turn("one turn too late", WAITS, ("[address, turn]", "[address, turn + 1]")),
    tiles("a program waits for one that comes later", WAITS,
          ("gl.minimum(last, tile.S_k - tile.start - 1)", "tile.start")),
    tiles("a dense program waits for one that comes later", WAITS,
          ("    else:\n        return tile.start //",
           "    else:\n        return (tile.S_k - 1 - tile.start) //"),
          call="256, in order"),
    tiles("the first visitor without the right bound", WAITS,
          ("gl.minimum(last, tile.S_k - tile.start - 1)", "(tile.S_k - tile.start - 1)"),
          call="window, in order"),
    tiles("the first visitor without the left bound", WAITS,
          ("        return tile.start // plan.block_n - gl.maximum(place - work.left, 0) // plan.block_n\n",
           "        return tile.start // plan.block_n\n"),
          call="no right bound, in order"),
    tiles("a turn too early", BITS,
          ("plan.block_n\n    elif", "plan.block_n - 1\n    elif")),
    tiles("programs that share a key head read those of another one", "AssertionError|IndexError",
          ("        i_kv //= work.SHARE\n", "        i_kv %= work.SHARE\n"), call="shared"),
    tiles("each query head has sums", "AssertionError|IndexError",
          ("        head //= work.SHARE\n", ""), call="shared"),
    tiles("the sums of a consumer are where the other's are", "AssertionError",
          ("tile.start // rows + WG", "tile.start // rows"), call="shared"),
    slots("sums are stored over each other", "AssertionError",
          ('"red.global.add.v4.f32" if ADD', '"st.global.v4.f32" if ADD'), call="shared"),
    backward("the sums of dV are where those of dK are", "AssertionError",
             ("        leave(sums, dv, 64 * plan.width, plan)\n    else:",
              "        leave(sums, dv, 0, plan)\n    else:"), call="shared"),
    backward("and where programs stay", "AssertionError",
             ("            leave(sums, dv, 64 * plan.width, plan)", "            leave(sums, dv, 0, plan)"),
             call="persistent, shared"),
    leaving("the second part of the sums is where the first one is", "AssertionError",
             ("AT + 64 * plan.d * i", "AT"), call="shared"),
    leaving("keys that nobody sees leave no sums of their own", "AssertionError",
            ("            leave(sums, column_parts.zeros(plan.d_layout, plan), 0, plan)\n", ""),
            call="unseen, apart"),
    wide("the right half of the sums is where the left one is", "AssertionError",
         ("AT + 64 * x[i].shape[1] * i", "AT"), call="256, shared"),
    wide("the sums of dV are where those of dK are", "AssertionError",
         ("_leave(desc_dv, dv, 64 * plan.width", "_leave(desc_dv, dv, 0"),
         call="256, shared"),
    backward("a consumer adds before its turn", PHASES,
             without("            if plan.granted:\n                await_grant(mem.turns, i - 1)\n"),
             call="in order"),
    backward("a consumer tells too early that it has added", PHASES,
             ("                await_grant(mem.turns, i - 1)\n",
              "                await_grant(mem.turns, i - 1)\n"
              "                tell_added(mem.turns, i - 1)\n"),
             without("        if plan.granted:\n            tell_added(mem.turns, i - 1)\n", "",
                     "        s = "),
             call="in order"),
    backward("the last addition is not told", PHASES,
             without("        if plan.granted:\n            tell_added(mem.turns, n - 1)\n"),
             call="in order"),
    backward("the last addition is not told where programs stay", WAITS,
             ("        _add_dq(dq_ptr, before, dq, i > 0, WG, plan)\n        if plan.granted:\n",
              "        _add_dq(dq_ptr, before, dq, i > 0, WG, plan)\n        if plan.granted and i < 0:\n"),
             call="in order, stays"),
    backward("the last addition is made before its turn", PHASES,
             without("        if plan.granted:\n            await_grant(mem.turns, i - 1)\n", "",
                     "        _add_dq(dq_ptr, before,"),
             call="in order, stays"),
    keeping("one consumer's word is enough", PHASES,
            ("barriers(1, WARPGROUPS).index(0)", "barriers(1, 1).index(0)"), call="in order"),
    keeping("the turn is granted before it has come", PHASES,
            ("                if counted:\n                    await_turn(",
             "                mbarrier.arrive(turns.granted, count=1)\n"
             "                if counted:\n                    await_turn("),
            ("                mbarrier.arrive(turns.granted, count=1)\n"
             "                mbarrier.wait(turns.granted, i & 1)\n",
             "                mbarrier.wait(turns.granted, i & 1)\n"), call="in order"),
    keeping("the next step may add before the counter knows of this one", PHASES,
            ("                mbarrier.wait(turns.added, i & 1)\n", ""),
            ("                if counted:\n                    end_turn(",
             "                mbarrier.wait(turns.added, i & 1)\n"
             "                if counted:\n                    end_turn("), call="in order"),
    keeping("what is not yet added is counted", PHASES,
            without("                mbarrier.wait(turns.added, i & 1)\n"), call="in order"),
    keeping("the wrong phase is waited for", PHASES,
            ("turns.granted, i & 1)", "turns.granted, i + 1 & 1)"), call="256, in order"),
    keeping("the next tile is asked for a step too late", f"{DEADLOCK}|{PHASES}",
            ("j == n - 2:", "j == n - 1:"), call="in order, two steps"),
    keeping("a turn is granted before the number of the next tile is known",
            f"{DEADLOCK}|{STORED}|{TWICE}|{OVERWRITTEN}",
            ("                if plan.persistent:\n                    if j == n - 1:\n"
             "                        following = _next_number(mem, after, plan)\n", ""),
            ("                mbarrier.wait(turns.granted, i & 1)\n",
             "                mbarrier.wait(turns.granted, i & 1)\n"
             "                if plan.persistent:\n                    if j == n - 1:\n"
             "                        following = _next_number(mem, after, plan)\n"),
            call="in order, two steps"),
    keeping("a number is read before it is told", f"{STORED}|{OVERWRITTEN}|{DEADLOCK}",
            ("    mbarrier.wait(mem.turns.told, (t - 1) & 1)\n", ""), call="in order, stays"),
    keeping("steps of the tile before are forgotten", f"{DEADLOCK}|{PHASES}",
            ("    return before + n, following", "    return before, following"), call="in order, stays"),
    keeping("a block that no key sees has a turn", f"{WAITS}|{BITS}",
            ("counted = tiling.counted(tile, m, work, plan)", "counted = m >= 0"), call="in order, stays"),
    tile("the number is not told to those who keep turns", DEADLOCK,
         ("            mbarrier.arrive(mem.turns.told, count=1)\n", "            pass\n"),
         call="in order, stays"),
    wide("an addition before its turn", PHASES,
         without("            if plan.deterministic:\n                if part == 0:\n"
                 "                    await_grant(mem.turns, j)\n"),
         call="256, in order"),
    wide("the additions are not told", PHASES,
         without("        if plan.deterministic:\n            tell_added(mem.turns, j)\n"),
         call="256, in order"),
    keys96("an addition before its turn", PHASES,
           without("            if plan.deterministic:\n                if part == 0:\n"
                   "                    await_grant(mem.turns, j)\n"),
           call="96 keys, in order"),
    keys96("the additions are not told", PHASES,
           without("        if plan.deterministic:\n            tell_added(mem.turns, j)\n"),
           call="96 keys, in order"),
]  # fmt: skip


def is_forward(mutation: Mutation) -> bool:
    return mutation.module in (forward_kernel, column_parts, kept_shift, words, ring_module, tile_scheduler)


def run(mutation: Mutation, mutants: dict[str, ModuleType] | None, order: str, seed: int) -> str:
    """What is said of a run; empty if nothing."""
    check, calls = (check_forward, FORWARD) if is_forward(mutation) else (check_backward, BACKWARD)
    call = calls[mutation.caught_by]
    try:
        kernel = check(call, order, seed, mutants=mutants)
        if call.deterministic:
            found = [x.clone() for x in kernel.tensors]
            kernel.repeat("eager", 0)
            same = all(torch.equal(x, y) for x, y in zip(found, kernel.tensors, strict=True))
            assert same, "other bits than in another order"
    except (Race, Deadlock, AssertionError, IndexError) as found:
        return f"{type(found).__name__}: {found}"
    return ""


def kind_of(mutation: Mutation) -> tuple:
    """Bugs of one file that are noticed in one way."""
    return (mutation.module, mutation.verdict)


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, kind_of), ids=str)
def test_a_planted_bug_is_found(mutation: Mutation) -> None:
    mutants = mutate(mutation)
    for order, seed in RUNS:
        said = run(mutation, mutants, order, seed)
        if said:
            print(f"{order}, seed {seed}: {said}")
            assert re.match(mutation.verdict, said), said
            return
    pytest.fail(f"{len(RUNS)} runs did not reveal: {mutation.bug}")


@pytest.mark.parametrize("call", sorted({(is_forward(m), m.caught_by) for m in MUTATIONS}), ids=str)
def test_the_kernel_without_a_bug_passes_the_same_way(call: tuple[bool, str]) -> None:
    mutation = next(m for m in MUTATIONS if (is_forward(m), m.caught_by) == call)
    assert run(mutation, None, "random", 0) == ""

"""The Hopper kernel of BSFA in the emulator, in many orders; and bugs planted in its text, each of which the
emulator notices."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from cases import INTERPRETER_REMARKS
from chosen import in_turn
from emulated import ORDERS, Recorded, mutate, on_the_cpu
from mutations import Mutation

from attnlib.bench.oracle import Oracle
from attnlib.emulator import Deadlock, Race
from attnlib.kernels.bsfa import hopper, hopper_kernel
from attnlib.kernels.bsfa.configs import HopperBsfaConfig
from attnlib.kernels.common import thread_shift, warpgroup_vote, words
from attnlib.kernels.common.bsfa import element_mask
from attnlib.kernels.reference import bsfa as model
from attnlib.params import BsfaParams

pytestmark = INTERPRETER_REMARKS

TWO_SLOTS = HopperBsfaConfig(2)
Q_KEPT = HopperBsfaConfig(3, 32)


@dataclass(frozen=True)
class Call:
    """A call with N(0, 1) inputs and one threshold for each head."""

    D: int = 64
    S_q: int = 300
    S_k: int = 520
    threshold: float = 3.5
    causal: bool = True
    H: int = 2
    H_kv: int = 1
    B: int = 1
    dtype: torch.dtype = torch.float16
    sm_scale: float = 0.125
    told: bool = True
    positive: bool = False
    config: HopperBsfaConfig | None = None

    def params(self) -> BsfaParams:
        limits = self.threshold + 0.1 * torch.arange(self.H)[None, :, None]
        return BsfaParams(limits, self.causal, self.sm_scale, self.told, self.told, self.config)


def check(call: Call, order: str = "random", seed: int = 0, **where) -> Recorded:
    """AssertionError for a wrong result; returns what ran."""
    rng = torch.Generator().manual_seed(1)
    shapes = (call.B, call.H, call.S_q, call.D), *2 * [(call.B, call.H_kv, call.S_k, call.D)]
    q, k, v = (torch.randn(shape, generator=rng).to(call.dtype) for shape in shapes)
    if call.positive:
        q, k = q.abs(), k.abs()
    params = call.params()
    with on_the_cpu(order, seed, **where) as kernels:
        out, lse, kept = hopper.forward(q, k, v, params)
    _, _, expected = model.forward(q, k, v, params)
    assert (kept is None and lse is None) if not call.told else torch.equal(kept, expected)
    mask = element_mask(expected, call.S_q, call.S_k, call.causal)
    Oracle(q, k, v, sm_scale=call.sm_scale, mask=mask).judge(out, lse).raise_if_bad("the output")
    return kernels["attention_bsfa_forward_hopper"]


CALLS = {
    "causal": Call(S_k=300),
    "more keys": Call(),
    "more queries": Call(S_k=130),
    "dense": Call(causal=False, S_q=200, S_k=330),
    "128": Call(128, 200, 530, 5.5, H=1),
    "bfloat16": Call(S_q=130, dtype=torch.bfloat16),
    "negative": Call(S_q=200, S_k=512, sm_scale=-0.125),
    "nothing skipped": Call(threshold=-math.inf, S_q=200),
    "all skipped": Call(threshold=math.inf, S_q=200, S_k=530),
    "one row": Call(S_q=1, S_k=400),
    "nothing told": Call(S_q=200, told=False),
    "batches": Call(S_q=140, S_k=260, H=4, H_kv=2, B=2),
    "two slots": Call(S_q=260, S_k=640, config=TWO_SLOTS),
    "Q in registers": Call(S_q=260, S_k=640, config=Q_KEPT),
    "many tiles": Call(S_q=520, S_k=520, H=3),
}


@pytest.mark.parametrize("call", CALLS)
def test_call(call: str) -> None:
    check(CALLS[call])


ORDERED = "more keys", "two slots", "Q in registers", "many tiles"


@pytest.mark.parametrize(("call", "order"), in_turn(ORDERED, ORDERS))
def test_orders(call: str, order: str) -> None:
    kernel = check(CALLS[call], order, 1)
    for seed in range(2, 4 if order == "random" else 3):
        kernel.repeat(order, seed)


LANDING = r"Race: .* touches \S+: a copy writes it, which was not waited for"
OVERWRITTEN = r"Race: .* overwrites \S+: .* has not said that it read"
READING = r"Race: .* overwrites \S+ while a product or copy out reads it"
STORED = r"Race: .* has stored to it, which was not waited for"
TAKEN = f"{LANDING}|{OVERWRITTEN}|{READING}|{STORED}"
COUNT = r"Race: \w+\[\d\]: \d arrivals in a phase of \d"
DEADLOCK = r"Deadlock: .* waits for "
UNFENCED = r"Race: .* finds {}(\[\d\])+ (stored|initialized) without fence_async_shared"
LOADED = r"Race: a copy of .* overwrites {}\[\d\]: .* loaded it without fence_async_shared"
VALUES = "the output|not close|equal|assert"
RUNS = [("eager", 0), ("late", 0), *(("random", seed) for seed in range(12))]


def without(line: str, before: str = "", after: str = "") -> tuple[str, str]:
    return before + line + after, before + after


MUTATIONS = [
    Mutation("a slot is filled without asking", *without("    acquire(mem, c, plan)\n"), "many tiles",
             f"{TAKEN}|{COUNT}"),
    Mutation("Q is replaced while it is in use", *without(
        "            mbarrier.wait(mem.q_free.index(w), (turn & 1) ^ 1)\n"), "many tiles",
             f"{TAKEN}|{COUNT}|{LOADED.format('q')}"),
    Mutation("values are not waited for",
             *without("    mbarrier.wait(mem.v_full.index(_buffer(number, WG)), (number >> 1) & 1)\n"),
             "more keys", LANDING),
    Mutation("the parity of values stays", "WG)), (number >> 1) & 1)", "WG)), 0 * number)",
             "more keys", f"{TAKEN}|{DEADLOCK}|{COUNT}"),
    Mutation("a step that skips counts a copy", "        asked = _ask(desc_v, mem, at, block, asked,",
             "        _ask(desc_v, mem, at, block, asked,", "more keys", f"{TAKEN}|{DEADLOCK}|{COUNT}",
             (("    return Row(p, acc, shift, sums, keep, asked)",
               "    return Row(p, acc, shift, sums, keep, asked + 1)"),)),
    Mutation("one buffer for values", "2 * WG + (number & 1)", "2 * WG", "more keys",
             f"{TAKEN}|{DEADLOCK}|{COUNT}"),
    Mutation("the output leaves through the buffer that is filled next", "_buffer(asked - 1, WG))",
             "_buffer(asked, WG))", "many tiles", TAKEN),
    Mutation("values overwrite an output that is leaving", *without(
        "        tma.store_wait(0)  # the output of the tile before has left the other buffer\n"),
             "many tiles", READING),
    Mutation("P V is not waited for", "            acc = warpgroup_mma_wait(0, deps=(product,))  # [64, D]\n",
             "            acc = warpgroup_mma_wait(1, deps=(product,))\n", "more keys",
             "Race: a product is used with 1 outstanding"),
    Mutation("a slot is not released", *without("    release(mem, c, plan)\n", after="    if plan.flip"),
             "more keys", f"{DEADLOCK}|{TAKEN}"),
    Mutation("a block that only the other sees is not released",
             *without("            release(mem, i, plan)\n"), "causal", DEADLOCK),
    Mutation("keys are not waited for", *without("    wait_k(mem, c, plan)\n"), "more keys", LANDING),
    Mutation("one place for the next tile", "mem.next_tile.index(b * COUNT + w)", "mem.next_tile.index(w)",
             "many tiles", f"{OVERWRITTEN}|{COUNT}|{DEADLOCK}|{STORED}",
             (("(number & 1) * COUNT", "0 * number"),), words),
    Mutation("the output leaves before it is there", *without(
        "    fence_async_shared()\n", after="    tma.async_copy_shared"), "more keys", UNFENCED.format("v")),
    Mutation("Q is overwritten after a load without a fence",
             "fence_async_shared()  # between the load of Q and the copy that overwrites it", "pass",
             "many tiles", LOADED.format("q")),
    Mutation("a kept block is not the pending one", "return Row(p, acc, shift, sums, keep, asked)",
             "return Row(p, acc, shift, sums, 0 * keep, asked)", "more keys", f"{VALUES}|{TAKEN}"),
    Mutation("the diagonal is decided on", "        keep = gl.where(always, 1, keep)\n",
             "        keep = gl.where(always, keep, keep)\n", "all skipped", VALUES),
    Mutation("the threshold to base e", "limits.m) * LOG2_E", "limits.m)", "more keys", VALUES),
    Mutation("the threshold of another head", "i_h * limits.h", "i_b * limits.h", "batches", VALUES),
    Mutation("an old maximum is not rescaled", "        acc = softmax.rescale(acc, alpha, changed)\n",
             "", "steep", VALUES),
    Mutation("rows that are not there vote", " | (row + o_m >= work.S_q)[:, None]", "", "low", VALUES),
    Mutation("warps decide alone", "bar.red.or.pred q, {barrier}, 128, q;", "", "more keys",
             "ValueError: .* its threads differ in it", module=warpgroup_vote),
    Mutation("a thread votes for one of its rows", "setp.ne.or.b32 q, $3, 0, q;", "", "more keys", VALUES,
             module=warpgroup_vote),
    Mutation("both vote at one barrier", "gl.where(low, 0, 1), row, TOGETHER + WG)",
             "gl.where(low, 0, 1), row, TOGETHER)", "more keys",
             "NameError: .* reads vote_12, which nothing has declared"),
    Mutation("threads keep their own largest score", '"max.f32 a, a, b"', '"mov.b32 b, b"',
             "steep", VALUES, module=thread_shift),
    Mutation("the second row of a thread is not asked", "setp.gtu.or.f32 q, a", "setp.gtu.or.f32 q, 0f0",
             "steep", VALUES, module=thread_shift),
    Mutation("alpha is that of no change", "ex2.approx.ftz.f32 {alpha[row]}, a", "ex2.approx.ftz.f32 b, a",
             "steep", VALUES, module=thread_shift),
    Mutation("the limit of other units", "low = (tops * qk_scale < limit)", "low = (tops < limit)",
             "more keys", VALUES),
]  # fmt: skip
CALLS["low"] = Call(S_q=70, S_k=400, threshold=-0.01, sm_scale=-1e-3, positive=True)
CALLS["steep"] = Call(S_q=200, S_k=640, threshold=-math.inf, sm_scale=2.0)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_is_caught(mutation: Mutation) -> None:
    mutants: dict[str, ModuleType] = mutate(replace(mutation, module=mutation.module or hopper_kernel))
    for order, seed in RUNS:
        try:
            check(CALLS[mutation.caught_by], order, seed, mutants=mutants)
        except (AssertionError, Deadlock, Race, ValueError, NameError) as error:
            found = f"{type(error).__name__}: {error}"
            assert re.search(mutation.verdict, found), found
            return
    pytest.fail(f"not noticed: {mutation.bug}")

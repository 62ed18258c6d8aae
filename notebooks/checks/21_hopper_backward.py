"""Checks of the exercises of chapter 21. Each raises AssertionError with a hint if the answer is wrong."""

import re
from itertools import product

import torch

from attnlib.bench.shapes import Shape
from attnlib.book import changes
from attnlib.book.exercises import judge_gradients, paced
from attnlib.emulator.ptx import elements_of_threads

STEP = "21_hopper_backward"
OF_THE_KERNEL = set(range(8, 16))
"""Numbers of the hardware's barriers that the teaching kernel uses."""
WIDE = 2
"""Place of the wide kernel among the chapter's variants."""
OF_A_STEP = 6
"""Products that a consumer starts in a step, the two of dQ among them."""


def check_mended_exchange(functions):
    """Right in each order, with dQ by rows and by columns."""
    module = changes.with_functions(STEP, functions)
    for shape in (Shape(1, 1, 400, 64), Shape(1, 1, 300, 128, causal=False)):
        judge_gradients(module.gradients, shape)


def check_in_turns(functions):
    """Right in each order, with no barrier more, and one of the consumers is always the first."""
    module = changes.with_functions(STEP, functions)
    with paced() as pace:
        for shape in (Shape(1, 1, 400, 64), Shape(1, 1, 300, 128, causal=False)):
            judge_gradients(module.gradients, shape)
    more = ", ".join(map(str, sorted(pace.named - OF_THE_KERNEL)))
    assert not more, f"right, but with the hardware's barriers {more} besides the kernel's own, 8 to 15"
    least = min(pace.ahead.values())
    assert least <= OF_A_STEP // 2, (
        f"right, but no consumer is always the first: in some run either is {least} products ahead of the "
        f"other, or more. A step has {OF_A_STEP}"
    )


def check_pausing(functions):
    """A pause behind each addition, none elsewhere, and the wide kernel is as right as before."""
    module = changes.with_functions(STEP, functions, variant=WIDE)
    for n in (16, 64):
        asm = module.add_asm.fn(n)
        found = re.findall(r"red\.global|nanosleep\.u32 \d+|bra DONE|DONE:", asm)
        want = ["bra DONE", *["red.global", "nanosleep.u32 16"] * (n // 4), "DONE:"]
        assert found == want, (
            f"{n} elements: expected {n // 4} times an addition and then nanosleep.u32 16, all behind the "
            f"branch and before DONE, got {', '.join(found)}"
        )
    judge_gradients(module.gradients, Shape(1, 1, 150, 256))


def check_rows_of_sums(rows_of_sums):
    """By which thread has which element of an accumulator."""
    for d in (64, 128):
        place = torch.from_numpy(elements_of_threads((64, d)))  # [128 threads, D / 2 elements]
        in_memory = place.reshape(128, d // 8, 4).permute(1, 0, 2).reshape(-1)  # four of each thread in a row
        truth = torch.arange(64 * d, dtype=torch.float32)
        found = rows_of_sums(truth[in_memory])
        assert tuple(found.shape) == (64, d), f"D={d}: expected shape (64, {d}), got {tuple(found.shape)}"
        wrong = int((found != truth.reshape(64, d)).sum())
        assert wrong == 0, f"D={d}: {wrong} of {64 * d} numbers are in a wrong place"


def check_turn(turn):
    """By counting the programs of later keys that see a query of the block."""
    for S_q, S_k in ((512, 512), (300, 700), (700, 300), (65, 129), (1, 128), (400, 385)):
        blocks = -(-S_k // 128)
        for m in range(-(-S_q // 64)):
            last_query = min(64 * m + 63, S_q - 1)
            adds = [128 * n <= last_query + S_k - S_q for n in range(blocks)]
            for n in (n for n in range(blocks) if adds[n]):
                want, got = sum(adds[n + 1 :]), turn(n, m, S_q, S_k)
                assert got == want, (
                    f"{S_q} queries, {S_k} keys, keys of block {n}, queries of block {m}: expected {want} "
                    f"programs before, got {got}"
                )


def check_shared_kib(shared_kib):
    """KiB of some plans."""
    for d, block_m, stages, buffers in product((64, 128), (64, 128), (1, 2, 3), (1, 2, 4)):
        halves = 2 * 128 * d + stages * 2 * block_m * d + 2 * buffers * 64 * block_m
        want = (2 * halves + stages * 2 * 4 * block_m) / 1024
        got = shared_kib(d, block_m, stages, buffers)
        assert abs(got - want) < 1e-6, (
            f"d={d}, block_m={block_m}, {stages} slots, {buffers} buffers: expected {want} KiB, got {got}"
        )

"""Checks of the exercises of chapter 11."""

from unittest import mock

from attnlib.bench.shapes import Shape
from attnlib.book.exercises import ORDERS, judge_gluon, watched
from attnlib.emulator.language import Language
from attnlib.emulator.run import Emulated


def check_place(place):
    """Slots and parities of a ring: a wait must last until its completion, and no longer."""
    for stages in (1, 2, 3, 4, 5):
        full, free = [0] * stages, [0] * stages  # how often each barrier has completed
        for i in range(6 * stages + 1):
            case = f"tile {i}, {stages} slots"
            slot, full_parity, free_parity = place(i, stages)
            assert slot == i % stages, f"{case}: tiles take slots in turn; expected {i % stages}, got {slot}"
            assert full_parity in (0, 1) and free_parity in (0, 1), f"{case}: a parity is 0 or 1"
            hint = "before the slot was ever used nobody will release it" if free[slot] == 0 else ""
            assert free[slot] % 2 != free_parity, (
                f"{case}: the slot is free, but the producer would wait for parity {free_parity}; {hint}"
            )
            assert full[slot] % 2 == full_parity, (
                f"{case}: the copy has not landed, but a consumer would pass with parity {full_parity}"
            )
            full[slot] += 1  # the copy lands
            later = place(i + stages, stages)[2]
            assert free[slot] % 2 == later, (
                f"tile {i + stages}, {stages} slots: tile {i} is still there, but the producer would pass"
            )
            free[slot] += 1  # both consumers have read it


def check_registers(registers):
    """Start and share for several numbers of consumers and producers of several sizes."""
    expected = {
        (2, 24): (168, 240),
        (3, 24): (128, 160),
        (4, 24): (96, 112),
        (3, 32): (128, 160),
        (2, 40): (168, 232),
        (4, 40): (96, 104),
        (5, 24): (80, 88),
        (7, 24): (64, 64),
    }
    for (consumers, producer), want in expected.items():
        got = tuple(registers(consumers, producer))
        case = f"{consumers} consumers, producer with {producer}"
        hint = " (of each thread's share, in steps of 8: rounded down)"
        assert got[0] == want[0], f"{case}: expected {want[0]} at the start, got {got[0]}{hint}"
        total = consumers * got[1] + producer
        assert total <= (consumers + 1) * want[0], (
            f"{case}: {consumers} x {got[1]} + {producer} is more than the {(consumers + 1) * want[0]} "
            "that the CTA got at the start, for one thread of each warpgroup"
        )
        assert got[1] == want[1], f"{case}: expected {want[1]} for a consumer's thread, got {got[1]}"


_OUTCOMES = {
    "no V barrier": ("wrong data", "that K has landed says nothing of V: each copy lands when it likes"),
    "V first": ("fine", "each buffer still has its two barriers, and the consumers wait for each by itself"),
    "one for both": ("wrong data", "two arrivals complete the barrier, whoever they come from"),
    "lazy consumer": ("fine", "the slots are not filled again after the last tile"),
    "late release": ("fine", "it costs time, but what is released is released after it was read"),
    "K two ahead": ("deadlock", "who waits for whom? Follow the slot of the first K from tile 0 to tile 2"),
    "parity of the tile": ("wrong data", "tile 1 is the first in slot 1: what does a wait for parity 1 say?"),
}


def check_outcome(outcome):
    """What can happen after each of the seven changes."""
    for change, (want, hint) in _OUTCOMES.items():
        got = outcome(change)
        assert got in ("fine", "deadlock", "wrong data"), (
            f"{change}: expected 'fine', 'deadlock' or 'wrong data', got {got!r}"
        )
        assert got == want, f"{change}: not {got!r}. {hint[0].upper()}{hint[1:]}"


def check_attention_of_three(attention_of_three):
    """Right in each order, by three consumers and a producer, whose registers fit an SM."""
    warps_and_registers = []

    def specialize(language, functions, warps, registers, start=Language._warp_specialize):
        warps_and_registers.append((list(warps), list(registers)))
        return start(language, functions, warps, registers)

    at_start = []

    def launched(kernel, grid, start=Emulated.__getitem__):
        def launch(*args, **options):
            at_start.append(options.get("maxnreg"))
            return start(kernel, grid)(*args, **options)

        return launch

    with (
        watched() as partitions,
        mock.patch.object(Language, "_warp_specialize", specialize),
        mock.patch.object(Emulated, "__getitem__", launched),
    ):
        for shape in (Shape(1, 1, 700, 64), Shape(1, 2, 200, 64, causal=False), Shape(2, 1, 65, 128)):
            judge_gluon(attention_of_three, shape)
    consumers = sum("Product" in did for did in partitions)
    producers = sum("CopyIn" in did for did in partitions)
    assert consumers == 3 * producers, (
        f"expected three partitions with products for each with copies, got {consumers} and {producers}"
    )
    programs = len(ORDERS) * (4 + 2 * 2 + 2 * 1)
    assert producers == programs, f"expected a CTA for each 192 rows, {programs} in all, got {producers}"
    for maxnreg in at_start:  # of 512 threads: four warpgroups, one of them the producer's
        assert maxnreg is not None and 512 * maxnreg <= 65536, (
            f"maxnreg={maxnreg}: 512 threads begin with as many registers each, of the 65536 of an SM"
        )
    for warps, registers in warps_and_registers:
        assert warps == [4, 4, 1], f"warps of the workers after the first: expected [4, 4, 1], got {warps}"
        held = 128 * (registers[0] + sum(registers))  # the first worker has as many as the second
        assert len(registers) == 3 and held <= 65536, (
            f"registers of the workers after the first: {registers}; with the first they are {held} of 65536"
        )

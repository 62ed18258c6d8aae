"""Checks of the exercises of chapter 15. Each raises AssertionError with a hint if the answer is wrong."""

from itertools import product

from attnlib.bench.shapes import Shape
from attnlib.book import changes
from attnlib.book.exercises import judge_gluon, watched

STEP = "15_teaching"
PLANS = 'PLANS = {%d: {"block_n": 64, "stages": 4, "o_columns": %d}}'


def check_in_four_goes(functions):
    """Right with a buffer of all, half and a quarter of the columns, in as many goes."""
    for d, goes in ((64, 4), (64, 1), (128, 2), (128, 4)):
        module = changes.with_functions(STEP, functions, PLANS % (d, d // goes))
        shape = Shape(1, 2, 130, d)
        with watched() as partitions:
            judge_gluon(module.attention, shape)
        sent = sum(word == "CopyOut" for did in partitions for word in did)
        want = 4 * 2 * 2 * 2 * goes  # orders, heads, tiles, consumers
        assert sent == want, f"{goes} goes of {d // goes} columns: expected {want} copies, got {sent}"


def check_fits(fits):
    """Bytes and registers of some plans."""
    cases = [
        (d, block_n, stages, d // parts, d // q_part if q_part else 0, warpgroups)
        for d, block_n, stages, parts, q_part, warpgroups in product(
            (64, 128, 256), (64, 128), (2, 4, 8), (1, 2), (0, 1, 2), (1, 2, 3, 4)
        )
    ]
    cases.append((64, 80, 10, 8, 0, 3))  # would fit but for the 1 KiB
    for d, block_n, stages, o_columns, q_columns, warpgroups in cases:
        used = 2 * (64 * warpgroups * (d + o_columns) + 2 * stages * block_n * d) + 1024
        own = min(240, (65536 - 128 * 24) // (128 * warpgroups) // 8 * 8)
        need = d // 2 + block_n // 2 + block_n // 4 + q_columns // 4 + 32
        want = used <= 232448 and need <= own
        got = bool(fits(d, block_n, stages, o_columns, q_columns, warpgroups))
        assert got == want, (
            f"d={d}, block_n={block_n}, stages={stages}, o_columns={o_columns}, q_columns={q_columns}, "
            f"{warpgroups} consumers: {used} bytes, {need} registers of {own}: expected {want}, got {got}"
        )

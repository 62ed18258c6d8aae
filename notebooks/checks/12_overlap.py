"""Checks of the exercises of chapter 12."""

import random
from itertools import product

from attnlib.bench.shapes import Shape
from attnlib.book.exercises import judge_gluon, watched

START = ["SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR18+0x280e0], R7", "WARPGROUP.ARRIVE"]
PRODUCTS = [
    "HGMMA.64x128x16.F32 R24, gdesc[UR12], RZ, !UPT",
    "HGMMA.64x128x16.F32 R24, gdesc[UR36], R24, gsb0",
]
EXP = ["FFMA R10, R28, R5, -R6", "MUFU.EX2 R10, R10", "MUFU.EX2 R11, R11"]
ONE, NONE = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
LISTINGS = [
    (
        "wait 0 before the exponentials",
        [*START, *PRODUCTS, *PRODUCTS, ONE, "FMNMX R3, R3, R4", NONE, *EXP],
        False,
    ),
    (
        "wait 1 before them, wait 0 behind",
        [*START, *PRODUCTS, *PRODUCTS, ONE, *EXP, "@P1 PMTRIG 0x1", NONE],
        True,
    ),
    ("one product, then wait 0", [*START, *PRODUCTS, NONE, *EXP, *PRODUCTS, NONE], False),
    ("a wait for something else (SB0)", [*START, *PRODUCTS, ONE, "DEPBAR.LE SB0, 0x0", *EXP, NONE], True),
    ("a reciprocal, which is no exponential", [*PRODUCTS, ONE, "MUFU.RCP R4, R4", NONE, *EXP], False),
    ("instructions with predicates", ["@!P0 " + PRODUCTS[1], "@P2 " + EXP[1], NONE], True),
    ("products only behind the exponentials", [*EXP, *PRODUCTS, NONE], False),
    ("a wait, then more products", [*PRODUCTS, NONE, *PRODUCTS, ONE, *EXP, NONE], True),
]


def check_overlaps(overlaps):
    """Loops with the wait for P V on either side of the exponentials, and some traps."""
    for name, listing, want in LISTINGS:
        got = overlaps(list(listing))
        assert isinstance(got, bool), f"expected True or False, got {type(got).__name__}"
        assert got == want, f"{name}: expected {want}, got {got}"


def _run(calls, seed):
    """Both lists on a model of the barriers, in a random interleaving: (order of the products, threads left
    at each barrier)."""
    choose, at, threads = random.Random(seed), [0, 0], {}
    asleep, order = {}, []  # asleep: consumer -> barrier at which it waits
    while True:
        ready = [w for w in (0, 1) if w not in asleep and at[w] < len(calls[w])]
        if not ready:
            break
        w = choose.choice(ready)
        what, where = calls[w][at[w]]
        at[w] += 1
        if what == "products":
            order.append(w)
            continue
        threads[where] = threads.get(where, 0) + 128
        if what == "sync":
            asleep[w] = where
        if threads[where] == 256:
            threads[where] = 0
            asleep = {v: b for v, b in asleep.items() if b != where}
    for w, barrier in asleep.items():
        raise AssertionError(
            f"consumer {w} waits at barrier {barrier} forever, after products of {order or 'nobody'}; "
            f"{threads[barrier]} of 256 threads have arrived there"
        )
    return order, threads


def check_turns(turns):
    """Both consumers get through, alternate, and leave the barriers as the protocol does."""
    for trips in (1, 2, 7, 0):
        calls = [turns(w, trips) for w in (0, 1)]
        for w, listed in enumerate(calls):
            assert isinstance(listed, list), f"expected a list, got {type(listed).__name__}"
            known = all(isinstance(call, tuple) and len(call) == 2 for call in listed)
            assert known, "expected pairs such as ('sync', 8)"
            for what, where in listed:
                assert what in ("sync", "arrive", "products"), (
                    f"expected sync, arrive or products, got {what!r}"
                )
                allowed = (w,) if what == "products" else (8, 9)
                assert where in allowed, f"consumer {w}: unexpected {(what, where)}"
            count = sum(what == "products" for what, _ in listed)
            assert count == trips, f"{trips} trips: consumer {w} starts products {count} times"
        for seed in range(40):
            order, threads = _run(calls, seed)
            want = [0, 1] * trips
            assert order == want, f"{trips} trips: the products came in the order {order}, expected {want}"
        left = (threads.get(8, 0), threads.get(9, 0))
        assert left == (128, 0), (
            f"{trips} trips: expected 128 and 0 threads left at barriers 8 and 9, got {left}"
        )


def check_utilization(utilization):
    """The largest of three bounds, for products and softmax of several sizes."""
    sizes = [(256, 256, 528), (512, 512, 528), (512, 512, 412), (100, 300, 50), (300, 100, 1000)]
    for (qk, pv, softmax), late, consumers in product(sizes, (False, True), (1, 2)):
        chain = qk + max(pv, softmax) if late else qk + pv + softmax
        want = consumers * (qk + pv) / max(chain, consumers * (qk + pv), consumers * softmax)
        got = utilization(qk, pv, softmax, late, consumers)
        assert isinstance(got, int | float), f"expected a number, got {type(got).__name__}"
        case = (
            f"qk {qk}, pv {pv}, softmax {softmax}, {'late' if late else 'in order'}, {consumers} consumer(s)"
        )
        assert abs(got - want) < 1e-9, f"{case}: expected {want:.3f}, got {got:.3f}"


def check_early_attention(early_attention):
    """Right in each order, and the scores of the next tile are in flight during each softmax but the last."""
    with watched() as partitions:
        for seqlen in (600, 100):  # more tiles than slots, the last not full; one tile
            judge_gluon(early_attention, Shape(1, 1, seqlen, 64, causal=False))
    for did in partitions:
        started, in_flight, products = 0, 0, did.count("Product")
        for word in did:
            if word == "Product":
                started, in_flight = started + 1, in_flight + 1
            elif word.startswith("wait"):
                in_flight = min(in_flight, int(word.split()[1]))
            elif word == "exp2" and started < products - 1:  # in the last trip only P V is still to start
                assert in_flight == 1, (
                    f"right, but in the softmax of trip {started // 2} the scores of the next tile are "
                    "not in flight"
                )

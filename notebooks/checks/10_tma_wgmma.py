"""Checks of the exercises of chapter 10."""

import itertools

from attnlib.bench.shapes import Shape
from attnlib.book.exercises import judge_gluon


def check_byte_of(byte_of):
    """Every element of tiles of several sizes: a place of its own, the right one, and no bank conflicts."""
    for rows, width in ((64, 64), (64, 128), (128, 64), (64, 256)):
        places = {}
        for row, column in itertools.product(range(rows), range(width)):
            got = byte_of(row, column, rows, width)
            assert isinstance(got, int), f"expected an int, got {type(got).__name__}"
            assert 0 <= got < 2 * rows * width and got % 2 == 0, (
                f"tile {rows} x {width}: element ({row}, {column}) at byte {got}, outside of the tile or odd"
            )
            assert got not in places, (
                f"tile {rows} x {width}: elements {places[got]} and ({row}, {column}) both at byte {got}"
            )
            places[got] = (row, column)
        panel = {column: byte_of(0, column, rows, width) // (128 * rows) for column in range(width)}
        wrong = [column for column in panel if panel[column] != column // 64]
        assert not wrong, (
            f"tile {rows} x {width}: column {wrong[0]} belongs to panel {wrong[0] // 64}, each of "
            f"{128 * rows} bytes, and lies in number {panel[wrong[0]]}"
        )
        for row, column in itertools.product(range(rows), range(width)):
            line, place = divmod(places_of(byte_of, row, column, rows, width), 128)
            assert line == row, f"element ({row}, {column}) lies in line {line} of its panel, expected {row}"
            chunk = column % 64 // 8
            assert place // 16 == chunk ^ row % 8, (
                f"element ({row}, {column}) is in chunk {chunk} of its row and must be stored as number "
                f"{chunk ^ row % 8}; got {place // 16}"
            )
            assert place % 16 == 2 * (column % 8), (
                f"element ({row}, {column}) is number {column % 8} of its chunk, byte {2 * (column % 8)}"
            )


def places_of(byte_of, row, column, rows, width):
    """The byte of an element inside of its panel."""
    return byte_of(row, column, rows, width) - column // 64 * 128 * rows


def check_MBarrier(MBarrier):
    """Phases by arrivals, by bytes and by both, in either order; then the loop of the chapter."""
    bar = MBarrier(1)
    assert not bar.passed(0), "a fresh barrier is in phase 0: a wait for parity 0 must block"
    assert bar.passed(1), "a fresh barrier lets a wait for parity 1 through, as if a phase -1 had ended"
    bar.arrive(expect=4096)
    assert not bar.passed(0), "all arrivals are there, but 4096 bytes are outstanding: phase 0 goes on"
    bar.land(1024)
    assert not bar.passed(0), "3072 bytes are outstanding: phase 0 goes on"
    bar.land(3072)
    assert bar.passed(0), "arrival and bytes are complete: phase 0 has ended, a wait for 0 goes through"
    assert not bar.passed(1), "now phase 1 runs: a wait for parity 1 must block"
    two = MBarrier(2)
    two.arrive()
    assert not two.passed(0), "one of two arrivals: phase 0 goes on"
    two.arrive(expect=16)
    two.land(16)
    assert two.passed(0), "two arrivals and all bytes: phase 0 has ended"
    two.arrive()
    assert not two.passed(1), "each phase needs all its arrivals anew: one of two is missing"
    two.arrive()
    assert two.passed(1), "phase 1 had two arrivals and no bytes: it has ended"
    assert not two.passed(0), "phase 2 has parity 0, as phase 0 had: a wait for parity 0 blocks again"
    early = MBarrier(2)
    early.arrive(expect=16)
    early.land(16)
    assert not early.passed(0), "all bytes have landed, but one of two arrivals is missing: phase 0 goes on"
    early.arrive()
    assert early.passed(0), "the second arrival is there, and no byte is outstanding: phase 0 has ended"
    _loop(MBarrier)


def _loop(MBarrier, trips=5, nbytes=16384):
    k_full, v_full = MBarrier(1), MBarrier(1)
    k_full.arrive(expect=nbytes)
    for i in range(trips):
        v_full.arrive(expect=nbytes)
        assert not k_full.passed(i & 1), f"trip {i}: K is still on its way, its wait must block"
        k_full.land(nbytes)
        assert k_full.passed(i & 1), f"trip {i}: K has landed, its wait must go through"
        if i + 1 < trips:
            k_full.arrive(expect=nbytes)
        assert not v_full.passed(i & 1), f"trip {i}: V is still on its way, its wait must block"
        v_full.land(nbytes)
        assert v_full.passed(i & 1), f"trip {i}: V has landed, its wait must go through"


def check_clocks_per_trip(clocks_per_trip):
    """Against a simulation of sixty trips, for latencies from nothing to far too long."""
    for product, softmax in ((256, 330), (128, 300), (512, 420), (100, 1000)):
        for latency in (0, 300, 600, product + softmax, product + softmax + 1, 1500, 4000):
            want = _simulated(product, softmax, latency)
            got = clocks_per_trip(product, softmax, latency)
            assert isinstance(got, int | float), f"expected a number, got {type(got).__name__}"
            assert abs(got - want) < 1e-6, (
                f"product {product}, softmax {softmax}, latency {latency}: a trip takes {want:g} clocks, "
                f"got {got:g}"
            )


def _simulated(product, softmax, latency, trips=60):
    """Clocks of the last trip: every step starts as soon as what it needs is there."""
    end, k_ready, starts = 0, latency, []
    for _ in range(trips):
        starts.append(end)
        v_ready = end + latency
        first = max(end, k_ready) + product
        k_ready = first + latency
        end = max(first + softmax, v_ready) + product
    return (starts[-1] - starts[trips // 2]) / (trips - 1 - trips // 2)


def check_paired_attention(paired_attention):
    """Right in each order, for one tile, an even and an odd number of them."""
    for shape in (Shape(1, 1, 320, 64), Shape(1, 2, 200, 128, causal=False), Shape(1, 1, 50, 64)):
        judge_gluon(paired_attention, shape)

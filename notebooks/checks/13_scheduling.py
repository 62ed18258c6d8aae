"""Checks of the exercises of chapter 13."""

import heapq
import math

from attnlib.bench.shapes import Shape
from attnlib.book.exercises import judge_gluon, watched


def check_snake(snake):
    """Each job once, each round to and fro, for whole and short rounds."""
    for jobs, workers in ((12, 4), (10, 4), (3, 5), (1024, 132), (7, 1)):
        case = f"{jobs} jobs, {workers} workers"
        got = [list(mine) for mine in snake(jobs, workers)]
        assert len(got) == workers, f"{case}: expected {workers} lists, got {len(got)}"
        everything = sorted(job for mine in got for job in mine)
        once = everything == list(range(jobs))
        assert once, f"{case}: each job must occur exactly once, got {everything[:20]}"
        for worker, mine in enumerate(got):
            for turn, job in enumerate(mine):
                at = worker if turn % 2 == 0 else workers - 1 - worker
                want = turn * workers + at
                assert job == want, f"{case}: worker {worker}, round {turn}: expected job {want}, got {job}"


def check_section_heads(section_heads):
    """The widest section that fits and divides the heads."""
    mib = 1 << 20
    cases = (
        (8192, 128, 32, 16 * mib),
        (8192, 128, 12, 32 * mib),
        (4096, 64, 128, 16 * mib),
        (16384, 256, 8, 16 * mib),
        (16384, 256, 8, 8 * mib),
        (1000, 128, 7, 3 * mib),
        (512, 64, 5, 64 * mib),
        (4096, 128, 40, 47 * mib),
    )
    for seqlen, head_dim, heads, budget in cases:
        fitting = [h for h in range(1, heads + 1) if heads % h == 0 and 4 * h * seqlen * head_dim <= budget]
        want = max(fitting, default=1)
        got = section_heads(seqlen, head_dim, heads, budget)
        case = f"S = {seqlen}, D = {head_dim}, {heads} heads, {budget / mib:g} MiB"
        assert got == want, f"{case}: expected {want} heads, got {got}"


def _makespan(times, lead, workers):
    free = [(0.0, 0.0, worker) for worker in range(workers)]
    for time in times:
        _, start, worker = heapq.heappop(free)
        heapq.heappush(free, (max(start, start + time - lead), start + time, worker))
    return max(end for _, end, _ in free)


def check_bad_for_early(bad_for_early):
    """Lengths on which drawing early ends at least 1.5 times as late as drawing late."""
    for workers in (2, 3, 8, 132):
        times = [float(time) for time in bad_for_early(workers)]
        assert times, f"{workers} workers: expected at least one job, got none"
        assert len(times) <= 4 * workers, f"{workers} workers: at most {4 * workers} jobs, got {len(times)}"
        good = all(math.isfinite(time) and time > 0 for time in times)
        assert good, f"{workers} workers: expected positive lengths, got {times[:10]}"
        early, late = (_makespan(times, lead, workers) for lead in (math.inf, 0.0))
        assert early >= 1.5 * late, (
            f"{workers} workers: early ends at {early:g}, late at {late:g}, which is {early / late:.2f} times"
        )


def check_order(order):
    """Each number of launches with one section, equal ones, and a large last one."""
    cases = (3, 4, 4, 0), (5, 6, 2, 4), (4, 7, 1, 3), (1, 9, 2, 4), (6, 8, 2, 0)
    for blocks, heads, section, last in cases:
        want, first = [], 0
        while first < heads:
            together = heads - first if first >= last else section
            want += [(block, first + head) for block in range(blocks) for head in range(together)]
            first += together
        got = [tuple(job) for job in order(blocks, heads, section, last).tolist()]
        case = f"{blocks} blocks, {heads} heads, sections of {section}, the last one from head {last} on"
        assert len(got) == len(want), f"{case}: expected {len(want)} jobs, got {len(got)}"
        for number, (mine, right) in enumerate(zip(got, want, strict=True)):
            assert mine == right, f"{case}: number {number}: expected (block, head) {right}, got {mine}"


def check_owned_attention(owned_attention):
    """Right in each order, with several jobs for a program, and Q is released before O begins to leave."""
    with watched() as partitions:
        for shape in (Shape(1, 3, 300, 64), Shape(1, 5, 100, 64, causal=False)):
            judge_gluon(owned_attention, shape)
    for did in partitions:
        released = [i for i, word in enumerate(did) if word.startswith("arrive q_free")]
        leaves = [i for i, word in enumerate(did) if word == "CopyOut"]
        late = [job for job, (r, c) in enumerate(zip(released, leaves, strict=False), 1) if r > c]
        assert not late, "right, but Q's buffer is released only after the copy of O was started"
        assert len(released) == len(leaves), "each job of a consumer releases Q once and stores O once"


def _lengths(work, heads, section, last, mib, fits, price):
    """In the order in which jobs are drawn, with the price of each section."""
    found, first = [], 0
    while first < heads:
        together = heads - first if first >= last else min(section, heads - first)
        slower = 1 + price * max(together * mib - fits, 0)
        found += [length * slower for length in work for _ in range(together)]
        first += together
    return found


def check_choose(choose):
    """No pair ends a launch earlier."""
    diagonal = [63 - 2 * block + 1.2 for block in range(32)]
    window = [17.2] * 24 + [2.0 * n + 1.2 for n in range(8, 0, -1)]
    cases = (
        (diagonal, 32, 3.1, 16, 0.0),
        (diagonal, 32, 3.1, 16, 0.0012),
        (window, 24, 6.3, 16, 0.01),
        ([300.0, 1.0], 97, 1.0, 2, 0.1),
    )
    for work, heads, mib, fits, price in cases:
        case = f"{len(work)} jobs a head, {heads} heads of {mib} MiB, {price} for each MiB beyond {fits}"
        section, last = choose(list(work), heads, mib, fits, price)
        assert section in [1 << n for n in range(heads.bit_length())], (
            f"{case}: expected a power of two up to {heads}, got {section}"
        )
        assert 0 <= last < heads and last % section == 0, (
            f"{case}: expected a multiple of {section} below {heads}, got {last}"
        )
        ends = {
            (size, head): _makespan(_lengths(work, heads, size, head, mib, fits, price), 0.0, 132)
            for size in (1 << n for n in range(heads.bit_length()))
            for head in range(0, heads, size)
        }
        best = min(ends, key=ends.__getitem__)
        assert ends[section, last] <= ends[best] * (1 + 1e-9), (
            f"{case}: ends at {ends[section, last]:.1f} with {section, last}, at {ends[best]:.1f} with {best}"
        )

"""Checks of the exercises of chapter 40."""

from collections.abc import Callable

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_window_tile(kernel: Callable) -> None:
    """`kernel[(1,)](p_ptr, out_ptr, row, key, window, BLOCK_M, BLOCK_N)`; patterns of zeros and of ones show
    whether all scores come from it. Zeros lie behind the pattern, where a shift that is not clamped reads."""
    for rows, keys in ((32, 16), (16, 32)):
        side = 2 * max(rows, keys)
        held = torch.zeros(1 << 16, dtype=torch.int8, device=DEVICE)
        pattern = held[: side * side].view(side, side)
        pattern.copy_(torch.ones_like(pattern).tril_())
        for row, key, window in ((0, 0, 1), (64, 64, 8), (64, 48, 20), (64, 80, 5), (96, 16, 70), (96, 0, 40),
                                 (0, 96, 9), (128, 64, 64), (64, 64, 1000), (320, 16, 300)):  # fmt: skip
            got = torch.full((rows * keys + 1,), 77, dtype=torch.int8, device=DEVICE)
            kernel[(1,)](pattern, got, row, key, window, rows, keys)
            case = f"tile of {rows} x {keys} at row {row}, key {key}, window {window}"
            assert got[-1] == 77, f"{case}: something was written beyond the tile"
            o_m, o_n = row + torch.arange(rows)[:, None], key + torch.arange(keys)[None, :]
            want = (o_n <= o_m) & (o_n > o_m - window)
            wrong = ((got[:-1].cpu().view(rows, keys) != 0) != want).sum().item()
            assert not wrong, f"{case}: {wrong} of {rows * keys} scores are wrong"
        got = torch.ones(rows * keys, dtype=torch.int8, device=DEVICE)
        kernel[(1,)](torch.zeros_like(pattern), got, 64, 64, 8, rows, keys)
        assert not got.any(), "with a pattern of zeros no score is seen: is the pattern read?"
        held.fill_(1)
        kernel[(1,)](pattern, got, 64, 64, 8, rows, keys)
        one = "with a pattern of ones all scores are equal: is something else compared for each of them?"
        assert got.ne(0).unique().numel() == 1, one


def check_best_chunks(answer: Callable) -> None:
    for work, send, launch, latency, most in (
        (1.64, 0.9, 0.015, 0.02, 32), (1, 0, 0.01, 0, 16), (0.1, 1, 0, 0, 8), (10, 2, 0, 0, 64),
        (0.25, 0.2, 0.02, 0.02, 32), (5, 5, 0.001, 0.3, 20), (3, 1, 0.5, 0.5, 1),
    ):  # fmt: skip
        ends = []
        for count in range(1, most + 1):
            computed = sent = 0.0
            for _ in range(count):
                computed += work / count + launch
                sent = max(computed, sent) + send / count + latency
            ends.append(round(sent, 9))
        want, got = 1 + ends.index(min(ends)), answer(work, send, launch, latency, most)
        case = f"work {work}, send {send}, launch {launch}, latency {latency}, at most {most}"
        assert isinstance(got, int), f"{case}: expected an int, got {type(got).__name__}"
        assert got == want, f"{case}: {want} chunks, not {got}"


def check_crossover(answer: Callable) -> None:
    for bus, bus_us, cpu, cpu_us, size in (
        (55, 20, 80, 60, 4096), (55, 20, 40, 60, 4096), (12, 15, 80, 15, 1024), (50, 80, 60, 20, 4096),
        (50, 20, 50, 20, 4096), (50, 30, 50, 20, 4096), (50, 90, 40, 20, 4096),
    ):  # fmt: skip

        def faster(tokens: int, given=(bus, bus_us, cpu, cpu_us, size)) -> bool:
            bus, bus_us, cpu, cpu_us, size = given
            return cpu_us + tokens * size / cpu / 1e3 < bus_us + tokens * size / bus / 1e3

        got = answer(bus, bus_us, cpu, cpu_us, size)
        case = f"bus {bus} GB/s and {bus_us} us, CPU {cpu} GB/s and {cpu_us} us, {size} bytes a token"
        if not faster(10**9):
            assert got is None, f"{case}: for many tokens the CPU is not faster, so None, not {got}"
            continue
        assert isinstance(got, int), f"{case}: expected an int, got {type(got).__name__}"
        assert got >= 1 and faster(got), f"{case}: with {got} tokens the CPU is not faster"
        assert got == 1 or not faster(got - 1), f"{case}: fewer tokens than {got} do"

"""Checks of the exercises of chapter 23, and the judge of its kernels."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def judge(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    case: str = "",
) -> float:
    """`out` (B, H, 1, D) against fp64 of each sequence alone, with its first `lengths[b]` keys: the largest
    error over its budget. AssertionError names the sequence that is wrong."""
    assert isinstance(out, torch.Tensor), f"{case}expected a torch.Tensor, got {type(out).__name__}"
    assert out.shape == q.shape, f"{case}expected an output like q, {tuple(q.shape)}, got {tuple(out.shape)}"
    shares = []
    for b, n in enumerate(lengths):
        mine = slice(b, b + 1)
        verdict = Oracle(q[mine], k[mine, :, :n], v[mine, :, :n]).judge(out[mine])
        assert verdict.ok, f"{case}sequence {b} with {n} keys: {verdict.reason}"
        shares.append(verdict.max_error / verdict.budget.max)
    return max(shares)


def in_pages(cache: torch.Tensor, lengths: Sequence[int], page: int, order: Sequence[int]) -> torch.Tensor:
    """A pool (pages, H_kv, page, D) of NaN, into which the keys of each sequence are put, page by page, in
    this order."""
    _, H_kv, _, D = cache.shape
    pool = torch.full((len(order), H_kv, page, D), float("nan"), dtype=cache.dtype, device=cache.device)
    places = iter(order)
    for b, n in enumerate(lengths):
        for begin in range(0, n, page):
            part = cache[b, :, begin : min(begin + page, n)]
            pool[next(places), :, : part.shape[1]] = part
    return pool


def check_decode_pages(answer: Callable) -> None:
    """`answer(q, k_pages, v_pages, table, lengths, sm_scale)`: pages smaller and larger than a tile."""
    for lengths, heads, heads_kv, page in (
        ((64, 128), 2, 2, 64), ((1, 16, 17, 100), 4, 2, 16), ((63, 200), 4, 1, 128), ((150, 31), 6, 2, 32),
    ):  # fmt: skip
        case = f"lengths {lengths}, H={heads} of {heads_kv}, pages of {page}: "
        shape = Shape(len(lengths), heads, 1, 32, False, heads_kv=heads_kv, seqlen_k=max(lengths))
        q, k, v = make_inputs(shape, device=DEVICE)
        counts = [-(-n // page) for n in lengths]
        order = np.random.default_rng(page).permutation(sum(counts) + 3).tolist()
        table = torch.full((len(lengths), max(counts) + 5), order[-1], dtype=torch.int32)  # a page of NaN
        begin = 0
        for b, count in enumerate(counts):
            table[b, :count] = torch.tensor(order[begin : begin + count])
            begin += count
        pools = [in_pages(cache, lengths, page, order) for cache in (k, v)]
        used = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        with np.errstate(all="ignore"):  # a wrong answer makes the interpreter warn of NaN
            out = answer(q, *pools, table.to(DEVICE), used, 32**-0.5)
        judge(out, q, k, v, lengths, case)


def check_snapped(answer: Callable) -> None:
    """`answer(begins, programs, slack)` -> cuts, against a plain search."""
    rng = np.random.default_rng(0)
    for programs, slack in ((1, 0), (4, 0), (7, 2), (16, 5), (40, 1), (3, 100)):
        begins = np.concatenate([[0], np.cumsum(rng.integers(1, 30, 9))])
        case = f"begins {begins.tolist()}, {programs} programs, slack {slack}"
        want = set()
        for cut in np.unique(np.linspace(0, begins[-1], programs + 1).round().astype(int)):
            near = min(begins, key=lambda begin, cut=cut: abs(begin - cut))
            inside = 0 < cut < begins[-1] and abs(near - cut) <= slack
            want.add(int(near if inside else cut))
        got = [int(x) for x in answer(begins, programs, slack)]
        assert got[0] == 0 and got[-1] == begins[-1], f"{case}: expected 0 to {begins[-1]}, got {got}"
        assert all(a < b for a, b in zip(got, got[1:], strict=False)), f"{case}: an empty share in {got}"
        assert got == sorted(want), f"{case}: expected {sorted(want)}, got {got}"


def check_free_queries(answer: Callable) -> None:
    """`answer(group, tflops, gb_per_s, itemsize)` -> an int."""
    for group, tflops, gb_per_s, itemsize in (
        (4, 989.4, 4800.0, 2), (8, 989.4, 4800.0, 2), (1, 300.0, 2000.0, 2), (4, 989.4, 4800.0, 1),
    ):  # fmt: skip
        want = int(itemsize * tflops * 1e12 // (2 * group * gb_per_s * 1e9))
        got = answer(group, tflops, gb_per_s, itemsize)
        case = f"group {group}, {tflops} TFLOP/s, {gb_per_s} GB/s, {itemsize} bytes"
        assert isinstance(got, int | np.integer), f"{case}: expected an int, got {type(got).__name__}"
        assert got == want, f"{case}: expected {want}, got {got}"

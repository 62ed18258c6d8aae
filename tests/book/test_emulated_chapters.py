"""The kernels of chapters 10 to 13, as their notebooks have them, in the emulator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import product

import pytest
import torch
from chosen import in_turn
from emulated import ORDERS

from attnlib.bench.sources import load_step
from attnlib.emulator import emulated
from attnlib.kernels.reference.dense import attention_fp64

OPTIONS = {
    "10_tma_wgmma": [{"block_n": 64}],
    "11_warp_specialization": [{"stages": 2}, {"stages": 3}],
    "12_overlap": [{"late": False}, {"pin": True}, {"pingpong": True}, {"late": False, "pingpong": True}],
    "13_scheduling": [{"schedule": "grid"}, {"schedule": "static"}, {"section": 3}],
}
"""Variants that the chapters measure."""
CHAPTERS = list(OPTIONS)  # chapters 14 and 15 have tests of their own, of each change


@pytest.fixture
def attention() -> Callable:
    """attention() of a chapter with its kernel in the emulator, by (step, order, seed)."""
    with ExitStack() as stack:

        def of(step: str, order: str = "random", seed: int = 0) -> Callable:
            stack.close()  # the one before
            module = load_step(step)
            kernels = stack.enter_context(emulated(vars(module), order, seed))
            assert list(kernels) == ["flash_forward"]
            return module.attention

        yield of


def check(attention, B: int, H: int, S: int, D: int, causal: bool, sm_scale: float = 0.1, **options) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, S, D, generator=generator).half() for _ in range(3))
    truth, _ = attention_fp64(q, k, v, causal=causal, sm_scale=sm_scale)
    out = attention(q, k, v, causal, sm_scale, **options)
    torch.testing.assert_close(out.double(), truth, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("case", "order"), in_turn(product(CHAPTERS, [True, False]), ORDERS), ids=str)
def test_chapter(case: tuple[str, bool], order: str, attention) -> None:
    step, causal = case
    check(attention(step, order), 1, 3, 200, 64, causal)


@pytest.mark.parametrize(("S", "D"), [(1, 64), (17, 128), (129, 256), (150, 128)])
@pytest.mark.parametrize("step", CHAPTERS)
def test_chapter_lengths_and_widths(step: str, S: int, D: int, attention) -> None:
    check(attention(step), 1, 2, S, D, True)
    check(attention(step, "late"), 2, 1, S, D, False, D**-0.5)


@pytest.mark.parametrize(
    ("step", "options"), [(step, x) for step in CHAPTERS for x in OPTIONS[step]], ids=str
)
def test_chapter_options(step: str, options: dict, attention) -> None:
    for order in ORDERS:
        check(attention(step, order, seed=1), 1, 3, 300, 64, True, **options)


def test_clocks_of_chapter_13(attention) -> None:
    """For each job and consumer a beginning and an end: 24 bits of time, 8 of the SM's number."""
    trace = torch.full((2 * 3 * 4,), -1, dtype=torch.int32)
    check(attention("13_scheduling"), 1, 3, 256, 64, True, trace=trace)
    times, sms = (trace.long() & 0xFFFFFFFF) >> 8, trace & 255
    assert bool((sms == 0).all())
    begin, end = times.view(6, 2, 2).unbind(-1)
    assert bool(((end - begin) % 2**24 < 2**23).all())

"""The kernels of chapters 14 and 15 in the emulator: each change, and mistakes planted in the last kernel."""

from __future__ import annotations

from types import ModuleType

import pytest
from chosen import in_turn
from emulated import ORDERS

from attnlib.bench import sources
from attnlib.bench.oracle import Oracle, make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import changes
from attnlib.book.exercises import judge_gluon
from attnlib.emulator import emulated

STEPS = "14_ring", "15_teaching"
KERNELS = [(step, name) for step in STEPS for name in sources.kernel_sources(sources.notebook_of(step))]
KERNELS.remove(("15_teaching", "14_ring"))  # where chapter 14 ends


def check(module: ModuleType, shape: Shape, order: str, kind: str = "normal", seed: int = 0) -> None:
    tensors = make_inputs(shape, kind, device="cpu")
    with emulated(vars(module), order, seed) as kernels:
        assert list(kernels) == ["flash_forward"]
        out = module.attention(*tensors, shape.causal)
    verdict = Oracle(*tensors, causal=shape.causal).judge(out)
    assert verdict.ok, verdict.reason


@pytest.mark.parametrize(("kernel", "order"), in_turn(KERNELS, ORDERS), ids=str)
def test_each_change(kernel: tuple[str, str], order: str) -> None:
    """The chapters themselves, when they are replayed, judge each in several orders."""
    step, name = kernel
    check(changes.load(step)[name], Shape(1, 3, 200, 64), order)


SHAPES = (1, 64), (17, 128), (129, 256), (300, 128), (520, 64)


@pytest.mark.parametrize(("shape", "step"), in_turn(SHAPES, STEPS[::-1]), ids=str)
def test_lengths_and_widths(shape: tuple[int, int], step: str) -> None:
    S, D = shape
    module = sources.load_step(step)
    check(module, Shape(1, 2, S, D), "random")
    check(module, Shape(2, 1, S, D, causal=False), "late")


@pytest.mark.parametrize("kind", ["large", "sink"])
@pytest.mark.parametrize("step", STEPS)
def test_maxima_that_grow(step: str, kind: str) -> None:
    check(sources.load_step(step), Shape(1, 1, 400, 64), "random", kind)


PLANTED = (
    ("wait(mem.v_full, c, plan)\n        o_token", "o_token", 64),  # the last values
    ("(turn & 1) ^ 1", "turn & 1", 64),  # Q's place before it is free
    ("    mbarrier.arrive(mem.v_full.index(0), count=1)", "    pass", 64),
    ("            fence_async_shared()  # between", "            pass  # between", 128),
    ("    tma.store_wait(0)  # what was sent", "    pass  # what was sent", 64),
    ("W, plan)\n    tma.store_wait(0)", "W, plan)", 64),
    ("128 * plan.warpgroups + 32", "128 * plan.warpgroups", 64),
    ("            release(mem, c + i, plan)", "            pass", 256),  # of a block that is skipped
    ("mem.v, c + i, i_h, blocks - i, plan)", "mem.v, c + i, i_h, blocks - 1 - i, plan)", 128),
    ("    fence_async_shared()\n    tma.async", "    tma.async", 64),
    ("if number == tiles - 1", "if number == tiles", 128),  # the counter is not 0 for the next launch
    ("asked = ask(counter_ptr)\n", "asked = ask(counter_ptr)\n        ask(counter_ptr)\n", 128),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "d"), PLANTED, ids=range(len(PLANTED)))
def test_a_planted_mistake_is_noticed(old: str, new: str, d: int) -> None:
    text = sources.kernel_source(sources.notebook_of("15_teaching"))
    assert old in text
    module = sources.load_source("15_planted", text.replace(old, new))
    with pytest.raises(Exception, match="Race|Deadlock|max error|not finite|overwrites|without|arrive|came"):
        judge_gluon(module.attention, Shape(1, 2 if d == 256 else 5, 200, d))

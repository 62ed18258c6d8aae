"""The schedules, the model and the kernels of chapter 23 on a CPU."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from attnlib.bench import sources
from attnlib.bench.oracle import make_inputs
from attnlib.bench.shapes import Shape
from attnlib.book import lesson

STEP = "23_decoding"
LENGTHS = (1, 64, 65, 200)
judge = lesson.checks(STEP).judge


def chapter(*changes: tuple[str, str]) -> ModuleType:
    """The chapter's open cells as a module, some texts of it replaced."""
    text = "\n\n".join(sources.cells_tagged(sources.notebook_of(STEP), "variant"))
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return sources.load_source("23_open_cells", text)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return chapter()


def run(module: ModuleType, schedule, programs: int = 5, lengths=LENGTHS, heads=(4, 2), D: int = 32) -> float:
    """The error over the budget; what lies behind a length is NaN."""
    shape = Shape(len(lengths), heads[0], 1, D, False, heads_kv=heads[1], seqlen_k=max(lengths))
    q, k, v = make_inputs(shape, device="cpu")
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = float("nan")
    plan = module.plan_of(lengths, heads[1], schedule, programs, "cpu")
    with np.errstate(all="ignore"):
        out = module.attention_decode(q, k, v, plan, D**-0.5)
    return judge(out, q, k, v, lengths)


@pytest.mark.parametrize("programs", [1, 3, 8, 100])
def test_schedules_cover_the_line(module, programs):
    begins = module.begins_of((100, 1, 640), 3)
    assert begins.tolist() == [0, 2, 4, 6, 7, 8, 9, 19, 29, 39]
    for schedule in module.SCHEDULES.values():
        cuts = schedule(begins, programs)
        assert cuts[0] == 0 and cuts[-1] == begins[-1] and (np.diff(cuts) > 0).all()
    shares = np.diff(module.stream_k(begins, programs))
    assert len(shares) == min(programs, begins[-1]) and np.ptp(shares) <= 1
    assert set(begins) <= set(module.fixed_split(begins, programs))
    assert module.fixed_split(begins, 0, 1).tolist() == begins.tolist()


@pytest.mark.parametrize("name", ["one a pair", "fixed", "stream-K"])
def test_kernel(module, name):
    run(module, module.SCHEDULES[name])


@pytest.mark.parametrize("seed", range(4))
def test_any_list_of_cuts_is_right(module, seed):
    rng = np.random.default_rng(seed)

    def anywhere(begins, programs):
        inner = rng.choice(np.arange(1, begins[-1]), rng.integers(0, begins[-1] - 1), replace=False)
        return np.unique([0, *inner, begins[-1]])

    run(module, anywhere, heads=((2, 2), (6, 2), (16, 1), (3, 3))[seed])


def test_one_program_a_pair(module):
    q, k, v = make_inputs(Shape(2, 6, 1, 64, False, heads_kv=2, seqlen_k=100), device="cpu")
    judge(module.one_program_a_pair(q, k, v, 0.125), q, k, v, (100, 100))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(2 * program + (tile == begin)) * 16", "(2 * program) * 16"),
        ("there = first + o_p <= last", "there = first + o_p < last"),
        ("(b_cuts < tl.load(begins + pair + 1))", "(b_cuts <= tl.load(begins + pair + 1))"),
        ("b_w = tl.exp2(b_m - tl.max(b_m, 0))", "b_w = tl.exp2(b_m * 0)"),
        ("tl.load(lengths + pair // H_KV)", "S"),
    ],
)
def test_a_planted_bug_is_noticed(old, new):
    broken = chapter((old, new))
    with pytest.raises(AssertionError, match="error|not finite"):
        run(broken, broken.stream_k)


def test_merging(module):
    rng = np.random.default_rng(0)
    q, (k, v) = 30 * rng.standard_normal(8), rng.standard_normal((2, 40, 8))
    whole, none = module.state_of(q, k, v), module.state_of(q, k[:0], v[:0])
    assert none[0] == -np.inf and none[1] == 0 and not none[2].any()
    for state in (module.merged(whole, none), module.merged(none, whole)):
        assert state[:2] == whole[:2] and np.array_equal(state[2], whole[2])
    parts = [module.state_of(q, k[i : i + 13], v[i : i + 13]) for i in range(0, 40, 13)]
    one = module.merged(module.merged(parts[0], parts[1]), module.merged(parts[2], parts[3]))
    other = module.merged(parts[3], module.merged(parts[1], module.merged(parts[0], parts[2])))
    for got in (one, other):
        assert got[0] == whole[0] and np.allclose(got[2] / got[1], whole[2] / whole[1], rtol=1e-12)
    assert module.merged(none, none)[1] == 0


def test_the_model_of_the_memory(module):
    memory = module.Memory(1000.0, 2.0, launch=3.0, in_flight=200, sms=4, dirty=0)
    begin, end, place = module.simulate(np.array([0, 5]), 100, memory)  # alone: 200 bytes in 2 µs
    assert (begin.tolist(), end.tolist(), place.tolist()) == ([3.0], [3 + 2 + 5.0], [0])
    wide = module.replace(memory, in_flight=10_000)
    _, end, _ = module.simulate(np.arange(0, 21, 5), 100, wide)  # four share 1000 bytes a µs
    assert np.allclose(end, 3 + 2 + 2)
    begin, end, _ = module.simulate(np.arange(0, 26, 5), 100, wide)  # the fifth waits for a place
    assert np.isclose(begin[4], 7) and np.isclose(end[4], 7 + 2 + 0.5)
    _, end, _ = module.simulate(np.arange(0, 21, 5), 100, module.replace(wide, dirty=500))
    assert np.allclose(end, 3 + 2 + 2 + 0.5)  # the first 500 bytes take twice as long


def test_stamps_are_only_for_a_gpu(module):
    """Without them, nothing of the clock is compiled: the interpreter, which has none, runs the kernel."""
    assert "if stamps is not None" in sources.cells_tagged(sources.notebook_of(STEP), "variant")[4]
    assert torch.cuda.is_available() or run(module, module.stream_k) < 1

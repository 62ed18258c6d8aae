"""The function that judges: ratio, noise, word; what old records and missing peers give."""

import dataclasses
import math

import pytest

from attnlib.bench import verdict
from attnlib.bench.records import RecordError, Table
from attnlib.bench.shapes import Shape
from attnlib.bench.verdict import Verdict, judge

SHAPE, OTHER = Shape(4, 32, 4096, 64), Shape(2, 16, 8192, 128)
STEADY = (0.999, 1.0, 1.001, 1.0, 1.0)


def row(impl, ms, rounds=STEADY, shape=SHAPE, **more):
    times = [ms * factor for factor in rounds]
    return {"impl": impl, **shape.to_dict(), "status": "ok", "ms": ms, "round_ms": times, **more}


def table(*rows, control=1.004, name="ladder"):
    """The rows, and the first one once more, `control` times as slow."""
    extra = [] if control is None else [row("control", rows[0]["ms"] * control, control_of=rows[0]["impl"])]
    return Table.of(name, [*rows, *extra], {"gpu": {"name": "GPU"}, "date": "2026-11-22"}, replayed=True)


@pytest.mark.parametrize(
    ("ms", "word", "sentence"),
    [
        (1.072, "faster", "1.072x, noise of this run 1.004: faster"),
        (0.930, "slower", "0.930x, noise of this run 1.004: slower"),
        (1.003, "tie", "1.003x: a tie, the same kernel differs by 1.004 from itself in this run"),
        (0.997, "tie", "0.997x: a tie, the same kernel differs by 1.004 from itself in this run"),
        (12.5, "faster", "12.5x, noise of this run 1.004: faster"),
    ],
)
def test_words(ms, word, sentence):
    found = judge(table(row("new", 1.0), row("old", ms)), SHAPE, "new", "old")
    assert (found.word, found.sentence(), str(found)) == (word, sentence, sentence)
    assert found.ratio == pytest.approx(ms) and found.noise == 1.004


@pytest.mark.parametrize("control", [1.03, 1 / 1.03])
def test_a_difference_inside_the_control_s_is_a_tie_whichever_run_was_slower(control):
    found = judge(table(row("new", 1.0), row("old", 1.02), control=control), SHAPE, "new", "old")
    assert found.word == "tie" and found.noise == 1.03


def test_a_difference_that_the_rounds_do_not_agree_on_is_a_tie():
    """1.02 in the medians, but single rounds between 0.97 and 1.07."""
    old = row("old", 1.02, (0.95, 1.05, 1.0, 0.96, 1.04))
    found = judge(table(row("new", 1.0), old, control=1.0), SHAPE, "new", "old")
    assert found.word == "tie" and found.sentence().startswith("1.020x: a tie, the rounds of this run leave")
    assert found.noise > 1.02


def test_rounds_are_compared_in_pairs():
    """What hits both in a round, as a clock that falls, is no noise of the ratio."""
    drift = (1.0, 1.1, 1.2, 1.3, 1.4)
    found = judge(table(row("new", 1.0, drift), row("old", 1.02, drift), control=1.0), SHAPE, "new", "old")
    assert found.spread == pytest.approx(1.0) and found.word == "faster"


def test_the_spread_is_student_s():
    """Against a calculation by hand: logs of -0.01, 0 and 0.01, two degrees of freedom."""
    rounds = [math.exp(x) for x in (-0.01, 0.0, 0.01)]
    spread = verdict.spread({"round_ms": [1.0, 1.0, 1.0]}, {"round_ms": rounds})
    assert math.log(spread) == pytest.approx(9.92 * 0.01 / math.sqrt(3))
    assert verdict.spread({"round_ms": [1.0]}, {"round_ms": [1.0]}) is None
    many = {"round_ms": [1.0, 1.1] * 10}
    assert verdict.spread({"round_ms": [1.0] * 20}, many) > 1, "more rounds than the table has"


def test_extremes_of_rounds_where_nothing_else_was_kept():
    ours = {"ms": 10.0, "ms_low": 9.0, "ms_high": 10.5}
    theirs = {"ms": 12.0, "ms_low": 11.5, "ms_high": 12.5}
    assert verdict.spread(ours, theirs) == pytest.approx((12.5 / 9.0) / 1.2)  # farther off than 11.5 / 10.5
    assert verdict.spread(theirs, ours) == pytest.approx(verdict.spread(ours, theirs))
    assert verdict.spread(ours, {"ms": 12.0}) is None
    known = {"round_ms": [1.0, 1.0, 1.0]}
    assert verdict.spread(ours | known, theirs | known) == pytest.approx(1.0), "rounds say more"


def test_few_false_verdicts_on_the_same_kernel():
    """Identical kernels with 1% of noise, five rounds: nearly always a tie."""
    import random

    draw = random.Random(0)

    def noisy(impl, **more):
        rounds = [draw.gauss(1.0, 0.01) for _ in range(5)]
        return row(impl, sorted(rounds)[2], rounds, **more) | {"round_ms": rounds}

    words = []
    for _ in range(1000):
        rows = [noisy("a"), noisy("b"), noisy("a (control)", control_of="a")]
        found = Table.of("t", rows, {"gpu": {"name": "GPU"}, "date": "2026-11-22"}, replayed=True)
        words.append(judge(found, SHAPE, "b", "a").word)
    assert words.count("tie") > 980


def test_a_record_without_control_gives_no_word_of_gain():
    new, old = row("new", 1.0), row("old", 1.3)
    found = judge(table(new, old, control=None), SHAPE, "new", "old")
    assert (found.word, found.sentence()) == ("noise not measured", "1.300x, noise not measured")
    for one in (new, old):
        del one["round_ms"]
    found = judge(table(new, old), SHAPE, "new", "old")
    assert found.noise is None and found.cell() == "1.300x, noise not measured"


def test_what_has_no_time_is_not_judged():
    absent = {"impl": "fa3", **SHAPE.to_dict(), "status": "not installed", "reason": "no library"}
    found = judge(table(row("new", 1.0), absent), SHAPE, "new", "fa3")
    assert found.word == "not measured" and found.sentence() == "not measured (fa3: not installed)"
    stopped = row("new (control)", 1.0, control_of="new", status="failed")
    one = Table("t", [row("new", 1.0), row("old", 2.0)], "GPU", "2026-11-22", True, [stopped])
    assert judge(one, SHAPE, "new", "old").word == "noise not measured"


def test_what_was_not_recorded_is_an_error():
    with pytest.raises(RecordError, match="impl='newer'"):
        judge(table(row("new", 1.0)), SHAPE, "newer", "new")
    with pytest.raises(RecordError, match="no rows of B2 H16"):
        verdict.table_rows([table(row("new", 1.0))], "new", ["new"], [OTHER])


def test_the_control_is_that_of_the_shape():
    rows = [row("new", 1.0), row("old", 1.02), row("new", 1.0, shape=OTHER), row("old", 1.02, shape=OTHER)]
    rows += [row("c", 1.05, control_of="new"), row("c", 1.01, shape=OTHER, control_of="new")]
    one = Table.of("t", rows, {"gpu": {"name": "GPU"}, "date": "2026-11-22"}, replayed=True)
    assert judge(one, SHAPE, "new", "old").word == "tie"
    assert judge(one, OTHER, "new", "old").word == "faster"


def test_rows_of_a_table_of_verdicts():
    near = table(row("new", 1.0), row("old", 1.1), row("fa3", 0.9))
    far = table(row("new", 1.0, shape=OTHER), row("old", 1.2, shape=OTHER), row("fa3", 1.0, shape=OTHER))
    far = dataclasses.replace(far, controls=[row("c", 1.0, shape=OTHER, control_of="new")])
    rows, columns = verdict.table_rows([near, far], "new", ["old", "fa3"], [SHAPE, OTHER], str.upper)
    assert list(columns.values()) == ["NEW against", "D = 64", "D = 128"]
    assert [list(one.values()) for one in rows] == [
        ["OLD", "1.100x, noise 1.004: faster", "1.200x, noise 1.000: faster"],
        ["FA3", "0.900x, noise 1.004: slower", "1.000x, noise 1.000: tie"],
    ]
    dense = dataclasses.replace(SHAPE, causal=False)
    both = table(row("new", 1.0), row("old", 1.1), row("new", 1.0, shape=dense), row("old", 1, shape=dense))
    _, columns = verdict.table_rows([both], "new", ["old"], [SHAPE, dense])
    assert list(columns.values())[1:] == [SHAPE.label, dense.label]


def test_noise_is_rounded_up_and_compared_as_it_is_shown():
    """Text and word never disagree: a ratio shown as 1.005 is not "faster" beside a noise shown as 1.005."""
    assert Verdict("a", "b", SHAPE, 1.0049, 1.0041, 1.0).noise == 1.005
    assert Verdict("a", "b", SHAPE, 1.0049, 1.0041, 1.0).word == "tie"
    assert Verdict("a", "b", SHAPE, 1.0061, 1.0041, 1.0).word == "faster"


def test_words_that_nobody_gave_are_not_counted_as_none():
    assert verdict.tally(["faster", "tie", "faster"]) == "faster: 2, slower: 0, tie: 1"
    unknown = "noise not measured"
    assert verdict.tally(["slower", unknown]) == f"faster: 0, slower: 1, tie: 0; {unknown}: 1"
    assert verdict.tally([unknown, unknown]) == f"{unknown}: 2"

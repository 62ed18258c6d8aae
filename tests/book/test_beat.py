"""Exercises that ask to beat a number: a race with a timer that is played."""

import itertools
from dataclasses import replace

import pytest
import torch

from attnlib.bench import records
from attnlib.bench.shapes import Shape
from attnlib.bench.sources import cells_tagged, kernel_source, load_source
from attnlib.book import exercises, lesson
from attnlib.book.exercises import Contest, contest, contest_of, contest_of_gradients, race
from attnlib.kernels.reference.gradients import gradient_fp64

ROUNDS = exercises.BOOK.rounds


def rival(x):
    return x + 1


def quick(x):
    return 1 + x


def wrong(x):
    return x


def gradients(d_out, q, k, v, out, lse, causal, sm_scale):
    dq, dk, dv = gradient_fp64(d_out, q, k, v, causal=causal, sm_scale=sm_scale)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def unwritten(x):
    return torch.empty_like(x)


def played(rival=rival) -> Contest:
    def start():
        def judge(out):
            assert torch.equal(out, torch.ones(4)), "max error 1"

        return (torch.zeros(4),), judge

    return Contest(rival, Shape(1, 1, 128, 64), start, 1.5, "NVIDIA H200, 2026-11-22")


def timer(yours: float, again: float = 1.0, wobble: float = 0.0):
    """A clock that is played: the rival takes 1 ms, `again` the second time; of the answer's windows every
    other one is off by `wobble`."""
    windows = itertools.count()

    def clock(call) -> float:
        call()
        name = call.__defaults__[0]
        if name == "yours":
            return yours * (1 + wobble * (next(windows) % 2))
        return again if name.endswith("again") else 1.0

    return clock


def test_a_faster_answer_passes():
    verdict = race(quick, played(), timer(0.9))
    assert verdict.word == "faster" and verdict.ratio == pytest.approx(1 / 0.9, rel=2e-3)


@pytest.mark.parametrize(
    ("clock", "message"),
    [
        (timer(1.0), "a tie"),
        (timer(1.2), "slower"),
        (timer(0.96, again=1.05), "the same kernel differs"),  # what the rival differs from itself
        (timer(0.9, wobble=0.3), "a tie, the rounds"),
    ],
)
def test_a_tie_and_a_slower_answer_do_not(clock, message):
    with pytest.raises(AssertionError, match=f"right, and .*{message}.* on record 1.5 ms"):
        race(quick, played(), clock)


@pytest.mark.parametrize("answer", [wrong, unwritten])
def test_a_wrong_answer_is_not_timed(answer):
    def clock(call):
        raise AssertionError("timed")

    with pytest.raises(AssertionError, match="max error 1"):
        race(answer, played(), clock)


def test_an_answer_that_breaks_while_it_is_timed_does_not_pass():
    calls = []

    def fades(x):
        calls.append(x)
        return x + 1 if len(calls) == 1 else x

    with pytest.raises(AssertionError, match="max error 1"):
        race(fades, played(), lambda call: 0.5 if call.__defaults__[0] == "yours" else 1.0)


def test_each_round_times_all_three_in_an_order_of_its_own():
    seen = []

    def clock(call):
        seen.append(call.__defaults__[0])
        return 0.5 if seen[-1] == "yours" else 1.0

    race(quick, played(), clock)
    rounds = [tuple(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert len(rounds) == ROUNDS and all(len(set(names)) == 3 for names in rounds) and len(set(rounds)) > 1


def test_without_a_gpu_it_is_not_counted_as_passed(capsys, monkeypatch):
    monkeypatch.setattr(records, "can_measure", lambda: False)
    lesson.beat_contest(quick, played())
    said = capsys.readouterr().out
    assert said.startswith("✘ not yet: only a GPU can tell") and "To beat: 1.5 ms" in said


@pytest.mark.parametrize(
    ("yours", "begins"), [(0.9, "✔ right\n1.11"), (1.0, "✘ not yet: right, and 1.000x: a tie")]
)
def test_with_one_it_says_the_verdict(capsys, monkeypatch, yours, begins):
    monkeypatch.setattr(records, "can_measure", lambda: True)
    timed = exercises.race
    monkeypatch.setattr(exercises, "race", lambda answer, against: timed(answer, against, timer(yours)))
    lesson.beat_contest(quick, played())
    said = capsys.readouterr().out
    assert said.startswith(begins) and "1.5 ms" in said


def test_the_clock_is_that_of_the_contest():
    verdict = race(quick, replace(played(), clock=timer(0.9)))
    assert verdict.word == "faster"


def test_small_calls_are_judged_without_a_gpu(capsys, monkeypatch):
    def small(answer):
        if not torch.equal(answer(torch.zeros(2)), torch.ones(2)):
            raise AssertionError("S = 2 is wrong")

    monkeypatch.setattr(records, "can_measure", lambda: False)
    against = replace(played(), small=small)
    lesson.beat_contest(quick, against)
    said = capsys.readouterr().out
    assert said.startswith("✘ not yet: only a GPU can tell")
    assert "small calls are right. To beat: 1.5 ms" in said
    lesson.beat_contest(wrong, against)
    assert capsys.readouterr().out.startswith("✘ not yet: S = 2 is wrong. To beat: 1.5 ms")


def test_what_small_calls_refuse_is_not_timed(capsys, monkeypatch):
    def small(answer):
        raise AssertionError("S = 2 is wrong")

    monkeypatch.setattr(records, "can_measure", lambda: True)
    monkeypatch.setattr(exercises, "race", lambda *given: pytest.fail("timed"))
    lesson.beat_contest(quick, replace(played(), small=small))
    assert capsys.readouterr().out.startswith("✘ not yet: S = 2 is wrong")


SMALL = {"34_entmax": "judge_short", "35_monarch": "judge_two_rounds", "36_distr": "judge_published"}
"""Chapters whose contest has small calls, and what judges them. Each has a solution."""


def judge_of(chapter: str):
    return getattr(lesson.checks(chapter), SMALL[chapter])


@pytest.mark.parametrize("chapter", SMALL)
def test_the_solution_is_right_on_small_calls(chapter):
    judge_of(chapter)(lesson.solutions(chapter).faster)


@pytest.mark.parametrize(
    ("chapter", "message"),
    [("34_entmax", ""), ("35_monarch", "max error"), ("36_distr", "")],  # 35's waits for exercise 2
)
def test_the_starter_is_the_chapter_s(chapter, message):
    """It is right, or says what is missing; that it is not counted as passed, the replay's test holds."""
    notebook = lesson.notebooks_dir() / f"{chapter}.ipynb"
    texts = [text for text in cells_tagged(notebook, "exercise") if "raise NotImplementedError" not in text]
    source = "import attnlib\n" + "\n\n".join([kernel_source(notebook), *texts])
    starter = load_source(f"starter_{chapter}", source).faster
    if not message:
        judge_of(chapter)(starter)
        return
    with pytest.raises(AssertionError, match=message):
        judge_of(chapter)(starter)


@pytest.mark.parametrize(
    ("chapter", "old", "new", "message"),
    [
        ("34_entmax", "i_m * BLOCK_M // BLOCK_N * BLOCK_N, tl", "(i_m + 1) * BLOCK_M, tl",
             "outside of its tensors"),
        ("34_entmax", "tl.sum(b_ff, 1) - 1.0", "tl.sum(b_ff, 1) - 2.0", "max error"),
        ("34_entmax", "end if edge else cut", "cut if edge else cut", "max error|not finite"),
        ("35_monarch", "((False, q, center), (True, center, out))", "((True, q, out),)", "error"),
        ("35_monarch", "if LAST:\n        b_v", "if not LAST:\n        b_v", "error"),
        ("35_monarch", "/ tl.sum(b_w, 0)[:, None]", "/ tl.sum(b_w, 1)[:, None]", "error"),
        ("36_distr", "(place // GROUP * GROUP)[:, None]", "place[:, None]", "max error"),
        ("36_distr", "+ i_n) * D + o_d)", "+ 0 * i_n) * D + o_d)", "max error"),
        ("36_distr", "attnlib.attention(same", "attnlib.attention(q", "max error"),
    ],
)
def test_a_planted_mistake_is_refused(chapter, old, new, message):
    source = (lesson.notebooks_dir() / "solutions" / f"{chapter}.py").read_text()
    assert old in source
    answer = load_source(f"planted_{chapter}", source.replace(old, new)).faster
    with pytest.raises(AssertionError, match=message):
        judge_of(chapter)(answer)


def test_the_number_to_beat_is_the_record_s():
    found = contest("03_online_softmax", 128)
    row = records.load("03_online_softmax", "ladder").one(impl="03_online_softmax", head_dim=128)
    assert found.ms == row["ms"] and found.shape.head_dim == 128
    assert found.rival is lesson.load_kernel("03_online_softmax").attention
    with pytest.raises(records.RecordError, match="no table 'ladder'"):
        contest("20_backward", 128)
    measured = records.load("03_online_softmax", "ladder")
    gone = replace(measured, rows=[row | {"status": "wrong"} for row in measured.rows])
    with pytest.raises(records.RecordError, match="has no time at .*: wrong"):
        contest_of(rival, found.shape, gone, "03_online_softmax")


def test_a_backward_pass_to_beat_is_judged_by_all_its_gradients(monkeypatch):
    on_a_cpu = {name: getattr(exercises, name) for name in ("make_inputs", "make_gradient")}
    for name, made in on_a_cpu.items():
        monkeypatch.setattr(exercises, name, lambda shape, device, made=made: made(shape, device="cpu"))
    measured = records.load("20_backward", "backward")
    row = measured.one(impl="20_two_passes", head_dim=64)
    small = Shape(1, 2, 70, 64)
    table = replace(measured, rows=[row | small.to_dict()])
    found = contest_of_gradients(gradients, small, table, "20_two_passes")
    assert found.ms == row["ms"]
    assert race(gradients, found, timer(0.9)).word == "faster"
    with pytest.raises(AssertionError, match="S=70, D=64, causal=True: dk: max error"):
        race(lambda *given: [x * (1 + (i == 1)) for i, x in enumerate(gradients(*given))], found, timer(0.9))

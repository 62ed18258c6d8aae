"""The script that draws calls for a GPU: what it draws is valid and varied, and what fails is told."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import decode_cases
import decode_draws
import fp8_draws
import pytest
import random_draws
import torch
from draws import Draw


def test_draws_are_the_same_every_time_and_varied():
    asked = [random_draws.draw(n) for n in range(2000)]
    assert asked == [random_draws.draw(n) for n in range(2000)]
    assert len({random_draws.kind(each) for each in asked}) == 3 * 2 * 4
    assert {each.impl for each in asked} == {None, "triton"}
    assert {each.deterministic for each in asked} == {True, False}
    calls = [each.call for each in asked]
    assert {place for call in calls for place in call.layouts} == set(range(len(random_draws.LAYOUTS)))
    for call in calls:
        assert sum(q for q, _ in call.lengths) > 0 and sum(k for _, k in call.lengths) > 0
        assert 8 <= call.head_dim <= 256 and call.head_dim % 8 == 0
        assert call.varlen or len(call.lengths) == 1
    assert any(0 in pair for call in calls for pair in call.lengths)  # empty sequences


@pytest.mark.parametrize("family", ["decode", "decode_fp8"])
def test_draws_of_decoding_are_valid_and_varied(family):
    draw = random_draws.FAMILIES[family].draw
    calls = [draw(n) for n in range(6000)]
    assert calls == [draw(n) for n in range(6000)]
    for call in calls:
        starts = call.starts or (0,) * len(call.counts)
        assert all(0 <= s <= n <= call.room for s, n in zip(starts, call.counts, strict=True))
        assert 8 <= call.head_dim <= 256 and call.head_dim % 8 == 0 and call.heads % call.kv_heads == 0
        assert call.page is None or call.lengths is not None or call.room % call.page == 0
        # Of many sequences the room behind the longest counts, up to 100 keys and a page.
        assert len(call.counts) * call.room * call.kv_heads * call.head_dim < 3 * decode_draws.LARGEST
    for name in ("dtype", "split", "kind", "causal", "same_launch", "queries"):
        assert len({getattr(call, name) for call in calls}) > 1
    assert {call.page for call in calls} == {None, *decode_draws.PAGES}
    assert any(call.starts for call in calls) and any(call.window for call in calls)
    assert max(sum(call.counts) for call in calls) > 30000
    fp8 = {None} if family == "decode" else {"nothing", "all", "heads", "pairs"}
    assert {call.scales for call in calls} == fp8
    if family == "decode_fp8":
        assert {(call.page, call.scales) for call in calls} == set(product((None, *decode_draws.PAGES), fp8))
        assert "float32" not in {call.dtype for call in calls}


def test_draws_of_fp8_are_valid_and_varied():
    calls = [fp8_draws.draw(n) for n in range(4000)]
    assert calls == [fp8_draws.draw(n) for n in range(4000)]
    for call in calls:
        assert call.heads % call.kv_heads == 0 and 8 <= call.head_dim <= 256 and call.head_dim % 8 == 0
        if call.ends is not None:
            assert len(call.ends[0]) == len(call.ends[1])
            assert all(list(side) == sorted(side) for side in call.ends)
            assert [side[-1] for side in call.ends] == [call.batch * call.rows, call.batch * call.keys]
    for name in ("dtype", "out_dtype", "causal", "return_lse", "prepared", "kind", "mean"):
        assert len({getattr(call, name) for call in calls}) > 1
    assert {call.recipe.scaling for call in calls} == {"block", "head", "tensor"}
    assert {call.recipe.rotate for call in calls} == {call.recipe.center for call in calls} == {True, False}
    assert any(call.sm_scale < 0 for call in calls) and any(call.window for call in calls)
    varlen = [call for call in calls if call.ends is not None]
    assert any(0 in torch.tensor((0, *call.ends[1])).diff().tolist() for call in varlen)


@pytest.mark.parametrize("family", ["decode", "decode_fp8", "fp8"])
def test_few_forms_are_compiled(family):
    """What a draw costs is compiling: consecutive numbers differ in nothing that a kernel depends on."""
    of = random_draws.FAMILIES[family]
    free = {"name", "lengths", "kind", "starts", "window", "seed"}
    if family == "fp8":
        free = {"batch", "heads", "kv_heads", "rows", "keys", "ends", "window", "prepared", "kind", "mean"}
        free |= {"seed", "sm_scale"}
    for start in range(0, 20 * of.together, of.together):
        forms = set()
        for number in range(start, start + of.together):
            call = of.draw(number)
            fixed = [getattr(call, field.name) for field in fields(call) if field.name not in free]
            # window bounds of -1 are those that there are none of
            forms.add((*fixed, call.window is None, (call.sm_scale or 1) < 0, kind_of(call)))
        assert len(forms) == 1, forms


def kind_of(call) -> tuple:
    """Which of its parts a call has."""
    found = [n < 0 for n in call.window] if call.window else []
    return (*found, *[getattr(call, name, 0) is None for name in ("lengths", "starts", "ends")])


def test_processes_take_whole_pieces():
    taken = [list(random_draws.numbers(1000, 100, 16, job, 3)) for job in range(3)]
    assert sorted(sum(taken, [])) == list(range(1000, 1100))
    assert taken[1] == [*range(1016, 1032), *range(1064, 1080)]
    assert list(random_draws.numbers(5, 4, 1)) == [5, 6, 7, 8]


@pytest.mark.parametrize(("family", "kinds"), [("entmax", 13), ("distr", 14), ("monarch", 20), ("masks", 40)])
def test_draws_of_what_is_not_softmax_attention(family, kinds):
    of = random_draws.FAMILIES[family]
    pieces = max(30, kinds)
    drawn = [of.draw(n) for n in range(pieces * of.together)]
    assert drawn == [of.draw(n) for n in range(pieces * of.together)]
    assert kinds <= len({of.kind(each) for each in drawn}) <= pieces
    for start in range(0, len(drawn), of.together):
        piece = drawn[start : start + of.together]
        assert len({of.kind(each).removesuffix(", masked") for each in piece}) == 1
        assert len({each.case for each in piece}) >= of.together - 1


@pytest.mark.parametrize("family", ["entmax", "monarch", "distr"])
def test_a_draw_of_what_is_not_softmax_attention_is_checked(family, device):
    def small(drawn) -> bool:
        case = drawn.case
        sizes = {"entmax": ("queries", "keys"), "monarch": ("tokens",), "distr": ("S",)}[family]
        few = max(getattr(case, name) for name in sizes) < 70
        return few and case.kind == "normal" and drawn.how != "hopper"

    of = random_draws.FAMILIES[family]
    of.check(next(filter(small, map(of.draw, range(10**5)))), device)


@pytest.mark.parametrize("score", [None, "relative", "own", "cap 5 + bias"])
def test_a_draw_of_masks_is_checked(score, device):
    def small(drawn) -> bool:
        call = getattr(drawn.case, "call", drawn.case)
        own, s = getattr(drawn.case, "score", None), call.shape
        named = own is None if score is None else (own or "").startswith(score)
        few = s.batch * s.heads * s.seqlen * s.keys < 2 * 200 * 200 and min(s.seqlen, s.keys) > 20
        return named and few and s.head_dim <= 128 and drawn.impl != "hopper" and call.kind == "normal"

    of = random_draws.FAMILIES["masks"]
    drawn = next(filter(small, map(of.draw, range(10**5))))
    of.check(drawn, device)


SMALL = next(
    draw for draw in map(decode_draws.draw, range(0, 10**6, 16), [True] * 9999)
    if draw.page == 16 and draw.scales == "pairs" and draw.starts and len(draw.counts) == 2
    and draw.room < 200 and draw.heads < 5 and draw.queries < 3 and draw.head_dim <= 64
)  # fmt: skip


def test_a_draw_of_decoding_is_checked(device):
    decode_cases.check(SMALL, device)


@pytest.mark.parametrize("varlen", [False, True])
def test_a_draw_of_fp8_is_checked(monkeypatch, varlen):
    """By the model in place of the kernel; and a wrong output is noticed."""
    some = (fp8_draws.draw(n) for n in range(10**5))
    call = next(
        draw for draw in some
        if (draw.ends is not None) == varlen and draw.rows < 60 and draw.keys < 60 and draw.head_dim <= 64
        and draw.kind == "normal" and draw.keys > 20 and not draw.window and draw.return_lse
    )  # fmt: skip
    fp8_draws.check(call, "cpu", "reference")
    name = "attention_fp8_varlen" if varlen else "attention_fp8"
    right = getattr(fp8_draws, name)

    def wrong(*args, **options):
        out, lse = right(*args, **options)
        return out * 1.25, lse

    monkeypatch.setattr(fp8_draws, name, wrong)
    with pytest.raises(AssertionError, match="is wrong: (RMS|max) error"):
        fp8_draws.check(call, "cpu", "reference")


def test_failures_are_counted_and_told(monkeypatch, capsys):
    def check(call: Draw, device, impl, deterministic):
        if call.seed % 10 == 3:
            raise AssertionError(f"bad {call.seed}")

    monkeypatch.setattr(random_draws, "check", check)
    found = random_draws.run("attention", range(50), "cpu", 60)
    assert found["calls"] == 50 and found["failed"] == 5 and sum(found["kinds"].values()) == 50
    assert [failure["number"] for failure in found["failures"]] == [3, 13, 23, 33, 43]
    assert found["failures"][0]["reason"] == "AssertionError: bad 3"
    said = capsys.readouterr().out
    assert "python tests/gpu/random_draws.py --family attention --only 43  # AssertionError: bad 43" in said
    together = random_draws.joined([found, {**found, "failures": [], "failed": 0, "seconds": 25.0}])
    assert (together["calls"], together["failed"], together["seconds"]) == (100, 5, 25.0)
    said = random_draws.told("attention", together)
    assert "100 calls in 25 s, 4.0 a second, 5 failed" in said
    assert said.endswith("python tests/gpu/random_draws.py --family attention --only 3")
    assert random_draws.run("attention", range(50), "cpu", -1)["calls"] == 0


def test_a_lost_gpu_ends_the_run(monkeypatch):
    def check(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(random_draws, "check", check)
    assert len(random_draws.run("attention", range(50), "cpu", 60)["failures"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert random_draws.main(["--seconds", "1"]) == 2
    assert "need a CUDA GPU" in capsys.readouterr().err

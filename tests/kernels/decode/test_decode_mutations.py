"""The checks catch planted bugs: each edit of the kernels' source fails a case that test_decode runs."""

from __future__ import annotations

import inspect
from dataclasses import replace
from operator import attrgetter

import pytest
from cases import INTERPRETER_REMARKS
from chosen import first_of_each
from decode_cases import CASES, DecodeCase, check
from families import forget_launches
from forward_mutations import NOT_FINITE, WRONG_LSE, WRONG_VALUES, Mutation
from mutations import check_places, load

from attnlib.kernels.decode import decode_kernels, keys, line

pytestmark = INTERPRETER_REMARKS

SMALL = {
    "lengths": DecodeCase("lengths", (0, 1, 17, 290), split="stream_k"),
    "fixed": DecodeCase("fixed", (0, 1, 17, 290), split="fixed"),
    "many": replace(CASES["130 sequences"], name="many"),
    "long": DecodeCase("long", (1000,), heads=2, kv_heads=1, split="stream_k"),
    "long, same launch": DecodeCase("long, same launch", (1000,), heads=2, kv_heads=1, same_launch=True),
    "starts": DecodeCase("starts", (300, 200, 60), starts=(3, 150, 60), split="stream_k"),
    "idle": DecodeCase("idle", (200,), room=2000, heads=2, kv_heads=1, split="stream_k"),
    "parts": DecodeCase("parts", (2, 290), queries=3, split=2),
    "queries": DecodeCase("queries", (2, 200), queries=3, split="none"),
    "window": DecodeCase("window", (60, 400), queries=3, window=(100, 0), split="stream_k"),
    "pages": DecodeCase("pages", (17, 290), page=16, split="stream_k"),
    "rows": DecodeCase("rows", (5, 140), queries=16, heads=9, kv_heads=1, split="none"),
    "same launch": DecodeCase("same launch", (17, 290, 300), split="stream_k", same_launch=True),
    "large": DecodeCase("large", (40, 300), kind="large", split="stream_k"),
    "flipped": DecodeCase("flipped", (40, 300), sm_scale=-0.5, kind="large", split="stream_k"),
    "pages of 48": DecodeCase("pages of 48", (17, 290), page=48, split="stream_k"),
    "FP8": DecodeCase("FP8", (40, 130), scales="pairs", split="stream_k"),
    "FP8 long": DecodeCase("FP8 long", (2500,), heads=2, kv_heads=1, scales="pairs", split="stream_k"),
    "FP8 pages": DecodeCase("FP8 pages", (17, 150), page=16, scales="pairs", split="none"),
    "idle tiles": DecodeCase("idle tiles", (60, 400), split="stream_k", idle_tiles=2),
    "tiles in pages": DecodeCase("tiles in pages", (17, 290), page=128, starts=(0, 130), split="stream_k"),
    "one program": DecodeCase("one program", (17, 590), page=256, split="none"),
    "another layout": DecodeCase("another layout", (40, 300), unlike=True, split="stream_k"),
    "FP8 units": DecodeCase("FP8 units", (900, 1000), page=256, scales="pairs", split="none"),
    "whole": replace(CASES["whole pairs"], name="whole"),
    "a longer pair": CASES["a longer pair"],
    "a longer one of many": replace(CASES["a longer pair of 130 sequences"], name="a longer one of many"),
    "narrow": DecodeCase("narrow", (40, 130), head_dim=40, split="stream_k"),
}
ANY = rf"{WRONG_VALUES}|{NOT_FINITE}"

MUTATIONS = [
    Mutation("the output is not rescaled to a new maximum", "b_acc * alpha[:, None], input_precision",
             "b_acc, input_precision", "lengths", WRONG_VALUES),
    Mutation("the sum is not rescaled", "else b_l * alpha + tl.sum(b_p, 1)", "else b_l + tl.sum(b_p, 1)",
             "lengths", ANY),
    Mutation("no maximum is subtracted", "m_new = tl.maximum(b_m, m_tile)", "m_new = tl.zeros_like(b_m)",
             "large", ANY),
    Mutation("a negative scale tracks the smallest score", "b_s = -b_s if FLIP else b_s", "b_s = b_s",
             "flipped", ANY),
    Mutation("a row without a key subtracts -inf from -inf",
             'm_ref = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row', "m_ref = m_new  # a row",
             "lengths", NOT_FINITE),
    Mutation("a row without a key is divided by 0", "tl.where(empty, 1.0, b_l), b_lse", "b_l, b_lse",
             "lengths",
             NOT_FINITE),
    Mutation("LSE to base 2", "* LN2)", ")", "lengths", WRONG_LSE),
    Mutation("a query sees the next one's key", "last_key, position + right)",
             "last_key, position + right + 1)",
             "queries", WRONG_VALUES),
    Mutation("queries are aligned at the first key", "position = length - S_Q + i_s", "position = i_s",
             "queries", ANY),
    Mutation("keys beyond the length are read", "there = (key >= begin) & (key < end)",
             "there = (key >= begin) & (key < end + 1)", "lengths", NOT_FINITE),
    Mutation("values lie where keys do", "k_row if ALIKE else row_of(key, page, v_page, v_s, PAGE, WIDE)",
             "k_row", "another layout", ANY),
    Mutation("the last key is not seen", "+ (length - 1)", "+ (length - 2)", "lengths", ANY),
    Mutation("a row sees the key before the start", "tl.zeros([BLOCK_M], tl.int32) + start, start",
             "tl.zeros([BLOCK_M], tl.int32) + start - 1, start - 1", "starts", NOT_FINITE),
    Mutation("the start is that of another sequence", "tl.load(starts + o_b, mask",
             "tl.load(starts + 0 * o_b, mask", "starts", ANY, module=line),
    Mutation("tiles before the start are counted", "else start) // BLOCK_N", "else start * 0) // BLOCK_N + 1",
             "starts", ANY, module=line),
    Mutation("the window is a key too wide", "first_key = tl.maximum(position - left, start)",
             "first_key = tl.maximum(position - left - 1, start)",
             "window", WRONG_VALUES),
    Mutation("tiles before the window are counted",
             "(tl.maximum(start, length - S_Q - left) if",
             "(tl.maximum(start, length - S_Q - left) + BLOCK_N if",
             "window", ANY, module=line),
    Mutation("pages are taken in order", "page = next_page\n", "page = key // PAGE\n", "pages", ANY),
    Mutation("the page of the tile before", "page_of(table, j + 1, o_n", "page_of(table, j, o_n", "pages",
             ANY),
    Mutation("the page of the tile before, of all keys", "page_of(table, j + 1, o_n", "page_of(table, j, o_n",
             "one program", ANY),
    Mutation("the place in a page is half of that", "key % PAGE * of_row", "key % PAGE // 2 * of_row",
             "pages", ANY, module=keys),
    Mutation("a page is taken for a power of two", "key % PAGE * of_row", "(key & (PAGE - 1)) * of_row",
             "pages of 48", ANY, module=keys),
    Mutation("pages follow each other", "page * of_page +", "page * PAGE * of_row +", "pages", ANY,
             module=keys),
    Mutation("a tile's page is the next one", "key = tile * BLOCK_N\n", "key = (tile + 1) * BLOCK_N\n",
             "tiles in pages", ANY, module=keys),
    Mutation("a page is not looked up where its tile begins too early", "(key + BLOCK_N > begin)",
             "(key >= begin)", "tiles in pages", ANY, module=keys),
    Mutation("the scale of keys is left out", "b_s *= b_ks", "b_s *= 1.0", "FP8", ANY),
    Mutation("the scale of values is left out", "b_acc *= tl.load(v_scale)", "b_acc *= 1.0", "FP8",
             WRONG_VALUES),
    Mutation("the scale of values is that of another sequence", "v_scale + i_b.to(tl.int64) * v_scale_b",
             "v_scale + 0 * v_scale_b", "FP8", WRONG_VALUES),
    Mutation("the scale of keys is that of another head", "i_kv.to(tl.int64) * k_scale_h", "0 * k_scale_h",
             "FP8", ANY),
    Mutation("the scale of keys is that of another page",
             "page.to(tl.int64) * of_page, mask=there", "0 * page, mask=there", "FP8 pages", ANY,
             module=keys),
    Mutation("and so is that of a tile", "page.to(tl.int64) * of_page, mask=read", "0 * page, mask=read",
             "FP8 units", ANY, module=keys),
    Mutation("the output stays in the unit of the page before", "alpha *= b_unit / larger", "alpha *= 1.0",
             "FP8 units", WRONG_VALUES),
    Mutation("the output keeps its unit", "b_acc *= b_unit", "b_acc *= 1.0", "FP8 pages", ANY),
    Mutation("one more tile is idle", "tiles - IDLE - done)", "tiles - IDLE - 1 - done)", "idle tiles", ANY),
    Mutation("a merge mixes up heads and queries", "i_p // BLOCKS * GROUP + o_r // S_Q, o_r % S_Q",
             "i_p // BLOCKS * GROUP + o_r % GROUP, o_r // GROUP", "parts", WRONG_VALUES),
    Mutation("the second tile of rows is the first", "o_r = i_p % BLOCKS * BLOCK_M + tl.arange",
             "o_r = 0 * BLOCK_M + tl.arange", "rows", NOT_FINITE),
    Mutation("columns beyond D are read",
             "there[:, None] & (o_d < D // NUMBERS)[None, :] if D < BLOCK_D else", "", "narrow", ANY),
    Mutation("the other columns of keys", "b_k, b_k2 = halves", "b_k2, b_k = halves", "FP8", ANY),
    Mutation("the other columns of values", "tl.interleave(b_acc, b_acc2)", "tl.interleave(b_acc2, b_acc)",
             "FP8", WRONG_VALUES),
    Mutation("second columns of keys are left out", "b_s = tl.dot(b_q2, b_k2.T, b_s)", "b_s = b_s", "FP8",
             ANY),
    Mutation("second columns of values are not rescaled", "b_acc2 * alpha[:, None]", "b_acc2",
             "FP8 long", WRONG_VALUES),
    Mutation("sums that are formed late are not rescaled", "b_l * alpha[:, None] + b_p if", "b_l + b_p if",
             "FP8 long", ANY),
    Mutation("the unit of queries is left out", "(qk_scale * b_unit, SMALLEST)",
             "(qk_scale + 0 * b_unit, SMALLEST)", "FP8", ANY),
    Mutation("a merge takes the parts for equally heavy", "weight = tl.math.exp2(p_m - m_ref)",
             "weight = tl.math.exp2(p_m - p_m)", "lengths", ANY),
    Mutation("a merge leaves out the last part", "count, PARTS):\n        o_p",
             "count - 1, PARTS):\n        o_p",
             "fixed", ANY, more=(("there = o_p < count\n", "there = o_p < count - 1\n"),)),
    Mutation("a merge takes the slots in a row", "tl.where(o_p == 0, 0, 2 * o_p - 1) if STREAM_K else o_p",
             "o_p",
             "long", ANY),
    Mutation("both slots of a program are one", "2 * place + (done == 0).to(tl.int32) if STREAM_K",
             "2 * place if STREAM_K", "lengths", ANY),
    Mutation("the owner of a tile is one too late", "longer + (tile - ahead) //",
             "longer + (tile + 1 - ahead) //", "lengths", ANY, module=line),
    Mutation("the programs with one more tile are one fewer", "ahead = longer * (fewer + 1)",
             "ahead = (longer - 1) * (fewer + 1)", "lengths", ANY, module=line),
    Mutation("a share ends a tile early", "share_of(place + 1, total, shares) - tile",
             "share_of(place + 1, total, shares) - tile - 1",
             "lengths", ANY),
    Mutation("a sequence's first tile is not its own", "first * pairs <= tile", "first * pairs < tile",
             "many", ANY, module=line),
    Mutation("sequences beyond the first 128 have no tiles", "total += tl.sum(tiles, 0)",
             "total = tl.sum(tiles, 0)",
             "many", ANY, module=line),
    Mutation("a merge does not know that pairs are whole",
             "tl.where(are_whole(longest, total, WHOLE), 1, count)", "count", "whole", NOT_FINITE),
    Mutation("a program takes the first pair of a sequence",
             "tl.minimum(place // pairs, B - 1), place % pairs",
             "tl.minimum(place // pairs, B - 1), 0 * place",
             "whole", NOT_FINITE),
    Mutation("pairs are split although they are as long", "total // WHOLE >= longest",
             "total // WHOLE > longest", "whole", "a pair is split", module=line),
    Mutation("pairs are whole although one is longer", "total // WHOLE >= longest",
             "total // WHOLE >= longest - 1", "a longer pair", "no pair is split", module=line),
    Mutation("the longest is that of the last 128 sequences",
             "longest = tl.maximum(longest, tl.max(tiles, 0))", "longest = tl.max(tiles, 0)",
              "a longer one of many", "no pair is split", module=line),
    Mutation("the next pair starts where the last one stopped", "done = 0\n        i_p", "i_p", "lengths",
             ANY),
    Mutation("a pair is merged before its last part is there", "== parts - 1:", "== parts - 2:",
             "long, same launch", NOT_FINITE),
    Mutation("a pair is merged by nobody", "== parts - 1:", "== parts:", "same launch", NOT_FINITE),
]  # fmt: skip


@pytest.fixture
def use_source(tmp_path, monkeypatch):
    """A function that makes attention_decode() launch kernels with a bug, or with one in what they call."""

    def use(mutation: Mutation) -> None:
        edited = mutation.module or decode_kernels
        module = load(mutation.of(inspect.getsource(edited)), tmp_path)
        if edited is not decode_kernels:
            for name, function in vars(module).items():
                if hasattr(function, "arg_names") and hasattr(edited, name):
                    monkeypatch.setattr(edited, name, function)
            (tmp_path / "kernels").mkdir()
            module = load(inspect.getsource(decode_kernels), tmp_path / "kernels")
        for name in ("attention_decode", "attention_merge"):
            monkeypatch.setattr(decode_kernels, name, getattr(module, name))
        forget_launches()  # of what was compiled from another source

    yield use
    forget_launches()


@pytest.mark.parametrize("name", SMALL)
def test_the_cases_pass_without_a_bug(name, device):
    check(SMALL[name], device)


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS, decode_kernels)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_mutation(mutation, use_source, device):
    use_source(mutation)
    with pytest.raises(AssertionError, match=f"{mutation.caught_by}.* is wrong: .*({mutation.verdict})"):
        check(SMALL[mutation.caught_by], device)


def test_counters_are_left_at_zero(device):
    """What the programs of one launch counted must not be there for the next."""
    assert "tl.store(arrived + pair, 0)" in inspect.getsource(decode_kernels)
    for _ in range(2):
        check(SMALL["same launch"], device)

"""The checks catch planted bugs: each edit of the kernels' source fails a case that test_monarch runs."""

from __future__ import annotations

import inspect
from operator import attrgetter

import pytest
from cases import INTERPRETER_REMARKS
from chosen import first_of_each
from families import fresh_launches  # noqa: F401  (a fixture)
from monarch_cases import MonarchCase, check
from mutations import Mutation, check_places, load

from attnlib.kernels.monarch import monarch_kernels

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

SMALL = {
    case.name: case
    for case in [
        MonarchCase("rounds", 32, 8, 2, dtype="float32", head_dim=16),
        MonarchCase("short", 29, 8, 2, "post", dtype="float32", head_dim=16),
        MonarchCase("pre", 29, 8, 2, "pre", dtype="float32", head_dim=16),
        MonarchCase("masked", 32, 8, 2, batch=2, masked=0.5, dtype="float32", head_dim=16),
        MonarchCase("tiles", 40, 20, 2, tile=16, heads=1, dtype="float32", head_dim=16),
        MonarchCase("column", 40, 2, 2, tile=16, heads=1, dtype="float32", head_dim=16),
        MonarchCase("low", 32, 8, 1, kind="constant", sm_scale=60.0, dtype="float32", heads=1, head_dim=16),
        MonarchCase("far", 64, 16, 2, kind="large", heads=1, head_dim=16),
        MonarchCase("negative", 32, 8, 2, sm_scale=-0.3, dtype="float32", heads=1, head_dim=16),
        MonarchCase("narrow", 20, 4, 2, dtype="float32", heads=1, head_dim=24),
        MonarchCase("groups", 16, 4, 1, batch=2, heads=4, kv_heads=2, dtype="float32", head_dim=16),
    ]
}
VALUES, INFINITE = r"max error .* \(budget", "values are not finite"
ANY = f"{VALUES}|{INFINITE}"

MUTATIONS = [
    Mutation("no entropy", "b_entropy = b_max + tl.math.log2(b_sum) - at_mean",
             "b_entropy = tl.where(b_sum > 0, 0.0, -1e30) + 0 * at_mean", "rounds", VALUES),
    Mutation("the LSE instead of the entropy", "tl.math.log2(b_sum) - at_mean  #", "tl.math.log2(b_sum)  #",
             "rounds", ANY),
    Mutation("the entropy to base e", "b_max + tl.math.log2(b_sum) - at_mean",
             "(b_max + tl.math.log2(b_sum) - at_mean) * 0.6931", "rounds", VALUES),
    Mutation("the maximum is clamped from below", "ref = tl.where(new == float(\"-inf\"), 0.0, new)\n    b_w",
             "ref = tl.maximum(new, 0.0)\n    b_w", "low", ANY),
    Mutation("a row without a key subtracts -inf from -inf",
             "ref = tl.where(new == float(\"-inf\"), 0.0, new)\n    b_w", "ref = new\n    b_w", "masked",
             ANY),
    Mutation("a row without a key is divided by 0", "tl.where(b_sum == 0.0, 1.0, b_sum)", "b_sum", "masked",
             ANY),
    Mutation("sums are not rescaled", "b_sum * alpha + tl.sum(b_w, 1)", "b_sum + tl.sum(b_w, 1)", "tiles",
             VALUES),
    Mutation("means are not rescaled", "b_x, b_acc * alpha[:, None], input", "b_x, b_acc, input", "tiles",
             VALUES),
    Mutation("keys of the next block", "live = (o_k < BLOCK) & live if BLOCK % COLUMNS else live",
             "live = live", "short", ANY),
    Mutation("keys past the end", "b_x if WHOLE else tl.where(live[None, :], b_x,",
             "tl.where((o_k < BLOCK)[None, :], b_x,", "short", ANY),
    Mutation("queries before the beginning", "counts = counts & (b_lse >", "counts = (o_r < M) & (b_lse >",
             "pre", ANY),
    Mutation("token 0 stands at place 0", "token = place - first", "token = place", "pre", ANY),
    Mutation("tokens that do not count are keys", "b_x if WHOLE else tl.where(live[None, :], b_x,",
             "tl.where((o_k < BLOCK)[None, :], b_x,", "masked", ANY),
    Mutation("the mask of another sequence",
             "mask = None if mask_ptr is None else mask_ptr + i_b * mask_b\n\n    o_p",
             "mask = mask_ptr\n\n    o_p", "masked", ANY),
    Mutation("their queries count", "counts = counts & (b_lse >", "counts = (o_r < M) & (b_lse >",
             "masked", ANY),
    Mutation("queries of the first round change their sign", "b_c = -b_c if FLIP else b_c", "b_c = b_c",
             "negative", VALUES),
    Mutation("centers are of the wrong sign", "        b_q = -b_q if FLIP else b_q\n        b_x",
             "        b_x", "negative", VALUES),
    Mutation("the second round starts from the queries again", "    if FIRST:", "    if True:", "rounds",
             VALUES),
    Mutation("rows of L are not divided by their sums", "b_x - tl.where(counts, b_lse, 0.0)[None, :]", "b_x",
             "rounds", VALUES),
    Mutation("weights of a block that hardly anyone looks at underflow", "b_w, alpha, b_max, b_sum = "
             "_weights(b_x, b_max, b_sum)\n        b_center", "b_w, alpha, b_max, b_sum = tl.math.exp2(b_x), "
             "b_sum * 0 + 1, b_max, b_sum + tl.sum(tl.math.exp2(b_x), 1)\n        b_center", "far", ANY),
    Mutation("L is normalized along the wrong axis", "tl.sum(tl.math.exp2(b_x - ref[None, :]), 0)",
             "tl.sum(tl.math.exp2(b_x - ref[None, :]), 0) * 0 + 1", "rounds", VALUES),
    Mutation("the LSE of another column", "b_lse = tl.load(lse_ptr + head + o_r * BLOCK + i_p, mask",
             "b_lse = tl.load(lse_ptr + head + o_r * BLOCK, mask", "column", ANY),
    Mutation("a column's mean keys are another's", "place = o_m * BLOCK + i_p  # [COLUMNS]",
             "place = o_m * BLOCK  # [COLUMNS]", "rounds", VALUES),
    Mutation("blocks that are not there", "mask=o_m < M, other=float(\"-inf\"))  # [COLUMNS]",
             "mask=o_m < M, other=0.0)  # [COLUMNS]", "rounds", VALUES),
    Mutation("heads of a group", "i_h // GROUP * k_h", "i_h % GROUP * k_h", "groups", VALUES),
    Mutation("the second tile of a block is the first",
             "o_p = tl.program_id(0) % TILES * ROWS", "o_p = 0 * ROWS", "tiles", ANY),
    Mutation("columns past the head dimension are read", "there[:, None] & (o_d < D)[None, :] if D < BLOCK_D "
             "else there[:, None]\n    offset = row.to(tl.int64 if WIDE else tl.int32) * stride  # [rows]\n"
             "    return", "there[:, None]\n    offset = row.to(tl.int64 if WIDE else tl.int32) * stride\n"
             "    return", "narrow", ANY),
]  # fmt: skip


def test_the_kernels_pass(device: str) -> None:
    for case in SMALL.values():
        check(case, device)


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS, monarch_kernels)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_is_caught(
    mutation: Mutation, device: str, tmp_path, monkeypatch: pytest.MonkeyPatch, fresh_launches
) -> None:
    mutant = load(mutation.of(inspect.getsource(monarch_kernels)), tmp_path)
    for name in ("r_step", "l_step", "center_step"):
        monkeypatch.setattr(monarch_kernels, name, getattr(mutant, name))
    with pytest.raises(AssertionError, match=rf"is wrong: ({mutation.verdict})"):
        check(SMALL[mutation.caught_by], device)

"""The checks catch planted bugs: each edit of the portable kernel's source fails a case like those that
test_bsfa runs."""

from __future__ import annotations

import inspect
import math
from operator import attrgetter

import pytest
from bsfa_cases import BsfaCase, check
from cases import INTERPRETER_REMARKS
from chosen import first_of_each
from families import fresh_launches  # noqa: F401  (a fixture)
from mutations import Mutation, check_places, load

from attnlib.kernels.bsfa import forward_kernel

pytestmark = [*INTERPRETER_REMARKS, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

SMALL = {
    case.name: case
    for case in [
        BsfaCase("causal", 70, 300, heads=1),
        BsfaCase("numbers", 70, 650, 3.6, heads=2),
        BsfaCase("limits", 130, 650, "2", heads=2),
        BsfaCase("dense", 20, 300, heads=1, causal=False),
        BsfaCase("all", 100, 400, -math.inf, heads=1),
        BsfaCase("none", 100, 400, math.inf, heads=1),
        BsfaCase("rows", 70, 400, -1e-4, kind="positive", heads=1, sm_scale=-1e-4),
        BsfaCase("empty", 130, 65, heads=1),
        BsfaCase("groups", 20, 260, batch=2, heads=4, kv_heads=2),
        BsfaCase("steep", 20, 400, -math.inf, heads=1, kind="large", sm_scale=1.0),
    ]
}
VALUES, INFINITE = r"max error .*", r".*not finite.*|.*NaN.*"
MISSING, MORE, OTHER = "a block is missing", "a block too many", "other bits"
ANY = f"{VALUES}|{INFINITE}|{MISSING}|{MORE}|{OTHER}|.*"

MUTATIONS = [
    Mutation("blocks below the threshold are kept", "if not (top < limit):", "if not (top > limit):",
             "causal", f"{MISSING}|{MORE}"),
    Mutation("all are kept", "if not (top < limit):", "if not (top < -float(\"inf\")):", "causal", MORE),
    Mutation("the threshold to base e", "    limit *= LOG2_E\n", "", "numbers", MORE),
    Mutation("the maximum of the first row", "tl.max(tl.where(o_m < S_q, b_top, float(\"-inf\")), 0) * qk",
             "tl.max(tl.where(o_m == start, b_top, float(\"-inf\")), 0) * qk", "numbers", MISSING),
    Mutation("rows that are not there decide", "tl.max(tl.where(o_m < S_q, b_top, float(\"-inf\")), 0) * qk",
             "tl.max(b_top, 0) * qk", "rows", MORE),
    Mutation("the threshold of the first row block", "tl.minimum(i_m, limits - 1) * limit_m",
             "0 * limit_m", "limits", f"{MISSING}|{MORE}"),
    Mutation("the threshold of another head", "i_h * limit_h", "0 * limit_h", "limits",
             f"{MISSING}|{MORE}"),
    Mutation("scores do not change their sign", "return -b_s if FLIP else b_s", "return b_s", "rows", ANY),
    Mutation("a query may lose its last key", "tl.maximum(_last_key(start, S_q, S_k, CAUSAL), 0) // KEYS  #",
             "tl.maximum(_last_key(start + 63, S_q, S_k, CAUSAL), 0) // KEYS  #", "none", ANY),
    Mutation("keys after the last one", "o_n[None, :] <= (last_key", "o_n[None, :] <= 1 + (last_key",
             "causal", VALUES),
    Mutation("values of the next block", "b_v = load_tile(desc_v, at, block * KEYS",
             "b_v = load_tile(desc_v, at, block * KEYS + KEYS", "all", ANY),
    Mutation("the sum is not rescaled", "b_l * alpha + tl.sum(b_p, 1)", "b_l + tl.sum(b_p, 1)", "steep",
             ANY),
    Mutation("the output is not rescaled", "b_acc * alpha[:, None]", "b_acc", "steep", ANY),
    Mutation("a skipped block moves the maximum",
             "            )\n            if kept_ptr is not None:\n                tl.store(kept_ptr + "
             "kept_at + block, 1)\n",
             "            )\n            if kept_ptr is not None:\n                "
             "tl.store(kept_ptr + kept_at + block, 1)\n        else:\n            b_m += 1.0\n", "causal",
             ANY),
    Mutation("a row that sees nothing is divided by 0", "b_acc / tl.where(empty, 1.0, b_l)[:, None]",
             "b_acc / b_l[:, None]", "empty", ANY),
    Mutation("the LSE to base 2", "(b_m + tl.math.log2(b_l)) * LN2", "b_m + tl.math.log2(b_l)", "causal",
             ANY),
    Mutation("keys of another group", "at = (i_b, i_h // GROUP)", "at = (i_b, i_h % GROUP)", "groups", ANY),
    Mutation("another block is told of", "tl.store(kept_ptr + kept_at + block, 1)",
             "tl.store(kept_ptr + kept_at + i, 1)", "causal", f"{MISSING}|{MORE}"),
]  # fmt: skip


def test_the_kernel_passes(device: str) -> None:
    for case in SMALL.values():
        check(case, device)


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS, forward_kernel)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_is_caught(
    mutation: Mutation, device: str, tmp_path, monkeypatch: pytest.MonkeyPatch, fresh_launches
) -> None:
    mutant = load(mutation.of(inspect.getsource(forward_kernel)), tmp_path)
    monkeypatch.setattr(forward_kernel, "attention_bsfa_forward", mutant.attention_bsfa_forward)
    with pytest.raises(AssertionError, match=rf"is wrong: ({mutation.verdict})"):
        check(SMALL[mutation.caught_by], device)

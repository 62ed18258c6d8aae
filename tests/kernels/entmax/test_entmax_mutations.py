"""The checks catch planted bugs: each edit of the kernels' source fails a case like those of test_entmax."""

from __future__ import annotations

import inspect
from dataclasses import replace
from operator import attrgetter

import pytest
from cases import INTERPRETER_REMARKS
from chosen import first_of_each
from entmax_cases import CASES, EntmaxCase, check, forget_launches
from mutations import Mutation, check_places, load

from attnlib.kernels.entmax import backward_kernels, forward_kernel, list_kernels

pytestmark = INTERPRETER_REMARKS

SMALL = {
    "causal": CASES["causal"],
    "dense": replace(CASES["dense"], queries=20, keys=100, head_dim=16),
    "forward": EntmaxCase("forward", 20, 130, head_dim=16, backward=False),
    "float32": EntmaxCase("float32", 20, 70, head_dim=16, dtype="float32", backward=False),
    "groups": EntmaxCase("groups", 70, 70, heads=2, head_dim=16),
    "heads": EntmaxCase("heads", 70, 130, heads=2, kv_heads=2, head_dim=16, spread=3.0),
    "any": EntmaxCase("any", 20, 70, alpha=1.25, head_dim=16, dtype="float32"),
    "flipped": EntmaxCase("flipped", 20, 70, sm_scale=-0.5, head_dim=16, spread=3.0),
    "no room": CASES["no room"],
    "long": EntmaxCase("long", 10, 2300, head_dim=16, spread=0.3, backward=False),
    "diagonal": EntmaxCase("diagonal", 128, 128, causal=True, spread=0.2, head_dim=16, backward=False),
    "whole": EntmaxCase("whole", 64, 64, head_dim=16, spread=3.0),
    "tail": EntmaxCase("tail", 220, 64, head_dim=16, spread=0.3),
    "packed": EntmaxCase(
        "packed", 0, 0, heads=2, causal=True, head_dim=16, spread=2.0, lengths=((20, 30), (5, 70), (70, 100))
    ),
}
VALUES = "(out|dq|dk|dv): (max error|values are not finite)"
TAU = "tau: "
ANY = f"{VALUES}|{TAU}"

_L, _F, _B = list_kernels, forward_kernel, backward_kernels
MUTATIONS = [
    Mutation("the bound is above the threshold", "b_bound = b_max + b_t - ", "b_bound = b_max + 0.5 * b_t - ",
             "forward", ANY, module=_L),
    Mutation("a negative scale is taken for a positive one", "b_q = -b_q\n    b_top", "b_q = b_q\n    b_top",
             "flipped", ANY, module=_L),
    Mutation("flags of the flipped scores are missing", "b_q = -b_q\n    rows_ptr", "b_q = b_q\n    rows_ptr",
             "flipped", ANY, module=_L),
    Mutation("queries of a thread change places", "(1 << 8 * tl.arange(0, 2)).to(tl.float32)[:, None], 3)",
             "(1 << 7 * tl.arange(0, 2)).to(tl.float32)[:, None], 3)", "whole", VALUES, module=_L),
    Mutation("scores just above the bound have no flag", "b_above = b_st - b_limit[None, :]",
             "b_above = b_st - b_limit[None, :] - 1.0", "forward", ANY, module=_L),
    Mutation("a block of keys is flagged by its last tile", "b_all |= tl.where(place == 0, 0, b_begun)",
             "b_all |= tl.where(place == 0, 0, 0)", "float32", ANY, module=_L),
    Mutation("the last 32 queries of a block are lost", "words + 1, high)", "words + 1, 0 * high)", "heads",
             VALUES, module=_L),
    Mutation("numbers begin anew at each step", "b_number = o_w[:, None]", "b_number = (o_w - word)[:, None]",
             "long", ANY, module=_L),
    Mutation("steps after the first begin anew", "count += tl.sum(b_count, 0)", "count = tl.sum(b_count, 0)",
             "long", ANY, module=_L),
    Mutation("the middle is the end of the block", "edge = tl.maximum(tl.minimum(start + 1 + shift",
             "edge = tl.maximum(tl.minimum(start + ROWS + shift", "diagonal", ANY, module=_L),
    Mutation("queries before the diagonal are taken for whole", "start + ROWS - 1 - shift",
             "start - shift", "causal", VALUES, module=_L),
    Mutation("a list without room starts at the first query", "tl.where(full, first, -1)",
             "tl.where(full, 0, -1)", "no room", VALUES, module=_L),
    Mutation("one step of the solver", "steps < MOST_STEPS", "steps < 1", "float32", ANY, module=_F),
    Mutation("no step of the solver", "steps < MOST_STEPS", "steps < 0", "forward", ANY, module=_F),
    Mutation("a list's last tile goes on", "at + tl.arange(0, BLOCK) < count, b_index, NO_KEY",
             "at + tl.arange(0, BLOCK) < count + 64, b_index, NO_KEY", "forward", ANY, module=_F),
    Mutation("weights are not scaled to a sum of 1", "b_acc / tl.where(sees, b_l, 1.0)[:, None]",
             "b_acc * 1.01", "forward", VALUES, module=_F),
    Mutation("the guess is taken for delta in dQ", "b_dq -= b_rest[:, None] * b_u_k", "b_dq -= 0.0 * b_u_k",
             "dense", "dq: ", module=_B),
    Mutation("the guess is taken for delta in dK", "b_guess + b_rest,", "b_guess,", "dense", "dk: ",
             module=_B),
    Mutation("thresholds and deltas change places", "b_t, b_delta = tl.split", "b_delta, b_t = tl.split",
             "dense", "d[kv]: ", module=_B),
    Mutation("delta is not subtracted from dK", "(b_dpt - b_delta[None, :])", "b_dpt", "dense", "dk: ",
             module=_B),
    Mutation("dV by u", "b_dv = tl.dot(b_pt.to", "b_dv = tl.dot(b_ut.to", "dense", "dv: ", module=_B),
    Mutation("dK without the scale", "b_dk * sm_scale", "b_dk", "dense", "dk: ", module=_B),
    Mutation("dQ without the scale", "b_dq * sm_scale", "b_dq", "dense", "dq: ", module=_B),
    Mutation("every head of a group has the first one's list", "(i_b * H + i_h).to(tl.int64) * blocks",
             "(i_b * H + i_kv * GROUP).to(tl.int64) * blocks", "groups", "d[kv]: ", module=_B),
    Mutation("the masked rest begins where it should end", "at += tl.where(i < gap, 0, skipped)",
             "at += tl.where(i < gap, 0, 0)", "tail", "d[kv]: ", module=_B),
    Mutation("dO of the first sequence", "do_ptr += (end_q - S_q)", "do_ptr += 0 * (end_q - S_q)", "packed",
             "d[kv]: ", module=_B),
    Mutation("thresholds of the first sequence in dK", "rows_ptr += 2 * (end_q - S_q)",
             "rows_ptr += 0 * (end_q - S_q)", "packed", "d[kv]: ", module=_B),
    Mutation("queries past the list's end", "seen = (at + tl.arange(0, BLOCK_M) < count)[None, :]",
             "seen = (at + tl.arange(0, BLOCK_M) < count + 64)[None, :]", "dense", "d[kv]: ", module=_B),
]  # fmt: skip
KERNELS = {
    list_kernels: ("entmax_bound", "entmax_flags", "entmax_lists"),
    forward_kernel: ("attention_entmax_forward",),
    backward_kernels: ("attention_entmax_dq", "attention_entmax_dkdv"),
}


@pytest.fixture
def use_source(tmp_path, monkeypatch):
    """A function that makes attention_entmax() launch the kernels of a module's changed source text."""

    def use(module, source: str) -> None:
        mutant = load(source, tmp_path)
        for name in KERNELS[module]:
            monkeypatch.setattr(module, name, getattr(mutant, name))
        forget_launches()

    yield use
    forget_launches()


@pytest.mark.parametrize("name", [name for name, case in SMALL.items() if case is not CASES.get(name)])
def test_the_cases_pass_without_a_bug(name, device):
    check(SMALL[name], device)


def test_each_bug_has_its_place() -> None:
    check_places(MUTATIONS)


@pytest.mark.parametrize("mutation", first_of_each(MUTATIONS, attrgetter("kind")), ids=str)
def test_mutation(mutation, use_source, device):
    use_source(mutation.module, mutation.of(inspect.getsource(mutation.module)))
    with pytest.raises(AssertionError, match=f"{mutation.caught_by} is wrong: ({mutation.verdict})"):
        check(SMALL[mutation.caught_by], device)

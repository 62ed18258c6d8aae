"""The checks catch planted bugs: each edit of the backward kernels' source fails a case of test_backward."""

from __future__ import annotations

import inspect

import pytest
from backward_cases import CASES, check_backward
from cases import INTERPRETER_REMARKS
from families import fresh_launches  # noqa: F401  (a fixture)
from mutations import Mutation, load

from attnlib.kernels.common import preprocess
from attnlib.kernels.portable import backward_kernels

pytestmark = INTERPRETER_REMARKS

KERNELS = {
    preprocess: ("attention_backward_preprocess",),
    backward_kernels: ("attention_backward_dkdv", "attention_backward_dq"),
}
CAUSAL = "B1 H1 S129 D64 causal fp16"


MUTATIONS = [
    Mutation("delta is forgotten in dK", "b_dst = b_pt * (b_dpt - b_delta[None, :])", "b_dst = b_pt * b_dpt",
             CAUSAL, "dk"),
    Mutation("delta is forgotten in dQ", "b_ds = b_p * (b_dp - b_delta[:, None])", "b_ds = b_p * b_dp",
             CAUSAL, "dq"),
    Mutation("dK is not scaled", "b_dk * sm_scale", "b_dk", CAUSAL, "dk"),
    Mutation("dQ is not scaled", "b_dq * sm_scale", "b_dq", CAUSAL, "dq"),
    Mutation("a query sees the next key", "o_n <= o_m + diagonal", "o_n <= o_m + diagonal + 1", CAUSAL,
             "d[qkv]"),
    Mutation("the left bound is one too far", "o_n >= o_m + lowest", "o_n >= o_m + lowest - 1",
             "B1 H1 S150x170 D64 dense fp16 window 40,20", "d[qkv]"),
    Mutation("the query tiles on the diagonal are left out", "at_rows, first, full, o_n",
             "at_rows, full, full, o_n", CAUSAL, "d[kv]"),
    Mutation("tail keys count in dQ, where exp2(-LSE) overflows", "seen = seen & (o_n < S_k)", "seen = seen",
             "B1 H1 S64x1 D64 dense fp16 large scale 2", "dq"),
    Mutation("a query without a key keeps its LSE of -inf",
             'tl.where(b_lse == float("-inf"), float("inf"), b_lse * LOG2_E)', "b_lse * LOG2_E",
             "B1 H1 S129x63 D64 causal fp16", "d[qkv]"),
    Mutation("only the first head of a group adds to dK and dV", "for g in range(GROUP)", "for g in range(1)",
             "B2 H4/2 S40x70 D64 causal fp16", "d[kv]"),
    Mutation("a negative scale is taken for a positive one", "b_st = -b_st", "b_st = b_st",
             "B1 H1 S70x90 D64 causal fp16 scale -0.1", "d[kv]"),
    Mutation("the LSE stays in base e", "b_lse * LOG2_E", "b_lse", CAUSAL, "d[qkv]"),
]  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_is_caught(
    mutation: Mutation, device: str, tmp_path, monkeypatch: pytest.MonkeyPatch, fresh_launches
) -> None:
    modules = [x for x in (backward_kernels, preprocess) if mutation.right in inspect.getsource(x)]
    assert len(modules) == 1, "the kernels have changed; change the mutation with them"
    [module] = modules
    mutant = load(mutation.of(inspect.getsource(module)), tmp_path)
    for name in KERNELS[module]:
        monkeypatch.setattr(module, name, getattr(mutant, name))
    wrong = rf"is wrong: {mutation.verdict}: max error"
    with pytest.raises(AssertionError, match=wrong):
        check_backward(CASES[mutation.caught_by], device)

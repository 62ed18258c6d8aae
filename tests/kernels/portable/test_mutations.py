"""The checks catch planted bugs: each edit of the kernel's source fails a case that test_attention runs."""

from __future__ import annotations

import inspect

import pytest
from cases import CASES, INTERPRETER_REMARKS, check_forward
from forward_mutations import NOT_FINITE, WRONG_LSE, WRONG_VALUES, Mutation, use_source  # noqa: F401  (a fixture)

from attnlib.kernels.portable import forward_kernel

pytestmark = INTERPRETER_REMARKS

# None may reach memory that is not its own: descriptors drop what lies outside of their tensor, the LSE is
# written through a plain pointer, so the heads of a mutant have to stay below B * H.
MUTATIONS = [
    Mutation(
        "the sum and the output are not rescaled to a new maximum",
        "alpha = tl.math.exp2(b_m - m_ref)",
        "alpha = tl.zeros_like(b_m) + 1.0",
        "B1 H2 S129 D64 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "the sum is rescaled, the output is not",
        "b_acc = b_acc * alpha[:, None]",
        "b_acc = b_acc",
        "B1 H2 S129 D64 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "no maximum is subtracted",
        "m_new = tl.maximum(b_m, tl.max(b_s, 1) * qk_scale)",
        "m_new = tl.zeros_like(b_m)",
        "B1 H2 S129 D64 causal fp16 large", NOT_FINITE,
    ),
    Mutation(
        "a row whose first tile is all masked subtracts -inf from -inf",
        'm_ref = tl.where(m_new == float("-inf"), 0.0, m_new)',
        "m_ref = m_new",
        "B1 H2 S129x63 D64 causal fp16", NOT_FINITE,
    ),
    Mutation(
        "a query does not see its own key",
        "o_n[None, :] <= (last_key - first)",
        "o_n[None, :] < (last_key - first)",
        "B1 H2 S129 D64 causal fp16", NOT_FINITE,
    ),
    Mutation(
        "a query sees the next key",
        "tl.minimum(o_m + diagonal, S_k - 1)",
        "tl.minimum(o_m + diagonal + 1, S_k - 1)",
        "B1 H2 S129 D64 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "the diagonal is aligned at the top left",
        "shift = S_k - S_q",
        "shift = 0",
        "B1 H2 S17x200 D64 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "tiles that the diagonal crosses are not masked",
        "unmasked = shared // BLOCK_N",
        "unmasked = last + 1",
        "B1 H2 S17x200 D64 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "keys past the end take part in a call that is not causal",
        "MASKED: tl.constexpr = DIAGONAL or HAS_TAIL or",
        "MASKED: tl.constexpr = DIAGONAL or",
        "B1 H2 S129 D64 dense fp16", WRONG_VALUES,
    ),
    Mutation(
        "the mask does not know where the keys end",
        "(S_k - 1)",
        "(S_k - 1 + BLOCK_N)",
        "B1 H2 S129 D64 dense fp16", WRONG_VALUES,
    ),
    Mutation(
        "the keys of the tail are skipped",
        "visible = S_k\n",
        "visible = S_k // BLOCK_N * BLOCK_N\n",
        "B1 H2 S129 D64 dense fp16", WRONG_VALUES,
    ),
    Mutation(
        "keys upwards: the last tile is skipped",
        "end = last + 1",
        "end = last",
        "B1 H2/1 S33x70 D256 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "keys upwards: the tiles without a mask are visited again with one",
        "first = unmasked",
        "first = 0",
        "B1 H2/1 S33x70 D256 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "one loop: it has no mask",
        'MASKED or ORDER == "two loops", EMPTY_ROWS',
        'ORDER == "two loops", EMPTY_ROWS',
        "B1 H2/1 S33x70 D128 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "the values of the last tile are skipped",
        "b_acc = _add_values(b_acc, b_p, alpha, desc_v, at_kv, 0, BLOCK_N, BLOCK_D, PRECISION)",
        "b_acc = b_acc",
        "B1 H2 S129 D64 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "the scale is 1% off",
        "start = i_m * BLOCK_M",
        "start = i_m * BLOCK_M\n    qk_scale = qk_scale * 1.01",
        "B1 H2 S129 D64 causal fp32", WRONG_VALUES,
    ),
    Mutation(
        "base e in place of base 2",
        "b_p = tl.math.exp2(",
        "b_p = tl.math.exp(",
        "B1 H2 S129 D64 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "the sign of a negative scale is lost",
        "return -b_s if FLIP else b_s",
        "return b_s",
        "B1 H2 S90x70 D64 causal fp16 scale -2", WRONG_VALUES,
    ),
    Mutation(
        "query heads are dealt out to key/value heads in turn, not in groups",
        "i_kv = i_h // GROUP",
        "i_kv = i_h % (H // GROUP)",
        "B2 H4/2 S70 D64 causal fp16", WRONG_VALUES,
    ),
    Mutation(
        "every section of the launch order computes the heads of the first",
        "i_h = section * SECTION + place % SECTION",
        "i_h = place % SECTION",
        "B2 H6/1 S70 D64 causal fp16", NOT_FINITE,
    ),
    Mutation(
        "the first row block is not written",
        "desc_o.store([i_b, i_h, start, 0]",
        "desc_o.store([i_b, i_h, tl.where(start == 0, S_q, start), 0]",
        "B1 H2 S129 D64 causal fp16", NOT_FINITE,
    ),
    Mutation(
        "the output is NaN",
        "b_o.to(desc_o.dtype)",
        'tl.where(o_m[:, None] == S_q - 1, float("nan"), b_o).to(desc_o.dtype)',
        "B1 H2 S17 D64 causal fp16", NOT_FINITE,
    ),
    Mutation(
        "a row with nothing to attend to divides 0 by 0",
        "b_l = tl.where(b_l == 0.0, 1.0, b_l)",
        "b_l = tl.where(b_l < 0.0, 1.0, b_l)",
        "B1 H2 S129x63 D64 causal fp16", NOT_FINITE,
    ),
    Mutation(
        "a row with nothing to attend to has the LSE of a row that sees one key of score 0",
        'float("-inf"), b_lse)',
        "0.0, b_lse)",
        "B1 H2 S129x63 D64 causal fp16", "LSE: expected -inf",
    ),
    Mutation(
        "the LSE is in base 2",
        "(b_m + tl.math.log2(b_l)) * LN2",
        "b_m + tl.math.log2(b_l)",
        "B1 H2 S17 D64 causal fp16", WRONG_LSE,
    ),
    Mutation(
        "the LSE lacks the maximum",
        "(b_m + tl.math.log2(b_l)) * LN2",
        "tl.math.log2(b_l) * LN2",
        "B1 H2 S17 D64 causal fp16", WRONG_LSE,
    ),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_planted_bug_is_caught(mutation, use_source, device):
    use_source(mutation.of(inspect.getsource(forward_kernel)))
    with pytest.raises(AssertionError, match=f"is wrong: .*{mutation.verdict}"):
        check_forward(CASES[mutation.caught_by], device)


@pytest.mark.parametrize("label", sorted({mutation.caught_by for mutation in MUTATIONS}))
def test_the_kernel_without_a_bug_passes_the_same_way(label, use_source, device):
    use_source(inspect.getsource(forward_kernel))
    check_forward(CASES[label], device)
